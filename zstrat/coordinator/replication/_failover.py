"""Who serves a store after a loss: of a process, of one copy, or of the program before.
Decides only, by where stores are (`StorePlaces`): orders come back.

The law of this file: a copy is only promoted, and a primary only goes on alone, if no
other copy can have acknowledged what it lacks. So while one of the two is asked, and
does not answer, the other is not; and a copy that is not known to be whole may refuse.

A loss is that of a *process*, of which nothing is known (`process_lost`), of the
*primary* or the *backup* of one store, or of the *store*: nobody serves it for now
(`StorePlaces.report_store_lost`), or no copy is left that has all (`lose_store`).
A process that is back has what it had, or was *restarted* and has nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, final

from ._orders import Copy, CopyPhase, Drop
from ._store_places import THIRD_BESIDE, WITH_BACKUP

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from ._orders import PlacementOrder
    from ._store_places import StorePlace, StorePlaces
    from ._successors import FoundCopy, Successor

SUCCEEDED: Final = "another program goes on with it"
RESTARTED: Final = "it was started again"


def _place_of(found: FoundCopy, lives: Sequence[int]) -> Copy:
    copy, process = found.copy, found.process
    return Copy(process, lives[process], copy.address, copy.incarnation)


@final
class Failover:
    """Decides what follows a loss, for all stores of a session."""

    def __init__(self, places: StorePlaces) -> None:
        self._places = places

    def take_over_stores(
        self, left: Mapping[int, Successor], lives: Sequence[int]
    ) -> list[PlacementOrder]:
        """Another program has left these copies, when processes had these lives: two
        that are a pair go on together, and each other one alone."""
        places = self._places
        orders: list[PlacementOrder] = []
        for number, successor in left.items():
            store, partner = places.stores[number], successor.partner
            chosen = _place_of(successor.chosen, lives)
            other = None if partner is None else _place_of(partner, lives)
            places.inherit(store, successor.view)
            if not successor.chosen.copy.is_primary:
                # Any but that of the backup, which may have come home.
                lost = (chosen.process + 1) % len(places.processes)
                store.primary = places.copy_at(lost, life=-1)
                store.backup = chosen
                orders += places.promote(store, SUCCEEDED)
            else:
                store.primary, store.backup = chosen, other
                paired = successor.is_pair and places.replicas
                orders += (places.keep if paired else places.detach)(store, SUCCEEDED)
            used = {copy.process for copy in (chosen, other) if copy is not None}
            others = {*successor.useless, store.home} - used
            orders += [Drop(number, store.view, process) for process in sorted(others)]
        return orders

    def process_lost(
        self, store: StorePlace, number: int, reason: str
    ) -> list[PlacementOrder]:
        """The process is away; it may have a copy of the store."""
        if store.third is not None and store.third.process == number:
            orders = self._third_lost(store, reason)
            if store.primary.process != number:
                return orders
        if store.primary.process == number:
            return self.primary_lost(store, reason)
        if store.backup is not None and store.backup.process == number:
            return self._backup_process_lost(store, reason)
        return []

    def process_back(self, store: StorePlace, number: int) -> Iterator[PlacementOrder]:
        """The process is here, and may have copies of the store."""
        places, primary, third = self._places, store.primary, store.third
        if third is not None and third.process == number and not places.lives(third):
            yield from self._third_lost(store, RESTARTED)
        backup = store.backup
        if primary.process == number:
            if not places.lives(primary):
                yield from self._primary_restarted(store)
            elif store.phase is CopyPhase.PROMOTING and not places.is_there(backup):
                yield from places.detach(store, store.reason)
        elif backup is not None and backup.process == number:
            if not places.lives(backup):
                yield from self._backup_restarted(store, number)
            elif store.phase is CopyPhase.PROMOTING:
                yield from places.promote(store, store.reason)
        else:
            yield Drop(store.number, store.view, number)

    def _primary_restarted(self, store: StorePlace) -> Iterator[PlacementOrder]:
        """The primary's process was started again, and has nothing of the store."""
        number, places = store.primary.process, self._places
        is_promoting = store.phase is CopyPhase.PROMOTING
        if is_promoting and places.lives(store.backup):
            pass  # the backup is asked already, or when it is back
        elif store.phase in (*WITH_BACKUP, CopyPhase.SWAPPING):
            yield from self.primary_lost(store, RESTARTED)
        else:
            store.backup = store.backup if is_promoting else None
            yield from places.lose_store(store, RESTARTED)
        yield Drop(store.number, store.view, number)

    def _backup_restarted(
        self, store: StorePlace, number: int
    ) -> Iterator[PlacementOrder]:
        reason = "the process of its backup was started again"
        yield Drop(store.number, store.view, number)
        if store.phase is CopyPhase.PROMOTING and self._has_synced_third(store):
            yield from self._places.promote_third(store, reason)
        elif store.phase is CopyPhase.PROMOTING:
            self._places.forget_backup(store)
            yield from self._primary_goes_on(store, reason)
        elif store.phase is CopyPhase.HOSTING:
            yield from self._places.seek_elsewhere(store, unwilling=False)
        elif store.phase in WITH_BACKUP:
            yield from self._places.detach(store, reason)

    def primary_lost(self, store: StorePlace, reason: str) -> list[PlacementOrder]:
        """The primary of the store does not answer, or not with what it had."""
        places = self._places
        store.reason = reason
        if store.phase in THIRD_BESIDE:
            third, store.third = store.third, None
            dropped = places.drop(store, third)
            return [*self._backup_takes_place(store, reason), *dropped]
        match store.phase:
            case CopyPhase.SWAPPING if places.is_there(store.primary):
                return []  # its process says what has become of it
            case CopyPhase.REPLACING:
                # Only the third one knows whether it counts by now.
                store.backup, store.third = store.third, store.backup
                return self._ask_backup(store, reason)
            case CopyPhase.SWAPPING:
                return self._ask_backup(store, reason)
            case CopyPhase.ATTACHING | CopyPhase.PAIRED:
                return self._backup_takes_place(store, reason)
            case CopyPhase.PROMOTING if not places.is_there(store.backup):
                return places.report_store_lost(store, reason)
            case CopyPhase.PROMOTING | CopyPhase.EMPTY:
                return []
            case CopyPhase.DETACHING:
                return places.report_store_lost(store, reason)
            case _:
                places.forget_backup(store)
                told = places.report_store_lost(store, reason)
                return [*told, *places.detach(store, reason)]

    def _backup_takes_place(
        self, store: StorePlace, reason: str
    ) -> list[PlacementOrder]:
        places = self._places
        if places.is_there(store.backup):
            return places.promote(store, reason)
        places.forget_backup(store)
        told = places.report_store_lost(store, reason)
        return [*told, *places.detach(store, reason)]

    def _ask_backup(self, store: StorePlace, reason: str) -> list[PlacementOrder]:
        """Only the backup knows whether it may be the primary, or now is away."""
        is_there = self._places.is_there(store.backup)
        asked = self._places.promote(store, reason)
        told = [] if is_there else self._places.report_store_lost(store, reason)
        return [*told, *asked]

    def _has_synced_third(self, store: StorePlace) -> bool:
        """Whether a third copy is there that has all that the backup has."""
        return store.is_third_in_sync and self._places.is_there(store.third)

    def _third_lost(self, store: StorePlace, reason: str) -> list[PlacementOrder]:
        """The process of the third copy is away, or has lost it."""
        places = self._places
        match store.phase:
            case CopyPhase.ADDING | CopyPhase.FILLING:
                return places.end_third(store, reason)
            case CopyPhase.REPLACING:
                return places.detach(store, reason)
            case CopyPhase.PROMOTING if store.is_third_in_sync:
                store.third = None
                return places.promote(store, store.reason)
        store.third = None
        return []

    def backup_lost(self, store: StorePlace, reason: str) -> list[PlacementOrder]:
        """The primary of the store cannot reach its backup."""
        self._places.avoid_backup_process(store)
        return self._places.detach(store, reason)

    def _backup_process_lost(
        self, store: StorePlace, reason: str
    ) -> list[PlacementOrder]:
        places = self._places
        match store.phase:
            case CopyPhase.HOSTING:
                return places.seek_elsewhere(store, unwilling=False)
            case phase if phase in WITH_BACKUP:
                return places.detach(store, reason)
            case CopyPhase.PROMOTING if self._has_synced_third(store):
                return places.promote_third(store, reason)
            case CopyPhase.PROMOTING if places.is_there(store.primary):
                return places.detach(store, reason)
            case CopyPhase.PROMOTING:  # whoever is back first
                return places.report_store_lost(store, reason)
            case _:
                return []

    def refused(
        self, store: StorePlace, reason: str, *, never_counted: bool
    ) -> list[PlacementOrder]:
        """The process or copy that was asked has refused: nothing of the order was
        carried out, nor will be.

        Args:
            never_counted: It is a third copy, of which its primary has never said that
                it counts.
        """
        places = self._places
        store.reason = reason
        match store.phase:
            case CopyPhase.CREATING:
                return places.lose_store(store, reason)
            case CopyPhase.HOSTING:
                return places.seek_elsewhere(store)
            case CopyPhase.ATTACHING:
                return self.backup_lost(store, reason)
            case CopyPhase.ADDING | CopyPhase.FILLING:
                places.avoid_process(store, store.third)
                return places.end_third(store, reason)
            case CopyPhase.REPLACING:
                return self.backup_lost(store, reason)
            case CopyPhase.SWAPPING:
                places.end_move(store)
                is_there = places.is_there(store.backup)
                return (places.keep if is_there else places.detach)(store, reason)
            case CopyPhase.PROMOTING if store.third is not None and (
                store.is_third_in_sync or never_counted
            ):
                return places.promote_third(store, reason)
            case CopyPhase.PROMOTING:
                backup = store.backup
                places.forget_backup(store)
                orders = self._primary_goes_on(store, reason)
                return [*orders, *places.drop(store, backup)]
            case CopyPhase.DETACHING:
                return self._backup_goes_on(store, reason)
            case _:
                return []

    def _primary_goes_on(self, store: StorePlace, reason: str) -> list[PlacementOrder]:
        """The backup is of no use: the primary, if it has not lost its memory."""
        places = self._places
        if not places.lives(store.primary):
            return places.lose_store(store, reason)
        is_there = places.is_there(store.primary)
        told = [] if is_there else places.report_store_lost(store, reason)
        return [*told, *places.detach(store, reason)]

    def _backup_goes_on(self, store: StorePlace, reason: str) -> list[PlacementOrder]:
        """The primary is of no use, and has not gone on alone: its backup, if that has
        not lost its memory."""
        places = self._places
        if places.is_there(store.backup):
            return places.promote(store, reason)
        if not places.lives(store.backup):
            return places.lose_store(store, reason)
        places.await_backup(store)
        return places.report_store_lost(store, reason)
