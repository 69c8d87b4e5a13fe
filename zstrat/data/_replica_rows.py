"""Which rows of which batch each replica of a worker gets, by TF's rules.

Batches arrive one after the other, each so many rows long; a cutter says for one
worker, step by step, which rows its replicas take. A *span* is rows of one batch; a
*piece* is the spans of one replica, in order; a *cut* is a step: one piece for each
replica of the worker.

- A batch size that is known, and a policy other than DATA: rows are taken as if they
  came one by one, in batches of the sizes of `batch_sizes_for_worker`, again and again
  (`BySizes`).
- An unknown batch size, or rows that are sharded (DATA, also to one worker, as by
  TF): each batch is cut separately into as many pieces as there are replicas of all
  workers (`ByPieces`); into even ones if it has the rows that all are promised to have,
  as TF, which traces functions, knows them then.

Law of the file: no data, no I/O; every row is in exactly one piece, in the order of
arrival, and every piece has a span, though it may be an empty one, so that code that
obeys knows what nothing looks like.
"""

from __future__ import annotations

import abc
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple, final

from ._options import AutoShardPolicy

if TYPE_CHECKING:
    from collections.abc import Sequence


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
    """The reader: worker ``index`` of ``count``, with ``replicas`` replicas each."""

    count: int = 1
    index: int = 0
    replicas: int = 1


def batch_sizes_for_worker(
    global_batch: int, workers: int, replicas_per_worker: int, worker: int
) -> list[int]:
    """Returns the sizes of the batches that a worker takes, one for a replica after the
    other.

    There are as many as replicas of all workers, as even as can be, the first ones
    larger, beginning with those of the worker's own replicas: so the replicas of all
    workers take a global batch together in every step, and the worker takes one in as
    many steps as there are workers.
    """
    count = workers * replicas_per_worker
    base, more = divmod(global_batch, count)
    sizes = [base + (number < more) for number in range(count)]
    # Turned, so that the larger ones go to other replicas in each step: over as many
    # steps as there are workers all read as many rows.
    start = worker * replicas_per_worker
    return sizes[start:] + sizes[:start]


class Cutter(abc.ABC):
    """Cuts batches for one worker. Subclasses are final."""

    @abc.abstractmethod
    def take(self, rows: int) -> list[Cut]:
        """Returns the steps that are complete when a batch of ``rows`` has arrived."""

    @abc.abstractmethod
    def finish(self) -> list[Cut]:
        """Returns what is left after the last batch: at most one step."""

    @property
    @abc.abstractmethod
    def oldest(self) -> int:
        """The first batch that a later cut may name."""


def cutter(
    batch_size: int | None,
    policy: AutoShardPolicy,
    worker: Worker,
    promised: int | None = None,
) -> Cutter:
    """Returns the cutter for a worker, under a policy as `sharing_policy` gives it.

    Args:
        batch_size: Rows of a global batch, None if nobody knows. Of 0, as a source may
            say whose rows are empty, no steps can be made; it counts as unknown.
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
    """Pieces of given sizes, again and again, wherever batches begin and end."""

    def __init__(self, sizes: Sequence[int], replicas: int) -> None:
        self._sizes: Final = itertools.cycle(sizes)
        self._replicas: Final = replicas
        self._number = -1
        self._whole: list[Piece] = []
        """The pieces of the next step that are complete."""
        self._begun: list[Span] = []
        self._missing = next(self._sizes)
        """Rows that the piece that was begun still needs."""

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
    """Each batch cut by itself, as evenly as equal pieces allow: the last ones may be
    shorter, down to no rows at all.

    Args:
        is_shared: The workers read the same batches, and worker ``i`` takes pieces
            ``i``, ``i + workers``, …; else the batches are its own.
        promised: Batches of this size are cut as `batch_sizes_for_worker` says.
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
            return []
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
        size = -(-rows // self._pieces)
        return [min(rows, size * n) for n in range(self._pieces + 1)]

    def finish(self) -> list[Cut]:
        return []
