"""Algorithms in which every rank sends directly to every other rank: one step, and as
many hops as ranks.

Law: no two ranks send to the same peer first, so that no rank is flooded while others
idle.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._schedule import Act, Action, Schedule

if TYPE_CHECKING:
    from collections.abc import Iterator


def direct_all_reduce(rank: int, size: int) -> Schedule:
    """Returns an all-reduce of ``size`` blocks: rank b collects and finishes block b,
    and sends it to all ranks.

    Cost: 2 steps and 2 (size - 1) hops from each rank, 2 (size - 1) / size of the array
    in all. Contributions are reduced in the order of ranks after b.
    """

    def actions(block: int) -> tuple[Action, ...]:
        if block != rank:
            send = Action(Act.SEND, block, (block - rank) % size)
            return send, Action(Act.TAKE, block, size + (rank - block) % size)
        # Its own block: collected from all, and then given to all.
        reduces = _reduces(rank, size)
        return *reduces, Action(Act.FINISH), *_sends(rank, size, size)

    return Schedule(tuple(map(actions, range(size))), 2 * size)


def direct_reduce_scatter(rank: int, size: int) -> Schedule:
    """Returns a reduce-scatter of ``size`` blocks: rank b collects and keeps block b.

    Cost: 1 step and size - 1 hops from each rank, all blocks but its own.
    """

    def actions(block: int) -> tuple[Action, ...]:
        if block != rank:
            return (Action(Act.SEND, block, (block - rank) % size),)
        return *_reduces(rank, size), Action(Act.FINISH)

    return Schedule(tuple(map(actions, range(size))), size)


def direct_all_gather(rank: int, size: int) -> Schedule:
    """Returns a gather in which rank b sends its block b to each other rank directly;
    blocks may differ in size.

    Cost: 1 step and size - 1 hops from each rank, its block each time.
    """

    def actions(block: int) -> tuple[Action, ...]:
        if block != rank:
            return (Action(Act.TAKE, block, (rank - block) % size),)
        return Action(Act.FINISH), *_sends(rank, size, 0)

    return Schedule(tuple(map(actions, range(size))), size)


def pairwise_all_to_all(rank: int, size: int) -> Schedule:
    """Returns an all-to-all: block ``i * size + j`` goes from rank i to rank j. Blocks
    may differ in size.

    The result of rank j is the blocks ``i * size + j``, in the order of i.

    Cost: 1 step and size - 1 hops from each rank, all its blocks but the one that it
    keeps.
    """
    blocks: list[tuple[Action, ...]] = [()] * (size * size)
    blocks[rank * size + rank] = (Action(Act.FINISH),)
    for step in range(1, size):
        to, source = (rank + step) % size, (rank - step) % size
        blocks[rank * size + to] = (Action(Act.FINISH), Action(Act.SEND, to, step))
        blocks[source * size + rank] = (Action(Act.TAKE, source, step),)
    return Schedule(tuple(blocks), size)


def _reduces(rank: int, size: int) -> Iterator[Action]:
    """Yields the actions that reduce the blocks of all other ranks, starting with the
    rank before this one."""
    for step in range(1, size):
        yield Action(Act.REDUCE, (rank - step) % size, step)


def _sends(rank: int, size: int, places: int) -> Iterator[Action]:
    """Yields the actions that send to all other ranks, starting with the rank after
    this one."""
    for step in range(1, size):
        yield Action(Act.SEND, (rank + step) % size, places + step)
