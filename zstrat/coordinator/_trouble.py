"""How often a worker may say that it does not reach a parameter server.

Workers report such trouble second-hand, hundreds of closures at a time. While our own
connection to that server is fine this is a hiccup: the closures are tried again, all
after the same pause. What is reported until then is one *strike*, what fails after it
is the next, with a longer pause. Strikes are forgotten after a while, so that three
hiccups in a month do not end a job; too many in a short time, from all workers, do.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final

WINDOW: Final = 60.0
STRIKES: Final = 6
"""With the pauses below the sixth comes after about six seconds of trouble: longer than
our own link needs to notice that the server is gone."""
FIRST_PAUSE: Final = 0.2
LONGEST_PAUSE: Final = 5.0


@dataclass(slots=True)
class Trouble:
    """Reports of one worker about one parameter server."""

    strikes: deque[float] = field(default_factory=lambda: deque(maxlen=STRIKES))
    """When each of the last ones began."""
    again_at: float = 0.0
    """End of the pause of the last one."""

    def reported(self, now: float) -> float:
        """How long to wait before the closure is tried again."""
        self._forget(now)
        if not self.strikes or now >= self.again_at:
            pause = min(FIRST_PAUSE * 2.0 ** len(self.strikes), LONGEST_PAUSE)
            self.strikes.append(now)
            self.again_at = now + pause
        return self.again_at - now

    def lasts(self, now: float) -> bool:
        """Whether trying again through this worker is no use."""
        self._forget(now)
        return len(self.strikes) >= STRIKES

    def _forget(self, now: float) -> None:
        while self.strikes and now - self.strikes[0] > WINDOW:
            self.strikes.popleft()
