"""The copies of a store that its primary keeps up to date, and whether a copy is
complete.

A primary keeps a backup up to date, and maybe a third copy (its own store is the
first). The third copy is made in addition to the backup when a store moves to another
process, and replaces the backup when it is whole. Law: until the third copy has been
asked to be the backup, the old backup has everything, and the third copy may be given
up at any time. From then on only a coordinator may end the third copy, because it may
count as the backup already.

A copy is complete if it lacks nothing that was acknowledged. Of two copies that were
left by a lost program, either one may have continued alone, by an order that the other
copy did not get. A copy is *sure* if the other one cannot have continued without it.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, final

from zstrat.errors import BusyError, UnavailableError

from ._log_shipping import LogShipping

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from zstrat.config import Timeouts
    from zstrat.errors import ZstratError
    from zstrat.ps.store._store import Store
    from zstrat.wire import AttachBackup, PlainTree

    from ._log_link import Connect
    from ._log_shipping import Turn


@final
class AttachedBackups:
    """The copies of the store ``task`` in other processes, as seen by its primary.
    Lives on the event loop.

    Args:
        connect: Makes a link to a backup; None: the store cannot have one.
        fill_timeout: Seconds within which a backup that will be filled has to connect.
        silence: Seconds within which a backup that is whole already has to connect.
        on_lost: Receives the session and the reason when a whole backup is lost.
        on_replaced: Called when a backup has become the primary.
    """

    def __init__(
        self,
        task: str,
        store: Store,
        turn: Turn,
        *,
        connect: Connect | None,
        fill_timeout: float,
        silence: float,
        on_lost: Callable[[int, str], None],
        on_replaced: Callable[[], None],
    ) -> None:
        self._task, self._store, self._turn = task, store, turn
        self._connect = connect
        self._fill_timeout, self._silence = fill_timeout, silence
        self._on_lost, self._on_replaced = on_lost, on_replaced
        self._backup: LogShipping | None = None
        self._third: LogShipping | None = None
        self._third_may_count = False
        """The third copy was asked to be the backup, and may have got that message."""
        self._ending: set[asyncio.Task[None]] = set()

    @property
    def is_any(self) -> bool:
        """Whether there is a backup, complete or not."""
        return self._backup is not None

    @property
    def has_backup(self) -> bool:
        """Whether a backup has everything that was acknowledged."""
        return self._backup is not None and self._backup.is_whole

    @property
    def partner(self) -> int:
        """The incarnation of a backup that has everything; 0 if there is none."""
        backup = self._backup
        whole = backup is not None and backup.is_whole
        return backup.attached.incarnation if backup is not None and whole else 0

    def statistics(self) -> dict[str, PlainTree]:
        """Returns the address of the backup (empty if there is none), and how many
        changes it lacks."""
        values: dict[str, PlainTree] = {"backup": ""}
        if self._backup is not None:
            values.update(self._backup.statistics())
        return values

    def validate(self) -> None:
        """Checks the invariants that hold between two events.

        Raises:
            AssertionError: An invariant is violated.
        """
        third = self._third
        assert third is None or self._backup is not None, "a third copy of two"
        assert third is None or third is not self._backup, "one copy counts twice"
        assert not self._third_may_count or (third is not None and third.is_whole)
        for shipping in (self._backup, third):
            if shipping is not None:
                assert not shipping.is_over, "a copy that has ended is attached"
                shipping.validate()

    def attach(self, message: AttachBackup) -> Coroutine[None, None, None]:
        """Starts to fill a backup or a third copy, unless it is attached already.

        Returns:
            A coroutine that waits until the copy is whole. Cancellation: filling
            continues.

        Raises:
            BusyError: The store cannot have a backup.
            UnavailableError: The order asks for a third copy while there is no backup,
                or to make a third copy the backup that is not whole.
        """
        if self._connect is None:
            raise BusyError(f"{self._task} cannot have a backup")
        if message.beside:
            return self._attach_third(message)
        third, backup = self._third, self._backup
        if third is not None and third.attached.incarnation == message.incarnation:
            return self._replace_backup(third, message)
        # The same process in a newer view: a program has taken over both of a pair.
        if backup is not None and self.partner == message.incarnation:
            self._end_third()
            return backup.keep(message)
        # Asked again with the same order, the filling continues.
        if backup is None or backup.attached != message:
            self.detach()
            self._backup = backup = self._ship_to(message)
            self._fill(backup)
        return self._wait_filled(backup)

    def attach_whole(self, message: AttachBackup) -> None:
        """Attaches a backup that has everything already, after a swap of roles."""
        self._backup = self._ship_to(message, is_whole=True)
        deadline = asyncio.get_running_loop().time() + self._silence
        self._backup.work_on(self._backup.follow(deadline), f"backup of {self._task}")

    async def hand_over(self, stand_aside: Callable[[], None]) -> None:
        """Waits until the backup has everything, and ends the log shipping; the backup
        will be the primary.

        Args:
            stand_aside: Called when no request is computed any longer; makes the store
                refuse all further requests.

        Raises:
            UnavailableError: There is no whole backup, or the backup is lost.

        Cancellation: this process stays the primary.
        """
        backup = self._backup
        if backup is None or not backup.is_whole:
            raise UnavailableError(f"{self._task} has no backup that has everything")
        self._end_third()
        await backup.hand_over(stand_aside)
        self._take_backup()
        self._keep_ending(backup)

    def detach(self) -> None:
        """Ends all copies and releases the answers that wait for them, because the
        primary continues alone."""
        if (backup := self._take_backup()) is not None:
            backup.release()
            self._keep_ending(backup)

    def refuse(self, error: ZstratError) -> None:
        """Ends all copies, and fails the answers that wait for them with the error."""
        if (backup := self._take_backup()) is not None:
            backup.refuse(error)
            self._keep_ending(backup)

    def abandon(self) -> None:
        """Ends all copies without a message to them or to waiting callers, because
        another process takes over the store."""
        if (backup := self._take_backup()) is not None:
            backup.abandon()
            self._keep_ending(backup)

    def report_losses(self) -> None:
        """Reports the loss of a whole copy again: the coordinator was away, and may
        have missed the report."""
        for shipping in (self._backup, self._third):
            if shipping is not None and shipping.is_whole and shipping.failure:
                self._report_lost(shipping.failure)

    async def settle(self, deadline: float) -> None:
        """Waits until no answer waits for the backup, at most until the deadline (loop
        time). Cancellation: loses nothing."""
        if self._backup is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(deadline):
                    await self._backup.settled()

    async def wait_closed(self) -> None:
        """Waits until the links to copies that have ended are closed."""
        if self._ending:
            await asyncio.wait(self._ending)

    async def _wait_filled(self, backup: LogShipping) -> None:
        assert backup.work is not None, "it is filled, or was promoted with"
        try:
            # Shielded: the order may be given again, and wait for the same copy.
            await asyncio.shield(backup.work)
        except asyncio.CancelledError:
            if self._backup is backup:
                raise  # this coroutine was
            raise self._unwanted from None
        except BaseException:  # to the coordinator, which has to decide
            if self._backup is backup and not backup.is_whole:
                self.detach()
            raise

    def _attach_third(self, message: AttachBackup) -> Coroutine[None, None, None]:
        if not self.has_backup:
            raise UnavailableError(
                f"{self._task} cannot have a third copy: it has no backup that has "
                "everything"
            )
        third = self._third
        if third is None or third.attached != message:
            self._end_third()
            self._third = third = self._ship_to(message)
            self._fill(third)
        return self._wait_third_filled(third)

    async def _wait_third_filled(self, third: LogShipping) -> None:
        """Waits until the third copy is filled. If the third copy is lost, gives it up
        without an order of the coordinator, because the backup still has everything."""
        assert third.work is not None, "a third copy is always filled"
        try:
            await asyncio.shield(third.work)
        except BaseException as error:  # to the coordinator
            if self._third is third and not isinstance(error, asyncio.CancelledError):
                self._end_third()
            if self._third is third:
                raise  # this coroutine was cancelled
            failure = third.failure
            why = f"is lost: {failure}" if failure else "is no longer wanted"
            raise UnavailableError(f"{self._task}: the third copy {why}") from error

    def _replace_backup(
        self, third: LogShipping, message: AttachBackup
    ) -> Coroutine[None, None, None]:
        if not third.is_whole:
            # It never had everything, so it cannot count.
            self._end_third()
            raise self._unwanted
        # From the moment at which it is asked, as the answer may be lost.
        self._third_may_count = True
        return self._wait_replaced(third, message)

    async def _wait_replaced(self, third: LogShipping, message: AttachBackup) -> None:
        await third.keep(message)
        if self._third is not third:
            raise self._unwanted
        self._third, self._third_may_count = None, False
        # Only now is the former backup released, as the new one has said that it knows.
        self.detach()
        self._backup = third

    @property
    def _unwanted(self) -> UnavailableError:
        return UnavailableError(f"{self._task}: the backup is no longer wanted")

    def _ship_to(self, message: AttachBackup, *, is_whole: bool = False) -> LogShipping:
        assert self._connect is not None, "see attach"
        shipping = LogShipping(
            self._store,
            self._turn,
            message,
            self._connect,
            on_lost=lambda why: self._lost(shipping, why),
            on_replaced=self._on_replaced,
            is_whole=is_whole,
        )
        return shipping

    def _fill(self, shipping: LogShipping) -> None:
        deadline = asyncio.get_running_loop().time() + self._fill_timeout
        shipping.work_on(shipping.fill(deadline), f"filling {self._task}")

    def _lost(self, shipping: LogShipping, why: str) -> None:
        if self._third is shipping and not self._third_may_count:
            # Nothing depends on it yet, so no order is needed to drop it.
            self._end_third()
        else:
            self._report_lost(why)

    def _report_lost(self, why: str) -> None:
        backup = self._backup
        if backup is not None and backup.is_whole:
            self._on_lost(backup.attached.session, why)

    def _end_third(self) -> None:
        third, self._third, self._third_may_count = self._third, None, False
        if third is not None:
            third.release()
            self._keep_ending(third)

    def _take_backup(self) -> LogShipping | None:
        """Detaches and returns the backup, and ends the third copy, which is of no use
        without a backup."""
        self._end_third()
        backup, self._backup = self._backup, None
        return backup

    def _keep_ending(self, shipping: LogShipping) -> None:
        """Keeps a reference to the task that closes a link, until the task is done."""
        if shipping.ending is not None:
            self._ending.add(shipping.ending)
            shipping.ending.add_done_callback(self._ending.discard)


@final
class Completeness:
    """Tracks whether one process's copy of a store is complete. Decides without I/O.

    Args:
        timeouts: Their sum of liveness and reconnect is the time after which a lost
            program can no longer have given orders unnoticed.
    """

    def __init__(self, timeouts: Timeouts) -> None:
        self._grace = timeouts.liveness + timeouts.reconnect
        self.parted_at: float | None = None
        """When this process last lost the other one of two copies, in seconds."""
        self.needs_backup = False
        """Whether this session, or the one before it, was opened with backups."""
        self._was_unreplicated = False
        """Whether an earlier program of the session had no backups."""
        self._sure_view: int | None = None
        """The view in which the copy was sure when another program took over; None if
        it was not sure."""

    def ordered(self) -> None:
        """Forgets the view in which the copy was sure, because a coordinator has given
        an order since."""
        self._sure_view = None

    def end_session(self) -> None:
        """Resets what belongs to the session, because it is over."""
        # `parted_at` stays: compared with a later loss it proves nothing (`is_sure`).
        self.needs_backup = self._was_unreplicated = False
        self._sure_view = None

    def change_owner(self, view: int, *, is_sure: bool) -> None:
        """Notes that another program takes over the process, and whether the copy is
        sure. If that program is lost before it gives an order, it has changed nothing:
        it may have waited for other processes."""
        self._sure_view = view if is_sure else None
        # A program without backups has acknowledged at once, whatever the view.
        self._was_unreplicated |= not self.needs_backup

    def is_sure(self, view: int, *, is_alone: bool, lost_at: float | None) -> bool:
        """Returns whether no process can have acknowledged a change that this copy
        lacks, although the other one of two copies is gone.

        Args:
            view: The newest view that the process knows.
            is_alone: Whether the process is a primary without a whole backup.
            lost_at: When this process lost the coordinator's program, on the clock of
                ``parted_at``; None: it has not lost it.
        """
        if is_alone or self._sure_view == view:
            return True
        if lost_at is None or self.parted_at is None:
            return False
        # Within that time a program that is alive but out of reach has one of
        # the two continue alone, and the other one is notified by that one.
        return self.parted_at - lost_at >= self._grace

    def may_hold(self, view: int) -> bool:
        """Returns whether a primary may have acknowledged anything. It has not if it is
        to have a backup, and has never had one."""
        return bool(view) or not self.needs_backup or self._was_unreplicated
