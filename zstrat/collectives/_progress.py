"""One rank's part of a call under way: hops come in, hops go out. No I/O, no clock.

A block is cut into chunks, each of which runs through the block's actions by itself:
while one chunk is reduced, the next one travels. Arrays are reduced from the memory
that they were received in.

**Which memory is sent.** A sender does not hear when its bytes have left, so it may
send only what nobody changes afterwards: a frame as it was received; a private copy of
the chunk, made while it is in the cache; or memory of the call (the user's own) if this
rank later takes the block as finished, for then all whom it was sent to have had it
before (the last law of `Schedule`).

**What is sent.** A contribution travels in its own dtype, a partial sum in that of the
accumulator, a finished block in that of the result. Contribution and result have the
same length; the receiver tells them from a partial sum by the length.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

import numpy as np

from zstrat.config import MiB
from zstrat.errors import ProtocolError

from ._blocks import Block
from ._reduction import narrow
from ._schedule import Act

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ._reduction import Reduction
    from ._schedule import Schedule

CHUNKS: Final = 2**20
"""Chunks of a block, at most: the place of a hop on the wire is the schedule's place
times this, plus the chunk. With chunks of 1 MiB a block may have a tebibyte."""

_SEND, _REDUCE, _TAKE, _FINISH = Act.SEND, Act.REDUCE, Act.TAKE, Act.FINISH


class Send(NamedTuple):
    """An order: this goes to ``peer``. ``data`` are bytes ``[n]``; they stay as they
    are until they have arrived."""

    peer: int
    place: int
    data: np.ndarray


class Codec(Protocol):
    """How values are made smaller for the wire.

    ``place`` names the same part of the same call every time that the call is made, so
    that a codec can add next time what it left out this time.
    """

    def encode(self, place: int, values: np.ndarray) -> np.ndarray:
        """``values`` ``[n]`` as bytes, in new memory."""

    def decode(self, data: np.ndarray, count: int) -> np.ndarray:
        """Bytes as values ``[count]`` of the accumulator's dtype, in new memory.

        Raises:
            ProtocolError: So many values are not encoded as such bytes.
        """


class Progress:
    """Carries out one rank's schedule of one call, chunk by chunk.

    Args:
        schedule: What this rank does.
        sources: Per block what this rank contributes, ``[n]`` in C order; None if it
            contributes nothing. Not to be changed before the call is over.
        results: Per block where its final values go, of the same dtype and length;
            None if this rank does not want them. May be the source itself.
        reduction: How contributions become one; None if there is one per block.
        codec: Makes all that travels smaller; None: it travels as it is.
        chunk_bytes: Largest hop.
        frozen: The sources are never changed, not even after the call.

    Raises:
        ValueError: There are not as many sources and results as blocks.
    """

    def __init__(
        self,
        schedule: Schedule,
        sources: Sequence[np.ndarray | None],
        results: Sequence[np.ndarray | None],
        *,
        reduction: Reduction | None = None,
        codec: Codec | None = None,
        chunk_bytes: int = MiB,
        frozen: bool = False,
    ) -> None:
        if not len(sources) == len(results) == len(schedule.blocks):
            raise ValueError(
                f"{len(sources)} sources and {len(results)} results "
                f"for a schedule of {len(schedule.blocks)} blocks"
            )
        self._reduction, self._codec, self._frozen = reduction, codec, frozen
        self._blocks: list[Block] = []
        self._receipts: dict[int, tuple[Block, int]] = {}
        self._early: dict[int, np.ndarray] = {}
        self._left = 0
        """Chunks that are not through."""
        self._is_drawn = False
        self._places = schedule.places
        each = zip(schedule.blocks, sources, results, strict=True)
        for number, (actions, source, result) in enumerate(each):
            if actions:
                self._add(Block(number, actions, source, result), chunk_bytes)

    def _add(self, block: Block, chunk_bytes: int) -> None:
        some = block.source if block.source is not None else block.result
        width = 1 if some is None else some.itemsize
        block.is_direct = block.result is not None
        if self._reduction is not None:
            width = self._reduction.accumulator.itemsize
            block.is_direct &= not self._reduction.rounds
        # What was encoded is sent from memory of its own.
        block.is_direct &= (
            block.is_taken or not block.forwards or self._codec is not None
        )
        self._left += block.cut(max(chunk_bytes // width, 1))
        self._blocks.append(block)
        for index, action in enumerate(block.actions):
            if action.act is _REDUCE or action.act is _TAKE:
                self._receipts[action.place] = (block, index)

    @property
    def is_done(self) -> bool:
        """Whether the results are complete and all hops handed out."""
        return self._is_drawn and not self._left

    @property
    def waits(self) -> frozenset[int]:
        """The ranks whose hops it could go on with."""
        return frozenset(
            block.actions[at].peer
            for block in self._blocks
            for at in block.at
            if 0 <= at < len(block.actions)
        )

    def start(self) -> Iterator[Send]:
        """Begins; the hops that do not wait for others, made when they are drawn.

        To be drawn to the end, before which nothing is done; hops may arrive meanwhile.
        """
        # What the others wait for first goes first, and all peers get some of it.
        blocks = sorted(self._blocks, key=_first_place)
        for chunk in range(max((len(block.at) for block in blocks), default=0)):
            for block in blocks:
                if chunk < len(block.at):
                    block.at[chunk] = 0
                    yield from self._advance(block, chunk)
        self._is_drawn = True

    def arrived(self, place: int, data: np.ndarray) -> list[Send]:
        """A hop of this call arrived: bytes ``[n]``, that nobody changes.

        Raises:
            ProtocolError: This rank waits for no such hop, or not for so many bytes.
        """
        number, chunk = divmod(place, CHUNKS)
        receipt = self._receipts.get(number)
        if receipt is None or chunk >= len(receipt[0].at):
            raise ProtocolError(f"hop {number}, chunk {chunk}: this call has none such")
        block, index = receipt
        at = block.at[chunk]
        if at != index:
            if at > index or place in self._early:
                raise ProtocolError(f"hop {number}, chunk {chunk} arrived twice")
            self._early[place] = data
            return []
        self._receive(block, chunk, place, data)
        return self._advance(block, chunk)

    def _advance(self, block: Block, chunk: int) -> list[Send]:
        """Goes on with a chunk until it has to wait, or is through."""
        sends: list[Send] = []
        actions = block.actions
        while (at := block.at[chunk]) < len(actions):
            act, peer, place = actions[at]
            if act is _SEND:
                where = place * CHUNKS + chunk
                sends.append(Send(peer, where, self._outgoing(block, chunk, where)))
                block.at[chunk] = at + 1
            elif act is _FINISH:
                self._finish(block, chunk)
                block.at[chunk] = at + 1
            else:
                where = place * CHUNKS + chunk
                early = self._early.pop(where, None)
                if early is None:
                    return sends
                self._receive(block, chunk, where, early)
        block.have[chunk] = None
        self._left -= 1
        return sends

    def _outgoing(self, block: Block, chunk: int, place: int) -> np.ndarray:
        have = block.have[chunk]
        if block.at[chunk] > block.turn:
            assert have is not None
            return have.view(np.uint8)
        values = self._values(block, chunk)
        if self._codec is not None:
            return self._codec.encode(place, self._wide(values))
        if have is None and not (block.is_taken or self._frozen):
            values = values.copy()
        return values.view(np.uint8)

    def _receive(self, block: Block, chunk: int, place: int, data: np.ndarray) -> None:
        if block.actions[block.at[chunk]].act is _REDUCE:
            self._reduce(block, chunk, place, data)
        else:
            if block.result is not None:
                result = block.part(block.result, chunk)
                self._take(data, result, place)
            if block.forwards:
                block.have[chunk] = data
        block.at[chunk] += 1

    def _take(self, data: np.ndarray, result: np.ndarray, place: int) -> None:
        if self._codec is not None:
            narrow(self._codec.decode(data, len(result)), result)
            return
        if data.nbytes != result.nbytes:
            raise _wrong_length(place, data, result.nbytes)
        result[...] = data.view(result.dtype)

    def _reduce(self, block: Block, chunk: int, place: int, data: np.ndarray) -> None:
        assert self._reduction is not None
        assert block.source is not None
        have = block.have[chunk]
        some = block.part(block.source, chunk) if have is None else have
        more = self._incoming(place, data, len(some))
        if have is None:
            if block.is_direct:
                assert block.result is not None
                have = block.part(block.result, chunk)
            else:
                have = np.empty(len(some), self._reduction.accumulator)
            block.have[chunk] = have
        self._reduction.reduce(some, more, have)

    def _incoming(self, place: int, data: np.ndarray, count: int) -> np.ndarray:
        """A contribution or partial sum, from the wire."""
        assert self._reduction is not None
        if self._codec is not None:
            return self._codec.decode(data, count)
        for dtype in (self._reduction.accumulator, self._reduction.dtype):
            if data.nbytes == count * dtype.itemsize:
                return data.view(dtype)
        raise _wrong_length(place, data, count * self._reduction.accumulator.itemsize)

    def _finish(self, block: Block, chunk: int) -> None:
        have = block.have[chunk]
        result = None if block.result is None else block.part(block.result, chunk)
        if not block.forwards:
            if result is not None:
                values = self._values(block, chunk)
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
        if result is not None and not (block.is_same and self._reduction is None):
            result[...] = finished

    def _finished(self, block: Block, chunk: int) -> np.ndarray:
        """The final values, in memory that nobody changes."""
        values = self._values(block, chunk)
        if self._reduction is None:
            return values if self._frozen else values.copy()
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

    def _values(self, block: Block, chunk: int) -> np.ndarray:
        have = block.have[chunk]
        if have is not None:
            return have
        assert block.source is not None
        return block.part(block.source, chunk)

    def _wide(self, values: np.ndarray) -> np.ndarray:
        """What a codec is given."""
        reduction = self._reduction
        return values if reduction is None else reduction.widened(values)


def parts(flat: np.ndarray, size: int) -> list[np.ndarray]:
    """``size`` neighbouring views of ``flat`` ``[n]``, the blocks of a call: the first
    n mod size of them have one element more."""
    short, more = divmod(len(flat), size)
    ends = [block * short + min(block, more) for block in range(size + 1)]
    return [flat[start:end] for start, end in pairwise(ends)]


def _first_place(block: Block) -> int:
    return next((a.place for a in block.actions if a.act is _SEND), 0)


def _wrong_length(place: int, data: np.ndarray, expected: int) -> ProtocolError:
    number, chunk = divmod(place, CHUNKS)
    return ProtocolError(
        f"hop {number}, chunk {chunk} has {data.nbytes} bytes, expected {expected}: "
        "the ranks call with different sizes, dtypes or chunks"
    )
