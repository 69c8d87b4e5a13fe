"""Arrays of which each replica has its part, and a function mapped over the replicas.

Law of the file: a part stays where its replica is; nothing here brings parts together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zstrat.program.stages import within_mesh

from ._collective import AXIS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from jax.sharding import Sharding

# jax's stubs leave these untyped.
_spec: Final[Any] = PartitionSpec
_sharding: Final[Any] = NamedSharding


def mesh_over(devices: Sequence[jax.Device]) -> Mesh:
    """These devices, one for each replica."""
    return Mesh(np.array(devices), (AXIS,))


def rows_over(mesh: Mesh, memory: str | None = None) -> Sharding:
    """That of arrays of which each device has the rows of its replica.

    Args:
        memory: In which kind of memory (``"pinned_host"``, say); left out: the usual.
    """
    found: Sharding = _sharding(mesh, _spec(AXIS), memory_kind=memory)
    return found


def one_array(parts: Sequence[jax.Array], rows: Sharding) -> jax.Array:
    """The array whose rows are those of the parts, which lie where ``rows`` has them:
    nothing is copied."""
    count, *rest = parts[0].shape
    shape = (count * len(parts), *rest)
    return jax.make_array_from_single_device_arrays(shape, rows, list(parts))


def mesh_of(devices: Sequence[jax.Device], count: int) -> Mesh | None:
    """The first devices, one for each replica; None if there are fewer."""
    if len(devices) < count:
        return None
    return mesh_over(devices[:count])


@dataclass(frozen=True, slots=True)
class Spread:
    """An array of which each replica has its part. A leaf.

    ``array`` is ``[count * n, ...]``, replica i's part being the rows from ``i * n``
    on; or, if it is ``stacked``, ``[count, ...]``, and replica i's part ``array[i]``.
    """

    array: Any
    stacked: bool = False


def mapped_over(
    one: Callable[..., Any],
    count: int,
    mesh: Mesh | None,
    mine: Sequence[Spread],
) -> Callable[..., Any]:
    """``one`` over all replicas, with these arrays of their own: outputs spread, update
    operands as they are (they are equal on every replica)."""
    is_nested = within_mesh.get()
    scalars: list[bool] = []

    def noted(outputs: Any) -> Any:
        arrays, operands = outputs
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
            )(values, shared, [by_replica(x, count) for x in mine])
            joined = [
                x if flag else x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])
                for x, flag in zip(arrays, scalars, strict=True)
            ]
            return spread(joined), operands

        return on_one_device

    def body(values: Any, shared: Any, own: Any) -> Any:
        parts = [x[0] if y.stacked else x for x, y in zip(own, mine, strict=True)]
        arrays, operands = noted(one(values, shared, parts))
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
        arrays, operands = over(values, shared, [x.array for x in mine])
        return spread(arrays), operands

    return on_devices


def by_replica(value: Spread, count: int) -> Any:
    """``[count, ...]``, a row for each replica."""
    array = value.array
    if value.stacked:
        return array
    return array.reshape(count, array.shape[0] // count, *array.shape[1:])
