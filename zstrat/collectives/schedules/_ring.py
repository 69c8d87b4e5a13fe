"""Algorithms on rings and chains, in which every rank sends to its right neighbour
alone, except the root of `scatter_broadcast`.

The bytes on the wire per rank do not grow with the number of ranks, and chunks follow
each other around the ring, so that all connections and all ranks work at once: best for
large arrays. The number of steps grows with the number of ranks, which makes small
arrays slow.

Law: the place (number) of a hop is its step; a rank receives once per step.
"""

from __future__ import annotations

from ._schedule import Act, Action, Schedule


def ring_all_reduce(rank: int, size: int) -> Schedule:
    """Returns an all-reduce of ``size`` blocks around a ring. Block b starts at rank b,
    and is finished by rank b - 1.

    Cost: 2 (size - 1) steps; each rank sends 2 (size - 1) / size of the array.
    Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms", 2009.
    """
    right, left = (rank + 1) % size, (rank - 1) % size

    # Each block goes around twice: size - 1 hops reduce it, size - 1 more copy it.
    def actions(block: int) -> tuple[Action, ...]:
        step = (rank - block) % size  # it is sent on at this step, for the first time
        last = step == size - 1
        sequence = [Action(Act.REDUCE, left, step - 1)] if step else []
        if last:
            sequence.append(Action(Act.FINISH))
            # The rank that finishes a block takes no copy of it: distance 0 below.
            step = -1
        if not last or size > 1:
            sequence.append(Action(Act.SEND, right, step if not last else size - 1))
        return (*sequence, *_copies(left, right, step + 1, size, size - 1))

    blocks = tuple(map(actions, range(size)))
    return Schedule(blocks, 2 * (size - 1))


def ring_all_gather(rank: int, size: int) -> Schedule:
    """Returns a gather around a ring. Block b is the array of rank b; blocks may differ
    in size.

    Cost: size - 1 steps; each rank sends all blocks but that of its right neighbour.
    """
    right, left = (rank + 1) % size, (rank - 1) % size

    def actions(block: int) -> tuple[Action, ...]:
        if block != rank:
            return _copies(left, right, (rank - block) % size, size, 0)
        own = (Action(Act.FINISH), Action(Act.SEND, right, 0))
        return own if size > 1 else own[:1]

    return Schedule(tuple(map(actions, range(size))), size - 1)


def ring_reduce_scatter(rank: int, size: int) -> Schedule:
    """Returns a reduce-scatter of ``size`` blocks around a ring. Rank b gets block b.

    Cost: size - 1 steps; each rank sends all blocks but its own.
    """
    right, left = (rank + 1) % size, (rank - 1) % size

    def actions(block: int) -> tuple[Action, ...]:
        step = (rank - block - 1) % size  # block b starts at rank b + 1
        sequence = [Action(Act.REDUCE, left, step - 1)] if step else []
        last = step == size - 1
        sequence.append(Action(Act.FINISH) if last else Action(Act.SEND, right, step))
        return tuple(sequence)

    return Schedule(tuple(map(actions, range(size))), size - 1)


def scatter_broadcast(rank: int, size: int, root: int) -> Schedule:
    """Returns a broadcast in which the root sends every other rank one part, and these
    ranks pass the parts around a ring.

    It has ``size - 1`` blocks (one block in a group of one). The root sends the array
    only once, whatever the size of the group.

    Cost: size - 1 steps; the root sends the array once, the others send all blocks but
    one. After van de Geijn, "On global combine operations", 1994, without the tree.
    """
    others = size - 1
    if not others:
        return Schedule(((Action(Act.FINISH),),), 0)
    if rank == root:
        blocks = tuple(
            (Action(Act.FINISH), Action(Act.SEND, (root + 1 + block) % size, 0))
            for block in range(others)
        )
        return Schedule(blocks, others)
    number = (rank - root - 1) % size  # among those that are not the root
    left = (root + 1 + (number - 1) % others) % size
    right = (root + 1 + (number + 1) % others) % size

    def actions(block: int) -> tuple[Action, ...]:
        step = (number - block) % others
        take = Action(Act.TAKE, left if step else root, step)
        last = step == others - 1
        return (take,) if last else (take, Action(Act.SEND, right, step + 1))

    return Schedule(tuple(map(actions, range(others))), others)


def chain_broadcast(rank: int, size: int, root: int) -> Schedule:
    """Returns a broadcast of one block, from each rank to the next one, chunk by chunk.

    Cost: size - 1 steps; each rank but the last sends the array once.
    """
    number = (rank - root) % size
    first = Action(Act.FINISH)
    if number:
        first = Action(Act.TAKE, (rank - 1) % size, number - 1)
    # The last one of the chain sends nothing.
    if number == size - 1:
        return Schedule(((first,),), size - 1)
    send = Action(Act.SEND, (rank + 1) % size, number)
    return Schedule(((first, send),), size - 1)


def _copies(
    left: int, right: int, distance: int, size: int, places: int
) -> tuple[Action, ...]:
    """Returns the actions by which a rank passes a finished block on: takes it from
    rank ``left``, and sends it to rank ``right``. ``distance``: number of ranks from
    the one that has finished the block to this one; ``places``: number of places (hops)
    before these."""
    if not distance:
        return ()
    take = Action(Act.TAKE, left, places + distance - 1)
    if distance == size - 1:
        return (take,)
    return take, Action(Act.SEND, right, places + distance)
