"""Numbers that a program says of its training."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Final, final

if TYPE_CHECKING:
    from ._histogram import Plain

KEPT: Final = 1000
"""Points of one scalar."""
NAMES: Final = 256
"""Scalars: the names of more are a mistake, such as a step's number in a name."""


@final
class Scalars:
    """The last `KEPT` points of each of at most `NAMES` scalars. From any thread."""

    def __init__(self) -> None:
        self._points: Final[dict[str, deque[tuple[int, float, float]]]] = {}
        self._lock: Final = threading.Lock()

    def add(self, name: str, value: float, step: int | None = None) -> None:
        """A point; without a step it is one more than the last one's.

        Raises:
            ValueError: There are `NAMES` others already.
        """
        with self._lock:
            points = self._points.get(name)
            if points is None:
                if len(self._points) >= NAMES:
                    raise ValueError(
                        f"scalar {name!r}: there are {NAMES} others already. A name is "
                        "one curve; the number of a step goes into step="
                    )
                points = self._points[name] = deque(maxlen=KEPT)
            if step is None:
                step = points[-1][0] + 1 if points else 0
            points.append((step, time.monotonic(), value))

    def plain(self, since: float) -> dict[str, Plain]:
        """``[step, seconds since then, value]`` of each point that came since a time of
        `time.monotonic`, by name. JSON has no word for what is not finite: None."""
        with self._lock:
            found = {
                name: [
                    [step, at - since, value if math.isfinite(value) else None]
                    for step, at, value in points
                    if at >= since
                ]
                for name, points in self._points.items()
            }
        return {name: points for name, points in found.items() if points}


SCALARS: Final = Scalars()
"""Those of this process."""
