"""Destinations of values, and reductions on the devices of one process.

A destination is a value per replica, a variable or an array, which mean the devices
where it is stored, or the TF name of a device. A destination that is not on a device of
this process (a numpy array, a variable on a parameter server, a name of another task)
has no device: values for it are not moved.

If each device has the part of its replica, values are reduced on these devices
(`all_reduced`): one program for all values and devices adds them by one all-reduce, for
which XLA uses the connections of the devices. Then each of these devices has the
result, and copies are made only to other devices.

Laws of `all_reduced`: no value is moved to another device to be reduced there; a value
whose parts share a device is not reduced by it.
"""

from __future__ import annotations

import functools
import re
from typing import TYPE_CHECKING, Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from zstrat.collectives import ReduceOp
from zstrat.program.stages import settled
from zstrat.program.trace import fits
from zstrat.strategy._devices import device_named
from zstrat.strategy.replica._collective import Team
from zstrat.strategy.replica._mapped import (
    Spread,
    mapped_over,
    mesh_of,
    mesh_over,
    one_array,
    rows_over,
)
from zstrat.strategy.replica._per_replica import (
    DistributedValues,
    Mirrored,
    is_concrete,
    loose,
)
from zstrat.variables import AbstractVariable, DeviceStorage, IndexedSlices, is_staging

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


_TASK: Final = re.compile(r"/job:(?P<job>\w+)(?:/replica:\d+)?(?:/task:\d+)?/?")


def places(destination: Any) -> tuple[jax.Device, ...]:
    """Returns the devices of a destination, each device once, in the order of the
    replicas.

    Raises:
        ValueError: ``destination`` is not a destination, or names a device that does
            not exist.
    """
    match destination:
        # Before `values`, which would make a view for each replica.
        case DistributedValues(whole=jax.Array() as whole):
            return places(whole)
        case DistributedValues(values=values):
            return _once(device for value in values for device in _of_array(value))
        case AbstractVariable():
            return _once(
                device
                for part in destination.components
                if isinstance(part.storage, DeviceStorage)
                for device in _of_sharding(part.storage.kept)
            )
        case jax.Array() | np.ndarray() | IndexedSlices():
            return _once(_of_array(destination))
        case str():
            return _named(destination)
    raise ValueError(
        "destinations must be one of a distributed value, a variable, an array or a "
        f"device string, got {type(destination).__name__}"
    )


def for_each(placed: Any, destination: Any) -> Any:
    """Converts a result of `put` to the form of its destination: if that is a value per
    replica, to one value for each replica, even if several share a device."""
    # A destination of one replica takes the result as it is.
    if not isinstance(destination, DistributedValues) or destination.replicas < 2:
        return placed
    count = destination.replicas
    if not isinstance(placed, DistributedValues):
        return Mirrored((placed,) * count)
    if placed.replicas == count:
        return placed
    # Several replicas may share a device, which has one copy.
    there = dict(zip(places(destination), placed.values, strict=True))
    first = placed.values[0]
    devices = [next(iter(_of_array(x)), None) for x in destination.values]
    return Mirrored([first if d is None else there[d] for d in devices])


def put(value: Any, devices: Sequence[jax.Device]) -> Any:
    """Copies a value to devices; returns a `Mirrored` for several devices. Without
    devices the value is not moved.

    Numpy integers that jax would truncate stay on the host, unchanged.
    """
    if not devices or _is_traced(value):
        return value
    if len(devices) > 1:
        return _mirrored(value, devices)
    (device,) = devices
    is_there = not isinstance(value, jax.Array) and device.platform == "cpu"
    # Arrays of numpy are there already, and keep a dtype that jax may not have.
    return value if is_there else jax.tree.map(lambda x: _on(x, device), value)


def _mirrored(value: Any, devices: Sequence[jax.Device]) -> Mirrored:
    is_array = isinstance(value, jax.Array | np.ndarray | np.generic)
    if not is_array or not fits(value):
        return Mirrored((value,) * len(devices))
    array = jax.numpy.asarray(value)
    # With an axis of replicas, along which they are one array.
    rows = [jax.device_put(array[None], device) for device in devices]
    whole = one_array(rows, rows_over(mesh_over(devices)))
    return Mirrored.of_whole(whole, len(devices), stacked=True)


def _on(leaf: Any, device: jax.Device) -> Any:
    if not isinstance(leaf, jax.Array | np.ndarray) or not fits(leaf):
        return leaf
    return jax.device_put(leaf, device)


def _of_array(value: Any) -> Iterable[jax.Device]:
    return _of_sharding(value.sharding) if is_concrete(value) else ()


def _of_sharding(sharding: jax.sharding.Sharding) -> Iterable[jax.Device]:
    # The mesh has them in the order of the replicas, ids may not.
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
        return list(sharding.mesh.devices.flat)
    return sorted(sharding.device_set, key=lambda device: device.id)


def _named(name: str) -> tuple[jax.Device, ...]:
    task = _TASK.match(name)
    if task is None:
        return (device_named(name),)
    device = name[task.end() :]
    # A ps is another process, and a task without a device has none here.
    if task["job"].lower() == "ps" or not device:
        return ()
    return (device_named(device),)


def _once(devices: Iterable[jax.Device]) -> tuple[jax.Device, ...]:
    return tuple(dict.fromkeys(devices))


