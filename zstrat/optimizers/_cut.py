"""Divides the program of an optimizer into an update for each leaf, by its dataflow.

Theory of operation. The program of a tree takes gradients, values, leaves of the state
and further arguments, and returns new values and a new state. A leaf of the state
belongs to the leaf of the tree whose path it has in a copy of the tree's structure
(``.mu['dense']['w']``), or to the only leaf that it depends on; a leaf of the state
without an owner (a count, a learning rate, a flag) is *shared*. The program is *by
leaf* if each leaf of the tree can be updated with

- its own gradient, value and state,
- the shared state, of which each leaf has a copy that its update advances, and
- *operands*: values that depend on gradients and further arguments alone, as a global
  norm does. Operands are computed once, where the gradients are.

Where an operand is inside of a branch, all branches are computed and one is selected,
so that the operand can be computed outside of the branch. A value that depends on
values or on the state of several leaves (clipping after Adam, accumulation around
clipping) couples them: only a process with the whole tree can compute it.

Law of the file: nothing is guessed from numbers, and two traces of one program are
divided in the same way.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from jax.extend.core import Literal
from jax.tree_util import keystr

from zstrat.jaxprs import mask_of, mask_of_all, operands_of

from ._jaxprs import ProgramPart
from ._owners import leaves_in

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from ._jaxprs import TreeProgram
    from ._owners import StateOwner
    from ._state import StateLeaf
    from ._transformation import TreeTransformation

_SMALL: Final = 64
"""The most elements of an operand or of an array of shared state (counts, scales,
flags, a key). Larger ones, copied to every leaf, would be a copy of the tree for each
of its leaves."""


@dataclass(frozen=True)
class Coupling:
    """Why an optimizer cannot be run leaf by leaf: the update of ``leaf`` depends on
    leaf ``other``, or on state that belongs to no leaf (None)."""

    leaf: int
    other: int | None
    state: str = ""
    """The path of the leaf of the state through which the leaves are coupled; "" if
    none."""
    transformation: str = ""
    """The name of the optax function that couples the leaves; "" if it cannot be
    found."""


@dataclass(frozen=True)
class LeafSlots:
    """The numbers of the state leaves that are stored with one leaf of the tree: its
    own slots, and its copies of shared state."""

    own: tuple[int, ...]
    shared: tuple[int, ...]

    @property
    def all(self) -> tuple[int, ...]:
        """The numbers of all slots of the leaf, in the order of the state."""
        return tuple(sorted((*self.own, *self.shared)))


class TreeCut:
    """The program of a tree, divided (*cut*) into an update for each leaf. If that
    cannot be done, ``coupling`` is the reason; then ``slots`` still says with which
    leaf of the tree each leaf of the state is stored: shared state with the first leaf
    alone.

    Args:
        state: The leaves of a state of the tree.
        owners: The leaf of the tree that each of these belongs to, see `owners_in`.
        update: Returns the program; with ``selects=True`` a program that computes all
            branches and selects one of the results.
        brought_together: Returns the name of the optax function that couples leaves, or
            "".
    """

    def __init__(
        self,
        tree: TreeTransformation,
        state: Sequence[StateLeaf],
        owners: Sequence[StateOwner | None],
        update: Callable[..., TreeProgram],
        brought_together: Callable[[], str],
    ) -> None:
        program = update()
        self.coupling, found = _by_leaf(tree, state, owners, program)
        # What is computed inside of a branch cannot be an operand. Where all branches
        # are computed and one is selected, it can, and leaves may come apart after all.
        has_branches = any(
            eqn.primitive.name == "cond" for eqn in program.closed.jaxpr.eqns
        )
        if self.coupling is not None and has_branches:
            selected = update(selects=True)
            coupling, again = _by_leaf(tree, state, owners, selected)
            if coupling is None:
                self.coupling, found, program = None, again, selected
        if self.coupling is not None:
            who = brought_together()
            self.coupling = replace(self.coupling, transformation=who)
        self.program = program
        self.slots, self._frontiers = found
        self.operands = _ordered(program, self._frontiers)
        """The variables of the program that are operands, in program order."""
        self.uses = [
            tuple([n for n, var in enumerate(self.operands) if var in frontier])
            for frontier in self._frontiers
        ]
        """For each leaf, the numbers of the operands that its update takes."""

    @property
    def operand_kinds(self) -> list[Any]:
        """The shapes and dtypes of the operands."""
        return [var.aval for var in self.operands]

    def gradients_for(self, moved: Iterable[int]) -> set[int]:
        """Returns the leaves whose gradients are needed to compute the operands of the
        leaves ``moved``."""
        used = {number for leaf in moved for number in self.uses[leaf]}
        operands = [self.operands[number] for number in used]
        union = mask_of_all(self.program.mask, operands)
        leaves = self.program.counts[0]
        return {n for n in range(leaves) if union >> n & 1}

    @functools.cached_property
    def operand_part(self) -> ProgramPart:
        """The program that computes the operands from gradients and further
        arguments."""
        gradients, _, _, extras = self.program.inputs
        program, available = self.program, [*gradients, *extras]
        return ProgramPart(program.closed, self.operands, available, program.makers)

    def computed(self, gradients: Sequence[Any], extras: Sequence[Any]) -> list[Any]:
        """Computes the values of all operands, in the order of ``operands``: of values
        that the updates of leaves need, and that depend on gradients and ``extras``
        alone, such as a global norm."""
        if not self.operands:
            return []
        g, _, _, x = self.program.inputs
        known = dict(zip([*g, *x], [*gradients, *extras], strict=True))
        return self.operand_part.run(known)


_Found = tuple[list[LeafSlots], list[frozenset[Any]]]
"""For each leaf, the numbers of the state leaves that are stored with it, and its
operands."""


def _by_leaf(
    tree: TreeTransformation,
    state: Sequence[StateLeaf],
    owners: Sequence[StateOwner | None],
    program: TreeProgram,
) -> tuple[Coupling | None, _Found]:
    leaves = program.counts[0]
    numbers: list[list[int]] = [[] for _ in range(leaves)]
    for number, owner in enumerate(owners):
        if owner is not None:
            numbers[owner.leaf].append(number)
    own = [tuple(each) for each in numbers]
    shared = [n for n, owner in enumerate(owners) if owner is None]
    search = _Search(tree, state, owners, program)
    if program.acts:
        # What acts (a callback) has to happen once; cut, it would for each leaf.
        return Coupling(0, None), _together(own, shared)
    common = search.shared_state()
    if isinstance(common, Coupling):
        return common, _together(own, shared)
    slots, frontiers = [], []
    for leaf in range(leaves):
        cut = search.leaf(leaf, own[leaf])
        if isinstance(cut, Coupling):
            return cut, _together(own, shared)
        frontier, used = cut
        # What advances the state that is read has to be advanced, too.
        kept = search.closure(used)
        for number in kept:
            frontier |= common[number][0]
        slots.append(LeafSlots(own[leaf], tuple(sorted(kept))))
        frontiers.append(frozenset(frontier))
    return None, _adopted(state, slots, shared, frontiers, common)


def _adopted(
    state: Sequence[StateLeaf],
    slots: list[LeafSlots],
    shared: Sequence[int],
    frontiers: list[frozenset[Any]],
    common: dict[int, tuple[set[Any], set[int]]],
) -> _Found:
    """Assigns leaves to shared state that the update of no leaf uses, because the user
    may read that state: a copy to all leaves, which all of them advance; if it is
    large, only to the first one."""
    used = {n for each in slots for n in each.shared}
    for number in [n for n in shared if n not in used]:
        frontier, needs = common[number]
        is_small = math.prod(state[number].kind.shape) <= _SMALL
        for leaf in range(len(slots) if is_small else 1):
            kept = tuple(sorted({*slots[leaf].shared, *needs}))
            slots[leaf] = LeafSlots(slots[leaf].own, kept)
            frontiers[leaf] |= frontier
    return slots, frontiers


def _together(own: Sequence[tuple[int, ...]], shared: Sequence[int]) -> _Found:
    slots = [
        LeafSlots(indices, tuple(shared) if leaf == 0 else ())
        for leaf, indices in enumerate(own)
    ]
    return slots, [frozenset()] * len(own)


class _Search:
    """Finds for each leaf of one program the operands and the shared state that its
    update needs, or else the coupling of leaves."""

    def __init__(
        self,
        tree: TreeTransformation,
        state: Sequence[StateLeaf],
        owners: Sequence[StateOwner | None],
        program: TreeProgram,
    ) -> None:
        self._tree, self._about, self._owners = tree, state, owners
        self._program = program
        self._leaves, _, self._states, self._extras = program.counts
        self._shared = [n for n, owner in enumerate(owners) if owner is None]
        # Bits are in the order of the inputs: gradients, values, state, further
        # arguments.
        self._shared_mask = sum(1 << (2 * self._leaves + n) for n in self._shared)
        gradients = (1 << self._leaves) - 1
        extras = ((1 << self._extras) - 1) << (2 * self._leaves + self._states)
        self._known_mask = gradients | extras
        self._reach: dict[int, set[int]] = {}
        self._further = set(program.inputs[3])
        self._makers = program.makers
        self._operands: dict[Any, list[Any]] = {}

    def shared_state(self) -> dict[int, tuple[set[Any], set[int]]] | Coupling:
        """Returns, for each shared leaf of the state, the operands needed to advance
        it, and the shared leaves that it depends on, directly or through others."""
        result: dict[int, tuple[set[Any], set[int]]] = {}
        direct: dict[int, set[int]] = {}
        for number in self._shared:
            var = self._program.outputs[self._leaves + number]
            got = self._cut([var], self._shared_mask, _SMALL, number)
            if isinstance(got, Coupling):
                return got
            result[number] = (got[0], set())
            direct[number] = got[1]
        # In two passes: the operands of a leaf of the state are those of all that it
        # reaches.
        for number in self._shared:
            result[number] = (result[number][0], _closed({number}, direct))
        self._reach = {number: reach for number, (_, reach) in result.items()}
        for number, (_, reach) in list(result.items()):
            frontier = set[Any]().union(*[result[n][0] for n in reach])
            result[number] = (frontier, reach)
        return result

    def closure(self, used: Iterable[int]) -> set[int]:
        """Returns the leaves of the shared state in ``used``, and all shared leaves
        that they depend on."""
        return set[int]().union(*[self._reach[n] for n in used])

    def leaf(
        self, leaf: int, own: Sequence[int]
    ) -> tuple[set[Any], set[int]] | Coupling:
        """Returns the operands that the update of a leaf takes, and the shared state
        that it reads."""
        program, leaves = self._program, self._leaves
        wanted = [program.outputs[leaf], *[program.outputs[leaves + n] for n in own]]
        allowed = 1 << leaf | 1 << (leaves + leaf) | self._shared_mask
        for number in own:
            allowed |= 1 << (2 * leaves + number)
        kind = self._tree.kinds[leaf]
        # An operand may be as large as the leaf: its clipped gradient, for example.
        size = max(_SMALL, math.prod(kind.shape))
        return self._cut(wanted, allowed, size, None, leaf)

    def _cut(
        self,
        wanted: Sequence[Any],
        allowed: int,
        size: int,
        state: int | None,
        leaf: int = -1,
    ) -> tuple[set[Any], set[int]] | Coupling:
        """Returns operands and shared leaves of the state from which ``wanted`` can be
        computed with the inputs in ``allowed``; if there are none, the coupling of
        leaves.

        ``size``: the most elements of an operand that is not a scalar.
        """
        mask = self._program.mask
        union = mask_of_all(mask, wanted)
        # The usual case (Adam, SGD), decided without a look at any equation.
        if not union & ~allowed and not self._tree.early:
            return set(), self._shared_in(union)
        ways = self._ways(wanted, allowed, size)
        frontier: set[Any] = set()
        used = 0
        stack, seen = list(wanted), set[Any]()
        while stack:
            var = stack.pop()
            if isinstance(var, Literal) or var in seen:
                continue
            seen.add(var)
            way = ways.get(var, _FAILS)
            if way is _LOCAL:
                used |= mask_of(mask, var)
            elif way is _OPERAND:
                frontier.add(var)
            elif way is _FAILS:
                return self._coupling(var, allowed, state, leaf)
            else:
                stack += self._before(var)
        return frontier, self._shared_in(used)

    def _ways(self, wanted: Sequence[Any], allowed: int, size: int) -> dict[Any, Any]:
        """Decides, for each variable that ``wanted`` depend on, how an update gets it:
        computed from allowed inputs, as an operand, computed from other variables, or
        not at all."""
        ways: dict[Any, Any] = {}
        stack = [var for var in wanted if not isinstance(var, Literal)]
        while stack:
            var = stack[-1]
            way = ways.get(var) or self._at_once(var, allowed)
            if way is None:
                # One that fails decides, so others are not visited: trees are large.
                before = self._before(var)
                fails = any(ways.get(each) is _FAILS for each in before)
                left = [each for each in before if each not in ways]
                # Depth first, by an explicit stack: programs of large trees are deeper
                # than Python lets calls be.
                if left and not fails:
                    stack += left
                    continue
                way = self._way(var, size) if fails else self._makers[var]
            ways[var] = way
            stack.pop()
        return ways

    def _at_once(self, var: Any, allowed: int) -> Any:
        """Decides how an update gets a variable, if the decision depends on no earlier
        variable; otherwise returns None."""
        bits = mask_of(self._program.mask, var)
        # Scalars that depend on gradients are computed where the gradients are; arrays
        # are made here, of these.
        if self._tree.early and var in self._makers and self._has_a_gradient(bits):
            is_operand = not var.aval.shape and not bits & ~self._known_mask
            return _OPERAND if is_operand else None
        if not bits & ~allowed:
            return _LOCAL
        # An input of another leaf. Further arguments are given to all.
        if var not in self._makers:
            return _OPERAND if var in self._further else _FAILS
        # A scalar is sent as it is; of an array it may be parts that are known here.
        return None if bits & ~self._known_mask or var.aval.shape else _OPERAND

    def _has_a_gradient(self, bits: int) -> bool:
        """Returns whether the inputs in ``bits`` include a gradient that is not a
        scalar."""
        gradients = bits & ((1 << self._leaves) - 1)
        reached = leaves_in(gradients, self._leaves)
        return any(self._tree.kinds[leaf].shape for leaf in reached)

    def _way(self, var: Any, size: int) -> Any:
        """Decides how an update gets a variable that it cannot compute: as an operand,
        or not at all."""
        bits = mask_of(self._program.mask, var)
        fits = not bits & ~self._known_mask and math.prod(var.aval.shape) <= size
        return _OPERAND if fits else _FAILS

    def _before(self, var: Any) -> list[Any]:
        if var not in self._operands:
            _, eqn = self._makers[var]
            number = next(n for n, made in enumerate(eqn.outvars) if made is var)
            self._operands[var] = operands_of(eqn, number)
        return self._operands[var]

    def _shared_in(self, mask: int) -> set[int]:
        bits = mask >> (2 * self._leaves)
        return {n for n in self._shared if bits >> n & 1}

    def _coupling(
        self, var: Any, allowed: int, state: int | None, leaf: int
    ) -> Coupling:
        """Describes what couples two leaves, naming both: the leaf whose update was
        sought, and another one that it depends on."""
        foreign = mask_of(self._program.mask, var) & ~allowed
        others = sorted(leaves_in(foreign, self._leaves))
        owned = [
            owner.leaf
            for number, owner in enumerate(self._owners)
            if owner is not None and foreign >> (2 * self._leaves + number) & 1
        ]
        others = list(dict.fromkeys([*others, *owned]))
        if state is not None:
            path = keystr(self._about[state].path)
            first = others[0] if others else 0
            second = others[1] if len(others) > 1 else None
            return Coupling(first, second, path)
        other = next((n for n in others if n != leaf), None)
        return Coupling(leaf, other)


_LOCAL: Final = object()
_OPERAND: Final = object()
_FAILS: Final = object()


def _closed(first: set[int], direct: dict[int, set[int]]) -> set[int]:
    result, left = set[int](), set(first)
    while left:
        number = left.pop()
        result.add(number)
        left |= direct[number] - result
    return result


def _ordered(program: TreeProgram, frontiers: Sequence[frozenset[Any]]) -> list[Any]:
    """Returns the operands of all leaves in the order of the program, which is the same
    for two traces."""
    wanted = frozenset[Any]().union(*frontiers)
    if not wanted:
        return []
    jaxpr = program.closed.jaxpr
    order = [*jaxpr.invars, *[var for eqn in jaxpr.eqns for var in eqn.outvars]]
    return [var for var in order if var in wanted]
