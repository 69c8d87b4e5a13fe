"""The interface between a group and the engines that run its calls.

A group numbers, describes and watches calls; an *engine* moves the bytes. There are two
kinds. Messages (`zstrat.collectives.group._traffic`) can carry every call, any number
at a time, on the loop. A `CollectiveEngine`, such as shared memory of one host, blocks
the thread that runs it, and runs one call after the other.

The law by which ranks agree without communication: which engine runs a call, and in
which order, depends only on what is equal on all ranks (kind, dtype, sizes, tag,
options).

*Blame.* An engine knows ranks, not tasks. It raises `Overdue` or `Differs`; the group
asks those ranks, and makes the error for the user.
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
    """The kind of a call, by the name of the group's method."""

    ALL_REDUCE = "all_reduce"
    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    BROADCAST = "broadcast"
    ALL_TO_ALL = "all_to_all"
    BARRIER = "barrier"


@dataclass(frozen=True, slots=True, eq=False)
class CollectiveCall:
    """One collective call of this rank, on flat arrays of one dtype.

    ``source`` and ``target`` are one-dimensional, C-contiguous, in the machine's byte
    order; they are the same memory (an in-place call) or do not overlap. The engine
    writes only to ``target``, and keeps neither after the call.

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
    """Digest of ``words``, 32 bits, by which ranks notice different calls."""
    words: str
    """Description of the call: ``all_reduce(float32[10, 3], SUM)``."""
    deadline: float
    """`time.monotonic` at which an engine that still waits raises `Overdue`."""
    timeout: float
    """Seconds that the caller allows. The deadline is earlier by `margin_of`, to find
    out why the call takes so long."""
    op: ReduceOp = ReduceOp.SUM
    root: int = 0
    """Index among the ranks that take part."""
    sizes: tuple[int, ...] = ()
    tag: str | None = None
    """Tagged calls may be made in another order on another rank."""
    compression: str | None = None
    place: str = ""
    """Name of the array, or bucket of arrays, the same at each reduction of it."""
    algorithm: str | None = None
    is_frozen: bool = False
    """``source`` is never changed, not even after the call."""
    whole: int | None = None
    """Key of the call that this one is a part of; inquiries are about that one."""


def margin_of(timeout: float) -> float:
    """Returns the seconds between a call's deadline and the error of its caller."""
    return min(1.0, timeout / 4)


class Overdue(Exception):
    """The deadline of a call has passed; ``ranks`` are those that it waits for."""

    def __init__(self, ranks: Sequence[int]) -> None:
        super().__init__(tuple(ranks))
        self.ranks = tuple(ranks)


class Differs(Exception):
    """A rank makes another call under the same number."""

    def __init__(self, rank: int, about: int) -> None:
        super().__init__(rank, about)
        self.rank, self.about = rank, about


class ConnectionEnded(Exception):
    """The connection to a rank that this one waits for has ended."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self.rank = rank


class CollectiveEngine(Protocol):
    """Runs calls in the calling thread, one after the other."""

    def takes(self, call: CollectiveCall) -> bool:
        """Returns whether `run` supports the call; depends only on what is equal on all
        ranks."""

    def run(self, call: CollectiveCall) -> None:
        """Blocks until ``target`` holds the result.

        Never called by two threads at a time; on all ranks in the same order.

        Raises:
            Overdue: The deadline of the call has passed.
            Differs: Another rank makes another call.
            ConnectionEnded: The connection to a rank has ended.
            Exception: The error given to `abort`.

        After any of these nothing more is run.
        """

    def waits(self) -> Sequence[int]:
        """Returns the ranks that `run` waits for now. From any thread; takes no
        lock."""

    def waited(self) -> Mapping[int, float]:
        """Returns the seconds that `run` has waited in memory so far, by rank waited
        for. From any thread. Waits for messages are counted by the traffic."""

    def abort(self, error: Exception) -> None:
        """Makes `run`, the present and later ones, raise this error at once.

        From any thread; the first error stays. Ranks of the same host that wait in
        `run` are notified by their own groups, but may be woken by this one, too.
        """

    def close(self) -> None:
        """Releases all memory. No `run` is under way."""


class Started(Protocol):
    """A call among some ranks, under way."""

    def wait(self) -> None:
        """Blocks until its ``target`` holds the result.

        Raises:
            Overdue, Differs, Exception: As `CollectiveEngine.run`.
        """


class Between(Protocol):
    """Starts calls by messages, for engines that have to reach other hosts."""

    def start(self, call: CollectiveCall, ranks: Sequence[int], part: int) -> Started:
        """Starts ``call`` among ``ranks`` (ascending, this one among them) alone.

        Several parts of one call may be under way; ``part`` numbers them, alike on all
        of ``ranks``. ``source`` must not change before `Started.wait` returns.
        """
