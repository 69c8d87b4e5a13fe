"""Reads and assigns the state of an optimizer, which is stored as slots of its
variables.

Law of the file: every variable has its own copy of shared state (a count), so reads use
the first copy, and assignments write all copies.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import jaxpr_as_fun
from jax.tree_util import DictKey, GetAttrKey, keystr

from zstrat.variables._convert import same_kind
from zstrat.variables._recorder import is_staging, recorder
from zstrat.variables._storage import KeepsSlots, read_all

from ._gradient_call import Binds
from ._gradients_given import extras_of
from ._tree_updates import lives_here

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from zstrat.optimizers import TreeRule
    from zstrat.variables._storage import VariableHandle
    from zstrat.variables._table import Table

    from ._gradient_call import CalledOptimizer, GradientCall, GradientTarget


def state_of(optimizer: CalledOptimizer) -> Any:
    """Returns the present state of an optimizer; see `Optimizer.state`."""
    call = _known(optimizer)
    tree = call.rule(is_here=lives_here(call), is_traced=False)
    _require_no_hashed_rows(call, tree)
    leaves = _leaves(call, tree, range(len(tree.state())))
    with tree.precision():
        return tree.state_of().with_lists(
            [jnp.asarray(leaf) for leaf in leaves.values()]
        )


def leaves_of(optimizer: CalledOptimizer) -> dict[int, Any]:
    """Reads the leaves of the state, by their numbers. Leaves that have an entry for
    each row of a hash table are left out."""
    call = _known(optimizer)
    tree = call.rule(is_here=lives_here(call), is_traced=False)
    hashed = _of_hashed_rows(call, tree)
    return _leaves(call, tree, [n for n in range(len(tree.state())) if n not in hashed])


def assign_leaves(
    optimizer: CalledOptimizer, leaves: Iterable[np.ndarray], **extra: Any
) -> None:
    """Assigns all leaves of the state, which have the right shapes and dtypes. Leaves
    that have an entry for each row of a hash table are skipped.

    Args:
        extra: Further arguments that later updates will have; needed to trace the
            update, as there may have been no update yet.
    """
    call = replace(_known(optimizer), extras=extras_of(extra)[0])
    hashed = _of_hashed_rows(call, call.rule(is_here=lives_here(call)))
    _assign(call, {n: leaf for n, leaf in enumerate(leaves) if n not in hashed})


def _leaves(
    call: GradientCall, tree: TreeRule, numbers: Iterable[int]
) -> dict[int, Any]:
    slots = _slots_of(call)
    leaves: dict[int, Any] = {n: _leaf_of(call, tree, slots, n) for n in numbers}
    # Not updated yet: there are no slots, but the state is what it would start as.
    if missing := [number for number, leaf in leaves.items() if leaf is None]:
        leaves.update(_initial(call, missing))
    return leaves


def assign_state(optimizer: CalledOptimizer, state: Any) -> None:
    """Assigns the state of an optimizer; see `Optimizer.state`."""
    call = _known(optimizer)
    tree = call.rule(is_here=lives_here(call))
    _require_no_hashed_rows(call, tree)
    what = f"the state of optimizer {optimizer.name!r}"
    try:
        with tree.precision():
            arrays = [np.asarray(leaf) for leaf in tree.state_of().flattened(state)]
    except ValueError as error:
        raise ValueError(f"{what}: {error}") from error
    kinds = [x.kind for x in tree.state()]
    dtypes = tree.settled() or [kind.dtype for kind in kinds]
    # All leaves are checked before the first one is written.
    for number, (array, kind) in enumerate(zip(arrays, kinds, strict=True)):
        leaf, name = tree.place(number)
        where = f"{what}, {name}" + (
            f" of {call.words(leaf)}" if leaf is not None else ""
        )
        if array.shape != kind.shape:
            raise ValueError(f"{where}: expected shape {kind.shape}, got {array.shape}")
        if not same_kind(array.dtype, dtypes[number]):
            raise TypeError(f"{where}: expected {dtypes[number]}, got {array.dtype}")
        arrays[number] = array.astype(dtypes[number])
    _assign(call, dict(enumerate(arrays)))


def _leaf_of(
    call: GradientCall,
    tree: TreeRule,
    slots: Mapping[int, Mapping[str, np.ndarray]],
    state: int,
) -> np.ndarray | None:
    """Joins one leaf of the state (number ``state``) from the slots of the variables;
    None if they have no slots yet."""
    leaf, name = tree.place(state)
    targets = call.targets if leaf is None else [call.targets[leaf]]
    places = [(target, name) for target in targets]
    if leaf is not None and tree.structure.words(leaf):
        # State of several leaves is a slot of the first variable, under its whole path.
        whole = keystr(tree.state()[state].path)
        places += [(target, whole) for target in call.targets]
    for target, slot in places:
        parts = [slots[component.spec.key] for component in target.components]
        arrays = [part[slot] for part in parts if slot in part]
        if len(arrays) == len(parts) and arrays:
            # Shared state (a count) is whole beside each component; rows are cut as the
            # variable is.
            is_whole = arrays[0].shape == tree.state()[state].kind.shape
            return arrays[0] if is_whole else np.concatenate(arrays)
    return None


class Hyperparameters:
    """The hyperparameters of ``optax.inject_hyperparams``, as a mapping by name."""

    def __init__(self, optimizer: CalledOptimizer) -> None:
        self._optimizer: Final = optimizer

    def __getitem__(self, name: str) -> np.ndarray:
        """Reads the present value of a hyperparameter.

        Raises:
            KeyError: There is no hyperparameter of that name; the error lists the
                names.
        """
        call, states = self._found(name)
        tree = call.rule(is_here=lives_here(call), is_traced=False)
        value = _leaf_of(call, tree, _slots_of(call), states[0])
        return np.asarray(_initial(call, states)[states[0]] if value is None else value)

    def __setitem__(self, name: str, value: Any) -> None:
        """Assigns a value to a hyperparameter. Steps that are running may not see it.

        Raises:
            KeyError: There is no hyperparameter of that name; the error lists the
                names.
            ValueError: The value has another shape.
            TypeError: The value is not a number of the right kind (None would become
                nan).
        """
        call, states = self._found(name)
        tree = call.rule(is_here=lives_here(call))
        kinds = {state: tree.state()[state].kind for state in states}
        fitting = {n: self._fitting(name, value, kind) for n, kind in kinds.items()}
        _assign(call, fitting)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names(_known(self._optimizer)))

    def __contains__(self, name: object) -> bool:
        return name in self._names(_known(self._optimizer))

    def __repr__(self) -> str:
        return f"<hyperparameters of {self._optimizer!r}>"

    def _fitting(self, name: str, value: Any, kind: Any) -> np.ndarray:
        what = f"hyperparameter {name!r} of optimizer {self._optimizer.name!r}"
        if not same_kind(np.asarray(value).dtype, kind.dtype):
            raise TypeError(
                f"{what} has dtype {kind.dtype}, as the value that the optimizer was "
                f"made with; got {value!r:.80}"
            )
        array: np.ndarray = np.asarray(value, kind.dtype)
        if array.shape != kind.shape:
            raise ValueError(f"{what} has shape {kind.shape}, got {array.shape}")
        return array

    def _found(self, name: str) -> tuple[GradientCall, list[int]]:
        call = _known(self._optimizer)
        names = self._names(call)
        if name not in names:
            raise KeyError(
                f"optimizer {self._optimizer.name!r} has no hyperparameter {name!r}; "
                f"it has {sorted(names) or 'none'}. Only those of "
                "optax.inject_hyperparams(...) can be read and assigned"
            )
        return call, names[name]

    def _names(self, call: GradientCall) -> dict[str, list[int]]:
        """Returns the numbers of the state's leaves, by name of the hyperparameter."""
        tree = call.rule(is_here=lives_here(call), is_traced=False)
        # A chain may have the same name several times; they are assigned together.
        names: dict[str, list[int]] = {}
        for number, leaf in enumerate(tree.state()):
            # The state of `optax.inject_hyperparams` has a field of this name, which is
            # a dict.
            for key, after in zip(leaf.path, leaf.path[1:], strict=False):
                if key == GetAttrKey("hyperparams") and isinstance(after, DictKey):
                    names.setdefault(str(after.key), []).append(number)
        return names


