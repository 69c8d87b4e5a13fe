"""Workers that come to the end of their data in the same step.

Where each worker has other data (files of its own, a dataset function), some have less
than others. A step in which nobody is missing needs all of them, so a worker without
data goes on with empty elements as long as any other has some. The workers agree on
that: once a pass, if all of them know how many steps they have, else in every step.

Law of the file: all workers ask the same questions in the same order, in the thread
that draws; a worker whose data are infinite asks nothing, nor do the others then.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Protocol, final

from zstrat.errors import OutOfRangeError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from zstrat.data import Elements


class Accord(Protocol):
    """Brings the workers together."""

    def largest(self, numbers: Sequence[int]) -> list[int]:
        """Number by number the largest of all workers; each gives as many."""
        ...


@final
class Paced:
    """One worker's pass, as long as any worker's.

    Args:
        elements: Its own pass.
        steps: How many it has, None if nobody knows.
        empty: Makes what it goes on with.
        is_partial: Whether it goes on; if not, all stop where the first one does.
    """

    def __init__(
        self,
        elements: Elements[Any],
        accord: Accord,
        *,
        steps: int | None,
        empty: Callable[[], Any],
        is_partial: bool,
    ) -> None:
        self._elements: Final = elements
        self._accord: Final = accord
        self._empty: Final = empty
        self._sign: Final = 1 if is_partial else -1
        self._steps: Final = steps
        self._left: int | None = None
        """Steps to come; negative: ask in each. None: not asked yet."""

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._left is None:
            self._left = self._agreed_steps()
        if self._left == 0:
            raise StopIteration
        if self._left > 0:
            self._left -= 1
        elif not self._largest(self._has_more()):
            self._left = 0
            raise StopIteration
        return self._elements.draw() if self._has_more() else self._empty()

    def close(self) -> None:
        """Ends the pass of this worker; the others hear of it in no way."""
        self._elements.close()

    def _agreed_steps(self) -> int:
        is_unknown = self._steps is None
        steps = self._sign * (self._steps or 0)
        unknown, most = self._accord.largest([is_unknown, steps])
        return -1 if unknown else self._sign * most

    def _has_more(self) -> bool:
        try:
            self._elements.peek()
        except OutOfRangeError:
            return False
        return True

    def _largest(self, number: int) -> int:
        (found,) = self._accord.largest([self._sign * number])
        return self._sign * found
