"""Maps functions over the replicas of one process, and records the updates in them.

`mapped_over` maps a function over arrays of which each replica has its part. A part
stays on the device of its replica: nothing here combines parts.

If there are other processes, a replica function is split at the collectives with them
(`in_stages`). XLA maps over the devices of this process, while collectives with other
processes happen outside of XLA. So the function is mapped in stages: each stage returns
the operands of the next collectives, which are equal on all devices, and the values
that later stages need, one part for each device.

Law: each stage is a part of a separate trace of the function, made inside the map in
which the stage runs. All these traces are equal, so the number of a value means the
same in each.

Recorders inside replica functions pass updates of variables on to the step. Laws of
recorders: a variable that replicas share is updated once: the operands of all replicas
are combined here, and the recorder outside of the replicas records the combined update.
A replica updates its own copy at once, without the others.

There are three kinds of replicas. One of several that are mapped over devices as one
program (`_regions`) and the only one of its process (`SoleReplica`) combine operands
through their `Team`. A sequential one (`_sequential`) waits for the others.
"""

from __future__ import annotations

import abc
import contextlib
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, final

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zstrat.program.stages import crossing, stages, within_mesh
from zstrat.program.trace import Immediate, updates_copies
from zstrat.variables import (
    Table,
    TraceRecorder,
    VariableAggregation,
    VariableSynchronization,
    recorder,
)

from ._collective import AXIS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from contextlib import AbstractContextManager

    from jax.sharding import Sharding

    from zstrat.program.stages import Stage
    from zstrat.program.trace import StepIterator
    from zstrat.variables import GradientCall, VariableHandle, VariableUpdate

    from ._collective import Team


# jax's stubs leave these untyped.
_spec: Final[Any] = PartitionSpec
_sharding: Final[Any] = NamedSharding


def mesh_over(devices: Sequence[jax.Device]) -> Mesh:
    """Makes a mesh of these devices, one for each replica."""
    return Mesh(np.array(devices), (AXIS,))


def rows_over(mesh: Mesh, memory: str | None = None) -> Sharding:
    """Returns the sharding of arrays in which each device has the rows of its replica.

    Args:
        memory: The kind of memory, such as ``"pinned_host"``; default: that of the
            device.
    """
    result: Sharding = _sharding(mesh, _spec(AXIS), memory_kind=memory)
    return result


def one_array(parts: Sequence[jax.Array], rows: Sharding) -> jax.Array:
    """Makes one array whose rows are those of the parts, without a copy; each part must
    be on the device that ``rows`` assigns to it."""
    count, *rest = parts[0].shape
    shape = (count * len(parts), *rest)
    return jax.make_array_from_single_device_arrays(shape, rows, list(parts))


def mesh_of(devices: Sequence[jax.Device], count: int) -> Mesh | None:
    """Makes a mesh of the first devices, one for each replica; None if there are fewer
    devices."""
    if len(devices) < count:
        return None
    return mesh_over(devices[:count])


@dataclass(frozen=True, slots=True)
class Spread:
    """An array of which each replica has its part; a leaf of pytrees.

    ``array`` is ``[count * n, ...]``, and replica i's part has its n rows from ``i *
    n`` on; or, if it is ``stacked``, ``[count, ...]``, and replica i's part
    ``array[i]``.
    """

    array: Any
    stacked: bool = False


