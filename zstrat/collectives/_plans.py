"""From a call to what one rank does: schedule, blocks, chunks. Pure."""

from __future__ import annotations

from functools import cache
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Final, assert_never

import numpy as np

from zstrat.config import MiB

from ._doubling import dissemination_barrier
from ._engine import Call, Kind
from ._exchanges import pairwise_all_to_all, scatter_broadcast
from ._progress import Progress, parts
from ._reduction import reduction_of
from ._ring import ring_all_gather, ring_all_reduce, ring_reduce_scatter
from ._trees import tree_all_reduce, tree_broadcast

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ._schedule import Schedule

SMALL: Final = 32 * 1024
"""Bytes up to which the steps of a call cost more than its bytes."""

_NOTHING: Final = np.empty(0, np.uint8)


def progress_of(call: Call, rank: int, size: int) -> Progress:
    """What rank ``rank`` of ``size`` does in a call.

    Raises:
        TypeError, ValueError: The call cannot be made, in words for its caller.
    """
    match call.kind:
        case Kind.ALL_REDUCE:
            return _all_reduce(call, rank, size)
        case Kind.REDUCE_SCATTER:
            return _reduce_scatter(call, rank, size)
        case Kind.ALL_GATHER:
            return _all_gather(call, rank, size)
        case Kind.BROADCAST:
            return _broadcast(call, rank, size)
        case Kind.ALL_TO_ALL:
            return _all_to_all(call, rank, size)
        case Kind.BARRIER:
            schedule = _made(dissemination_barrier, rank, size)
            return Progress(schedule, [_NOTHING], [None])
        case _:
            assert_never(call.kind)


def _all_reduce(call: Call, rank: int, size: int) -> Progress:
    make = tree_all_reduce if call.source.nbytes <= SMALL else ring_all_reduce
    schedule = _made(make, rank, size)
    blocks = len(schedule.blocks)
    sources, results = parts(call.source, blocks), parts(call.target, blocks)
    return Progress(
        schedule,
        sources,
        results,
        reduction=reduction_of(call.op, call.source.dtype, size),
        chunk_bytes=chunk_of(sources[0].nbytes),
        frozen=call.is_frozen,
    )


def _reduce_scatter(call: Call, rank: int, size: int) -> Progress:
    results: list[np.ndarray | None] = [None] * size
    results[rank] = call.target
    return Progress(
        _made(ring_reduce_scatter, rank, size),
        split(call.source, call.sizes),
        results,
        reduction=reduction_of(call.op, call.source.dtype, size),
        chunk_bytes=chunk_of(max(call.sizes) * call.source.itemsize),
        frozen=call.is_frozen,
    )


def _all_gather(call: Call, rank: int, size: int) -> Progress:
    sources: list[np.ndarray | None] = [None] * size
    sources[rank] = call.source
    return Progress(
        _made(ring_all_gather, rank, size),
        sources,
        split(call.target, call.sizes),
        chunk_bytes=chunk_of(max(call.sizes) * call.target.itemsize),
        frozen=call.is_frozen,
    )


def _broadcast(call: Call, rank: int, size: int) -> Progress:
    make = tree_broadcast if call.target.nbytes <= SMALL else scatter_broadcast
    schedule = _rooted(make, rank, size, call.root)
    blocks = len(schedule.blocks)
    results = parts(call.target, blocks)
    sources: Sequence[np.ndarray | None] = [None] * blocks
    if rank == call.root:
        sources = parts(call.source, blocks)
    return Progress(
        schedule,
        sources,
        results,
        chunk_bytes=chunk_of(results[0].nbytes),
        frozen=call.is_frozen,
    )


def _all_to_all(call: Call, rank: int, size: int) -> Progress:
    sizes = call.sizes
    sources: list[np.ndarray | None] = [None] * (size * size)
    results: list[np.ndarray | None] = [None] * (size * size)
    sources[rank * size : (rank + 1) * size] = split(
        call.source, sizes[rank * size : (rank + 1) * size]
    )
    results[rank::size] = split(call.target, sizes[rank::size])
    return Progress(
        _made(pairwise_all_to_all, rank, size),
        sources,
        results,
        chunk_bytes=chunk_of(max(sizes) * call.source.itemsize),
        frozen=call.is_frozen,
    )


def chunk_of(block: int) -> int:
    """Bytes per chunk for blocks of so many: enough chunks to keep lines and ranks
    busy, none so small that its header matters."""
    return min(max(block // 4, 64 * 1024), MiB)


def split(flat: np.ndarray, sizes: Sequence[int]) -> list[np.ndarray]:
    """Neighbouring views of ``flat`` ``[sum(sizes)]``."""
    ends = accumulate(sizes, initial=0)
    return [flat[start:end] for start, end in pairwise(ends)]


@cache
def _made(make: Callable[[int, int], Schedule], rank: int, size: int) -> Schedule:
    return make(rank, size)


@cache
def _rooted(
    make: Callable[[int, int, int], Schedule], rank: int, size: int, root: int
) -> Schedule:
    return make(rank, size, root)
