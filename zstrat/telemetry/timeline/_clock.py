"""What the clock of another process says, in the time of this one.

Every process has a clock of its own that only goes forward. Who asks another process
for its time notes when the question left and when the answer came; the answer was given
at some moment in between. Had both ways taken as long as each other, it would have been
the middle, and what the other clock said then less the middle is the *offset*. It is
never wrong by more than half of the round trip: that is the *error*. So of several
round trips the shortest one counts.

Clocks drift, by some ten microseconds in a second at most. Two estimates, at the begin
and at the end of what is measured, and the line between them take that into account.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable


class RoundTrip(NamedTuple):
    """Seconds: when the question left and the answer came by our clock, and what the
    other one ``told`` in between."""

    asked: float
    told: float
    heard: float

    @property
    def offset(self) -> float:
        """How far the other clock is ahead, if both ways took as long as each other."""
        return self.told - (self.asked + self.heard) / 2

    @property
    def error(self) -> float:
        """The offset is not further from the true one than this."""
        return (self.heard - self.asked) / 2


@dataclass(frozen=True, slots=True)
class ClockReading:
    """``offset`` of another clock (its time less ours) at the moment ``at`` of it, and
    how far that may be wrong. Seconds."""

    at: float
    offset: float
    error: float


def read_clock(trips: Iterable[RoundTrip]) -> ClockReading:
    """What the shortest of the round trips says.

    Raises:
        ValueError: There is none.
    """
    best = min(trips, key=lambda trip: trip.error)
    return ClockReading(best.told, best.offset, best.error)


@dataclass(frozen=True, slots=True)
class ClockLine:
    """Another clock in our time, by one reading or by the line through two of them.

    Args:
        first: Of the begin.
        last: Of the end; None: there was nobody to ask any more, and drift is not
            known.
    """

    first: ClockReading
    last: ClockReading | None = None

    @property
    def error(self) -> float:
        """How far off the offset may be: the larger error of the two readings, in
        seconds."""
        return max(self.first.error, 0.0 if self.last is None else self.last.error)

    @property
    def drift(self) -> float:
        """By how much more the other clock advances than ours, per second."""
        last = self.last
        if last is None or last.at <= self.first.at:
            return 0.0
        return (last.offset - self.first.offset) / (last.at - self.first.at)

    def ours(self, theirs: float) -> float:
        """The moment of the other clock, by ours."""
        offset = self.first.offset + self.drift * (theirs - self.first.at)
        return theirs - offset
