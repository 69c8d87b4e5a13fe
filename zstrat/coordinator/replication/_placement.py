"""Which process has which copy of each store. Decides only: it is told what happened
and returns orders, each for one process.

One record of where each store is (`StorePlaces`), and two that decide by it: who serves
a store after a loss (`Failover`), and where one goes on purpose (`MovingStores`).
`StorePlacement` is what both need: who is there, and which answers are heard. Law of
that class: only an answer to what is asked now is heard, and before `start` nothing is
decided but where stores are created.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, final

from ._failover import Failover
from ._orders import (
    Attach,
    Copy,
    CopyPhase,
    Detach,
    Drop,
    Establish,
    Host,
    Promote,
    Swap,
)
from ._store_places import THIRD_BESIDE, WITH_BACKUP, ProcessPlace, StorePlaces

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ._orders import Asked, PlacementOrder
    from ._store_places import StorePlace
    from ._successors import Successor


MOVES: Final = "it moves"

_ASKED_TO_SERVE: Final = (CopyPhase.SWAPPING, CopyPhase.PROMOTING)
"""A copy is asked to be the primary, or to make room for it: what cannot be taken
back."""


@final
class MovingStores:
    """The stores of a session that move on purpose: a process is to serve one that
    another one serves.

    It gets a backup in the process that is its *target*, which is promoted when it is
    whole. Without replicas a store has a backup only to move. With replicas it keeps
    two whole copies: a backup elsewhere is replaced when a third copy is whole, and one
    at the target swaps with the primary.

        has no backup ─────────seek──▶ one at the target
        has one at the target, whole ──▶ promoted, or swapped: it is there
        has one elsewhere ──detach──▶ has none                       (no replicas)
        has one elsewhere ──add, fill, replace──▶ one at the target  (replicas)
        is created, promoted or detached: its target is kept until it is served again

    The law of this class: a store that moves can be lost as one that does not, and no
    more. What ends the copy at the target before that is promoted ends the move, and
    the store stays where it is (`StorePlaces.end_move` names all that does); once the
    copy is asked to be the primary, the move is not taken back.
    """

    def __init__(self, places: StorePlaces) -> None:
        self._places = places

    def move(self, store: StorePlace, target: int) -> list[PlacementOrder]:
        """The store is to be served by the process ``target``."""
        places = self._places
        if store.primary.process == target:
            return self.cancel_move(store, "it is there")
        store.target = target
        at_target = store.is_backup_at_target
        match store.phase:
            case CopyPhase.ALONE:
                return places.seek(store)
            case CopyPhase.PAIRED if places.replicas:
                return places.seek(store)
            case CopyPhase.ADDING | CopyPhase.FILLING if not store.is_third_at_target:
                return [*places.end_third(store, MOVES), *places.seek(store)]
            case CopyPhase.PAIRED if at_target:
                return places.promote(store, MOVES)
            case CopyPhase.HOSTING if not at_target:
                return places.seek_elsewhere(store, unwilling=False)
            case CopyPhase.ATTACHING | CopyPhase.PAIRED if not (
                at_target or places.replicas
            ):
                return places.detach(store, MOVES)
            case CopyPhase.EMPTY:
                places.end_move(store)
        return []

    def cancel_move(self, store: StorePlace, reason: str) -> list[PlacementOrder]:
        """The store is to stay where it is; a switch that is under way ends."""
        if store.target is None or store.phase in _ASKED_TO_SERVE:
            return []
        if store.phase in THIRD_BESIDE:
            self._places.end_move(store)
            return self._places.end_third(store, reason)
        is_for_move = store.is_backup_at_target
        self._places.end_move(store)
        if self._places.replicas or not is_for_move:
            return []  # the backup is one that the store is to have anyway
        return self._end_backup(store, reason)

    def evict(self, store: StorePlace) -> list[PlacementOrder]:
        """The backup of the store, in a process that leaves, is to be elsewhere."""
        if self._places.replicas and store.phase is not CopyPhase.HOSTING:
            return self._places.seek(store)
        return self._end_backup(store, MOVES)

    def _end_backup(self, store: StorePlace, reason: str) -> list[PlacementOrder]:
        if store.phase is CopyPhase.HOSTING:
            return self._places.seek_elsewhere(store, unwilling=False)
        if store.phase in WITH_BACKUP:
            return self._places.detach(store, reason)
        return []

    def backup_whole(self, store: StorePlace) -> list[PlacementOrder]:
        """The backup has all: it is promoted where the store moves."""
        if self._places.replicas:
            return self._places.seek(store)
        if store.is_backup_at_target:
            return self._places.promote(store, MOVES)
        return []

    def promoted(self, store: StorePlace) -> bool:
        """The backup is the primary. Returns whether the store moved there: then it
        belongs there; else that is a failover."""
        if store.target != store.primary.process:
            return False
        self._places.end_move(store)
        store.home = store.primary.process
        return True


@final
class StorePlacement:
    """The copies of all stores, which are distributed to the processes. Store ``i`` is
    what the process ``i`` has by itself; it hosts others if asked (`create_stores`).

    Args:
        addresses: Of the processes.
        replicas: Backups that each store is to have: 0 or 1.
        per_process: Stores of each process.
    """

    def __init__(
        self, addresses: Sequence[str], replicas: int = 1, per_process: int = 1
    ) -> None:
        self._places: Final = StorePlaces(addresses, replicas, per_process)
        self._failover: Final = Failover(self._places)
        self._moving: Final = MovingStores(self._places)
        self.stores: Final = self._places.stores
        self.failovers = 0
        """How often a backup became primary because that was lost."""
        self.moves = 0
        """How often one did so on purpose."""

    @property
    def without_backup(self) -> int:
        """How many stores have no second copy that has all, if all processes live."""
        return sum(not store.is_paired for store in self.stores)

    @property
    def is_creating(self) -> bool:
        return any(store.phase is CopyPhase.CREATING for store in self.stores)

    def is_own(self, number: int) -> bool:
        """Whether the process where the store belongs has it by itself."""
        return self._places.is_own(number)

    def has_or_wants_backup(self, number: int) -> bool:
        """Whether the store has more than a primary, or is to have."""
        return bool(self._places.replicas) or not self.stores[number].is_bare

    def create_stores(self) -> list[PlacementOrder]:
        """Stores that no process has by itself are made where they belong. Comes before
        `start`."""
        orders: list[PlacementOrder] = []
        for store in self.stores:
            if not self.is_own(store.number):
                orders += self._places.create(store)
        return orders

    def start(self) -> list[PlacementOrder]:
        """All stores are served where they belong, by processes that are there."""
        self._places.is_started = True
        for store in self.stores:
            if self.is_own(store.number):
                store.primary = self._places.copy_at(store.home)
        return self._places.seek_all()

    def take_over_stores(
        self, left: Mapping[int, Successor], lives: Sequence[int]
    ) -> list[PlacementOrder]:
        """Another program has left these copies: two that are a pair go on together,
        and each other one alone. Comes instead of `start`; what has become of processes
        since they had these lives is told afterwards."""
        self._places.is_started = True
        return self._failover.take_over_stores(left, lives)

    def enter_session(self) -> None:
        """All stores begin anew where they belong, in another session; up to `start`
        nothing is decided. Views go on."""
        self._places.is_started = False
        for store in self.stores:
            self._places.reset_store(store)

    def joined(self, number: int, life: int) -> list[PlacementOrder]:
        """The process is in the session. Its ``life`` is the same number as before if
        it has all that it had."""
        process = self._processes[number]
        process.is_there, process.life = True, life
        process.unwilling.clear()
        if not self._places.is_started:
            return []
        orders: list[PlacementOrder] = []
        for store in self.stores:
            orders += self._failover.process_back(store, number)
        return orders + self._places.seek_all()

    def process_lost(self, number: int, reason: str) -> list[PlacementOrder]:
        """The process is away."""
        self._processes[number].is_there = False
        if not self._places.is_started:
            return []
        orders: list[PlacementOrder] = []
        for store in self.stores:
            # Of a store without copies the way to the store itself says so.
            if self.has_or_wants_backup(store.number):
                orders += self._failover.process_lost(store, number, reason)
        return orders

    def enter(self, address: str) -> int:
        """Another process is to be had; returns its number."""
        self._processes.append(ProcessPlace(address))
        return len(self._processes) - 1

    def set_leaving(self, number: int, is_leaving: bool) -> None:
        """The process is to get no copies, or may get some again."""
        self._processes[number].is_leaving = is_leaving

    def abandon(self, number: int) -> None:
        """The process is gone: a store that belonged there belongs where it is now."""
        for store in self.stores:
            if store.home == number:
                store.home = store.primary.process

    def forgive(self) -> list[PlacementOrder]:
        """Some time has passed: processes that would not, or could not, keep a backup
        may be asked again."""
        for process in self._processes:
            process.unwilling.clear()
        return self._places.seek_all() if self._places.is_started else []

    @property
    def is_waiting(self) -> bool:
        """Whether `forgive` is of use."""
        return any(process.unwilling for process in self._processes)

    def primary_lost(
        self, number: int, address: str, reason: str
    ) -> list[PlacementOrder]:
        """The address does not answer for the store, or not with what it had."""
        store = self.stores[number]
        if not self._places.is_started or store.primary.address != address:
            return []
        return self._failover.primary_lost(store, reason)

    def backup_lost(self, number: int, view: int, reason: str) -> list[PlacementOrder]:
        """The primary says so of the backup that it has in this view."""
        store = self.stores[number]
        is_known = store.paired_view <= view <= store.view
        if not is_known or store.phase not in WITH_BACKUP:
            return []
        return self._failover.backup_lost(store, reason)

    def move(self, number: int, target: int) -> list[PlacementOrder]:
        """The store is to be served by another process. It is where `StorePlace.target`
        is None again, or stays where it was."""
        if not self._places.is_started:
            return []
        return self._moving.move(self.stores[number], target)

    def cancel_move(self, number: int, reason: str) -> list[PlacementOrder]:
        """The store is to stay where it is; a switch that is under way ends."""
        return self._moving.cancel_move(self.stores[number], reason)

    def evict(self, number: int) -> list[PlacementOrder]:
        """The backup of the store, in a process that leaves, is to be elsewhere."""
        return self._moving.evict(self.stores[number])

    def hosted(
        self, order: Host, address: str, incarnation: int
    ) -> list[PlacementOrder]:
        """The process keeps an empty copy there."""
        store = self.stores[order.store]
        phase = CopyPhase.ADDING if order.beside else CopyPhase.HOSTING
        if not self._is_of_now(order, phase):
            return self._useless(order)
        backup = self._copy(order, address, incarnation)
        if order.beside:
            return self._places.fill_third(store, backup)
        self._places.fill(store, backup)
        return [Attach(store.number, store.view, backup)]

    def created(
        self, order: Establish, address: str, incarnation: int
    ) -> list[PlacementOrder]:
        """The process serves the store, empty, there."""
        store = self.stores[order.store]
        if (store.view, store.phase) != (order.view, CopyPhase.CREATING):
            return [Drop(store.number, store.view, order.process)]
        store.primary = self._copy(order, address, incarnation)
        return self._places.serve(store)

    def attached(self, order: Attach) -> list[PlacementOrder]:
        """The backup has all, or the third copy."""
        store = self.stores[order.store]
        if self._is_of_now(order, CopyPhase.FILLING):
            return self._places.replace(store)
        dropped: list[PlacementOrder] = []
        if self._is_of_now(order, CopyPhase.REPLACING):
            dropped = self._places.replaced(store)
        elif self._is_of_now(order, CopyPhase.ATTACHING):
            self._places.pair(store)
        else:
            return []
        return [*dropped, *self._moving.backup_whole(store)]

    def swapped(
        self, order: Swap, address: str, incarnation: int
    ) -> list[PlacementOrder]:
        """The process of the primary has handed the store to its backup, and keeps what
        it has as a copy there."""
        store = self.stores[order.store]
        if not self._is_of_now(order, CopyPhase.SWAPPING):
            return self._useless(order)
        store.third = partner = self._copy(order, address, incarnation)
        store.is_third_in_sync = True
        if not self._places.is_there(store.backup):
            return self._places.promote_third(store, "it was lost as it swapped")
        return self._places.promote(store, MOVES, partner)

    def _useless(self, order: Host | Swap) -> list[PlacementOrder]:
        """Nobody wants the copy that was made, unless a later one took its place."""
        store = self.stores[order.store]
        return [Drop(store.number, store.view, order.process)]

    def detached(self, order: Detach) -> list[PlacementOrder]:
        """The primary goes on alone."""
        store = self.stores[order.store]
        if not self._is_of_now(order, CopyPhase.DETACHING):
            return []
        backup, store.backup = store.backup, None
        return self._places.drop(store, backup) + self._places.serve(store)

    def promoted(self, order: Promote) -> list[PlacementOrder]:
        """The backup is the primary."""
        store = self.stores[order.store]
        if not self._is_of_now(order, CopyPhase.PROMOTING):
            return []
        former, third = store.primary, store.third
        store.primary, store.backup, store.third = order.backup, None, None
        if self._moving.promoted(store):
            self.moves += 1
        else:
            self.failovers += 1
        if order.partner is not None:  # which is where the former primary was
            return self._places.serve_with(store, order.partner)
        # Before a new backup is asked for.
        dropped = self._places.drop(store, third)
        if former.process != store.primary.process:  # else that has swapped
            dropped += self._places.drop(store, former)
        return dropped + self._places.serve(store)

    def refused(
        self, order: Asked, reason: str, *, never_counted: bool = False
    ) -> list[PlacementOrder]:
        """The process or copy that was asked has refused: nothing of the order was
        carried out, nor will be.

        Args:
            never_counted: As of `Failover.refused`.
        """
        if not self._may_hear(order):
            return []
        store = self.stores[order.store]
        return self._failover.refused(store, reason, never_counted=never_counted)

    def unanswered(self, order: Asked, reason: str) -> list[PlacementOrder]:
        """Nobody knows whether the order was carried out; it is given once more."""
        if not self._may_hear(order):
            return []
        store = self.stores[order.store]
        if isinstance(order, Host) and order.beside:
            is_asked = store.phase is CopyPhase.ADDING
            self._places.avoid_process(store, store.third)
            return self._places.end_third(store, reason) if is_asked else []
        if isinstance(order, Host):
            is_asked = store.phase is CopyPhase.HOSTING
            return self._places.seek_elsewhere(store) if is_asked else []
        store.reason = reason
        return [order]

    @property
    def _processes(self) -> list[ProcessPlace]:
        return self._places.processes

    def _copy(
        self, order: Host | Establish | Swap, address: str, incarnation: int
    ) -> Copy:
        """What the process has made, in its life of now."""
        life = self._processes[order.process].life
        return Copy(order.process, life, address, incarnation)

    def _may_hear(self, order: Asked) -> bool:
        """Whether nothing else was ordered since, and `start` or this comes first."""
        is_due = self._places.is_started or isinstance(order, Establish)
        return is_due and self.stores[order.store].view == order.view

    def _is_of_now(self, order: Asked, phase: CopyPhase) -> bool:
        return (
            self._places.is_started
            and self._may_hear(order)
            and self.stores[order.store].phase is phase
        )
