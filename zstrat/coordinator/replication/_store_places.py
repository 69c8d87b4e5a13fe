"""Where each store is: one record, which failover and moves share. It has no opinion:
whoever decides calls a change here, and hands on the orders that come back.

A store is *served* at its primary's address. Its *view* grows with each order that
changes who has a copy, and is in each order: so what an earlier order has begun is
refused, and an answer to that is not heard.

    CREATING ──created──▶ ALONE, or ──refused──▶ EMPTY: a store that no process has
                                                 from the beginning is made, empty.

    ALONE ──host──▶ HOSTING ──attach──▶ ATTACHING ──whole──▶ PAIRED
      ▲ ▲                                   │ │                │ │
      │ └──────────detached── DETACHING ◀───┘─│──backup lost───┘ │
      │                        ▲     │        │                  │
      │              backup    │     │refused │    primary lost  │
      │              refuses,  │     ▼        ▼                  │
      └──promoted── or is lost └─ PROMOTING ◀────────────────────┘
                                     │
    PAIRED ──host──▶ ADDING ──attach──▶ FILLING ──whole──▶ REPLACING ──▶ PAIRED, with
        the third copy as its backup. A third copy that is lost is forgotten.
    PAIRED ──swap──▶ SWAPPING ──▶ PROMOTING, with what was the primary as its partner
        ──promoted──▶ PAIRED. If the backup is lost the partner is promoted.
    in all of these ──primary lost──▶ PROMOTING: a copy that cannot lack anything
    any phase ──no copy lives that has all──▶ EMPTY: whoever asks for the store is told.
    any phase ──another session (`reset_store`)──▶ ALONE, or CREATING.

The law of this file: what a store's phase and view become is written here, and nowhere
else.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, final

from ._orders import (
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
    from collections.abc import Sequence

    from ._orders import PlacementOrder

THIRD_BESIDE: Final = (CopyPhase.ADDING, CopyPhase.FILLING)
"""A third copy is made, which counts for nothing yet."""
WHOLE: Final = (
    CopyPhase.PAIRED,
    *THIRD_BESIDE,
    CopyPhase.REPLACING,
    CopyPhase.SWAPPING,
)
"""Two copies are whole."""
WITH_BACKUP: Final = (
    CopyPhase.ATTACHING,
    CopyPhase.PAIRED,
    *THIRD_BESIDE,
    CopyPhase.REPLACING,
)
"""The primary has a backup, or fills it."""
_BARE: Final = (CopyPhase.ALONE, CopyPhase.EMPTY)
"""No other process has anything of the store."""


@dataclass(slots=True, eq=False)
class StorePlace:
    """Where one store is. Only `StorePlaces`, and who decides by it, change it."""

    number: int
    primary: Copy
    view: int = 1
    phase: CopyPhase = CopyPhase.ALONE
    backup: Copy | None = None
    """While it is hosted its address is not known yet."""
    third: Copy | None = None
    """A copy besides these, while one of them is to be replaced; or the one that is
    asked if the backup does not become the primary."""
    is_third_in_sync: bool = False
    """The third copy has all that the backup has, which becomes the primary."""
    paired_view: int = 0
    """That in which the primary got its backup."""
    is_reported_lost: bool = False
    """That nobody serves it was ordered."""
    reason: str = ""
    """Why a copy of it was lost, the last time."""
    target: int | None = None
    """The process that is to be its primary."""
    home: int = 0
    """The process where it begins anew in another session."""

    @property
    def is_bare(self) -> bool:
        """Whether no other process has anything of it."""
        return self.phase in _BARE

    @property
    def is_primary_known(self) -> bool:
        """Whether the process of its primary is, or was, one of this session."""
        return self.primary.life >= 0

    @property
    def is_paired(self) -> bool:
        """Whether it has two whole copies, if their processes live."""
        is_swapped = self.phase is CopyPhase.PROMOTING and self.third is not None
        return self.phase in WHOLE or (is_swapped and self.is_third_in_sync)

    @property
    def copies(self) -> list[Copy]:
        """The primary, and the backup if there is one."""
        return [copy for copy in (self.primary, self.backup) if copy is not None]

    @property
    def processes(self) -> set[int]:
        """Where something of it is, or will be."""
        return {
            copy.process
            for copy in (self.primary, self.backup, self.third)
            if copy is not None
        }

    @property
    def is_third_at_target(self) -> bool:
        """Whether its third copy is where it moves."""
        return self.third is not None and self.third.process == self.target

    @property
    def is_backup_at_target(self) -> bool:
        """Whether its backup is where it moves."""
        return self.backup is not None and self.backup.process == self.target


@dataclass(slots=True)
class ProcessPlace:
    """One process that may have copies of stores."""

    address: str
    life: int = 0
    """It grows when the process has lost its memory."""
    is_there: bool = False
    unwilling: set[int] = field(default_factory=set)
    """Stores of which it shall not have a backup for a while."""
    is_leaving: bool = False
    """It shall not have any more."""


@final
class StorePlaces:
    """Where all stores of a session are. They are distributed to the processes: store
    ``i`` is what the process ``i`` has by itself; it is asked to make others.

    Args:
        addresses: Of the processes.
        replicas: Backups that each store is to have: 0 or 1.
        per_process: Stores of each process.
    """

    def __init__(
        self, addresses: Sequence[str], replicas: int, per_process: int
    ) -> None:
        self.replicas: Final = replicas
        self.is_started = False
        """Until then no backup is sought."""
        self.processes = [ProcessPlace(address) for address in addresses]
        self.stores = [
            StorePlace(number, Copy(home, 0, addresses[home]), home=home)
            for number in range(len(addresses) * per_process)
            for home in [number % len(addresses)]
        ]
        self._own = len(addresses)

    def is_own(self, number: int) -> bool:
        """Whether the process where the store belongs has it by itself."""
        return number < self._own and self.stores[number].home == number

    def lives(self, copy: Copy | None) -> bool:
        """Whether the memory is as it was; its process may be away."""
        return copy is not None and self.processes[copy.process].life == copy.life

    def is_there(self, copy: Copy | None) -> bool:
        """Whether the memory is as it was, and its process answers."""
        return (
            copy is not None
            and self.lives(copy)
            and self.processes[copy.process].is_there
        )

    def copy_at(self, process: int, life: int | None = None) -> Copy:
        """What the process has at its own address.

        Args:
            life: Left out: that of the process now; -1: of no process.
        """
        known = self.processes[process]
        return Copy(process, known.life if life is None else life, known.address)

    def _copies_of(self, process: int) -> int:
        return sum(process in store.processes for store in self.stores)

    def reset_store(self, store: StorePlace) -> None:
        """The store begins anew where it belongs, without a backup, in another session.
        Its views go on."""
        self.end_move(store)
        self._change(store, CopyPhase.ALONE)
        store.backup, store.third, store.is_reported_lost = None, None, False
        store.primary = self.copy_at(store.home)

    def create(self, store: StorePlace) -> list[PlacementOrder]:
        """The store is made where it belongs, by a process that does not have it by
        itself."""
        self._change(store, CopyPhase.CREATING, "")
        return [Establish(store.number, store.view, store.home)]

    def inherit(self, store: StorePlace, view: int) -> None:
        """The newest view of a program before, which had it; later ones go on there."""
        store.view = view

    def promote(
        self, store: StorePlace, reason: str, partner: Copy | None = None
    ) -> list[PlacementOrder]:
        """The backup is asked to be the primary, with the partner as its backup."""
        assert store.backup is not None, store
        self._change(store, CopyPhase.PROMOTING, reason)
        return [Promote(store.number, store.view, store.backup, partner)]

    def promote_third(self, store: StorePlace, reason: str) -> list[PlacementOrder]:
        """The third copy is asked to be the primary, in place of the backup, which is
        of no use, or which would have been that with the third copy as its backup."""
        assert store.backup is not None, store
        lost, store.backup, store.third = store.backup, store.third, None
        return [*self.promote(store, reason), *self.drop(store, lost)]

    def swap(self, store: StorePlace) -> list[PlacementOrder]:
        """The primary is to hand the store to its backup, and to be that."""
        assert store.backup is not None, store
        self._change(store, CopyPhase.SWAPPING)
        at = store.primary.process
        return [Swap(store.number, store.view, at, store.backup)]

    def await_backup(self, store: StorePlace) -> None:
        """Only the backup may go on with the store, and is asked when its process is
        back."""
        self._go_on(store, CopyPhase.PROMOTING)
        # A life that no process has: nothing that comes back there is the primary.
        store.primary = Copy(store.primary.process, -1, store.primary.address)

    def detach(self, store: StorePlace, reason: str) -> list[PlacementOrder]:
        """The primary is asked to go on alone."""
        self._end_move_with_backup(store)
        third, store.third = store.third, None
        self._change(store, CopyPhase.DETACHING, reason)
        return [Detach(store.number, store.view), *self.drop(store, third)]

    def keep(self, store: StorePlace, reason: str) -> list[PlacementOrder]:
        """The primary serves it, and is to keep the backup that it has."""
        assert store.backup is not None, store
        self._change(store, CopyPhase.ATTACHING, reason)
        store.paired_view = store.view
        served = Serve(store.number, store.view, store.primary)
        return [served, Attach(store.number, store.view, store.backup)]

    def end_third(self, store: StorePlace, reason: str) -> list[PlacementOrder]:
        """No third copy is made: the primary keeps the backup that it has. A move
        that it was for ends."""
        third, store.third = store.third, None
        assert third is not None, store
        if third.process == store.target:
            self.end_move(store)
        if store.phase is CopyPhase.ADDING:  # the primary does not know of it
            self._change(store, CopyPhase.PAIRED)
            return self.drop(store, third)
        _, attach = self.keep(store, reason)
        return [attach, *self.drop(store, third)]

    def replace(self, store: StorePlace) -> list[PlacementOrder]:
        """The third copy has all, and is to be the backup."""
        assert store.third is not None, store
        self._change(store, CopyPhase.REPLACING)
        return [Attach(store.number, store.view, store.third)]

    def replaced(self, store: StorePlace) -> list[PlacementOrder]:
        """The third copy is the backup."""
        before, store.backup, store.third = store.backup, store.third, None
        store.paired_view = store.view
        self.pair(store)
        return self.drop(store, before)

    def serve(self, store: StorePlace) -> list[PlacementOrder]:
        """The primary has the store, alone, and is to get a backup."""
        self._go_on(store, CopyPhase.ALONE)
        store.is_reported_lost = False
        served = Serve(store.number, store.view, store.primary)
        return [served, *self.seek(store)]

    def serve_with(self, store: StorePlace, backup: Copy) -> list[PlacementOrder]:
        """The primary has the store, and a backup that has all."""
        store.backup, store.paired_view = backup, store.view
        self.pair(store)
        store.is_reported_lost = False
        served = Serve(store.number, store.view, store.primary)
        if not self.is_there(backup):
            return [served, *self.detach(store, "the process of its backup is lost")]
        return [served, *self.seek(store)]

    def report_store_lost(self, store: StorePlace, reason: str) -> list[PlacementOrder]:
        """Nobody serves the store for now; a copy of it may come back."""
        if store.is_reported_lost:
            return []
        store.is_reported_lost = True
        return [Lose(store.number, reason)]

    def lose_store(self, store: StorePlace, reason: str) -> list[PlacementOrder]:
        """No copy of the store is left that has all."""
        if store.phase is CopyPhase.EMPTY:
            return []
        self.end_move(store)
        self._change(store, CopyPhase.EMPTY)
        store.backup, store.third, store.is_reported_lost = None, None, True
        return [Lose(store.number, reason, gone=True)]

    def seek_all(self) -> list[PlacementOrder]:
        """Each store that lacks a copy, or is to have it elsewhere, seeks it."""
        return [order for store in self.stores for order in self.seek(store)]

    def seek(self, store: StorePlace) -> list[PlacementOrder]:
        """A backup, where it moves; or else in the process that has the fewest copies
        and not the primary's. Where it has one that is to be elsewhere, a third copy.
        """
        if not self.is_started:
            return []
        if store.phase is CopyPhase.PAIRED and self.replicas:
            return self._seek_third(store)
        if store.phase is not CopyPhase.ALONE:
            return []
        at, count = store.primary.process, len(self.processes)
        fit = self._fit_for_backup(store)
        # The target is away, or will not have it: the store stays where it is.
        if store.target is not None and store.target not in fit:
            self.end_move(store)
        if store.target is not None:
            fit = [store.target]
        elif not self.replicas:
            return []
        if not fit:
            return []
        # Of equals the next one behind the primary, so that backups go round.
        chosen = min(fit, key=lambda n: (self._copies_of(n), (n - at) % count))
        self._change(store, CopyPhase.HOSTING)
        store.backup = Copy(chosen, self.processes[chosen].life, "")
        return [Host(store.number, store.view, chosen)]

    def _seek_third(self, store: StorePlace) -> list[PlacementOrder]:
        """The store has two copies, which it keeps until a third one is whole: its
        backup at the target swaps with the primary, any other is replaced."""
        assert store.backup is not None, store
        if store.is_backup_at_target:
            return self.swap(store)
        fit = [n for n in self._fit_for_backup(store) if n != store.backup.process]
        if store.target is not None and store.target not in fit:
            self.end_move(store)
        if store.target is not None:
            fit = [store.target]
        elif not self.processes[store.backup.process].is_leaving:
            return []
        if not fit:
            return []
        chosen = min(fit, key=self._copies_of)
        self._change(store, CopyPhase.ADDING)
        store.third = Copy(chosen, self.processes[chosen].life, "")
        store.is_third_in_sync = False
        return [Host(store.number, store.view, chosen, beside=True)]

    def fill_third(self, store: StorePlace, third: Copy) -> list[PlacementOrder]:
        """The third copy is hosted, and the primary fills it."""
        store.third = third
        self._go_on(store, CopyPhase.FILLING)
        return [Attach(store.number, store.view, third, beside=True)]

    def _fit_for_backup(self, store: StorePlace) -> list[int]:
        return [
            number
            for number, process in enumerate(self.processes)
            if process.is_there
            and not process.is_leaving
            and number != store.primary.process
            and store.number not in process.unwilling
        ]

    def fill(self, store: StorePlace, backup: Copy) -> None:
        """The backup is hosted, and the primary fills it."""
        store.backup, store.paired_view = backup, store.view
        self._go_on(store, CopyPhase.ATTACHING)

    def pair(self, store: StorePlace) -> None:
        """The backup has all."""
        self._go_on(store, CopyPhase.PAIRED)

    def seek_elsewhere(
        self, store: StorePlace, *, unwilling: bool = True
    ) -> list[PlacementOrder]:
        """The process that was to host its backup does not.

        Args:
            unwilling: It shall not be asked again for a while.
        """
        if unwilling:
            self.avoid_backup_process(store)
        self.forget_backup(store)
        self._go_on(store, CopyPhase.ALONE)
        return self.seek(store)

    def avoid_backup_process(self, store: StorePlace) -> None:
        """The process of its backup shall not have one of it for a while."""
        self.avoid_process(store, store.backup)

    def avoid_process(self, store: StorePlace, copy: Copy | None) -> None:
        """The process of the copy shall not have one of the store for a while."""
        if copy is not None:
            self.processes[copy.process].unwilling.add(store.number)

    def forget_backup(self, store: StorePlace) -> None:
        """The store has no backup any more, and does not move if it was for that."""
        self._end_move_with_backup(store)
        store.backup = None

    def drop(self, store: StorePlace, copy: Copy | None) -> list[PlacementOrder]:
        """The copy is of no use any more; a process that is away is told later."""
        if copy is None or not self.processes[copy.process].is_there:
            return []
        return [Drop(store.number, store.view, copy.process)]

    def end_move(self, store: StorePlace) -> None:
        """The store has no target any more. That is so when it is there, when that is
        not wished any more (`MovingStores`), in another session (`reset_store`), when
        the copy at the target ends (`_end_move_with_backup`), when the target is not
        there or will not have a copy (`seek`), and when the store is lost
        (`lose_store`).
        """
        store.target = None

    def _end_move_with_backup(self, store: StorePlace) -> None:
        """The backup ends, and so does the move that it was for."""
        if store.is_backup_at_target:
            self.end_move(store)

    def _change(
        self, store: StorePlace, phase: CopyPhase, reason: str | None = None
    ) -> None:
        """Changes the phase in a new view: answers to earlier orders are not heard any
        more."""
        store.view += 1
        self._go_on(store, phase)
        if reason is not None:
            store.reason = reason

    def _go_on(self, store: StorePlace, phase: CopyPhase) -> None:
        """Changes the phase in the same view: an order was answered, or was in vain."""
        store.phase = phase
