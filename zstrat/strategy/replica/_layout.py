"""Places the values of the replicas of one process on its devices.

The parts of all replicas are one array over the devices, where possible: programs take
it as it is, without another copy.

Law of the file: on a CPU, where jax may use the memory of numpy as it is, an array of a
user is copied first, and jax gets the copy.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from zstrat.data import native
from zstrat.memory import ALIGNMENT
from zstrat.program.trace import fits
from zstrat.transport import POOL
from zstrat.variables import is_weak

from ._collective import AXIS
from ._mapped import one_array
from ._one_program import is_known
from ._per_replica import PerReplica, on_one_device

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jax.sharding import Mesh

    from zstrat.strategy.input._replica_batches import Share


class MeshLayout:
    """Places the values of replicas on a mesh: one value at each index of its first
    axis.

    Args:
        mesh: ``[replicas, ...]``; the devices of one replica are all that follow.
    """

    def __init__(self, mesh: Mesh) -> None:
        grid = mesh.devices
        self.devices: tuple[jax.Device, ...] = tuple(grid.reshape(len(grid), -1)[:, 0])
        """The first one of each replica."""
        self._has_several = mesh.size > len(grid)
        self.rows: Any = SingleDeviceSharding(self.devices[0])
        """The sharding of an array ``[replicas * n, ...]``: n rows to each replica in
        turn."""
        if mesh.size > 1:
            made: Any = NamedSharding  # these two are untyped
            spec: Any = PartitionSpec
            # One replica has all rows, also of arrays without rows.
            self.rows = made(mesh, spec(AXIS) if len(grid) > 1 else spec())

    @property
    def replicas(self) -> int:
        return len(self.devices)

    def place(self, parts: Sequence[Any], *, is_fresh: bool = False) -> Any:
        """Puts the pytrees of all replicas on their devices, as one.

        Args:
            parts: One pytree of arrays for each replica.
            is_fresh: Nothing else uses their memory, or writes to it.

        Returns:
            A pytree of `PerReplica`: of one array over the devices where the parts have
            one shape and dtype, else of the parts as they are. With one replica its own
            pytree, on its device.

        Raises:
            ValueError: The pytrees differ in their structure.
        """
        if self.replicas == 1:
            return jax.tree.map(lambda array: self._put(array, is_fresh), parts[0])
        # Not `regroup`: to jax None is structure, as in the rows of a batch.
        return jax.tree.map(lambda *leaves: self.placed(leaves, is_fresh), *parts)

    def place_batch(self, batch: Any, *, is_fresh: bool = False) -> Any:
        """Puts one pytree of arrays ``[replicas * n, ...]`` on the devices. Its rows
        are distributed in order: replica i gets those from ``i * n`` on.

        Args:
            is_fresh: As in `place`.

        Raises:
            ValueError: The rows of an array do not split evenly.
        """
        if self.replicas == 1:
            return jax.tree.map(lambda array: self._put(array, is_fresh), batch)
        return jax.tree.map(lambda array: self._distributed(array, is_fresh), batch)

    def _distributed(self, array: Any, is_fresh: bool) -> PerReplica:
        if is_known(array):
            return PerReplica.of_whole(self._put(array, is_fresh), self.replicas)
        return PerReplica(np.split(array, self.replicas))  # text stays here

    def place_share(self, share: Share) -> Any:
        """Puts what the replicas draw in one step on their devices; as a whole if it
        splits evenly."""
        POOL.age(time.monotonic())
        whole = share.whole
        if whole is None:
            return self.place(share.parts, is_fresh=share.is_fresh)
        return self.place_batch(whole, is_fresh=share.is_fresh)

    def _put(self, array: Any, is_fresh: bool = False) -> Any:
        """Puts the array on the devices. Text and dates, which they do not know, stay
        on the host. So do integers of 64 bits that jax would cut: a program that
        computes ids of rows from them refuses them."""
        if not is_known(array):
            return array
        if isinstance(array, np.ndarray):
            array = native(array)
        if not fits(array):
            return np.array(array)
        own = self._own(array, is_fresh)
        placed: jax.Array
        if isinstance(own, np.ndarray) and self.replicas > 1:
            # The same as below, with less overhead.
            slices = own.__getitem__
            placed = jax.make_array_from_callback(own.shape, self.rows, slices)
        else:
            placed = jax.device_put(own, self.rows)
        return placed

    def _own(self, array: Any, is_fresh: bool) -> Any:
        """Copies an array of numpy where jax would use its memory as it is: its owner
        may fill it again. The copy is aligned for jax, in memory that is reused when
        its arrays are gone: touching fresh pages for each batch takes longer than
        copying it. A fresh, aligned array is not copied."""
        if isinstance(array, jax.Array) or self.devices[0].platform != "cpu":
            return array
        source = np.asarray(array)
        if is_fresh and source.ctypes.data % ALIGNMENT == 0:
            return source
        copy = POOL.empty(source.shape, source.dtype)
        np.copyto(copy, source)
        return copy

    def placed(self, parts: Sequence[Any], is_fresh: bool = False) -> PerReplica:
        """Puts an array for each replica on the devices: one leaf of `place`."""
        arrays = [
            part if isinstance(part, jax.Array) else native(np.asarray(part))
            for part in parts
        ]
        kinds = {(array.shape, array.dtype) for array in arrays}
        if len(kinds) > 1 or not is_known(arrays[0]):
            return PerReplica(parts)
        is_scalar = arrays[0].ndim == 0
        is_key = jnp.issubdtype(arrays[0].dtype, jax.dtypes.prng_key)
        if all(map(is_weak, arrays)) or (is_scalar and is_key):
            join = jnp.stack if is_scalar else jnp.concatenate
            whole = self._put(join(on_one_device(arrays)))
            return PerReplica.of_whole(whole, self.replicas, stacked=is_scalar)
        if is_scalar:
            whole = self._put(np.stack([np.asarray(array) for array in arrays]))
            return PerReplica.of_whole(whole, self.replicas, stacked=True)
        if self._has_several:
            joined = self._put(np.concatenate(arrays))
            return PerReplica.of_whole(joined, self.replicas)
        if not all(map(fits, arrays)):
            return PerReplica.of_whole(np.concatenate(arrays), self.replicas)
        own = [self._own(array, is_fresh) for array in arrays]
        there = jax.device_put(own, list(self.devices))
        return PerReplica.of_whole(self.joined(there), self.replicas)

    def joined(self, arrays: Sequence[jax.Array]) -> jax.Array:
        """Makes one array of those that are on the devices, without a copy."""
        return one_array(arrays, self.rows)
