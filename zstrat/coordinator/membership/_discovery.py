"""Discovers workers: the program asks the resolver, and workers report themselves.

`ResolverWatch` asks the resolver of the cluster again, on a thread, as the resolver may
block. One question is open at a time. After a loss it asks at once, and then after
growing pauses, as the answer may take a while to change. Errors of the resolver are
counted, and logged when they change; the workers stay as they are.

`ReportedWorkers` answers workers that report themselves (``zstrat-worker --join``).
Their reports arrive through a parameter server, which checks that they have a worker's
key. The program accepts such workers only if it called `Workers.accept_joining`.

Both are made, and called, on the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from functools import partial
from typing import TYPE_CHECKING, Final, cast, final

from zstrat.coordinator.connecting import log_failure
from zstrat.errors import (
    DeadlineExceededError,
    PermissionDeniedError,
    ZstratError,
    to_wire,
)
from zstrat.transport import RateLimitedLog
from zstrat.wire import AnswerReport

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from zstrat.coordinator.connecting import TaskSession
    from zstrat.wire import PlainTree, WorkerReported

log = logging.getLogger("zstrat.coordinator")

FIRST_PAUSE: Final = 1.0
"""Seconds between the first two questions after a loss; doubled up to ``every``."""
ANSWER_TIMEOUT: Final = 60.0
"""Seconds after which a resolver that does not answer is logged: twice the timeout of
our own resolvers for the service that they ask."""

MAX_ANSWERING: Final = 1024
"""The most reports that are answered at a time. More are dropped, and time out at the
server that sent them."""
MAX_GREETED: Final = 64
"""The most reported workers that are connected to at a time. Until a worker has joined
it takes four descriptors, of which a program may have as few as 1024, and nobody
vouches for its address. Further workers wait."""
UNDECIDED_SECONDS: Final = 10.0
"""Seconds for the program to call `Workers.accept_joining`: workers may report
themselves before its strategy exists."""
PART_OF_TIMEOUT: Final = 0.9
"""The part of a worker's timeout within which we answer: before its server answers that
the program did not."""
NOT_ACCEPTED: Final = (
    "the program does not take workers that report themselves; it has to call "
    "strategy.workers.accept_joining()"
)


@final
class ResolverWatch:
    """Asks one resolver for the workers from time to time.

    Args:
        ask: Called on a thread; may block, and may raise any error.
        every: Seconds between two questions while no worker is lost.
        on_answer: Called with each answer, on the loop.
    """

    def __init__(
        self,
        ask: Callable[[], Mapping[int, str]],
        every: float,
        on_answer: Callable[[Mapping[int, str]], None],
    ) -> None:
        self._ask, self._every, self._on_answer = ask, every, on_answer
        self._loop = asyncio.get_running_loop()
        self._pause = every
        self._timer: asyncio.TimerHandle | None = None
        self._answer_timer: asyncio.TimerHandle | None = None
        self._is_asking = self._is_stopped = False
        # As if just asked: the first answer made this session.
        self._asked_at = self._loop.time()
        self._last_error = ""
        self.questions = self.errors = 0

    def start(self) -> None:
        """Schedules the first question after ``every`` seconds, as the program has just
        asked."""
        self._ask_after(self._pause)

    def soon(self) -> None:
        """Asks as soon as possible, because a worker was lost."""
        self._pause = min(FIRST_PAUSE, self._every)
        since = self._loop.time() - self._asked_at
        if not self._is_asking:
            # Not twice within a pause: workers that flap must not flood the resolver.
            self._ask_after(max(0.0, self._pause - since))

    def stop(self) -> None:
        """Stops asking, and drops an answer that is awaited. A thread that waits for
        the resolver ends by itself, or with the process."""
        self._is_stopped = True
        for timer in (self._timer, self._answer_timer):
            if timer is not None:
                timer.cancel()

    def _ask_after(self, pause: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        if not self._is_stopped:
            self._timer = self._loop.call_later(pause, self._start_asking)

    def _start_asking(self) -> None:
        self._timer, self._is_asking = None, True
        self._asked_at = self._loop.time()
        self.questions += 1
        reason = f"no answer for {ANSWER_TIMEOUT:.0f} s"
        self._answer_timer = self._loop.call_later(
            ANSWER_TIMEOUT, self._log_error, reason
        )
        # Not a task of the loop's executor: those are joined at exit, and a resolver
        # may hang.
        threading.Thread(
            target=self._wait_for_answer, name="zstrat resolver", daemon=True
        ).start()

    def _wait_for_answer(self) -> None:
        """Waits for the answer of the resolver. Runs on the thread."""
        answer: Mapping[int, str] | None = None
        error: BaseException | None = None
        try:
            answer = self._ask()
        except BaseException as raised:  # to the log
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._answered, answer, error)

    def _answered(
        self, answer: Mapping[int, str] | None, error: BaseException | None
    ) -> None:
        # The answer may come long after that, as a thread cannot be stopped.
        if self._is_stopped:
            return
        self._is_asking = False
        if self._answer_timer is not None:
            self._answer_timer.cancel()
        if error is not None or answer is None:
            self._log_error(f"{type(error).__name__}: {error}")
        else:
            self._last_error = ""
            self._on_answer(answer)
        self._ask_after(self._pause)
        self._pause = min(2 * self._pause, self._every)

    def _log_error(self, reason: str) -> None:
        self.errors += 1
        if reason != self._last_error:
            log.warning(
                "the cluster resolver did not answer: %s; the workers stay as they are",
                reason,
            )
        self._last_error = reason


@final
class ReportedWorkers:
    """Answers the workers that report themselves in one session.

    Args:
        join: Adds a worker, given its address, number and timeout; returns its number
            (`Turnover.join_reported`).
    """

    def __init__(self, join: Callable[[str, int, float], Awaitable[int]]) -> None:
        self._join = join
        self._is_accepting, self._decided = False, asyncio.Event()
        self._answering: set[asyncio.Task[None]] = set()
        self._slots = asyncio.Semaphore(MAX_GREETED)
        self._refusals = RateLimitedLog(log)

    def accept(self, is_accepting: bool) -> None:
        """Sets whether workers that report themselves are added from now on, or
        refused."""
        self._is_accepting = is_accepting
        self._decided.set()

    def report_received(self, server: TaskSession, message: WorkerReported) -> None:
        """Answers a worker that reported itself through the ``server``."""
        if len(self._answering) >= MAX_ANSWERING:
            return
        answering = asyncio.get_running_loop().create_task(
            self._answer(server, message), name=f"a worker at {message.address:.80}"
        )
        self._answering.add(answering)
        answering.add_done_callback(self._answering.discard)

    async def stop(self) -> None:
        """Stops answering workers. Cancellation: stops all the same."""
        for answering in self._answering:
            answering.cancel()
        if self._answering:
            await asyncio.wait(list(self._answering))

    async def _answer(self, server: TaskSession, message: WorkerReported) -> None:
        session, report = message.session, message.report
        try:
            answer = AnswerReport(session, report, await self._join_worker(message))
        except (ZstratError, ValueError) as error:  # to the worker, and to the log
            text = "refused the worker at %.80r: %s"
            self._refusals.write(logging.WARNING, text, message.address, error)
            plain = cast("PlainTree", to_wire(error))
            answer = AnswerReport(session, report, -1, plain)
        # Without it that passes the report on again, or the worker reports elsewhere.
        server.link.submit(answer).add_done_callback(
            partial(log_failure, "answering a worker that reported itself")
        )

    async def _join_worker(self, message: WorkerReported) -> int:
        address, task_number = message.address, message.index
        timeout = PART_OF_TIMEOUT * max(0.0, message.timeout)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(timeout, UNDECIDED_SECONDS)):
                await self._decided.wait()
        if not self._is_accepting:
            raise PermissionDeniedError(NOT_ACCEPTED)
        # It only asks for a number: nothing is connected to, so it needs no slot.
        if task_number < 0:
            return await self._join(address, task_number, timeout)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        async with self._slots:
            # The wait for a slot counts: after the deadline its server has answered the
            # worker.
            left = deadline - loop.time()
            if left < 0:
                raise DeadlineExceededError(
                    f"worker {task_number} did not get one of {MAX_GREETED} slots for "
                    f"workers that join, within {timeout:.0f} s; report again"
                )
            return await self._join(address, task_number, left)
