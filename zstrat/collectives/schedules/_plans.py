"""Finds what one rank has to do in a call: its schedule, blocks and chunks. No I/O."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Final, assert_never

import numpy as np

from zstrat.collectives._engine import CallKind, CollectiveCall
from zstrat.collectives._leaves import split
from zstrat.collectives._reduction import reduction_of
from zstrat.config import MiB

from ._algorithms import algorithm_named
from ._choice import Choices
from ._progress import ScheduleProgress, parts

if TYPE_CHECKING:
    from zstrat.collectives._compression import Compressor

    from ._schedule import Schedule

_DEFAULT_CHOICES: Final = Choices()

_NOTHING: Final = np.empty(0, np.uint8)

_WHOLE: Final = 512 * 1024
"""Bytes of a block up to which it is one chunk: the ranks lose more by a hop than they
gain by the overlap of two halves."""

_COMPRESSED: Final = 256 * 1024
"""Most bytes of a compressed chunk: the event loop compresses it, and must not be held
up."""


def progress_of(
    call: CollectiveCall,
    rank: int,
    size: int,
    *,
    one_host: bool = False,
    compressor: Compressor | None = None,
    choices: Choices = _DEFAULT_CHOICES,
) -> ScheduleProgress:
    """Returns the progress object that carries out a call for rank ``rank`` of
    ``size``.

    Args:
        one_host: Whether all ranks are on one machine, and share its cores.
        choices: The group's table of algorithms.

    Raises:
        TypeError, ValueError: The call cannot be made; the error names the wrong
            argument.
    """
    algorithm = _algorithm(call, choices, size, one_host)
    schedule = _schedule_of(call.kind, algorithm, call.root, rank, size)
    reduction = codec = None
    if call.kind in (CallKind.ALL_REDUCE, CallKind.REDUCE_SCATTER):
        reduction = reduction_of(call.op, call.source.dtype, size)
        if compressor is not None:
            codec = compressor.codec(call.place, reduction)
    sources, results = _blocks(call, rank, size, len(schedule.blocks))
    largest = max(
        (each.nbytes for each in (*sources, *results) if each is not None), default=0
    )
    if call.kind is CallKind.ALL_TO_ALL:  # each rank sees but its own row and column
        largest = max(call.sizes) * call.source.itemsize
    # By the largest block of any rank: both ends of a hop have to cut alike.
    chunk = chunk_of(largest)
    return ScheduleProgress(
        schedule,
        sources,
        results,
        reduction=reduction,
        codec=codec,
        chunk_bytes=chunk if codec is None else min(chunk, _COMPRESSED),
        frozen=call.is_frozen,
    )


def _algorithm(
    call: CollectiveCall, choices: Choices, size: int, one_host: bool
) -> str:
    if call.algorithm not in (None, "auto"):
        return call.algorithm
    whole = max(call.source.nbytes, call.target.nbytes)
    chosen = choices.choose(call.kind.value, whole, size, one_host)
    if (
        call.compression is None
        or algorithm_named(call.kind.value, chosen).is_compressible
    ):
        return chosen
    # The table was measured without compression; a tree has one rank that finishes.
    return "tree"


Blocks = tuple[Sequence[np.ndarray | None], Sequence[np.ndarray | None]]


def _blocks(call: CollectiveCall, rank: int, size: int, count: int) -> Blocks:
    """Returns the sources and results of a schedule of ``count`` blocks."""
    match call.kind:
        case CallKind.ALL_REDUCE:
            sources = parts(call.source, count)
            # The same views, so that a block sees at once that both are one memory.
            in_place = call.target is call.source
            return sources, sources if in_place else parts(call.target, count)
        case CallKind.REDUCE_SCATTER:
            return split(call.source, call.sizes), _only(rank, size, call.target)
        case CallKind.ALL_GATHER:
            return _only(rank, size, call.source), split(call.target, call.sizes)
        case CallKind.BROADCAST:
            results = parts(call.target, count)
            if rank == call.root:
                return parts(call.source, count), results
            return [None] * count, results
        case CallKind.ALL_TO_ALL:
            return _exchanged_blocks(call, rank, size)
        case CallKind.BARRIER:
            return [_NOTHING], [None]
        case _:
            assert_never(call.kind)


def _only(at: int, count: int, block: np.ndarray) -> list[np.ndarray | None]:
    blocks: list[np.ndarray | None] = [None] * count
    blocks[at] = block
    return blocks


def _exchanged_blocks(call: CollectiveCall, rank: int, size: int) -> Blocks:
    """Returns the sources and results of an all-to-all: a rank sends the blocks of its
    row, and gets those of its column."""
    sources: list[np.ndarray | None] = [None] * (size * size)
    results: list[np.ndarray | None] = [None] * (size * size)
    row, column = slice(rank * size, (rank + 1) * size), slice(rank, None, size)
    sources[row] = split(call.source, call.sizes[row])
    results[column] = split(call.target, call.sizes[column])
    return sources, results


def chunk_of(block: int) -> int:
    """Returns the bytes per chunk for blocks of at most ``block`` bytes: enough chunks
    to keep connections and ranks busy, but none so small that its overhead matters."""
    return MiB if block <= _WHOLE else min(max(block // 4, _WHOLE), MiB)


# Schedules are pure and have no arrays, so one serves every call of its kind.
@cache
def _schedule_of(
    kind: CallKind, algorithm: str, root: int, rank: int, size: int
) -> Schedule:
    return algorithm_named(kind.value, algorithm).rooted(root)(rank, size)
