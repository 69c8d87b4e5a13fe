"""Draws the elements of a pass, one after the other.

`Elements` can look ahead in a pass, and take elements back. A worker must know the
shape of the first element before the first step runs, and must put back what a
cancelled step has drawn; a plain Python iterator can do neither. The elements are
opaque here: any pytree of arrays.

Law: an element that was drawn and put back is drawn again before any other, in the
order of the first drawing. One thread uses an `Elements` at a time.
"""

from __future__ import annotations

import contextlib
from collections import deque
from types import GeneratorType
from typing import TYPE_CHECKING, Final, Generic, Protocol, TypeVar, runtime_checkable

from zstrat.errors import ClosedError, OutOfRangeError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from types import TracebackType


T = TypeVar("T")


@runtime_checkable
class ClosingIterator(Protocol):
    """An iterator that must be closed, such as a generator or a prefetching thread."""

    def close(self) -> None: ...


@contextlib.contextmanager
def ending(iterator: Iterator[T]) -> Iterator[Iterator[T]]:
    """Closes the iterator at the end of the ``with`` block, if it has a ``close``
    method.

    So a pass that is abandoned ends its sources at once, one after the other, and not
    when the garbage collector happens to run.
    """
    # Asked now: at the end of the interpreter nobody can answer.
    closing = iterator if isinstance(iterator, ClosingIterator) else None
    try:
        yield iterator
    finally:
        if closing is not None:
            closing.close()


class Elements(Generic[T]):
    """An iterator over any iterable that can look ahead, and take elements back.

    ``name`` is the name of the data in errors. At the end, iterating raises
    StopIteration, as Python requires; `draw` and `peek` raise `OutOfRangeError`.
    """

    def __init__(self, source: Iterable[T], name: str = "the dataset") -> None:
        try:
            self._source: Iterator[T] = iter(source)
        except TypeError as error:
            raise TypeError(
                f"{name} must be iterable (a Dataset, a generator, a list of batches); "
                f"got {type(source).__name__}"
            ) from error
        self.name: Final = name
        self._ready: Final[deque[T]] = deque()
        """Elements that were put back; the first of them is the next element."""
        self._broken: tuple[Exception, TracebackType | None] | None = None
        """The last error of the source, and its traceback when it was first raised:
        each further `raise` would make the traceback of the exception itself longer."""
        self._ended = False
        self._closed = False

    def __iter__(self) -> Elements[T]:
        return self

    def __next__(self) -> T:
        if self._ready:
            return self._ready.popleft()
        if self._closed:
            raise ClosedError(f"{self.name} is closed: build its iterator again")
        if self._ended:
            # Not asked again: an iterator that breaks the protocol may have more
            # elements after its end.
            raise StopIteration
        return self._advance()

    def draw(self) -> T:
        """Returns the next element.

        Raises:
            OutOfRangeError: There are no more elements.
            ClosedError: After `close`.
            Exception: Whatever the source raised, unchanged. If the source can continue
                after an error, the next draw continues. If it cannot (a generator),
                every later draw raises the same error again, so that the error is not
                taken for the end; after Ctrl-C every later draw raises `ClosedError`.
        """
        try:
            return next(self)
        except StopIteration:
            raise OutOfRangeError(
                f"End of sequence: {self.name} is exhausted"
            ) from None

    def peek(self) -> T:
        """Returns the next element without drawing it. Raises as `draw` does."""
        element = self.draw()
        self.unread(element)
        return element

    def unread(self, element: T) -> None:
        """Puts back the element that was drawn last. Of several, put back the last one
        first."""
        if not self._closed:
            self._ready.appendleft(element)

    @property
    def is_closed(self) -> bool:
        return self._closed

    def close(self) -> None:
        """Ends the pass and closes the source (a generator's ``finally`` runs)."""
        if self._closed:
            return
        self._closed = True
        self._ready.clear()
        if isinstance(self._source, ClosingIterator):
            self._source.close()

    def replace(self, source: Iterator[T]) -> None:
        """Continues with another source; drops elements that were prefetched from this
        one. Must not be called after `close`."""
        self._ready.clear()
        self._broken, self._ended = None, False
        # The new one first: closing the old one runs code of the user, which may raise.
        before, self._source = self._source, source
        if isinstance(before, ClosingIterator):
            before.close()

    def _advance(self) -> T:
        try:
            element = next(self._source)
        except StopIteration:
            # A generator that raised is finished, and says so as if its data were.
            if self._broken is not None:
                error, trace = self._broken
                raise error.with_traceback(trace) from None
            self._ended = True
            raise
        except Exception as error:  # to the thread that draws; kept for the next one
            self._broken = (error, error.__traceback__)
            raise
        except BaseException as error:  # Ctrl-C, to the thread that draws
            # A generator without a frame was ended by it; other sources can continue.
            if isinstance(self._source, GeneratorType) and not self._source.gi_frame:
                what = f"{type(error).__name__} in a draw has ended this pass"
                ended = ClosedError(f"{self.name}: {what}: begin another one")
                self._broken = (ended, None)
            raise
        self._broken = None
        return element