def _known(optimizer: CalledOptimizer) -> GradientCall:
    if recorder.get() is not None or is_staging():
        raise RuntimeError(
            f"the state and the hyperparameters of optimizer {optimizer.name!r} cannot "
            "be read or assigned in a step: that would happen once, while the step is "
            "traced. Do it between steps; for a value that changes at each step give "
            "the optimizer a schedule (optax.inject_hyperparams(optax.adam)("
            "learning_rate=optax.cosine_decay_schedule(...)))"
        )
    call = optimizer.known_call()
    if call is None:
        raise RuntimeError(
            f"the tree of optimizer {optimizer.name!r} is not known: the optimizer has "
            "not updated any variables in this process. Name the tree when it is made, "
            "zs.Optimizer(transformation, params=params)"
        )
    return call


def _storage(variable: VariableHandle) -> KeepsSlots:
    storage = variable.storage
    if not isinstance(storage, KeepsSlots):
        raise RuntimeError(
            f"{variable.spec}: the state of its optimizer cannot be read here, because "
            "this handle came from another task; read it on the coordinator"
        )
    return storage


def _slots_of(call: GradientCall) -> dict[int, Mapping[str, np.ndarray]]:
    """Reads the optimizer's slots of each variable, by the variable's key, with one
    request per storage."""
    storages: dict[int, list[VariableHandle]] = {}
    for variable in call.variables:
        storages.setdefault(id(variable.storage), []).append(variable)
    by_key: dict[int, Mapping[str, np.ndarray]] = {}
    for variables in storages.values():
        slots = _storage(variables[0]).read_slots(call.optimizer, variables)
        keys = [variable.spec.key for variable in variables]
        by_key.update(zip(keys, slots, strict=True))
    return by_key


