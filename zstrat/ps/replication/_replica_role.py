"""What one service is to its store: its primary, its backup, or what was its primary.

Views are kept here: a number that a coordinator makes and that only grows. Whatever
names an older one than is known is refused.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING, final

from zstrat.errors import (
    BusyError,
    NotPrimaryError,
    StaleSessionError,
    UnavailableError,
)
from zstrat.wire import (
    AttachBackup,
    BackupLost,
    DetachBackup,
    Done,
    Message,
    PromoteBackup,
)

from ._log_shipping import LogShipping

if TYPE_CHECKING:
    from collections.abc import Callable

    from zstrat.config import Timeouts
    from zstrat.errors import ZstratError
    from zstrat.ps.store._store import Store
    from zstrat.wire import PlainTree

    from ._backup import Backup
    from ._log_shipping import Connect, Turn

ReplicationRequest = AttachBackup | DetachBackup | PromoteBackup


@final
class ReplicaRole:
    """What one process is to the store ``task``. Lives on the loop.

    Args:
        tell: Sends a notice to the coordinator that holds the session.
        connect: None: it may have no backup.
        patience: Seconds that a backup which is to be filled has to be there.
        silence: The same, of one that has all.
        clock: Seconds.
    """

    def __init__(
        self,
        task: str,
        store: Store,
        turn: Turn,
        *,
        tell: Callable[[Message], None],
        connect: Connect | None,
        patience: float,
        silence: float,
        clock: Callable[[], float],
    ) -> None:
        self.backup: Backup | None = None
        """If it is a backup."""
        self.is_replaced = self.is_dropped = False
        """Another process serves the store; and what was here of it is gone."""
        self.view = 0
        self.is_to_have_backup = False
        """As the session was opened, or is that of a process before."""
        self._task, self._store, self._turn = task, store, turn
        self._tell = tell
        self._connect, self._patience, self._silence = connect, patience, silence
        self._clock = clock
        self.parted_at: float | None = None
        """When the other one of two copies was lost, the last time; seconds."""
        self._sure_in: int | None = None
        """The view in which it is known of the time before that nothing is missing."""
        self._was_without = False
        """The program before had no second copies."""
        self._shipping: LogShipping | None = None
        self._copying: asyncio.Task[None] | None = None
        self._third: LogShipping | None = None
        """To a copy that is made beside the backup, and may take its place."""
        self._filling: asyncio.Task[None] | None = None
        self._is_replacing = False
        """The third copy may know that it counts."""
        self._ending: set[asyncio.Task[None]] = set()

    @property
    def refusal(self) -> NotPrimaryError:
        """The words for whoever asks for what another process serves."""
        return NotPrimaryError(
            f"{self._task}: another process serves its variables by now, which has "
            "taken over while this one could not be reached"
        )

    @property
    def objection(self) -> NotPrimaryError | None:
        """What is said instead of an answer to what was under way when another process
        took over: that has not got it, so it is to be sent there."""
        return self.refusal if self.is_replaced else None

    @property
    def shutdown_error(self) -> UnavailableError:
        """The words for whoever asks a process that shuts down."""
        words = f"{self._task} is shutting down"
        if self.is_replaced or self.has_backup:
            return NotPrimaryError(f"{words}: its backup takes over")
        return UnavailableError(words)

    @property
    def has_backup(self) -> bool:
        """Whether a backup has everything that was acknowledged."""
        return self._shipping is not None and self._shipping.is_strict

    @property
    def has_any(self) -> bool:
        """Whether anything of the store may be here. A primary that is to have a backup
        and never had one has acknowledged nothing."""
        if self.backup is not None:
            return True
        was_to_have = self.is_to_have_backup and not self._was_without
        return not self.is_dropped and bool(self.view or not was_to_have)

    def is_sure(self, lost_at: float | None, timeouts: Timeouts) -> bool:
        """Whether nobody can have acknowledged what is not here, although the other one
        of two copies is gone.

        Args:
            lost_at: When the program was lost.
        """
        if self.is_replaced:
            return False
        if self._sure_in == self._newest_view:
            return True
        if self.backup is None and not self.has_backup:
            return True
        if lost_at is None or self.parted_at is None:
            return False
        # Within that time a program that lives, and is only not heard here, has one of
        # the two go on alone, and the other one hears it from that.
        return self.parted_at - lost_at >= timeouts.liveness + timeouts.reconnect

    def owner_changed(self, lost_at: float | None, timeouts: Timeouts) -> None:
        """Another program is here. If it is lost before it gives an order, all is as it
        was: it may have waited in vain for other processes."""
        is_sure = self.is_sure(lost_at, timeouts)
        self._sure_in = self._newest_view if is_sure else None
        self._was_without |= not self.is_to_have_backup

    @property
    def _newest_view(self) -> int:
        return self.view if self.backup is None else self.backup.view

    @property
    def partner(self) -> int:
        """The incarnation of the other one of two copies, if both are known to go on
        together; else 0."""
        if self.backup is not None:
            return self.backup.partner
        shipping = self._shipping
        if shipping is None or not shipping.is_strict or self.is_replaced:
            return 0
        return shipping.attached.incarnation

    def statistics(self) -> dict[str, PlainTree]:
        """Its role for the store, the view, and how far its backup is."""
        backup, shipping = self.backup, self._shipping
        if backup is not None:
            return {
                "role": "backup",
                "view": backup.view,
                "session": backup.session,
                **backup.statistics(),
            }
        role = "replaced" if self.is_replaced else "primary"
        values: dict[str, PlainTree] = {"role": role, "view": self.view, "backup": ""}
        if shipping is not None:
            values.update(shipping.statistics())
        return values

    def require(self, view: int) -> None:
        """Refuses what is said of an older view than the newest known.

        Raises:
            StaleSessionError: The view is over.
        """
        if view < self.view:
            raise StaleSessionError(
                f"{self._task} is in view {self.view} of its store, and view {view} "
                "is over: another coordinator, or a later word of this one, came first"
            )

    async def handle(self, message: ReplicationRequest) -> Message:
        """What a coordinator says to the primary.

        Raises:
            StaleSessionError: The view is over.
            ZstratError: The backup could not be made whole.

        Cancellation: the copy goes on.
        """
        self.require(message.view)
        self._sure_in = None
        if isinstance(message, AttachBackup):
            await self._attach(message)
            return Done()
        self.view = message.view  # whoever is promoted here was so before
        self._return()
        if isinstance(message, DetachBackup) or not message.incarnation:
            self._detach()
        return Done()

    def promoted(self, message: PromoteBackup) -> None:
        """The backup that was here is the primary, and may have a backup from the
        beginning."""
        self.backup, self.view = None, message.view
        if not message.incarnation:
            return
        session, address = message.session, message.address
        attach = AttachBackup(session, message.view, address, message.incarnation)
        self._shipping = self._ship_to(attach, is_whole=True)
        loop = asyncio.get_running_loop()
        self._copying = loop.create_task(
            self._shipping.follow(loop.time() + self._silence),
            name=f"backup of {self._task}",
        )

    async def give_way(self) -> None:
        """Ends to serve, for the backup, which is to be promoted: it has all that is
        here, and nothing is computed from then on.

        Raises:
            UnavailableError: There is no backup that has all, or it is lost; this one
                serves as before.

        Cancellation: as an error.
        """
        shipping = self._shipping
        if shipping is None or not shipping.is_strict or self.is_replaced:
            raise UnavailableError(f"{self._task} has no backup that has all")
        self._end_third()
        try:
            await shipping.give_way(self._stand_aside)
        except BaseException:  # to the coordinator
            # Else the backup has the place, or another order has ended it.
            if self._shipping is shipping:
                self.is_replaced = False
            raise
        self._part()
        self._keep(shipping)
        self.is_dropped = True

    def _stand_aside(self) -> None:
        self.is_replaced = True

    def give_up(self, view: int) -> None:
        """Another process serves the store, and nothing here is needed any more.

        Raises:
            StaleSessionError: The view is over.
        """
        self.require(view)
        self.view, self.is_dropped = view, True
        self._step_aside()

    def _return(self) -> None:
        """A coordinator has this one serve after all, alone: a backup that had refused
        it is gone, and so nobody has more than is here.

        Raises:
            NotPrimaryError: What was here is gone, too.
        """
        if self.is_dropped:
            raise self.refusal
        self.is_replaced = False

    def remind(self) -> None:
        """The coordinator is back: it may have missed that the backup is lost."""
        for shipping in (self._shipping, self._third):
            if shipping is not None and shipping.is_strict and shipping.failure:
                self._lost(shipping.failure)

    def end(self, error: ZstratError) -> None:
        """The session is over, and with it what its backup was for."""
        shipping = self._part()
        if shipping is not None:
            shipping.refuse(error)
            self._keep(shipping)
        self.view, self.is_replaced, self.is_dropped = 0, False, False
        self.is_to_have_backup = self._was_without = False
        self._sure_in = None

    def step_aside(self, *, is_dropped: bool) -> None:
        """Another process may serve the store: a coordinator says whether this one does
        (`DetachBackup`)."""
        self.is_dropped = is_dropped
        self._step_aside()

    async def close(self, deadline: float, *, quietly: bool = False) -> None:
        """Waits until what waits for the backup was answered, at the latest at the
        deadline (loop time); then it is refused, and so is whatever comes.

        Args:
            quietly: Nobody is told anything, as another process goes on with this; and
                a backup makes all that it has taken.

        Cancellation: what waits is neither answered nor refused.
        """
        shipping = self._shipping
        if self.backup is not None and quietly:
            await self.backup.finish(deadline)
        elif self.backup is not None:
            self.backup.close()
        if shipping is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(deadline):
                    await shipping.settled()
            if quietly:
                self.is_replaced |= shipping.is_strict  # as it may be
                self._part()
                shipping.abandon()
                self._keep(shipping)
            elif shipping.is_strict:  # which serves from now on, if anybody
                self._step_aside()
            else:
                self.end(self.shutdown_error)
        if self._ending:
            await asyncio.wait(self._ending)

    async def _attach(self, message: AttachBackup) -> None:
        if self._connect is None:
            raise BusyError(f"{self._task} cannot have a backup")
        if message.beside:
            await self._attach_third(message)
            return
        third = self._third
        if third is not None and third.attached.incarnation == message.incarnation:
            await self._replace_backup(third, message)
            return
        if self.partner == message.incarnation:
            shipping = self._shipping
            assert shipping is not None, "it has this backup already"
            self._end_third()
            self.view = message.view
            await shipping.keep(message)
            return
        shipping = self._shipping
        if shipping is None or shipping.attached != message:
            self._detach()
            self.view = message.view
            self._shipping = shipping = self._ship_to(message)
            self._copying = self._copy(shipping)
        assert self._copying is not None
        try:
            await asyncio.shield(self._copying)
        except asyncio.CancelledError:
            if self._shipping is shipping:
                raise  # this coroutine was
            raise self._unwanted from None
        except BaseException:  # to the coordinator, who has to say what is next
            if self._shipping is shipping and not shipping.is_strict:
                self._detach()
            raise

    async def _attach_third(self, message: AttachBackup) -> None:
        """Fills a copy beside the backup. If it is lost the backup is still there, so
        the copy is given up without a word of the coordinator."""
        if not self.has_backup:
            raise UnavailableError(f"{self._task} has no backup that has all")
        third, self.view = self._third, message.view
        if third is None or third.attached != message:
            self._end_third()
            self._third = third = self._ship_to(message)
            self._filling = self._copy(third)
        assert self._filling is not None
        try:
            await asyncio.shield(self._filling)
        except BaseException as error:  # to the coordinator
            if self._third is third and not isinstance(error, asyncio.CancelledError):
                self._end_third()
            if self._third is third:
                raise  # this coroutine was cancelled
            failure = third.failure
            why = f"is lost: {failure}" if failure else "is no longer wanted"
            raise UnavailableError(f"{self._task}: the third copy {why}") from error

    @property
    def _unwanted(self) -> UnavailableError:
        return UnavailableError(f"{self._task}: the backup is no longer wanted")

    async def _replace_backup(self, third: LogShipping, message: AttachBackup) -> None:
        """Has the third copy be the backup. Law: until it has heard that it counts,
        which it says when it is asked to be the primary, all is in the other one, too;
        and from the moment at which it may have heard that, only a coordinator may end
        it."""
        if not third.is_strict:
            self._end_third()
            raise self._unwanted
        self._is_replacing, self.view = True, message.view
        await third.keep(message)
        if self._third is not third:
            raise self._unwanted
        filling, self._third, self._filling = self._filling, None, None
        self._detach()  # which ends what `_is_replacing` was for, too
        self._shipping, self._copying = third, filling

    def _ship_to(self, message: AttachBackup, *, is_whole: bool = False) -> LogShipping:
        def lost(why: str) -> None:
            if self._third is shipping and not self._is_replacing:
                self._end_third()
            else:
                self._lost(why)

        assert self._connect is not None
        shipping = LogShipping(
            self._store,
            self._turn,
            message,
            self._connect,
            on_lost=lost,
            on_replaced=self._step_aside,
            is_whole=is_whole,
        )
        return shipping

    def _copy(self, shipping: LogShipping) -> asyncio.Task[None]:
        loop = asyncio.get_running_loop()
        copying = shipping.copy(loop.time() + self._patience)
        return loop.create_task(copying, name=f"copying {self._task}")

    def _detach(self) -> None:
        shipping = self._part()
        if shipping is not None:
            shipping.release()
            self._keep(shipping)

    def _end_third(self) -> None:
        self._is_replacing = False
        if self._filling is not None:
            self._filling.cancel()
        third, self._third, self._filling = self._third, None, None
        if third is not None:
            third.release()
            self._keep(third)

    def _part(self) -> LogShipping | None:
        """Takes the log shipping out, as there is no backup any more, for the caller to
        end it as the case wants."""
        self._end_third()
        if self._copying is not None:
            self._copying.cancel()
        shipping, self._shipping, self._copying = self._shipping, None, None
        return shipping

    def _keep(self, shipping: LogShipping) -> None:
        """Keeps a log shipping that has ended until its link is closed."""
        if shipping.ending is not None:
            self._ending.add(shipping.ending)
            shipping.ending.add_done_callback(self._ending.discard)

    def _lost(self, why: str) -> None:
        shipping = self._shipping
        if shipping is not None and shipping.is_strict:
            self.parted_at = self._clock()
            session = shipping.attached.session
            self._tell(BackupLost(session, self.view, why))

    def _step_aside(self) -> None:
        """Nothing that waits for the backup was acknowledged, or ever will be."""
        self.is_replaced = True
        shipping = self._part()
        if shipping is not None:
            shipping.refuse(self.refusal)
            self._keep(shipping)
