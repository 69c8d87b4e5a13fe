"""The state machine of one store and its copies: takes events, and returns orders.
`CopyPhase` has its phases, and the module of that class their drawing.

A store is *served* at the address of its primary. Its *view* is a number that grows
with each order that changes which processes have copies, and each order carries the
view: a server refuses an order of an earlier view, and the answer to such an order is
ignored (`StorePlacement`).

The law of this file: a copy is only promoted, and a primary only continues alone, if no
other copy can have acknowledged changes that it lacks. So while one of the two copies
is asked, and does not answer, the other is not asked; and a copy that is not known to
be complete may refuse. Nothing else changes the phase or the view of a store.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, final

from ._orders import (
    COPIES_IN,
    NEXT_PHASES,
    THIRD_BESIDE,
    WHOLE,
    WITH_BACKUP,
    Attach,
    Copy,
    CopyPhase,
    Detach,
    Drop,
    Establish,
    Host,
    Lose,
    Promote,
    Serve,
    Swap,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ._orders import FoundCopy, PlacementOrder, Successor

SUCCEEDED: Final = "another program took it over"
RESTARTED: Final = "it was started again"


@dataclass(slots=True)
class StoreProcess:
    """One process that may have copies of stores."""

    address: str
    life: int = 0
    """A number that grows when the process loses its memory."""
    is_there: bool = False
    unwilling: set[int] = field(default_factory=set)
    """Numbers of the stores of which the process gets no backup for a while."""
    is_leaving: bool = False
    """Whether the process is leaving, and gets no further copies."""


def _orphaned_copy(found: FoundCopy, lives: Sequence[int]) -> Copy:
    copy, process = found.copy, found.process
    return Copy(process, lives[process], copy.address, copy.incarnation)


@final
@dataclass(slots=True, eq=False)
class ReplicatedStore:
    """One store: where its copies are, and what happens when one of them is lost.

    A method of an event (``primary_lost``, ``refused``) decides; a method of a step
    (``promote``, ``detach``) changes the phase. Both return orders.

    Args:
        processes: All processes that may have copies, by index.
        replicas: Number of backups of the store: 0 or 1.
        seek: Chooses a process for a copy that the store lacks.
    """

    number: int
    primary: Copy
    processes: Sequence[StoreProcess]
    replicas: int
    seek: Callable[[ReplicatedStore], list[PlacementOrder]]
    view: int = 1
    phase: CopyPhase = CopyPhase.ALONE
    backup: Copy | None = None
    """The backup, if any. In the phase HOSTING its address is not known yet."""
    third: Copy | None = None
    """An additional copy while the backup is to be replaced; or the copy to ask if the
    backup does not become the primary."""
    is_third_in_sync: bool = False
    """Whether the third copy has all changes that the backup has, which becomes the
    primary."""
    paired_view: int = 0
    """The view in which the primary got its backup."""
    is_reported_lost: bool = False
    """Whether `Lose` was ordered, and no `Serve` since then."""
    reason: str = ""
    """Why a copy was lost, the last time that one was."""
    target: int | None = None
    """Index of the process that is to become the primary; None if the store does not
    move."""
    home: int = 0
    """Index of the process with which the store begins in another session."""
    _phase_before: CopyPhase = CopyPhase.ALONE

    @property
    def is_bare(self) -> bool:
        """Whether no process but that of the primary has any data of the store."""
        return self.phase in (CopyPhase.ALONE, CopyPhase.EMPTY)

    @property
    def is_primary_known(self) -> bool:
        """Whether the process of the primary is, or was, a process of this session."""
        return self.primary.life >= 0

    @property
    def is_paired(self) -> bool:
        """Whether the store has two complete copies, if their processes live."""
        is_swapped = self.phase is CopyPhase.PROMOTING and self.third is not None
        return self.phase in WHOLE or (is_swapped and self.is_third_in_sync)

    @property
    def copies(self) -> list[Copy]:
        """The primary, and the backup if there is one."""
        return [copy for copy in (self.primary, self.backup) if copy is not None]

    @property
    def copy_processes(self) -> set[int]:
        """Indices of the processes that have a copy, or will have one."""
        copies = (self.primary, self.backup, self.third)
        return {copy.process for copy in copies if copy is not None}

    @property
    def is_backup_at_target(self) -> bool:
        """Whether the backup is in the process to which the store moves."""
        return self.backup is not None and self.backup.process == self.target

    def lives(self, copy: Copy | None) -> bool:
        """Returns whether the copy is still in memory; its process may be away."""
        return copy is not None and self.processes[copy.process].life == copy.life

    def is_there(self, copy: Copy | None) -> bool:
        """Returns whether the copy is still in memory, and its process answers."""
        return (
            copy is not None
            and self.lives(copy)
            and self.processes[copy.process].is_there
        )

    # Steps: each changes the phase.

    def reset(self) -> None:
        """Begins without data and without a backup at the home process, in another
        session. View numbers continue."""
        self.target = None
        self._change(CopyPhase.ALONE)
        self._phase_before = CopyPhase.ALONE
        self.backup, self.third, self.is_reported_lost = None, None, False
        self.primary = self.copy_at_home()

    def copy_at_home(self) -> Copy:
        """Returns the copy that the home process has from the start, in the present
        life of that process."""
        process = self.processes[self.home]
        return Copy(self.home, process.life, process.address)

    def create(self) -> list[PlacementOrder]:
        """Orders the home process, which does not have the store from the start, to
        create it."""
        self._change(CopyPhase.CREATING, "")
        return [Establish(self.number, self.view, self.home)]

    def promote(self, reason: str, partner: Copy | None = None) -> list[PlacementOrder]:
        """Asks the backup to become the primary, with ``partner`` as its backup."""
        assert self.backup is not None, self
        self._change(CopyPhase.PROMOTING, reason)
        return [Promote(self.number, self.view, self.backup, partner)]

    def promote_third(self, reason: str) -> list[PlacementOrder]:
        """Asks the third copy to become the primary, instead of the backup."""
        assert self.backup is not None, self
        lost, self.backup, self.third = self.backup, self.third, None
        return [*self.promote(reason), *self.drop(lost)]

    def swap(self) -> list[PlacementOrder]:
        """Asks the primary to hand the store to the backup, and to become the
        backup."""
        assert self.backup is not None, self
        self._change(CopyPhase.SWAPPING)
        return [Swap(self.number, self.view, self.primary.process, self.backup)]

    def detach(self, reason: str) -> list[PlacementOrder]:
        """Asks the primary to continue without a backup."""
        self._end_move_with_backup()
        # A primary that continues alone fills nobody.
        third, self.third = self.third, None
        self._change(CopyPhase.DETACHING, reason)
        return [Detach(self.number, self.view), *self.drop(third)]

    def keep(self, reason: str) -> list[PlacementOrder]:
        """Publishes the address of the primary, and orders the primary to keep its
        backup."""
        assert self.backup is not None, self
        self._change(CopyPhase.ATTACHING, reason)
        self.paired_view = self.view
        served = Serve(self.number, self.view, self.primary)
        return [served, Attach(self.number, self.view, self.backup)]

    def host(self, process: int) -> list[PlacementOrder]:
        """Asks a process to host a backup; or a third copy, if the store has a
        backup."""
        copy = Copy(process, self.processes[process].life, "")
        if self.phase is CopyPhase.PAIRED:
            self._change(CopyPhase.ADDING)
            self.third, self.is_third_in_sync = copy, False
            return [Host(self.number, self.view, process, beside=True)]
        self._change(CopyPhase.HOSTING)
        self.backup = copy
        return [Host(self.number, self.view, process)]

    def fill(self, copy: Copy) -> list[PlacementOrder]:
        """Orders the primary to fill ``copy``, which a process hosts now."""
        if self.phase is CopyPhase.ADDING:
            self.third = copy
            self._set_phase(CopyPhase.FILLING)
            return [Attach(self.number, self.view, copy, beside=True)]
        self.backup, self.paired_view = copy, self.view
        self._set_phase(CopyPhase.ATTACHING)
        return [Attach(self.number, self.view, copy)]

    def filled(self) -> list[PlacementOrder]:
        """Notes that the backup is complete; or the third copy, which then replaces the
        backup."""
        if self.phase is CopyPhase.FILLING:
            # In a newer view the primary names the third copy as its backup. Until it
            # has answered, nobody knows which of the two counts, so both are kept.
            assert self.third is not None, self
            self._change(CopyPhase.REPLACING)
            return [Attach(self.number, self.view, self.third)]
        before: Copy | None = None
        if self.phase is CopyPhase.REPLACING:
            before, self.backup, self.third = self.backup, self.third, None
            self.paired_view = self.view
        self._set_phase(CopyPhase.PAIRED)
        return self.drop(before)

    def end_third(self, reason: str) -> list[PlacementOrder]:
        """Gives up the third copy: the primary keeps the backup that it has. A move
        that needed the third copy ends."""
        third, self.third = self.third, None
        assert third is not None, self
        if third.process == self.target:
            self.target = None
        if self.phase is CopyPhase.ADDING:  # the primary does not know of it
            self._change(CopyPhase.PAIRED)
            return self.drop(third)
        # Without the `Serve`: the primary serves as before.
        _, attach = self.keep(reason)
        return [attach, *self.drop(third)]

    def serve(self) -> list[PlacementOrder]:
        """Publishes the address of the primary, which serves without a backup, and
        seeks a process for one."""
        self._set_phase(CopyPhase.ALONE)
        self.is_reported_lost = False
        return [Serve(self.number, self.view, self.primary), *self.seek(self)]

    def serve_with(self, backup: Copy) -> list[PlacementOrder]:
        """Publishes the address of the primary, which has a complete backup."""
        self.backup, self.paired_view = backup, self.view
        self._set_phase(CopyPhase.PAIRED)
        self.is_reported_lost = False
        served = Serve(self.number, self.view, self.primary)
        if not self.is_there(backup):
            return [served, *self.detach("the process of its backup is lost")]
        return [served, *self.seek(self)]

    def seek_elsewhere(self, *, unwilling: bool = True) -> list[PlacementOrder]:
        """Seeks another process for the backup that one process was to host.

        Args:
            unwilling: Do not ask that process again for a while.
        """
        if unwilling:
            # Else the same process would be chosen, which has the fewest copies still.
            self.avoid(self.backup)
        self._forget_backup()
        self._set_phase(CopyPhase.ALONE)
        return self.seek(self)

    def report_lost(self, reason: str) -> list[PlacementOrder]:
        """Reports that no process serves the store now; a copy may come back."""
        if self.is_reported_lost:
            return []
        self.is_reported_lost = True
        return [Lose(self.number, reason)]

    def lose(self, reason: str) -> list[PlacementOrder]:
        """Gives up the store: no complete copy is left."""
        if self.phase is CopyPhase.EMPTY:
            return []
        self.target = None
        self._change(CopyPhase.EMPTY)
        self.backup, self.third, self.is_reported_lost = None, None, True
        return [Lose(self.number, reason, gone=True)]

    def avoid(self, copy: Copy | None) -> None:
        """Places no copy of this store on the process of ``copy`` for a while."""
        if copy is not None:
            self.processes[copy.process].unwilling.add(self.number)

    def drop(self, copy: Copy | None) -> list[PlacementOrder]:
        """Orders a useless copy to be dropped; a process that is away gets the order
        when it is back."""
        if copy is None or not self.processes[copy.process].is_there:
            return []
        return [Drop(self.number, self.view, copy.process)]

    # Events: each decides which steps follow.

    def take_over(
        self, successor: Successor, lives: Sequence[int]
    ) -> list[PlacementOrder]:
        """Continues with copies that another program has left, when processes had these
        ``lives``: with both copies of a pair, with any other copy alone."""
        partner = successor.partner
        chosen = _orphaned_copy(successor.chosen, lives)
        other = None if partner is None else _orphaned_copy(partner, lives)
        # The newest that any copy knows: each order of this program has a newer one.
        self.view = successor.view
        if not successor.chosen.copy.is_primary:
            # Any process but the backup's, which may have come home.
            lost = (chosen.process + 1) % len(self.processes)
            self.primary = Copy(lost, -1, self.processes[lost].address)
            self.backup = chosen
            orders = self.promote(SUCCEEDED)
        else:
            self.primary, self.backup = chosen, other
            is_kept = successor.is_pair and self.replicas
            orders = (self.keep if is_kept else self.detach)(SUCCEEDED)
        used = {copy.process for copy in (chosen, other) if copy is not None}
        # Its home, too: it has begun the store by itself, empty, if nobody had left it
        # there.
        others = {*successor.useless, self.home} - used
        return orders + [Drop(self.number, self.view, n) for n in sorted(others)]

    def process_lost(self, number: int, reason: str) -> list[PlacementOrder]:
        """Notes that the process is lost, which may have a copy of the store."""
        # The third copy first, as one process may have had it and the primary, after a
        # swap.
        if self.third is not None and self.third.process == number:
            orders = self._third_lost(reason)
            if self.primary.process != number:
                return orders
            # A primary that handed the store over was to be the backup again.
            return self.primary_lost(reason) or orders
        if self.primary.process == number:
            return self.primary_lost(reason)
        if self.backup is not None and self.backup.process == number:
            return self._backup_process_lost(reason)
        return []

    def process_back(self, number: int) -> Iterator[PlacementOrder]:
        """Notes that the process is back with all its data, or was restarted and is
        empty."""
        primary, third = self.primary, self.third
        if third is not None and third.process == number and not self.lives(third):
            yield from self._third_lost(RESTARTED)
        backup, is_promoting = self.backup, self.phase is CopyPhase.PROMOTING
        if primary.process == number:
            if not self.lives(primary):
                yield from self._primary_restarted()
            elif is_promoting and not self.is_there(backup):
                yield from self.detach(self.reason)
        elif backup is not None and backup.process == number:
            if not self.lives(backup):
                yield from self._backup_restarted(number)
            elif is_promoting:
                yield from self.promote(self.reason)
        else:
            # What it may have of the store is of a view that is over.
            yield Drop(self.number, self.view, number)

    def _primary_restarted(self) -> Iterator[PlacementOrder]:
        number, is_promoting = self.primary.process, self.phase is CopyPhase.PROMOTING
        if is_promoting and self.lives(self.backup):
            pass  # the backup was asked, or will be when it is back
        elif self.phase in (*WITH_BACKUP, CopyPhase.SWAPPING):
            yield from self.primary_lost(RESTARTED)
        else:
            yield from self.lose(RESTARTED)
        yield Drop(self.number, self.view, number)

    def _backup_restarted(self, number: int) -> Iterator[PlacementOrder]:
        reason = "the process of its backup was started again"
        yield Drop(self.number, self.view, number)
        if self.phase is CopyPhase.PROMOTING and self._is_synced_third_there:
            yield from self.promote_third(reason)
        elif self.phase is CopyPhase.PROMOTING:
            self._forget_backup()
            yield from self._primary_continues(reason)
        elif self.phase is CopyPhase.HOSTING:
            yield from self.seek_elsewhere(unwilling=False)
        elif self.phase in WITH_BACKUP:
            yield from self.detach(reason)

    def primary_lost(self, reason: str) -> list[PlacementOrder]:
        """Notes that the primary does not answer, or no longer has its data."""
        self.reason = reason
        if self.phase in THIRD_BESIDE:
            third, self.third = self.third, None
            dropped = self.drop(third)
            return [*self._backup_takes_over(reason), *dropped]
        match self.phase:
            case CopyPhase.SWAPPING if self.is_there(self.primary):
                return []  # its process reports what has become of it
            case CopyPhase.REPLACING:
                # Only the third copy knows whether it counts by now.
                self.backup, self.third = self.third, self.backup
                return self._ask_backup(reason)
            case CopyPhase.SWAPPING:
                return self._ask_backup(reason)
            case CopyPhase.ATTACHING | CopyPhase.PAIRED:
                return self._backup_takes_over(reason)
            case CopyPhase.PROMOTING if not self.is_there(self.backup):
                return self.report_lost(reason)
            case CopyPhase.PROMOTING | CopyPhase.EMPTY:
                return []
            case CopyPhase.DETACHING:
                return self.report_lost(reason)
            case _:
                self._forget_backup()
                return [*self.report_lost(reason), *self.detach(reason)]

    def _backup_takes_over(self, reason: str) -> list[PlacementOrder]:
        if self.is_there(self.backup):
            return self.promote(reason)
        self._forget_backup()
        return [*self.report_lost(reason), *self.detach(reason)]

    def _ask_backup(self, reason: str) -> list[PlacementOrder]:
        """Asks the backup, even if it is away, to become the primary: only the backup
        knows whether it may."""
        is_there = self.is_there(self.backup)
        # Asked also if it is away: the order is repeated until its process is back.
        asked = self.promote(reason)
        return [*([] if is_there else self.report_lost(reason)), *asked]

    @property
    def _is_synced_third_there(self) -> bool:
        return self.is_third_in_sync and self.is_there(self.third)

    def _third_lost(self, reason: str) -> list[PlacementOrder]:
        match self.phase:
            case CopyPhase.ADDING | CopyPhase.FILLING:
                return self.end_third(reason)
            case CopyPhase.REPLACING:
                return self.detach(reason)
            case CopyPhase.PROMOTING if self.is_third_in_sync:
                self.third = None
                return self.promote(self.reason)
        self.third = None
        return []

    def backup_lost(self, view: int, reason: str) -> list[PlacementOrder]:
        """Notes that the primary cannot reach the backup that it got in this view."""
        # An earlier backup may be meant: notices of a primary and orders to it cross.
        is_known = self.paired_view <= view <= self.view
        if not is_known or self.phase not in WITH_BACKUP:
            return []
        self.avoid(self.backup)
        return self.detach(reason)

    def _backup_process_lost(self, reason: str) -> list[PlacementOrder]:
        match self.phase:
            case CopyPhase.HOSTING:
                return self.seek_elsewhere(unwilling=False)
            case phase if phase in WITH_BACKUP:
                return self.detach(reason)
            case CopyPhase.PROMOTING if self._is_synced_third_there:
                return self.promote_third(reason)
            case CopyPhase.PROMOTING if self.is_there(self.primary):
                return self.detach(reason)
            case CopyPhase.PROMOTING:  # the first copy that is back
                return self.report_lost(reason)
            case _:
                return []

    def refused(self, reason: str, *, never_counted: bool) -> list[PlacementOrder]:
        """Notes that the process or copy refused the order, and did nothing.

        Args:
            never_counted: The copy is a third one that its primary never counted as a
                replica.
        """
        self.reason = reason
        match self.phase:
            case CopyPhase.CREATING:
                return self.lose(reason)
            case CopyPhase.HOSTING:
                return self.seek_elsewhere()
            case CopyPhase.ATTACHING | CopyPhase.REPLACING:
                self.avoid(self.backup)
                return self.detach(reason)
            case CopyPhase.ADDING | CopyPhase.FILLING:
                self.avoid(self.third)
                return self.end_third(reason)
            case CopyPhase.SWAPPING:
                # It stays where it is; its backup is complete, so nothing has to be
                # copied.
                self.target = None
                is_there = self.is_there(self.backup)
                return (self.keep if is_there else self.detach)(reason)
            case CopyPhase.PROMOTING if self.third is not None and (
                self.is_third_in_sync or never_counted
            ):
                return self.promote_third(reason)
            case CopyPhase.PROMOTING:
                backup = self.backup
                self._forget_backup()
                return [*self._primary_continues(reason), *self.drop(backup)]
            case CopyPhase.DETACHING:
                return self._backup_continues(reason)
            case _:
                return []

    def _primary_continues(self, reason: str) -> list[PlacementOrder]:
        """Makes the primary continue, if it is still in memory, as the backup is
        useless."""
        if not self.lives(self.primary):
            return self.lose(reason)
        is_there = self.is_there(self.primary)
        reported = [] if is_there else self.report_lost(reason)
        return [*reported, *self.detach(reason)]

    def _backup_continues(self, reason: str) -> list[PlacementOrder]:
        """Makes the backup continue, if it is still in memory, as the primary is
        useless and never continued alone."""
        if self.is_there(self.backup):
            return self.promote(reason)
        if not self.lives(self.backup):
            return self.lose(reason)
        self._set_phase(CopyPhase.PROMOTING)  # it is asked when its process is back
        # A life that no process has: nothing that comes back there is the primary.
        self.primary = Copy(self.primary.process, -1, self.primary.address)
        return self.report_lost(reason)

    def validate(self) -> None:
        """Checks the store against the tables of phases. Tests call it."""
        before = self._phase_before
        assert self.phase in NEXT_PHASES[before], (before, self.phase)
        has_backup, has_third = COPIES_IN[self.phase]
        assert has_backup in (None, self.backup is not None), self
        assert has_third in (None, self.third is not None), self
        is_hosted = self.phase is CopyPhase.HOSTING
        assert self.backup is None or is_hosted == (not self.backup.address), self
        assert self.target is None or self.phase is not CopyPhase.EMPTY, self
        if self.phase is not CopyPhase.PROMOTING and self.backup is not None:
            # While it promotes, the primary may no longer have anything.
            assert self.backup.process != self.primary.process, self

    def _forget_backup(self) -> None:
        self._end_move_with_backup()
        self.backup = None

    def _end_move_with_backup(self) -> None:
        """Ends a move that needs the backup, because the backup ends now."""
        if self.is_backup_at_target:
            self.target = None

    def _change(self, phase: CopyPhase, reason: str | None = None) -> None:
        """Sets the phase in a new view, so that answers to earlier orders are
        ignored."""
        self.view += 1
        self._set_phase(phase)
        if reason is not None:
            self.reason = reason

    def _set_phase(self, phase: CopyPhase) -> None:
        """Sets the phase in the same view, because an order was answered, or had no
        effect."""
        self._phase_before, self.phase = self.phase, phase
