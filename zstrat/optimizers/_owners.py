"""Finds the leaf of the tree to which each array of the state belongs.

An array of the state belongs to one leaf of the tree, or has no owner. Law of owners:
the path of the array in the state, and its use in the program, decide about the owner;
never its shape.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax

from zstrat.jaxprs import bits_of, mask_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from ._jaxprs import TreeProgram
    from ._state import StateOfTree
    from ._structure import TreeStructure


@dataclass(frozen=True)
class StateOwner:
    """The leaf of the tree that a leaf of the state belongs to. ``start`` is the index
    at which the path of that leaf begins in the path of the leaf of the state; None if
    that path does not contain it."""

    leaf: int
    start: int | None


def owners_in(
    structure: TreeStructure, state: StateOfTree, update: Callable[[], TreeProgram]
) -> list[StateOwner | None]:
    """Returns the owner of each leaf of the state; ``update`` returns the program of
    the tree.

    Where the state has a subtree of the tree's structure (moments do), each leaf of the
    subtree belongs to the leaf of the tree with its path. Any other leaf of the state
    belongs to the one leaf of the tree that it depends on or that is updated from it;
    gradients of other leaves do not count, as they may come as an operand. A count that
    has the path of a leaf, but depends on no gradient and is used to update several
    leaves, has no owner.
    """
    leaves, count = len(structure), len(state.leaves)
    places = places_in(structure, state)
    # With a single leaf all state is its own, and nothing needs to be traced.
    if leaves == 1:
        return [places.get(n, StateOwner(0, None)) for n in range(count)]
    program = update()
    touched = _touched(program)
    owners: list[StateOwner | None] = []
    for number in range(count):
        owner, (made, valued, used) = places.get(number), touched[number]
        if owner is not None and not made and used - {owner.leaf}:
            owner = None  # where it is named after the leaf, all the same
        both = made | used
        if len(both) > 1 and len(valued | used) == 1:
            both = valued | used  # gradients of others come as operands: a global norm
        if owner is None and number not in places and len(both) == 1:
            owner = StateOwner(next(iter(both)), None)
        owners.append(owner)
    idle = [n for n, (made, _, used) in enumerate(touched) if not made | used]
    _inherit(program, owners, [n for n in idle if owners[n] is None])
    return owners


def _inherit(
    program: TreeProgram, owners: list[StateOwner | None], idle: list[int]
) -> None:
    """Gives owners to leaves of the state that are advanced from the state of one leaf
    alone: an accumulator's count of updates is advanced from its count of gradients."""
    leaves, _, states, _ = program.counts
    for _, number in itertools.product(idle, idle):  # one may be advanced by another
        advances = mask_of(program.mask, program.outputs[leaves + number])
        given = [owners[n] for n in range(states) if advances >> (2 * leaves + n) & 1]
        found = {owner.leaf for owner in given if owner is not None}
        if owners[number] is None and len(found) == 1:
            owners[number] = StateOwner(found.pop(), None)


def places_in(structure: TreeStructure, state: StateOfTree) -> dict[int, StateOwner]:
    """Finds the leaves of the state that are in copies of the structure of the tree,
    and the leaf of the tree that each belongs to."""
    numbered = state.treedef.unflatten(list(range(len(state.leaves))))
    result: dict[int, StateOwner] = {}
    _match(structure.treedef, numbered, 0, result)
    return result


def _match(treedef: Any, node: Any, depth: int, found: dict[int, StateOwner]) -> bool:
    """Finds the innermost subtrees with a given structure in a tree of numbered leaves,
    and adds their leaves to ``found``. Returns whether there are any."""
    if isinstance(node, int):
        return False
    children = jax.tree.leaves(node, is_leaf=lambda other: other is not node)
    inside = [_match(treedef, child, depth + 1, found) for child in children]
    # The innermost alone: a state may contain states that each have a copy of the tree.
    if any(inside):
        return True
    try:
        parts = treedef.flatten_up_to(node)
    except ValueError:
        return False
    for leaf, part in enumerate(parts):
        # There may be several arrays at the place of a leaf.
        for number in jax.tree.leaves(part):
            found[number] = StateOwner(leaf, depth)
    return True


def _touched(program: TreeProgram) -> list[tuple[set[int], set[int], set[int]]]:
    """Returns, for each leaf of the state, three sets of leaves of the tree: those
    whose gradient or value it depends on, those whose value it depends on, and those
    whose new value depends on it."""
    leaves, _, states, _ = program.counts
    made: list[set[int]] = [set() for _ in range(states)]
    valued: list[set[int]] = [set() for _ in range(states)]
    used: list[set[int]] = [set() for _ in range(states)]
    for number, var in enumerate(program.outputs):
        mask = mask_of(program.mask, var)
        if number >= leaves:
            made[number - leaves] |= leaves_in(mask, leaves)
            # Gradients are the first bits, values those after them.
            valued[number - leaves] |= {*bits_of(mask >> leaves & (1 << leaves) - 1)}
            continue
        for state in bits_of(mask >> (2 * leaves)):
            if state < states:
                used[state].add(number)
    return list(zip(made, valued, used, strict=True))


def leaves_in(mask: int, leaves: int) -> set[int]:
    """Returns the leaves of the tree whose gradient or value is in the set of inputs
    ``mask``."""
    return set(bits_of((mask | mask >> leaves) & ((1 << leaves) - 1)))