def mapped_over(
    one: Callable[..., Any],
    count: int,
    mesh: Mesh | None,
    own_arrays: Sequence[Spread],
) -> Callable[..., Any]:
    """Returns a function that maps ``one`` over all replicas, each of which gets its
    parts of ``own_arrays``. Arrays that ``one`` returns come back as `Spread`; operands
    of updates come back once, as they are equal on every replica."""
    # XLA reaches the other processes in the program itself, whose mesh is around this
    # one.
    is_nested = within_mesh.get()
    scalars: list[bool] = []

    def noted(outputs: Any) -> Any:
        arrays, operands = outputs
        # Which outputs are scalars is known only while the function is traced.
        scalars[:] = [x.ndim == 0 for x in arrays]
        return arrays, operands

    def spread(arrays: Sequence[Any]) -> list[Spread]:
        return [Spread(x, flag) for x, flag in zip(arrays, scalars, strict=True)]

    if mesh is None and not is_nested:

        def on_one_device(values: Any, shared: Any) -> Any:
            arrays, operands = jax.vmap(
                lambda values, shared, own: noted(one(values, shared, own)),
                in_axes=(None, None, 0),
                out_axes=(0, None),
                axis_name=AXIS,
                axis_size=count,
            )(values, shared, [by_replica(x, count) for x in own_arrays])
            # vmap stacks; rows of replicas are concatenated, as a mesh does.
            joined = [
                x if flag else x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])
                for x, flag in zip(arrays, scalars, strict=True)
            ]
            return spread(joined), operands

        return on_one_device

    def body(values: Any, shared: Any, own: Any) -> Any:
        parts = [x[0] if y.stacked else x for x, y in zip(own, own_arrays, strict=True)]
        arrays, operands = noted(one(values, shared, parts))
        # Parts are concatenated along an axis, which a scalar has to get first.
        return [x[None] if x.ndim == 0 else x for x in arrays], operands

    each, whole = _spec(AXIS), _spec()
    over = jax.shard_map(
        body,
        # The mesh of all processes is there already, and this is an axis of it.
        mesh=None if is_nested else mesh,
        axis_names={AXIS},
        in_specs=(whole, whole, each),
        out_specs=(each, whole),
        # Off: replicas compute their own gradients of the shared values, and it is ours
        # to say when they are summed.
        check_vma=False,
    )

    def on_devices(values: Any, shared: Any) -> Any:
        arrays, operands = over(values, shared, [x.array for x in own_arrays])
        return spread(arrays), operands

    return on_devices


