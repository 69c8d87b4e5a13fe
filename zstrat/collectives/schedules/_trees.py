"""Algorithms on trees: partial sums go up to the root, finished values come down.

Law: children are reduced in a fixed order, so that the same values always give the same
bytes, in whichever order they arrive.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ._schedule import Act, Action, Schedule

if TYPE_CHECKING:
    from collections.abc import Iterator


def tree_all_reduce(rank: int, size: int) -> Schedule:
    """Returns an all-reduce of one block, up a binomial tree to rank 0 and down again:
    best for small arrays.

    Cost: 2 ceil(log2(size)) steps and 2 (size - 1) hops in all; a rank sends the array
    once up, and once down to each of its up to ceil(log2(size)) children.
    """
    depth = (size - 1).bit_length()
    up, down = _reduces(rank, size), _copies(rank, rank, size, depth)
    return Schedule(((*up, *down),), 2 * depth)


def tree_broadcast(rank: int, size: int, root: int) -> Schedule:
    """Returns a broadcast of one block, down a binomial tree from ``root``.

    Cost: ceil(log2(size)) steps; the root sends the array ceil(log2(size)) times.
    """
    number = (rank - root) % size
    start = () if number else (Action(Act.FINISH),)
    actions = (*start, *_copies(number, rank, size, 0))
    return Schedule((actions,), (size - 1).bit_length())


def double_tree_all_reduce(rank: int, size: int) -> Schedule:
    """Returns an all-reduce of two blocks, each up and down a binary tree of its own.

    Ranks that are inner nodes of one tree are leaves of the other, so that all
    connections are used in both directions while chunks follow each other: few steps
    and full bandwidth.

    Cost: at most 4 ceil(log2(size)) steps; each rank sends at most twice the array.
    Sanders, Speck and Träff, "Two-tree algorithms for full bandwidth broadcast,
    reduction and scan", 2009; the trees as NCCL builds them.
    """
    first = tuple(_up_and_down(rank, size, 0, 0))
    if size % 2:  # the other tree is the same one, shifted by one rank
        second = tuple(_up_and_down((rank - 1) % size, size, 1, 3))
    else:  # or mirrored
        second = tuple(_up_and_down(size - 1 - rank, size, -1, 3))
    return Schedule((first, second), 6)


def _reduces(rank: int, size: int) -> Iterator[Action]:
    """Yields the actions that reduce a block up the binomial tree, to rank 0."""
    for step in range((size - 1).bit_length()):
        if rank & (1 << step):
            yield Action(Act.SEND, rank - (1 << step), step)
            return
        if rank + (1 << step) < size:
            yield Action(Act.REDUCE, rank + (1 << step), step)
    yield Action(Act.FINISH)


def _copies(number: int, rank: int, size: int, places: int) -> Iterator[Action]:
    """Yields the actions that copy a block down the binomial tree, to the largest
    subtree first; ``number`` is the rank counted from the root."""
    low = (number & -number).bit_length() - 1 if number else (size - 1).bit_length()
    # The lowest bit says from whom it comes, those below it to whom it goes.
    if number:
        yield Action(Act.TAKE, (rank - (1 << low)) % size, places + low)
    for step in reversed(range(low)):
        if number + (1 << step) < size:
            yield Action(Act.SEND, (rank + (1 << step)) % size, places + step)


def _up_and_down(number: int, size: int, shift: int, places: int) -> Iterator[Action]:
    """Yields the actions that reduce a block up a binary tree and copy it down again.
    ``number`` is the index of this rank in the tree. Index i of the tree is rank ``i +
    shift``; if that is -1, it is rank ``size - 1 - i``."""

    def rank_of(number: int) -> int:
        return size - 1 - number if shift < 0 else (number + shift) % size

    parent, below = parent_of(number, size), children_of(number, size)
    for child in below:
        # Two children, so two places: those of the lower and of the higher one.
        yield Action(Act.REDUCE, rank_of(child), places + (child > number))
    if parent is None:
        yield Action(Act.FINISH)
    else:
        yield Action(Act.SEND, rank_of(parent), places + (number > parent))
        yield Action(Act.TAKE, rank_of(parent), places + 2)
    for child in below:
        yield Action(Act.SEND, rank_of(child), places + 2)


def parent_of(number: int, size: int) -> int | None:
    """Returns the parent of a node in a binary tree over 0..size-1 in their order, in
    which all odd numbers are leaves; 0 is the root and has one child."""
    if not number:
        return None
    low = number & -number
    parent = (number ^ low) | (low << 1)
    return parent if parent < size else number ^ low


def children_of(number: int, size: int) -> tuple[int, ...]:
    """Returns the children of a node in the tree of `parent_of`, in ascending order."""
    if not number:
        return (1 << ((size - 1).bit_length() - 1),) if size > 1 else ()
    half = (number & -number) >> 1
    if not half:
        return ()
    after = half
    # The end may cut off the right subtree: a smaller one takes its place.
    while after and number + after >= size:
        after >>= 1
    return (number - half, number + after) if after else (number - half,)
