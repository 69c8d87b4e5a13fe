"""Asks a resolver again and again, on a thread of its own, as it may block.

At most one question is open. Errors of the resolver are logged, once while they stay
the same, and counted: they change nothing. After a loss it is asked at once, and then
after growing pauses, as the answer may take a while to change. Made and told on the
loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from typing import TYPE_CHECKING, Final, final

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

log = logging.getLogger("zstrat.coordinator")

FIRST_PAUSE: Final = 1.0
"""Seconds between the first two questions after a loss; doubled up to ``every``."""
ANSWER_TIMEOUT: Final = 60.0
"""Seconds after which it is said that the resolver does not answer: twice what ours
give the service that they ask."""


@final
class ResolverWatch:
    """The questions to one resolver.

    Args:
        ask: Called on a thread; may block, and raise anything.
        every: Seconds between two questions while nothing happens.
        tell: Gets the answers, on the loop.
    """

    def __init__(
        self,
        ask: Callable[[], Mapping[int, str]],
        every: float,
        tell: Callable[[Mapping[int, str]], None],
    ) -> None:
        self._ask, self._every, self._tell = ask, every, tell
        self._loop = asyncio.get_running_loop()
        self._pause = every
        self._timer: asyncio.TimerHandle | None = None
        self._alarm: asyncio.TimerHandle | None = None
        self._is_open = self._is_stopped = False
        self._asked_at = self._loop.time()
        self._said = ""
        self.questions = self.errors = 0

    def start(self) -> None:
        """The first question comes after a pause: the program has just asked."""
        self._arm(self._pause)

    def soon(self) -> None:
        """Something happened that the resolver may know more of."""
        self._pause = min(FIRST_PAUSE, self._every)
        since = self._loop.time() - self._asked_at
        if not self._is_open:
            # Not at once again: workers that flap are no reason to ask all the time.
            self._arm(max(0.0, self._pause - since))

    def stop(self) -> None:
        """No answer is told any more; a thread that still waits for one ends by itself,
        or with the process."""
        self._is_stopped = True
        for timer in (self._timer, self._alarm):
            if timer is not None:
                timer.cancel()

    def _arm(self, pause: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        if not self._is_stopped:
            self._timer = self._loop.call_later(pause, self._question)

    def _question(self) -> None:
        self._timer, self._is_open = None, True
        self._asked_at = self._loop.time()
        self.questions += 1
        self._alarm = self._loop.call_later(ANSWER_TIMEOUT, self._late)
        threading.Thread(target=self._wait, name="zstrat resolver", daemon=True).start()

    def _wait(self) -> None:
        """On the thread."""
        answer: Mapping[int, str] | None = None
        failure: BaseException | None = None
        try:
            answer = self._ask()
        except BaseException as error:  # to the log, as the resolver's
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._answered, answer, failure)

    def _answered(
        self, answer: Mapping[int, str] | None, error: BaseException | None
    ) -> None:
        if self._is_stopped:
            return
        self._is_open = False
        if self._alarm is not None:
            self._alarm.cancel()
        if error is not None or answer is None:
            self._complain(f"{type(error).__name__}: {error}")
        else:
            self._said = ""
            self._tell(answer)
        self._arm(self._pause)
        self._pause = min(2 * self._pause, self._every)

    def _late(self) -> None:
        self._complain(f"no answer for {ANSWER_TIMEOUT:.0f} s")

    def _complain(self, words: str) -> None:
        self.errors += 1
        if words != self._said:
            log.warning(
                "the cluster resolver cannot be asked again: %s; the workers that are "
                "known stay",
                words,
            )
        self._said = words
