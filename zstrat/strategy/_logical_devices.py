"""The logical devices of each replica, and the layout of values over them.

Replicas and logical devices are the axes of one mesh. A replica function is mapped over
the axis of the replicas explicitly; along the other axes XLA decides the layout of the
program, from annotations of some values, which do not change the values. An annotation
is always checked, but has an effect only where a replica is being traced.

A split ``[1, 2, 4]`` over 8 logical devices divides the array into 8 tiles, which are
placed on the devices row by row: tile ``(0, i, j)`` to number ``4 i + j``. In a mesh
the devices have axes, and a dimension of an array is split over some of these. So the
devices of a replica get one axis for each prime factor of their number, and each
dimension is split over consecutive axes.

If the number has several prime factors, one order of the axes does not fit all splits:
with 6 devices ``[2, 3]`` needs axes of 2 and 3, and ``[3, 2]`` of 3 and 2. A split for
which consecutive axes do not fit uses axes in another order: the same tiles are on
other devices, which does not change the values.
"""

from __future__ import annotations

import math
import operator
from typing import TYPE_CHECKING, Any, Final, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zstrat.variables import AbstractVariable

from .replica._collective import AXIS

if TYPE_CHECKING:
    from collections.abc import Sequence


# jax's stubs leave these untyped.
_spec: Final[Any] = PartitionSpec


_sharding: Final[Any] = NamedSharding


_constrained: Final[Any] = jax.lax.with_sharding_constraint


def logical_axes(count: int) -> tuple[str, ...]:
    """Returns the names of the mesh axes of ``count`` logical devices, which follow the
    axis of the replicas."""
    return tuple(f"logical_{n}" for n in range(len(axes_for(count))))


@final
class LogicalDevices:
    """The devices ``[replicas, logical devices]`` of a strategy.

    Args:
        devices: An array of `jax.Device`.
        is_spmd: Whether assigning a value to one logical device is an error.
    """

    def __init__(self, devices: np.ndarray, *, is_spmd: bool = False) -> None:
        self.devices = devices
        self.replicas: int = devices.shape[0]
        self.count: int = devices.shape[1]
        self._is_spmd = is_spmd
        grid = devices.reshape(self.replicas, *axes_for(self.count))
        self.mesh = Mesh(grid, (AXIS, *logical_axes(self.count)))

    @property
    def grid(self) -> np.ndarray:
        """The devices in the shape of the mesh: ``[replicas, prime, prime, ...]``."""
        result: np.ndarray = self.mesh.devices
        return result

    def require_number(self, logical_device_id: int) -> int:
        """Checks and returns the number of a logical device.

        Raises:
            TypeError: The number is not an integer.
            ValueError: There is no device of that number.
        """
        logical_device_id = operator.index(logical_device_id)
        if not 0 <= logical_device_id < self.count:
            raise ValueError(
                "`logical_core_id` to assign must be lower then total number of "
                f"logical devices per replica. Received logical device id "
                f"{logical_device_id} but there are only total of {self.count} logical "
                "devices in replica."
            )
        return logical_device_id

    def assigned(self, tensor: Any, logical_device_id: int) -> Any:
        """Places the whole tensor on that logical device (and on the others).

        Raises:
            ValueError: The devices are in SPMD mode, or there is no such logical
                device.
        """
        if self._is_spmd:
            raise ValueError(
                "Cannot assign a tensor to a logical device in SPMD mode. To disable "
                "SPMD, Please construct the TPUStrategy with "
                "`experimental_spmd_xla_partitioning=False`"
            )
        number = self.require_number(logical_device_id)
        return self._laid(tensor, (), f"assigned_to_logical_device_{number}")

    def replicated(self, tensor: Any) -> Any:
        """Places the whole tensor on all logical devices."""
        return self._laid(tensor, (), "replicated_to_logical_devices")

    def split(self, tensor: Any, partition_dimensions: Any) -> Any:
        """Places a tile of the tensor on each logical device.

        Raises:
            ValueError: See `require_split`.
        """
        split = require_split(np.shape(tensor), partition_dimensions, self.count)
        return self._laid(tensor, split, "split_to_logical_devices")

    def _laid(self, tensor: Any, split: Sequence[int], name: str) -> Any:
        if isinstance(tensor, AbstractVariable):
            tensor = tensor.value()
        sharding = self._where(tensor, split)
        if sharding is None:
            return tensor
        # The name is kept in the program that XLA is given.
        with jax.named_scope(name):
            return _constrained(jnp.asarray(tensor), sharding)

    def _where(self, tensor: Any, split: Sequence[int]) -> Any:
        """Returns the jax sharding of a tensor for a split; None if the code is not in
        a trace that lays out values."""
        if self.count == 1:
            return None
        mapped = jax.sharding.get_abstract_mesh()
        names = [name for name in mapped.axis_names if name != AXIS]
        if names == list(logical_axes(self.count)):
            extents = [mapped.shape[name] for name in names]
            return _named(extents, split)
        if self.replicas == 1 and isinstance(tensor, jax.core.Tracer):
            # Nothing is mapped over one replica. A mesh that suits the split would have
            # its tiles row by row always; but where values of this mesh meet a layout
            # of that one, jax finds no name for it and refuses the program.
            return _sharding(self.mesh, _named(axes_for(self.count), split))
        return None


