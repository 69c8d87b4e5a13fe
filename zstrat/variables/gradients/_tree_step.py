"""One step of an optimizer on variables of this process, as a function of arrays.

Leaf by leaf, if that is what the program of the optimizer is
(`zstrat.optimizers.TreeCut`): each component of each variable by itself, with values
that are computed of several gradients. Otherwise the whole tree at once. What moves,
and what is refused, is decided when the step is made, before anything is computed.

Law of the file: nothing is written to, and nothing is read but arguments.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from zstrat.variables._home import read_all
from zstrat.variables._rows import rows_of_component, summed

from . import _optimizer_words as words
from ._slots import SlotRule

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from zstrat.optimizers import LeafRule, TreeCut
    from zstrat.variables._home import VariableHandle

    from ._gradient_call import GradientCall


@dataclass(frozen=True, eq=False)
class Component:
    """A component of a variable that is moved. ``place`` is that of its gradient in the
    call, ``number`` its own among the components."""

    variable: VariableHandle
    place: int
    number: int
    rule: SlotRule


class TreeStep:
    """``(values, slots, call) -> (values, slots)``, in the order of ``components``.

    Values may be copies of several replicas, ``[count, ...]``, which all move alike;
    there are slots for one. Slots are lists, in the order of `SlotRule.names`.

    Raises:
        ValueError: The call leaves out variables on which others depend, or has rows of
            a variable whose rows the optimizer does not treat one by one.
    """

    def __init__(self, call: GradientCall) -> None:
        self._tree = call.rule(is_here=True)
        self._cut = self._tree.cut()
        self._is_whole = self._cut.coupling is not None
        if self._is_whole:
            words.require_whole(call, self._cut)
        else:
            words.require_by_leaf(call, self._tree)
        self.components = list(_components(call))

    def __call__(
        self, values: Sequence[Any], slots: Sequence[list[Any]], call: GradientCall
    ) -> tuple[list[Any], list[list[Any]]]:
        if self._is_whole:
            return self._moved_whole(values, slots, call)
        operands = operands_of(call, self._tree)
        moved, kept = [], []
        for each, value, mine in zip(self.components, values, slots, strict=True):
            wanted = [operands[n] for n in each.rule.leaf.uses]
            one = partial(_moved, each, call=call, operands=wanted)
            new, after = _of_copies(one, each.variable, value, mine)
            moved.append(new)
            kept.append(after)
        return moved, kept

    def _moved_whole(
        self, values: Sequence[Any], slots: Sequence[list[Any]], call: GradientCall
    ) -> tuple[list[Any], list[list[Any]]]:
        apart = [
            value.ndim > len(each.variable.shape)
            for each, value in zip(self.components, values, strict=True)
        ]

        def one(values: Sequence[Any]) -> tuple[list[Any], list[list[Any]]]:
            return self._whole(values, slots, call)

        if not any(apart):
            return one(values)
        axes = [0 if is_apart else None for is_apart in apart]
        moved, kept = jax.vmap(one, in_axes=(axes,))(list(values))
        first: Callable[[Any], Any] = lambda leaf: leaf[0]  # noqa: E731
        pairs = zip(moved, apart, strict=True)
        return [x if is_apart else x[0] for x, is_apart in pairs], jax.tree.map(
            first, kept
        )

    def _whole(
        self, values: Sequence[Any], slots: Sequence[list[Any]], call: GradientCall
    ) -> tuple[list[Any], list[list[Any]]]:
        leaves = self._joined(values)
        state: list[Any] = [None] * len(self._tree.state())
        for each, mine in zip(self.components, slots, strict=True):
            for slot, array in zip(each.rule.leaf.slots, mine, strict=True):
                state[slot.state] = array
        gradients = [arrays[0] for arrays in call.operands]
        with self._tree.precision():
            moved, after = self._tree.whole(gradients, leaves, state, call.further)
        kept = [
            [after[slot.state] for slot in each.rule.leaf.slots]
            for each in self.components
        ]
        return self._parted(moved, call), kept

    def _joined(self, values: Sequence[Any]) -> list[Any]:
        """The values of the leaves, of those of the components."""
        found: dict[int, list[Any]] = {}
        for each, value in zip(self.components, values, strict=True):
            found.setdefault(each.place, []).append(value)
        return [
            parts[0] if len(parts) == 1 else jnp.concatenate(parts)
            for _, parts in sorted(found.items())
        ]

    def _parted(self, leaves: Sequence[Any], call: GradientCall) -> list[Any]:
        return [_part_of(leaves[each.place], each, call) for each in self.components]


def operands_of(call: GradientCall, tree: Any) -> list[Any]:
    """What the optimizer computes of several gradients and of further arguments."""
    whole: TreeCut = tree.cut()
    if not whole.operands:
        return []
    sizes: list[int | None] = [None] * len(call.targets)
    kinds = tree.gradients_at(None)
    gradients: list[Any] = [jnp.zeros(kind.shape, kind.dtype) for kind in kinds]
    for leaf, target, sparse, arrays in call.leaves():
        if sparse:
            sizes[leaf] = arrays[0].shape[0]
            _, gradients[leaf] = summed(arrays[0], arrays[1], target.shape[0])
        else:
            gradients[leaf] = arrays[0]
    cut = tree.cut(tuple(sizes)) if any(call.sparse) else whole
    return list(cut.computed(gradients, call.further))


def _components(call: GradientCall) -> Any:
    for place, leaf in enumerate(call.given):
        target = call.targets[leaf]
        for number, variable in enumerate(target.components):
            yield Component(variable, place, number, slot_rule(call, leaf, number))


def slot_rule(call: GradientCall, leaf: int, number: int) -> SlotRule:
    """What the optimizer keeps beside a component of a variable of this process."""
    target = call.targets[leaf]
    parts = target.components
    size = parts[number].shape[0] if len(parts) > 1 else None
    found: LeafRule = call.optimizer.leaf_rule(call.rule(is_here=True), leaf)
    return SlotRule(call.optimizer, found, size, partial(_values, call))


def _values(call: GradientCall) -> list[Any]:
    values = [read_all(target.components) for target in call.targets]
    return [v[0] if len(v) == 1 else jnp.concatenate(v) for v in values]


def _of_copies(
    one: Callable[..., Any], variable: VariableHandle, value: Any, slots: list[Any]
) -> tuple[Any, list[Any]]:
    """The optimizer keeps one state for all copies, as they get one gradient."""
    if value.ndim == len(variable.shape):
        new, after = one(value, slots)
        return new, after
    moved, several = jax.vmap(one, in_axes=(0, None))(value, slots)
    return moved, [leaf[0] for leaf in several]


def _moved(
    each: Component,
    value: Any,
    slots: list[Any],
    *,
    call: GradientCall,
    operands: Sequence[Any],
) -> tuple[Any, list[Any]]:
    rule, arrays = each.rule.leaf, call.operands[each.place]
    if not call.sparse[each.place]:
        gradient = _part_of(arrays[0], each, call)
        new, after = rule.step(value, slots, gradient, operands)
        return new, list(after)
    table = call.targets[call.given[each.place]].table
    mine = rows_of_component(table, each.number, arrays[0])
    at, gradient = summed(mine, arrays[1], value.shape[0])
    if not value.shape[0]:  # nothing can be gathered of no rows
        at, gradient = at[:0], gradient[:0]
    rows = [slot.rows for slot in rule.slots]
    here = [_at(at, x) if has else x for x, has in zip(slots, rows, strict=True)]
    new, kept = rule.step(_at(at, value), here, gradient, operands)
    after = [
        old.at[at].set(leaf, mode="drop") if has else leaf
        for old, leaf, has in zip(slots, kept, rows, strict=True)
    ]
    return value.at[at].set(new, mode="drop"), after


def _part_of(array: Any, each: Component, call: GradientCall) -> Any:
    """The rows of a whole variable's array that are those of a component."""
    table_of = call.targets[call.given[each.place]]
    if len(table_of.components) == 1:
        return array
    offsets = table_of.table.offsets.tolist()
    return array[offsets[each.number] : offsets[each.number + 1]]


def _at(indices: Any, array: Any) -> Any:
    return array.at[indices].get(mode="clip")
