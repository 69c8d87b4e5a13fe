"""Decides which process has which copy of each store. Takes events, and returns orders,
each for one process.

The machine of a store (`ReplicatedStore`) decides what becomes of that store. This file
decides what concerns all stores: which processes are present, which of them gets a
copy, and which store moves.

The law of this file: only the answer to the last order of a store is used, and before
`StorePlacement.start` only the creation of stores is decided.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, final

from ._orders import (
    THIRD_BESIDE,
    WITH_BACKUP,
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
from ._replicated_store import ReplicatedStore, StoreProcess

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ._orders import Asked, PlacementOrder, Successor


MOVES: Final = "it moves"

_ASKED_TO_SERVE: Final = (CopyPhase.SWAPPING, CopyPhase.PROMOTING)
"""Phases in which a copy is asked to become the primary, or to make room for another:
that cannot be cancelled."""


@final
class StorePlacement:
    """The copies of all stores. Process ``i`` hosts store ``i`` from the start;
    processes create further copies when asked (`create_stores`).

    A store moves when another process is its *target*. The target gets a backup, which
    is promoted when it is complete. Without replicas a store has a backup only to move.
    With replicas it keeps two complete copies: a backup elsewhere is replaced when a
    third copy is complete, and one at the target swaps with the primary.

        has no backup ─────────seek──▶ one at the target
        has one at the target, complete ──▶ promoted, or swapped: it is there
        has one elsewhere ──detach──▶ has none                       (no replicas)
        has one elsewhere ──add, fill, replace──▶ one at the target  (replicas)
        is created, promoted or detached: keeps its target until it is served again

    A store that moves is as safe as one that does not. What ends the copy at the target
    before that is promoted ends the move, and the store stays where it is: a loss of
    the copy or of the store, a target that is away or refuses, `cancel_move`, another
    session. Once the copy is asked to become the primary, the move is not cancelled.

    Args:
        addresses: Addresses of the processes.
        replicas: Number of backups of each store: 0 or 1.
        per_process: Number of stores of each process.
    """

    def __init__(
        self, addresses: Sequence[str], replicas: int = 1, per_process: int = 1
    ) -> None:
        self.replicas, self._own = replicas, len(addresses)
        self._is_started = False
        """Whether `start` was called; before that no backup is sought."""
        self._processes = [StoreProcess(address) for address in addresses]
        self.stores: Final = [
            ReplicatedStore(
                number,
                Copy(home, 0, addresses[home]),
                self._processes,
                replicas,
                self._seek,
                home=home,
            )
            for number in range(len(addresses) * per_process)
            for home in [number % len(addresses)]
        ]
        self.failovers = 0
        """Number of backups that became primary because the primary was lost."""
        self.moves = 0
        """Number of backups that became primary on purpose."""

    @property
    def without_backup(self) -> int:
        """Number of stores without two complete copies, if all processes live."""
        return sum(not store.is_paired for store in self.stores)

    @property
    def is_creating(self) -> bool:
        return any(store.phase is CopyPhase.CREATING for store in self.stores)

    def is_own(self, number: int) -> bool:
        """Returns whether the store's home (the process with which it begins) has it
        from the start, without an order to create it."""
        return number < self._own and self.stores[number].home == number

    def has_or_wants_backup(self, number: int) -> bool:
        """Returns whether the store has more copies than a primary, or will have."""
        return bool(self.replicas) or not self.stores[number].is_bare

    def create_stores(self) -> list[PlacementOrder]:
        """Orders the creation of the stores that no process has by itself. Comes before
        `start`."""
        orders: list[PlacementOrder] = []
        for store in self.stores:
            if not self.is_own(store.number):
                orders += store.create()
        return orders

    def start(self) -> list[PlacementOrder]:
        """Begins with each store served by its home process; all processes are
        connected."""
        self._is_started = True
        for store in self.stores:
            if self.is_own(store.number):
                store.primary = store.copy_at_home()
        return self._seek_all()

    def take_over_stores(
        self, orphans: Mapping[int, Successor], lives: Sequence[int]
    ) -> list[PlacementOrder]:
        """Continues with copies of stores that another program has left, given by
        store, when processes had these ``lives``. Comes instead of `start`; report
        after this which processes were lost or restarted since then."""
        self._is_started = True
        orders: list[PlacementOrder] = []
        for number, successor in orphans.items():
            orders += self.stores[number].take_over(successor, lives)
        return orders

    def enter_session(self) -> None:
        """Begins again with all stores at their home processes, in another session;
        decides nothing before `start`. View numbers continue."""
        self._is_started = False
        for store in self.stores:
            store.reset()

    def joined(self, number: int, life: int) -> list[PlacementOrder]:
        """Notes that the process is in the session. Its ``life`` is the same number as
        before if the process still has all its data."""
        process = self._processes[number]
        process.is_there, process.life = True, life
        # It may be another process, or the same one with more memory.
        process.unwilling.clear()
        if not self._is_started:
            return []
        orders: list[PlacementOrder] = []
        for store in self.stores:
            orders += store.process_back(number)
        return orders + self._seek_all()

    def process_lost(self, number: int, reason: str) -> list[PlacementOrder]:
        """Notes that the process is lost."""
        self._processes[number].is_there = False
        if not self._is_started:
            return []
        orders: list[PlacementOrder] = []
        for store in self.stores:
            # The loss of a store without copies is reported by the link to it.
            if self.has_or_wants_backup(store.number):
                orders += store.process_lost(number, reason)
        return orders

    def enter(self, address: str) -> int:
        """Adds a process; returns its index."""
        self._processes.append(StoreProcess(address))
        return len(self._processes) - 1

    def set_leaving(self, number: int, is_leaving: bool) -> None:
        """Cordons (or uncordons) the process for new copies."""
        self._processes[number].is_leaving = is_leaving

    def remove_process(self, number: int) -> None:
        """Removes the process, which is then no longer the home of any store."""
        for store in self.stores:
            if store.home == number:
                # In another session, too, a removed process must not be asked to create
                # it.
                store.home = store.primary.process

    def retry_refused(self) -> list[PlacementOrder]:
        """Asks processes again that refused a copy a while ago."""
        for process in self._processes:
            process.unwilling.clear()
        return self._seek_all() if self._is_started else []

    @property
    def has_refused(self) -> bool:
        """Whether a process has refused a copy, so that `retry_refused` has to ask it
        again."""
        return any(process.unwilling for process in self._processes)

    def primary_lost(
        self, number: int, address: str, reason: str
    ) -> list[PlacementOrder]:
        """Notes that the process at the address does not answer for the store, or no
        longer has its data."""
        store = self.stores[number]
        if not self._is_started or store.primary.address != address:
            return []
        return store.primary_lost(reason)

    def validate(self) -> None:
        """Checks each store against the tables of phases. Tests call it."""
        for store in self.stores:
            store.validate()

    # Where copies go.

    def _seek_all(self) -> list[PlacementOrder]:
        return [order for store in self.stores for order in self._seek(store)]

    def _seek(self, store: ReplicatedStore) -> list[PlacementOrder]:
        """Seeks a process for a backup of the store: the target, or else the process
        with the fewest copies that has no copy of this store. If the backup has to be
        elsewhere, seeks one for a third copy."""
        if not self._is_started:
            return []
        # Two copies are enough, unless one of them has to be elsewhere.
        if store.phase is CopyPhase.PAIRED and self.replicas:
            return self._seek_third(store)
        if store.phase is not CopyPhase.ALONE:
            return []
        at, count = store.primary.process, len(self._processes)
        fit = self._fit_for_copy(store)
        if not fit or (store.target is None and not self.replicas):
            return []
        # Of equals the next one after the primary, so that backups go round.
        return store.host(
            min(fit, key=lambda n: (self._copies_of(n), (n - at) % count))
        )

    def _seek_third(self, store: ReplicatedStore) -> list[PlacementOrder]:
        """Moves a backup while both copies stay until a third one is complete: a backup
        at the target swaps with the primary, any other backup is replaced by the third
        copy."""
        assert store.backup is not None, store
        if store.is_backup_at_target:
            return store.swap()
        fit = self._fit_for_copy(store)
        is_leaving = self._processes[store.backup.process].is_leaving
        if not fit or (store.target is None and not is_leaving):
            return []
        return store.host(min(fit, key=self._copies_of))

    def _fit_for_copy(self, store: ReplicatedStore) -> list[int]:
        """Returns the processes that may get a further copy of the store. If the target
        may, returns only the target; if not, the move ends, and the store stays where
        it is."""
        fit = [
            number
            for number, process in enumerate(self._processes)
            if process.is_there
            and not process.is_leaving
            and number not in (copy.process for copy in store.copies)
            and store.number not in process.unwilling
        ]
        if store.target not in fit:
            # A target that is lost or refuses ends the move: the store is not to wait
            # for it.
            store.target = None
        return fit if store.target is None else [store.target]

    def _copies_of(self, process: int) -> int:
        return sum(process in store.copy_processes for store in self.stores)

    # Moves.

    def move(self, number: int, target: int) -> list[PlacementOrder]:
        """Starts to move the store to the process ``target``. The move is over when
        `ReplicatedStore.target` is None again; the store may have stayed where it
        was."""
        store = self.stores[number]
        if not self._is_started:
            return []
        if store.primary.process == target:
            return self.cancel_move(number, "it is there")
        store.target = target
        at_target = store.is_backup_at_target
        match store.phase:
            case CopyPhase.ALONE:
                return self._seek(store)
            case CopyPhase.PAIRED if self.replicas:
                return self._seek(store)
            # A third copy elsewhere is given up: it does not count yet.
            case CopyPhase.ADDING | CopyPhase.FILLING if (
                store.third is not None and store.third.process != target
            ):
                return [*store.end_third(MOVES), *self._seek(store)]
            case CopyPhase.PAIRED if at_target:
                return store.promote(MOVES)
            # The answer of the process that hosts it now comes in an older view, and is
            # dropped.
            case CopyPhase.HOSTING if not at_target:
                return store.seek_elsewhere(unwilling=False)
            # Without replicas a backup is there to move the store, and this one is for
            # another target. Once the primary is alone it is sought at the target.
            case CopyPhase.ATTACHING | CopyPhase.PAIRED if not (
                at_target or self.replicas
            ):
                return store.detach(MOVES)
            case CopyPhase.EMPTY:
                store.target = None
        return []

    def cancel_move(self, number: int, reason: str) -> list[PlacementOrder]:
        """Ends the move of the store, which stays where it is, and ends a copy that
        only the move needed."""
        store = self.stores[number]
        # Once a copy is asked to serve, only its answer says which one does.
        if store.target is None or store.phase in _ASKED_TO_SERVE:
            return []
        # Looked at first, as it compares with the target.
        is_for_move, store.target = store.is_backup_at_target, None
        if store.phase in THIRD_BESIDE:
            return store.end_third(reason)
        if self.replicas or not is_for_move:
            return []  # the store gets the backup anyway
        return self._end_backup(store, reason)

    def evict(self, number: int) -> list[PlacementOrder]:
        """Moves the backup of the store away from a process that leaves."""
        store = self.stores[number]
        if self.replicas and store.phase is not CopyPhase.HOSTING:
            return self._seek(store)
        return self._end_backup(store, MOVES)

    def _end_backup(self, store: ReplicatedStore, reason: str) -> list[PlacementOrder]:
        if store.phase is CopyPhase.HOSTING:
            return store.seek_elsewhere(unwilling=False)
        if store.phase in WITH_BACKUP:
            return store.detach(reason)
        return []

    # Answers to orders.

    def hosted(
        self, order: Host, address: str, incarnation: int
    ) -> list[PlacementOrder]:
        """Notes that the process hosts an empty copy at this address."""
        phase = CopyPhase.ADDING if order.beside else CopyPhase.HOSTING
        if not self._is_current(order, phase):
            return self._useless(order)
        copy = self._copy(order, address, incarnation)
        return self.stores[order.store].fill(copy)

    def created(
        self, order: Establish, address: str, incarnation: int
    ) -> list[PlacementOrder]:
        """Notes that the process serves the store, empty, at this address."""
        store = self.stores[order.store]
        if (store.view, store.phase) != (order.view, CopyPhase.CREATING):
            return self._useless(order)
        store.primary = self._copy(order, address, incarnation)
        return store.serve()

    def attached(self, order: Attach) -> list[PlacementOrder]:
        """Notes that the backup, or the third copy, is complete."""
        store = self.stores[order.store]
        if self._is_current(order, CopyPhase.FILLING):
            return store.filled()
        if not self._is_current(order, CopyPhase.REPLACING, CopyPhase.ATTACHING):
            return []
        orders = store.filled()
        if self.replicas:
            return orders + self._seek(store)
        if store.is_backup_at_target:
            return orders + store.promote(MOVES)
        return orders

    def swapped(
        self, order: Swap, address: str, incarnation: int
    ) -> list[PlacementOrder]:
        """Notes that the primary's process has handed the store to its backup, and
        keeps its data as a copy at this address."""
        store = self.stores[order.store]
        if not self._is_current(order, CopyPhase.SWAPPING):
            return self._useless(order)
        store.third = partner = self._copy(order, address, incarnation)
        store.is_third_in_sync = True
        if not store.is_there(store.backup):
            return store.promote_third("it was lost as it swapped")
        return store.promote(MOVES, partner)

    def _useless(self, order: Host | Establish | Swap) -> list[PlacementOrder]:
        """Returns the order to drop the copy that a process has made in answer to an
        outdated order, unless a later copy took its place there."""
        store = self.stores[order.store]
        return [Drop(store.number, store.view, order.process)]

    def detached(self, order: Detach) -> list[PlacementOrder]:
        """Notes that the primary continues without a backup."""
        store = self.stores[order.store]
        if not self._is_current(order, CopyPhase.DETACHING):
            return []
        backup, store.backup = store.backup, None
        return store.drop(backup) + store.serve()

    def promoted(self, order: Promote) -> list[PlacementOrder]:
        """Notes that the backup has become the primary: a move of the store is done, or
        this was a failover."""
        store = self.stores[order.store]
        if not self._is_current(order, CopyPhase.PROMOTING):
            return []
        former, third = store.primary, store.third
        store.primary, store.backup, store.third = order.backup, None, None
        if store.target == store.primary.process:
            # By the target, not by the reason: a store whose primary is lost amid a
            # move has moved, too, if the backup at the target took over.
            store.home, store.target = store.primary.process, None
            self.moves += 1
        else:
            self.failovers += 1
        if order.partner is not None:  # which is where the former primary was
            return store.serve_with(order.partner)
        # Before a new backup is sought.
        dropped = store.drop(third)
        if former.process != store.primary.process:  # else that has swapped
            dropped += store.drop(former)
        return dropped + store.serve()

    def refused(
        self, order: Asked, reason: str, *, never_counted: bool = False
    ) -> list[PlacementOrder]:
        """Notes that the process or copy refused the order, and did nothing.

        Args:
            never_counted: As of `ReplicatedStore.refused`.
        """
        if not self._is_last(order):
            return []
        store = self.stores[order.store]
        return store.refused(reason, never_counted=never_counted)

    def unanswered(self, order: Asked, reason: str) -> list[PlacementOrder]:
        """Sends an order with unknown outcome again, or asks another process for a
        copy."""
        store = self.stores[order.store]
        if not self._is_last(order):
            return []
        if isinstance(order, Host) and order.beside:
            store.avoid(store.third)
            is_asked = store.phase is CopyPhase.ADDING
            return store.end_third(reason) if is_asked else []
        if isinstance(order, Host):
            is_asked = store.phase is CopyPhase.HOSTING
            return store.seek_elsewhere() if is_asked else []
        store.reason = reason
        return [order]

    def _copy(
        self, order: Host | Establish | Swap, address: str, incarnation: int
    ) -> Copy:
        """Returns the copy that the process of the order has made, in its present
        life."""
        life = self._processes[order.process].life
        return Copy(order.process, life, address, incarnation)

    def _is_last(self, order: Asked) -> bool:
        """Returns whether the order is the last one of its store. Before `start` only
        stores are created."""
        is_due = self._is_started or isinstance(order, Establish)
        return is_due and self.stores[order.store].view == order.view

    def _is_current(self, order: Asked, *phases: CopyPhase) -> bool:
        is_last = self._is_started and self._is_last(order)
        return is_last and self.stores[order.store].phase in phases