def _named(extents: Sequence[int], split: Sequence[int]) -> Any:
    names = [f"logical_{n}" for n in range(len(extents))]
    return _spec(
        *(tuple(names[n] for n in axes) or None for axes in axes_of(extents, split))
    )


def require_split(
    shape: Sequence[int], partition_dimensions: Any, count: int
) -> tuple[int, ...]:
    """Checks and returns the split of an array of this shape over ``count`` logical
    devices.

    Raises:
        ValueError: ``partition_dimensions`` is not a list of positive integers, one for
            each dimension; an entry does not divide its dimension; or the number of
            tiles is not that of devices. Checked in this order.
    """
    splits = _integers(partition_dimensions)
    if len(splits) != len(shape):
        raise ValueError(
            "Length of `partition_dimensions` must equal to the rank of `tensor.shape` "
            f"({len(shape)}). Got {len(splits)}: {list(splits)}"
        )
    for axis, (size, parts) in enumerate(zip(shape, splits, strict=True)):
        if size % parts:
            raise ValueError(
                f"Tensor shape at partition_dimensions[{axis}] must be divisible by "
                "corresponding value specified by `partition_dimensions` "
                f"({parts}). Got: {size} of the shape {list(shape)}"
            )
    if math.prod(splits) != count:
        raise ValueError(
            "The product of `partition_dimensions` should be the same as the number of "
            f"logical devices (={count}). Got `partition_dimensions`={list(splits)}, "
            f"and their product is {math.prod(splits)}"
        )
    return splits


def axes_for(count: int) -> tuple[int, ...]:
    """Returns the sizes of the mesh axes of ``count`` logical devices: the prime
    factors of the number."""
    return tuple(_primes(count))


def axes_of(extents: Sequence[int], split: Sequence[int]) -> list[tuple[int, ...]]:
    """Returns, for each dimension of the split, the numbers of the axes over which it
    is split."""
    in_row = _in_row(extents, split)
    return _anyhow(extents, split) if in_row is None else in_row


def _in_row(
    extents: Sequence[int], split: Sequence[int]
) -> list[tuple[int, ...]] | None:
    """Assigns consecutive axes to the dimensions; None if their sizes do not fit the
    split."""
    result, axis = [], 0
    for parts in split:
        first, taken = axis, 1
        while taken < parts and axis < len(extents):
            taken *= extents[axis]
            axis += 1
        if taken != parts:
            return None
        result.append(tuple(range(first, axis)))
    return result


def _anyhow(extents: Sequence[int], split: Sequence[int]) -> list[tuple[int, ...]]:
    left, result = list(range(len(extents))), []
    for parts in split:
        axes = []
        for prime in _primes(parts):
            axes.append(next(axis for axis in left if extents[axis] == prime))
            left.remove(axes[-1])
        result.append(tuple(axes))
    return result


def _primes(number: int) -> list[int]:
    result, prime = [], 2
    while number > 1:
        while number % prime:
            prime += 1
        result.append(prime)
        number //= prime
    return result


def _integers(given: Any) -> tuple[int, ...]:
    is_list = isinstance(given, list | tuple)
    if not is_list or not all(_is_positive(n) for n in given):
        raise ValueError(
            "`partition_dimensions` must be an unnested list of positive integers, got "
            f"{given!r}"
        )
    return tuple(int(n) for n in given)


def _is_positive(number: Any) -> bool:
    is_integer = isinstance(number, int | np.integer) and number is not True
    return is_integer and bool(number > 0)
