"""Reductions over the local devices of one process, with the hooks of TF.

XLA reduces inside of steps; outside of steps ``strategy.extended`` calls these classes.
As in TF, a user may write a class with the hooks and pass it to the strategy. The file
also has TF's classes.

Laws of the file. Arguments are checked before a hook is called; a hook decides how to
reduce, and its return value is the result. All classes of zstrat, and
``strategy.reduce``, give the same result, up to the order in which numbers are added.
Arrays of numpy on all replicas are reduced by numpy, and not downcast.
"""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, Any, final

import jax

from zstrat.collectives import ReduceOp
from zstrat.program.trace import is_integer_downcast
from zstrat.strategy._devices import device_named, task_names
from zstrat.strategy._options import CommunicationOptions
from zstrat.strategy.replica._columns import is_sparse, require_alike, summable
from zstrat.strategy.replica._per_replica import DistributedValues, PerReplica

from ._on_devices import all_reduced, at, for_each, places, put
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

    from zstrat.strategy.replica._columns import Column

    Pairs = Sequence[tuple[Any, Any]]


class CrossDeviceOps(abc.ABC):
    """Base of classes that reduce values of several devices. Subclasses define
    `reduce_implementation`, and may override the other two hooks to do several values
    at once."""

    def reduce(
        self,
        reduce_op: ReduceOp | str,
        per_replica_value: Any,
        destinations: Any,
        options: object = None,
    ) -> Any:
        """Reduces the values of the replicas to one.

        Args:
            destinations: Where to put the result: on the devices of a value per
                replica, of a variable, or of an array, or on the device of a TF name.
                The result is `Mirrored` if these are several devices, or if the
                destination is a value of several replicas: then it has one value for
                each.
            options: `CommunicationOptions` for the hook; default: the default options.

        Raises:
            ValueError: ``destinations`` is not one of these, or there is no value.
            TypeError: The value is not an array.
        """
        op = reduction(reduce_op)
        places(destinations)  # refuses an unknown destination
        return self.reduce_implementation(
            op, _per_replica(per_replica_value), destinations, _options(options)
        )

    def batch_reduce(
        self,
        reduce_op: ReduceOp | str,
        value_destination_pairs: Pairs,
        options: object = None,
    ) -> list[Any]:
        """Reduces several values as `reduce` does; returns the results in order. Dense
        values are reduced together.

        Raises:
            ValueError: As `reduce`, or the argument is not a list of pairs.
            TypeError: As `reduce`.
        """
        op = reduction(reduce_op)
        pairs = []
        for value, destination in checked_pairs(value_destination_pairs):
            places(destination)  # refuses an unknown destination
            pairs.append((_per_replica(value), destination))
        return list(self.batch_reduce_implementation(op, pairs, _options(options)))

    def reduced(
        self, op: ReduceOp, pairs: Pairs, replicas: int, options: object = None
    ) -> list[Any]:
        """Reduces pytrees as `batch_reduce` does. Leaves that are not distributed count
        as equal on all replicas.

        Raises:
            ValueError: As `reduce`, or a leaf that is not distributed is to be summed
                over several replicas.
        """
        trees: list[Any] = []
        # Where each value of the batch goes: number of the pair, number of the leaf.
        wanted: list[tuple[int, int]] = []
        batch: list[tuple[Any, Any]] = []
        for number, (value, destination) in enumerate(pairs):
            places(destination)  # refuses an unknown destination
            leaves, treedef = jax.tree.flatten(value, is_leaf=is_whole)
            trees.append((leaves, treedef))
            for index, leaf in enumerate(leaves):
                if isinstance(leaf, DistributedValues):
                    wanted.append((number, index))
                    batch.append((leaf, destination))
                else:
                    same = reduce_values(op, leaf, None, replicas)
                    leaves[index] = self.broadcast(same, destination)
        if len(batch) == 1:  # which TF gives to the hook for one value
            reduced = [self.reduce(op, *batch[0], options)]
        else:
            reduced = self.batch_reduce(op, batch, options) if batch else []
        for (number, index), value in zip(wanted, reduced, strict=True):
            trees[number][0][index] = value
        return [treedef.unflatten(leaves) for leaves, treedef in trees]

    def broadcast(self, tensor: Any, destinations: Any) -> Any:
        """Copies a value to a destination; to a value per replica as the destination,
        one copy for each replica.

        Raises:
            ValueError: ``destinations`` is not a destination.
        """
        places(destinations)  # refuses an unknown destination
        return self.broadcast_implementation(tensor, destinations)

    @abc.abstractmethod
    def reduce_implementation(
        self,
        reduce_op: ReduceOp,
        per_replica_value: DistributedValues,
        destinations: Any,
        options: Any,
    ) -> Any:
        """Reduces one value: the hook of `reduce`.

        Args:
            reduce_op: SUM or MEAN.
            per_replica_value: Arrays or `IndexedSlices`, one for each replica, on their
                devices; only one for a value that was not distributed.
            options: `CommunicationOptions`.
        """

    def batch_reduce_implementation(
        self, reduce_op: ReduceOp, value_destination_pairs: Pairs, options: Any
    ) -> list[Any]:
        """Reduces several values: the hook of `batch_reduce`. By default it calls
        `reduce_implementation` for each value."""
        return [
            self.reduce_implementation(reduce_op, value, destination, options)
            for value, destination in value_destination_pairs
        ]

    def broadcast_implementation(self, tensor: Any, destinations: Any) -> Any:
        """Copies a value: the hook of `broadcast`."""
        return for_each(put(tensor, places(destinations)), destinations)


