"""The table of any id of a session, which the program trains, assigns, removes and
evicts rows of; and those to which steps push.

The oracle is a dict: by id the row and what the optimizer keeps beside it, or how often
an id without a row was pushed. As with what is made late, a change of which nobody
knows whether it was made leaves two worlds (`LateModel`).
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final, final

import numpy as np

from zstrat.errors import ZstratError
from zstrat.ids import BUCKETS, hashes_of
from zstrat.initializers import constant
from zstrat.program import dump_code
from zstrat.variables import VariableSpec
from zstrat.wire import EvictionRule, TableEntry, TableLeaf, UpdateOp

from ._late_changes import tree_of
from ._late_model import DECAY, RATE, Held, is_same
from ._rounds_model import optimizer_codes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from zstrat.ps import PsClient

    from ._checkpoints import SavedTensor
    from ._contract import Training
    from ._late_model import World
    from ._loop_coordinator import LoopCoordinator

TABLE_OPTIMIZER: Final = 7
"""Its number."""
MOST: Final = 60
"""Changes of one session: values stay exact."""

_KEY: Final = 900
_GRADIENTS: Final = 2
"""An id is born with its second one."""
_FIRST: Final = 1.0
"""What each row begins with."""
_IDS: Final = np.array([7919**4 * n - 2**60 for n in range(24)], np.int64)
_WAITS: Final = np.full(2, -999.0, np.float32)
"""Stands for the row of an id that has none."""


@final
class TableChanges:
    """The table of one session, and its changes. ``draw``: a number below 1."""

    def __init__(
        self,
        coordinator: LoopCoordinator,
        training: Training,
        draw: Callable[[], float],
        *,
        is_guarded: bool,
    ) -> None:
        self._coordinator, self._training, self._draw = coordinator, training, draw
        self._is_guarded, self._count = is_guarded, 0
        self.spec: Final = _spec(_KEY, "table of any id", training.servers - 1)

    @property
    def of_steps(self) -> tuple[VariableSpec, ...]:
        """One more on each server, for the rows that steps push."""
        number = range(self._training.servers)
        return tuple([_spec(_KEY + 1 + ps, f"rows{ps}", ps) for ps in number])

    async def create(self) -> None:
        """Creates all tables, and the optimizer."""
        servers, spec = self._coordinator.servers, self.spec
        entry = TableEntry(_KEY, spec.name, True, "float32", [2], 5, _GRADIENTS)
        await servers.create_tables([(spec, entry)], dump_code(constant(_FIRST)))
        others = [
            (s, TableEntry(s.key, s.name, True, "float32", [2], 5))
            for s in self.of_steps
        ]
        await servers.create_tables(others, dump_code(constant(0.0)))
        await servers.create_optimizer(TABLE_OPTIMIZER, "of rows", optimizer_codes()[0])
        await servers.bind_optimizer(TABLE_OPTIMIZER, tree_of(_KEY, spec.shape))

    async def one(self) -> None:
        """Makes one change, if it is known what is there."""
        if self._training.table.is_unsure or self._count >= MOST:
            return
        count = 1 + int(self._draw() * 5)
        ids = np.unique([_IDS[int(self._draw() * len(_IDS))] for _ in range(count)])
        ids = ids[np.argsort(hashes_of(ids))]
        rows = np.full((len(ids), 2), 1.0 + int(self._draw() * 8), np.float32)
        kind = self._draw()
        if kind < 0.5:
            await self._do(_trained, UpdateOp.OPTIMIZE_ROWS, ids, rows)
        elif kind < 0.6:
            await self._do(_assigned, UpdateOp.SCATTER_UPDATE, ids, rows)
        elif kind < 0.7:
            await self._do(_added, UpdateOp.SCATTER_ADD, ids, rows)
        elif kind < 0.85:
            await self._do(_removed, UpdateOp.REMOVE_ROWS, ids)
        else:
            rule = np.array([EvictionRule.NORM, 2.5, 0, BUCKETS])
            await self._do(_evicted, UpdateOp.EVICT_ROWS, rule)

    async def look(self) -> None:
        """Compares what is there with what has to be: all rows, and look-ups."""
        training, servers = self._training, self._coordinator.servers
        training.look()
        fills = training.fills
        ids, rows = await servers.table_rows(self.spec, 0, BUCKETS)
        ((height, _, _, waiting),) = await servers.table_sizes([self.spec])
        (looked,) = await servers.read_rows([(self.spec, _IDS)])
        if training.fills != fills or training.is_filling:
            return
        found = dict(zip(ids.tolist(), rows.tolist(), strict=True))
        first = [_FIRST, _FIRST]
        wanted = [found.get(number, first) for number in _IDS.tolist()]
        if height != len(found) or not np.allclose(looked, wanted):
            training.broken(f"a table has {found}, and look-ups give {looked.tolist()}")
        fitting = [
            world
            for world in training.table.worlds
            if _is_seen(world, found) and waiting == len(world) - len(found)
        ]
        if not fitting:
            worlds = training.table.worlds
            training.broken(f"a table has {found}, {waiting} wait, and not {worlds}")
        if not training.table.is_unsure:
            training.table.worlds = fitting

    def world_of(self, tensors: Sequence[SavedTensor]) -> World:
        """Returns the table of a checkpoint, which is one of those that may be."""
        leaves = leaves_of(tensors, _KEY)
        ids, rows = leaves[0, ".ids"], leaves[0, ""]
        traces = leaves.get((TABLE_OPTIMIZER, "['trace']"), np.zeros_like(rows))
        counts = leaves.get((0, ".counts"), np.empty(0))
        waiting = leaves.get((0, ".waiting"), np.empty(0))
        world: World = {
            **{
                number: Held(row, trace)
                for number, row, trace in zip(ids.tolist(), rows, traces, strict=True)
            },
            **{
                number: Held(_WAITS, np.full(2, count, np.float32))
                for number, count in zip(waiting.tolist(), counts, strict=True)
            },
        }
        worlds = self._training.table.worlds
        if not any(is_same(each, world) for each in worlds):
            self._training.broken(f"a checkpoint has the table {world}, of {worlds}")
        return world

    async def _do(
        self,
        change: Callable[..., World],
        op: UpdateOp,
        *arrays: np.ndarray,
    ) -> None:
        """Asks for a change, and tells the model what came of it."""
        training = self._training
        training.look()
        fills, self._count = training.fills, self._count + 1
        training.table.begin(partial(change, arrays))
        optimizer = TABLE_OPTIMIZER if op is UpdateOp.OPTIMIZE_ROWS else 0
        try:
            await self._coordinator.servers.update([(self.spec, op, optimizer, arrays)])
        except ZstratError as error:
            if self._is_guarded:
                training.broken(f"{op.name} of a table failed: {error!r}")
            training.table.failed()
        else:
            training.look()
            if training.fills == fills and not training.is_filling:
                training.table.done()
            else:
                training.table.failed()


def _spec(key: int, name: str, ps: int) -> VariableSpec:
    return VariableSpec(key, name, (2**30, 2), "float32", ps, buckets=(0, BUCKETS))


def leaves_of(
    tensors: Sequence[SavedTensor], key: int
) -> dict[tuple[int, str], np.ndarray]:
    """What a checkpoint has of a variable, by optimizer and leaf."""
    entries = [(each.pinned.entry, each.value) for each in tensors]
    return {(e.optimizer, e.leaf): value for e, value in entries if e.key == key}


async def fill_tables(client: PsClient, tensors: Sequence[SavedTensor]) -> set[int]:
    """Has servers take the tables of a checkpoint; returns their keys."""
    places = {
        each.pinned.entry.key: each.pinned.ps
        for each in tensors
        if each.pinned.entry.leaf == ".ids"
    }
    for key, ps in places.items():
        leaves = leaves_of(tensors, key)
        ids, counts = leaves.pop((0, ".ids")), leaves.pop((0, ".counts"), None)
        waiting = leaves.pop((0, ".waiting"), np.empty(0, np.int64))
        tall = [TableLeaf(number, name, True) for number, name in leaves]
        arrays = [ids, *leaves.values()]
        await client.store_table(ps, key, tall, arrays, replaces=True)
        if counts is not None:
            apart, arrays = [TableLeaf(0, ".counts", True)], [waiting, counts]
            await client.store_table(ps, key, apart, arrays, replaces=False)
    return set(places)


def _is_seen(world: World, found: Mapping[int, Any]) -> bool:
    rows = {number: held.value for number, held in world.items() if _is_row(held)}
    return rows.keys() == found.keys() and all(
        np.allclose(rows[number], found[number], rtol=1e-4, atol=1e-4)
        for number in rows
    )


def _is_row(held: Held) -> bool:
    return bool(held.value[0] != _WAITS[0])


def _row(world: World, number: int) -> Held:
    """The row of an id, which may be born now."""
    held = world.get(number)
    if held is None or not _is_row(held):
        return Held(np.full(2, _FIRST, np.float32), np.zeros(2, np.float32))
    return held


def _trained(arrays: Sequence[np.ndarray], world: World) -> World:
    new = dict(world)
    for number, gradient in zip(arrays[0].tolist(), arrays[1], strict=True):
        held = world.get(number)
        if held is None or not _is_row(held):
            count = 1.0 if held is None else float(held.trace[0]) + 1.0
            if count < _GRADIENTS:
                new[number] = Held(_WAITS, np.full(2, count, np.float32))
                continue
        value, trace = _row(world, number)
        trace = gradient + DECAY * trace
        new[number] = Held(value - RATE * trace, trace)
    return new


def _assigned(arrays: Sequence[np.ndarray], world: World) -> World:
    pairs = zip(arrays[0].tolist(), arrays[1], strict=True)
    rows = {number: _row(world, number)._replace(value=row) for number, row in pairs}
    return {**world, **rows}


def _added(arrays: Sequence[np.ndarray], world: World) -> World:
    rows = {}
    for number, row in zip(arrays[0].tolist(), arrays[1], strict=True):
        value, trace = _row(world, number)
        rows[number] = Held(value + row, trace)
    return {**world, **rows}


def _removed(arrays: Sequence[np.ndarray], world: World) -> World:
    gone = set(arrays[0].tolist())
    return {number: held for number, held in world.items() if number not in gone}


def _evicted(arrays: Sequence[np.ndarray], world: World) -> World:
    limit = arrays[0][1]
    return {
        number: held
        for number, held in world.items()
        if not _is_row(held) or np.linalg.norm(held.value) >= limit
    }
