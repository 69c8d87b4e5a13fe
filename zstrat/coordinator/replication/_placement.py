"""Which process has which copy of each store, and what follows if one is lost. Decides
only: it is told what happened and returns orders, each for one process.

A store is *served* at its primary's address. Its *view* grows with each order that
changes who has a copy, and is in each order: so what an earlier order has begun is
refused, and an answer to that is not heard here.

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
    any phase ──no copy lives that has all──▶ EMPTY: whoever asks for the store is told.
    any phase ──another session (`enter_session`)──▶ ALONE, or CREATING.

The law of this file: a copy is only promoted, and a primary only goes on alone, if no
other copy can have acknowledged what it lacks. So while one of the two is asked, and
does not answer, the other is not; and a copy that is not known to be whole may refuse.

A store *moves* in the same way, on purpose: it gets a backup in the process that is its
*target*, which is promoted when it is whole. What ends that copy before ends the move,
and the store stays where it is (`_end_move` names all that does). Without replicas a
store has a backup only to move. While a store is promoted, detached or created, its
target is kept, and the move begins when the store is served again.
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
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ._orders import Asked, PlacementOrder
    from ._succession import FoundCopy, Successor


_WITH_BACKUP: Final = (CopyPhase.ATTACHING, CopyPhase.PAIRED)
"""The primary has a backup, or fills it."""
_BARE: Final = (CopyPhase.ALONE, CopyPhase.EMPTY)
"""No other process has anything of the store."""
MOVES: Final = "it moves"
SUCCEEDED: Final = "another program goes on with it"


@dataclass(slots=True, eq=False)
class StorePlace:
    """Where one store is. Only `StorePlacement` changes it."""

    number: int
    primary: Copy
    view: int = 1
    phase: CopyPhase = CopyPhase.ALONE
    backup: Copy | None = None
    """While it is hosted its address is not known yet."""
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


@dataclass(slots=True)
class _Process:
    address: str
    life: int = 0
    is_there: bool = False
    unwilling: set[int] = field(default_factory=set)
    """Stores of which it shall not have a backup for a while."""
    is_leaving: bool = False
    """It shall not have any more."""


def _place_of(found: FoundCopy, lives: Sequence[int]) -> Copy:
    copy, process = found.copy, found.process
    return Copy(process, lives[process], copy.address, copy.incarnation)


@final
class StorePlacement:
    """That of all stores: they are dealt out to the processes. Store ``i`` is what the
    process ``i`` has by itself; others it hosts, when that is asked (`create_stores`).

    Args:
        addresses: Of the processes.
        replicas: Backups that each store is to have: 0 or 1.
        per_process: Stores of each process.
    """

    def __init__(
        self, addresses: Sequence[str], replicas: int = 1, per_process: int = 1
    ) -> None:
        self._replicas, self._own = replicas, len(addresses)
        self._processes = [_Process(address) for address in addresses]
        self.stores = [
            StorePlace(number, Copy(home, 0, addresses[home]), home=home)
            for number in range(len(addresses) * per_process)
            for home in [number % len(addresses)]
        ]
        self.failovers = 0
        """How often a backup became primary because that was lost."""
        self.moves = 0
        """How often one did so on purpose."""
        self._is_started = False

    @property
    def without_backup(self) -> int:
        """How many stores have no second copy that has all."""
        return sum(store.phase is not CopyPhase.PAIRED for store in self.stores)

    def start(self) -> list[PlacementOrder]:
        """All stores are served where they belong, by processes that are there."""
        self._is_started = True
        for store in self.stores:
            if self.is_own(store.number):
                self._go_home(store)
        return self._seek_all()

    def succeed(
        self, left: Mapping[int, Successor], lives: Sequence[int]
    ) -> list[PlacementOrder]:
        """Another program has left these copies: two that are a pair go on together,
        and each other one alone. Comes instead of `start`; what has become of processes
        since their lives is told afterwards."""
        self._is_started = True
        orders: list[PlacementOrder] = []
        for number, successor in left.items():
            store, chosen = self.stores[number], successor.chosen
            store.view = successor.view  # `_change` counts on from it
            place, partner = _place_of(chosen, lives), None
            if successor.partner is not None:
                partner = _place_of(successor.partner, lives)
            if chosen.copy.is_primary:
                store.primary, store.backup = place, partner
                orders += self._go_on_with(store, is_pair=successor.is_pair)
            else:
                home = self._processes[store.home]
                store.primary, store.backup = Copy(store.home, -1, home.address), place
                orders += self._promote(store, SUCCEEDED)
            used = {copy.process for copy in (place, partner) if copy is not None}
            gone = {*successor.useless, store.home} - used
            orders += [Drop(number, store.view, process) for process in sorted(gone)]
        return orders

    def _go_on_with(self, store: StorePlace, *, is_pair: bool) -> list[PlacementOrder]:
        if not is_pair or store.backup is None:
            return self._detach(store, SUCCEEDED)
        self._change(store, CopyPhase.ATTACHING, SUCCEEDED)
        served = Serve(store.number, store.view, store.primary)
        return [served, Attach(store.number, store.view, store.backup)]

    def create_stores(self) -> list[PlacementOrder]:
        """Stores that no process has by itself are made where they belong. Comes before
        `start`."""
        orders: list[PlacementOrder] = []
        for store in self.stores:
            if not self.is_own(store.number):
                self._change(store, CopyPhase.CREATING, "")
                orders.append(Establish(store.number, store.view, store.home))
        return orders

    @property
    def is_creating(self) -> bool:
        return any(store.phase is CopyPhase.CREATING for store in self.stores)

    def is_own(self, number: int) -> bool:
        """Whether the process where the store belongs has it by itself."""
        return number < self._own and self.stores[number].home == number

    def enter_session(self) -> None:
        """All stores begin anew where they belong, in another session; up to `start`
        nothing is decided. Views go on."""
        self._is_started = False
        for store in self.stores:
            self._end_move(store)
            self._change(store, CopyPhase.ALONE)
            store.backup, store.is_reported_lost = None, False
            self._go_home(store)

    def _go_home(self, store: StorePlace) -> None:
        home = self._processes[store.home]
        store.primary = Copy(store.home, home.life, home.address)

    # ---- processes -------------------------------------------------------------------

    def joined(self, number: int, life: int) -> list[PlacementOrder]:
        """The process is in the session. Its ``life`` is the same number as before if
        it has all that it had."""
        process = self._processes[number]
        process.is_there, process.life = True, life
        process.unwilling.clear()
        if not self._is_started:
            return []
        orders: list[PlacementOrder] = []
        for store in self.stores:
            orders += self._returned(store, number)
        return orders + self._seek_all()

    def process_lost(self, number: int, reason: str) -> list[PlacementOrder]:
        """The process is away."""
        self._processes[number].is_there = False
        if not self._is_started:
            return []
        orders: list[PlacementOrder] = []
        for store in self.stores:
            if not self.has_or_wants_backup(store.number):
                continue  # the way to the store itself says so
            if store.primary.process == number:
                orders += self._primary_lost(store, reason)
            elif store.backup is not None and store.backup.process == number:
                orders += self._backup_away(store, reason)
        return orders

    def enter(self, address: str) -> int:
        """Another process is to be had; returns its number."""
        self._processes.append(_Process(address))
        return len(self._processes) - 1

    def set_leaving(self, number: int, is_leaving: bool) -> None:
        """The process is to get no copies, or may get some again."""
        self._processes[number].is_leaving = is_leaving

    def abandon(self, number: int) -> None:
        """The process is gone: what belonged there belongs where it is now."""
        for store in self.stores:
            if store.home == number:
                store.home = store.primary.process

    # ---- moves -----------------------------------------------------------------------

    def has_or_wants_backup(self, number: int) -> bool:
        """Whether the store has more than a primary, or is to have."""
        return bool(self._replicas) or not self.stores[number].is_bare

    def move(self, number: int, target: int) -> list[PlacementOrder]:
        """The store is to be served by another process. It is where `StorePlace.target`
        is None again, or stays where it was."""
        store = self.stores[number]
        if not self._is_started or store.primary.process == target:
            return self.cancel_move(number, "it is there")
        store.target = target
        at_target = self._is_at_target(store)
        match store.phase:
            case CopyPhase.ALONE:
                return self._seek(store)
            case CopyPhase.PAIRED if at_target:
                return self._promote(store, MOVES)
            case CopyPhase.HOSTING if not at_target:
                return self._not_hosted(store, unwilling=False)
            case CopyPhase.ATTACHING | CopyPhase.PAIRED if not at_target:
                return self._detach(store, MOVES)
            case CopyPhase.EMPTY:
                self._end_move(store)
        return []

    def cancel_move(self, number: int, reason: str) -> list[PlacementOrder]:
        """The store is to stay where it is; a switch that is under way ends."""
        store = self.stores[number]
        if store.target is None or store.phase is CopyPhase.PROMOTING:
            return []
        is_for_move = self._is_at_target(store)
        self._end_move(store)
        if self._replicas or not is_for_move:
            return []
        if store.phase is CopyPhase.HOSTING:
            return self._not_hosted(store, unwilling=False)
        return self._detach(store, reason) if store.phase in _WITH_BACKUP else []

    def evict(self, number: int) -> list[PlacementOrder]:
        """The backup of the store is to be in another process."""
        store = self.stores[number]
        if store.phase is CopyPhase.HOSTING:
            return self._not_hosted(store, unwilling=False)
        return self._detach(store, MOVES) if store.phase in _WITH_BACKUP else []

    # ---- copies ----------------------------------------------------------------------

    def primary_lost(
        self, number: int, address: str, reason: str
    ) -> list[PlacementOrder]:
        """The address does not answer for the store, or not with what it had."""
        store = self.stores[number]
        if not self._is_started or store.primary.address != address:
            return []
        return self._primary_lost(store, reason)

    def backup_lost(self, number: int, view: int, reason: str) -> list[PlacementOrder]:
        """The primary says so of the backup that it has in this view."""
        store = self.stores[number]
        if store.view != view or store.phase not in _WITH_BACKUP:
            return []
        self._refused_by_backup(store)
        return self._detach(store, reason)

    # ---- answers ---------------------------------------------------------------------

    def hosted(
        self, order: Host, address: str, incarnation: int
    ) -> list[PlacementOrder]:
        """The process keeps an empty copy there."""
        store = self.stores[order.store]
        if not self._is_of_now(order, CopyPhase.HOSTING):
            return [Drop(store.number, store.view, order.process)]
        life = self._processes[order.process].life
        store.backup = Copy(order.process, life, address, incarnation)
        self._go_on(store, CopyPhase.ATTACHING)
        return [Attach(store.number, store.view, store.backup)]

    def created(
        self, order: Establish, address: str, incarnation: int
    ) -> list[PlacementOrder]:
        """The process serves the store, empty, there."""
        store = self.stores[order.store]
        if (store.view, store.phase) != (order.view, CopyPhase.CREATING):
            return [Drop(store.number, store.view, order.process)]
        life = self._processes[order.process].life
        store.primary = Copy(order.process, life, address, incarnation)
        return self._served(store)

    def attached(self, order: Attach) -> list[PlacementOrder]:
        """The backup has all."""
        if not self._is_of_now(order, CopyPhase.ATTACHING):
            return []
        store = self.stores[order.store]
        self._go_on(store, CopyPhase.PAIRED)
        if self._is_at_target(store):
            return self._promote(store, MOVES)
        return []

    def detached(self, order: Detach) -> list[PlacementOrder]:
        """The primary goes on alone."""
        store = self.stores[order.store]
        if not self._is_of_now(order, CopyPhase.DETACHING):
            return []
        backup, store.backup = store.backup, None
        return self._dropped(store, backup) + self._served(store)

    def promoted(self, order: Promote) -> list[PlacementOrder]:
        """The backup is the primary."""
        store = self.stores[order.store]
        if not self._is_of_now(order, CopyPhase.PROMOTING):
            return []
        former, store.primary, store.backup = store.primary, order.backup, None
        if store.target == order.backup.process:
            self.moves += 1
            self._end_move(store)
            store.home = order.backup.process
        else:
            self.failovers += 1
        dropped = self._dropped(store, former)  # before a new backup is asked for
        return dropped + self._served(store)

    def refused(self, order: Asked, reason: str) -> list[PlacementOrder]:
        """Who was asked has said no: nothing of the order was done, nor will be."""
        store = self.stores[order.store]
        if store.view != order.view or not self._may_hear(order):
            return []
        store.reason = reason
        match store.phase:
            case CopyPhase.CREATING:
                return self._lose(store, reason)
            case CopyPhase.HOSTING:
                return self._not_hosted(store)
            case CopyPhase.ATTACHING:
                self._refused_by_backup(store)
                return self._detach(store, reason)
            case CopyPhase.PROMOTING:
                backup = store.backup
                self._forget_backup(store)
                orders = self._detach_or_lose(store, reason)
                return [*orders, *self._dropped(store, backup)]
            case CopyPhase.DETACHING:
                return self._promote_or_lose(store, reason)
            case _:
                return []

    def unanswered(self, order: Asked, reason: str) -> list[PlacementOrder]:
        """Nobody knows whether the order was carried out; it is given once more."""
        store = self.stores[order.store]
        if store.view != order.view or not self._may_hear(order):
            return []
        if isinstance(order, Host):
            return self._not_hosted(store) if store.phase is CopyPhase.HOSTING else []
        store.reason = reason
        return [order]

    def forgive(self) -> list[PlacementOrder]:
        """Some time has passed: who would not, or could not, keep a backup is asked."""
        for process in self._processes:
            process.unwilling.clear()
        return self._seek_all() if self._is_started else []

    @property
    def is_waiting(self) -> bool:
        """Whether `forgive` is of use."""
        return any(process.unwilling for process in self._processes)

    # ---- private ---------------------------------------------------------------------

    def _may_hear(self, order: Asked) -> bool:
        return self._is_started or isinstance(order, Establish)

    def _is_of_now(self, order: Asked, phase: CopyPhase) -> bool:
        store = self.stores[order.store]
        return self._is_started and (store.view, store.phase) == (order.view, phase)

    def _lives(self, copy: Copy | None) -> bool:
        """Whether the memory is as it was; its process may be away."""
        return copy is not None and self._processes[copy.process].life == copy.life

    def _is_there(self, copy: Copy | None) -> bool:
        return (
            copy is not None
            and self._lives(copy)
            and self._processes[copy.process].is_there
        )

    def _returned(self, store: StorePlace, number: int) -> Iterator[PlacementOrder]:
        """A process is here that may have copies of the store."""
        primary, backup = store.primary, store.backup
        if primary.process == number:
            if not self._lives(primary):
                yield from self._primary_emptied(store)
            elif store.phase is CopyPhase.PROMOTING and not self._is_there(backup):
                yield from self._detach(store, store.reason)
        elif backup is not None and backup.process == number:
            if not self._lives(backup):
                yield from self._backup_emptied(store)
            elif store.phase is CopyPhase.PROMOTING:
                yield from self._promote(store, store.reason)
        else:
            yield Drop(store.number, store.view, number)

    def _primary_emptied(self, store: StorePlace) -> Iterator[PlacementOrder]:
        """Its process begins anew. What it has said in this life is of no store."""
        number = store.primary.process
        if store.phase is CopyPhase.PROMOTING and self._lives(store.backup):
            pass  # the backup is asked already, or when it is back
        elif store.phase in _WITH_BACKUP:
            yield from self._primary_lost(store, "it was started again")
        else:
            store.backup = store.backup if store.phase is CopyPhase.PROMOTING else None
            yield from self._lose(store, "it was started again")
        yield Drop(store.number, store.view, number)

    def _backup_emptied(self, store: StorePlace) -> Iterator[PlacementOrder]:
        reason = "the process of its backup was started again"
        assert store.backup is not None, store
        yield Drop(store.number, store.view, store.backup.process)
        if store.phase is CopyPhase.PROMOTING:
            self._forget_backup(store)
            yield from self._detach_or_lose(store, reason)
        elif store.phase is CopyPhase.HOSTING:
            yield from self._not_hosted(store, unwilling=False)
        elif store.phase in _WITH_BACKUP:
            yield from self._detach(store, reason)

    def _primary_lost(self, store: StorePlace, reason: str) -> list[PlacementOrder]:
        store.reason = reason
        match store.phase:
            case CopyPhase.ATTACHING | CopyPhase.PAIRED if self._is_there(store.backup):
                return self._promote(store, reason)
            case CopyPhase.PROMOTING if not self._is_there(store.backup):
                return self._report_lost(store, reason)
            case CopyPhase.PROMOTING | CopyPhase.EMPTY:
                return []
            case CopyPhase.DETACHING:
                return self._report_lost(store, reason)
            case _:
                self._forget_backup(store)
                return [*self._report_lost(store, reason), *self._detach(store, reason)]

    def _backup_away(self, store: StorePlace, reason: str) -> list[PlacementOrder]:
        match store.phase:
            case CopyPhase.HOSTING:
                return self._not_hosted(store, unwilling=False)
            case CopyPhase.ATTACHING | CopyPhase.PAIRED:
                return self._detach(store, reason)
            case CopyPhase.PROMOTING if self._is_there(store.primary):
                return self._detach(store, reason)
            case CopyPhase.PROMOTING:  # whoever is back first
                return self._report_lost(store, reason)
            case _:
                return []

    # What a store's phase and view become is written here, and nowhere else.

    def _change(
        self, store: StorePlace, phase: CopyPhase, reason: str | None = None
    ) -> None:
        """In a new view: answers to earlier orders are not heard any more."""
        store.view += 1
        self._go_on(store, phase)
        if reason is not None:
            store.reason = reason

    def _go_on(self, store: StorePlace, phase: CopyPhase) -> None:
        """In the same view: an order was answered, or was in vain."""
        store.phase = phase

    def _end_move(self, store: StorePlace) -> None:
        """The store has no target any more. That is so when it is there (`promoted`),
        when that is not wished any more (`cancel_move`, `enter_session`), when the copy
        at the target ends (`_end_move_with_backup`), when the target is not there or
        will not have a copy (`_seek`), and when the store is lost (`move`, `_lose`).
        """
        store.target = None

    def _end_move_with_backup(self, store: StorePlace) -> None:
        """The backup ends, and so does the move that it was for."""
        if self._is_at_target(store):
            self._end_move(store)

    def _is_at_target(self, store: StorePlace) -> bool:
        return store.backup is not None and store.backup.process == store.target

    def _promote(self, store: StorePlace, reason: str) -> list[PlacementOrder]:
        assert store.backup is not None, store
        self._change(store, CopyPhase.PROMOTING, reason)
        return [Promote(store.number, store.view, store.backup)]

    def _detach(self, store: StorePlace, reason: str) -> list[PlacementOrder]:
        self._end_move_with_backup(store)
        self._change(store, CopyPhase.DETACHING, reason)
        return [Detach(store.number, store.view)]

    def _detach_or_lose(self, store: StorePlace, reason: str) -> list[PlacementOrder]:
        """The backup is of no use: the primary, if it has not lost its memory."""
        if not self._lives(store.primary):
            return self._lose(store, reason)
        told = [] if self._is_there(store.primary) else self._report_lost(store, reason)
        return [*told, *self._detach(store, reason)]

    def _promote_or_lose(self, store: StorePlace, reason: str) -> list[PlacementOrder]:
        """The primary is of no use, and has not gone on alone: its backup, if that has
        not lost its memory."""
        if self._is_there(store.backup):
            return self._promote(store, reason)
        if not self._lives(store.backup):
            return self._lose(store, reason)
        self._go_on(store, CopyPhase.PROMOTING)  # it is asked when it is back
        store.primary = Copy(store.primary.process, -1, store.primary.address)
        return self._report_lost(store, reason)

    def _report_lost(self, store: StorePlace, reason: str) -> list[PlacementOrder]:
        if store.is_reported_lost:
            return []
        store.is_reported_lost = True
        return [Lose(store.number, reason)]

    def _lose(self, store: StorePlace, reason: str) -> list[PlacementOrder]:
        """No copy is left that has all."""
        if store.phase is CopyPhase.EMPTY:
            return []
        self._end_move(store)
        self._change(store, CopyPhase.EMPTY)
        store.backup, store.is_reported_lost = None, True
        return [Lose(store.number, reason, gone=True)]

    def _served(self, store: StorePlace) -> list[PlacementOrder]:
        self._go_on(store, CopyPhase.ALONE)
        store.is_reported_lost = False
        served = Serve(store.number, store.view, store.primary)
        return [served, *self._seek(store)]

    def _not_hosted(
        self, store: StorePlace, *, unwilling: bool = True
    ) -> list[PlacementOrder]:
        if unwilling:
            self._refused_by_backup(store)
        self._forget_backup(store)
        self._go_on(store, CopyPhase.ALONE)
        return self._seek(store)

    def _dropped(self, store: StorePlace, copy: Copy | None) -> list[PlacementOrder]:
        if copy is None or not self._processes[copy.process].is_there:
            return []
        return [Drop(store.number, store.view, copy.process)]

    def _forget_backup(self, store: StorePlace) -> None:
        """And the move that it was for."""
        self._end_move_with_backup(store)
        store.backup = None

    def _refused_by_backup(self, store: StorePlace) -> None:
        if store.backup is not None:
            self._processes[store.backup.process].unwilling.add(store.number)

    def _seek_all(self) -> list[PlacementOrder]:
        return [order for store in self.stores for order in self._seek(store)]

    def _seek(self, store: StorePlace) -> list[PlacementOrder]:
        """A backup, in the process that has the fewest copies and not this one's."""
        if store.phase is not CopyPhase.ALONE or not self._is_started:
            return []
        at, count = store.primary.process, len(self._processes)
        fit = [
            number
            for number, process in enumerate(self._processes)
            if process.is_there
            and not process.is_leaving
            and number != at
            and store.number not in process.unwilling
        ]
        if store.target is not None and store.target not in fit:
            self._end_move(store)
        if store.target is not None:
            fit = [store.target]
        elif not self._replicas:
            return []
        if not fit:
            return []
        chosen = min(fit, key=lambda n: (self._copies_of(n), (n - at) % count))
        self._change(store, CopyPhase.HOSTING)
        store.backup = Copy(chosen, self._processes[chosen].life, "")
        return [Host(store.number, store.view, chosen)]

    def _copies_of(self, process: int) -> int:
        copies = [copy for s in self.stores for copy in (s.primary, s.backup) if copy]
        return sum(copy.process == process for copy in copies)
