"""Values of which each device has its replica's, reduced in place.

One program for all values and all their devices adds them by one all-reduce, which XLA
carries out as the devices are connected, and cuts or combines as it likes. Then each
device has the result, and nothing is copied but to devices that had no value.

Laws of the file: no value is brought to another device to be reduced there; a value
whose parts share a device is not reduced here.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Final

import jax
import jax.numpy as jnp

from zstrat.collectives import ReduceOp
from zstrat.program.stages import settled
from zstrat.strategy.replica._collective import Team
from zstrat.strategy.replica._per_replica import (
    DistributedValues,
    Mirrored,
    is_concrete,
    loose,
)
from zstrat.strategy.replica._spread import (
    Spread,
    mapped_over,
    mesh_of,
    mesh_over,
    one_array,
    rows_over,
)
from zstrat.variables import is_staging

from ._places import places, put

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jax.sharding import Mesh


def all_reduced(
    op: ReduceOp, values: Sequence[DistributedValues]
) -> dict[int, Mirrored]:
    """The sums or means of those values, by number, that are on devices of their own:
    on each of these. Those on the same devices are one program."""
    groups: dict[Mesh, dict[int, Spread]] = {}
    for number, value in enumerate(values):
        if (apart := spread_out(value)) is not None:
            mesh, spread = apart
            groups.setdefault(mesh, {})[number] = spread
    found: dict[int, Mirrored] = {}
    for mesh, mine in groups.items():
        stacked = tuple([x.stacked for x in mine.values()])
        arrays = [x.array for x in mine.values()]
        totals = reduced(arrays, mesh, stacked, op is ReduceOp.MEAN)
        for number, total in zip(mine, settled(totals, totals), strict=True):
            is_scalar = total.shape == (mesh.size,) and mine[number].stacked
            found[number] = Mirrored.of_whole(total, mesh.size, stacked=is_scalar)
    return found


def at(total: Mirrored, devices: Sequence[jax.Device]) -> Any:
    """What `all_reduced` made, on these devices: `Mirrored` on several, one array on
    one; for none, where the first replica is."""
    there = places(total)
    if tuple(devices) == there:
        return total
    copies = {shard.device: shard.data for shard in total.whole.addressable_shards}
    first = copies[there[0]]
    if len(devices) < 2:
        nearest = copies.get(devices[0], first) if devices else first
        return put(loose(nearest, total.is_stacked), devices)
    wanted = [copies[x] if x in copies else jax.device_put(first, x) for x in devices]
    whole = one_array(wanted, rows_over(mesh_over(devices), _memory(wanted[0])))
    return Mirrored.of_whole(whole, len(devices), stacked=total.is_stacked)


def spread_out(value: DistributedValues) -> tuple[Mesh, Spread] | None:
    """The value as one array over its devices, and these; None if not each replica has
    an array of the same kind on a device of its own, or if what is done here becomes
    part of a program, which knows by itself where things are. Cost: no copy but of
    scalars."""
    if value.replicas < 2 or is_staging():
        return None
    whole = value.whole
    if is_concrete(whole) and _is_addable(whole):
        mesh = mesh_of(places(whole), value.replicas)
        if mesh is not None and _lies_so(whole, mesh):
            return mesh, Spread(whole, value.is_stacked)
    return _joined(value.values)


def _joined(parts: Sequence[Any]) -> tuple[Mesh, Spread] | None:
    if not all(is_concrete(part) and _is_addable(part) for part in parts):
        return None
    devices = [device for part in parts for device in part.devices()]
    kinds = {(part.shape, part.dtype, part.sharding.memory_kind) for part in parts}
    platforms = {device.platform for device in devices}
    if len(kinds) > 1 or len(platforms) > 1:
        return None
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
    return (mesh, Spread(array, is_scalar)) if _lies_so(array, mesh) else None


def _memory(array: jax.Array) -> str | None:
    return array.sharding.memory_kind


def _lies_so(whole: jax.Array, mesh: Mesh) -> bool:
    """Whether each device has the rows of its replica, in the memory that it computes
    with."""
    return bool(whole.sharding.is_equivalent_to(rows_over(mesh), whole.ndim))


def _is_addable(array: jax.Array) -> bool:
    """Whether it has numbers, of a kind that collectives know: not keys of random
    numbers, nor float8 or int4."""
    dtype = array.dtype
    if not array.size or jnp.issubdtype(dtype, jax.dtypes.extended):
        return False
    return dtype.kind in "biufc" or dtype == jnp.bfloat16


def _reduced(
    arrays: Sequence[jax.Array], mesh: Mesh, stacked: tuple[bool, ...], mean: bool
) -> list[jax.Array]:
    """Adds up arrays of which each device has its replica's part; each device gets the
    sum or the mean."""
    team = Team(mesh.size)

    def on_each(_: Any, __: Any, parts: Sequence[jax.Array]) -> tuple[Any, Any]:
        return team.all_reduce(parts, mean=mean), ()

    mine = [Spread(array, flag) for array, flag in zip(arrays, stacked, strict=True)]
    found, _ = mapped_over(on_each, team.local, mesh, mine)((), ())
    return [each.array for each in found]


reduced: Final[Any] = functools.partial(jax.jit, static_argnums=(1, 2, 3))(_reduced)
