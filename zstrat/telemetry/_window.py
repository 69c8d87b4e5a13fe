"""How long is of late: ten seconds, or more where steps take longer."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

RECENT: Final = 10
"""Seconds that a window is long, and how many parts it consists of."""
STEADY: Final = 1.5
"""Times a window, in which something comes as often as a window has parts."""
GAPS: Final = 3
"""Where less comes, it is as long as so many gaps between what comes."""


def window(times: Sequence[float], now: float) -> float:
    """Seconds that are to be looked back: `RECENT`, or more where what is looked at
    comes less often: a step of a minute is seen a minute later, too.

    Args:
        times: When something came of late, in that order, once a second at the most.
    """
    return max(float(RECENT), GAPS * usual_gap(times, now))


def usual_gap(times: Sequence[float], now: float) -> float:
    """Seconds from one to the next at the most, but for one: that was a pause; 0 if
    there is no other. Where it comes about once a second by now, gaps before that do
    not count: an evaluation after each epoch is no step that takes as long."""
    late = times[-RECENT - 1 :]
    if len(late) > RECENT and now - late[0] <= STEADY * RECENT:
        times = late
    gaps = sorted([later - sooner for sooner, later in pairwise(times)])
    return gaps[-2] if len(gaps) > 1 else 0.0
