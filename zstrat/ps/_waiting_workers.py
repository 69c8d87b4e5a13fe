"""Workers that no program knows wait at a parameter server for one that takes them.

A worker can reach the server, but not the program. So it reports itself to the server,
which passes the report on to the program whose session it serves, and the answer back.
If no program is connected, the worker waits for one. Only the program decides whether
it takes a worker.

Lives on the loop. Law of the file: code that changes the session calls `look`
afterwards.
"""

from __future__ import annotations

import asyncio
import itertools
from typing import TYPE_CHECKING, Final, NamedTuple, final

from zstrat.errors import BusyError, DeadlineExceededError, from_wire
from zstrat.transport import new_incarnation
from zstrat.wire import AnswerReport, Message, ReportWorker, WorkerReported

if TYPE_CHECKING:
    from collections.abc import Callable

    from zstrat.errors import ZstratError
    from zstrat.wire import Ownership

MAX_WAITING_REPORTS: Final = 1024
"""Reports that wait at a time; each is a process with a worker's key."""
_MAX_WAIT_SECONDS: Final = 7 * 86400.0
"""Seconds that a worker may wait at most."""


class _WaitingReport(NamedTuple):
    """A worker's report that waits, and the timer that ends its wait."""

    peer: object
    message: ReportWorker
    answer: asyncio.Future[Message]
    timer: asyncio.TimerHandle


@final
class WaitingWorkers:
    """The workers that wait at one parameter server, named ``task`` in errors.

    Args:
        tell: Sends a notice to the program that has the session, if it is there.
    """

    def __init__(
        self, task: str, ownership: Ownership, tell: Callable[[Message], None]
    ) -> None:
        self._task, self._ownership, self._tell = task, ownership, tell
        self._waiting: dict[int, _WaitingReport] = {}
        # Numbers begin at random, so an answer meant for the process before fits none.
        self._numbers = itertools.count(new_incarnation())

    def ask(self, peer: object, message: ReportWorker) -> asyncio.Future[Message]:
        """Returns a future of the answer of the program, or of DeadlineExceededError
        when the timeout of the worker is over.

        A peer that reports the same worker again did not get an answer, as its
        connection broke. The new report replaces the old one.

        Raises:
            BusyError: `MAX_WAITING_REPORTS` workers wait, or this peer has reported
                another worker, which is not answered yet.
        """
        for number, waiting in list(self._waiting.items()):
            if waiting.peer is not peer:
                continue
            if _worker(waiting.message) != _worker(message):
                raise BusyError(
                    f"{self._task}: another worker has reported itself over this "
                    "connection, and is not answered yet: wait for the answer, or "
                    "open another connection"
                )
            self._fail(number, BusyError(f"{self._task}: it was reported again"))
        if len(self._waiting) >= MAX_WAITING_REPORTS:
            raise BusyError(
                f"{self._task}: {MAX_WAITING_REPORTS} workers have reported themselves "
                "and wait for the program, which is the limit: report again later, or "
                "at another parameter server"
            )
        loop, number = asyncio.get_running_loop(), next(self._numbers)
        seconds = min(max(0.0, message.timeout), _MAX_WAIT_SECONDS)
        timer = loop.call_later(seconds, self._late, number)
        answer: asyncio.Future[Message] = loop.create_future()
        self._waiting[number] = _WaitingReport(peer, message, answer, timer)
        self._pass_on(number)
        return answer

    def look(self) -> None:
        """Reports all waiting workers to the program. Called when a session is opened,
        as its program may not know them."""
        for number in self._waiting:
            self._pass_on(number)

    def answered(self, message: AnswerReport) -> None:
        """Passes the decision of the program on to its worker."""
        waiting = self._take(message.report)
        if waiting is None or waiting.answer.done():
            return  # its timeout is over, or it is gone
        if message.error is None:
            waiting.answer.set_result(message)
        else:
            waiting.answer.set_exception(from_wire(message.error))

    def lost(self, peer: object) -> None:
        """Drops the reports of a peer whose connection has ended."""
        gone = [n for n, waiting in self._waiting.items() if waiting.peer is peer]
        for number in gone:
            if (waiting := self._take(number)) is not None:
                waiting.answer.cancel()

    def close(self, error: ZstratError) -> None:
        """Ends all waits with the error, as the server shuts down."""
        for number in list(self._waiting):
            self._fail(number, error)

    def _pass_on(self, number: int) -> None:
        session, message = self._ownership.session, self._waiting[number].message
        if session is not None:
            address, index = message.address, message.index
            patience = message.timeout
            self._tell(WorkerReported(session, number, address, index, patience))

    def _late(self, number: int) -> None:
        message, owner = self._waiting[number].message, self._ownership.owner
        words = "no program has opened a session here"
        if owner is not None and owner.alive:
            words = f"{owner} has not taken the worker"
        elif owner is not None:
            words = f"{owner}, which has opened a session here, is gone"
        patience = f"within {message.timeout:g} s"
        self._fail(number, DeadlineExceededError(f"{self._task}: {words} {patience}"))

    def _fail(self, number: int, error: ZstratError) -> None:
        waiting = self._take(number)
        if waiting is not None and not waiting.answer.done():
            waiting.answer.set_exception(error)

    def _take(self, number: int) -> _WaitingReport | None:
        waiting = self._waiting.pop(number, None)
        if waiting is not None:
            waiting.timer.cancel()
        return waiting


def _worker(message: ReportWorker) -> tuple[str, int]:
    return message.address, message.index
