"""The options of a dataset, and which rows of a batch each replica gets, by TF's rules.

The user sets options, which have TF's names, attribute by attribute. They are copied
when they are attached to a dataset: later changes of the object have no effect. The
context of a dataset function is a plain value: the caller sets the real index and
number of the worker, and the function shards or seeds its data by them.

Batches arrive one after the other, each with some number of rows. For one worker, a
cutter decides step by step which rows the worker's replicas take. A *span* is some
consecutive rows of one batch; a *piece* is the spans of one replica, in order; a *cut*
is one step: one piece for each replica of the worker.

- If the batch size is known, and the policy is not DATA: rows are taken as if they
  arrived one by one, in batches of the sizes of `batch_sizes_for_worker`, which repeat
  (`BySizes`).
- If the batch size is unknown, or rows are sharded (DATA, also with one worker, as in
  TF): each batch is divided separately into as many pieces as there are replicas of all
  workers (`ByPieces`). The pieces are even if the batch has the number of rows that all
  batches are promised to have; TF, which traces functions, then knows the sizes.

Law of the file: no data, no I/O. Every row is in exactly one piece, in the order of
arrival. Every piece has a span, though it may be an empty one, so that the code that
slices batches knows the dtype and shape of an empty piece.
"""

from __future__ import annotations

import abc
import enum
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple, final

if TYPE_CHECKING:
    from collections.abc import Sequence


SHARD_HINT: Final = -1
"""``dataset.shard(SHARD_HINT, SHARD_HINT)`` marks the place where a strategy shards the
dataset, under `AutoShardPolicy.HINT`."""


class AutoShardPolicy(enum.IntEnum):
    """How a dataset that all workers have is divided among them.

    AUTO is FILE if the dataset is read from files, at least one for each worker, and
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
    """``options.experimental_distribute``: the options for several workers."""

    _policy: AutoShardPolicy | None

    def __init__(self, auto_shard_policy: AutoShardPolicy | None = None) -> None:
        self._policy = None
        if auto_shard_policy is not None:
            self.auto_shard_policy = auto_shard_policy

    @property
    def auto_shard_policy(self) -> AutoShardPolicy:
        """The policy, AUTO unless it was set.

        Raises:
            TypeError: The policy is set to something other than an `AutoShardPolicy`.
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
        """The policy if one was set, else None."""
        return self._policy

    def __repr__(self) -> str:
        return f"DistributeOptions(auto_shard_policy={self.auto_shard_policy.name})"


@final
@dataclass(init=False, slots=True)
class Options:
    """The options of a dataset, for `Dataset.with_options`:

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
    """The index of an input pipeline, and the number of pipelines of the cluster.

    For a per-worker dataset ``num_input_pipelines`` is the number of workers and
    ``input_pipeline_id`` the index of this worker, from 0; ``num_replicas_in_sync`` is
    the number of devices that share one batch.
    """

    num_input_pipelines: int = 1
    input_pipeline_id: int = 0
    num_replicas_in_sync: int = 1

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """Returns the number of rows of a global batch that one device gets.

        Raises:
            ValueError: The batch cannot be divided evenly.
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


class Span(NamedTuple):
    """Rows ``start`` to ``stop`` of the ``batch``-th batch, counted from 0."""

    batch: int
    start: int
    stop: int


Piece = tuple[Span, ...]
Cut = tuple[Piece, ...]


@final
@dataclass(frozen=True, slots=True)
class Worker:
    """The worker that reads: worker ``index`` of ``count``, with ``replicas`` replicas
    each."""

    count: int = 1
    index: int = 0
    replicas: int = 1


def batch_sizes_for_worker(
    global_batch: int, workers: int, replicas_per_worker: int, worker: int
) -> list[int]:
    """Returns the sizes of the batches that a worker takes, one for a replica after the
    other.

    There are as many sizes as replicas of all workers, as equal as possible, the larger
    ones first, beginning with those of the worker's own replicas. So the replicas of
    all workers together take a global batch in every step, and the worker takes a
    global batch in as many steps as there are workers.
    """
    count = workers * replicas_per_worker
    base, more = divmod(global_batch, count)
    sizes = [base + (number < more) for number in range(count)]
    # Turned, so that the larger ones go to other replicas in each step: over as many
    # steps as there are workers all read as many rows.
    start = worker * replicas_per_worker
    return sizes[start:] + sizes[:start]


class Cutter(abc.ABC):
    """Decides which rows of arriving batches the replicas of one worker take.
    Subclasses are final."""

    @abc.abstractmethod
    def take(self, rows: int) -> list[Cut]:
        """Returns the steps (one cut each) that are complete when a batch of ``rows``
        rows has arrived."""

    @abc.abstractmethod
    def finish(self) -> list[Cut]:
        """Returns the rest after the last batch, which is at most one step."""

    @property
    @abc.abstractmethod
    def oldest(self) -> int:
        """The number of the oldest batch that a later cut may refer to."""


