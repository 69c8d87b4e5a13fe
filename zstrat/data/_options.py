"""How a dataset is shared out among workers, and what its function learns of them.

Options, in TF's words, are written by the user, attribute by attribute, and copied when
they are attached to a dataset: what is changed afterwards changes nothing.

The context of a dataset function is a plain value: the caller fills it with the real
index and count of the worker, and the function shards or seeds its data by them.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final, final

SHARD_HINT: Final = -1
"""``dataset.shard(SHARD_HINT, SHARD_HINT)`` marks the place where a strategy shards the
dataset, under `AutoShardPolicy.HINT`."""


class AutoShardPolicy(enum.IntEnum):
    """The way a dataset is sharded among workers that all have it.

    AUTO is FILE where the dataset is read from files, at least one for each worker, and
    DATA otherwise. FILE: file i goes to worker ``i % workers``. DATA: every worker
    reads everything and keeps its share. HINT: the dataset says where it is sharded
    (`SHARD_HINT`). OFF: every worker reads everything and keeps all of it.
    """

    OFF = -1
    AUTO = 0
    FILE = 1
    DATA = 2
    HINT = 3


@final
@dataclass(init=False, repr=False, slots=True)
class DistributeOptions:
    """``options.experimental_distribute``: the part about several workers."""

    _policy: AutoShardPolicy | None

    def __init__(self, auto_shard_policy: AutoShardPolicy | None = None) -> None:
        self._policy = None
        if auto_shard_policy is not None:
            self.auto_shard_policy = auto_shard_policy

    @property
    def auto_shard_policy(self) -> AutoShardPolicy:
        """AUTO unless it was set.

        Raises:
            TypeError: It is set to something else than an `AutoShardPolicy`.
        """
        return AutoShardPolicy.AUTO if self._policy is None else self._policy

    @auto_shard_policy.setter
    def auto_shard_policy(self, policy: AutoShardPolicy) -> None:
        if not isinstance(policy, AutoShardPolicy):
            raise TypeError(
                "auto_shard_policy must be a zs.data.AutoShardPolicy "
                f"({', '.join(AutoShardPolicy.__members__)}), got {policy!r}"
            )
        self._policy = policy

    @property
    def chosen(self) -> AutoShardPolicy | None:
        """The policy if one was set."""
        return self._policy

    def __repr__(self) -> str:
        return f"DistributeOptions(auto_shard_policy={self.auto_shard_policy.name})"


@final
@dataclass(init=False, slots=True)
class Options:
    """What `Dataset.with_options` takes:

    options = zs.data.Options()
    options.experimental_distribute.auto_shard_policy = zs.data.AutoShardPolicy.OFF
    dataset = dataset.with_options(options)
    """

    experimental_distribute: DistributeOptions

    def __init__(self, auto_shard_policy: AutoShardPolicy | None = None) -> None:
        self.experimental_distribute = DistributeOptions(auto_shard_policy)

    @property
    def auto_shard_policy(self) -> AutoShardPolicy:
        """The ``experimental_distribute.auto_shard_policy`` of these options."""
        return self.experimental_distribute.auto_shard_policy

    @auto_shard_policy.setter
    def auto_shard_policy(self, policy: AutoShardPolicy) -> None:
        self.experimental_distribute.auto_shard_policy = policy

    def merge(self, options: Options) -> Options:
        """Merges these options with others; where both are set, ``options`` wins."""
        theirs = options.experimental_distribute.chosen
        ours = self.experimental_distribute.chosen
        return Options(ours if theirs is None else theirs)


@dataclass(frozen=True, slots=True)
class InputContext:
    """Which of the input pipelines of a cluster this one is.

    For a per-worker dataset ``num_input_pipelines`` is the number of workers and
    ``input_pipeline_id`` the index of this worker, from 0; ``num_replicas_in_sync`` is
    the number of devices that share one batch.
    """

    num_input_pipelines: int = 1
    input_pipeline_id: int = 0
    num_replicas_in_sync: int = 1

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """Returns the part of a batch that one device gets.

        Raises:
            ValueError: The batch cannot be shared out evenly.
        """
        if global_batch_size % self.num_replicas_in_sync != 0:
            raise ValueError(
                f"The `global_batch_size` {global_batch_size!r} is not divisible by "
                f"`num_replicas_in_sync` {self.num_replicas_in_sync!r}: choose a "
                f"multiple of {self.num_replicas_in_sync!r}"
            )
        return global_batch_size // self.num_replicas_in_sync

    def __str__(self) -> str:
        return (
            f"InputContext(input pipeline id {self.input_pipeline_id}, "
            f"total: {self.num_input_pipelines})"
        )
