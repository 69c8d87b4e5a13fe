"""The links of a worker to the parameter servers.

A store may move to another server process. The owner of the cluster's session decides
where a store is. A worker that cannot reach a server, or finds another process in its
place, waits some time for a message that says where the store is now.
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


RESTARTED: Final = "it was restarted, and its state is lost"


@final
class ServerPresence:
    """Watches the link to one parameter server, and sets the state of its request queue
    (`ServerLine`).

    A server that was restarted has lost the state of the session, so it stays lost for
    the rest of the session, or until its store is found elsewhere. A server that is
    only unreachable has some time to come back. The state is set before the link
    starts.

    Workers and the program connect to servers in any order: until the program has sent
    work, a server may have no state of the session, and be restarted any time.

    Args:
        is_used: The program has sent work.
        grace: Seconds for a lost server to come back, unless it has announced a longer
            absence.
        moves: The store may move to another process, and has ``grace`` seconds for
            that, too.
    """

    line: ServerLine

    def __init__(
        self, grace: float, *, moves: bool = False, is_used: bool = True
    ) -> None:
        self._grace, self._moves, self.is_used = grace, moves, is_used
        self._life: int | None = None
        """The incarnation of the server process that has the state of the session."""
        self._absence: asyncio.TimerHandle | None = None
        self._is_closed = False

    def opened(self, hello: Hello) -> None:
        """Records that the server has greeted."""
        if self._is_closed:
            return
        # The process of before, or one that had nothing to lose yet.
        if not self.is_used or self._life in (None, hello.incarnation):
            self._stop_absence()
            self._life = hello.incarnation
            self.line.resume()
        # Its store may be promoted elsewhere, so requests wait instead of failing.
        elif self._moves:
            self.line.hold()
            self._miss(RESTARTED)
        else:
            self._stop_absence()
            self.line.lose(RESTARTED, gone=True)

    def lost(self, error: PeerLostError) -> None:
        """Records that the link has lost the server."""
        if not self._is_closed:
            self._miss(error.reason, error.returns)

    def leave(self) -> None:
        """Stops watching, because another presence takes over the request queue."""
        self._is_closed = True
        self._stop_absence()

    def close(self, error: Exception) -> None:
        """Stops watching, and makes all requests to the server fail with the error."""
        self.leave()
        self.line.close(error)

    def _stop_absence(self) -> None:
        if self._absence is not None:
            self._absence.cancel()
            self._absence = None

    def _miss(self, reason: str, returns: float = 0.0) -> None:
        # The first loss counts: a server that comes and goes does not get the time
        # again.
        if self._absence is None:
            grace = max(self._grace, returns)
            loop = asyncio.get_running_loop()
            self._absence = loop.call_later(grace, self._give_up, reason)

    def _give_up(self, reason: str) -> None:
        self._absence = None
        self.line.lose(reason, gone=False)


@final
class ServerLinks:
    """The links to all parameter servers of a session, in task order. Used on the loop.

    Args:
        views: View numbers of the stores at these addresses; empty if stores do not
            move.
        replicas: Number of backups of each store; one of them may replace it.
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
        # The program takes as long to notice a loss, and to promote a backup.
        self._grace = timeouts.reconnect + (2 * timeouts.liveness if replicas else 0.0)
        self._presences: list[ServerPresence] = []
        self._lines: Sequence[ServerLine] = ()
        self._is_closed = self._is_used = False
        self.links = [self._new(index, at) for index, at in enumerate(addresses)]

    def attach(self, lines: Sequence[ServerLine]) -> None:
        """Sets the request queues of the servers. Called once, before `start`."""
        self._lines = lines
        for presence, line in zip(self._presences, lines, strict=True):
            presence.line = line

    def use(self) -> None:
        """Records that the program has sent work. So the program's session is on all
        servers, and a server that restarts from now on has lost its state."""
        if not self._is_used:
            self._is_used = True
            for presence in self._presences:
                presence.is_used = True

    def start(self) -> None:
        """Starts to connect to all servers."""
        for link in self.links:
            link.start()

    async def wait_open(self, deadline: float) -> None:
        """Waits until all servers have greeted.

        Raises:
            DeadlineExceededError: A server did not greet by ``deadline`` (loop time);
                names it.
            ClosedError: The session ended meanwhile.

        Cancellation: the links keep connecting.
        """
        # Over a copy, as `move` may replace a link while this waits.
        for index, link in enumerate(list(self.links)):
            try:
                await link.wait_open(deadline)
            except ClosedError:
                if link is self.links[index]:
                    raise  # else the store has moved, and requests wait there

    async def move(self, message: MoveServer) -> Message:
        """Connects to a store at its new address. Returns when the open requests were
        sent there, or wait for the connection.

        Cancellation: the link is not opened.
        """
        index = message.index
        if not 0 <= index < len(self._views):
            raise ProtocolError(
                f"MoveServer of ps {index}: expected an index below {len(self._views)}"
            )
        # Orders may overtake each other on the way; only the newest view counts.
        if message.view <= self._views[index] or self._is_closed:
            return Done()
        self._views[index] = message.view
        # Only after the view is noted, as a move to the same address must also outdate
        # older ones.
        before = self.links[index]
        if before.address == message.address:
            return Done()
        # The old presence must not touch the line that the new link serves.
        self._presences[index].leave()
        link = self.links[index] = self._new(index, message.address)
        self._presences[index].line = self._lines[index]
        self._lines[index].move(link)
        await before.close("it has moved")
        # After callbacks of the closed link, which requeue its requests in order.
        asyncio.get_running_loop().call_soon(partial(self._start, index, link))
        return Done()

    async def close(self, reason: str) -> None:
        """Closes all links. Called at the very end of the session.

        Cancellation: links that are not closed yet stay open.
        """
        self._is_closed = True
        for presence in self._presences:
            presence.close(ClosedError(reason))
        await asyncio.gather(*[link.close(reason) for link in self.links])

    def _start(self, index: int, link: TaskLink) -> None:
        # Another move, or the end, may have come in the meantime.
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
