"""When a program that is about to be ended saves and leaves: decided without a clock.

Whoever ends it says so first, by a signal or by what the program asks, and gives it
some time. What all processes of a cluster do is the most that one of them wants.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

if TYPE_CHECKING:
    from collections.abc import Callable


@final
@dataclass(frozen=True)
class TerminationConfig:
    """How a program learns of its end, and what it does then.

    Args:
        termination_watcher_fn: Says whether the end has been announced; asked between
            two runs, at most once a second. None: SIGTERM and SIGUSR1 announce it.
        exit_fn: Called after the last save. None: ``sys.exit(75)``, which engines and
            service managers take as "try again".
        grace_period: Seconds from the announcement to the end. Until shortly before
            it training goes on, with a checkpoint at once and one at the end. None, 0:
            the run that is under way ends, and the program saves and leaves.
        save_fn: Saves, in place of the checkpoint manager; in every process.

    Raises:
        ValueError: ``grace_period`` is negative.
    """

    termination_watcher_fn: Callable[[], bool] | None = None
    exit_fn: Callable[[], Any] | None = None
    grace_period: float | None = None
    save_fn: Callable[[], Any] | None = None

    def __post_init__(self) -> None:
        if self.grace_period is not None and self.grace_period < 0:
            raise ValueError(f"grace_period={self.grace_period}: expected 0 or more")


class Wish(enum.IntEnum):
    """What one process wants all to do; the greatest is done."""

    GO_ON = 0
    SAVE = 1
    """The end is announced, and there is time left."""
    LEAVE = 2
    """Save, and end."""


@final
class Countdown:
    """What this process wants, by what it was told and how long things took."""

    def __init__(self, grace_period: float) -> None:
        self._grace = grace_period
        self._announced_at: float | None = None
        self._has_saved = False
        self._saving = self._running = 0.0

    @property
    def is_announced(self) -> bool:
        """Whether this process was told of its end."""
        return self._announced_at is not None

    def announced(self, now: float) -> None:
        """The end was announced; the first time counts."""
        if self._announced_at is None:
            self._announced_at = now

    def ran(self, seconds: float) -> None:
        """A run took so long; the longest counts."""
        self._running = max(self._running, seconds)

    def saved(self, seconds: float) -> None:
        """A checkpoint took so long; the longest counts."""
        self._has_saved = True
        self._saving = max(self._saving, seconds)

    def wish(self, now: float) -> Wish:
        """What this process wants after a run. Twice what is still to be done has to
        fit into what is left: the next run and a checkpoint."""
        if self._announced_at is None:
            return Wish.GO_ON
        left = self._announced_at + self._grace - now
        if not self._grace or left <= 2 * (self._running + self._saving):
            return Wish.LEAVE
        return Wish.SAVE

    def is_due(self, agreed: Wish) -> bool:
        """Whether to save now that all agree: once when it is announced, and last."""
        return agreed is Wish.LEAVE or (agreed is Wish.SAVE and not self._has_saved)