def checked_pairs(pairs: Pairs) -> Pairs:
    """Checks and returns a list of pairs of values and destinations.

    Raises:
        ValueError: ``pairs`` is not a list of pairs.
    """
    if not isinstance(pairs, list | tuple) or any(
        not isinstance(pair, list | tuple) or len(pair) != 2 for pair in pairs
    ):
        raise ValueError(
            "`value_destination_pairs` must be a list or a tuple of tuples of a value "
            "and its destination"
        )
    return pairs


def _per_replica(value: Any) -> DistributedValues:
    """Returns a value per replica unchanged; any other value as the value of one
    replica."""
    if not isinstance(value, DistributedValues):
        return PerReplica((value,))
    if not value.replicas:
        raise ValueError(
            "`per_replica_value` must be non-empty: it has no value of any replica"
        )
    return value


def _options(options: object) -> object:
    return CommunicationOptions() if options is None else options


@final
class ReductionToOneDevice(CrossDeviceOps):
    """Copies all values to one device and reduces them there.

    Args:
        reduce_to_device: TF's name of a device of this process, or a device, or its
            number among the local ones; default: the device of the first value.
        accumulation_fn: Function that sums a list of arrays; default: addition.

    Raises:
        ValueError: There is no such device in this process; the error lists the
            devices.
    """

    def __init__(
        self,
        reduce_to_device: str | jax.Device | int | None = None,
        accumulation_fn: Callable[[list[jax.Array]], jax.Array] | None = None,
    ) -> None:
        self.reduce_to_device = _chosen(reduce_to_device)
        self.accumulation_fn = accumulation_fn or _added

    def reduce_implementation(
        self,
        reduce_op: ReduceOp,
        per_replica_value: DistributedValues,
        destinations: Any,
        options: Any,
    ) -> Any:
        parts = _parts(per_replica_value, reduce_op)
        if is_sparse(parts):
            total: Any = reduce_slices(reduce_op, parts)
        else:
            total = self.accumulation_fn(self._on_one_device(parts))
            if reduce_op is ReduceOp.MEAN:
                total = total / len(parts)
        return for_each(put(total, places(destinations)), destinations)

    def _on_one_device(self, parts: Column) -> list[Any]:
        device = self.reduce_to_device
        # jax would cut the integers, on any device.
        if device is None or any(map(is_integer_downcast, parts)):
            return computable(parts)
        return [jax.device_put(part, device) for part in parts]


class _AllReduce(CrossDeviceOps):
    """Base of reductions by XLA: one program for all devices, if the value of each
    replica is on a different device. Other values are reduced by
    `ReductionToOneDevice`."""

    def __init__(self, num_packs: int = 1) -> None:
        if num_packs < 0:
            raise ValueError(
                f"NCCL all-reduce requires num_packs >= 0, but {num_packs} is given"
            )
        self.num_packs = num_packs

    def reduce_implementation(
        self,
        reduce_op: ReduceOp,
        per_replica_value: DistributedValues,
        destinations: Any,
        options: Any,
    ) -> Any:
        pairs = [(per_replica_value, destinations)]
        return self.batch_reduce_implementation(reduce_op, pairs, options)[0]

    def batch_reduce_implementation(
        self, reduce_op: ReduceOp, value_destination_pairs: Pairs, options: Any
    ) -> list[Any]:
        pairs = value_destination_pairs
        totals = all_reduced(reduce_op, [value for value, _ in pairs])
        other = ReductionToOneDevice()
        return [
            for_each(at(totals[number], places(destination)), destination)
            if number in totals
            else other.reduce_implementation(reduce_op, value, destination, options)
            for number, (value, destination) in enumerate(pairs)
        ]


@final
class NcclAllReduce(_AllReduce):
    """Reduces by an all-reduce of XLA, which on GPUs is NCCL's.

    Values that `run` returned, and others whose parts are jax arrays on different
    devices, are reduced by one program on these devices; the result is then copied to
    the destination if that is elsewhere. `IndexedSlices` are concatenated, and all
    other values (numpy arrays, values in a step, several values on one device) are
    summed on the device of the first one.

    Args:
        num_packs: An argument of TF. Has no effect: XLA combines transfers itself.

    Raises:
        ValueError: ``num_packs`` is negative.
    """


@final
class HierarchicalCopyAllReduce(_AllReduce):
    """Reduces by an all-reduce of XLA, which knows how the devices are connected. It is
    the same as `NcclAllReduce`, under TF's other name.

    Args:
        num_packs: An argument of TF. Has no effect: XLA combines transfers itself.

    Raises:
        ValueError: ``num_packs`` is negative.
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


def _parts(value: DistributedValues, op: ReduceOp) -> list[Any]:
    """Returns the values of the replicas as arrays that can be added."""
    parts = value.values
    remedy = "reduce each of them along its axis first"
    require_alike("`per_replica_value`", parts, remedy)
    if is_sparse(parts):
        return list(parts)
    arrays = [as_array(part) for part in parts]
    for part, array in zip(parts, arrays, strict=True):
        if array.dtype == object:
            raise TypeError(
                f"`per_replica_value` is a {type(part).__name__}: expected arrays; "
                "give each array of a container by itself (batch_reduce)"
            )
    return [summable(array, mean=op is ReduceOp.MEAN) for array in arrays]
