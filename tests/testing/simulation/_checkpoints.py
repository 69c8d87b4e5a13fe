"""Checkpoints of a simulation, which are in memory."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, NamedTuple, final

import numpy as np

from zstrat.wire import DTYPES, StoreEntry

from ._late_model import Held
from ._table_changes import fill_tables

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from zstrat.coordinator import RestoredRounds
    from zstrat.ps import PinnedTensor, PsClient

    from ._contract import Saved, Training
    from ._late_model import World
    from ._rounds_log import RoundsLog


class SavedTensor(NamedTuple):
    """A value, or a slot, of a snapshot."""

    pinned: PinnedTensor
    value: np.ndarray


async def read_pinned(
    client: PsClient, snapshot: int, pinned: Sequence[PinnedTensor], pause: float
) -> list[SavedTensor]:
    """All of a snapshot; training goes on meanwhile."""
    found = []
    for each in pinned:
        dtype, shape = DTYPES[each.entry.dtype], each.entry.shape
        nbytes = int(np.prod(shape)) * dtype.itemsize
        await asyncio.sleep(pause)
        part = await client.read_snapshot(each.ps, snapshot, each.place, 0, nbytes)
        found.append(SavedTensor(each, part.view(dtype).reshape(shape)))
    return found


def values_of(tensors: Sequence[SavedTensor]) -> dict[int, np.ndarray]:
    """By key."""
    return {
        tensor.pinned.entry.key: tensor.value
        for tensor in tensors
        if not (tensor.pinned.entry.optimizer or tensor.pinned.entry.leaf)
    }


def late_of(tensors: Sequence[SavedTensor], keys: Collection[int]) -> World:
    """What is in it of what the program has made late."""
    traces = {
        tensor.pinned.entry.key: tensor.value
        for tensor in tensors
        if tensor.pinned.entry.optimizer
    }
    return {
        key: Held(value, traces.get(key, np.zeros_like(value)))
        for key, value in values_of(tensors).items()
        if key in keys
    }


@final
class MemoryPoint:
    """Stands for a whole checkpoint (`zstrat.coordinator.RestorePoint`)."""

    def __init__(
        self,
        training: Training,
        path: str,
        saved: Saved,
        tensors: Sequence[SavedTensor],
        optimizers: frozenset[int],
        rounds: RoundsLog,
        places: Mapping[int, Sequence[str]],
    ) -> None:
        self._rounds = rounds
        self._training, self.path, self._saved = training, path, saved
        self._tensors = tensors
        self.variables = frozenset(values_of(tensors))
        self.optimizers = optimizers
        self.lacks: Sequence[str] = ()
        self.rounds: Mapping[int, RestoredRounds] = {}
        self.places = places

    async def check(self) -> None:
        """Does nothing: what is in memory is whole."""

    async def fill(self, client: PsClient) -> None:
        """Has the servers take all values."""
        tables = await fill_tables(client, self._tensors)
        for (ps, _, entry), value in self._tensors:
            if entry.key in tables:
                continue
            place = StoreEntry(entry.key, entry.optimizer, entry.leaf, 0, entry.rows)
            await client.store(ps, [place], [value])
        if self._saved.rounds is not None:
            self._rounds.continue_at(client.session, self._saved.rounds)
        self._training.filled(self._saved)
        self._look()

    def _look(self) -> None:
        """The restore is over soon, or is not."""
        training = self._training
        if not training.look() and training.is_filling:
            asyncio.get_running_loop().call_later(1e-3, self._look)