def cutter(
    batch_size: int | None,
    policy: AutoShardPolicy,
    worker: Worker,
    promised: int | None = None,
) -> Cutter:
    """Returns the cutter for a worker, under a policy that `sharing_policy` returned.

    Args:
        batch_size: Rows of a global batch, None if unknown. 0, which a source of empty
            rows may give, counts as unknown, because no steps could be made of it.
        promised: Number of rows that all batches should have; a function may change it.
    """
    # All workers read all batches, so each can be cut alone, and whatever its size. TF
    # makes no difference for one worker: its last batch is shared by all replicas, too.
    if policy is AutoShardPolicy.DATA:
        return ByPieces(worker, is_shared=True)
    if not batch_size:
        return ByPieces(worker, is_shared=False, promised=promised)
    sizes = batch_sizes_for_worker(
        batch_size, worker.count, worker.replicas, worker.index
    )
    return BySizes(sizes, worker.replicas)


@final
class BySizes(Cutter):
    """Takes pieces of given sizes, which repeat, wherever batches begin and end."""

    def __init__(self, sizes: Sequence[int], replicas: int) -> None:
        self._sizes: Final = itertools.cycle(sizes)
        self._replicas: Final = replicas
        self._number = -1
        self._whole: list[Piece] = []
        """The complete pieces of the next step."""
        self._begun: list[Span] = []
        """The spans of the piece that is not complete yet."""
        self._missing = next(self._sizes)
        """Rows that the incomplete piece still needs."""

    @property
    def oldest(self) -> int:
        waiting = [*(piece[0] for piece in self._whole[:1]), *self._begun[:1]]
        return waiting[0].batch if waiting else self._number + 1

    def take(self, rows: int) -> list[Cut]:
        self._number += 1
        cuts: list[Cut] = []
        at = 0
        while at < rows:
            stop = min(rows, at + self._missing)
            self._begun.append(Span(self._number, at, stop))
            self._missing -= stop - at
            at = stop
            if not self._missing:
                self._close_piece(cuts)
        return cuts

    def finish(self) -> list[Cut]:
        pieces = [*self._whole, tuple(self._begun)] if self._begun else [*self._whole]
        self._whole, self._begun = [], []
        # Pieces of no rows, of a batch smaller than its replicas, do not make a step.
        if not any(span.stop > span.start for piece in pieces for span in piece):
            return []
        last = pieces[-1][-1]
        # No rows, but of a batch that is there: a replica without any still knows what
        # they look like.
        nothing = (Span(last.batch, last.stop, last.stop),)
        return [(*pieces, *[nothing] * (self._replicas - len(pieces)))]

    def _close_piece(self, cuts: list[Cut]) -> None:
        self._whole.append(tuple(self._begun))
        self._begun, self._missing = [], next(self._sizes)
        if len(self._whole) == self._replicas:
            cuts.append(tuple(self._whole))
            self._whole = []


@final
class ByPieces(Cutter):
    """Divides each batch separately into equal pieces; the last ones may be shorter,
    down to no rows at all.

    Args:
        is_shared: The workers read the same batches, and worker ``i`` takes pieces
            ``i``, ``i + workers``, …; otherwise the batches are the worker's own.
        promised: Batches with this number of rows are divided as
            `batch_sizes_for_worker` says.
    """

    def __init__(
        self, worker: Worker, *, is_shared: bool, promised: int | None = None
    ) -> None:
        self._worker: Final = worker
        self._promised: Final = promised
        self._pieces: Final = worker.count * worker.replicas
        self._mine: Final = (
            slice(worker.index, None, worker.count) if is_shared else slice(None)
        )
        self._replicas: Final = worker.replicas
        self._number = -1

    @property
    def oldest(self) -> int:
        return self._number + 1

    def take(self, rows: int) -> list[Cut]:
        self._number += 1
        if not rows:
            return []  # counted, as spans name batches by number, and no step
        pieces = [
            (Span(self._number, start, stop),)
            for start, stop in itertools.pairwise(self._ends(rows))
        ][self._mine]
        return [
            tuple(pieces[n : n + self._replicas])
            for n in range(0, len(pieces), self._replicas)
        ]

    def _ends(self, rows: int) -> list[int]:
        if rows == self._promised:
            count, replicas = self._worker.count, self._worker.replicas
            sizes = batch_sizes_for_worker(rows, count, replicas, self._worker.index)
            return [*itertools.accumulate(sizes, initial=0)]
        # Rounded up, as TF cuts: 5 rows for 4 replicas are 2, 2, 1, 0.
        size = -(-rows // self._pieces)
        return [min(rows, size * n) for n in range(self._pieces + 1)]

    def finish(self) -> list[Cut]:
        return []
