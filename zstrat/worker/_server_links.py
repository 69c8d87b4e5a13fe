"""The ways of a worker's session to the parameter servers, which may move.

Who has the session of the cluster decides where a server is; a worker that cannot reach
one, or finds another process in its place, waits for a word of that for a while.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Final, final

from zstrat.errors import ClosedError, ProtocolError
from zstrat.wire import Done, Job

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zstrat.config import Timeouts
    from zstrat.errors import PeerLostError
    from zstrat.ps import ServerLine
    from zstrat.transport import MakeTaskLink, TaskLink
    from zstrat.wire import Hello, Message, MoveServer

RESTARTED: Final = "it was started again, and what it held is gone"


@final
class ServerPresence:
    """How one parameter server stands, as its link says it and its line is told.

    A server that was started again has lost what it held of the session, so it stays
    lost for as long as the session lasts, or until it is elsewhere. One that is only
    away has a while to come back. The line is set before the link is started.

    Workers and the program connect to servers in any order: until the program has sent
    work, a server may hold nothing of its session, and be another process each time.

    Args:
        is_used: The program has sent work.
        grace: Seconds that a server whose link has lost it has to come back, if it has
            not said that it takes longer.
        moves: What it held may be elsewhere, and it has as long to be found there.
    """

    line: ServerLine

    def __init__(
        self, grace: float, *, moves: bool = False, is_used: bool = True
    ) -> None:
        self._grace, self._moves, self.is_used = grace, moves, is_used
        self._life: int | None = None
        """The incarnation that holds what is the session's."""
        self._absence: asyncio.TimerHandle | None = None
        self._is_closed = False

    def opened(self, hello: Hello) -> None:
        """The link says that the server has greeted."""
        if self._is_closed:
            return
        if not self.is_used or self._life in (None, hello.incarnation):
            self._stop_absence()
            self._life = hello.incarnation
            self.line.resume()
        elif self._moves:
            self.line.hold()
            self._miss(RESTARTED)
        else:
            self._stop_absence()
            self.line.lose(RESTARTED, gone=True)

    def lost(self, error: PeerLostError) -> None:
        """The link says that it has lost the server."""
        if not self._is_closed:
            self._miss(error.reason, error.returns)

    def leave(self) -> None:
        """Another one tells the line from now on."""
        self._is_closed = True
        self._stop_absence()

    def close(self, error: Exception) -> None:
        """Nobody waits for the server any more."""
        self.leave()
        self.line.close(error)

    def _stop_absence(self) -> None:
        if self._absence is not None:
            self._absence.cancel()
            self._absence = None

    def _miss(self, reason: str, returns: float = 0.0) -> None:
        if self._absence is None:
            grace = max(self._grace, returns)
            loop = asyncio.get_running_loop()
            self._absence = loop.call_later(grace, self._give_up, reason)

    def _give_up(self, reason: str) -> None:
        self._absence = None
        self.line.lose(reason, gone=False)


@final
class ServerLinks:
    """To all parameter servers of a session, in task order. On the loop.

    Args:
        views: Of the stores at these addresses; none if they stay where they are.
        replicas: Second copies that each of them has: one that is lost may be found
            where its copy is.
    """

    def __init__(
        self,
        make_link: MakeTaskLink,
        addresses: Sequence[str],
        views: Sequence[int],
        timeouts: Timeouts,
        *,
        replicas: int = 0,
    ) -> None:
        self._make_link, self._views = make_link, list(views)
        self._replicas = replicas
        # The program takes as long to miss a server, and then it finds another one.
        self._grace = timeouts.reconnect + (2 * timeouts.liveness if replicas else 0.0)
        self._presences: list[ServerPresence] = []
        self._lines: Sequence[ServerLine] = ()
        self._is_closed = self._is_used = False
        self.links = [self._new(index, at) for index, at in enumerate(addresses)]

    def attach(self, lines: Sequence[ServerLine]) -> None:
        """Whom it is told how the servers stand. Called once, before `start`."""
        self._lines = lines
        for presence, line in zip(self._presences, lines, strict=True):
            presence.line = line

    def use(self) -> None:
        """The program sends work: it has its session on all servers, and one that is
        started again from now on has lost what it held."""
        if not self._is_used:
            self._is_used = True
            for presence in self._presences:
                presence.is_used = True

    def start(self) -> None:
        """Begins to connect."""
        for link in self.links:
            link.start()

    async def wait_open(self, deadline: float) -> None:
        """Waits until all have answered.

        Raises:
            DeadlineExceededError: One did not by ``deadline`` (loop time); names it.
            ClosedError: The session ended meanwhile.

        Cancellation: the links go on connecting.
        """
        for index, link in enumerate(list(self.links)):
            try:
                await link.wait_open(deadline)
            except ClosedError:
                if link is self.links[index]:
                    raise  # else it has moved, and what is asked of it waits there

    async def move(self, message: MoveServer) -> Message:
        """The server is at another address. Ends when what was asked of it is on its
        way there, or waits for the connection.

        Cancellation: the link is not opened.
        """
        index = message.index
        if not 0 <= index < len(self._views):
            raise ProtocolError(f"MoveServer of ps {index}, which may not move")
        if message.view <= self._views[index] or self._is_closed:
            return Done()
        self._views[index] = message.view
        before = self.links[index]
        if before.address == message.address:
            return Done()
        self._presences[index].leave()
        link = self.links[index] = self._new(index, message.address)
        self._presences[index].line = self._lines[index]
        self._lines[index].move(link)
        await before.close("it has moved")
        # Behind what the end of its requests sets going: they come first at the next.
        asyncio.get_running_loop().call_soon(partial(self._start, index, link))
        return Done()

    async def close(self, reason: str) -> None:
        """Closes all; the last thing.

        Cancellation: links that are not closed yet are left open.
        """
        self._is_closed = True
        for presence in self._presences:
            presence.close(ClosedError(reason))
        await asyncio.gather(*[link.close(reason) for link in self.links])

    def _start(self, index: int, link: TaskLink) -> None:
        if self.links[index] is link and not self._is_closed:
            link.start()

    def _new(self, index: int, address: str) -> TaskLink:
        there = ServerPresence(
            self._grace, moves=bool(self._replicas), is_used=self._is_used
        )
        if index < len(self._presences):
            self._presences[index] = there
        else:
            self._presences.append(there)
        return self._make_link(
            address,
            name=f"/job:ps/task:{index}",
            expect=(Job.PS, index),
            on_open=there.opened,
            on_lost=there.lost,
        )
