"""The common end of the data of all workers.

All workers end a pass at the same step. If each has different data (its own files, a
dataset function), some have less than others. A step needs all workers, so a worker
without data continues with empty elements as long as any other has data. The workers
agree on this by exchanging numbers: once a pass if all of them know their number of
steps, otherwise in every step. If some have data without an end, no further exchange is
needed: the others continue with empty elements. In the first exchange they also check
that all are in the same pass, if data are sharded among them in an order that changes
from pass to pass.

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
"""A function that returns, for each number, the largest value among all workers; each
worker passes the same number of numbers."""


_NEVER: Final = 2**31 - 1
"""Number of steps that an endless pass counts as, where the shortest pass decides. Some
collectives reduce in 32 bits."""


@final
@dataclass(frozen=True, slots=True)
class PassLength:
    """What is known of the length of a worker's passes before they begin.

    Args:
        steps: Number of steps; None: unknown.
        is_infinite: Whether the data are repeated without an end.
        is_common: Whether the length is the same for all workers; all that set this
            must agree.
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
    """The pass of one worker, extended so that all workers' passes are equally long.

    Args:
        elements: The pass over this worker's data.
        all_max: Function that exchanges numbers with the other workers.
        length: What is known of the length of the pass.
        empty: Function that makes an empty element, for steps after this worker's last
            element.
        is_partial: Whether empty elements are allowed; if not, all workers stop when
            the first one has no more data.
        order: Describes the order of the data; all workers with an order must have the
            same one.
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
        """How the end of the pass is found; None: the workers have not agreed on it
        yet."""
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
    """Makes the error for workers whose passes have different orders."""
    here = f"; this one begins {order} (distribution.pass)" if order else ""
    return ValueError(
        "several workers shard a dataset, and do not all begin the same pass of its "
        f"shuffle{here}. Each would read it in another order: some rows twice, others "
        "not at all. Distribute the dataset and begin its passes (iter()) equally "
        "often in all processes; after reform() with a restarted process make the "
        "dataset again in all of them, from shuffle() on, and distribute it again"
    )
