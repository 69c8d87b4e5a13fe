"""How often workers may say that they do not reach a parameter server.

Workers report such trouble second-hand, hundreds of closures at a time. While our own
connection to that server is fine this is a hiccup: the closures are tried again.
Reports that come close together are one *strike*; strikes are forgotten after a while,
so that three hiccups in a month do not end a job; too many in a short time do.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final

WINDOW: Final = 60.0
STRIKES: Final = 6
"""With the delays below the sixth comes after about six seconds of trouble: longer than
our own link needs to notice that the server is gone."""
APART: Final = 0.1
FIRST_DELAY: Final = 0.2
LONGEST_DELAY: Final = 5.0


@dataclass(slots=True)
class Trouble:
    """Reports about one parameter server."""

    strikes: deque[float] = field(default_factory=deque)

    def reported(self, now: float) -> float | None:
        """How long to wait before the closure is tried again; None: it is no use."""
        while self.strikes and now - self.strikes[0] > WINDOW:
            self.strikes.popleft()
        if not self.strikes or now - self.strikes[-1] > APART:
            self.strikes.append(now)
        if len(self.strikes) >= STRIKES:
            return None
        return min(FIRST_DELAY * 2.0 ** (len(self.strikes) - 1), LONGEST_DELAY)
