"""`Residuals`: what error feedback has not sent yet, by variable.

The law of this file: the sum of what was sent and acknowledged, and of what is kept
here, is the sum of the gradients whose pushes were acknowledged. A step takes the
residual away with it; when its push is acknowledged, what the format left out comes
back; when the push fails, the residual comes back as it was, since the step runs again
elsewhere. So steps may be under way at the same time, and none sends a residual twice.

Error feedback is from Seide et al., "1-Bit Stochastic Gradient Descent" (2014).
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, NamedTuple, final

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy as np


class Lent(NamedTuple):
    """The residual of a variable while a push is under way."""

    key: int
    before: np.ndarray | None
    after: np.ndarray
    """What the format leaves out."""


@final
class Residuals:
    """The residuals of one worker in one session. For any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: dict[int, np.ndarray] = {}

    @property
    def nbytes(self) -> int:
        """Bytes that are kept."""
        with self._lock:
            return sum(array.nbytes for array in self._kept.values())

    def take(self, key: int) -> np.ndarray | None:
        """Takes the residual of a variable away; None if there is none."""
        with self._lock:
            return self._kept.pop(key, None)

    def settle(self, lent: Iterable[Lent], *, is_sent: bool) -> None:
        """Brings back what a push has left out, or, if it failed, what it had taken."""
        for key, before, after in lent:
            back = after if is_sent else before
            if back is None:
                continue
            with self._lock:
                there = self._kept.get(key)
                self._kept[key] = back if there is None else there + back
