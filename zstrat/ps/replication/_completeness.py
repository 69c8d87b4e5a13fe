"""Whether the copy of a process lacks nothing that was acknowledged.

Of two copies that were left by a lost program, either one may have gone on alone, by an
order that the other one did not get. A copy is *sure* if that cannot be so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from zstrat.config import Timeouts


@final
class Completeness:
    """Tracks whether the copy of one process is complete. Decides without I/O.

    Args:
        timeouts: Those after which a lost program cannot have acted without notice.
    """

    def __init__(self, timeouts: Timeouts) -> None:
        self._grace = timeouts.liveness + timeouts.reconnect
        self.parted_at: float | None = None
        """When it last lost the other one of two copies; seconds."""
        self.needs_backup = False
        """The session was opened with backups, or the one before it was."""
        self._was_unreplicated = False
        """An earlier program had no backups."""
        self._sure_view: int | None = None
        """The view in which it was sure when another program came."""

    def ordered(self) -> None:
        """Forgets the time of another program, as a coordinator has given an order."""
        self._sure_view = None

    def end_session(self) -> None:
        """Forgets the session."""
        self.needs_backup = self._was_unreplicated = False
        self._sure_view = None

    def change_owner(self, view: int, *, is_sure: bool) -> None:
        """Notes that another program has the process. If it is lost before it gives an
        order, it has changed nothing: it may have waited for other processes."""
        self._sure_view = view if is_sure else None
        self._was_unreplicated |= not self.needs_backup

    def is_sure(self, view: int, *, is_alone: bool, lost_at: float | None) -> bool:
        """Returns whether no process can have acknowledged what is not here, although
        the other one of two copies is gone.

        Args:
            view: The newest one known.
            is_alone: It is a primary without a whole backup.
            lost_at: When the program was lost, in seconds.
        """
        if is_alone or self._sure_view == view:
            return True
        if lost_at is None or self.parted_at is None:
            return False
        # Within that time a program that is alive but out of reach has one of
        # the two go on alone, and the other one is notified by that one.
        return self.parted_at - lost_at >= self._grace

    def may_hold(self, view: int) -> bool:
        """Returns whether a primary may have acknowledged anything: not if it is to
        have a backup, and never had one."""
        return bool(view) or not self.needs_backup or self._was_unreplicated
