"""Answers workers that report themselves: they are taken in, or told why not.

They come by way of a parameter server, and only with a worker's key. Even so a program
takes them only if it says so: who is in its cluster is its own business. On the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from typing import TYPE_CHECKING, Final, Protocol, cast, final

from zstrat.errors import (
    DeadlineExceededError,
    PermissionDeniedError,
    ZstratError,
    to_wire,
)
from zstrat.transport import Seldom
from zstrat.wire import AnswerReport

if TYPE_CHECKING:
    from zstrat.coordinator.connecting import TaskSession
    from zstrat.wire import Message, PlainTree, WorkerReported

log = logging.getLogger("zstrat.coordinator")

MOST: Final = 1024
"""Workers that are on their way at a time; others wait at their server in vain."""

GREETED: Final = 64
"""Of these, those that are greeted at a time: each takes four descriptors until it has
come, of which a program may have as few as 1024, and the address is a stranger's word.
The others wait for their turn."""

UNDECIDED: Final = 10.0
"""Seconds that a program has to say that it takes such workers: some may have waited
for it, and its strategy has to be made before it can say so."""

EARLIER: Final = 0.9
"""The part of a worker's patience behind which it hears from us what is in the way:
before its server says that nobody has answered."""

NOT_WISHED: Final = (
    "the program takes no workers that report themselves: it does so behind "
    "strategy.workers.accept_joining()"
)


class TakingWorkers(Protocol):
    """What takes a worker in (`Turnover`)."""

    async def report(self, address: str, number: int, patience: float) -> int:
        """Returns the number of a worker that has reported itself, when it is in the
        session; at once if it asks for a number, by -1."""
        ...


@final
class AnsweredReports:
    """Those of one session."""

    def __init__(self, taking: TakingWorkers) -> None:
        self._are_wished, self._said = False, asyncio.Event()
        self._taking = taking
        self._answering: set[asyncio.Task[None]] = set()
        self._turns = asyncio.Semaphore(GREETED)
        self._seldom = Seldom(time.monotonic)

    def accept(self, are_wished: bool) -> None:
        """The program takes such workers from now on, or none any more."""
        self._are_wished = are_wished
        self._said.set()

    def heard(self, server: TaskSession, message: WorkerReported) -> None:
        """A worker has reported itself at the server."""
        if len(self._answering) >= MOST:
            return
        answering = asyncio.get_running_loop().create_task(
            self._answer(server, message), name=f"a worker at {message.address:.80}"
        )
        self._answering.add(answering)
        answering.add_done_callback(self._answering.discard)

    async def stop(self) -> None:
        """Nobody is taken in any more. Cancellation: as without."""
        for answering in self._answering:
            answering.cancel()
        if self._answering:
            await asyncio.wait(list(self._answering))

    async def _answer(self, server: TaskSession, message: WorkerReported) -> None:
        session, report = message.session, message.report
        try:
            answer = AnswerReport(session, report, await self._taken(message))
        except (ZstratError, ValueError) as error:  # to the worker, and to the log
            if self._seldom.may_say():
                words = "no worker at %.80r: %s (%d so far)"
                log.warning(words, message.address, error, self._seldom.count)
            plain = cast("PlainTree", to_wire(error))
            answer = AnswerReport(session, report, -1, plain)
        server.link.submit(answer).add_done_callback(_heed)

    async def _taken(self, message: WorkerReported) -> int:
        address, index = message.address, message.index
        patience = EARLIER * max(0.0, message.patience)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(patience, UNDECIDED)):
                await self._said.wait()
        if not self._are_wished:
            raise PermissionDeniedError(NOT_WISHED)
        if index < 0:
            return await self._taking.report(address, index, patience)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + patience
        async with self._turns:
            left = deadline - loop.time()
            if left < 0:
                raise DeadlineExceededError(
                    f"{GREETED} workers that have reported themselves are greeted at a "
                    f"time, and worker {index} had no turn: report again"
                )
            return await self._taking.report(address, index, left)


def _heed(answer: asyncio.Future[Message]) -> None:
    """A server that was lost tells us again, or the worker tells another one."""
    if not answer.cancelled() and (error := answer.exception()) is not None:
        log.info("answering a worker that has reported itself: %s", error)
