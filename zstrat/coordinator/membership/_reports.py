"""Answers workers that report themselves: they are taken in, or told why not.

They come by way of a parameter server, and only with a worker's key. Even so a program
takes them only if it says so: it decides which workers its cluster has. On the loop.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final, Protocol, cast, final

from zstrat.errors import PermissionDeniedError, ZstratError, to_wire
from zstrat.wire import AnswerReport

if TYPE_CHECKING:
    from zstrat.coordinator.connecting import TaskSession
    from zstrat.wire import Message, PlainTree, WorkerReported

log = logging.getLogger("zstrat.coordinator")

MAX_ANSWERING: Final = 1024
"""Reports that are answered at a time; other workers wait at their server in vain."""

NOT_WISHED: Final = (
    "the program takes no workers that report themselves: it does so behind "
    "strategy.workers.accept_joining()"
)


class TakingWorkers(Protocol):
    """What takes a worker in (`Turnover`)."""

    async def report(self, address: str, task_number: int, patience: float) -> int:
        """Returns the number of a worker that has reported itself, when it is in the
        session; at once if it asks for a number, by -1."""
        ...


@final
class AnsweredReports:
    """Answers the reports of one session. ``are_wished``: the program takes such
    workers."""

    def __init__(self, taking: TakingWorkers) -> None:
        self.are_wished = False
        self._taking = taking
        self._answering: set[asyncio.Task[None]] = set()

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
        """Nobody is taken in any more. Cancellation: as without."""
        for answering in self._answering:
            answering.cancel()
        if self._answering:
            await asyncio.wait(list(self._answering))

    async def _answer(self, server: TaskSession, message: WorkerReported) -> None:
        session, report = message.session, message.report
        task_number = message.index
        try:
            if not self.are_wished:
                raise PermissionDeniedError(NOT_WISHED)
            task_number = await self._taking.report(
                message.address, task_number, message.patience
            )
            answer = AnswerReport(session, report, task_number)
        except (ZstratError, ValueError) as error:  # to the worker, and to the log
            log.warning("no worker at %.80s: %s", message.address, error)
            plain = cast("PlainTree", to_wire(error))
            answer = AnswerReport(session, report, task_number, plain)
        server.link.submit(answer).add_done_callback(_log_error)


def _log_error(answer: asyncio.Future[Message]) -> None:
    """A server that was lost passes the report on again, or the worker reports to
    another one."""
    if not answer.cancelled() and (error := answer.exception()) is not None:
        log.info("answering a worker that has reported itself: %s", error)
