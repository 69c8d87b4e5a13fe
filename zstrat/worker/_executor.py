"""The one thread of a worker that runs user code.

It carries out what the pipeline of the present session decides, and between two
closures whatever the loop sent it: code to unpickle, datasets to build, values that
arrived. User code, jax and pickles run here and nowhere else; sockets are touched on
the loop and nowhere else. They meet in the inbox (loop to thread) and in
``call_soon_threadsafe`` (thread to loop).
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol, TypeVar, assert_never, final

from ._closure import Do

if TYPE_CHECKING:
    from collections.abc import Callable

    from ._step_runner import StepRunner

T = TypeVar("T")

_LOG: Final = logging.getLogger("zstrat.worker")


class WorkerThread(Protocol):
    """The executor, as the loop sees it (`Executor`)."""

    def tell(self, event: Callable[[], None]) -> None:
        """Calls ``event`` on the thread, after all that was told before."""
        ...

    def submit(self, job: Callable[[], T]) -> asyncio.Future[T]:
        """Does a job on the thread between two closures."""
        ...

    def work_for(self, source: StepRunner | None) -> None:
        """From now on it does these closures. Called on the thread."""
        ...

    async def close(self, timeout: float) -> bool:
        """Ends the thread after the work in hand; whether it did in time."""
        ...


@final
class Executor:
    """Owns the thread. All public methods belong to the loop, but for `work_for`.

    Args:
        on_crash: Called on the loop if the thread ends by a defect of zstrat's own.
    """

    def __init__(
        self,
        name: str,
        *,
        on_crash: Callable[[BaseException], None],
    ) -> None:
        self._loop: Final = asyncio.get_running_loop()
        self._on_crash: Final = on_crash
        # Unbounded as a queue, bounded by those who write: the service bounds closures,
        # transport the requests of a peer, and each pull is answered once.
        self._inbox: Final[queue.SimpleQueue[Callable[[], None]]] = queue.SimpleQueue()
        self._source: StepRunner | None = None
        self._stopping = False
        self._ended: Final[asyncio.Future[None]] = self._loop.create_future()
        # A daemon, so that user code which never returns cannot keep the process alive.
        self._thread: Final = threading.Thread(
            target=self._main, name=f"zstrat executor {name}", daemon=True
        )
        self._thread.start()

    def tell(self, event: Callable[[], None]) -> None:
        """Calls ``event`` on the thread, after all that was told before."""
        self._inbox.put(event)

    def submit(self, job: Callable[[], T]) -> asyncio.Future[T]:
        """Does a job on the thread between two closures; the future gets what it
        returns or raises. Cancelling the future gives up the outcome, not the job."""
        future: asyncio.Future[T] = self._loop.create_future()
        self._inbox.put(partial(self._do, job, future))
        return future

    async def close(self, timeout: float) -> bool:
        """Ends the thread after the work in hand.

        Returns:
            False if user code did not return within ``timeout`` seconds.

        Cancellation: the thread ends all the same.
        """
        self._inbox.put(self._stop)
        # No thread pool waits for it: a server in a program that ends has none.
        await asyncio.wait([self._ended], timeout=timeout)
        if not self._ended.done():
            return False
        self._thread.join()  # its last line runs
        return True

    def work_for(self, source: StepRunner | None) -> None:
        """From now on the thread does these closures. To be called on the thread."""
        self._source = source

    def _stop(self) -> None:
        self._stopping = True

    def _main(self) -> None:
        try:
            while not self._stopping:
                self._turn()
        except BaseException as error:  # a defect: the daemon must end, and says so
            _LOG.critical("the executor thread failed", exc_info=True)
            self._call(self._on_crash, error)
        self._call(_resolve, self._ended, None)

    def _turn(self) -> None:
        """Events first, then work until there is none or an event comes."""
        inbox = self._inbox
        while not inbox.empty():
            inbox.get_nowait()()
        source = self._source
        if source is None or self._stopping:
            if not self._stopping:
                inbox.get()()
            return
        now = source.clock()
        while inbox.empty():
            then = work(source, now, self._call)
            if then is None:
                # No deadline: an idle worker waits for work as long as it lives.
                inbox.get()()
                return
            now = then

    def _do(self, job: Callable[[], T], future: asyncio.Future[T]) -> None:
        try:
            result = job()
        except BaseException as error:  # goes to whoever awaits the job
            self._call(_fail, future, error)
        else:
            self._call(_resolve, future, result)

    def _call(self, function: Callable[..., None], *args: object) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:  # the loop is closed: the process ends without us
            self._stopping = True


def work(source: StepRunner, now: float, call: Callable[..., object]) -> float | None:
    """Does the next piece of work there is.

    Args:
        call: Has the loop call a function with arguments.

    Returns:
        The time at its end; None if there is nothing to do.
    """
    do, step = source.pipeline.next(now)
    if do is Do.RUN:
        assert step is not None
        return source.run(step, now)
    if do is Do.PREPARE:
        assert step is not None
        return source.prepare(step, now)
    if do is Do.ADVANCE:
        assert step is not None
        return source.advance(step, now)
    if do is Do.POST:
        source.end_lines()
        call(source.carry_out, source.pipeline.post())
        return source.clock()
    if do is Do.WAIT:
        source.pipeline.rests(now)
        return None
    assert_never(do)


def _resolve(future: asyncio.Future[T], result: T) -> None:
    if not future.done():
        future.set_result(result)


def _fail(future: asyncio.Future[T], error: BaseException) -> None:
    if isinstance(error, StopIteration):  # which no future may carry
        error = RuntimeError(f"StopIteration left a function: {error}")
    if not future.done():
        future.set_exception(error)
