"""Functions of users, called for elements: several at a time, and by name if they fail.

`in_order` has threads of its own, as many as it was told. The source is drawn by who
reads, so it needs no thread and no lock; elements that were drawn and not yielded are
as many as threads, and one more for each that waits for its turn.
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
from ._prefetch import GOODBYE
from ._spec import spec_of
from ._tree import as_element

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_WAITING: Final = 2
"""Elements that are under way, for each thread: one is made, one is ready or begun."""

MOST_THREADS: Final = 16
"""What `AUTOTUNE` stands for on a machine with more cores."""


def threads_of(calls: int | None) -> int:
    """What ``num_parallel_calls`` means: -1 (AUTOTUNE) as many as cores; None: 0.

    Raises:
        ValueError: It is 0, or below -1.
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
    """``function(number, element)`` of each element of the source, whose first has the
    number ``start``.

    An error is raised in the place of its element, or as soon as it is there if the
    order does not count. Closing waits for calls that run, some seconds at most, and
    begins no others.
    """
    pending: deque[_Results] = deque()
    shared: _Results = SimpleQueue()
    with contextlib.ExitStack() as stack:
        elements = enumerate(stack.enter_context(ending(source)), start)
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
            yield _given(pending.popleft().get())


class _Result(NamedTuple):
    """What a call returned or raised."""

    value: Any
    error: BaseException | None


_Results = SimpleQueue[_Result]


def _dropped() -> _Result:
    """Of a call that nobody makes any more: who draws must not wait for it."""
    return _Result(None, CancelledError())


def _given(result: _Result) -> Any:
    if result.error is None:
        return result.value
    try:
        raise result.error
    finally:
        del result  # it would keep the traceback, which keeps this frame


@final
class Callers:
    """Threads that call functions, in the order in which they are asked to.

    They are daemons, and know the queue alone: one that is blocked in a user's function
    keeps no program from ending, as those of a ThreadPoolExecutor would.
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

    def call(self, results: _Results, function: Callable[..., Any], *args: Any) -> None:
        """Begins a call, in the context of who asks; its result goes to ``results``."""
        run = contextvars.copy_context().run  # of its own: two may not share one
        self._calls.put(_Call(results, lambda: run(function, *args)))
        if self._is_ended:  # behind the last look at the calls: nobody makes it
            results.put(_dropped())

    def end(self) -> bool:
        """Tells the threads to end after the call that they are in; False if they were
        told before, as all are when the interpreter ends."""
        if self._is_ended:
            return False
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
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))


class _Call(NamedTuple):
    results: _Results
    run: Callable[[], Any]


def _serve(calls: SimpleQueue[_Call | None]) -> None:
    while (waiting := calls.get()) is not None:
        results, run = waiting
        del waiting  # what it made may have no other owner than who reads
        try:
            results.put(_Result(run(), None))
        except BaseException as error:  # goes to who draws the element
            results.put(_Result(None, error))
        del results, run


_OPEN: Final[weakref.WeakSet[Callers]] = weakref.WeakSet()


def _end_all() -> None:
    """Before the interpreter ends: it would tear a thread out of jax's C++."""
    left = list(_OPEN)
    for callers in left:
        callers.end()
    deadline = time.monotonic() + GOODBYE
    for callers in left:
        callers.join(deadline)


atexit.register(_end_all)


def numbered(
    call: Callable[[Any], Any], what: str, function: Callable[..., Any]
) -> Callable[[int, Any], Any]:
    """``call``, whose errors say in a note which element it was, and where the user's
    function was then. Their type and words stay."""

    def named(number: int, element: Any) -> Any:
        try:
            return call(element)
        except Exception as error:  # goes on, to who draws the element
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
    """Where the user's function was: its own line, not one of what it called."""
    code = getattr(function, "__code__", None)
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code is code:
            return f"{code.co_filename}:{trace.tb_lineno}"
        trace = trace.tb_next
    if code is None:
        return "a place that it does not tell"
    return f"{code.co_filename}:{code.co_firstlineno}"


def _described(element: Any) -> str:
    if isinstance(element, np.generic | bytes):
        return f"{element!r:.100}"
    try:
        return f"{spec_of(as_element(element))!r:.300}"
    except (TypeError, ValueError):  # somebody else's, whose leaves are no arrays
        return f"a {type(element).__name__}"