def _is_traced(value: Any) -> bool:
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(value))


def all_reduced(
    op: ReduceOp, values: Sequence[DistributedValues]
) -> dict[int, Mirrored]:
    """Sums or averages those values of which each part is on a different device, on
    these devices. Returns their results by the number of the value. All values on the
    same devices are reduced by one program."""
    groups: dict[Mesh, dict[int, Spread]] = {}
    for number, value in enumerate(values):
        if (apart := spread_out(value)) is not None:
            mesh, spread = apart
            groups.setdefault(mesh, {})[number] = spread
    result: dict[int, Mirrored] = {}
    for mesh, spreads in groups.items():
        stacked = tuple([x.stacked for x in spreads.values()])
        arrays = [x.array for x in spreads.values()]
        totals = reduced(arrays, mesh, stacked, op is ReduceOp.MEAN)
        for number, total in zip(spreads, settled(totals, totals), strict=True):
            is_scalar = total.shape == (mesh.size,) and spreads[number].stacked
            result[number] = Mirrored.of_whole(total, mesh.size, stacked=is_scalar)
    return result


def at(total: Mirrored, devices: Sequence[jax.Device]) -> Any:
    """Copies a result of `all_reduced` to devices: `Mirrored` for several, one array
    for one device. Without devices, returns the result on the device of the first
    replica."""
    there = places(total)
    if tuple(devices) == there:
        return total
    copies = {shard.device: shard.data for shard in total.whole.addressable_shards}
    first = copies[there[0]]
    if len(devices) < 2:
        # Where a copy is already, nothing travels.
        nearest = copies.get(devices[0], first) if devices else first
        return put(loose(nearest, total.is_stacked), devices)
    # Any copy will do for a device that has none: all are equal.
    wanted = [copies[x] if x in copies else jax.device_put(first, x) for x in devices]
    whole = one_array(wanted, rows_over(mesh_over(devices), _memory(wanted[0])))
    return Mirrored.of_whole(whole, len(devices), stacked=total.is_stacked)


def spread_out(value: DistributedValues) -> tuple[Mesh, Spread] | None:
    """Returns the value of all replicas as one array over its devices, and the devices'
    mesh. None if not each replica has an array of the same kind on a different device,
    or if the operation becomes part of a program, which decides itself where values
    are. Cost: copies only scalars."""
    if value.replicas < 2 or is_staging():
        return None
    whole = value.whole
    if is_concrete(whole) and _is_addable(whole):
        mesh = mesh_of(places(whole), value.replicas)
        if mesh is not None and _is_laid_out(whole, mesh):
            return mesh, Spread(whole, value.is_stacked)
    return _joined(value.values)


def _joined(parts: Sequence[Any]) -> tuple[Mesh, Spread] | None:
    if not all(is_concrete(part) and _is_addable(part) for part in parts):
        return None
    devices = [device for part in parts for device in part.devices()]
    # Parts in another memory, or on another platform, cannot be one array.
    kinds = {(part.shape, part.dtype, part.sharding.memory_kind) for part in parts}
    platforms = {device.platform for device in devices}
    if len(kinds) > 1 or len(platforms) > 1:
        return None
    # One device for each part, or they are not spread out.
    if len(devices) > len(parts) or len(set(devices)) < len(devices):
        return None
    mesh = mesh_over(devices)
    is_scalar = not parts[0].shape
    if is_scalar:
        # `part[None]` of a scalar that is bound to no device is on the default one.
        parts = [
            jax.device_put(part[None], device)
            for part, device in zip(parts, devices, strict=True)
        ]
    array = one_array(parts, rows_over(mesh, _memory(parts[0])))
    return (mesh, Spread(array, is_scalar)) if _is_laid_out(array, mesh) else None


def _memory(array: jax.Array) -> str | None:
    return array.sharding.memory_kind


def _is_laid_out(whole: jax.Array, mesh: Mesh) -> bool:
    """Returns whether each device of the mesh has the rows of its replica, in the kind
    of memory that it computes with."""
    return bool(whole.sharding.is_equivalent_to(rows_over(mesh), whole.ndim))


def _is_addable(array: jax.Array) -> bool:
    """Returns whether the array has numbers that collectives can add: not random keys,
    float8 or int4."""
    dtype = array.dtype
    if not array.size or jnp.issubdtype(dtype, jax.dtypes.extended):
        return False
    return dtype.kind in "biufc" or dtype == jnp.bfloat16


def _reduced(
    arrays: Sequence[jax.Array], mesh: Mesh, stacked: tuple[bool, ...], mean: bool
) -> list[jax.Array]:
    """Sums or averages arrays of which each device has its replica's part; each device
    gets the result."""
    team = Team(mesh.size)

    def on_each(_: Any, __: Any, parts: Sequence[jax.Array]) -> tuple[Any, Any]:
        return team.all_reduce(parts, mean=mean), ()

    spreads = [Spread(array, flag) for array, flag in zip(arrays, stacked, strict=True)]
    found, _ = mapped_over(on_each, team.local, mesh, spreads)((), ())
    return [each.array for each in found]


reduced: Final[Any] = functools.partial(jax.jit, static_argnums=(1, 2, 3))(_reduced)
