"""Records of tasks for a time line, on the clock of the program.

In the program each thread appends to a list, which needs no lock; beyond its bound
records are dropped, which the time line reports. The spans of a task are sent as
columns, a quarter of the bytes of separate records, without a loop in Python. So are
the events that jax recorded on a worker, on the worker's clock, with a table of their
few distinct names.

Every process has its own monotonic clock. A request for the time of another process is
sent and answered at known local times, and the other clock was read in between. If both
ways took equally long, it was read in the middle, and its time minus the middle is the
*offset*. The *error* of the offset is at most half of the round trip, so the shortest
of several round trips is used.

Clocks drift, by some ten microseconds per second at most. The line through two
estimates, at the begin and at the end of a measurement, accounts for that.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple, final

import numpy as np

from zstrat.telemetry._throughput import Phase, PhaseSpan, TrafficPoint

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from zstrat.telemetry._throughput import SpanCapture


class RoundTrip(NamedTuple):
    """A request for the time of another process, in seconds: ``sent`` and ``received``
    by the local clock, and between them ``remote`` by the other clock."""

    sent: float
    remote: float
    received: float

    @property
    def offset(self) -> float:
        """Seconds by which the other clock is ahead of the local one, if request and
        answer took equally long."""
        return self.remote - (self.sent + self.received) / 2

    @property
    def error(self) -> float:
        """The largest possible error of the offset."""
        return (self.received - self.sent) / 2


@dataclass(frozen=True, slots=True)
class ClockReading:
    """The ``offset`` of another clock (its time minus the local time) at its time
    ``at``, and the largest error of the offset, in seconds."""

    at: float
    offset: float
    error: float


def read_clock(trips: Iterable[RoundTrip]) -> ClockReading:
    """Estimates the offset of another clock from the shortest of the round trips.

    Raises:
        ValueError: ``trips`` is empty.
    """
    best = min(trips, key=lambda trip: trip.error)
    return ClockReading(best.remote, best.offset, best.error)


@dataclass(frozen=True, slots=True)
class ClockLine:
    """Converts times of another clock, by one reading or by the line through two.

    Args:
        first: The reading at the begin.
        last: The reading at the end; None: the process was lost, so the drift is
            unknown.
    """

    first: ClockReading
    last: ClockReading | None = None

    @property
    def error(self) -> float:
        """The larger error of the two readings, in seconds."""
        return max(self.first.error, 0.0 if self.last is None else self.last.error)

    @property
    def drift(self) -> float:
        """Seconds per second by which the other clock is faster than the local one."""
        last = self.last
        # Two readings at one moment, as of a very short run, say nothing of a drift.
        if last is None or last.at <= self.first.at:
            return 0.0
        return (last.offset - self.first.offset) / (last.at - self.first.at)

    def ours(self, theirs: float) -> float:
        """Converts a time of the other clock to the local clock."""
        # Along the line, also beyond its ends: a span may have begun before the first.
        offset = self.first.offset + self.drift * (theirs - self.first.at)
        return theirs - offset


class JaxEvent(NamedTuple):
    """An event that jax recorded; ``row`` is its thread or device. Times in seconds."""

    row: str
    name: str
    began: float
    ended: float


@dataclass(frozen=True, slots=True)
class JaxEvents:
    """The events that jax recorded on one worker; ``words`` gives the error of the
    times, or the reason why there are no events."""

    events: Sequence[JaxEvent]
    words: str


def jax_columns(jax: JaxEvents) -> list[np.ndarray]:
    """Encodes events as indices of rows and names (uint32 [2, n]), begins and ends
    (float64 [2, n]), and the rows, names and words as JSON (uint8 [m])."""
    rows: dict[str, int] = {}
    names: dict[str, int] = {}
    numbers = [
        (rows.setdefault(each.row, len(rows)), names.setdefault(each.name, len(names)))
        for each in jax.events
    ]
    times = [(each.began, each.ended) for each in jax.events]
    text = json.dumps([list(rows), list(names), jax.words]).encode()
    return [
        np.array(numbers, np.uint32).reshape(-1, 2).T,
        np.array(times, np.float64).reshape(-1, 2).T,
        np.frombuffer(text, np.uint8),
    ]


def from_jax_columns(columns: Sequence[np.ndarray]) -> JaxEvents:
    """Decodes the columns of `jax_columns`.

    Raises:
        ValueError: The columns are malformed.
    """
    try:
        numbers, times, text = columns
        rows, names, words = json.loads(text.tobytes())
        events = [
            JaxEvent(str(rows[row]), str(names[name]), began, ended)
            for row, name, began, ended in zip(
                *numbers.tolist(), *times.tolist(), strict=True
            )
        ]
    except (ValueError, IndexError, TypeError) as error:
        raise ValueError(f"malformed columns of jax events: {error}") from None
    return JaxEvents(events, str(words))


@final
class ProgramNotes:
    """The records of the program for one time line. Times are of `time.monotonic`.

    Args:
        waiting, running: Numbers of closures at the begin.
        limit: Most records of each kind to keep.
        steps: Calls ``done`` once, after this many closures, on the thread that reports
            the last one; None: never.
    """

    def __init__(
        self,
        began: float,
        waiting: int,
        running: int,
        limit: int,
        *,
        steps: int | None = None,
        done: Callable[[], None] | None = None,
    ) -> None:
        self._goal, self._done = steps, done
        self._is_over = False
        """Whether ``steps`` closures have ended, after which nothing is recorded."""
        self.began: Final = began
        self.waiting: Final = waiting
        self.running: Final = running
        self._limit: Final = limit
        self.scheduled: Final[list[tuple[int, float, float]]] = []
        """For each closure its step number, and the begin and end of the call that put
        it into the queue."""
        self.dispatched: Final[list[tuple[str, int, float, float]]] = []
        """For each dispatch the worker, the number of closures, and the begin and end
        of making the message."""
        self.ended: Final[list[tuple[int, float]]] = []
        """For each report of a worker how many closures have ended, and when the report
        came."""
        self.fetched: Final[list[tuple[float, float]]] = []
        """For each wait of a thread for a value when it began, and when the thread had
        the value."""
        self.steps = 0
        """Number of closures that have ended since the begin of the notes."""
        self.is_full = False
        """Whether records were dropped."""

    def schedule(self, step: int, began: float, ended: float) -> None:
        """Notes a call that has put a closure into the queue."""
        if self._has_room(len(self.scheduled)):
            self.scheduled.append((step, began, ended))

    def dispatch(self, worker: str, closures: int, began: float, ended: float) -> None:
        """Notes that closures were sent to a worker."""
        if self._has_room(len(self.dispatched)):
            self.dispatched.append((worker, closures, began, ended))

    def end(self, closures: int, now: float) -> None:
        """Notes that a worker has reported ``closures`` closures as ended."""
        if self._is_over:
            return
        self.steps += closures
        if self._has_room(len(self.ended)):
            self.ended.append((closures, now))
        # Set before the call, which may end the capture at once.
        if self._goal is not None and self.steps >= self._goal:
            self._is_over = True
            if self._done is not None:
                self._done()

    def fetch(self, began: float, ended: float) -> None:
        """Notes that a thread has waited for a value."""
        if self._has_room(len(self.fetched)):
            self.fetched.append((began, ended))

    def _has_room(self, count: int) -> bool:
        # What comes after the last step is nobody's, and does not count as cut off.
        if self._is_over:
            return False
        self.is_full |= count >= self._limit
        return count < self._limit


@dataclass(slots=True)
class TaskNotes:
    """The records of one task, or the reason why there are none.

    Args:
        name: The task, such as "worker:0".
        clock: Converts the task's times; None if its clock is unknown, so that its
            spans cannot be shown.
        problem: Describes what is missing; "" if nothing is.
        profile: The path of jax's own profile of the task.
        jax: The events of that profile that are shown.
    """

    name: str
    clock: ClockLine | None = None
    spans: Sequence[PhaseSpan] = ()
    traffic: Sequence[TrafficPoint] = ()
    is_cut: bool = False
    problem: str = ""
    profile: str = ""
    jax: JaxEvents | None = None


def columns_of(capture: SpanCapture) -> tuple[list[str], list[np.ndarray]]:
    """Encodes a capture: the names of phases; then steps (int64 [n]), indices of names
    (uint8 [n]), begins and ends (float64 [2, n]), and times, bytes received and bytes
    sent (float64 [3, m])."""
    names, spans = list(Phase), capture.spans
    index = {name: number for number, name in enumerate(names)}
    steps = np.array([span.step for span in spans], np.int64)
    # The names are sent as well, as another version may have another order.
    phases = np.array([index[span.phase] for span in spans], np.uint8)
    times = np.array([(span.began, span.ended) for span in spans], np.float64)
    # Bytes, too, as float64, which has all integers up to 2**53.
    traffic = np.array(capture.traffic, np.float64).reshape(-1, 3)
    columns: list[np.ndarray] = [steps, phases, times.reshape(-1, 2).T, traffic.T]
    return [str(name) for name in names], columns


def from_columns(
    names: Sequence[str], columns: Sequence[np.ndarray]
) -> tuple[list[PhaseSpan], list[TrafficPoint]]:
    """Decodes the columns of `columns_of`.

    Raises:
        ValueError: The columns are malformed.
    """
    try:
        steps, phases, times, traffic = [column.tolist() for column in columns]
        called = [Phase(name) for name in names]
        spans = [
            PhaseSpan(step, called[phase], began, ended)
            for step, phase, began, ended in zip(steps, phases, *times, strict=True)
        ]
        points = [
            TrafficPoint(at, int(got), int(sent))
            for at, got, sent in zip(*traffic, strict=True)
        ]
    except (ValueError, IndexError, TypeError) as error:
        raise ValueError(f"malformed columns of spans: {error}") from None
    return spans, points
