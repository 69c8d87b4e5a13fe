"""The sessions with the processes that hold stores and copies, by index.

A process keeps its index for as long as the program's session lasts: one that was let
go is closed, and stays in its place. Each has a *life*, which is counted up when what
the process held is gone. On the loop thread.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Final, final

from zstrat.coordinator.connecting import TaskSession
from zstrat.errors import AlreadyExistsError, ZstratError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zstrat.config import Timeouts
    from zstrat.coordinator.connecting import TaskSessionEvents
    from zstrat.transport import MakeTaskLink
    from zstrat.wire import CloseSession, Hello, OpenSession, SessionOpened


log = logging.getLogger("zstrat.coordinator")


@final
class StoreProcesses:
    """Those of one program.

    Args:
        events: Who is told what becomes of them.
        opening: What opens the program's session on each, but for its index.
    """

    def __init__(
        self,
        events: TaskSessionEvents,
        opening: OpenSession,
        timeouts: Timeouts,
        make_link: MakeTaskLink,
    ) -> None:
        self._events, self._opening = events, opening
        self._timeouts, self._make_link = timeouts, make_link
        self._session = opening.session
        self.sessions: Final[list[TaskSession]] = []
        self.addresses: Final[list[str]] = []
        self.lives: Final[list[int]] = []
        self._served_elsewhere: Final[list[list[int]]] = []
        """By index, as opening a session says it: since which view another process
        serves what this one has by itself; nothing if none does."""

    def add(self, number: int, index: int, address: str) -> TaskSession:
        """Adds a process, with the next index; it is not greeted yet.

        Args:
            number: The task's.
        """
        views: list[int] = []
        opening = replace(
            self._opening, session=self._session, index=index, views=views
        )
        session = TaskSession(
            "ps",
            number,
            index,
            address,
            opening,
            self._make_link,
            self._events,
            one_life=True,
            turn=self._timeouts.turn,
            notice=self._timeouts.notice,
            moves=True,
            objection=self._objection,
        )
        self.sessions.append(session)
        self.addresses.append(address)
        self.lives.append(0)
        self._served_elsewhere.append(views)
        return session

    def enter(self, number: int, index: int, address: str) -> TaskSession:
        """Begins to greet one more."""
        session = self.add(number, index, address)
        session.start()
        return session

    def keep_origin(self, origin: int) -> None:
        """What all are told that keys are counted from, also those that come later:
        copies that say different origins are taken for parts of different sessions."""
        self._opening = replace(self._opening, origin=origin)
        for session in self.sessions:
            session.keep_origin(origin)

    def start(self) -> None:
        """Begins to greet all."""
        for session in self.sessions:
            session.start()

    async def wait_ready(self, deadline: float) -> None:
        """Waits until all that were not let go are in the program's session.

        Raises:
            ZstratError: As `TaskSession.wait_ready`.

        Cancellation: nothing is lost.
        """
        for session in self.sessions:
            if not session.is_closed:
                await session.wait_ready(deadline)

    def take_back(self, process: TaskSession, view: int | None) -> None:
        """What it held is gone, and it is as good as any for a new copy.

        Args:
            view: Since when another process serves the store that this one has by
                itself; None: none does. It is told so as it is taken: told later, it
                would answer for a moment that it has none of the store's variables.
        """
        self._served_elsewhere[process.place][:] = [] if view is None else [view]
        process.renew(self._session, ())

    def renew(self, session: int, close_messages: Sequence[CloseSession]) -> None:
        """Has all enter another session of the program, where each has its own."""
        self._session = session
        for views in self._served_elsewhere:
            views.clear()
        for each in self.sessions:
            each.renew(session, close_messages)

    async def leave(self, process: TaskSession, timeout: float) -> None:
        """Says goodbye to one, and waits so many seconds for its answer.

        Cancellation: it is left all the same, and does not say whether it heard so.
        """
        was_ready = process.is_ready
        process.leave()
        try:
            if was_ready:
                await asyncio.wait([process.say_goodbye(timeout)])
        finally:
            await process.close()

    def _objection(
        self, task: TaskSession, hello: Hello, _: SessionOpened | None
    ) -> ZstratError | None:
        """Whether the process is here already, by another address."""
        for other in self.sessions:
            is_other = other is not task and not other.is_closed
            known = other.hello if is_other and other.is_ready else None
            if known is not None and known.incarnation == hello.incarnation:
                return AlreadyExistsError(
                    f"{task.address} is the process of {other.name}, which the cluster "
                    f"has at {other.address}"
                )
        return None
