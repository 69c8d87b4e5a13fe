"""Where a value is wanted: TF's destinations as devices of jax, and values put there.

A destination is a value per replica or a variable (where it lives), an array, or TF's
name of a device. What is not in the memory of a device of this process (numpy, a
variable on a parameter server, a name of another task) is no device: values for it stay
where they are.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from zstrat.program.trace import fits
from zstrat.strategy._devices import device_named
from zstrat.strategy.replica._per_replica import (
    DistributedValues,
    Mirrored,
    is_concrete,
)
from zstrat.strategy.replica._spread import mesh_over, one_array, rows_over
from zstrat.variables import AbstractVariable, DeviceStorage, IndexedSlices

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_TASK: Final = re.compile(r"/job:(?P<job>\w+)(?:/replica:\d+)?(?:/task:\d+)?/?")


def places(destination: Any) -> tuple[jax.Device, ...]:
    """The devices of a destination, each once, in the order of the replicas.

    Raises:
        ValueError: It is none, or names a device that there is not.
    """
    match destination:
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
    """What `put` made for the devices of a destination, as that has it: for a value
    per replica one for each replica, however many of them share a device."""
    if not isinstance(destination, DistributedValues) or destination.replicas < 2:
        return placed
    count = destination.replicas
    if not isinstance(placed, DistributedValues):
        return Mirrored((placed,) * count)
    if placed.replicas == count:
        return placed
    there = dict(zip(places(destination), placed.values, strict=True))
    first = placed.values[0]
    devices = [next(iter(_of_array(x)), None) for x in destination.values]
    return Mirrored([first if d is None else there[d] for d in devices])


def put(value: Any, devices: Sequence[jax.Device]) -> Any:
    """The value on these devices: `Mirrored` on several, as it is for none.

    Integers of numpy that jax would cut stay on the host as they are.
    """
    if not devices or _is_traced(value):
        return value
    if len(devices) > 1:
        return _mirrored(value, devices)
    (device,) = devices
    is_there = not isinstance(value, jax.Array) and device.platform == "cpu"
    # What numpy holds is there, and keeps a dtype that jax may not have.
    return value if is_there else jax.tree.map(lambda x: _on(x, device), value)


def _mirrored(value: Any, devices: Sequence[jax.Device]) -> Mirrored:
    is_array = isinstance(value, jax.Array | np.ndarray | np.generic)
    if not is_array or not fits(value):
        return Mirrored((value,) * len(devices))
    array = jax.numpy.asarray(value)
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
    if isinstance(sharding, NamedSharding) and isinstance(sharding.mesh, Mesh):
        return list(sharding.mesh.devices.flat)
    return sorted(sharding.device_set, key=lambda device: device.id)


def _named(name: str) -> tuple[jax.Device, ...]:
    task = _TASK.match(name)
    if task is None:
        return (device_named(name),)
    device = name[task.end() :]
    if task["job"].lower() == "ps" or not device:
        return ()
    return (device_named(device),)


def _once(devices: Iterable[jax.Device]) -> tuple[jax.Device, ...]:
    return tuple(dict.fromkeys(devices))


def _is_traced(value: Any) -> bool:
    return any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(value))