def by_replica(value: Spread, count: int) -> Any:
    """Reshapes the array to ``[count, ...]``, with one entry for each replica."""
    array = value.array
    if value.stacked:
        return array
    return array.reshape(count, array.shape[0] // count, *array.shape[1:])


def in_stages(
    one: Callable[..., Any],
    mapped: Callable[..., Any],
    rows: Sequence[Any],
    shared: int,
    *,
    in_order: bool = False,
) -> Any:
    """Computes ``mapped(one, rows)`` with the collectives between processes outside of
    the map; for ``in_order`` see `stages`.

    ``mapped(fn, own, whole)`` maps ``fn(values, shared, own)`` over the devices.
    ``own`` are arrays of which each device gets its part, ``whole`` additional shared
    arrays; ``shared`` is the number of shared arrays without these. The first result of
    ``fn`` has a part for each device, and may be passed as ``own`` again; its second
    result is the same on all devices.
    """
    # Values by number: those of which each device has its own, and the others.
    own: dict[int, Any] = {}
    whole: dict[int, Any] = {}
    stage: _StagePart
    number = 0

    def part(values: Any, everywhere: Any, own_arrays: Any) -> Any:
        nonlocal stage
        fixed = len(own_arrays) - len(own)
        args = values, everywhere[:shared], own_arrays[:fixed]
        stage = _StagePart.of(one, args, number, in_order)
        known = dict(zip(own, own_arrays[fixed:], strict=True))
        known.update(zip(whole, everywhere[shared:], strict=True))
        return stage.run(known)

    while True:
        given = [*rows, *own.values()], list(whole.values())
        # The function is traced again for each stage: tracers of one map mean nothing
        # in the next.
        parts, alike = mapped(part, *given)
        if stage.is_last:
            return parts, stage.operands(alike)
        own.update(zip(stage.left, parts, strict=True))
        left = iter(alike)
        for each in stage.stage.crossings:
            results = crossing.bind(
                *itertools.islice(left, len(each.operands)),
                channel=each.channel,
                kind=each.kind,
                where=each.where,
            )
            whole.update(zip(each.results, results, strict=True))
        number += 1


class _StagePart:
    """One stage of a function, traced in the map in which it runs."""

    def __init__(
        self, stages: Sequence[Stage], number: int, store: dict[int, Any], shape: Any
    ) -> None:
        self.stage = stages[number]
        self.is_last = number == len(stages) - 1
        # Only what a later stage takes leaves the map: each value that leaves it is an
        # array on every device.
        later = [n for other in stages[number + 1 :] for n in other.takes]
        later += [
            n
            for other in stages[number + 1 :]
            for crossed in other.crossings
            for n in crossed.operands
        ]
        self.left = [] if self.is_last else sorted({*self.stage.gives} & {*later})
        self._store = store
        self._shape = shape

    @staticmethod
    def of(
        one: Callable[..., Any], args: Any, number: int, in_order: bool
    ) -> _StagePart:
        """Traces the function and returns its stage number ``number``."""
        closed, shape = jax.make_jaxpr(one, return_shape=True)(*args)
        cut, constants = stages(closed, in_order=in_order)
        store = dict(enumerate(jax.tree.leaves(args)))
        store.update(constants)
        return _StagePart(cut, number, store, shape)

    def run(self, known: dict[int, Any]) -> tuple[list[Any], list[Any]]:
        """Runs the stage. Returns values that differ between devices, and values that
        are the same on all. In the last stage these are the results and the operands of
        updates; in others the values that later stages need and the operands of
        collectives."""
        store = self._store | known
        made = self.stage.run(*[store[n] for n in self.stage.takes])
        if self.is_last:
            results = len(self._shape[0])
            return list(made[:results]), list(made[results:])
        store.update(zip(self.stage.gives, made, strict=True))
        operands = [n for x in self.stage.crossings for n in x.operands]
        return [store[n] for n in self.left], [store[n] for n in operands]

    def operands(self, arrays: Sequence[Any]) -> Any:
        """Returns the operands of each update, made from the shared results of the last
        stage."""
        treedef: Any = jax.tree.structure(self._shape[1])
        return treedef.unflatten(list(arrays))


class ReplicaRecorder(TraceRecorder, abc.ABC):
    """The recorder inside a replica function.

    Args:
        outer: The recorder outside of the replicas: that of the step, or of a part of
            it.
        team: The replicas that compute together.
    """

    def __init__(self, outer: TraceRecorder, team: Team) -> None:
        self.outer = outer
        self.live = outer.live
        """Whether the function computes with actual values instead of being
        captured."""
        self._team = team

    def read(self, variable: VariableHandle) -> jax.Array:
        return self.outer.read(variable)

    def update(self, update: VariableUpdate) -> None:
        # Gradients are always shared: the optimizer has one state for all copies.
        if update.optimizer is None and self._is_own(update):
            self._update_own(update)
        else:
            self._update_shared(update)

    def lookup(self, table: Table, ids: jax.Array) -> jax.Array:
        return self.outer.lookup(table, ids)

    def optimize(self, call: GradientCall) -> None:
        self.outer.optimize(self._team.aggregate_call(call))

    def drew(self, leaf: object) -> bool:
        return self.outer.drew(leaf)

    def draw(self, iterator: StepIterator) -> Any:
        return self.outer.draw(iterator)

    def require_known_end(self, name: str) -> None:
        self.outer.require_known_end(name)

    def _is_own(self, update: VariableUpdate) -> bool:
        """Returns whether an update without an optimizer changes only this replica's
        copy of the variable, so that it need not be reduced over the replicas."""
        if isinstance(update.target, Table):
            return False  # rows over several variables are always combined
        return updates_copies(update.variable, self._team.local)

    @abc.abstractmethod
    def _update_own(self, update: VariableUpdate) -> None:
        """Updates the copy that only this replica has."""

    def _update_shared(self, update: VariableUpdate) -> None:
        """Combines the operands of all replicas and updates the shared value once."""
        team = self._team
        combined = team.aggregate(update.variable, update.op, update.operands)
        self.outer.update(update._replace(operands=combined))


@final
class SoleReplica(ReplicaRecorder):
    """The recorder of the only replica of a process: its function is called, and
    nothing is mapped. Its updates are combined with those of other processes."""

    def _is_own(self, update: VariableUpdate) -> bool:
        # The rules of TF: each process has a copy that it updates by itself.
        variable = update.variable
        return (
            variable.aggregation is VariableAggregation.NONE
            or variable.synchronization is VariableSynchronization.ON_READ
        )

    def _update_own(self, update: VariableUpdate) -> None:
        self.outer.update(update)


@contextlib.contextmanager
def recording_by(current: TraceRecorder | None) -> Iterator[None]:
    """Makes a recorder the current one in the block."""
    before = recorder.set(current)
    try:
        yield
    finally:
        recorder.reset(before)


def as_sole_replica(team: Team) -> AbstractContextManager[None]:
    """Runs the block as the only replica of this process."""
    outer = recorder.get()
    return recording_by(SoleReplica(Immediate() if outer is None else outer, team))


def merged() -> AbstractContextManager[None]:
    """Runs the block once for all replicas: its updates are not aggregated."""
    current = recorder.get()
    return recording_by(current.outer if isinstance(current, SoleReplica) else current)
