"""The interface between a group and the engines that run its calls.

A group numbers, describes and watches calls; an *engine* transfers the bytes. There are
two ways. Messages (`zstrat.collectives.group._traffic`) can carry every call, any
number at a time, on the loop. A `CollectiveEngine`, such as shared memory of one host,
blocks the thread that runs it, and runs one call after the other.

Law by which ranks agree without communication: which engine runs a call, and in which
order, depends only on properties of the call that are equal on all ranks (kind, dtype,
sizes, tag, options).

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

    ``source`` (the contribution of this rank) and ``target`` (for the result) are
    one-dimensional, C-contiguous, in the machine's byte order; they are the same memory
    (an in-place call) or do not overlap. The engine writes only to ``target``, and
    keeps neither after the call.

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
    """Identifies the call on the wire; the same on all ranks, unique in the
    generation."""
    kind: CallKind
    source: np.ndarray
    target: np.ndarray
    about: int
    """Digest of ``words``, 32 bits, by which ranks notice that they make different
    calls."""
    words: str
    """Description of the call: ``all_reduce(float32[10, 3], SUM)``."""
    deadline: float
    """`time.monotonic` at which an engine that still waits raises `Overdue`."""
    timeout: float
    """Seconds that the caller allows. The deadline is earlier by `margin_of`, which
    leaves time to find out why the call takes so long."""
    op: ReduceOp = ReduceOp.SUM
    root: int = 0
    """Index of the root among the ranks that take part."""
    sizes: tuple[int, ...] = ()
    tag: str | None = None
    """Tag of the caller. Ranks may make calls with different tags in different
    orders."""
    compression: str | None = None
    place: str = ""
    """Name of the array, or bucket of arrays, which is the same each time that the
    program reduces it."""
    algorithm: str | None = None
    is_frozen: bool = False
    """Whether ``source`` is never changed, not even after the call."""
    whole: int | None = None
    """Key of the call that this one is a part of; inquiries name that call. None: this
    call is not a part."""


def margin_of(timeout: float) -> float:
    """Returns the seconds between the deadline of a call and the time when its caller
    gets an error; ``timeout`` is that of the call."""
    return min(1.0, timeout / 4)


class Overdue(Exception):
    """The deadline of a call has passed; ``ranks`` are the ranks that the call waits
    for."""

    def __init__(self, ranks: Sequence[int]) -> None:
        super().__init__(tuple(ranks))
        self.ranks = tuple(ranks)


class Differs(Exception):
    """Another rank makes a different call under the same number."""

    def __init__(self, rank: int, about: int) -> None:
        super().__init__(rank, about)
        self.rank, self.about = rank, about


class ConnectionEnded(Exception):
    """The connection to a rank that the call waits for has ended."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank)
        self.rank = rank


class CollectiveEngine(Protocol):
    """Runs collective calls in the calling thread, one after the other."""

    def takes(self, call: CollectiveCall) -> bool:
        """Returns whether `run` supports the call; depends only on properties of the
        call that are equal on all ranks."""

    def run(self, call: CollectiveCall) -> None:
        """Runs a call; blocks until its ``target`` holds the result.

        Never called by two threads at a time; on all ranks in the same order.

        Raises:
            Overdue: The deadline of the call has passed.
            Differs: Another rank makes a different call.
            ConnectionEnded: The connection to a rank has ended.
            Exception: The error given to `abort`.

        After any of these errors the engine runs no further calls.
        """

    def waits(self) -> Sequence[int]:
        """Returns the ranks that `run` waits for now. From any thread; takes no
        lock."""

    def waited(self) -> Mapping[int, float]:
        """Returns the seconds that `run` has waited in memory so far, by rank waited
        for. From any thread. Waits for messages are counted by the traffic."""

    def abort(self, error: Exception) -> None:
        """Makes the present `run` and later ones raise ``error`` at once.

        From any thread; the first error stays. Other ranks of the host that wait in
        `run` get an error from their own groups, but this method may wake them, too.
        """

    def close(self) -> None:
        """Releases all memory. Call it when no `run` is under way."""


class Started(Protocol):
    """A started call among some ranks."""

    def wait(self) -> None:
        """Blocks until the ``target`` of the call holds the result.

        Raises:
            Overdue, Differs, Exception: As `CollectiveEngine.run`.
        """


class Between(Protocol):
    """Starts calls by messages between hosts, for engines whose own memory does not
    reach other hosts."""

    def start(self, call: CollectiveCall, ranks: Sequence[int], part: int) -> Started:
        """Starts ``call`` among ``ranks`` alone (ascending, this rank among them).

        Several parts of one call may be under way; ``part`` is the number of the part,
        the same on all of ``ranks``. ``source`` must not change before `Started.wait`
        returns.
        """
