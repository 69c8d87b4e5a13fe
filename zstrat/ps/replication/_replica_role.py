"""The role of one process for its store: its primary, its backup, or its former
primary.

Coordinators decide the role of a process. The process itself decides two things alone:
to let its backup answer when it ends, and to stop answering before it hands its store
to the next process.

Views are kept here. A view is a number that a coordinator draws and that only grows;
orders for an older view than the newest known one are refused.
"""

from __future__ import annotations

import asyncio
import enum
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Final, final

from zstrat.errors import NotPrimaryError, StaleSessionError, UnavailableError
from zstrat.ps.handover._handover import HandedOverStore, StoreRole
from zstrat.wire import (
    AttachBackup,
    BackupLost,
    DetachBackup,
    Done,
    Message,
    OrphanedCopy,
    Owner,
    PromoteBackup,
)

from ._attached_backups import AttachedBackups, Completeness
from ._backup import Backup

if TYPE_CHECKING:
    from collections.abc import Callable

    from zstrat.config import Timeouts
    from zstrat.errors import ZstratError
    from zstrat.ps._roles import Caller
    from zstrat.ps._thread import JobThread
    from zstrat.ps.store._store import Store
    from zstrat.wire import Ownership, PlainTree

    from ._log_link import Connect
    from ._log_shipping import Turn

ReplicationRequest = AttachBackup | DetachBackup | PromoteBackup


class Role(enum.Enum):
    """The role of a process for a store.

    BACKUP ──promoted──▶ PRIMARY
    PRIMARY ──it swaps with its backup──▶ HANDING_OVER
    HANDING_OVER ──the backup has everything──▶ DROPPED
    HANDING_OVER ──the handover fails──▶ PRIMARY
    PRIMARY, HANDING_OVER ──a newer view has another primary──▶ REPLACED
    REPLACED ──a coordinator has it serve after all──▶ PRIMARY
    any but BACKUP ──a coordinator drops the store here──▶ DROPPED
    any but BACKUP ──the session ends──▶ PRIMARY
    """

    PRIMARY = "primary"
    """The process serves the store."""
    BACKUP = "backup"
    """The process takes the changes of its primary, and refuses all other requests."""
    HANDING_OVER = "handing over"
    """The process is a primary that takes no more requests, until its backup has
    everything."""
    REPLACED = "replaced"
    """Another process may serve the store; the content is still here."""
    DROPPED = "dropped"
    """Another process serves the store; the content was dropped here."""


class Shutdown(enum.Enum):
    """The stages of the end of a process, which decide how it answers requests.

    RUNNING ──it ends, and has a whole backup──▶ GIVING_WAY
    GIVING_WAY ──promoted, or the session ends──▶ RUNNING
    RUNNING, GIVING_WAY ──it hands its store to the next process──▶ SILENT
    """

    RUNNING = "running"
    GIVING_WAY = "giving way"
    """Requests are refused: the backup serves the store from now on."""
    SILENT = "silent"
    """Requests are not answered: callers ask the next process."""


_REPLACED: Final = (Role.HANDING_OVER, Role.REPLACED, Role.DROPPED)


