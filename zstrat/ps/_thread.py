"""The one thread on which a parameter server computes what would block its event
loop."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Final, Protocol

from zstrat.errors import BusyError, ClosedError

CAPACITY: Final = 4096
"""The most jobs that may wait. Each one holds its message, whose bytes transport
bounds."""

Job = tuple[Callable[[], None], asyncio.Future[None]]


class JobThread(Protocol):
    """Runs jobs one after the other, outside of the event loop that submits them
    (`ComputeThread`)."""

    @property
    def waiting(self) -> int:
        """Number of jobs that have not begun."""
        ...

    def submit(self, job: Callable[[], None]) -> asyncio.Future[None]:
        """Queues a job; the returned future is done, on the event loop, when the job
        is.

        Raises:
            BusyError: Too many jobs wait.
            ClosedError: The thread was closed.
        """
        ...

    async def close(self, deadline: float) -> bool:
        """Ends the thread when its queued jobs are done; returns whether it ended by
        ``deadline``."""
        ...


MakeThread = Callable[[str], JobThread]
"""Makes a thread of the given name, which starts when it is first needed."""


class ComputeThread:
    """Runs jobs one after the other, in a thread outside of the event loop that owns
    it. The thread starts when it is first needed."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.Queue[Job | None] = queue.Queue(CAPACITY + 1)
        """Jobs to run. Only the loop adds to the queue; its last slot is for the order
        to end."""
        self._thread: threading.Thread | None = None
        self._ended: asyncio.Future[None] | None = None
        """Done, on the event loop, when the thread has done its last job; None before
        `close`."""
        self._closed = False

    @property
    def waiting(self) -> int:
        return self._jobs.qsize()

    def submit(self, job: Callable[[], None]) -> asyncio.Future[None]:
        """Queues a job; the returned future is done, on the event loop, when the job
        is.

        Raises:
            BusyError: The queue is full.
            ClosedError: The thread was closed.
        """
        if self._closed:
            raise ClosedError(f"{self._name} was closed")
        # Checked and not left to the queue, whose last place is for the order to end.
        if self._jobs.qsize() >= CAPACITY:
            raise BusyError(f"{self._name}: {CAPACITY} jobs wait already")
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        self._jobs.put_nowait((job, done))
        if self._thread is None:
            # A daemon, so that a job which never ends cannot keep the process alive.
            self._ended = loop.create_future()
            self._thread = threading.Thread(
                target=self._run, args=(loop, self._ended), name=self._name, daemon=True
            )
            self._thread.start()
        return done

    async def close(self, deadline: float) -> bool:
        """Ends the thread when its queued jobs are done; refuses further jobs from now
        on.

        Args:
            deadline: Loop time.

        Returns:
            False if the thread has not ended by the deadline; it ends when its jobs are
            done.

        Cancellation: the thread ends all the same, when its jobs are done.
        """
        # A second call only waits: the order to end is given once.
        is_first, self._closed = not self._closed, True
        if self._thread is None or self._ended is None:
            return True
        if is_first:
            self._jobs.put_nowait(None)
        await asyncio.wait(
            [self._ended], timeout=deadline - asyncio.get_running_loop().time()
        )
        if not self._ended.done():
            return False
        self._thread.join()  # it has nothing left to do but to return
        return True

    def _run(
        self, loop: asyncio.AbstractEventLoop, ended: asyncio.Future[None]
    ) -> None:
        self._work(loop)
        with contextlib.suppress(RuntimeError):  # the loop was closed
            loop.call_soon_threadsafe(_finish, ended, None)

    def _work(self, loop: asyncio.AbstractEventLoop) -> None:
        while (entry := self._jobs.get()) is not None:
            job, done = entry
            error: BaseException | None = None
            try:
                job()
            except BaseException as caught:  # to the code that awaits the job
                error = caught
            # Dropped before the loop learns of it: a job holds operands and memory of
            # messages.
            del job, entry
            try:
                loop.call_soon_threadsafe(_finish, done, error)
            except RuntimeError:  # the loop was closed: nothing awaits the job
                return
            # While this thread waits for the next job it must not keep the last one's
            # arrays alive, by the traceback of its error.
            del done, error


def _finish(done: asyncio.Future[None], error: BaseException | None) -> None:
    # Cancelled by the request that gave the job: what was computed stays.
    if done.done():
        return
    if error is None:
        done.set_result(None)
    elif isinstance(error, StopIteration):  # the one that a future cannot carry
        done.set_exception(RuntimeError(f"the job raised {error!r}"))
    else:
        done.set_exception(error)
