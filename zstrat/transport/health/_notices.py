"""Tells one peer how a task is, about once a second, for as long as that changes.

It rests when nothing has happened for as long as a window is, and rates are zero, and
no step is under way: by then everybody knows. A peer that does not read misses what it
would have been told.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Final, final

from zstrat.errors import BusyError, PeerLostError
from zstrat.telemetry import RECENT
from zstrat.wire import Telemetry

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from zstrat.wire import Message, PlainTree

EVERY: Final = 1.0


@final
class TelemetryNotices:
    """Of one session. On the loop.

    Args:
        values: What is told.
        notify: Sends it, or raises as `Link.notify`.
    """

    def __init__(
        self,
        values: Callable[[], Mapping[str, PlainTree]],
        notify: Callable[[Message], None],
    ) -> None:
        self._values, self._notify = values, notify
        self._loop: Final = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._left = 0
        """How often it is told before this rests, if nothing happens."""
        self._is_closed = False

    def touch(self) -> None:
        """Something has happened."""
        self._left = RECENT + 1
        if self._timer is None and not self._is_closed:
            self._timer = self._loop.call_later(EVERY, self._tell)

    def close(self) -> None:
        """Nothing is told any more."""
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _tell(self) -> None:
        self._timer = None
        values = dict(self._values())
        with suppress(BusyError, PeerLostError):  # nobody waits for it
            self._notify(Telemetry(values))
        self._left = max(0, self._left - 1)
        if (self._left or _goes_on(values)) and not self._is_closed:
            self._timer = self._loop.call_later(EVERY, self._tell)


def _goes_on(values: Mapping[str, PlainTree]) -> bool:
    """Bytes do not count: this sends some itself."""
    rates = values.get("rates")
    told = rates if isinstance(rates, dict) else {}
    return bool(values.get("now")) or any(map(told.get, ("steps", "pulls", "pushes")))
