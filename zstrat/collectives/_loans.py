"""Memory of the caller that is on its way out.

What is sent without a copy must stay as it is until the socket has taken it, and a
socket does not say when that was: but it lets the bytes go. So each hop is made of a
view whose death is counted, and a call that has lent memory is over when it has all of
it back. A copy of 1 MiB costs as much as the way of the same bytes into the kernel.

Law of the file: nobody is told of a loan that came back but whoever waits for it.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import numpy as np

from zstrat.transport import lend

if TYPE_CHECKING:
    from collections.abc import Callable


class Loans:
    """What one call has lent.

    Args:
        returned: Called once on any thread, when all is back, if `are_back` was asked
            before and said no.
    """

    __slots__ = ("_is_awaited", "_lock", "_out", "_returned")

    def __init__(self, returned: Callable[[], object]) -> None:
        # Re-entrant: a collection that starts inside the lock may end a loan.
        self._lock = threading.RLock()
        self._returned = returned
        self._out, self._is_awaited = 0, False

    def lend(self, data: np.ndarray) -> np.ndarray:
        """The same bytes ``[n]``, lent until the last view of the returned dies."""
        with self._lock:
            self._out += 1
        return np.frombuffer(lend(data, self._back, None), np.uint8)

    def are_back(self) -> bool:
        """Whether nothing is out; else ``returned`` is called when that is so."""
        with self._lock:
            self._is_awaited = bool(self._out)
            return not self._out

    def _back(self, _: object) -> None:
        with self._lock:
            self._out -= 1
            is_told = self._is_awaited and not self._out
            if is_told:
                self._is_awaited = False
        if is_told:
            self._returned()
