"""Carries out one rank's part of a call: takes the hops (messages with data) that come,
and returns the hops to send. No I/O, no clock.

A block is divided into chunks, each of which runs through the block's actions
separately: while one chunk is reduced, the next one travels. `_chunks` computes the
data that are sent, and decides in which memory they are.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from zstrat.config import MiB
from zstrat.errors import ProtocolError

from ._chunks import CHUNKS, Block, ChunkArithmetic, traits_of
from ._schedule import Act, first_place

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy as np

    from zstrat.collectives._reduction import Reduction

    from ._chunks import Codec
    from ._schedule import Schedule

_SEND, _FINISH = Act.SEND, Act.FINISH


class Send(NamedTuple):
    """An order to send ``data``, bytes ``[n]``, to ``peer``. The bytes do not change
    before they have arrived."""

    peer: int
    place: int
    data: np.ndarray


class ScheduleProgress:
    """Carries out one rank's schedule of one call, chunk by chunk.

    Args:
        schedule: The actions of this rank.
        sources: For each block the contribution of this rank, ``[n]`` in C order; None:
            it contributes nothing. Must not be changed before the call has ended.
        results: For each block the array for its final values, of the same dtype and
            length; None: this rank does not need them. May be the source itself.
        reduction: How the contributions to a block are reduced; None: each block has
            one.
        codec: Compresses the data of all hops; None: they are not compressed.
        chunk_bytes: Most bytes of a hop.
        frozen: Whether the sources are never changed, not even after the call.

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
        self._arithmetic = ChunkArithmetic(reduction, codec, frozen, schedule.places)
        self._blocks: list[Block] = []
        self._receipts: dict[int, tuple[Block, int]] = {}
        self._early: dict[int, np.ndarray] = {}
        self._left = 0
        """Number of chunks that are not finished."""
        self._is_drawn = False
        blocks = zip(traits_of(schedule), sources, results, strict=True)
        for number, (traits, source, result) in enumerate(blocks):
            if traits.actions:
                self._add(Block(number, traits, source, result), chunk_bytes)

    def _add(self, block: Block, chunk_bytes: int) -> None:
        width = self._arithmetic.prepare(block)
        self._left += block.cut(max(chunk_bytes // width, 1))
        self._blocks.append(block)
        for index, action in enumerate(block.actions):
            if action.act is not _SEND and action.act is not _FINISH:
                self._receipts[action.place] = (block, index)

    @property
    def is_done(self) -> bool:
        """Whether the results are complete, and all hops were returned for sending."""
        return self._is_drawn and not self._left

    @property
    def waits(self) -> frozenset[int]:
        """The ranks whose hops this rank waits for."""
        return frozenset(
            block.actions[at].peer
            for block in self._blocks
            for at in block.at
            if 0 <= at < len(block.actions)
        )

    def start(self) -> Iterator[Send]:
        """Begins the call, and yields the sends that do not wait for other ranks. Each
        is created when the iterator advances, so a full link bounds the copies in
        memory.

        Exhaust the iterator; hops may arrive meanwhile.
        """
        # What the others wait for first goes first, and all peers get some of it.
        blocks = sorted(self._blocks, key=lambda block: first_place(block.actions))
        for chunk in range(max((len(block.at) for block in blocks), default=0)):
            for block in blocks:
                if chunk < len(block.at):
                    block.at[chunk] = 0
                    yield from self._advance(block, chunk)
        # Only now may the call be done: a rank that gets everything early still owes
        # its hops.
        self._is_drawn = True

    def arrived(self, place: int, data: np.ndarray) -> list[Send]:
        """Takes a hop that has arrived for ``place`` of the schedule: bytes ``[n]``,
        which must not be changed later. Returns the sends that are possible now.

        Raises:
            ProtocolError: This rank waits for no such hop, or not for so many bytes.
        """
        number, chunk = divmod(place, CHUNKS)
        receipt = self._receipts.get(number)
        if receipt is None or chunk >= len(receipt[0].at):
            raise ProtocolError(f"this call has no hop {number}, chunk {chunk}")
        block, index = receipt
        at = block.at[chunk]
        if at != index:
            if at > index or place in self._early:
                raise ProtocolError(f"hop {number}, chunk {chunk} arrived twice")
            # Hops of different peers overtake each other: this waits for its turn among
            # the actions of its chunk.
            self._early[place] = data
            return []
        self._arithmetic.receive(block, chunk, place, data)
        block.at[chunk] = at + 1
        return self._advance(block, chunk)

    def _advance(self, block: Block, chunk: int) -> list[Send]:
        """Runs the actions of a chunk until it has to wait for a hop, or is finished.
        Returns the sends among them."""
        sends: list[Send] = []
        actions, arithmetic = block.actions, self._arithmetic
        while (at := block.at[chunk]) < len(actions):
            act, peer, place = actions[at]
            where = place * CHUNKS + chunk
            if act is _SEND:
                data = arithmetic.outgoing(block, chunk, where)
                sends.append(Send(peer, where, data))
            elif act is _FINISH:
                arithmetic.finish(block, chunk)
            else:
                early = self._early.pop(where, None)
                if early is None:
                    return sends
                arithmetic.receive(block, chunk, where, early)
            block.at[chunk] = at + 1
        # The memory is free as soon as its hops have left.
        block.have[chunk] = None
        self._left -= 1
        return sends


def parts(flat: np.ndarray, size: int) -> list[np.ndarray]:
    """Divides ``flat`` ``[n]`` into ``size`` adjacent views, the blocks of a call. The
    first n mod size views have one element more."""
    short, more = divmod(len(flat), size)
    ends = [block * short + min(block, more) for block in range(size + 1)]
    return [flat[start:end] for start, end in pairwise(ends)]
