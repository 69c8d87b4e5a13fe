"""The words between a group and what carries its calls out.

A group numbers, describes and watches calls; an *engine* moves the bytes. There are two
kinds of engine. The message path (`zstrat.collectives.group._traffic`) takes every
call, runs on the loop, and has any number under way. A `CollectiveEngine`, as memory
that one host shares, blocks the thread that runs it, and runs one call after the other.

The law that makes ranks agree without a word: which engine takes a call, and in which
order, depends only on what is alike on all ranks (kind, dtype, sizes, tag, options).

Who finds the guilty: an engine knows ranks, not tasks. It raises `Overdue` or
`Differs`; the group asks those ranks and makes the error that a person reads.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from ._reduction import ReduceOp

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np


class CallKind(enum.Enum):
    """What is called, by the name of the method of a group."""

    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    BROADCAST = "broadcast"
    ALL_TO_ALL = "all_to_all"
    BARRIER = "barrier"


@dataclass(frozen=True, slots=True, eq=False)
class CollectiveCall:
    """One collective as this rank calls it, on flat arrays of one dtype.

    ``source`` and ``target`` are one-dimensional, C-contiguous, in the machine's byte
    order; they are one and the same memory (an in-place call) or do not overlap. The
    engine writes nothing but ``target``, and keeps neither when the call is over.

    ==============  =====================  ===============  ========================
    kind            source                 target           sizes, in elements
    ==============  =====================  ===============  ========================
    ALL_REDUCE      [n]                    [n]              ()
    BROADCAST       [n], read at the root  [n]              ()
    ALL_GATHER      [sizes[rank]]          [sum(sizes)]     per rank
    REDUCE_SCATTER  [sum(sizes)]           [sizes[rank]]    per rank
    ALL_TO_ALL      [sum(row of rank)]     [sum(column)]    row i, column j: i to j,
                                                            row by row
    BARRIER         [0]                    [0]              ()
    ==============  =====================  ===============  ========================
    """

    key: int
    """Names the call on the wire; the same on all ranks, unique in the generation."""
    kind: CallKind
    source: np.ndarray
    target: np.ndarray
    about: int
    """Digest of ``words``, 32 bits: ranks that call different things find it out."""
    words: str
    """What is called, for people: ``all_reduce(float32[10, 3], SUM)``."""
    deadline: float
    """`time.monotonic` at which an engine that still waits raises `Overdue`."""
    timeout: float
    """Seconds that the caller gave it, of which the last are for finding out why it
    takes so long (`margin_of`): the deadline comes before."""
    op: ReduceOp = ReduceOp.SUM
    root: int = 0
    """Among the ranks that take part."""
    sizes: tuple[int, ...] = ()
    tag: str | None = None
    """Tagged calls may be made in another order on another rank."""
    compression: str | None = None
    place: str = ""
    """Names the same array, or bucket of arrays, each time that it is reduced."""
    algorithm: str | None = None
    is_frozen: bool = False
    """Nobody changes ``source``, not even after the call."""
    whole: int | None = None
    """Key of the call that this one is a part of: who waits is asked about that."""


def margin_of(timeout: float) -> float:
    """Seconds between a call's deadline and the error of its caller."""
    return min(1.0, timeout / 4)


class Overdue(Exception):
    """The deadline has come; ``ranks`` are those that this one waits for."""

    def __init__(self, ranks: Sequence[int]) -> None:
        super().__init__(tuple(ranks))
        self.ranks = tuple(ranks)


class Differs(Exception):
    """A rank calls something else under the same number."""

    def __init__(self, rank: int, about: int) -> None:
        super().__init__(rank, about)
        self.rank, self.about = rank, about


class ConnectionEnded(Exception):
    """Nothing can come any more from a rank that this one waits for."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self.rank = rank


class CollectiveEngine(Protocol):
    """Carries calls out in the thread that asks, one after the other."""

    def takes(self, call: CollectiveCall) -> bool:
        """Whether `run` can carry it out; looks only at what all ranks have alike."""

    def run(self, call: CollectiveCall) -> None:
        """Blocks until ``target`` holds the result.

        Never called by two threads at a time; on all ranks in the same order.

        Raises:
            Overdue: The call's deadline has come. Nothing more is run after it.
            Differs: Another rank calls something else. Nothing more is run after it.
            ConnectionEnded: A rank cannot be heard any more. The same.
            Exception: What `abort` was given.
        """

    def waits(self) -> Sequence[int]:
        """Ranks that `run` waits for just now; from any thread, takes no lock."""

    def waited(self) -> Mapping[int, float]:
        """Seconds that `run` has waited in memory so far, by the rank for which; from
        any thread. What an engine has by messages is counted there."""

    def abort(self, error: Exception) -> None:
        """`run`, the one under way and all later ones, raises this error at once.

        From any thread; the first error stays. Ranks of the same host that wait in
        `run` are told by their own groups, but may be woken by this one, too.
        """

    def close(self) -> None:
        """Lets go of all memory. No `run` is under way."""


class Started(Protocol):
    """A call among some ranks that is under way."""

    def wait(self) -> None:
        """Blocks until its ``target`` holds the result.

        Raises:
            Overdue, Differs, Exception: As `CollectiveEngine.run`.
        """


class Between(Protocol):
    """The path of messages, as an engine uses it to reach other hosts."""

    def start(self, call: CollectiveCall, ranks: Sequence[int], part: int) -> Started:
        """Starts ``call`` among ``ranks`` (ascending, this one among them) alone.

        Several parts of one call may be under way; ``part`` numbers them, alike on all
        of ``ranks``. ``source`` must not change before `Started.wait` returns.
        """
