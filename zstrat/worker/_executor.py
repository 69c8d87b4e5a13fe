"""The only thread of a worker that runs user code.

The thread carries out what the pipeline of the present session decides, and, between
closures, what the loop sends: code to unpickle, datasets to build, values that arrived.
User code, jax and pickles run only on this thread; sockets are used only on the loop.
The loop calls the thread through an inbox, and the thread calls the loop by
``call_soon_threadsafe``.
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
    """The part of `Executor` that sessions use, on the loop."""

    def tell(self, event: Callable[[], None]) -> None:
        """Calls ``event`` on the thread, after the work that was sent to the thread
        before."""
        ...

    def submit(self, job: Callable[[], T]) -> asyncio.Future[T]:
        """Runs a job on the thread between two closures; returns a future of its
        outcome."""
        ...

    def work_for(self, source: StepRunner | None) -> None:
        """Makes the thread run the closures of ``source`` from now on. Called on the
        thread."""
        ...

    async def close(self, timeout: float) -> bool:
        """Ends the thread after its present work; returns False if that takes longer
        than ``timeout`` seconds."""
        ...


@final
class Executor:
    """Owns the thread that runs user code. Public methods are called on the loop,
    except `work_for`.

    Args:
        on_crash: Called on the loop if the thread ends by a defect of zstrat itself.
    """

    def __init__(
        self,
        name: str,
        *,
        on_crash: Callable[[BaseException], None],
    ) -> None:
        self._loop: Final = asyncio.get_running_loop()
        self._on_crash: Final = on_crash
        # Unbounded as a queue, bounded by its writers: the service bounds closures,
        # the transport bounds requests of a peer, and each pull is answered once.
        self._inbox: Final[queue.SimpleQueue[Callable[[], None]]] = queue.SimpleQueue()
        self._source: StepRunner | None = None
        self._stopping = False
        self._ended: Final[asyncio.Future[None]] = self._loop.create_future()
        # A daemon thread, so that user code that never returns cannot keep the process.
        self._thread: Final = threading.Thread(
            target=self._main, name=f"zstrat executor {name}", daemon=True
        )
        self._thread.start()

    def tell(self, event: Callable[[], None]) -> None:
        """Calls ``event`` on the thread, after the work that was sent to the thread
        before."""
        self._inbox.put(event)

    def submit(self, job: Callable[[], T]) -> asyncio.Future[T]:
        """Runs a job on the thread between two closures; returns a future of its
        outcome. Cancelling the future does not stop the job."""
        future: asyncio.Future[T] = self._loop.create_future()
        self._inbox.put(partial(self._do, job, future))
        return future

    async def close(self, timeout: float) -> bool:
        """Ends the thread after its present work.

        Returns:
            False if user code did not return within ``timeout`` seconds.

        Cancellation: the thread ends all the same.
        """
        self._inbox.put(self._stop)
        # Without a thread pool: none works in a program that is ending.
        await asyncio.wait([self._ended], timeout=timeout)
        if not self._ended.done():
            return False
        self._thread.join()  # the thread is about to end
        return True

    def work_for(self, source: StepRunner | None) -> None:
        """Makes the thread run the closures of ``source`` from now on. Called on the
        thread."""
        self._source = source

    def _stop(self) -> None:
        self._stopping = True

    def _main(self) -> None:
        try:
            while not self._stopping:
                self._turn()
        except BaseException as error:  # a defect: the daemon must end with an error
            _LOG.critical("the executor thread failed", exc_info=True)
            self._call(self._on_crash, error)
        self._call(_resolve, self._ended, None)

    def _turn(self) -> None:
        """Handles all waiting events, then works until there is no work left or an
        event arrives."""
        inbox = self._inbox
        # All events first: one may be the answer that the pipeline would wait for.
        while not inbox.empty():
            inbox.get_nowait()()
        source = self._source
        if source is None or self._stopping:
            if not self._stopping:
                inbox.get()()
            return
        now = source.clock()
        # After each piece of work, as a closure may be long and an event, such as a
        # cancellation, changes what is next.
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
        # Also SystemExit of user code: it must not end the thread.
        except BaseException as error:  # to the caller that awaits the job
            self._call(_fail, future, error)
        else:
            self._call(_resolve, future, result)

    def _call(self, function: Callable[..., None], *args: object) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:  # the loop is closed, as the process ends
            self._stopping = True


def work(source: StepRunner, now: float, call: Callable[..., object]) -> float | None:
    """Does the next piece of work of ``source``.

    Args:
        call: Calls a function on the loop.

    Returns:
        The time at the end of the work; None if there was nothing to do.
    """
    do, step = source.pipeline.next(now)
    if do is Do.RUN:
        assert step is not None
        return source.run(step, now)
    if do is Do.PREPARE:
        assert step is not None
        return source.prepare(step, now)
    if do is Do.BEGIN:
        assert step is not None
        return source.begin(step, now)
    if do is Do.ADVANCE:
        assert step is not None
        return source.advance(step, now)
    if do is Do.POST:
        # Text is sent before the ends of the steps that printed it.
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
    if isinstance(error, StopIteration):  # a future cannot hold it
        error = RuntimeError(f"StopIteration left a function: {error}")
    if not future.done():
        future.set_exception(error)