@final
class ReplicaRole:
    """The role of one process for the store ``task``. Lives on the event loop.

    Args:
        ownership: The session that the process serves, and its owner.
        turn: Holds names, so that no other request uses them, while its body runs.
        timeouts: Decide when a lost program can no longer have given orders unnoticed
            (`Completeness`).
        incarnation: That of the process, or of the copy that it hosts for another
            process.
        notify: Sends a notice to the coordinator that holds the session.
        connect: Makes a link to a backup; None: the store cannot have one.
        clock: Returns seconds.
    """

    def __init__(
        self,
        task: str,
        store: Store,
        ownership: Ownership,
        turn: Turn,
        timeouts: Timeouts,
        *,
        incarnation: int,
        notify: Callable[[Message], None],
        connect: Connect | None,
        clock: Callable[[], float],
    ) -> None:
        self.task, self._store, self._ownership = task, store, ownership
        self.incarnation = incarnation
        self._notify, self._clock = notify, clock
        self._role, self._shutdown = Role.PRIMARY, Shutdown.RUNNING
        self.on_change: Callable[[], None] = lambda: None
        """Called when the role has changed."""
        self._view = 0
        """The newest view known to a process that is not a backup."""
        self.backup: Backup | None = None
        """The backup, while the role is BACKUP; None in every other role."""
        self._host: Owner | None = None
        """The owner of the process that hosts this copy, if the copy began as a
        backup."""
        self.backups = AttachedBackups(
            task,
            store,
            turn,
            connect=connect,
            fill_timeout=timeouts.connect,
            silence=timeouts.liveness,
            on_lost=self._backup_lost,
            on_replaced=self._step_aside,
        )
        """The copies in other processes that this process keeps up to date as a
        primary."""
        self.silence: asyncio.Future[Message] | None = None
        """The future that callers get, which is never done, while the process is
        SILENT."""
        self.completeness = Completeness(timeouts)

    def _become(self, role: Role) -> None:
        self._role = role
        self.on_change()

    @property
    def is_serving(self) -> bool:
        """Whether this process answers requests for the store."""
        return self._role is Role.PRIMARY and self._shutdown is Shutdown.RUNNING

    @property
    def is_backup(self) -> bool:
        return self._role is Role.BACKUP

    @property
    def is_replaced(self) -> bool:
        """Whether another process may serve the store instead."""
        return self._role in _REPLACED

    @property
    def is_replicated(self) -> bool:
        """Whether another process has a copy of the store, or will get one."""
        return self.completeness.needs_backup or not (
            self._role is Role.PRIMARY and self._shutdown is not Shutdown.GIVING_WAY
        )

    @property
    def view(self) -> int:
        """The newest view of the store that the process knows."""
        return self._view if self.backup is None else self.backup.view

    @property
    def refusal(self) -> NotPrimaryError:
        """The error for requests to a store that another process serves by now."""
        return NotPrimaryError(
            f"{self.task}: another process serves its variables, which has taken over "
            "while this one could not be reached"
        )

    @property
    def objection(self) -> NotPrimaryError | None:
        """The error that replaces the answer to a request that was under way when
        another process took over, because that process lacks its change; None: the
        answer may be sent."""
        return self.refusal if self.is_replaced else None

    @property
    def shutdown_error(self) -> UnavailableError:
        """The error for requests to a process that is shutting down."""
        problem = f"{self.task} is shutting down"
        if self.is_replaced or self.backups.has_backup:
            return NotPrimaryError(f"{problem}: its backup takes over")
        return UnavailableError(problem)

    def validate(self) -> None:
        """Checks the invariants that hold between two events.

        Raises:
            AssertionError: An invariant is violated.
        """
        role, backups = self._role, self.backups
        assert (role is Role.BACKUP) == (self.backup is not None), role
        assert (self._shutdown is Shutdown.SILENT) == (self.silence is not None)
        if role is Role.HANDING_OVER:
            assert backups.has_backup, "it hands over to nobody"
        elif role is not Role.PRIMARY:
            assert not backups.is_any, f"{role} has a backup"
        backups.validate()
        if self.backup is not None:
            self.backup.validate()

    def statistics(self) -> dict[str, PlainTree]:
        """Returns the role, the view, and the progress of the backup."""
        if (backup := self.backup) is not None:
            return {
                "role": "backup",
                "view": backup.view,
                "session": backup.session,
                **backup.statistics(),
            }
        role = "replaced" if self.is_replaced else "primary"
        return {"role": role, "view": self.view, **self.backups.statistics()}

    def require(self, view: int) -> None:
        """Refuses an order for an older view than the newest known one.

        Raises:
            StaleSessionError: There is a newer view.
        """
        if view < self.view:
            raise StaleSessionError(
                f"{self.task}: view {view} of its store is over, and the newest one "
                f"is {self.view}: another coordinator, or a later order of this one, "
                "came first"
            )

    async def handle(self, message: ReplicationRequest) -> Message:
        """Carries out an order of a coordinator to the primary.

        Raises:
            NotPrimaryError: Another process serves the store, or this process has
                dropped it.
            StaleSessionError: There is a newer view.
            ZstratError: The backup could not be made whole.

        Cancellation: copying to a backup continues.
        """
        # First: the order may come from a program that was replaced.
        self.require(message.view)
        self.completeness.ordered()
        if isinstance(message, AttachBackup):
            if self.is_replaced:
                raise self.refusal
            # May refuse, so the view rises only after it.
            is_filled = self.backups.attach(message)
            self._view = message.view
            # The view counts from the order on; the answer waits until the copy is
            # whole.
            await is_filled
            return Done()
        self._view = message.view
        self._return()
        # Promoted with a backup, it was promoted before, and has that backup already.
        if isinstance(message, DetachBackup) or not message.incarnation:
            self.backups.detach()
        return Done()

    def be_backup(
        self,
        host: Owner,
        view: int,
        primary: int,
        thread: JobThread,
        on_made: Callable[[Message, float], None],
    ) -> None:
        """Makes this store a copy that the process of ``host`` hosts for another
        process.

        Args:
            view: The view in the session of ``host``.
            primary: The incarnation of the primary.
            thread: The thread that computes changes.
            on_made: As in `Backup`.
        """
        self._role, self._host = Role.BACKUP, host
        self.backup = Backup(
            self.task,
            self._store,
            thread,
            host.session,
            view,
            primary,
            self.promoted,
            self._clock,
            on_made,
        )

    def be_whole(self) -> None:
        """Counts this backup as whole, because it was given everything that its primary
        has."""
        assert self.backup is not None, "only a backup is given a store"
        self.backup.be_whole()

    def be_third(self) -> None:
        """Counts this copy as a third copy (not yet as the backup), until there is a
        newer view."""
        assert self.backup is not None, "only a backup can be the third copy"
        self.backup.is_beside = True

    def inherit(self, left: HandedOverStore) -> None:
        """Takes over the role in which the process before has left the store: serves it
        only if no other process can have it."""
        if self.backup is not None:
            self.backup.inherit(is_whole=left.role is StoreRole.BACKUP)
            return
        self._view = left.view
        if left.role is StoreRole.NOTHING:
            self._become(Role.DROPPED)
        elif left.role is not StoreRole.ALONE:
            self._become(Role.REPLACED)

    def promoted(self, remote: Caller, message: PromoteBackup) -> None:
        """Makes the process the primary, by order of the coordinator ``remote``."""
        backup, host, session = self.backup, self._host, self._ownership.session
        # A backup knows the session from its host, as no coordinator has opened it
        # here.
        if backup is not None:
            session = backup.session
        assert session is not None, "a process that serves has a session"
        owner = Owner(session, remote, remote.hello, time.time())
        # An order says nothing of the session's name and origin; the host's owner does.
        if host is not None:
            owner = replace(
                owner, name=host.name, origin=host.origin, program=host.program
            )
        self._ownership.open(owner)
        if backup is not None:
            self._role, self.backup = Role.PRIMARY, None
            if message.incarnation:
                order = message.session, message.view, message.address
                self.backups.attach_whole(AttachBackup(*order, message.incarnation))
        self._view = message.view
        # It serves by order of a coordinator, although it was about to end.
        self._stop_giving_way()

    async def hand_over(self) -> None:
        """Stops serving the store, and lets the backup serve, which has everything by
        then.

        Raises:
            UnavailableError: There is no whole backup, or the backup is lost; this
                process serves as before.

        Cancellation: this process serves as before.
        """
        if self.is_replaced:
            raise self.refusal
        try:
            await self.backups.hand_over(lambda: self._become(Role.HANDING_OVER))
        except BaseException:  # to the coordinator
            # In another role the backup is the primary, or an order has ended this.
            if self._role is Role.HANDING_OVER:
                self._become(Role.PRIMARY)
            raise
        self._become(Role.DROPPED)

    def give_up(self, view: int) -> None:
        """Gives up the role for the store: another process serves the store, and the
        content here is not needed.

        Raises:
            StaleSessionError: There is a newer view.
        """
        self.require(view)
        self._view = view
        self._step_aside(Role.DROPPED)

    def _return(self) -> None:
        """Serves the store again, alone, by order of a coordinator: the backup that had
        replaced this process is gone, so no process has newer content."""
        if self._role is Role.DROPPED:
            raise self.refusal
        self._become(Role.PRIMARY)

    def _step_aside(self, role: Role = Role.REPLACED) -> None:
        """Stops serving, because another process serves the store, and refuses answers
        that wait for the backup: their changes were not acknowledged, and never will
        be."""
        # A dropped store stays dropped: there is nothing that it could serve.
        if self._role is not Role.DROPPED:
            self._become(role)
        self.backups.refuse(self.refusal)

    def _backup_lost(self, session: int, why: str) -> None:
        self.completeness.parted_at = self._clock()
        self._notify(BackupLost(session, self.view, why))

    def primary_lost(self) -> None:
        """Notes that the connection to the primary of this backup was lost."""
        self.completeness.parted_at = self._clock()

    def end_session(self, error: ZstratError) -> None:
        """Ends the copies of the session: answers that wait for a backup fail with the
        error."""
        self.backups.refuse(error)
        if self.backup is None:
            self._become(Role.PRIMARY)
        self._view = 0
        self.completeness.end_session()
        self._stop_giving_way()

    def give_way(self) -> None:
        """Lets the backup, if it is whole, answer requests, because this process
        ends."""
        # With a backup that is not whole it is still the only process that can answer.
        if self._shutdown is Shutdown.RUNNING and self.backups.has_backup:
            self._shutdown = Shutdown.GIVING_WAY

    def _stop_giving_way(self) -> None:
        if self._shutdown is Shutdown.GIVING_WAY:
            self._shutdown = Shutdown.RUNNING

    def fall_silent(self) -> None:
        """Stops answering, because this process leaves its store to the next
        process."""
        self._shutdown = Shutdown.SILENT
        self.silence = asyncio.get_running_loop().create_future()

    async def close(self, deadline: float) -> None:
        """Waits until answers that wait for the backup were sent, at most until the
        deadline (loop time); refuses the rest. A silent process refuses nothing, and if
        it is a backup it first makes all changes that it has received.

        Cancellation: waiting answers are neither sent nor refused.
        """
        is_silent = self._shutdown is Shutdown.SILENT
        # What it has taken was acknowledged by its primary, so the next process must
        # have it.
        if self.backup is not None and is_silent:
            await self.backup.finish(deadline)
        elif self.backup is not None:
            self.backup.close()
        elif self.backups.is_any:
            await self.backups.settle(deadline)
            if is_silent:
                if self.backups.has_backup and self._role is not Role.DROPPED:
                    self._become(Role.REPLACED)  # as the backup may be promoted
                self.backups.abandon()
            elif self.backups.has_backup:  # it serves from now on, if any process does
                self._step_aside()
            else:
                self.end_session(self.shutdown_error)
        await self.backups.wait_closed()

    def change_owner(self, lost_at: float | None) -> None:
        """Notes that another program takes over the process.

        Args:
            lost_at: When the process had lost the program before.
        """
        self.completeness.change_owner(self.view, is_sure=self._is_sure(lost_at))

    def follow_new_owner(self, owner: Owner, lost_at: float | None) -> None:
        """Notes that another program takes over the process that hosts this copy; else
        as `change_owner`."""
        self.change_owner(lost_at)
        if self.backup is not None:
            self._host = owner
            self.backup.follow_new_owner(owner.session)

    def _is_sure(self, lost_at: float | None) -> bool:
        # A whole backup may have continued alone, and have more than this process.
        is_alone = self.backup is None and not self.backups.has_backup
        return not self.is_replaced and self.completeness.is_sure(
            self.view, is_alone=is_alone, lost_at=lost_at
        )

    def state_for_successor(self, number: int) -> HandedOverStore:
        """Returns the state of the store ``number`` that this process, which has
        stopped answering, leaves to the next one."""
        backup, role = self.backup, StoreRole.NOTHING
        if backup is not None and backup.is_whole and not backup.is_beside:
            role = StoreRole.BACKUP
        elif backup is None and self._role is not Role.DROPPED:
            # A primary that has no whole backup, and was not replaced, is the only one.
            role = StoreRole.PRIMARY if self.is_replaced else StoreRole.ALONE
        store = None if role is StoreRole.NOTHING else self._store
        return HandedOverStore(number, role, self.view, store)

    def copy_of_lost_program(
        self, number: int, lost_at: float | None
    ) -> OrphanedCopy | None:
        """Describes the copy of the store ``number`` that a lost program has left here;
        None if there is none.

        Args:
            lost_at: When the process had lost that program.
        """
        backup = self.backup
        owner = self._ownership.owner if backup is None else self._host
        if owner is None or self._role is Role.DROPPED:
            return None
        if backup is None and not self.completeness.may_hold(self._view):
            return None
        is_third = backup is not None and backup.is_beside
        # The other one of two copies, if both are known to continue together.
        partner = 0 if self.is_replaced else self.backups.partner
        if backup is not None:
            partner = backup.partner
        return OrphanedCopy(
            number,
            # Of a third copy no view counts, as the primary has not named it yet.
            0 if is_third else self.view,
            "",
            self.incarnation,
            owner.origin,
            is_primary=backup is None,
            is_whole=backup is None or (backup.is_whole and not is_third),
            is_sure=self._is_sure(lost_at),
            variables=len(self._store),
            partner=partner,
        )
