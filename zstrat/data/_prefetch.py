"""A thread that stays a bounded number of elements ahead of its reader.

The thread knows the buffer and the source, never the iterator: so an iterator that
nobody holds any more is collected, and its end closes the buffer and thereby ends the
thread. The source runs, fails and is closed on that thread alone.
"""

from __future__ import annotations

import atexit
import contextlib
import contextvars
import time
import weakref
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Final, Never, final

from zstrat.threads import SteadyThread

from ._elements import ending

if TYPE_CHECKING:
    from collections.abc import Iterator

GOODBYE: Final = 5.0
"""Seconds that `Prefetcher.close`, and the end of the interpreter, wait for a source
that is blocked in user code; the thread is a daemon and ends by itself when the source
comes back."""


class _End:
    """What the thread leaves last in the buffer: the source's error, or its end."""

    __slots__ = ("error", "trace")

    def __init__(self, error: BaseException | None) -> None:
        self.error: Final = error
        self.trace: Final = None if error is None else error.__traceback__

    def announce(self) -> Never:
        if self.error is None:
            raise StopIteration
        raise self.error.with_traceback(self.trace)  # not one frame longer at each read


class _Closed:
    """What wakes a reader whose buffer was closed."""


_CLOSED: Final = _Closed()


class _Buffer:
    """At most ``size`` items between two threads, which either may close.

    One queue carries the items, the other the room for them. Both are C alone, so that
    handing over costs little beside elements that are cheap to make, and a finalizer
    may close the buffer whatever its thread is doing.
    """

    __slots__ = ("_end", "_is_closed", "_items", "_room", "_taken")

    def __init__(self, size: int) -> None:
        self._items: Final[SimpleQueue[Any]] = SimpleQueue()
        self._room: Final[SimpleQueue[bool]] = SimpleQueue()
        self._taken: Final[list[Any]] = []
        """What has left the queue, and not this object."""
        self._is_closed = False
        self._end: _End | None = None
        for _ in range(size):
            self._room.put(True)

    def put(self, item: object) -> bool:
        """False once the buffer is closed: the item was not taken, stop."""
        # No deadline: a slow reader is no fault, and one that is gone closes this.
        if not self._room.get() or self._is_closed:
            return False
        self._items.put(item)
        return True

    def finish(self, end: _End) -> None:
        """After the last item; there is always room for it."""
        self._items.put(end)

    def get(self) -> Any:
        if self._is_closed:
            raise StopIteration
        if self._end is not None:
            return self._end  # every later read ends likewise
        taken = self._taken
        if not taken:
            # No deadline: the source is the user's and may take as long as it likes.
            # From C, so that a Ctrl-C finds the item in the queue or here: one that
            # was lost on the way would have taken its room with it, for ever.
            taken.extend(map(SimpleQueue.get, (self._items,)))
        item = taken[0]
        if isinstance(item, _Closed):
            raise StopIteration
        if isinstance(item, _End):
            self._end = item
        else:
            self._room.put(True)
        taken.clear()
        return item

    def close(self) -> bool:
        """False if it was closed before, as all are when the interpreter ends: later
        there may be no module any more to do it with."""
        if self._is_closed:
            return False
        self._is_closed = True
        self._room.put(False)
        with contextlib.suppress(Empty):
            while True:
                self._items.get_nowait()
        self._items.put(_CLOSED)
        return True


_RUNNING: Final[weakref.WeakKeyDictionary[SteadyThread, _Buffer]] = (
    weakref.WeakKeyDictionary()
)


def _end_all() -> None:
    """Before the interpreter ends: it would tear a thread out of jax's C++, which
    ends the process with an error."""
    running = list(_RUNNING.items())
    for _, buffer in running:
        buffer.close()
    deadline = time.monotonic() + GOODBYE
    for thread, _ in running:
        thread.join(max(0.0, deadline - time.monotonic()))


atexit.register(_end_all)


@final
class Prefetcher:
    """Iterator over ``source`` whose next ``size`` items are made in advance."""

    def __init__(self, source: Iterator[Any], size: int) -> None:
        self._buffer: Final = _Buffer(size)
        # The source runs in the context of whoever began the pass (the worker's).
        context = contextvars.copy_context()
        self._thread: Final = SteadyThread(
            context.run, (_fill, source, self._buffer), name="zstrat prefetch"
        )
        weakref.finalize(self, self._buffer.close)
        _RUNNING[self._thread] = self._buffer
        self._thread.start()

    def __iter__(self) -> Prefetcher:
        return self

    def __next__(self) -> Any:
        item = self._buffer.get()
        if isinstance(item, _End):
            item.announce()
        return item

    def close(self) -> None:
        """Ends the thread and closes the source."""
        if self._buffer.close():
            self._thread.join(GOODBYE)


def _fill(source: Iterator[Any], buffer: _Buffer) -> None:
    try:
        with ending(source):
            for item in source:
                if not buffer.put(item):
                    return
                del item  # the reader may be its only owner while the next is made
        buffer.finish(_End(None))
    except BaseException as error:  # goes to the reader, who raises it in its thread
        buffer.finish(_End(error))
