"""The threads of a simulated process: their work is done on its loop, later.

The order on each thread stays; between two of its jobs the loop runs, as it does beside
a real one.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import TYPE_CHECKING, TypeVar, final

from zstrat.errors import ClosedError
from zstrat.worker import work

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from zstrat.worker import StepRunner

    from ._world import VirtualLoop

T = TypeVar("T")


@final
class VirtualThread:
    """Stands for `zstrat.ps.JobThread`.

    Args:
        duration: Draws how long a job takes, in seconds.
    """

    def __init__(self, loop: VirtualLoop, duration: Callable[[], float]) -> None:
        self._loop, self._duration = loop, duration
        self._free_at = 0.0
        self.waiting = 0
        self._is_closed = False

    def submit(self, job: Callable[[], None]) -> asyncio.Future[None]:
        if self._is_closed:
            raise ClosedError("the thread was closed")
        done = self._loop.create_future()
        self._free_at = max(self._free_at, self._loop.time()) + self._duration()
        self.waiting += 1
        self._loop.call_at(self._free_at, self._do, job, done)
        return done

    async def close(self, deadline: float) -> bool:
        """At once: whatever waits is done all the same."""
        del deadline
        self._is_closed = True
        return not self.waiting

    def _do(self, job: Callable[[], None], done: asyncio.Future[None]) -> None:
        self.waiting -= 1
        _settle(job, done)


@final
class VirtualExecutor:
    """Stands for `zstrat.worker.Executor`, on the loop that runs.

    Args:
        duration: Draws how long a piece of work takes, in seconds.
    """

    def __init__(
        self,
        name: str,
        *,
        on_crash: Callable[[BaseException], None],
        loop: VirtualLoop,
        duration: Callable[[], float],
    ) -> None:
        del name
        self._loop, self._duration, self._on_crash = loop, duration, on_crash
        self._inbox: deque[Callable[[], None]] = deque()
        self._source: StepRunner | None = None
        self._is_awake = self._is_closed = False

    def tell(self, event: Callable[[], None]) -> None:
        self._inbox.append(event)
        self._wake()

    def submit(self, job: Callable[[], T]) -> asyncio.Future[T]:
        done: asyncio.Future[T] = self._loop.create_future()
        self.tell(partial(_settle, job, done))
        return done

    def work_for(self, source: StepRunner | None) -> None:
        self._source = source

    async def close(self, timeout: float) -> bool:
        """Closes the thread at once."""
        del timeout
        self._is_closed = True
        return True

    def _wake(self) -> None:
        if not self._is_awake and not self._is_closed:
            self._is_awake = True
            self._loop.call_later(self._duration(), self._turn)

    def _turn(self) -> None:
        """Events first, as on the thread; or else one piece of work."""
        self._is_awake = False
        try:
            if self._inbox:
                while self._inbox:
                    self._inbox.popleft()()
                self._wake()
            elif self._source is not None:
                now = work(self._source, self._loop.time(), self._loop.call_soon)
                if now is not None:
                    self._wake()
        except BaseException as error:  # as on the thread: a defect of zstrat's own
            self._on_crash(error)


def _settle(job: Callable[[], T], done: asyncio.Future[T]) -> None:
    try:
        result = job()
    except BaseException as error:  # goes to whoever awaits the job
        if not done.done():
            done.set_exception(error)
    else:
        if not done.done():
            done.set_result(result)
