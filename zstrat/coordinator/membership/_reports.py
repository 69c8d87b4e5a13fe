"""Answers workers that report themselves: they are taken in, or told why not.

They come by way of a parameter server, and only with a worker's key. Even so a program
takes them only if it says so: it decides which workers its cluster has. On the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, Final, cast, final

from zstrat.errors import (
    DeadlineExceededError,
    PermissionDeniedError,
    ZstratError,
    to_wire,
)
from zstrat.transport import RateLimitedLog
from zstrat.wire import AnswerReport

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from zstrat.coordinator.connecting import TaskSession
    from zstrat.wire import Message, PlainTree, WorkerReported

log = logging.getLogger("zstrat.coordinator")

MAX_ANSWERING: Final = 1024
"""Reports that are answered at a time; other workers wait at their server in vain."""

MAX_GREETED: Final = 64
"""Of these, those that are greeted at a time: each takes four descriptors until it has
come, of which a program may have as few as 1024, and the address is a stranger's word.
The others wait for their turn."""

UNDECIDED_SECONDS: Final = 10.0
"""Seconds that a program has to say that it takes such workers: some may have waited
for it, and its strategy has to be made before it can say so."""

PART_OF_TIMEOUT: Final = 0.9
"""The part of a worker's timeout after which it hears from us what is in the way:
before its server says that nobody has answered."""

NOT_WISHED: Final = (
    "the program takes no workers that report themselves: it does after "
    "strategy.workers.accept_joining()"
)


@final
class AnsweredReports:
    """Answers the reports of one session.

    Args:
        take: Takes a worker in, by address, number and timeout (`Turnover.report`).
    """

    def __init__(self, take: Callable[[str, int, float], Awaitable[int]]) -> None:
        self._are_wished, self._said = False, asyncio.Event()
        self._take = take
        self._answering: set[asyncio.Task[None]] = set()
        self._turns = asyncio.Semaphore(MAX_GREETED)
        self._refusals = RateLimitedLog(log)

    def accept(self, are_wished: bool) -> None:
        """The program takes such workers from now on, or none any more."""
        self._are_wished = are_wished
        self._said.set()

    def report_received(self, server: TaskSession, message: WorkerReported) -> None:
        """A worker has reported itself at the server."""
        if len(self._answering) >= MAX_ANSWERING:
            return
        answering = asyncio.get_running_loop().create_task(
            self._answer(server, message), name=f"a worker at {message.address:.80}"
        )
        self._answering.add(answering)
        answering.add_done_callback(self._answering.discard)

    async def stop(self) -> None:
        """Takes no worker in any more. Cancellation: as without."""
        for answering in self._answering:
            answering.cancel()
        if self._answering:
            await asyncio.wait(list(self._answering))

    async def _answer(self, server: TaskSession, message: WorkerReported) -> None:
        session, report = message.session, message.report
        try:
            answer = AnswerReport(session, report, await self._taken(message))
        except (ZstratError, ValueError) as error:  # to the worker, and to the log
            text = "refused the worker at %.80r: %s"
            self._refusals.write(logging.WARNING, text, message.address, error)
            plain = cast("PlainTree", to_wire(error))
            answer = AnswerReport(session, report, -1, plain)
        server.link.submit(answer).add_done_callback(_log_error)

    async def _taken(self, message: WorkerReported) -> int:
        address, task_number = message.address, message.index
        timeout = PART_OF_TIMEOUT * max(0.0, message.timeout)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(timeout, UNDECIDED_SECONDS)):
                await self._said.wait()
        if not self._are_wished:
            raise PermissionDeniedError(NOT_WISHED)
        if task_number < 0:
            return await self._take(address, task_number, timeout)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        async with self._turns:
            left = deadline - loop.time()
            if left < 0:
                raise DeadlineExceededError(
                    f"{MAX_GREETED} workers that have reported themselves are greeted "
                    f"at a time, and worker {task_number} had no turn: report again"
                )
            return await self._take(address, task_number, left)


def _log_error(answer: asyncio.Future[Message]) -> None:
    """A server that was lost passes the report on again, or the worker reports to
    another one."""
    if not answer.cancelled() and (error := answer.exception()) is not None:
        log.info("answering a worker that has reported itself: %s", error)
