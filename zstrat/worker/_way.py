"""How the connection from a worker to one parameter server stands, told to its line.

A server that was started again has lost what it held of the session, so it stays lost
for as long as the session lasts. One that is only away has a while to come back.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from zstrat.errors import PeerLostError
    from zstrat.ps import ServerLine
    from zstrat.wire import Hello

RESTARTED = "it was started again, and what it held is gone"


@final
class ServerWay:
    """One link and its line, which is set before the link is started.

    Args:
        grace: Seconds that a server whose link has lost it has to come back.
    """

    line: ServerLine

    def __init__(self, grace: float) -> None:
        self._grace = grace
        self._life: int | None = None
        """The incarnation that holds what is the session's."""
        self._absence: asyncio.TimerHandle | None = None
        self._is_closed = False

    def opened(self, hello: Hello) -> None:
        """The link says that the server has greeted."""
        self._stop_absence()
        if self._is_closed:
            return
        if self._life in (None, hello.incarnation):
            self._life = hello.incarnation
            self.line.resume()
        else:
            self.line.lose(RESTARTED, gone=True)

    def lost(self, error: PeerLostError) -> None:
        """The link says that it has lost the server."""
        if self._absence is None and not self._is_closed:
            loop = asyncio.get_running_loop()
            self._absence = loop.call_later(self._grace, self._give_up, error.reason)

    def close(self, error: Exception) -> None:
        """Nobody waits for the server any more."""
        self._is_closed = True
        self._stop_absence()
        self.line.close(error)

    def _give_up(self, reason: str) -> None:
        self._absence = None
        self.line.lose(reason, gone=False)

    def _stop_absence(self) -> None:
        if self._absence is not None:
            self._absence.cancel()
            self._absence = None
