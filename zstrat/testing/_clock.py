"""A clock that moves when the test says so, for what takes its time as an argument."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(eq=False)
class FakeTimer:
    """A call that is due at a time of a `FakeClock`."""

    due: float
    callback: Callable[[], object]
    is_cancelled: bool = field(default=False, init=False)

    def cancel(self) -> None:
        """The call is not made. Once it was made, this does nothing."""
        self.is_cancelled = True


class FakeClock:
    """Seconds that pass only in `advance`; a clock, and the timers of a loop.

    Called, it gives the time, as `time.time` and `time.monotonic` do: so it stands for
    their likes in arguments such as ``CheckpointManager(clock=)``. Its ``time``,
    ``call_at`` and ``call_later`` stand for those of an event loop.

    Args:
        now: What it shows at first, in seconds.
    """

    def __init__(self, now: float = 0.0) -> None:
        self._now = now
        self._timers: list[FakeTimer] = []

    def __call__(self) -> float:
        return self._now

    time = __call__

    @property
    def timers(self) -> tuple[FakeTimer, ...]:
        """Calls that wait, in the order in which they are due."""
        waiting = [timer for timer in self._timers if not timer.is_cancelled]
        return tuple(sorted(waiting, key=lambda timer: timer.due))

    def call_at(
        self, when: float, callback: Callable[..., object], *args: Any
    ) -> FakeTimer:
        """Calls ``callback(*args)`` in the `advance` that reaches the time, as the
        loop's does."""
        timer = FakeTimer(when, lambda: callback(*args))
        self._timers.append(timer)
        return timer

    def call_later(
        self, delay: float, callback: Callable[..., object], *args: Any
    ) -> FakeTimer:
        """Calls as `call_at` does, so many seconds from now."""
        return self.call_at(self._now + delay, callback, *args)

    def advance(self, seconds: float) -> None:
        """Lets time pass, and makes the calls that become due, each at its time.

        What a call sets a timer for is called, too, if it is due by then.

        Raises:
            ValueError: ``seconds`` is negative: time does not run backwards.
            Exception: What a call raised; the clock stands at its time then.
        """
        if seconds < 0:
            raise ValueError(f"seconds={seconds}: expected 0 or more")
        end = self._now + seconds
        while self.timers and self.timers[0].due <= end:
            self._go_off(self.timers[0])
        self._now = end

    def advance_to_next(self) -> float:
        """Lets time pass until the next timer goes off; how many seconds that were.

        Raises:
            LookupError: No timer waits.
        """
        if not self.timers:
            raise LookupError("no timer waits: nothing would ever happen")
        before, timer = self._now, self.timers[0]
        self._go_off(timer)
        return self._now - before

    def _go_off(self, timer: FakeTimer) -> None:
        self._timers.remove(timer)
        self._now = max(self._now, timer.due)
        timer.callback()
