"""Stores that move on purpose: a process is to serve one that another one serves.
Decides only, by where stores are (`StorePlaces`): orders come back.

A store moves as it fails over: it gets a backup in the process that is its *target*,
which is promoted when it is whole. Without replicas a store has a backup only to move.

    has no backup ────────────seek──▶ one at the target ──whole──▶ promoted: it is there
    has one at the target ──────────────────────────────whole──▶ promoted
    has one elsewhere ──detach──▶ has none
    is created, promoted or detached: its target is kept until it is served again

The law of this file: a store that moves can be lost as one that does not, and no more.
What ends the copy at the target before that is promoted ends the move, and the store
stays where it is (`StorePlaces.end_move` names all that does); once the copy is asked
to be the primary, the move is not taken back.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, final

from ._orders import CopyPhase
from ._store_places import WITH_BACKUP

if TYPE_CHECKING:
    from ._orders import PlacementOrder
    from ._store_places import StorePlace, StorePlaces

MOVES: Final = "it moves"


@final
class MovingStores:
    """Those of a session."""

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
            case CopyPhase.PAIRED if at_target:
                return places.promote(store, MOVES)
            case CopyPhase.HOSTING if not at_target:
                return places.seek_elsewhere(store, unwilling=False)
            case CopyPhase.ATTACHING | CopyPhase.PAIRED if not at_target:
                return places.detach(store, MOVES)
            case CopyPhase.EMPTY:
                places.end_move(store)
        return []

    def cancel_move(self, store: StorePlace, reason: str) -> list[PlacementOrder]:
        """The store is to stay where it is; a switch that is under way ends."""
        if store.target is None or store.phase is CopyPhase.PROMOTING:
            return []
        is_for_move = store.is_backup_at_target
        self._places.end_move(store)
        if self._places.replicas or not is_for_move:
            return []  # the backup is one that the store is to have anyway
        return self._end_backup(store, reason)

    def evict(self, store: StorePlace) -> list[PlacementOrder]:
        """The backup of the store is to be in another process."""
        return self._end_backup(store, MOVES)

    def _end_backup(self, store: StorePlace, reason: str) -> list[PlacementOrder]:
        if store.phase is CopyPhase.HOSTING:
            return self._places.seek_elsewhere(store, unwilling=False)
        if store.phase in WITH_BACKUP:
            return self._places.detach(store, reason)
        return []

    def backup_whole(self, store: StorePlace) -> list[PlacementOrder]:
        """The backup has all: it is promoted where the store moves."""
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