def _assign(call: GradientCall, arrays: Mapping[int, np.ndarray]) -> None:
    """Writes the given leaves of the state, by number, to the slots of all
    variables."""
    tree = call.rule(is_here=lives_here(call))
    for leaf, target in enumerate(call.targets):
        for slot in call.optimizer.leaf_rule(tree, leaf).slots:
            if slot.state not in arrays:
                continue
            parts = [arrays[slot.state]] * len(target.components)
            if slot.rows and len(parts) > 1:
                parts = np.split(parts[0], target.table.offsets[1:-1])
            for variable, part in zip(target.components, parts, strict=True):
                storage = _storage(variable)
                # A server that does not know the tree has no slots to write to.
                if isinstance(storage, Binds):
                    storage.bind(call)
                storage.write_slot(call.optimizer, variable, slot.name, part)


def _initial(call: GradientCall, wanted: Sequence[int]) -> dict[int, Any]:
    """Computes the ``wanted`` leaves of the state, by number, as they are before the
    first gradient."""
    tree = call.rule(is_here=lives_here(call), is_traced=False)
    init = tree.init().closed
    values = {
        leaf: np.concatenate(parts) if len(parts) > 1 else parts[0]
        for leaf, target in enumerate(call.targets)
        if not _is_hashed(target) and (parts := read_all(target.components))
    }

    def state(known: dict[int, Any]) -> dict[int, Any]:
        # No wanted leaf has rows of a table of any id, so XLA drops these zeros.
        args = [
            known[leaf] if leaf in known else jnp.zeros(aval.shape, aval.dtype)
            for leaf, aval in enumerate(init.in_avals)
        ]
        leaves = jaxpr_as_fun(init)(*args)
        return {number: leaves[number] for number in wanted}

    with tree.precision():
        return dict(jax.jit(state)(values))


def _require_no_hashed_rows(call: GradientCall, tree: TreeRule) -> None:
    """Refuses to handle the state of an optimizer that has entries for rows of a hash
    table, as its shape is not fixed.

    Raises:
        ValueError: A leaf of the state has an entry for each row of such a table.
    """
    # The first one serves as the example.
    for table, slots in _of_hashed_rows(call, tree).values():
        raise ValueError(
            f"optimizer {call.optimizer.name!r} keeps {slots} for each row of {table}, "
            "so its state has no fixed shape. Read and assign its hyperparams, and "
            "save it in a zs.Checkpoint; or give the table its own optimizer, and "
            "read the state of the other one"
        )


def _is_hashed(target: GradientTarget) -> bool:
    return bool(target.shape) and target.table.is_hashed  # a scalar has no rows


def _of_hashed_rows(call: GradientCall, tree: TreeRule) -> dict[int, tuple[Table, str]]:
    """Returns the leaves of the state that have an entry for each row of a hash table,
    by number; for each leaf the table, and the names of all such slots of the table."""
    found: dict[int, tuple[Table, str]] = {}
    for leaf, target in enumerate(call.targets):
        if _is_hashed(target):
            slots = call.optimizer.leaf_rule(tree, leaf).slots
            kept = [slot for slot in slots if slot.rows]
            names = ", ".join(slot.name for slot in kept)
            found |= {slot.state: (target.table, names) for slot in kept}
    return found
