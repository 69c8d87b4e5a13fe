"""A clock that a test advances, for code that takes its clock as an argument."""

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
        """Cancels the call; does nothing if it was made already."""
        self.is_cancelled = True


class FakeClock:
    """Seconds that pass only in `advance`; a clock, and the timers of a loop.

    Calling it returns the time, so that it replaces `time.time` and `time.monotonic` in
    arguments such as ``CheckpointManager(clock=)``. Its ``time``, ``call_at`` and
    ``call_later`` replace those of an event loop.

    Args:
        now: The initial time in seconds.
    """

    def __init__(self, now: float = 0.0) -> None:
        self._now = now
        self._timers: list[FakeTimer] = []

    def __call__(self) -> float:
        return self._now

    time = __call__

    @property
    def timers(self) -> tuple[FakeTimer, ...]:
        """The pending calls, in the order in which they are due."""
        waiting = [timer for timer in self._timers if not timer.is_cancelled]
        return tuple(sorted(waiting, key=lambda timer: timer.due))

    def call_at(
        self, when: float, callback: Callable[..., object], *args: Any
    ) -> FakeTimer:
        """Schedules ``callback(*args)`` for the `advance` that reaches the time, like
        the method of a loop."""
        timer = FakeTimer(when, lambda: callback(*args))
        self._timers.append(timer)
        return timer

    def call_later(
        self, delay: float, callback: Callable[..., object], *args: Any
    ) -> FakeTimer:
        """Schedules a call like `call_at`, ``delay`` seconds from now."""
        return self.call_at(self._now + delay, callback, *args)

    def advance(self, seconds: float) -> None:
        """Advances the time, and makes the calls that become due, each at its time,
        including those that such calls schedule.

        Raises:
            ValueError: ``seconds`` is negative.
            Exception: The error of a call; the clock stops at its time.
        """
        if seconds < 0:
            raise ValueError(f"seconds={seconds}: expected 0 or more")
        end = self._now + seconds
        while self.timers and self.timers[0].due <= end:
            self._go_off(self.timers[0])
        self._now = end

    def advance_to_next(self) -> float:
        """Advances the time to the next timer; returns the seconds that passed.

        Raises:
            LookupError: There are no pending timers.
        """
        if not self.timers:
            raise LookupError("there are no pending timers")
        before, timer = self._now, self.timers[0]
        self._go_off(timer)
        return self._now - before

    def _go_off(self, timer: FakeTimer) -> None:
        self._timers.remove(timer)
        self._now = max(self._now, timer.due)
        timer.callback()
