"""Checks the arguments of a group's operations, and describes them as text."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from zstrat.collectives._compression import Compression, Compressor
from zstrat.collectives._leaves import described
from zstrat.collectives._reduction import ReduceOp, reduction_of
from zstrat.collectives.schedules._algorithms import algorithm_named

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from zstrat.collectives._engine import CallKind
    from zstrat.collectives._leaves import ArrayLeaf


@dataclass(frozen=True, slots=True)
class CallOptions:
    """The options that any operation has. ``timeout`` in seconds."""

    timeout: float
    tag: str | None = None
    compression: str | None = None
    algorithm: str | None = None
    bytes_per_pack: int = 0


def packs(leaves: Sequence[ArrayLeaf], options: CallOptions) -> str:
    """Describes how small arrays are packed, if that is not the default; else ""."""
    packs = options.bytes_per_pack
    return f"bytes_per_pack={packs}" if packs and len(leaves) > 1 else ""


def words_of(
    kind: CallKind,
    leaves: Sequence[ArrayLeaf],
    options: CallOptions,
    *more: str,
    free: Sequence[ArrayLeaf] = (),
) -> str:
    """Describes an operation as text, which must be equal on all ranks; ``free`` are
    leaves whose first axis may differ.

    Raises:
        ValueError: The operation does not support the algorithm, or not with
            compression; the error names the supported ones.
    """
    _check_algorithm(kind, options)
    words = [described(leaves, free), *filter(None, more)]
    if options.compression is not None:
        words.append(f"compression={options.compression!r}")
    if options.algorithm is not None:
        words.append(f"algorithm={options.algorithm!r}")
    return f"{kind.value}({', '.join(words)})"


def _check_algorithm(kind: CallKind, options: CallOptions) -> None:
    if options.algorithm not in (None, "auto"):
        algorithm = algorithm_named(kind.value, options.algorithm)
        if options.compression is not None and not algorithm.is_compressible:
            raise ValueError(
                f"algorithm {options.algorithm!r} with "
                f"compression={options.compression!r}: this algorithm would round "
                "differently on each rank: choose another one"
            )


def check_reducible(
    size: int, op: ReduceOp, leaves: Iterable[ArrayLeaf], compression: str | None = None
) -> None:
    for dtype in {leaf.flat.dtype for leaf in leaves}:
        reduction = reduction_of(op, dtype, size)
        if compression is not None:
            # Made only to be checked: before any rank has begun the call.
            Compressor(Compression.of(compression)).codec("", reduction)


def check_axis(kind: CallKind, leaves: Sequence[ArrayLeaf]) -> None:
    for leaf in leaves:
        if not leaf.shape:
            raise ValueError(
                f"{kind.value}: expected arrays with one axis or more, got a number"
            )


def check_writable(leaves: Sequence[ArrayLeaf], sparse: object) -> None:
    if sparse:
        raise TypeError(
            "in_place: expected no IndexedSlices, as their length changes: leave "
            "in_place out"
        )
    for leaf in leaves:
        if leaf.is_jax or not isinstance(leaf.origin, np.ndarray):
            raise TypeError(
                f"in_place: expected numpy arrays, got {type(leaf.origin).__name__}, "
                "which cannot be written to: leave in_place out, and use the result"
            )
        if not leaf.origin.flags.writeable:
            raise read_only()
    if len(leaves) > 1:
        _check_apart(leaves)


def read_only() -> ValueError:
    return ValueError(
        "in_place: an array is read-only: give a writable copy, or leave in_place out "
        "and use the result"
    )


def _check_apart(leaves: Sequence[ArrayLeaf]) -> None:
    """Checks that no two arrays of a tree overlap, since the results of both would be
    written there."""
    spans = sorted(
        (start, start + leaf.flat.nbytes)
        for leaf in leaves
        for start in [leaf.flat.ctypes.data]
        if leaf.flat.size
    )
    # Sorted by start, so arrays that overlap are neighbours.
    if any(end > start for (_, end), (start, _) in pairwise(spans)):
        raise ValueError(
            "in_place: two arrays of the tree share memory: give each array once"
        )


def check_sparse(op: ReduceOp, rows: Sequence[ArrayLeaf]) -> None:
    if rows and op not in (ReduceOp.SUM, ReduceOp.MEAN):
        raise TypeError(
            f"{op.value} of IndexedSlices: expected SUM or MEAN; use densify=True"
        )


def check_splits(size: int, rows: int, splits: Sequence[int] | None) -> None:
    if splits is None and rows % size:
        raise ValueError(
            f"all_to_all: expected a multiple of {size} rows for {size} ranks, got "
            f"{rows}: give the rows of each rank as splits="
        )
    if splits is not None and (
        len(splits) != size or sum(splits) != rows or min(splits) < 0
    ):
        raise ValueError(
            f"splits={list(splits)}: expected {size} counts that add up to {rows}"
        )


def positive(name: str, given: float | None, default: float) -> float:
    """Returns the seconds ``given`` for an argument, or the default if it is None.

    Raises:
        ValueError: ``given`` is not above 0.
    """
    value = default if given is None else given
    # Not `<= 0`, which NaN would pass.
    if not value > 0:
        raise ValueError(f"{name}={given}: expected seconds above 0")
    return float(value)


def not_negative(name: str, given: int) -> int:
    """Returns the number ``given`` for an argument.

    Raises:
        ValueError: ``given`` is below 0.
    """
    if given < 0:
        raise ValueError(f"{name}={given}: expected 0 or more")
    return given
