"""The event loop of a zstrat process, its thread, and how other threads wait for it.

The loop is uvloop's where uvloop is installed, else asyncio's. The loop of this
program's cluster runs on a background thread: scripts, notebooks and async programs all
keep their own thread, and heartbeats continue while jax compiles or the user thinks.

Law of the file: no code of the user runs on the loop's thread, and no other thread
waits for the loop without a deadline. A forked process has the loop, but not its
thread, so every use of the loop there is refused at once (`require_own`).

The thread is a daemon, so that it cannot keep an interpreter alive, and a portal that
is still open when the interpreter exits is closed first: a thread that is frozen in the
middle of a socket call could otherwise hang or crash the exit.

Python raises KeyboardInterrupt in whatever the main thread executes next. If that is a
callback of the garbage collector (jax has one) or a finalizer, no code can catch the
exception: Python reports that it is ignored, and continues. A program that schedules
steps in a loop lost three of four such interrupts, so they are raised again.
"""

from __future__ import annotations

import _thread
import asyncio
import atexit
import contextlib
import logging
import os
import signal
import sys
import threading
import warnings
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Generic, Protocol, TypeVar, final

# Before `close_portals` is registered, so that it ends after it: then it frees the
# memory of messages that libzmq has not sent yet, whichever process reads it.
import zmq.utils.garbage  # noqa: F401

from zstrat.errors import ClosedError, DeadlineExceededError, ForkedError
from zstrat.streams import occupy_descriptors
from zstrat.threads import SteadyThread, ThreadBell

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

try:
    import uvloop
except ImportError:  # no wheel for this platform: slower, and nothing else
    _make_loop: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop
else:
    _make_loop = uvloop.new_event_loop

_loops: Final[weakref.WeakSet[asyncio.AbstractEventLoop]] = weakref.WeakSet()
_of_parent: Final[weakref.WeakSet[asyncio.AbstractEventLoop]] = weakref.WeakSet()
"""Event loops that this process inherited from the process that forked it."""

_OURS: Final = f"{Path(__file__).parents[1]}{os.sep}"
_warned: Final[set[str]] = set()
"""Names of the awaitable calls that `warn_of_blocking` has already recommended."""

Result = TypeVar("Result")


def new_event_loop() -> asyncio.AbstractEventLoop:
    """Returns a new event loop that does not run yet."""
    # uvloop aborts the process if it has to close a descriptor below 3.
    occupy_descriptors()
    loop = _make_loop()
    _loops.add(loop)
    return loop


def require_own(loop: asyncio.AbstractEventLoop, what: str) -> None:
    """Checks that a loop can run in this process.

    Raises:
        ForkedError: This process was forked from the process that runs the loop.
    """
    if _of_parent and loop in _of_parent:
        raise ForkedError(what)


def warn_of_blocking(twin: str) -> None:
    """Warns that the present call is about to block the event loop that runs in this
    thread, once for each ``twin``. Does not warn in a notebook, whose kernel runs each
    cell in a loop that has nothing else to do.

    Args:
        twin: Name of the call to await instead.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return
    if twin in _warned or "ipykernel" in sys.modules:
        return
    warnings.warn(
        "this call blocks the event loop of its thread, and all tasks of it, until the "
        f"answer is there: await {twin} instead, or call it by asyncio.to_thread",
        RuntimeWarning,
        stacklevel=_outside(),
    )
    _warned.add(twin)  # not where warnings are errors: those are raised each time


def _outside() -> int:
    """Returns the number of frames between the caller and the first frame whose code is
    not zstrat's, as ``stacklevel`` of a warning."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_OURS):
        frame, level = frame.f_back, level + 1
    return level


def run(main: Coroutine[Any, Any, Result]) -> Result:
    """Runs ``main`` to its end on a new loop, as `asyncio.run` does."""
    runner = asyncio.Runner(loop_factory=new_event_loop)
    loop = runner.get_loop()
    try:
        with runner:
            return runner.run(main)
    finally:
        # Threads may have asked for something while the runner ended its tasks.
        _abandon_calls(loop)


class Bell(Protocol):
    """Wakes one waiter from another thread."""

    def ring(self) -> None: ...


class LoopBell:
    """Wakes the coroutine that awaits ``future``, on whichever loop it runs."""

    __slots__ = ("__weakref__", "_loop", "future")

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.future: asyncio.Future[None] = self._loop.create_future()

    def ring(self) -> None:
        # A closed loop raises, but nothing waits on it.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._set)

    def _set(self) -> None:
        # No check for `done` first: Ctrl-C may cancel it between check and set.
        with contextlib.suppress(asyncio.InvalidStateError):
            self.future.set_result(None)


