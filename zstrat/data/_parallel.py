"""Threads that work for a pass: one that reads ahead, several that call functions.

A `Prefetcher` stays a bounded number of elements ahead of its reader. Its thread
references the buffer and the source, never the iterator: so an iterator without
references is collected, and its finalizer closes the buffer, which ends the thread. The
source runs, fails and is closed on that thread alone.

`in_order` calls a user's function for several elements at a time, on as many threads as
are configured. The reader draws the elements from the source, so the source needs no
thread and no lock. At most as many elements are drawn and not yet yielded as there are
threads, plus one more for each that waits for its turn.
"""

from __future__ import annotations

import atexit
import contextlib
import contextvars
import itertools
import os
import time
import weakref
from collections import deque
from concurrent.futures import CancelledError
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Final, NamedTuple, final

import numpy as np

from zstrat.threads import SteadyThread

from ._elements import ending
from ._spec import spec_of
from ._tree import as_element

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import TracebackType

GOODBYE: Final = 5.0
"""Seconds that a close, and the end of the interpreter, wait for a thread that is
blocked in user code; the thread is a daemon and ends when the code returns."""

_WAITING: Final = 2
"""For each thread, the number of elements that are drawn and not yet yielded: one is
being made, one is ready or begun."""

MOST_THREADS: Final = 16
"""Number of threads for `AUTOTUNE` on a machine with more cores than this."""


class _End(NamedTuple):
    """The last item of the buffer: the end of the source, or the error that the source
    raised."""

    error: BaseException | None = None
    trace: TracebackType | None = None


_CLOSED: Final = object()
"""An item that wakes a reader whose buffer was closed."""


class _Buffer:
    """A buffer of at most ``size`` items between two threads; either thread may close
    it.

    One queue carries the items, another one the free slots. Both queues are implemented
    in C, so handing an item over costs little even if elements are cheap to make, and a
    finalizer may close the buffer whatever its thread is doing.
    """

    __slots__ = ("_end", "_is_closed", "_items", "_room", "_taken")

    def __init__(self, size: int) -> None:
        self._items: Final[SimpleQueue[Any]] = SimpleQueue()
        self._room: Final[SimpleQueue[bool]] = SimpleQueue()
        self._taken: Final[list[Any]] = []
        """Items that have left the queue, and were not returned yet."""
        self._is_closed = False
        self._end: _End | None = None
        for _ in range(size):
            self._room.put(True)

    def put(self, item: object) -> bool:
        """Puts an item into the buffer. Returns False if the buffer is closed: then the
        item was not taken, and the caller has to stop."""
        # No deadline: a slow reader is not a fault, and one that is gone closes this.
        if not self._room.get() or self._is_closed:
            return False
        self._items.put(item)
        return True

    def finish(self, end: _End) -> None:
        """Puts the end marker after the last item; there is always a slot for it."""
        self._items.put(end)

    def get(self) -> Any:
        """Returns the next item.

        Raises:
            StopIteration: The source has ended, or the buffer was closed.
            BaseException: The error of the source, again at every later call.
        """
        if self._is_closed:
            raise StopIteration
        if self._end is None:
            taken = self._taken
            if not taken:
                # No deadline: the source is the user's and may take as long as it
                # likes. From C, so that a Ctrl-C finds the item in the queue or here:
                # one that was lost on the way would have taken its room with it, for
                # ever.
                taken.extend(map(SimpleQueue.get, (self._items,)))
            item = taken[0]
            if item is _CLOSED:
                raise StopIteration
            if not isinstance(item, _End):
                self._room.put(True)
                taken.clear()
                return item
            self._end = item
            taken.clear()
        error, trace = self._end
        if error is None:
            raise StopIteration
        raise error.with_traceback(trace)  # not one frame longer at each read

    def close(self) -> bool:
        """Closes the buffer for both threads. Returns False if it was closed before, as
        all buffers are when the interpreter ends: then modules that the thread needs
        may be gone."""
        if self._is_closed:
            return False
        # The mark first: there may be room left, and a thread that gets it has to see
        # that its item is not wanted.
        self._is_closed = True
        self._room.put(False)  # wakes the thread that waits for room
        with contextlib.suppress(Empty):
            while True:
                self._items.get_nowait()
        self._items.put(_CLOSED)
        return True


