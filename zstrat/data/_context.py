"""What a dataset function is told about the worker that runs it.

A plain value: who calls fills it with the real index and count of the worker, and the
function shards or seeds its data by them.
"""

from __future__ import annotations

from dataclasses import dataclass


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
        """The part of a batch that one device gets.

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