@final
class _KeptInterrupts:
    """The hook for exceptions that no code can catch (``sys.unraisablehook``). Raises a
    Ctrl-C of the main thread again a moment later. Passes all other exceptions to the
    hook ``before``, also a Ctrl-C for which the program has its own signal handler:
    that one has run, and may have counted the signal."""

    def __init__(self, before: Callable[[sys.UnraisableHookArgs], object]) -> None:
        self._before: Final = before

    def __call__(self, ignored: sys.UnraisableHookArgs) -> None:
        is_main = threading.current_thread() is threading.main_thread()
        is_pressed = ignored.exc_type is KeyboardInterrupt and is_main
        if not is_pressed or not _raises_interrupts():
            self._before(ignored)
            return
        # By another thread, which runs when this one has left the callback; if it is
        # in the next one by then, this is called again.
        _thread.start_new_thread(_press_again, ())


def _raises_interrupts() -> bool:
    return signal.getsignal(signal.SIGINT) is signal.default_int_handler


_MOMENT: Final = 0.01
"""Seconds until the signal is sent again. This thread may run because the main thread
is about to wait for a lock; a signal that comes before the wait would not end it."""


def _press_again() -> None:
    """Sends SIGINT to the main thread again, which wakes the main thread wherever it
    waits."""
    threading.Event().wait(_MOMENT)
    main = threading.main_thread().ident
    if main is not None and _raises_interrupts():
        signal.pthread_kill(main, signal.SIGINT)


log = logging.getLogger("zstrat.transport")

T = TypeVar("T")
_CLOSING: Final = 10.0
"""Seconds that the last coroutine and the thread have to end when a portal closes."""
_ENDED: Final = "the session was closed"


