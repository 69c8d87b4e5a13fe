"""Gives a process that joins late the values of the other processes.

The variables of a strategy are created in the same order in every process, so its
number identifies a variable, or an optimizer, in all processes. The process that has
made the most steps lists its values and broadcasts them: after the loss of a process
some may have made one step more than others. A process that has lost a value, because a
step failed in the middle, counts as restarted.

Law of the file: all processes call `taken_over` together, and make the same collectives
whatever values each of them has. Here the value of a storage is read by `shown`, not by
its other getters, which would first wait for values of other processes and so call
`taken_over` again.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp
import numpy as np

from zstrat.errors import InvalidArgumentError
from zstrat.variables import (
    DeviceStorage,
    LocalStorage,
    SlotValues,
    VariableAggregation,
    VariableSynchronization,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from zstrat.program.stages import Collective
    from zstrat.variables import OptimizerHandle, VariableHandle


def taken_over(
    collective: Collective,
    steps: int,
    variables: Mapping[int, VariableHandle | None],
    optimizers: Sequence[OptimizerHandle],
) -> int:
    """Gives every process the values and optimizer slots of the process that has made
    the most steps; returns that number of steps.

    Args:
        steps: Number of steps that this process has made; negative if it was restarted.
        variables: The variables by their number in the order of creation; None for one
            that this process has dropped.
        optimizers: The optimizers in the order of their creation.

    Returns:
        The number of steps; negative if all processes were restarted, and no value has
        changed.

    Raises:
        DataLossError: A value of this process is lost, and all others were restarted or
            have lost a value too.
        InvalidArgumentError: This process has created other variables than the source
            of the values. PeerLostError, CollectiveTimeoutError: Not all processes take
            part.
    """
    # Steps and rank in one number, so that one maximum finds both: of several with as
    # many steps the lowest rank.
    rank, size = collective.rank, collective.size
    lost = _lost(variables)
    # A process that has lost a value cannot give it to the others.
    steps = steps if lost is None else -1
    order = np.array([steps * size + size - 1 - rank])
    best = int(np.asarray(collective.all_reduce([order], "max")[0])[0])
    root, most = size - 1 - best % size, best // size
    if most < 0:
        # Nobody has the value that this process has lost.
        if lost is not None:
            storage, name = lost
            storage.require_kept(name)
        return most
    own = _list(variables, optimizers) if rank == root else []
    listed = _listed_by(collective, root, own)
    arrays = _arrays(listed, variables, optimizers)
    given = collective.broadcast(arrays, root)
    if rank != root:
        _put(listed, variables, optimizers, [np.asarray(x) for x in given])
    return most


def _lost(
    variables: Mapping[int, VariableHandle | None],
) -> tuple[DeviceStorage, str] | None:
    """Returns the storage and the name of a variable whose lost value another process
    has to send; None if there is no such variable."""
    for variable in variables.values():
        if variable is None:
            continue
        storage = variable.storage
        if (
            isinstance(storage, DeviceStorage)
            and storage.is_lost
            and not _is_own(variable)
        ):
            return storage, variable.name
    return None


def _list(
    variables: Mapping[int, VariableHandle | None],
    optimizers: Sequence[OptimizerHandle],
) -> list[Any]:
    result = []
    for number, variable in variables.items():
        if variable is None:
            continue
        storage = variable.storage
        if not isinstance(storage, DeviceStorage | LocalStorage) or _is_own(variable):
            continue
        spec = variable.spec
        _, kept = _state_of(storage)
        rules = [
            [n, _described(kept[rule.id])]
            for n, rule in enumerate(optimizers)
            if rule.id in kept
        ]
        result.append([number, spec.name, list(spec.shape), spec.dtype, rules])
    return result


def _is_own(variable: VariableHandle) -> bool:
    """Returns whether the variable's value in each process is independent of other
    processes."""
    return variable.synchronization is VariableSynchronization.ON_READ and (
        variable.aggregation in (VariableAggregation.SUM, VariableAggregation.NONE)
    )


def _listed_by(collective: Collective, root: int, own: Sequence[Any]) -> list[Any]:
    text = np.frombuffer(json.dumps(own).encode(), np.uint8)
    # Its length first: a broadcast needs an array of the same shape everywhere.
    size = np.array([len(text) if collective.rank == root else 0])
    length = int(np.asarray(collective.broadcast([size], root)[0])[0])
    if collective.rank != root:
        text = np.zeros(length, np.uint8)
    received = np.asarray(collective.broadcast([text], root)[0])
    result: list[Any] = json.loads(received.tobytes())
    return result


def _arrays(
    listed: Sequence[Any],
    variables: Mapping[int, VariableHandle | None],
    optimizers: Sequence[OptimizerHandle],
) -> list[Any]:
    """Returns the values and slots of all variables in the list; zeros of the right
    shape where this process has none."""
    arrays: list[Any] = []
    for entry in listed:
        storage = _storage(entry, variables)
        slots: dict[int, SlotValues] = {}
        if storage is None:
            _, _, shape, dtype, _ = entry
            arrays.append(np.zeros(shape, jnp.dtype(dtype)))
        else:
            value, slots = _state_of(storage)
            arrays.append(value)
        for rule, kinds in _rules(entry, optimizers):
            own = slots.get(rule.id)
            if own is None or _described(own) != kinds:
                # This process receives them; the arrays that it passes must have the
                # same shapes.
                arrays += [np.zeros(shape, jnp.dtype(d)) for _, shape, d, _ in kinds]
            else:
                arrays += own.leaves
    return arrays


def _put(
    listed: Sequence[Any],
    variables: Mapping[int, VariableHandle | None],
    optimizers: Sequence[OptimizerHandle],
    arrays: Sequence[np.ndarray],
) -> None:
    left = iter(arrays)
    for entry in listed:
        storage = _storage(entry, variables)
        value = next(left)
        slots: dict[OptimizerHandle, SlotValues] = {}
        for rule, kinds in _rules(entry, optimizers):
            leaves = [next(left) for _ in kinds]
            names = tuple([name for name, *_ in kinds])
            rows = tuple([bool(has) for *_, has in kinds])
            slots[rule] = SlotValues(names, leaves, rows)
        match storage:
            case LocalStorage():
                storage.put(value, slots)
            case DeviceStorage():
                storage.take_over_shown(value)
                for rule, beside in slots.items():
                    storage.take_over_shown_slots(rule.id, beside)


def _state_of(
    storage: DeviceStorage | LocalStorage,
) -> tuple[np.ndarray, dict[int, SlotValues]]:
    """Returns the value, and the slots by id of the optimizer; if they are lost, zeros
    and no slots."""
    if isinstance(storage, LocalStorage):
        return storage.taken()
    if storage.is_lost:
        # Only shape and dtype matter: a process that has lost a value gives none.
        return storage.like(), {}
    return storage.shown(), storage.shown_slots()


def _storage(
    entry: Sequence[Any], variables: Mapping[int, VariableHandle | None]
) -> DeviceStorage | LocalStorage | None:
    """Returns the storage of a listed variable in this process; None if the process has
    dropped the variable.

    Raises:
        InvalidArgumentError: This process has created no variable, or another one, with
            that number.
    """
    number, name, shape, dtype, _ = entry
    words = f"variable {name!r} ({dtype}{shape})"
    if number not in variables:
        raise InvalidArgumentError(
            "this process takes over the values of the others, and has not created "
            f"their {words}, number {number} in the order of creation: create all "
            "variables before the first step"
        )
    # When an unused variable is freed depends on the garbage collector of each process.
    if (variable := variables[number]) is None:
        return None
    storage = variable.storage
    fits = list(variable.shape) == shape and variable.spec.dtype == dtype
    if not fits or not isinstance(storage, DeviceStorage | LocalStorage):
        raise InvalidArgumentError(
            f"this process takes over the values of the others: number {number} in the "
            f"order of creation is {variable.spec} here and their {words}. All "
            "processes run the same program"
        )
    return storage


def _described(slots: SlotValues) -> list[Any]:
    """Returns for each slot its name, shape and dtype, and whether its first axis is
    that of the variable."""
    return [
        [name, list(array.shape), array.dtype.name, has]
        for name, array, has in slots.items()
    ]


def _rules(
    entry: Sequence[Any], optimizers: Sequence[OptimizerHandle]
) -> list[tuple[OptimizerHandle, list[Any]]]:
    missing = [number for number, _ in entry[4] if number >= len(optimizers)]
    if missing:
        raise InvalidArgumentError(
            f"this process takes over the values of the others, and has created "
            f"{len(optimizers)} optimizers, but they have a number {missing[0]}: "
            "create them in the strategy's scope, before the first step"
        )
    return [(optimizers[number], kinds) for number, kinds in entry[4]]
