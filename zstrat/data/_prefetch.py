"""A thread that stays a bounded number of elements ahead of its reader.

The thread knows the buffer and the source, never the iterator: so an iterator that
nobody holds any more is collected, and its end closes the buffer and thereby ends the
thread. The source runs, fails and is closed on that thread alone.
"""

from __future__ import annotations

import contextvars
import threading
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any, Final, Never, final

from ._elements import ending

if TYPE_CHECKING:
    from collections.abc import Iterator

GOODBYE: Final = 5.0
"""Seconds that `Prefetcher.close` waits for a source that is blocked in user code; the
thread is a daemon and ends by itself when the source comes back."""


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


class _Buffer:
    """A queue of at most ``size`` items between two threads, which either may close."""

    __slots__ = ("_changed", "_closed", "_items", "_size")

    def __init__(self, size: int) -> None:
        self._size: Final = size
        self._items: Final[deque[Any]] = deque()
        self._changed: Final = threading.Condition()
        self._closed = False

    def put(self, item: object) -> bool:
        """False once the buffer is closed: the item was not taken, stop."""
        with self._changed:
            # No deadline: a slow reader is no fault, and one that is gone closes this.
            while len(self._items) >= self._size and not self._closed:
                self._changed.wait()
            if not self._closed:
                self._items.append(item)
                self._changed.notify_all()
            return not self._closed

    def get(self) -> Any:
        with self._changed:
            # No deadline: the source is the user's and may take as long as it likes.
            while not self._items and not self._closed:
                self._changed.wait()
            if self._closed:
                raise StopIteration
            if isinstance(self._items[0], _End):
                return self._items[0]  # stays: every later read ends likewise
            item = self._items.popleft()
            self._changed.notify_all()
            return item

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._items.clear()
            self._changed.notify_all()


@final
class Prefetcher:
    """Iterator over ``source`` whose next ``size`` items are made in advance."""

    def __init__(self, source: Iterator[Any], size: int) -> None:
        self._buffer: Final = _Buffer(size)
        # The source runs in the context of whoever began the pass (the worker's).
        context = contextvars.copy_context()
        self._thread: Final = threading.Thread(
            target=context.run,
            args=(_fill, source, self._buffer),
            name="zstrat prefetch",
            daemon=True,
        )
        weakref.finalize(self, self._buffer.close)
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
        self._buffer.close()
        self._thread.join(GOODBYE)


def _fill(source: Iterator[Any], buffer: _Buffer) -> None:
    try:
        with ending(source):
            for item in source:
                if not buffer.put(item):
                    return
                del item  # the reader may be its only owner while the next is made
        buffer.put(_End(None))
    except (
        BaseException
    ) as error:  # goes to the reader, who raises it in its own thread
        buffer.put(_End(error))
