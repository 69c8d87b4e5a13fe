"""The blocks (parts of the array) of a call under way: their memory, their chunks, and
the arithmetic.

A `Block` has for each of its chunks the progress through the block's actions, and this
rank's present values, which are sent, and into which arriving data are reduced. Data
are reduced from the memory that they were received in.

**Which memory is sent.** A sender does not know when its bytes have left, so it may
send only memory that is not changed afterwards: a frame as it was received; a private
copy of the chunk, made while it is in the cache; or memory of the call (the user's
arrays) if this rank later receives the block as finished, because all ranks that it was
sent to must have received it before (the last law of `_schedule`).

**What is sent.** A contribution travels in its own dtype, a partial sum in that of the
accumulator, a finished block in that of the result. Contribution and result have the
same length; by it the receiver distinguishes both from a partial sum.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Final, Protocol

import numpy as np

from zstrat.collectives._reduction import narrow
from zstrat.errors import ProtocolError

from ._schedule import Act

if TYPE_CHECKING:
    from zstrat.collectives._reduction import Reduction

    from ._schedule import Action, Schedule

CHUNKS: Final = 2**20
"""Most chunks of a block: the place (number) of a hop on the wire is the schedule's
place times this, plus the chunk. With chunks of 1 MiB a block may have a tebibyte."""

_GRAIN: Final = 64
"""Number of elements of which the length of a chunk is a multiple, for vector units."""

_ENDS: Final = (Act.TAKE, Act.FINISH)
_REDUCES: Final = (Act.REDUCE, Act.REDUCE_FIRST)


class BlockTraits:
    """Properties of the actions on one block that decide which memory is sent."""

    __slots__ = ("actions", "forwards", "grows", "is_taken", "turn")

    def __init__(self, actions: tuple[Action, ...]) -> None:
        acts = [action.act for action in actions]
        self.actions = actions
        self.turn = next((i for i, act in enumerate(acts) if act in _ENDS), len(acts))
        """Index of the action that finishes the block, or the number of actions."""
        self.forwards = Act.SEND in acts[self.turn :]
        """Whether this rank sends the block after it is finished."""
        self.is_taken = Act.TAKE in acts
        """Whether this rank receives the block as finished. Until then it may send
        memory of the call itself."""
        reduces = [i for i, act in enumerate(acts) if act in _REDUCES]
        self.grows = max(reduces, default=-1)
        """Index of the last action that reduces into the block; -1: there is none."""


@lru_cache(maxsize=1024)
def traits_of(schedule: Schedule) -> tuple[BlockTraits, ...]:
    """Returns the `BlockTraits` of each block of a schedule. Cached, because a schedule
    serves many calls."""
    return tuple(map(BlockTraits, schedule.blocks))


class Block:
    """The actions on one block, and the progress of each of its chunks."""

    __slots__ = (
        "actions",
        "at",
        "count",
        "forwards",
        "grows",
        "have",
        "is_direct",
        "is_same",
        "is_taken",
        "number",
        "result",
        "source",
        "step",
        "turn",
    )

    def __init__(
        self,
        number: int,
        traits: BlockTraits,
        source: np.ndarray | None,
        result: np.ndarray | None,
    ) -> None:
        some = source if source is not None else result
        self.number, self.actions = number, traits.actions
        self.turn, self.forwards = traits.turn, traits.forwards
        self.is_taken, self.grows = traits.is_taken, traits.grows
        self.source, self.result = source, result
        self.count = 0 if some is None else len(some)
        self.is_same = _is_same(source, result)
        self.is_direct = False
        """Whether partial sums are made in the memory of the result."""
        self.step = 0
        """Number of elements per chunk."""
        self.at: list[int] = []
        """For each chunk the index of its next action; -1: the chunk has not begun."""
        self.have: list[np.ndarray | None] = []
        """For each chunk the values that this rank has; None: only the source. For a
        finished chunk the bytes to send on, if it is sent on."""

    def cut(self, elements: int) -> int:
        """Divides the block into chunks, as `cut`; returns the number of chunks."""
        self.step, chunks = cut(self.count, elements)
        self.at, self.have = [-1] * chunks, [None] * chunks
        return chunks

    def part(self, of: np.ndarray, chunk: int) -> np.ndarray:
        """Returns the elements of a chunk in ``of``, an array of the whole block."""
        start = chunk * self.step
        return of[start : min(start + self.step, self.count)]


def cut(count: int, elements: int) -> tuple[int, int]:
    """Divides ``count`` elements into chunks of equal length, of which the last may be
    shorter. The length is a multiple of `_GRAIN`, and at most ``elements`` rounded up
    to one. Returns the length and the number of chunks; zero elements are one chunk."""
    chunks = -(-count // elements) or 1
    step = -(-count // chunks)
    step = -(-step // _GRAIN) * _GRAIN or _GRAIN
    return step, -(-count // step) or 1


def _is_same(source: np.ndarray | None, result: np.ndarray | None) -> bool:
    if source is None or result is None:
        return False
    return source is result or source.ctypes.data == result.ctypes.data


_TAKE, _REDUCE_FIRST = Act.TAKE, Act.REDUCE_FIRST


class Codec(Protocol):
    """Compresses values for the wire.

    ``place`` identifies the same part of a call every time that the call is made, so
    that a codec can add the values next time that it left out this time.
    """

    def encode(self, place: int, values: np.ndarray) -> np.ndarray:
        """Encodes ``values`` ``[n]`` as bytes, in new memory."""

    def decode(self, data: np.ndarray, count: int) -> np.ndarray:
        """Decodes bytes into ``[count]`` values of the accumulator's dtype, in new
        memory.

        Raises:
            ProtocolError: The bytes do not encode ``count`` values.
        """


class ChunkArithmetic:
    """Encodes, reduces and finishes the chunks of one call; arguments as of
    `ScheduleProgress`.

    ``places``: number of places (hops) of the schedule. A codec gets a place beyond
    them for the values that it encodes when a block is finished.
    """

    __slots__ = ("_codec", "_frozen", "_places", "_reduction")

    def __init__(
        self,
        reduction: Reduction | None,
        codec: Codec | None,
        frozen: bool,
        places: int,
    ) -> None:
        self._reduction, self._codec, self._frozen = reduction, codec, frozen
        self._places = places

    def prepare(self, block: Block) -> int:
        """Decides in which memory partial sums of a block are made. Returns the most
        bytes that an element of the block takes on the wire."""
        some = block.source if block.source is not None else block.result
        width = 1 if some is None else some.itemsize
        block.is_direct = block.result is not None
        if self._reduction is not None:
            width = self._reduction.accumulator.itemsize
            block.is_direct &= not self._reduction.rounds
        # What was encoded is sent from separate memory.
        block.is_direct &= (
            block.is_taken or not block.forwards or self._codec is not None
        )
        return width

    def outgoing(self, block: Block, chunk: int, place: int) -> np.ndarray:
        """Returns the bytes of a chunk that this rank sends at ``place``."""
        have = block.have[chunk]
        # Finished: everybody gets the same bytes, so nothing is made of them again.
        if block.at[chunk] > block.turn:
            assert have is not None
            return have.view(np.uint8)
        values = self._latest(block, chunk)
        if self._codec is not None:
            return self._codec.encode(place, self._wide(values))
        if have is not None:
            # A partial sum that is complete here, or memory that comes back as
            # finished: the laws say that nobody changes it before it was received.
            is_kept = block.at[chunk] > block.grows
        else:
            is_kept = block.is_taken or self._frozen
        if not is_kept:
            values = values.copy()
        return values.view(np.uint8)

    def receive(self, block: Block, chunk: int, place: int, data: np.ndarray) -> None:
        """Reduces the data that came for a chunk into it, or takes them as the finished
        chunk.

        Raises:
            ProtocolError: The data have another number of bytes than expected.
        """
        act = block.actions[block.at[chunk]].act
        if act is not _TAKE:
            self._reduce(block, chunk, place, data, act is _REDUCE_FIRST)
        else:
            if block.result is not None:
                result = block.part(block.result, chunk)
                self._take(data, result, place)
            # The frame itself is sent on, so that all ranks get the same bytes without
            # a copy.
            if block.forwards:
                block.have[chunk] = data

    def finish(self, block: Block, chunk: int) -> None:
        """Computes the final values of a chunk, and stores them in the result."""
        have = block.have[chunk]
        result = None if block.result is None else block.part(block.result, chunk)
        # Nobody gets the block from this rank: its values go straight to the result.
        if not block.forwards:
            if result is not None:
                values = self._latest(block, chunk)
                direct = have is not None and block.is_direct
                self._conclude(values, values if direct else result)
            return
        finished = self._finished(block, chunk)
        if self._codec is not None:
            place = (self._places + block.number) * CHUNKS + chunk
            block.have[chunk] = data = self._codec.encode(place, self._wide(finished))
            if result is not None:
                self._take(data, result, place)  # as all others will have it
            return
        block.have[chunk] = finished
        # The values of a broadcast in place are there already.
        if result is not None and not (block.is_same and self._reduction is None):
            result[...] = finished

    def _take(self, data: np.ndarray, result: np.ndarray, place: int) -> None:
        if self._codec is not None:
            narrow(self._codec.decode(data, len(result)), result)
            return
        if data.nbytes != result.nbytes:
            raise _wrong_length(place, data, result.nbytes)
        result[...] = data.view(result.dtype)

    def _reduce(
        self, block: Block, chunk: int, place: int, data: np.ndarray, is_first: bool
    ) -> None:
        assert self._reduction is not None
        assert block.source is not None
        have = block.have[chunk]
        some = block.part(block.source, chunk) if have is None else have
        more = self._incoming(place, data, len(some))
        if have is None:
            # The first reduction decides in which memory the partial sum is.
            if block.is_direct:
                assert block.result is not None
                have = block.part(block.result, chunk)
            else:
                have = np.empty(len(some), self._reduction.accumulator)
            block.have[chunk] = have
        if is_first:
            some, more = more, some
        self._reduction.reduce(some, more, have)

    def _incoming(self, place: int, data: np.ndarray, count: int) -> np.ndarray:
        """Decodes a contribution or partial sum that came from the wire."""
        assert self._reduction is not None
        if self._codec is not None:
            return self._codec.decode(data, count)
        # The length says which it is: a partial sum, or a contribution of one rank.
        for dtype in (self._reduction.accumulator, self._reduction.dtype):
            if data.nbytes == count * dtype.itemsize:
                return data.view(dtype)
        raise _wrong_length(place, data, count * self._reduction.accumulator.itemsize)

    def _finished(self, block: Block, chunk: int) -> np.ndarray:
        """Returns the final values of a chunk, in memory that is not changed later."""
        values = self._latest(block, chunk)
        if self._reduction is None:
            # The source itself only if it never changes: it is sent after this.
            return values if self._frozen else values.copy()
        # In place: partial sums are in private memory, or in that of the result.
        if block.have[chunk] is not None and not self._reduction.rounds:
            finished = values
        else:
            finished = np.empty(len(values), self._reduction.dtype)
        self._reduction.finish(values, finished)
        return finished

    def _conclude(self, values: np.ndarray, result: np.ndarray) -> None:
        if self._reduction is not None:
            self._reduction.finish(values, result)
        elif values.ctypes.data != result.ctypes.data:
            result[...] = values

    def _latest(self, block: Block, chunk: int) -> np.ndarray:
        have = block.have[chunk]
        if have is not None:
            return have
        assert block.source is not None
        return block.part(block.source, chunk)

    def _wide(self, values: np.ndarray) -> np.ndarray:
        """Converts values to the dtype that a codec takes."""
        reduction = self._reduction
        return values if reduction is None else reduction.widened(values)


def _wrong_length(place: int, data: np.ndarray, expected: int) -> ProtocolError:
    number, chunk = divmod(place, CHUNKS)
    return ProtocolError(
        f"hop {number}, chunk {chunk} has {data.nbytes} bytes, expected {expected}: "
        "the ranks call with different sizes, dtypes or chunks"
    )
