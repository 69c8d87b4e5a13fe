"""Converts the clock of another process to the clock of this one.

Every process has its own monotonic clock. A request for the time of another process is
sent and answered at known local times, and the other clock was read in between. If both
ways took equally long, it was read in the middle, and its time minus the middle is the
*offset*. The *error* of the offset is at most half of the round trip, so the shortest
of several round trips is used.

Clocks drift, by some ten microseconds per second at most. The line through two
estimates, at the begin and at the end of a measurement, accounts for that.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable


class RoundTrip(NamedTuple):
    """A request for the time of another process, in seconds: ``sent`` and ``received``
    by the local clock, ``remote`` by the other clock in between."""

    sent: float
    remote: float
    received: float

    @property
    def offset(self) -> float:
        """Seconds by which the other clock is ahead, if both ways took equally long."""
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
    """Makes a reading from the shortest of the round trips.

    Raises:
        ValueError: There are no round trips.
    """
    best = min(trips, key=lambda trip: trip.error)
    return ClockReading(best.remote, best.offset, best.error)


@dataclass(frozen=True, slots=True)
class ClockLine:
    """Converts times of another clock, by one reading or by the line through two.

    Args:
        first: The reading at the begin.
        last: The reading at the end; None: the process was lost, and the drift is
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
        if last is None or last.at <= self.first.at:
            return 0.0
        return (last.offset - self.first.offset) / (last.at - self.first.at)

    def ours(self, theirs: float) -> float:
        """Converts a time of the other clock to the local clock."""
        offset = self.first.offset + self.drift * (theirs - self.first.at)
        return theirs - offset
