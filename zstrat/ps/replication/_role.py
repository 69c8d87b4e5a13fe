"""Which role a process has for one store, and who serves the store instead of it.

The role follows from what is known: a backup follows its primary (`Backup`), and a
process whose place another one has taken stands aside (`ReplicaRole.is_replaced`). Only
two things are decided here: that a process which ends gives way to its backup, and that
one which leaves what it holds to its successor falls silent before.
"""

from __future__ import annotations

import asyncio
import enum
import time
from dataclasses import replace
from typing import TYPE_CHECKING, final

from zstrat.ps.handover._handover import HandedOverStore, StoreRole
from zstrat.wire import OrphanedCopy, Owner

if TYPE_CHECKING:
    from zstrat.config import Timeouts
    from zstrat.ps._roles import Caller
    from zstrat.ps.store._store import Store
    from zstrat.wire import Message, Ownership, PromoteBackup

    from ._backup import Backup
    from ._replica_role import ReplicaRole


class ServingState(enum.Enum):
    """What a process does for those who ask for the store."""

    SERVING = "serving"
    """It answers requests for the store."""
    BACKUP = "backup"
    """It takes the changes of its primary, and refuses everybody else."""
    ASIDE = "aside"
    """Another process serves the store: whoever asks is sent there."""
    SILENT = "silent"
    """What it holds is handed over: nobody is answered, and asks the successor."""


@final
class StoreServingRole:
    """The role of one process for its store. Lives on the loop.

    Args:
        ownership: Whose session the process serves.
        timeouts: Those after which a lost program cannot have acted unheard.
    """

    def __init__(
        self,
        store: Store,
        ownership: Ownership,
        replica_role: ReplicaRole,
        timeouts: Timeouts,
    ) -> None:
        self._store, self._ownership = store, ownership
        self._replica_role, self._timeouts = replica_role, timeouts
        self._host: Owner | None = None
        """Whose process keeps this copy, if it began as a backup."""
        self._gives_way = False
        """The process ends, and its backup serves from now on."""
        self.silence: asyncio.Future[Message] | None = None
        """What everybody waits for in vain while it is `ServingState.SILENT`."""

    @property
    def state(self) -> ServingState:
        """What it does now: a process that is silent is so whatever else it was."""
        if self.silence is not None:
            return ServingState.SILENT
        if self.is_backup:
            return ServingState.BACKUP
        if self._replica_role.is_replaced or self._gives_way:
            return ServingState.ASIDE
        return ServingState.SERVING

    @property
    def backup(self) -> Backup | None:
        """The part of a backup; None if this process is not one."""
        return self._replica_role.backup

    @property
    def is_backup(self) -> bool:
        return self.backup is not None

    @property
    def is_replicated(self) -> bool:
        """Whether another process has a copy of the store, or is to have one."""
        replica_role = self._replica_role
        aside = self.is_backup or replica_role.is_replaced or self._gives_way
        return aside or replica_role.is_to_have_backup

    @property
    def view(self) -> int:
        """The newest one of the store that the process knows of."""
        backup = self.backup
        return self._replica_role.view if backup is None else backup.view

    def be_backup(self, host: Owner, backup: Backup) -> None:
        """The process of ``host`` keeps this copy for another one."""
        self._host, self._replica_role.backup = host, backup

    def inherit(self, left: HandedOverStore) -> None:
        """Goes on with what a process before had: as it was, if nobody else can have
        it."""
        if self.backup is not None:
            self.backup.inherit(is_whole=left.role is StoreRole.BACKUP)
            return
        self._replica_role.view = left.view
        if left.role is not StoreRole.ALONE:
            self._replica_role.step_aside(is_dropped=left.role is StoreRole.NOTHING)

    def stand_beside(self) -> None:
        """The copy is a third one, up to a newer view."""
        assert self.backup is not None, "it was made as a backup"
        self.backup.is_beside = True

    def be_whole(self) -> None:
        """The backup has been given all that its primary has."""
        assert self.backup is not None, "it was made as a backup"
        self.backup.be_whole()

    def promoted(self, remote: Caller, message: PromoteBackup) -> None:
        """Is the primary from now on, for the coordinator that has asked for it."""
        replica_role, host, session = (
            self._replica_role,
            self._host,
            self._ownership.session,
        )
        if replica_role.backup is not None:
            session = replica_role.backup.session
        assert session is not None
        owner = Owner(session, remote, remote.hello, time.time())
        if host is not None:
            owner = replace(
                owner, name=host.name, origin=host.origin, program=host.program
            )
        self._ownership.open(owner)
        if replica_role.backup is not None:
            replica_role.promoted(message)
        replica_role.view, self._gives_way = message.view, False

    def follow_new_owner(self, owner: Owner, lost_at: float | None) -> None:
        """Another program has the process that keeps this copy, and goes on with it.

        Args:
            lost_at: When the process had lost the program before.
        """
        self._replica_role.owner_changed(lost_at, self._timeouts)
        if self.backup is not None:
            self._host = owner
            self.backup.follow_new_owner(owner.session)

    def give_way(self) -> None:
        """The process ends: its backup answers whatever comes from now on."""
        self._gives_way |= self._replica_role.has_backup

    def fall_silent(self) -> None:
        """The process ends, and leaves what it holds to the one after it."""
        self.silence = asyncio.get_running_loop().create_future()

    def session_over(self) -> None:
        """Whatever the session had here is gone."""
        self._gives_way = False

    def state_for_successor(self, number: int) -> HandedOverStore:
        """What a process that has fallen silent leaves of the store ``number``."""
        replica_role, backup = self._replica_role, self.backup
        role = StoreRole.NOTHING
        if backup is not None and backup.is_whole and not backup.is_beside:
            role = StoreRole.BACKUP
        elif backup is None and not replica_role.is_dropped:
            # Who has no backup that has all, and was not replaced, is the only one.
            role = StoreRole.PRIMARY if replica_role.is_replaced else StoreRole.ALONE
        store = None if role is StoreRole.NOTHING else self._store
        return HandedOverStore(number, role, self.view, store)

    def copy_of_lost_program(
        self, number: int, incarnation: int, lost_at: float | None
    ) -> OrphanedCopy | None:
        """What a lost program has left here of the store ``number``, if anything.

        Args:
            lost_at: When the process had lost that program.
        """
        replica_role, backup = self._replica_role, self.backup
        owner = self._ownership.owner if backup is None else self._host
        if owner is None or not replica_role.has_any:
            return None
        is_third = backup is not None and backup.is_beside
        return OrphanedCopy(
            number,
            0 if is_third else self.view,
            "",
            incarnation,
            owner.origin,
            is_primary=backup is None,
            is_whole=backup is None or (backup.is_whole and not is_third),
            is_sure=replica_role.is_sure(lost_at, self._timeouts),
            variables=len(self._store),
            partner=replica_role.partner,
        )
