"""Applies gradients outside of steps: in this process, or on parameter servers.

One compiled program updates all variables of this process, under their locks. Parameter
servers receive the gradient of each of their variables, and operands that the optimizer
computes from several gradients.

A step on variables of this process is a function of arrays (`TreeStep`). If the program
of the optimizer allows it (`zstrat.optimizers.TreeCut`), the step updates leaf by leaf:
each component of each variable separately, with operands that are computed from several
gradients. Otherwise it updates the whole tree at once. The constructor determines which
components are updated, and refuses invalid calls, before anything is computed. Law of
the step: it writes to nothing, and reads only its arguments.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from zstrat.variables._local import StorageWithSlots, copy_storage
from zstrat.variables._rows import rows_of_component, summed
from zstrat.variables._storage import read_all, update_all, update_all_async
from zstrat.wire import UpdateOp

from ._gradient_call import (
    Binds,
    BindsAsync,
    require_by_leaf,
    require_servers,
    require_whole,
)
from ._slots import SlotRule

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from zstrat.optimizers import LeafRule, TreeCut, TreeRule
    from zstrat.variables._storage import Storage, StorageUpdate, VariableHandle

    from ._gradient_call import GradientCall


def apply_now(
    call: GradientCall, storage: Storage | None = None, *, counts: bool = False
) -> None:
    """Applies the gradients of a call to its variables.

    Args:
        storage: The storage of all variables; None: each variable's own storage.
        counts: Whether to increment TF's ``iterations``.
    """
    # Planned before anything is applied, because this may be refused.
    counted = _counted(call) if counts else []
    if storage is None and lives_here(call):
        _move_here(call)
        update_all(counted)
        return
    # Also checks: nothing is sent if a server would refuse it.
    updates = server_updates(call)
    for owner in _storages(call, storage):
        assert isinstance(owner, Binds), owner
        owner.bind(call)
    if storage is None:
        update_all([*updates, *counted])
    else:
        storage.update_many([*updates, *counted])


async def apply_now_async(call: GradientCall) -> None:
    """Applies gradients like `apply_now`, without blocking the running loop; increments
    TF's ``iterations``.

    Cancellation: some of the gradients may have been applied.
    """
    if lives_here(call):
        _move_here(call)
        update_all(_counted(call))
        return
    updates = server_updates(call)
    for each in _storages(call, None):
        assert isinstance(each, BindsAsync), each
        await each.bind_async(call)
    await update_all_async([*updates, *_counted(call)])


def lives_here(call: GradientCall) -> bool:
    """Returns whether this process stores and updates all variables of the call.

    Raises:
        ValueError: Some variables are in this process, and some on parameter servers.
        NotImplementedError: One of the variables is a single replica's copy.
    """
    here = []
    for variable in call.variables:
        if (copy := copy_storage(variable)) is not None:
            raise copy.not_optimized(variable)
        here.append(isinstance(variable.storage, StorageWithSlots))
    if any(here) and not all(here):
        first, second = (call.variables[here.index(x)] for x in (True, False))
        raise ValueError(
            f"{first.spec} is stored in this process and {second.spec} elsewhere: one "
            "apply_gradients cannot update both. Call it for each, with an optimizer "
            "of its own"
        )
    return all(here)


def server_updates(call: GradientCall) -> list[StorageUpdate]:
    """Makes the updates of a call for parameter servers.

    Raises:
        ValueError: Parameter servers cannot apply this call.
    """
    rule = call.rule(is_here=False)
    require_servers(call, rule)
    optimizer = call.optimizer
    updates: list[StorageUpdate] = []
    for _, target, sparse, arrays in call.leaves():
        own = tuple([np.asarray(x) for x in arrays])
        if sparse:
            op = UpdateOp.OPTIMIZE_ROWS
            updates += target._row_updates(op, (own[0], own[1]), optimizer)
        else:
            updates += target._updates(UpdateOp.OPTIMIZE, own[0], optimizer)
    if not rule.cut().operands:
        return updates
    shared = tuple([np.asarray(x) for x in _operands(call, rule)])
    # A server looks for them before the first gradient of the same request.
    # Once to each server, with its first variable; reversed, so that the first wins.
    firsts = {update[0].spec.ps: update[0] for update in reversed(updates)}
    return [
        *[(v, UpdateOp.OPERANDS, shared, optimizer) for v in firsts.values()],
        *updates,
    ]


def _operands(call: GradientCall, rule: TreeRule) -> list[Any]:
    """Computes, by a compiled program, the operands that depend on several
    gradients."""
    cache = call.optimizer.made.setdefault("operands", {})
    key = (id(rule), call.given, call.sparse)
    if key not in cache:
        # Without arrays, which the compiled program would keep alive.
        empty = call.with_arrays([None] * len(call.arrays))
        cache[key] = jax.jit(lambda *x: operands_of(empty.with_arrays(x), rule))
    with rule.precision():
        operands: list[Any] = cache[key](*_padded(call))
    return operands


def _move_here(call: GradientCall) -> None:
    step, run = _step_of(call)
    storages = [component.variable.storage for component in step.components]
    own: list[Any] = [
        storage for storage in storages if isinstance(storage, StorageWithSlots)
    ]
    # Variables of one strategy share a lock.
    turns = {id(storage.turn): storage.turn for storage in own}
    with ExitStack() as stack:
        # Always in one order, so that two threads that update the same variables cannot
        # deadlock.
        for _, turn in sorted(turns.items()):
            stack.enter_context(turn)
        pairs = list(zip(own, step.components, strict=True))
        values = [
            storage.value_before(component.variable.name)
            for storage, component in pairs
        ]
        slots = [
            [
                np.asarray(x)
                for x in storage.slots_before(component.rule, component.variable.name)
            ]
            for storage, component in pairs
        ]
        moved, kept = run(values, slots, _padded(call))
        for (storage, component), value, leaves in zip(pairs, moved, kept, strict=True):
            storage.put_moved(component.variable, value, component.rule, leaves)


def _step_of(call: GradientCall) -> tuple[TreeStep, Any]:
    """Returns the `TreeStep` of a call and its compiled program, which are cached."""
    optimizer, tree = call.optimizer, call.rule(is_here=True)
    keys = tuple([c.spec.key for v in call.targets for c in v.components])
    cache = optimizer.made.setdefault("steps", {})
    key = (id(tree), keys, call.given, call.sparse)
    if key not in cache:
        empty = call.with_arrays(_padded(call))
        step = TreeStep(empty)
        empty = empty.with_arrays([None] * len(call.arrays))

        def run(values: Any, slots: Any, arrays: Sequence[Any]) -> Any:
            return step(values, slots, empty.with_arrays(arrays))

        cache[key] = step, jax.jit(run)
    step_and_program: tuple[TreeStep, Any] = cache[key]
    return step_and_program


def _padded(call: GradientCall) -> list[Any]:
    """Returns the arrays of a call, with gradients of rows padded to a power of two, so
    that few programs are compiled. Padding has the index -1."""
    padded: list[Any] = []
    for sparse, arrays in zip(call.sparse, call.operands, strict=True):
        if not sparse:
            padded += arrays
            continue
        indices, rows = arrays
        count = len(indices)
        more = (1 << max(0, count - 1).bit_length()) - count
        if indices.dtype.kind == "u":
            indices = indices.astype(np.int64)  # which has -1
        padded.append(np.concatenate([indices, np.full(more, -1, indices.dtype)]))
        nothing = np.zeros((more, *rows.shape[1:]), rows.dtype)
        padded.append(np.concatenate([rows, nothing]))
    return [*padded, *call.further]


def _storages(call: GradientCall, storage: Storage | None) -> list[Storage]:
    if storage is not None:
        return [storage]
    storages = {id(variable.storage): variable.storage for variable in call.variables}
    return list(storages.values())


def _counted(call: GradientCall) -> list[StorageUpdate]:
    """Makes the update of TF's ``iterations``, if the optimizer counts them; otherwise
    returns an empty list."""
    iterations = call.optimizer.iterations
    return [] if iterations is None else iterations._planned(UpdateOp.ADD, 1)


@dataclass(frozen=True, eq=False)
class Component:
    """A component that a step updates. ``place`` is the index of its gradient in the
    call, ``number`` its index among the components of its variable."""

    variable: VariableHandle
    place: int
    number: int
    rule: SlotRule


class TreeStep:
    """One update as a function ``(values, slots, call) -> (values, slots)``, whose
    lists are in the order of ``components``.

    A value may be the copies of several replicas, ``[count, ...]``, which get the same
    update and share one set of slots. Slots are lists, in the order of
    `SlotRule.names`.

    Raises:
        ValueError: The call lacks gradients on which others depend, or has gradients of
            rows of a variable whose rows the optimizer does not treat separately.
    """

    def __init__(self, call: GradientCall) -> None:
        self._tree = call.rule(is_here=True)
        self._cut = self._tree.cut()
        self._is_whole = self._cut.coupling is not None
        if self._is_whole:
            require_whole(call, self._cut)
        else:
            require_by_leaf(call, self._tree)
        self.components = [
            Component(variable, place, number, slot_rule(call, leaf, number))
            for place, leaf in enumerate(call.given)
            for number, variable in enumerate(call.targets[leaf].components)
        ]

    def __call__(
        self, values: Sequence[Any], slots: Sequence[list[Any]], call: GradientCall
    ) -> tuple[list[Any], list[list[Any]]]:
        if self._is_whole:
            return self._moved_whole(values, slots, call)
        operands = operands_of(call, self._tree)
        moved, kept = [], []
        for component, value, own_slots in zip(
            self.components, values, slots, strict=True
        ):
            wanted = [operands[n] for n in component.rule.leaf.uses]
            one = partial(_moved, component, call=call, operands=wanted)
            new, after = _of_copies(one, component.variable, value, own_slots)
            moved.append(new)
            kept.append(after)
        return moved, kept

    def _moved_whole(
        self, values: Sequence[Any], slots: Sequence[list[Any]], call: GradientCall
    ) -> tuple[list[Any], list[list[Any]]]:
        apart = [
            value.ndim > len(component.variable.shape)
            # With an axis of replicas before its own.
            for component, value in zip(self.components, values, strict=True)
        ]

        def one(values: Sequence[Any]) -> tuple[list[Any], list[list[Any]]]:
            return self._whole(values, slots, call)

        if not any(apart):
            return one(values)
        axes = [0 if is_apart else None for is_apart in apart]
        moved, kept = jax.vmap(one, in_axes=(axes,))(list(values))
        # Slots are shared: all copies get the same gradient, and so have the same
        # state.
        pairs = zip(moved, apart, strict=True)
        values = [x if is_apart else x[0] for x, is_apart in pairs]
        return values, [[slot[0] for slot in leaves] for leaves in kept]

    def _whole(
        self, values: Sequence[Any], slots: Sequence[list[Any]], call: GradientCall
    ) -> tuple[list[Any], list[list[Any]]]:
        leaves = self._joined(values)
        state: list[Any] = [None] * len(self._tree.state())
        for component, own_slots in zip(self.components, slots, strict=True):
            for slot, array in zip(component.rule.leaf.slots, own_slots, strict=True):
                state[slot.state] = array
        gradients = [arrays[0] for arrays in call.operands]
        with self._tree.precision():
            moved, after = self._tree.whole(gradients, leaves, state, call.further)
        kept = [
            [after[slot.state] for slot in component.rule.leaf.slots]
            for component in self.components
        ]
        parts = [
            _part_of(moved[component.place], component, call)
            for component in self.components
        ]
        return parts, kept

    def _joined(self, values: Sequence[Any]) -> list[Any]:
        """Joins the values of components to the values of whole leaves."""
        parts_by_place: dict[int, list[Any]] = {}
        for component, value in zip(self.components, values, strict=True):
            parts_by_place.setdefault(component.place, []).append(value)
        return [
            parts[0] if len(parts) == 1 else jnp.concatenate(parts)
            for _, parts in sorted(parts_by_place.items())
        ]


def operands_of(call: GradientCall, tree: Any) -> list[Any]:
    """Computes the operands of the programs of single leaves: values that depend on
    gradients of several leaves or on further arguments."""
    whole: TreeCut = tree.cut()
    if not whole.operands:
        return []
    sizes: list[int | None] = [None] * len(call.targets)
    kinds = tree.gradients_at(None)
    # Zeros for those that are not given: `require_by_leaf` has refused gaps that
    # matter.
    gradients: list[Any] = [jnp.zeros(kind.shape, kind.dtype) for kind in kinds]
    for leaf, target, sparse, arrays in call.leaves():
        if sparse:
            sizes[leaf] = arrays[0].shape[0]
            _, gradients[leaf] = summed(arrays[0], arrays[1], target.shape[0])
        else:
            gradients[leaf] = arrays[0]
    # A gradient of rows has another shape than that of the whole variable.
    cut = tree.cut(tuple(sizes)) if any(call.sparse) else whole
    return list(cut.computed(gradients, call.further))


def slot_rule(call: GradientCall, leaf: int, number: int) -> SlotRule:
    """Returns the rule of the slots that the optimizer keeps for component ``number``
    of a leaf, which is a variable of this process."""
    target = call.targets[leaf]
    parts = target.components
    size = parts[number].shape[0] if len(parts) > 1 else None
    leaf_rule: LeafRule = call.optimizer.leaf_rule(call.rule(is_here=True), leaf)

    def values() -> list[Any]:
        read = [read_all(target.components) for target in call.targets]
        return [v[0] if len(v) == 1 else jnp.concatenate(v) for v in read]

    return SlotRule(call.optimizer, leaf_rule, size, values)


def _of_copies(
    one: Callable[..., Any], variable: VariableHandle, value: Any, slots: list[Any]
) -> tuple[Any, list[Any]]:
    """Applies the update ``one`` to a variable, or to all copies of it. The copies
    share one set of slots, as they get the same gradient."""
    if value.ndim == len(variable.shape):
        new, after = one(value, slots)
        return new, after
    moved, several = jax.vmap(one, in_axes=(0, None))(value, slots)
    return moved, [leaf[0] for leaf in several]


def _moved(
    component: Component,
    value: Any,
    slots: list[Any],
    *,
    call: GradientCall,
    operands: Sequence[Any],
) -> tuple[Any, list[Any]]:
    rule, arrays = component.rule.leaf, call.operands[component.place]
    if not call.sparse[component.place]:
        gradient = _part_of(arrays[0], component, call)
        new, after = rule.step(value, slots, gradient, operands)
        return new, list(after)
    table = call.targets[call.given[component.place]].table
    own_rows = rows_of_component(table, component.number, arrays[0])
    at, gradient = summed(own_rows, arrays[1], value.shape[0])
    if not value.shape[0]:  # gathering from no rows fails
        at, gradient = at[:0], gradient[:0]
    rows = [slot.rows for slot in rule.slots]
    here = [_at(at, x) if has else x for x, has in zip(slots, rows, strict=True)]
    new, kept = rule.step(_at(at, value), here, gradient, operands)
    after = [
        # Indices of padding (`_padded`) are outside, and dropped.
        old.at[at].set(leaf, mode="drop") if has else leaf
        for old, leaf, has in zip(slots, kept, rows, strict=True)
    ]
    return value.at[at].set(new, mode="drop"), after


def _part_of(array: Any, component: Component, call: GradientCall) -> Any:
    """Returns the rows of one component from the array of a whole variable."""
    table_of = call.targets[call.given[component.place]]
    if len(table_of.components) == 1:
        return array
    offsets = table_of.table.offsets.tolist()
    return array[offsets[component.number] : offsets[component.number + 1]]


def _at(indices: Any, array: Any) -> Any:
    return array.at[indices].get(mode="clip")
