"""Algorithms in which partners at distances of powers of two exchange data: few steps,
for arrays of middle size.

Law: the place (number) of a hop is ``step * blocks + block``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._schedule import Act, Action, Schedule

if TYPE_CHECKING:
    from collections.abc import Iterator


def halving_doubling_all_reduce(rank: int, size: int) -> Schedule:
    """Returns an all-reduce in which partners at shrinking distance halve the array
    that each reduces, and then double the finished part.

    There are as many blocks as the largest power of two p <= ``size``. If there are
    more than p ranks, the ``size - p`` extra ones take part through a partner: rank 2i
    first sends its whole array to rank 2i + 1, and gets the result in the end.

    Cost: 2 log2(p) steps, 2 more with extras; each rank sends 2 (p - 1) / p of the
    array; with extras, rank 2i sends the whole array, and rank 2i + 1 sends one array
    more. Thakur, Rabenseifner and Gropp, "Optimization of collective communication
    operations in MPICH", 2005.
    """
    p = 1 << (size.bit_length() - 1)
    extras = size - p
    if rank < 2 * extras and not rank % 2:
        blocks = tuple(tuple(_guest(rank, block, p)) for block in range(p))
    else:
        blocks = tuple(tuple(_member(rank, extras, block, p)) for block in range(p))
    return Schedule(blocks, (2 * _log2(p) + 2) * p)


def doubling_all_reduce(rank: int, size: int) -> Schedule:
    """Returns an all-reduce of one whole block: at each step partners at doubling
    distance exchange their partial sums. Half the steps of a tree, for arrays so small
    that the number of steps matters.

    Every member reduces the whole block, lower ranks first, so all get the same bits.
    Hops cannot be compressed, because no single rank finishes the block. Extra ranks
    beyond the largest power of two take part through a partner, as in
    `halving_doubling_all_reduce`.

    Cost: log2(p) steps, 2 more with extras; each rank sends the array log2(p) times.
    Thakur, Rabenseifner and Gropp, as above.
    """
    p = 1 << (size.bit_length() - 1)
    extras, steps = size - p, _log2(p)
    if rank < 2 * extras and not rank % 2:
        give = Action(Act.SEND, rank + 1, 0)
        actions = [give, Action(Act.TAKE, rank + 1, steps + 1)]
        return Schedule((tuple(actions),), steps + 2)
    is_host = rank < 2 * extras
    number = rank // 2 if is_host else rank - extras
    actions = [Action(Act.REDUCE_FIRST, rank - 1, 0)] if is_host else []
    for step in range(steps):
        partner = number ^ (1 << step)
        # Lower numbers first on both sides: sums of floats depend on the order.
        act = Act.REDUCE if number < partner else Act.REDUCE_FIRST
        peer = _rank_of(partner, extras)
        actions += [Action(Act.SEND, peer, step + 1), Action(act, peer, step + 1)]
    actions.append(Action(Act.FINISH))
    if is_host:
        actions.append(Action(Act.SEND, rank - 1, steps + 1))
    return Schedule((tuple(actions),), steps + 2)


def doubling_all_gather(rank: int, size: int) -> Schedule:
    """Returns a gather in few steps. Block b is the array of rank b; blocks may differ
    in size.

    At step k every rank has 2^k blocks, its own and those of the ranks after it, and
    sends them to the rank 2^k before it.

    Cost: ceil(log2(size)) steps; each rank sends size - 1 blocks.
    Bruck et al., "Efficient algorithms for all-to-all communications in multiport
    message-passing systems", 1997.
    """
    steps = (size - 1).bit_length()

    def actions(block: int) -> Iterator[Action]:
        distance = (block - rank) % size
        came = distance.bit_length()  # it is here from this step on
        if distance:
            step = came - 1
            peer = (rank + (1 << step)) % size
            yield Action(Act.TAKE, peer, step * size + block)
        else:
            yield Action(Act.FINISH)
        for step in range(came, steps):
            # Else the peer has the block from an earlier step, or by itself.
            if distance + (1 << step) < size:
                peer = (rank - (1 << step)) % size
                yield Action(Act.SEND, peer, step * size + block)

    blocks = tuple(tuple(actions(block)) for block in range(size))
    return Schedule(blocks, steps * size)


def dissemination_barrier(rank: int, size: int) -> Schedule:
    """Returns a barrier, whose one block is empty: no rank completes it before all have
    begun.

    At step k every rank sends an empty hop to the rank 2^k after it.

    Cost: ceil(log2(size)) steps; as many empty hops from each rank.
    Hensgen, Finkel and Manber, "Two algorithms for barrier synchronization", 1988.
    """
    steps = (size - 1).bit_length()
    actions: list[Action] = []
    for step in range(steps):
        distance = 1 << step
        actions.append(Action(Act.SEND, (rank + distance) % size, step))
        actions.append(Action(Act.TAKE, (rank - distance) % size, step))
    return Schedule((tuple(actions),), steps)


def _guest(rank: int, block: int, p: int) -> Iterator[Action]:
    """Yields the actions of an extra rank: it sends its values to the next rank, and
    gets the result at the last step."""
    yield Action(Act.SEND, rank + 1, block)
    yield Action(Act.TAKE, rank + 1, (2 * _log2(p) + 1) * p + block)


def _member(rank: int, extras: int, block: int, p: int) -> Iterator[Action]:
    """Yields the actions of one of the p members on one block: takes the values of an
    extra rank, halves, finishes, doubles, and sends the result back."""
    is_host = rank < 2 * extras
    number = rank // 2 if is_host else rank - extras
    if is_host:
        yield Action(Act.REDUCE, rank - 1, block)
    step = 1
    for half in (p >> k for k in range(1, _log2(p) + 1)):
        # Blocks outside of this half were given away at an earlier step.
        if number // (2 * half) == block // (2 * half):
            # Keeps the blocks of its own half, and gives away those of its partner's.
            act = Act.REDUCE if number & half == block & half else Act.SEND
            partner = _rank_of(number ^ half, extras)
            yield Action(act, partner, step * p + block)
        step += 1
    if block == number:
        yield Action(Act.FINISH)
    for half in (1 << k for k in range(_log2(p))):
        if number // (2 * half) == block // (2 * half):
            act = Act.SEND if number // half == block // half else Act.TAKE
            partner = _rank_of(number ^ half, extras)
            yield Action(act, partner, step * p + block)
        step += 1
    if is_host:
        yield Action(Act.SEND, rank - 1, step * p + block)


def _rank_of(number: int, extras: int) -> int:
    """Returns the rank of a member: the members that have an extra rank as partner are
    the odd ones of the first ranks."""
    return 2 * number + 1 if number < extras else number + extras


def _log2(p: int) -> int:
    return p.bit_length() - 1
