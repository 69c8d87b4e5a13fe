"""The common end of the data of all workers.

Workers end together. Where each has other data (its own files, a dataset function),
some have less than others. A step needs all workers, so a worker without data continues
with empty elements as long as any other has some. The workers agree on that: once a
pass, if all of them know their number of steps, else in every step. If some have data
without an end, there are no further questions: the others continue with empty elements.
With the first question they also check that they are at the same pass of data that is
sharded among them in an order that changes from pass to pass.

Law: all workers make the same exchanges in the same order, in the thread that draws. So
the first exchange of a pass always happens, and all else follows from its result, which
is the same for all.
"""

from __future__ import annotations

import enum
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias, assert_never, final

from zstrat.errors import OutOfRangeError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from zstrat.data import Elements


AllMax: TypeAlias = "Callable[[Sequence[int]], list[int]]"
"""Number by number the largest of all workers; each worker gives as many numbers."""


_NEVER: Final = 2**31 - 1
"""Steps of a pass without an end, where the least of all counts. Some collectives
reduce in 32 bits."""


@final
@dataclass(frozen=True, slots=True)
class PassLength:
    """The known length of the passes of a worker, before they begin.

    Args:
        steps: None: unknown.
        is_infinite: The data are repeated without an end.
        is_common: All workers that set this have the same length.
    """

    steps: int | None = None
    is_infinite: bool = False
    is_common: bool = False


class _EndRule(enum.Enum):
    OWN = "each to its own end"
    FOREVER = "without an end"
    COUNTED = "so many steps"
    ASKED = "asking before each step"


@final
class SynchronizedPass:
    """The pass of one worker, which is as long as that of any worker.

    Args:
        elements: The pass over its own data.
        all_max: Exchanges numbers with the other workers.
        length: What is known of the length of the pass.
        empty: Makes the elements that follow its own last one.
        is_partial: Whether there are such elements; if not, all workers stop where the
            first one does.
        order: Describes the order of the pass; all workers that have one need the same.
    """

    def __init__(
        self,
        elements: Elements[Any],
        all_max: AllMax,
        *,
        length: PassLength,
        empty: Callable[[], Any],
        is_partial: bool,
        order: str = "",
    ) -> None:
        self._elements: Final = elements
        self._all_max: Final = all_max
        self._length: Final = length
        self._empty: Final = empty
        self._order: Final = order
        # The largest of negative numbers is that of the worker that stops first.
        self._sign: Final = 1 if is_partial else -1
        self._end_rule: _EndRule | None = None
        """None: the workers have not agreed yet."""
        self._is_endless = False
        self._left = 0

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        if self._end_rule is None:
            self._end_rule = self._agreed()
        match self._end_rule:
            case _EndRule.OWN:
                return next(self._elements)
            case _EndRule.FOREVER:
                pass
            case _EndRule.COUNTED:
                if not self._left:
                    raise StopIteration
                self._left -= 1
            case _EndRule.ASKED:
                if not self._all_max([self._sign * self._has_more()])[0]:
                    # From now on nothing is left, and no worker asks again.
                    self._end_rule = _EndRule.COUNTED
                    raise StopIteration
            case _:
                assert_never(self._end_rule)
        return self._own_or_empty()

    def close(self) -> None:
        """Ends the pass of this worker; the others are not notified."""
        self._elements.close()

    def _agreed(self) -> _EndRule:
        length, sign = self._length, self._sign
        steps = length.steps
        if length.is_infinite:
            # An empty dataset, repeated without an end, is empty: then there are no
            # steps.
            self._is_endless = self._has_more()
            steps = _NEVER if self._is_endless else 0
        # The largest digest and the largest of their negatives show whether all are
        # equal. A worker without an order gives numbers that count in neither.
        digest = zlib.crc32(self._order.encode()) & _NEVER if self._order else None
        apart, forever, unknown, most, high, low = self._all_max(
            [
                not length.is_common,
                sign * self._is_endless,
                steps is None,
                sign * (steps or 0),
                0 if digest is None else digest,
                -_NEVER if digest is None else -digest,
            ]
        )
        # First: under any rule the workers would read on, each in another order.
        if high > -low:
            raise _unlike(self._order)
        # All passes are equally long, so nobody has to ask.
        if not apart:
            return _EndRule.OWN
        if sign * forever:
            return _EndRule.FOREVER
        if unknown:
            return _EndRule.ASKED
        self._left = sign * most
        return _EndRule.COUNTED

    def _own_or_empty(self) -> Any:
        if self._has_more():
            return self._elements.draw()
        if self._is_endless:
            raise ValueError(
                "the data of this worker were to be repeated without an end, on which "
                "the others rely, and have ended: repeat() needs a source that can be "
                "read again (a function that makes a generator, not one generator)"
            )
        return self._empty()

    def _has_more(self) -> bool:
        try:
            self._elements.peek()
        except OutOfRangeError:
            return False
        return True


def _unlike(order: str) -> ValueError:
    """Makes the error of workers whose passes have different orders."""
    here = f"; this one begins {order} (distribution.pass)" if order else ""
    return ValueError(
        "several workers shard a dataset, and do not all begin the same pass of its "
        f"shuffle{here}. Each would read it in another order: some rows twice, others "
        "not at all. Distribute the dataset and begin its passes (iter()) equally "
        "often in all processes; after reform() with a restarted process make the "
        "dataset again in all of them, from shuffle() on, and distribute it again"
    )
