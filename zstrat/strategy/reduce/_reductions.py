"""The reductions between local devices that TF has by name.

Values are packed as TF does it, so that few large arrays travel in place of many small
ones.

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
from zstrat.program.trace import is_narrowed
from zstrat.strategy._devices import device_named, task_names
from zstrat.strategy.replica._columns import (
    by_kind,
    is_sparse,
    require_alike,
    summable,
)

from ._all_reduced import all_reduced, at, in_packs
from ._cross_device import CrossDeviceOps
from ._places import for_each, places, put
from ._values import as_array, computable, reduce_slices

if TYPE_CHECKING:
    from collections.abc import Callable

    from zstrat.strategy.replica._columns import Column
    from zstrat.strategy.replica._per_replica import DistributedValues

    from ._cross_device import Pairs


class _InPacks(CrossDeviceOps):
    """What adds arrays of one shape and dtype.

    ``num_packs``: into how many arrays a batch of values is packed; 0 for none.
    """

    num_packs = 0

    @abc.abstractmethod
    def _total(self, parts: Column) -> Any:
        """The sum of arrays of one shape and dtype, one for each replica, where they
        lie. Their dtype holds the sum (`summable`)."""

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
        def reduced(parts: Column) -> Any:
            total = self._total(parts)
            return total if reduce_op is ReduceOp.SUM else total / len(parts)

        found: list[Any] = by_kind(
            [_parts(value, reduce_op) for value, _ in value_destination_pairs],
            is_sparse,
            lambda dense: in_packs(dense, self.num_packs, reduced),
            lambda sparse: [reduce_slices(reduce_op, parts) for parts in sparse],
        )
        return [
            for_each(put(value, places(destination)), destination)
            for value, (_, destination) in zip(
                found, value_destination_pairs, strict=True
            )
        ]


@final
class ReductionToOneDevice(_InPacks):
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

    def _total(self, parts: Column) -> Any:
        device = self.reduce_to_device
        if device is None or any(map(is_narrowed, parts)):
            here = computable(parts)
        else:
            here = [jax.device_put(part, device) for part in parts]
        return self.accumulation_fn(here)


class _AllReduce(_InPacks):
    """Leaves the reduction to XLA, in one program for all the devices, where each
    replica's value is on a device of its own. All else is brought together where the
    first value is, and summed there."""

    def __init__(self, num_packs: int = 1) -> None:
        if num_packs < 0:
            raise ValueError(
                f"NCCL all-reduce requires num_packs >= 0, but {num_packs} is given"
            )
        self.num_packs = num_packs

    def batch_reduce_implementation(
        self, reduce_op: ReduceOp, value_destination_pairs: Pairs, options: Any
    ) -> list[Any]:
        pairs = value_destination_pairs
        found = all_reduced(reduce_op, [value for value, _ in pairs], self.num_packs)
        rest = [pair for number, pair in enumerate(pairs) if number not in found]
        others = iter(super().batch_reduce_implementation(reduce_op, rest, options))
        return [
            for_each(at(found[number], places(destination)), destination)
            if number in found
            else next(others)
            for number, (_, destination) in enumerate(pairs)
        ]

    def _total(self, parts: Column) -> Any:
        there = computable(parts)
        of = jnp if any(isinstance(part, jax.Array) for part in there) else np
        stacked = of.stack(there)
        return stacked.sum(0, dtype=stacked.dtype)


@final
class NcclAllReduce(_AllReduce):
    """An all-reduce by XLA, which is NCCL's on GPUs.

    Values that `run` returned, and any of which each replica's is an array of jax on a
    device of its own, are reduced by one program on these devices, whatever the
    destination: a result for other devices is copied there. `IndexedSlices` are
    concatenated, and all else (numpy, values in a step, several on one device) is
    stacked where the first value is, and summed there.

    Args:
        num_packs: Of how many arrays a batch of values is made; 0 leaves it as it is.

    Raises:
        ValueError: It is negative.
    """


@final
class HierarchicalCopyAllReduce(_AllReduce):
    """An all-reduce by XLA, which knows how the devices hang together: what
    `NcclAllReduce` is, under TF's other name.

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


def _parts(value: DistributedValues, op: ReduceOp) -> list[Any]:
    """The replicas' values, fit to be added."""
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
