"""How the values of the local devices of one process are brought together: TF's faces.

XLA reduces inside of steps; these are what TF's programs name when they make a
strategy, and what they call to reduce values outside of steps. Values are packed as TF
does it, so that few large arrays travel in place of many small ones.

Law of the file: the result is the same whichever class it comes from, and that of
``strategy.reduce``, up to the order in which numbers are added. What numpy holds on all
replicas is reduced by numpy, and narrowed by nobody.
"""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, Any, final

import jax
import jax.numpy as jnp
import numpy as np

from zstrat.collectives import ReduceOp
from zstrat.program._collective import summable
from zstrat.program._narrow import is_narrowed
from zstrat.variables import IndexedSlices

from ._devices import device_named, task_names
from ._packs import Packed, by_dtype
from ._per_replica import DistributedValues, Mirrored
from ._places import places, put
from ._values import (
    as_array,
    computable,
    is_whole,
    reduce_slices,
    reduce_values,
    reduction,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    Pairs = Sequence[tuple[Any, Any]]


class CrossDeviceOps(abc.ABC):
    """Base of what reduces values of several devices; write the two hooks.

    ``num_packs``: into how many arrays a batch of values is packed; 0 for none.
    """

    num_packs = 0

    def reduce(
        self,
        reduce_op: ReduceOp | str,
        per_replica_value: Any,
        destinations: Any,
        options: object = None,
    ) -> Any:
        """One value of the replicas' values.

        Args:
            destinations: Where it is wanted: a value per replica or a variable (where
                it lives), an array, or TF's name of a device. `Mirrored`, if that is
                on several devices.

        Raises:
            ValueError: ``destinations`` is none of these, or there is no value.
            TypeError: The value is no array.
        """
        return self.batch_reduce(
            reduce_op, [(per_replica_value, destinations)], options
        )[0]

    def batch_reduce(
        self,
        reduce_op: ReduceOp | str,
        value_destination_pairs: Pairs,
        options: object = None,
    ) -> list[Any]:
        """`reduce` of several values, in order; dense ones go together.

        Raises:
            ValueError: As `reduce`, or what is given is no list of pairs.
            TypeError: As `reduce`.
        """
        del options
        op = reduction(reduce_op)
        values, where = [], []
        for value, destination in checked_pairs(value_destination_pairs):
            where.append(places(destination))
            values.append(_parts(value, op))
        sparse = [any(isinstance(x, IndexedSlices) for x in parts) for parts in values]
        dense = [
            v for v, is_sparse in zip(values, sparse, strict=True) if not is_sparse
        ]
        reduced = iter(self._reduce_dense(op, dense))
        found = [
            reduce_slices(op, parts) if is_sparse else next(reduced)
            for parts, is_sparse in zip(values, sparse, strict=True)
        ]
        return [put(*pair) for pair in zip(found, where, strict=True)]

    def reduced(
        self, op: ReduceOp, pairs: Pairs, replicas: int, options: object = None
    ) -> list[Any]:
        """`batch_reduce` of pytrees, of which leaves that are not distributed are the
        same on all replicas.

        Raises:
            ValueError: As `reduce`, or such a leaf is to be summed over several
                replicas.
        """
        found: list[Any] = []
        wanted: list[tuple[int, int]] = []
        batch: list[tuple[Any, Any]] = []
        for number, (value, destination) in enumerate(pairs):
            places(destination)  # refuses what is none
            leaves, treedef = jax.tree.flatten(value, is_leaf=is_whole)
            found.append((leaves, treedef))
            for place, leaf in enumerate(leaves):
                if isinstance(leaf, DistributedValues):
                    wanted.append((number, place))
                    batch.append((leaf, destination))
                else:
                    same = reduce_values(op, leaf, None, replicas)
                    leaves[place] = self.broadcast(same, destination)
        reduced = self.batch_reduce(op, batch, options)
        for (number, place), value in zip(wanted, reduced, strict=True):
            found[number][0][place] = value
        return [treedef.unflatten(leaves) for leaves, treedef in found]

    def broadcast(self, tensor: Any, destinations: Any) -> Any:
        """The value where it is wanted: for a value per replica one for each.

        Raises:
            ValueError: ``destinations`` is no place.
        """
        return self.broadcast_implementation(tensor, destinations)

    @abc.abstractmethod
    def reduce_implementation(self, op: ReduceOp, parts: Sequence[jax.Array]) -> Any:
        """The sum or mean of arrays of one shape and dtype, one for each replica, where
        they lie. Their dtype holds the sum: booleans came to be integers, and for a
        mean narrow integers wider ones."""

    def broadcast_implementation(self, tensor: Any, destinations: Any) -> Any:
        """See `broadcast`."""
        placed = put(tensor, places(destinations))
        if isinstance(destinations, DistributedValues) and placed is tensor:
            return Mirrored((tensor,) * destinations.replicas)
        return placed

    def _reduce_dense(
        self, op: ReduceOp, values: Sequence[Sequence[Any]]
    ) -> list[jax.Array]:
        if not values or self.num_packs == 0:
            return [self.reduce_implementation(op, parts) for parts in values]
        found: dict[int, jax.Array] = {}
        for numbers in by_dtype(values):
            packed = Packed.of([values[n] for n in numbers], self.num_packs)
            reduced = [self.reduce_implementation(op, x) for x in packed.packs]
            found.update(zip(numbers, packed.unpacked(reduced), strict=True))
        return [found[n] for n in range(len(values))]


@final
class ReductionToOneDevice(CrossDeviceOps):
    """Copies all values to one device and reduces them there.

    Args:
        reduce_to_device: TF's name of a device of this process, or a device, or its
            number among the local ones; left out: that of the first value.
        accumulation_fn: Sums a list of arrays; left out: addition.

    Raises:
        ValueError: There is no such device in this process; says which ones there are.
    """

    def __init__(
        self,
        reduce_to_device: str | jax.Device | int | None = None,
        accumulation_fn: Callable[[list[jax.Array]], jax.Array] | None = None,
    ) -> None:
        self.reduce_to_device = _chosen(reduce_to_device)
        self.accumulation_fn = accumulation_fn or _added

    def reduce_implementation(self, op: ReduceOp, parts: Sequence[jax.Array]) -> Any:
        device = self.reduce_to_device
        if device is None or any(map(is_narrowed, parts)):
            here = computable(parts)
        else:
            here = [jax.device_put(part, device) for part in parts]
        total = self.accumulation_fn(here)
        return total if op is ReduceOp.SUM else total / len(parts)


class _AllReduce(CrossDeviceOps):
    """Leaves the reduction to XLA, in one program for all the devices."""

    def __init__(self, num_packs: int = 1) -> None:
        if num_packs < 0:
            raise ValueError(
                f"NCCL all-reduce requires num_packs >= 0, but {num_packs} is given"
            )
        self.num_packs = num_packs

    def reduce_implementation(self, op: ReduceOp, parts: Sequence[jax.Array]) -> Any:
        there = computable(parts)
        of = jnp if any(isinstance(part, jax.Array) for part in there) else np
        stacked = of.stack(there)
        total = stacked.sum(0, dtype=stacked.dtype)
        return total if op is ReduceOp.SUM else total / len(parts)


@final
class NcclAllReduce(_AllReduce):
    """An all-reduce by XLA, which is NCCL's on GPUs.

    Args:
        num_packs: Of how many arrays a batch of values is made; 0 leaves it as it is.

    Raises:
        ValueError: It is negative.
    """


@final
class HierarchicalCopyAllReduce(_AllReduce):
    """An all-reduce by XLA, which knows how the devices hang together.

    Args:
        num_packs: Of how many arrays a batch of values is made; 0 leaves it as it is.

    Raises:
        ValueError: It is negative.
    """


def _chosen(device: str | jax.Device | int | None) -> jax.Device | None:
    if device is None:
        return None
    if not isinstance(device, int):
        return device_named(device)
    there = jax.local_devices()
    if not 0 <= device < len(there):
        raise ValueError(
            f"there is no device {device} in this process; there are "
            f"{', '.join(task_names(there))}, counted from 0"
        )
    return there[device]


def _added(arrays: list[jax.Array]) -> jax.Array:
    return sum(arrays[1:], start=arrays[0])


def checked_pairs(pairs: Pairs) -> Pairs:
    """The pairs, if they are.

    Raises:
        ValueError: They are no list of pairs.
    """
    if not isinstance(pairs, list | tuple) or any(
        not isinstance(pair, list | tuple) or len(pair) != 2 for pair in pairs
    ):
        raise ValueError(
            "`value_destination_pairs` must be a list or a tuple of tuples of a value "
            "and its destination"
        )
    return pairs


def _parts(value: Any, op: ReduceOp) -> list[Any]:
    """One for each replica; a value that is not distributed is that of one device."""
    parts: tuple[Any, ...] = (value,)
    if isinstance(value, DistributedValues):
        if not value.replicas:
            raise ValueError("`per_replica_value` must be non-empty")
        parts = value.values
        _require_alike(parts)
    if isinstance(parts[0], IndexedSlices):
        return list(parts)
    arrays = [as_array(part) for part in parts]
    for part, array in zip(parts, arrays, strict=True):
        if array.dtype == object:
            raise TypeError(
                f"`per_replica_value` is a {type(part).__name__}: expected arrays; "
                "give each array of a container by itself (batch_reduce)"
            )
    return [summable(array, mean=op is ReduceOp.MEAN) for array in arrays]


def _require_alike(parts: Sequence[Any]) -> None:
    """Refuses what would be added to something else than to its like."""
    sparse = {isinstance(part, IndexedSlices) for part in parts}
    if len(sparse) > 1:
        raise ValueError(
            "`per_replica_value` is IndexedSlices on some replicas and an array on "
            "others: make it the same kind on all of them"
        )
    shapes = [] if True in sparse else [np.shape(part) for part in parts]
    if len(set(shapes)) > 1:
        raise ValueError(
            f"`per_replica_value` has different shapes on the replicas, {shapes}: "
            "reduce each of them along its axis first"
        )
