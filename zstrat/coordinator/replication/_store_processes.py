"""The sessions on the processes that hold stores and copies, by index.

A process keeps its index as long as the program's session lasts: a removed one is
closed, and stays in the list. Each has a *life*, a number that grows when the process
loses its data. On the loop thread.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Final, final

from zstrat.coordinator.connecting import TaskSession, objection_to

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zstrat.config import Timeouts
    from zstrat.coordinator.connecting import TaskSessionEvents
    from zstrat.transport import MakeTaskLink
    from zstrat.wire import CloseSession, OpenSession


log = logging.getLogger("zstrat.coordinator")


@final
class StoreProcesses:
    """The processes of one program.

    Args:
        events: Called by their sessions.
        opening: Opens the program's session on each, except for the index.
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
        self.lives: Final[list[int]] = []
        self._served_elsewhere: Final[list[list[int]]] = []
        """By index, as in `OpenSession`: the view since which another process serves
        the store that this one has by itself; empty if none does."""

    def add(self, number: int, index: int, address: str) -> TaskSession:
        """Adds a process with the next index, not started yet.

        Args:
            number: Its task number.
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
            objection=lambda task, hello, _: objection_to(
                task, hello, None, self.sessions, None
            ),
        )
        self.sessions.append(session)
        self.lives.append(0)
        self._served_elsewhere.append(views)
        return session

    def keep_origin(self, origin: int) -> None:
        """Sets what keys are counted from, also for processes that come later: copies
        with different origins are taken for parts of different sessions."""
        self._opening = replace(self._opening, origin=origin)
        for session in self.sessions:
            session.keep_origin(origin)

    def start(self) -> None:
        """Starts to connect to all."""
        for session in self.sessions:
            session.start()

    async def wait_ready(self, deadline: float) -> None:
        """Waits until all that were not removed are in the program's session.

        Raises:
            ZstratError: As `TaskSession.wait_ready`.

        Cancellation: nothing is lost.
        """
        for session in self.sessions:
            if not session.is_closed:
                await session.wait_ready(deadline)

    def take_back(self, process: TaskSession, view: int | None) -> None:
        """Takes a process back that has lost its data, for new copies.

        Args:
            view: The view since which another process serves the store that this one
                has by itself; None: none does. It is in the message that opens the
                session: for a moment the process would else answer that the store has
                no variables.
        """
        self._served_elsewhere[process.place][:] = [] if view is None else [view]
        process.renew(self._session, ())

    def renew(self, session: int, close_messages: Sequence[CloseSession]) -> None:
        """Moves all processes to another session, where each has its own store."""
        self._session = session
        for views in self._served_elsewhere:
            views.clear()
        for process in self.sessions:
            process.renew(session, close_messages)

    async def leave(self, process: TaskSession, timeout: float) -> None:
        """Closes the session on a process, and waits for its answer.

        Cancellation: it is closed without awaiting the answer.
        """
        was_ready = process.is_ready
        process.leave()
        try:
            if was_ready:
                await asyncio.wait([process.close_session(timeout)])
        finally:
            await process.close()