class Portal:
    """An event loop on a background thread, and the ways by which other threads run
    work on it."""

    def __init__(self, name: str = "zstrat") -> None:
        self.loop = new_event_loop()
        self._close_callback: Callable[[], Coroutine[Any, Any, None]] | None = None
        self._leaving: asyncio.Task[None] | None = None
        self._closed = False
        self._why = "the session is closed"
        if not isinstance(sys.unraisablehook, _KeptInterrupts):
            sys.unraisablehook = _KeptInterrupts(sys.unraisablehook)
        self._thread = SteadyThread(self._live, name=name)
        try:
            self._thread.start()
            _open.add(self)
        except BaseException:  # to the caller, who has no portal: of Ctrl-C, too
            self.retire()
            raise

    def at_close(self, callback: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Makes the loop await ``callback()`` before the portal closes."""
        self._close_callback = callback

    def call_soon(self, function: Callable[..., object], *args: object) -> bool:
        """Runs the function on the loop; from any thread, also from a finalizer.

        Returns False if the portal is closed, so that the function will not run. Takes
        no lock.
        """
        if self._closed:
            return False
        try:
            self.loop.call_soon_threadsafe(function, *args)
        except RuntimeError:  # the loop was closed in between
            return False
        return True

    def run(self, work: Coroutine[Any, Any, T], timeout: float, what: str) -> T:
        """Blocks until the coroutine has ended on the loop.

        Cancellation: Ctrl-C cancels the coroutine and is raised at once.

        Raises:
            DeadlineExceededError: ``timeout`` seconds were not enough.
            ClosedError: The portal is closed.
        """
        self._require_open(work, what)
        return LoopCall(self.loop, work, what, _ENDED).run(timeout)

    async def run_async(self, work: Coroutine[Any, Any, T], what: str) -> T:
        """Runs a coroutine on the portal's loop, and awaits its result on the caller's
        loop. There is no deadline. Cancellation: cancels the work.

        Raises:
            ClosedError: The portal is closed.
        """
        self._require_open(work, what)
        return await LoopCall(self.loop, work, what, _ENDED).run_async()

    def retire(self) -> None:
        """Starts to close the portal, and returns at once. Takes no lock, so finalizers
        may call it."""
        self.call_soon(self._leave)

    def close(self, why: str | None = None) -> None:
        """Awaits the close callback, then ends the thread. Idempotent.

        Args:
            why: Reason in the errors of later calls; None: "the session is closed".
        """
        if why is not None:
            self._why = why
        self.retire()
        if threading.current_thread() is not self._thread:
            # The close callback has `_CLOSING` seconds, and so have the tasks that are
            # left.
            self._thread.join(2 * _CLOSING)
            if self._thread.is_alive():
                log.error("the thread %s did not end", self._thread.name)

    @property
    def is_closed(self) -> bool:
        return self._closed

    @property
    def is_here(self) -> bool:
        """Whether the caller is on the thread of the loop, and must not block it."""
        return threading.current_thread() is self._thread

    def _require_open(self, work: Coroutine[Any, Any, T], what: str) -> None:
        if self.is_here:
            # A coroutine that never runs would warn when it is collected.
            work.close()
            raise RuntimeError(f"{what}: a blocking call on the loop's own thread")
        if self._closed:
            work.close()
            require_own(self.loop, what)
            raise ClosedError(f"{what}: {self._why}")

    def forget(self) -> None:
        """Marks the portal as closed in a forked process."""
        self._closed = True

    def _live(self) -> None:
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
        finally:
            # First: calls from now on are refused, not posted to a loop that has ended.
            self._closed = True
            self.loop.run_until_complete(_end_tasks())
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
            self.loop.close()
            _abandon_calls(self.loop)

    def _leave(self) -> None:
        # On the loop, so that two closers need no lock.
        if self._leaving is None:
            self._leaving = self.loop.create_task(
                self._run_close_callback(), name="close the portal"
            )

    async def _run_close_callback(self) -> None:
        try:
            if self._close_callback is not None:
                async with asyncio.timeout(_CLOSING):
                    await self._close_callback()
        except Exception:  # goes to the log: the thread has to end all the same
            log.exception("closing the session")
        finally:
            self._closed = True
            self.loop.stop()


@final
class LoopCall(Generic[T]):
    """A coroutine that runs on ``loop`` for a caller elsewhere: `run` blocks, and
    `run_async` is awaited. One of the two is called once.

    Args:
        what: Name of the work in errors.
        ended: Reason in the error if the loop ends before the work.

    Raises, `run` and `run_async`:
        ClosedError: The loop ended before the work.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        work: Coroutine[Any, Any, T],
        what: str,
        ended: str = "the loop has ended",
    ) -> None:
        self._loop, self._work, self._what, self._ended = loop, work, what, ended
        self._task: asyncio.Task[T] | None = None
        self._bell: Bell | None = None
        self._is_over = False

    def run(self, timeout: float) -> T:
        """Blocks until the work has ended. Cancels it after ``timeout``, or on Ctrl-C.

        Raises:
            DeadlineExceededError: ``timeout`` seconds were not enough.
        """
        self._bell = bell = ThreadBell()
        try:
            self._ask()
            if not bell.wait(timeout):
                raise DeadlineExceededError(
                    f"{self._what} did not end within {timeout} s"
                )
            return self._outcome()
        finally:
            self._give_up()

    async def run_async(self) -> T:
        """Awaits the end of the work, on the caller's loop. Cancellation: cancels the
        work."""
        self._bell = bell = LoopBell()
        try:
            self._ask()
            await bell.future
            return self._outcome()
        finally:
            self._give_up()

    def abandon_if_of(self, loop: asyncio.AbstractEventLoop) -> None:
        """Wakes the caller if its work was to run on ``loop``, which is closed and runs
        nothing more."""
        if self._loop is loop and self._bell is not None:
            self._bell.ring()

    def _ask(self) -> None:
        try:
            require_own(self._loop, self._what)
        except ForkedError:
            self._work.close()
            raise
        # Before it is asked: a loop that is closed now raises, and one that is closed
        # later abandons it.
        _under_way.add(self)
        self._post(self._begin)

    def _post(self, function: Callable[..., object]) -> None:
        try:
            self._loop.call_soon_threadsafe(function)
        except RuntimeError:  # the loop was closed
            if self._task is None:
                self._work.close()
            raise self._closed() from None

    def _begin(self) -> None:
        self._task = self._loop.create_task(self._work, name=self._what)
        self._task.add_done_callback(self._end)

    def _end(self, task: asyncio.Task[T]) -> None:
        self._is_over = True
        if not task.cancelled():
            task.exception()  # a caller that gave up does not ask
        if self._bell is not None:
            self._bell.ring()

    def _outcome(self) -> T:
        if self._task is None or not self._is_over:  # abandoned
            raise self._closed()
        try:
            return self._task.result()
        except asyncio.CancelledError:
            raise self._closed() from None

    def _closed(self) -> ClosedError:
        return ClosedError(f"{self._what}: {self._ended}")

    def _give_up(self) -> None:
        """Cancels the work if it has not ended. The loop runs this after `_begin`, so
        the work has begun by then, or never will."""
        _under_way.discard(self)
        if not self._is_over:
            with contextlib.suppress(ClosedError):
                self._post(self._cancel)

    def _cancel(self) -> None:
        if self._task is None:
            self._work.close()
        else:
            self._task.cancel()


_under_way: Final[set[LoopCall[Any]]] = set()
"""Calls whose result a caller waits for now."""


def _abandon_calls(loop: asyncio.AbstractEventLoop) -> None:
    """Wakes the callers that wait for work on a closed loop: their work came after the
    tasks of the loop were cancelled, or did not end on cancellation."""
    for call in list(_under_way):
        call.abandon_if_of(loop)


async def _end_tasks() -> None:
    """Cancels all tasks of the loop, so that every caller gets an outcome."""
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    if left:
        await asyncio.wait(left, timeout=_CLOSING)


_open: Final[weakref.WeakSet[Portal]] = weakref.WeakSet()


def close_portals() -> None:
    """Closes all open portals. Also called when the interpreter exits."""
    for portal in list(_open):
        portal.close()


def _forget() -> None:
    """Forgets portals, loops and calls after a fork: no loop runs in the child, and no
    thread waits there."""
    for portal in list(_open):
        portal.forget()
    _of_parent.update(_loops)
    for each in (_open, _loops, _under_way):
        each.clear()


os.register_at_fork(after_in_child=_forget)
atexit.register(close_portals)