_RUNNING: Final[weakref.WeakKeyDictionary[SteadyThread, _Buffer]] = (
    weakref.WeakKeyDictionary()
)


@final
class Prefetcher:
    """Iterator over ``source`` whose next ``size`` items are made in advance."""

    def __init__(self, source: Iterator[Any], size: int) -> None:
        self._buffer: Final = _Buffer(size)
        # The source runs in the context of the thread that began the pass.
        context = contextvars.copy_context()
        self._thread: Final = SteadyThread(
            context.run, (_fill, source, self._buffer), name="zstrat prefetch"
        )
        # Of the buffer, not of this object: a finalizer must not keep it alive.
        weakref.finalize(self, self._buffer.close)
        # Before the start: the interpreter may end at any time after it.
        _RUNNING[self._thread] = self._buffer
        self._thread.start()

    def __iter__(self) -> Prefetcher:
        return self

    def __next__(self) -> Any:
        return self._buffer.get()

    def close(self) -> None:
        """Ends the thread and closes the source."""
        if self._buffer.close():
            self._thread.join(GOODBYE)


def _fill(source: Iterator[Any], buffer: _Buffer) -> None:
    # Closed here, on its own thread: a generator must not be closed while it runs.
    try:
        with ending(source):
            for item in source:
                if not buffer.put(item):
                    return
                del item  # the reader may be its only owner while the next is made
        buffer.finish(_End())
    except BaseException as error:  # goes to the reader, who raises it in its thread
        buffer.finish(_End(error, error.__traceback__))


def threads_of(calls: int | None) -> int:
    """Returns the number of threads for ``num_parallel_calls``: -1 is one per core,
    None is 0.

    Raises:
        ValueError: The argument is 0, or below -1.
    """
    if calls is None:
        return 0
    if calls == -1:
        return min(MOST_THREADS, len(os.sched_getaffinity(0)))
    if calls < 1:
        raise ValueError(f"`num_parallel_calls` must be at least 1, got {calls}")
    return calls


def in_order(
    source: Iterator[Any],
    function: Callable[[int, Any], Any],
    threads: int,
    is_ordered: bool,
    start: int = 0,
) -> Iterator[Any]:
    """Yields ``function(number, element)`` for each element of the source, in parallel
    calls on ``threads`` threads. The first element has the number ``start``.

    If ``is_ordered``, results are yielded, and errors raised, in the order of the
    elements; otherwise as soon as they are ready. Closing waits for calls that run,
    some seconds at most, and begins no others.
    """
    # In order each call has its own queue of results, which are read one after the
    # other; else all share one, and the first result that is there is the next.
    pending: deque[Results] = deque()
    shared: Results = SimpleQueue()
    with contextlib.ExitStack() as stack:
        elements = enumerate(stack.enter_context(ending(source)), start)
        # Closed before the source: a call that runs may still use its elements.
        callers = Callers(threads)
        stack.callback(callers.close)
        while True:
            for number, element in itertools.islice(
                elements, threads * _WAITING - len(pending)
            ):
                results = SimpleQueue() if is_ordered else shared
                callers.call(results, function, number, element)
                pending.append(results)
            if not pending:
                return
            # No deadline: the function is the user's and may take as long as it likes.
            yield result_of(pending.popleft())


class _Result(NamedTuple):
    """The result of a call, or the error that it raised."""

    value: Any
    error: BaseException | None


Results = SimpleQueue[_Result]


def _dropped() -> _Result:
    """Returns an error in place of the result of a call that will not be made, so that
    readers do not wait for the call."""
    return _Result(None, CancelledError())


def result_of(results: Results) -> Any:
    """Waits for the result of a call that `Callers.call` has begun; raises the error of
    the call."""
    result = results.get()
    if result.error is None:
        return result.value
    try:
        raise result.error
    finally:
        del result  # it would keep the traceback, which keeps this frame


