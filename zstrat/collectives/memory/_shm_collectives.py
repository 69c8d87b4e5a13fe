"""Collectives of ranks that all run on one host, through the memory that they share.

The memory is anonymous (`zstrat.transport.Arena`): a page of words, and two slots. Each
rank writes its own memory and has mapped that of the other ranks read-only, so that no
rank can damage another's memory; the kernel frees all of it with the last process,
however that ends.

A call is a sequence of steps (`_barrier`). In a step a rank writes the data that others
need into its slot, waits until all ranks have done so, and reads the slots of the
others. An array larger than a slot goes chunk by chunk, so that both the memory and the
cache that a call needs are bounded.

Reductions add up in the order of ranks, each element on one rank, or on all ranks in
the same way, so all ranks get the same bits.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Final

import numpy as np

from zstrat.transport import Mapping

from ._barrier import ControlWords, ShmBarrier

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from zstrat.collectives._reduction import Reduction
    from zstrat.wire import MemberEntry

SLOT: Final = 2**20
"""Bytes of a slot. A chunk and its result stay in the cache of a core while they are
used: smaller slots need more steps, larger ones go through memory."""

_WORDS: Final = 64
"""Offset of the control words, a cache line after the proof of the arena."""
_WORDS_BYTES: Final = 64
_SLOTS: Final = 4096

CAPACITY: Final = _SLOTS + 2 * SLOT


class RankMemory:
    """The memory of one rank, created or mapped by this rank: its ``words`` for the
    barrier and its two ``slots`` (uint8 [SLOT] each)."""

    def __init__(self, rank: int, memory: np.ndarray) -> None:
        # Arrays of the memory keep it mapped; `words` has only an address.
        self.words = ControlWords(
            rank,
            memory[_WORDS : _WORDS + _WORDS_BYTES].data.cast("Q"),
            memory.ctypes.data + _WORDS,
        )
        self.slots = (
            memory[_SLOTS : _SLOTS + SLOT],
            memory[_SLOTS + SLOT : _SLOTS + 2 * SLOT],
        )


def segment_of(rank: int, member: MemberEntry) -> RankMemory:
    """Returns the memory of another rank of this host.

    Raises:
        OSError: The memory cannot be mapped, or is not what ``member`` describes; the
            error names the rank.
    """
    try:
        if member.capacity != CAPACITY:
            raise OSError(f"it has {member.capacity} bytes, expected {CAPACITY}")
        mapping = Mapping(member.pid, member.descriptor, member.capacity, member.word)
    except OSError as error:
        raise OSError(
            f"the shared memory of rank {rank} ({member.task}, pid {member.pid}) "
            f"cannot be mapped: {error}"
        ) from error
    return RankMemory(rank, mapping.memory)


SMALL: Final = 64 * 1024
"""Bytes of an array up to which every rank reads all slots and reduces for itself, in
one step and not two."""

_VIEWS: Final = 256
"""Most sizes and dtypes of small arrays whose views are remembered; when there are
more, all are forgotten."""

_LINE: Final = 64  # bytes: ranks write no cache line in common

_BLOCK: Final = 32 * 1024
"""Number of elements whose sum in f32 stays in the cache until it is rounded."""


class ShmCollectives:
    """The collective operations among the ranks of one host. ``rank``: index of this
    rank among them."""

    def __init__(self, rank: int, segments: Sequence[RankMemory], cores: int) -> None:
        self.rank, self.size = rank, len(segments)
        self._slots = [segment.slots for segment in segments]
        self._views: dict[
            tuple[np.dtype, int], tuple[Sequence[np.ndarray], Sequence[np.ndarray]]
        ] = {}
        others = [each.words for i, each in enumerate(segments) if i != rank]
        self.barrier = ShmBarrier(segments[rank].words, others, cores)

    def own(self, dtype: np.dtype, count: int, start: int = 0) -> np.ndarray:
        """Returns this rank's slot for the next step: ``count`` elements from element
        ``start``."""
        slot = self._slots[self.rank][(self.barrier.step + 1) & 1]
        return _part(slot, dtype, count, start)

    def of(self, rank: int, dtype: np.dtype, count: int, start: int = 0) -> np.ndarray:
        """Returns the data that a rank has written for the present step: ``count``
        elements from element ``start``."""
        slot = self._slots[rank][self.barrier.step & 1]
        return _part(slot, dtype, count, start)

    def _starts(
        self, dtype: np.dtype, count: int
    ) -> tuple[Sequence[np.ndarray], Sequence[np.ndarray]]:
        """Returns views of the first ``count`` elements of the slots of all ranks: a
        list for each of the two slots. Views for small arrays are remembered, as a
        program reduces the same arrays at each step."""
        views = self._views.get((dtype, count))
        if views is None:
            if len(self._views) >= _VIEWS:
                self._views.clear()
            first, second = (
                [_part(slots[turn], dtype, count, 0) for slots in self._slots]
                for turn in (0, 1)
            )
            views = self._views[dtype, count] = first, second
        return views

    def all_reduce(
        self, reduction: Reduction, source: np.ndarray, target: np.ndarray
    ) -> None:
        """Reduces all sources into every rank's ``target``, which may be ``source``.

        Cost up to `SMALL` bytes: one step, in which each rank reads all slots. Above:
        two steps a chunk, in which each rank copies the chunk in and out once, except
        its own share of the result.
        """
        if source.nbytes <= SMALL:
            self._reduce_at_once(reduction, source, target)
            return
        chunk = SLOT // source.itemsize
        for start in range(0, source.size, chunk):
            end = min(start + chunk, source.size)
            self._reduce_chunk(reduction, source[start:end], target[start:end])

    def reduce(
        self, reduction: Reduction, source: np.ndarray, target: np.ndarray
    ) -> None:
        """Reduces all sources into the first rank's ``target``, of the accumulator's
        dtype. The ``target`` of other ranks does not change.

        Cost: two steps a chunk; each rank copies the chunk in, the first rank also
        copies it out.
        """
        chunk = SLOT // reduction.accumulator.itemsize
        # At least one step: ranks compare what they call at the first step of a call.
        for start in range(0, max(source.size, 1), chunk):
            end = min(start + chunk, source.size)
            bounds = self._reduce_shares(reduction, source[start:end])
            self.barrier.meet()
            if self.rank == 0:
                self._take_shares(bounds, target[start:end])

    def broadcast(self, root: int, source: np.ndarray, target: np.ndarray) -> None:
        """Copies the ``source`` of rank ``root`` into every ``target``, which may be
        the ``source`` itself. Cost: a step a chunk; each rank copies the array once."""
        dtype, chunk = source.dtype, SLOT // source.itemsize
        for start in range(0, max(source.size, 1), chunk):
            end = min(start + chunk, source.size)
            if self.rank == root:
                self.own(dtype, end - start)[...] = source[start:end]
                self.barrier.post()
                # Its own copy, while the others read.
                if target is not source:
                    target[start:end] = source[start:end]
                self.barrier.wait()
            else:
                self.barrier.meet()
                target[start:end] = self.of(root, dtype, end - start)

    def all_gather(
        self, sizes: Sequence[int], source: np.ndarray, target: np.ndarray
    ) -> None:
        """Copies all sources into ``target``, in the order of ranks.

        Cost: a step a chunk of the largest source; each rank reads the sources of all
        others.
        """
        dtype, chunk = source.dtype, SLOT // source.itemsize
        # As many steps as the largest source needs, on every rank: a rank that took
        # fewer would be a step ahead.
        for done in range(0, max(*sizes, 1), chunk):
            share = source[done : done + chunk]
            self.own(dtype, share.size)[...] = share
            self.barrier.meet()
            for rank, piece in enumerate(_pieces(target, sizes, done, chunk)):
                piece[...] = self.of(rank, dtype, piece.size)

    def reduce_scatter(
        self,
        reduction: Reduction,
        sizes: Sequence[int],
        source: np.ndarray,
        target: np.ndarray,
    ) -> None:
        """Reduces all sources, and writes this rank's block into ``target``.

        Cost: a step a chunk of the largest block; each rank copies its source in once.
        """
        dtype, chunk = source.dtype, self._share(source.dtype)
        first = self.rank * chunk
        for done in range(0, max(*sizes, 1), chunk):
            for rank, piece in enumerate(_pieces(source, sizes, done, chunk)):
                self.own(dtype, piece.size, rank * chunk)[...] = piece
            self.barrier.meet()
            share = target[done : done + chunk]
            parts = [self.of(i, dtype, share.size, first) for i in range(self.size)]
            _reduce(reduction, parts, share)

    def all_to_all(
        self, sizes: Sequence[int], source: np.ndarray, target: np.ndarray
    ) -> None:
        """Copies the blocks for this rank into ``target``, in the order of ranks.
        ``sizes`` are those of the blocks from i to j, row by row.

        Cost: a step a chunk of the largest block; each rank copies its blocks in and
        out once.
        """
        dtype, chunk = source.dtype, self._share(source.dtype)
        row = sizes[self.rank * self.size : (self.rank + 1) * self.size]
        column = sizes[self.rank :: self.size]
        first = self.rank * chunk
        for done in range(0, max(*sizes, 1), chunk):
            for rank, piece in enumerate(_pieces(source, row, done, chunk)):
                self.own(dtype, piece.size, rank * chunk)[...] = piece
            self.barrier.meet()
            for rank, piece in enumerate(_pieces(target, column, done, chunk)):
                piece[...] = self.of(rank, dtype, piece.size, first)

    def _reduce_at_once(
        self, reduction: Reduction, source: np.ndarray, target: np.ndarray
    ) -> None:
        barrier = self.barrier
        views = self._starts(source.dtype, source.size)[(barrier.step + 1) & 1]
        views[self.rank][...] = source
        barrier.meet()
        # All from the slots: an in-place call overwrites its own source on the way.
        _reduce(reduction, views, target)

    def _reduce_chunk(
        self, reduction: Reduction, source: np.ndarray, target: np.ndarray
    ) -> None:
        bounds = self._reduce_shares(reduction, source)
        low, high = bounds[self.rank], bounds[self.rank + 1]
        result = self.own(target.dtype, high - low)
        self.barrier.post()
        # Between post and wait, as others may still compute their shares.
        target[low:high] = result
        self.barrier.wait()
        self._take_shares(bounds, target, besides=self.rank)

    def _reduce_shares(self, reduction: Reduction, source: np.ndarray) -> list[int]:
        """Takes a step that reduces a chunk: after it each rank has its share of the
        result in its slot for the next step. Returns the bounds of the shares."""
        dtype, count = source.dtype, source.size
        bounds = _shares(count, self.size, _LINE // reduction.dtype.itemsize)
        low, high = bounds[self.rank], bounds[self.rank + 1]
        # Nobody reads this rank's own share but itself.
        self.own(dtype, low)[...] = source[:low]
        self.own(dtype, count - high, high)[...] = source[high:]
        self.barrier.meet()
        parts = [
            source[low:high]
            if rank == self.rank
            else self.of(rank, dtype, high - low, low)
            for rank in range(self.size)
        ]
        _reduce(reduction, parts, self.own(reduction.dtype, high - low))
        return bounds

    def _take_shares(
        self, bounds: Sequence[int], target: np.ndarray, besides: int = -1
    ) -> None:
        """Copies the shares that `_reduce_shares` has left in the slots into
        ``target``, except the share of rank ``besides``."""
        for rank, (low, high) in enumerate(pairwise(bounds)):
            if rank != besides:
                target[low:high] = self.of(rank, target.dtype, high - low)

    def _share(self, dtype: np.dtype) -> int:
        """Returns the number of elements of a slot that each rank gets if all ranks
        share the slot."""
        return SLOT // self.size // _LINE * (_LINE // dtype.itemsize)


def _part(slot: np.ndarray, dtype: np.dtype, count: int, start: int) -> np.ndarray:
    size = dtype.itemsize
    return slot[start * size : (start + count) * size].view(dtype)


def _pieces(
    array: np.ndarray, sizes: Sequence[int], done: int, chunk: int
) -> Iterator[np.ndarray]:
    """Yields the next ``chunk`` elements, or what is left, of each block of
    ``array``."""
    start = 0
    for size in sizes:
        yield array[start + min(done, size) : start + min(done + chunk, size)]
        start += size


def _shares(count: int, size: int, step: int) -> list[int]:
    """Returns the bounds of the shares of ``size`` ranks in ``count`` elements:
    multiples of ``step``."""
    share = -(-count // (size * step)) * step
    return [min(i * share, count) for i in range(size + 1)]


def _reduce(reduction: Reduction, parts: Sequence[np.ndarray], out: np.ndarray) -> None:
    """Reduces ``parts``, in their order, and writes the finished result into
    ``out``."""
    if not reduction.rounds:
        _reduce_into(reduction, parts, out, out)
        return
    # In blocks: a sum in f32 of the whole chunk would go through memory.
    for start in range(0, out.size, _BLOCK):
        end = start + _BLOCK
        block = out[start:end]
        wide = np.empty(block.size, reduction.accumulator)
        _reduce_into(reduction, [part[start:end] for part in parts], wide, block)


def _reduce_into(
    reduction: Reduction, parts: Sequence[np.ndarray], wide: np.ndarray, out: np.ndarray
) -> None:
    """Reduces as `_reduce` does, with partial sums in ``wide``, which has the
    accumulator's dtype."""
    total = parts[0]
    for more in parts[1:]:
        reduction.reduce(total, more, wide)
        total = wide
    reduction.finish(total, out)
