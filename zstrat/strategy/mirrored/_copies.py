"""The components of a variable: its copies on several devices, and their updates.

A copy is a separate variable, with the name that TF gives it: ``v``, ``v/replica_1``,
... An update of one copy does not change the others; the copies differ from then on.

In the update context (`updated`) a function changes the components. A variable that all
replicas share is one array, so the function is called once, with operands that are the
same for all of them. Where each replica has its own copy, it is called for each copy.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from zstrat.collectives import ReduceOp
from zstrat.program.trace import is_apart, is_on_read
from zstrat.strategy._frames import Frame, entered
from zstrat.strategy.reduce._values import is_whole
from zstrat.strategy.replica._per_replica import (
    DistributedValues,
    Mirrored,
    PerReplica,
    is_distributed,
    regroup,
)
from zstrat.variables import (
    CopyStorage,
    DeviceStorage,
    Variable,
    copy_storage,
    handle,
    next_key,
    recorder,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from zstrat.strategy._frames import AbstractStrategy
    from zstrat.variables import AbstractVariable, VariableHandle


def copies_of(variable: Variable) -> tuple[Variable, ...]:
    """Returns the copies of a variable that this process has, in replica order: the
    variable itself if there is one copy, as when one device keeps it for all
    replicas."""
    storage = variable.storage
    if not isinstance(storage, DeviceStorage):
        return (variable,)
    if storage.pool.copies == 1:
        # A read of an ON_READ variable reads all processes, a read of its copy here
        # does not: so that copy needs a separate handle, without that rule.
        apart = variable.is_aggregated_on_read
        return (handle(variable.spec, storage) if apart else variable,)
    if storage.pool.travels and not is_on_read(variable):
        return (variable,)  # all replicas share it
    spec = variable.spec
    names = [spec.name]
    names += [f"{spec.name}/replica_{n}" for n in range(1, storage.pool.copies)]
    return tuple(
        handle(replace(spec, key=key, name=name), CopyStorage(variable, number))
        for number, (key, name) in enumerate(
            zip(storage.copy_keys(next_key), names, strict=True)
        )
    )


def as_values(node: Any) -> Any:
    """Replaces a variable by the values that this process's replicas have of it: by a
    `PerReplica` if they may differ, by a `Mirrored` if they are equal. Returns a
    variable that all replicas share, and any other object, unchanged."""
    if not isinstance(node, Variable):
        return node
    storage = node.storage
    if not isinstance(storage, DeviceStorage):
        return node
    if storage.is_apart:
        # In a step the copies are values of its program.
        recording = recorder.get()
        if recording is None:
            return PerReplica(tuple(storage.copies(node)))
        return PerReplica(tuple(recording.copies(node)))
    if node.is_aggregated_on_read:
        return PerReplica((copies_of(node)[0].value(),))
    # In one job of XLA a value is over the devices of all processes; this one sees its
    # own.
    copies, mesh = storage.pool.copies, storage.pool.mesh
    count = copies if mesh is None else len(mesh.local_devices)
    return node if count == 1 else Mirrored((node.value(),) * count)


def by_copies(tree: Any, split: Callable[[Variable], Any] = as_values) -> Any:
    """Replaces each variable of a pytree by the result of ``split``. A pytree without
    variables is not copied."""
    if isinstance(tree, DistributedValues) and tree.whole is not None:
        return tree  # one array
    if not any(
        isinstance(x, Variable) for x in jax.tree.leaves(tree, is_leaf=is_whole)
    ):
        return tree
    return jax.tree.map(
        lambda x: split(x) if isinstance(x, Variable) else x, tree, is_leaf=is_whole
    )


def reducible(op: ReduceOp, tree: Any) -> Any:
    """Replaces variables in a pytree by their values on each replica, ready to be
    reduced. For a mean, a mirrored variable is replaced by only one of its equal
    values."""
    result = by_copies(tree)
    if op is not ReduceOp.MEAN:
        return result
    return jax.tree.map(
        lambda leaf: leaf.values[0] if isinstance(leaf, Mirrored) else leaf,
        result,
        is_leaf=is_whole,
    )


def container_of(variable: VariableHandle) -> VariableHandle:
    """Returns the variable of which this one is a copy, or the variable itself."""
    copy = copy_storage(variable)
    return variable if copy is None else copy.container


def components_of(variable: AbstractVariable) -> tuple[AbstractVariable, ...]:
    """Returns the copies of a variable if each replica has its own; otherwise only the
    variable."""
    if isinstance(variable, Variable) and is_apart(variable):
        return copies_of(variable)
    return (variable,)


def updated(
    strategy: AbstractStrategy,
    fns: Sequence[Callable[..., Any]],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    group: bool,
) -> Any:
    """Calls ``fns``, one for each component, in the update context; returns their
    results.

    Raises:
        ValueError: An argument is a value per replica, or a `Mirrored` value whose
            number of values is neither 1 nor that of the components.
    """
    given = jax.tree.leaves((args, kwargs), is_leaf=is_distributed)
    if any(isinstance(leaf, PerReplica) for leaf in given):
        raise ValueError(
            "update: a value per replica among the arguments, expected mirrored values "
            "or arrays: reduce it with reduce_to first"
        )
    for leaf in given:
        if isinstance(leaf, DistributedValues):
            _require_enough(leaf, len(fns))
    results = []
    for number, fn in enumerate(fns):
        own_args, own_kwargs = _own(number, (tuple(args), dict(kwargs)))
        with entered(Frame(strategy, update=number)):
            results.append(fn(*own_args, **own_kwargs))
    if not group:
        # One tree, in which each leaf is the list of the leaves of the results.
        return jax.tree.map(
            lambda *leaves: list(leaves), *results, is_leaf=lambda x: x is None
        )
    return results[0] if len(results) == 1 else regroup(results)


def agreed(tree: Any) -> Any:
    """Replaces values per replica in a pytree by the one value on which all replicas
    agree. In a trace this is the value of the first replica, as it is not known there
    whether they are equal.

    Raises:
        ValueError: The replicas have different values.
    """
    return jax.tree.map(_agreed_leaf, tree, is_leaf=is_distributed)


def _agreed_leaf(leaf: Any) -> Any:
    if not isinstance(leaf, PerReplica):
        return leaf
    first, *others = leaf.values
    traced = any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(leaf.values))
    if not traced and not all(_are_equal(first, other) for other in others):
        raise ValueError(
            f"update: replicas give different values, {leaf!r:.200}: reduce them first "
            "(get_replica_context().all_reduce)"
        )
    return first


def _are_equal(one: Any, other: Any) -> bool:
    # As bytes of numbers: nan is as good as another nan.
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(np.asarray(x).tobytes() == np.asarray(y).tobytes() for x, y in pairs)


def _require_enough(mirrored: DistributedValues, components: int) -> None:
    """Refuses a `Mirrored` value that has no value for some component.

    Raises:
        ValueError: It has neither one value nor one for each component.
    """
    count = mirrored.replicas
    # One value is for all of them, and one component may have any of several.
    if count == 1 or count == components or (count and components == 1):
        return
    raise ValueError(
        f"update: a mirrored value of {count} values among the arguments, and "
        f"{components} copies to update; expected as many values, or one for all: "
        "reduce_to with the variable as its destination makes such a value"
    )


def _own(component: int, tree: Any) -> Any:
    """Returns the pytree with each distributed value replaced by its value for
    ``component``."""

    def own(leaf: Any) -> Any:
        if not isinstance(leaf, DistributedValues):
            return leaf
        return leaf.values[component if leaf.replicas > 1 else 0]

    return jax.tree.map(own, tree, is_leaf=is_distributed)
