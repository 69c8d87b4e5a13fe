"""One copy of a variable that several devices have, as a variable of its own.

TF's components of a distributed variable: ``v``, ``v/replica_1``, ... What is done to
one is done to this copy alone; the copies are kept apart from then on.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax

from zstrat.collectives import ReduceOp
from zstrat.program.trace import is_on_read
from zstrat.strategy.reduce._values import is_whole
from zstrat.strategy.replica._per_replica import (
    DistributedValues,
    Mirrored,
    PerReplica,
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
    from collections.abc import Callable, Sequence

    from zstrat.variables import DevicePool, VariableHandle


def copies_of(variable: Variable) -> tuple[Variable, ...]:
    """The copies of a variable that this process has, in replica order: the variable
    itself where there is one copy, as where one device keeps it for all replicas."""
    storage = variable.storage
    if not isinstance(storage, DeviceStorage):
        return (variable,)
    if storage.pool.copies == 1:
        # Who reads an ON_READ variable reads all processes; who reads its copy here
        # does not, so that copy needs a handle of its own, without that rule.
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
    """A variable, if replicas or processes have a value each, as the values of the
    replicas of this process: `PerReplica` if they may differ, `Mirrored` if not. What
    is no such variable comes back as it is."""
    if not isinstance(node, Variable):
        return node
    storage = node.storage
    if not isinstance(storage, DeviceStorage):
        return node
    if storage.is_apart:
        recording = recorder.get()
        if recording is None:
            return PerReplica(tuple(storage.copies(node)))
        return PerReplica(tuple(recording.copies(node)))
    if node.is_aggregated_on_read:
        return PerReplica((copies_of(node)[0].value(),))
    count = _sharing(storage.pool)
    return node if count == 1 else Mirrored((node.value(),) * count)


def by_copies(tree: Any, split: Callable[[Variable], Any] = as_values) -> Any:
    """The pytree with what ``split`` makes of each variable in its place. A pytree
    without variables is not copied."""
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
    """The pytree with the values of the replicas in place of variables, to be reduced.
    For a mean one of several equal values will do."""
    found = by_copies(tree)
    if op is not ReduceOp.MEAN:
        return found
    return jax.tree.map(
        lambda leaf: leaf.values[0] if isinstance(leaf, Mirrored) else leaf,
        found,
        is_leaf=is_whole,
    )


def _sharing(pool: DevicePool) -> int:
    """How many replicas of this process have a value that is the same for all."""
    mesh = pool.mesh
    return pool.copies if mesh is None else len(mesh.local_devices)


def copied(values: Sequence[Any]) -> VariableHandle | None:
    """The variable whose copies these are, all of them in replica order; None: they are
    something else."""
    storages = [value.storage for value in values if isinstance(value, Variable)]
    copies = [storage for storage in storages if isinstance(storage, CopyStorage)]
    if not copies or len(copies) < len(values):
        return None
    whole = copies[0].container
    numbers = [storage.number for storage in copies if storage.container is whole]
    storage = whole.storage
    is_all = isinstance(storage, DeviceStorage) and len(numbers) == storage.pool.copies
    return whole if is_all and numbers == list(range(len(values))) else None


def container_of(variable: VariableHandle) -> VariableHandle:
    """The variable that this one is a copy of, or itself."""
    copy = copy_storage(variable)
    return variable if copy is None else copy.container