@final
class Callers:
    """Threads that call functions, in the order of the requests.

    The threads are daemons, and reference only the queue of requests: a thread that is
    blocked in a user's function does not keep the program from ending, as one of a
    ThreadPoolExecutor would.
    """

    def __init__(self, count: int) -> None:
        self._calls: Final[SimpleQueue[_Call | None]] = SimpleQueue()
        self._threads: Final = [
            SteadyThread(_serve, (self._calls,), name="zstrat map")
            for _ in range(count)
        ]
        self._is_ended = False
        _OPEN.add(self)
        for thread in self._threads:
            thread.start()

    def call(self, results: Results, function: Callable[..., Any], *args: Any) -> None:
        """Begins a call on one of the threads, in the context of the caller; the result
        is put into ``results``."""
        run = contextvars.copy_context().run  # one each: two may not share one
        self._calls.put(_Call(results, lambda: run(function, *args)))
        if self._is_ended:  # after the last look at the calls: no thread makes it
            results.put(_dropped())

    def end(self) -> bool:
        """Asks the threads to end after their present call. Returns False if they were
        stopped before, as all are when the interpreter ends."""
        if self._is_ended:
            return False
        # The mark first: `call` looks at it after it has put a call into the queue, so
        # a call is dropped there or here, and no reader waits for one in vain.
        self._is_ended = True
        with contextlib.suppress(Empty):
            while (waiting := self._calls.get_nowait()) is not None:
                waiting.results.put(_dropped())
        for _ in self._threads:
            self._calls.put(None)
        return True

    def close(self) -> None:
        """Ends the threads, and waits for them, `GOODBYE` seconds at most."""
        if self.end():
            self.join(time.monotonic() + GOODBYE)

    def join(self, deadline: float) -> None:
        """Waits until ``deadline`` (monotonic seconds) for all threads to end."""
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))


class _Call(NamedTuple):
    results: Results
    run: Callable[[], Any]


def _serve(calls: SimpleQueue[_Call | None]) -> None:
    while (waiting := calls.get()) is not None:
        results, run = waiting
        del waiting  # what it made may have no other owner than the reader
        try:
            results.put(_Result(run(), None))
        except BaseException as error:  # goes to the reader of the element
            results.put(_Result(None, error))
        del results, run


_OPEN: Final[weakref.WeakSet[Callers]] = weakref.WeakSet()


def _end_all() -> None:
    """Ends all threads before the interpreter ends. The interpreter would stop a thread
    inside of jax's C++, which ends the process with an error."""
    running, left = list(_RUNNING.items()), list(_OPEN)
    # All are asked to end before any is waited for: they share one deadline.
    for _, buffer in running:
        buffer.close()
    for callers in left:
        callers.end()
    deadline = time.monotonic() + GOODBYE
    for thread, _ in running:
        thread.join(max(0.0, deadline - time.monotonic()))
    for callers in left:
        callers.join(deadline)


atexit.register(_end_all)


def numbered(
    call: Callable[[Any], Any], what: str, function: Callable[..., Any]
) -> Callable[[int, Any], Any]:
    """Wraps ``call`` so that an error gets a note with the number of the element and
    the line of the user's function. The type and message of the error stay."""

    def named(number: int, element: Any) -> Any:
        try:
            return call(element)
        except Exception as error:  # to the reader that draws the element
            error.add_note(_note(what, function, number, element, error))
            raise

    return named


def _note(
    what: str, function: Any, number: int, element: Any, error: BaseException
) -> str:
    name = getattr(function, "__name__", type(function).__name__)
    return (
        f"in {what}({name}) at {_line(function, error)}, of element {number} of this "
        f"pass: {_described(element)}"
    )


def _line(function: Any, error: BaseException) -> str:
    """Returns the line of the user's function at which the error occurred, not a line
    of a function that it called."""
    code = getattr(function, "__code__", None)
    trace = error.__traceback__
    # The outermost frame of the function: a recursive one is at the user's line there.
    while trace is not None:
        if trace.tb_frame.f_code is code:
            return f"{code.co_filename}:{trace.tb_lineno}"
        trace = trace.tb_next
    if code is None:
        return "an unknown place"
    return f"{code.co_filename}:{code.co_firstlineno}"


def _described(element: Any) -> str:
    if isinstance(element, np.generic | bytes):
        return f"{element!r:.100}"
    try:
        return f"{spec_of(as_element(element))!r:.300}"
    except (TypeError, ValueError):  # a user's class, whose leaves are not arrays
        return f"a {type(element).__name__}"
