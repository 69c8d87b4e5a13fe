"""Functions of users, called for elements: several at a time, and by name if they fail.

`in_order` has threads of its own, as many as it was told. The source is drawn by who
reads, so it needs no thread and no lock; elements that were drawn and not yielded are
as many as threads, and one more for each that waits for its turn.
"""

from __future__ import annotations

import contextlib
import contextvars
import itertools
import os
from collections import deque
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ._elements import ending
from ._prefetch import GOODBYE
from ._spec import spec_of
from ._tree import as_element

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from concurrent.futures import Future

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
) -> Iterator[Any]:
    """``function(number, element)`` of each element of the source.

    An error is raised in the place of its element, or as soon as it is there if the
    order does not count. Closing waits for calls that run, some seconds at most, and
    begins no others.
    """
    pending: deque[Future[Any]] = deque()
    pool = ThreadPoolExecutor(threads, thread_name_prefix="zstrat map")
    with contextlib.ExitStack() as stack:
        elements = enumerate(stack.enter_context(ending(source)))
        stack.callback(_end, pool, pending)
        while True:
            for number, element in itertools.islice(
                elements, threads * _WAITING - len(pending)
            ):
                # Each call in the context of who reads: two may not share one.
                run = contextvars.copy_context().run
                pending.append(pool.submit(run, function, number, element))
            if not pending:
                return
            yield _next(pending, is_ordered).result()


def _next(pending: deque[Future[Any]], is_ordered: bool) -> Future[Any]:
    if is_ordered:
        return pending.popleft()
    # No deadline: the function is the user's and may take as long as it likes.
    done, _ = wait(pending, return_when=FIRST_COMPLETED)
    first = next(future for future in pending if future in done)
    pending.remove(first)
    return first


def _end(pool: ThreadPoolExecutor, pending: deque[Future[Any]]) -> None:
    pool.shutdown(wait=False, cancel_futures=True)
    # What was cancelled is never done, as nobody takes it up.
    wait([future for future in pending if not future.cancelled()], GOODBYE)


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
