"""Which store goes to which process, when one comes or goes. Decides only.

Stores count alike: variables are distributed to them evenly (`placement=`), so a
process that serves as many as another one has about as much to do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence


class StoreMove(NamedTuple):
    """The store is to be served by the process ``target``."""

    store: int
    target: int


def plan_rebalance(
    serving: Sequence[int], processes: Collection[int]
) -> list[StoreMove]:
    """As few moves as can be, after which none of the processes serves two stores more
    than another one.

    Args:
        serving: The process of each store.
        processes: Those that may serve any. What others serve stays there.
    """
    at = list(serving)
    moves: list[StoreMove] = []
    while processes:
        counts = {process: at.count(process) for process in sorted(processes)}
        most = max(counts, key=counts.__getitem__)
        fewest = min(counts, key=counts.__getitem__)
        if counts[most] - counts[fewest] < 2:
            break
        store = max(store for store, process in enumerate(at) if process == most)
        at[store] = fewest
        moves.append(StoreMove(store, fewest))
    return moves


def plan_drain(
    serving: Sequence[int],
    backups: Mapping[int, int],
    process: int,
    others: Collection[int],
) -> list[StoreMove]:
    """A move for each store of a process that leaves: to where a copy of it is already,
    or else to who serves the fewest.

    Args:
        serving: The process of each store.
        backups: Those that have all of a store besides, by store.
        others: Processes that may serve any, one at least.
    """
    at = list(serving)
    moves: list[StoreMove] = []
    for store in [store for store, where in enumerate(serving) if where == process]:
        target = backups.get(store, -1)
        if target not in others:
            target = min(sorted(others), key=at.count)
        at[store] = target
        moves.append(StoreMove(store, target))
    return moves
