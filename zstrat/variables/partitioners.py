"""Partitioners: decide into how many parts a variable is sharded, by number of parts,
minimum size or maximum size.

A partitioner is called with the shape and dtype of a new variable and returns a number
of parts for each axis: 1 for all axes except the one that is split. Any such callable
is a partitioner. Partitioners only compute numbers; the strategy creates the parts.
"""

from __future__ import annotations

import abc
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import jax.numpy as jnp
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence


class Partitioner(abc.ABC):
    """Base of partitioners, which split variables along one axis."""

    __slots__ = ()

    def __call__(self, shape: Sequence[int], dtype: Any, axis: int = 0) -> list[int]:
        """Returns one number per axis of ``shape``: the number of parts for ``axis``, 1
        for others.

        Raises:
            ValueError: The shape has no such axis, or has a length that is not known.
        """
        sizes = _defined(shape)
        if not -len(sizes) <= axis < len(sizes):
            raise ValueError(
                f"Cannot partition variable along axis {axis} when shape is only "
                f"{tuple(sizes)}"
            )
        parts = [1] * len(sizes)
        # A variable without rows is one part, too.
        parts[axis] = max(1, self._parts(sizes, sizes[axis], dtype))
        return parts

    @abc.abstractmethod
    def _parts(self, shape: list[int], rows: int, dtype: Any) -> int:
        """Returns into how many parts to split an axis that has ``rows`` entries."""


@final
@dataclass(frozen=True, slots=True)
class FixedShardsPartitioner(Partitioner):
    """Splits a variable into ``num_shards`` parts, or one per row if it has fewer rows.

    Raises:
        ValueError: ``num_shards`` is not positive.
    """

    num_shards: int

    def __post_init__(self) -> None:
        _require_positive("num_shards", self.num_shards)

    def _parts(self, shape: list[int], rows: int, dtype: Any) -> int:
        return min(self.num_shards, rows)


@final
@dataclass(frozen=True, slots=True)
class MinSizePartitioner(Partitioner):
    """Splits a variable into as many parts as possible, at most ``max_shards``, of at
    least ``min_shard_bytes`` each.

    Args:
        bytes_per_string: Size that is assumed for an element that is a string.

    Raises:
        ValueError: An argument is not positive.
    """

    min_shard_bytes: int = 256 << 10
    max_shards: int = 1
    bytes_per_string: int = 16

    def __post_init__(self) -> None:
        _require_positive("min_shard_bytes", self.min_shard_bytes)
        _require_positive("max_shards", self.max_shards)
        _require_positive("bytes_per_string", self.bytes_per_string)

    def _parts(self, shape: list[int], rows: int, dtype: Any) -> int:
        nbytes = math.prod(shape) * _element(dtype, self.bytes_per_string)
        return min(rows, self.max_shards, -(-nbytes // self.min_shard_bytes))


@final
@dataclass(frozen=True, slots=True)
class MaxSizePartitioner(Partitioner):
    """Splits a variable into as few parts as possible, of at most ``max_shard_bytes``
    (or one row) each; but never into more than ``max_shards``, whose parts may then be
    larger.

    Args:
        bytes_per_string: Size that is assumed for an element that is a string.

    Raises:
        ValueError: An argument is not positive.
    """

    max_shard_bytes: int
    max_shards: int | None = None
    bytes_per_string: int = 16

    def __post_init__(self) -> None:
        _require_positive("max_shard_bytes", self.max_shard_bytes)
        if self.max_shards is not None:
            _require_positive("max_shards", self.max_shards)
        _require_positive("bytes_per_string", self.bytes_per_string)

    def _parts(self, shape: list[int], rows: int, dtype: Any) -> int:
        nbytes = math.prod(shape) * _element(dtype, self.bytes_per_string)
        if not nbytes:
            return 1
        rows_per_shard = max(1, self.max_shard_bytes * rows // nbytes)
        parts = -(-rows // rows_per_shard)
        return parts if self.max_shards is None else min(self.max_shards, parts)


def _defined(shape: Sequence[Any]) -> list[int]:
    sizes = list(shape)
    known = all(
        isinstance(n, int | np.integer) and not isinstance(n, bool) and n >= 0
        for n in sizes
    )
    if not known:
        raise ValueError(f"Shape is not fully defined: {shape}")
    return [int(n) for n in sizes]


def _element(dtype: Any, bytes_per_string: int) -> int:
    """Returns the bytes of one element of a dtype."""
    if dtype is str or dtype is bytes or dtype == "string":
        return bytes_per_string
    known = np.dtype(jnp.dtype(dtype))
    return bytes_per_string if known.kind in "SUO" else known.itemsize


def _require_positive(name: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"Argument `{name}` must be positive. Received: {value}")
