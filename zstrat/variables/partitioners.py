"""Into how many parts a variable is cut: by number, by least or by greatest size.

A partitioner is called with the shape and dtype of a new variable and returns a number
of parts for each axis, 1 everywhere but for the one that is cut. Any callable that does
so is one. Decides without I/O; a strategy carries it out.
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
    """Decides the number of parts of a variable along one axis."""

    __slots__ = ()

    def __call__(self, shape: Sequence[int], dtype: Any, axis: int = 0) -> list[int]:
        """Returns one number per axis of ``shape``: 1, and for ``axis`` that of the
        parts.

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
        """Returns the number of parts of an axis that has ``rows`` entries."""


@final
@dataclass(frozen=True, slots=True)
class FixedShardsPartitioner(Partitioner):
    """``num_shards`` parts, or one per row if there are fewer rows.

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
    """As many parts as make each one ``min_shard_bytes`` at least, ``max_shards`` at
    most.

    Args:
        bytes_per_string: What an element counts if it is a string.

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
    """As few parts as keep each one within ``max_shard_bytes``, one row at least; never
    more than ``max_shards``, which then come out larger.

    Args:
        bytes_per_string: What an element counts if it is a string.

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
    """Returns bytes of one element."""
    if dtype is str or dtype is bytes or dtype == "string":
        return bytes_per_string
    known = np.dtype(jnp.dtype(dtype))
    return bytes_per_string if known.kind in "SUO" else known.itemsize


def _require_positive(name: str, value: int) -> None:
    if value < 1:
        raise ValueError(f"Argument `{name}` must be positive. Received: {value}")
