"""The logical devices of each replica, and how values are laid over them.

Replicas and logical devices are the axes of one mesh. A replica function is mapped over
the axis of the replicas by hand; along the others XLA lays out the program by itself,
from what it is told of some values: that is an annotation. It changes no value. Law of
the file: an annotation is checked wherever it is made, and laid down only where a
replica is being traced.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any, Final, final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from zstrat.variables import AbstractVariable

from ._logical_splits import axes_for, axes_of, require_split
from .replica._collective import AXIS

if TYPE_CHECKING:
    from collections.abc import Sequence

# jax's stubs leave these untyped.
_spec: Final[Any] = PartitionSpec
_sharding: Final[Any] = NamedSharding
_constrained: Final[Any] = jax.lax.with_sharding_constraint


def logical_axes(count: int) -> tuple[str, ...]:
    """Names of the axes that ``count`` logical devices have behind that of replicas."""
    return tuple(f"logical_{n}" for n in range(len(axes_for(count))))


@final
class LogicalDevices:
    """The devices ``[replicas, logical devices]`` of a strategy.

    Args:
        devices: An array of `jax.Device`.
        is_spmd: Whether no value may be assigned to one logical device.
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
        """The devices as the mesh has them: ``[replicas, prime, prime, ...]``."""
        found: np.ndarray = self.mesh.devices
        return found

    def require_number(self, logical_device_id: int) -> int:
        """A number of a logical device.

        Raises:
            TypeError: It is no integer.
            ValueError: There is none with it.
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
        """The tensor, whole on that logical device (and on the others).

        Raises:
            ValueError: In SPMD mode, or there is no such logical device.
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
        """The tensor, whole on all logical devices."""
        return self._laid(tensor, (), "replicated_to_logical_devices")

    def split(self, tensor: Any, partition_dimensions: Any) -> Any:
        """The tensor, a tile on each logical device.

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
        """How to lay it, as jax is told there; None where nothing is laid down."""
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
