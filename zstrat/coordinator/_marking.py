"""Tells the parameter servers how far closures are over.

A server remembers which closures have pushed, and may forget those that are over for
ever. The holder of the session alone says so: what a worker says of it is not believed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, final

from zstrat.errors import BusyError, ClosedError, PeerLostError
from zstrat.wire import RaiseMark

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ._lane import TaskSession

INTERVAL: Final = 0.25
"""Seconds between two words to each server, while closures end. In so long the quickest
ones are some ten thousand, a hundredth of what a server can remember."""


@final
class Marking:
    """To the servers of these lanes. On the loop."""

    def __init__(self, session: int, lanes: Sequence[TaskSession]) -> None:
        self._session, self._lanes = session, lanes
        self._next_at = 0.0

    def tell(self, low_water: int, now: float) -> None:
        """All closures below are over. A word that is lost is made good by the next."""
        if now < self._next_at:
            return
        self._next_at = now + INTERVAL
        mark = RaiseMark(self._session, low_water)
        for lane in self._lanes:
            if not lane.is_ready:
                continue
            try:
                lane.link.notify(mark)
            except (PeerLostError, BusyError, ClosedError):  # its lane tells of it
                continue
