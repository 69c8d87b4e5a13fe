"""Workers that are programs of their own, and wait for what the first one creates.

Where every worker runs the whole program (between-graph training), one of them opens
the session and creates variables and optimizers; the others name what they wait for and
are answered when it is there. Nobody asks twice.

Lives on the loop. Law of the file: whoever changes the session or creates something
calls `look` afterwards.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from zstrat.errors import BusyError, StaleSessionError, ZstratError
from zstrat.wire import JoinSession, Message, SessionOpened

if TYPE_CHECKING:
    from zstrat.wire import Ownership

    from ._store import Store

MOST: Final = 4096
"""Requests that wait at a time: a worker has one, and there are fewer workers."""


class Joining:
    """Who waits at one parameter server, named ``task`` in errors."""

    def __init__(self, task: str, ownership: Ownership, store: Store) -> None:
        self._task, self._ownership, self._store = task, ownership, store
        self._waiting: dict[asyncio.Future[Message], tuple[object, JoinSession]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def ask(
        self, peer: object, message: JoinSession
    ) -> Message | asyncio.Future[Message]:
        """The answer, at once or later.

        Raises:
            StaleSessionError: Another session is open, and variables were asked for.
            BusyError: Too many wait.
        """
        if (answer := self._answer(message)) is not None:
            return answer
        if len(self._waiting) >= MOST:
            raise BusyError(f"{self._task}: {MOST} workers wait for a session already")
        waiting: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._waiting[waiting] = peer, message
        return waiting

    def look(self) -> None:
        """Answers those whose wish has come true, or never will."""
        for waiting, (_, message) in list(self._waiting.items()):
            try:
                answer = self._answer(message)
            except ZstratError as error:  # to the worker
                self._end(waiting, error)
            else:
                if answer is not None:
                    self._end(waiting, answer)

    def lost(self, peer: object) -> None:
        """Nobody is there to be answered."""
        gone = [w for w, (asker, _) in self._waiting.items() if asker is peer]
        for waiting in gone:
            del self._waiting[waiting]
            waiting.cancel()

    def close(self, error: ZstratError) -> None:
        """Tells all who wait that they do so in vain."""
        for waiting in list(self._waiting):
            self._end(waiting, error)

    def _answer(self, message: JoinSession) -> Message | None:
        owner = self._ownership.owner
        if owner is None or message.session not in (0, owner.session):
            if message.keys or message.optimizers:
                raise StaleSessionError(
                    f"{self._task} serves no session {message.session:#x} any more: "
                    "the program that created its variables has ended or was started "
                    "anew; connect to the cluster again"
                )
            return None
        if message.session == 0 and not owner.alive:
            return None
        store = self._store
        is_there = all(key in store for key in message.keys) and all(
            number in store.engine for number in message.optimizers
        )
        if not is_there:
            return None
        return SessionOpened("cpu", 1, resumed=True, session=owner.session)

    def _end(
        self, waiting: asyncio.Future[Message], outcome: Message | ZstratError
    ) -> None:
        del self._waiting[waiting]
        if waiting.done():
            return
        if isinstance(outcome, ZstratError):
            waiting.set_exception(outcome)
        else:
            waiting.set_result(outcome)
