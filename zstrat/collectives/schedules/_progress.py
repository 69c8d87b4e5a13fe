"""One rank's part of a call under way: hops come in, hops go out. No I/O, no clock.

A block is cut into chunks, each of which runs through the block's actions by itself:
while one chunk is reduced, the next one travels. What a chunk is made of is the
business of `_chunks`.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from zstrat.config import MiB
from zstrat.errors import ProtocolError

from ._chunks import CHUNKS, Block, Values, traits_of
from ._schedule import Act, first_place

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy as np

    from zstrat.collectives._reduction import Reduction

    from ._chunks import Codec
    from ._schedule import Schedule

_SEND, _FINISH = Act.SEND, Act.FINISH


class Send(NamedTuple):
    """An order: this goes to ``peer``. ``data`` are bytes ``[n]``; they stay as they
    are until they have arrived."""

    peer: int
    place: int
    data: np.ndarray


class ScheduleProgress:
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
        self._values = Values(reduction, codec, frozen, schedule.places)
        self._blocks: list[Block] = []
        self._receipts: dict[int, tuple[Block, int]] = {}
        self._early: dict[int, np.ndarray] = {}
        self._left = 0
        """Chunks that are not through."""
        self._is_drawn = False
        each = zip(traits_of(schedule), sources, results, strict=True)
        for number, (traits, source, result) in enumerate(each):
            if traits.actions:
                self._add(Block(number, traits, source, result), chunk_bytes)

    def _add(self, block: Block, chunk_bytes: int) -> None:
        width = self._values.prepare(block)
        self._left += block.cut(max(chunk_bytes // width, 1))
        self._blocks.append(block)
        for index, action in enumerate(block.actions):
            if action.act is not _SEND and action.act is not _FINISH:
                self._receipts[action.place] = (block, index)

    @property
    def is_done(self) -> bool:
        """Whether the results are complete and all hops handed out."""
        return self._is_drawn and not self._left

    @property
    def waits(self) -> frozenset[int]:
        """The ranks whose hops would let it advance."""
        return frozenset(
            block.actions[at].peer
            for block in self._blocks
            for at in block.at
            if 0 <= at < len(block.actions)
        )

    def start(self) -> Iterator[Send]:
        """Begins the call; yields the sends that do not wait for other ranks, each made
        when it is drawn.

        Draw it to its end before anything else is done; hops may arrive meanwhile.
        """
        # What the others wait for first goes first, and all peers get some of it.
        blocks = sorted(self._blocks, key=lambda block: first_place(block.actions))
        for chunk in range(max((len(block.at) for block in blocks), default=0)):
            for block in blocks:
                if chunk < len(block.at):
                    block.at[chunk] = 0
                    yield from self._advance(block, chunk)
        self._is_drawn = True

    def arrived(self, place: int, data: np.ndarray) -> list[Send]:
        """Takes a hop of this call: bytes ``[n]`` that nobody changes.

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
        self._values.receive(block, chunk, place, data)
        block.at[chunk] = at + 1
        return self._advance(block, chunk)

    def _advance(self, block: Block, chunk: int) -> list[Send]:
        """Advances a chunk until it has to wait, or is finished."""
        sends: list[Send] = []
        actions, values = block.actions, self._values
        while (at := block.at[chunk]) < len(actions):
            act, peer, place = actions[at]
            if act is _SEND:
                where = place * CHUNKS + chunk
                sends.append(Send(peer, where, values.outgoing(block, chunk, where)))
                block.at[chunk] = at + 1
            elif act is _FINISH:
                values.finish(block, chunk)
                block.at[chunk] = at + 1
            else:
                where = place * CHUNKS + chunk
                early = self._early.pop(where, None)
                if early is None:
                    return sends
                values.receive(block, chunk, where, early)
                block.at[chunk] = at + 1
        block.have[chunk] = None
        self._left -= 1
        return sends


def parts(flat: np.ndarray, size: int) -> list[np.ndarray]:
    """``size`` neighbouring views of ``flat`` ``[n]``, the blocks of a call: the first
    n mod size of them have one element more."""
    short, more = divmod(len(flat), size)
    ends = [block * short + min(block, more) for block in range(size + 1)]
    return [flat[start:end] for start, end in pairwise(ends)]
