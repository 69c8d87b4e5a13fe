"""A cluster without processes: parameter servers that are objects of this test.

Each variable of a server is a `LocalStorage` with what optimizers keep beside it; they
receive their trees, and really run. What the client is asked for goes through the
files and messages' own types.
"""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np

from zstrat.checkpoint import TensorInfo, TensorReader, TensorWriter
from zstrat.errors import PSUnavailableError
from zstrat.optimizers import Binding, LeafRule
from zstrat.strategy import ServerVariables
from zstrat.variables import (
    LocalStorage,
    Optimizer,
    ShardedVariable,
    SlotValues,
    Variable,
    VariableSpec,
    creator,
    handle,
)
from zstrat.wire import SnapshotWritten, TensorEntry, UpdateOp, raw

decoded = functools.lru_cache(Binding.decoded)  # traced once for all examples


class PinnedTensor(NamedTuple):
    ps: int
    place: int
    entry: TensorEntry


def exists(path: str) -> bool:
    return Path(path).exists()


@dataclass
class Servers:
    """What every ps holds, and what it was asked for."""

    count: int
    shared: set[int]
    storages: dict[int, tuple[VariableSpec, LocalStorage]] = field(default_factory=dict)
    optimizers: dict[int, Optimizer] = field(default_factory=dict)
    rules: dict[tuple[int, int], LeafRule] = field(default_factory=dict)
    """By optimizer and variable, as far as trees were told."""
    snapshots: dict[int, dict[int, list[tuple[TensorEntry, np.ndarray]]]] = field(
        default_factory=dict
    )
    asked: list[str] = field(default_factory=list)
    on_write: object = None

    async def pin(self, snapshot, refs, optimizers, since=None):
        assert snapshot not in self.snapshots
        mine = self.snapshots[snapshot] = {}
        found = []
        for ps, key, _ in refs:
            _, storage = self.storages[key]
            value, slots = storage.taken()
            tensors = [(0, "", value, bool(value.ndim))]
            for number in optimizers:
                beside = slots.get(number, SlotValues((), [], ()))
                tensors += [(number, *slot) for slot in beside.items()]
            for number, leaf, array, rows in tensors:
                entry = TensorEntry(
                    key, number, leaf, array.dtype.name, list(array.shape), rows
                )
                listed = mine.setdefault(ps, [])
                found.append(PinnedTensor(ps, len(listed), entry))
                listed.append((entry, array))
        return found

    async def release(self, snapshot):
        del self.snapshots[snapshot]

    async def write_snapshot(self, ps, snapshot, path, places, names):
        assert ps in self.shared
        self.asked.append(f"write {ps}")
        if self.on_write is not None:
            self.on_write(ps)
        tensors = [self.snapshots[snapshot][ps][place][1] for place in places]
        infos = [
            TensorInfo(name, array.dtype.name, array.shape)
            for name, array in zip(names, tensors, strict=True)
        ]
        with TensorWriter(path, infos) as writer:
            for array in tensors:
                writer.write(raw(array))
            return SnapshotWritten(writer.finish(), writer.size)

    async def read_snapshot(self, ps, snapshot, place, offset, size):
        self.asked.append(f"read {ps}")
        array = self.snapshots[snapshot][ps][place][1]
        return np.frombuffer(array.tobytes(), np.uint8)[offset : offset + size]

    async def sees(self, path):
        return [ps in self.shared and exists(path) for ps in range(self.count)]

    async def load(self, ps, entries):
        self.asked.append(f"load {ps}")
        for entry in entries:
            if not entry.path:
                storage = self.storages[entry.key][1]
                storage.put(None, {self.optimizers[entry.optimizer]: None})
                continue
            assert ps in self.shared
            with TensorReader(entry.path) as reader:
                whole = entry.start == entry.stop
                array = (
                    reader.read(entry.name)
                    if whole
                    else reader.read(entry.name, entry.start, entry.stop)
                )
            self._put(ps, entry, array)

    async def store(self, ps, entries, arrays):
        self.asked.append(f"store {ps}")
        for entry, array in zip(entries, arrays, strict=True):
            self._put(ps, entry, array)

    def _put(self, ps, entry, array):
        spec, storage = self.storages[entry.key]
        assert spec.ps == ps
        value, slots = storage.taken()
        if not entry.optimizer:
            storage.put(self._over(value, entry.at, array), {})
            return
        beside = slots.get(entry.optimizer) or self._begun(entry, value)
        if entry.leaf not in beside.names:  # its tree is not known: whatever comes
            rows = entry.rows and bool(value.ndim)
            shape = (len(value), *array.shape[1:]) if rows else array.shape
            room = np.zeros(shape, array.dtype)
            beside = SlotValues(
                (*beside.names, entry.leaf),
                [*beside.leaves, room],
                (*beside.rows, rows),
            )
        kept = dict(zip(beside.names, beside.leaves, strict=True))
        new = self._over(kept[entry.leaf], entry.at, array)
        optimizer = self.optimizers[entry.optimizer]
        storage.put(None, {optimizer: beside.replaced(entry.leaf, new)})

    def _begun(self, entry, value):
        """Slots that nobody has moved yet: none, if the tree is not known."""
        rule = self.rules.get((entry.optimizer, entry.key))
        if rule is None:
            return SlotValues((), [], ())
        return SlotValues(rule.names, rule.init(value), rule.has_rows).on_host()

    def optimize(self, spec, op, number, arrays, operands):
        """Moves a variable, or rows of it, as plain optax moves its leaf."""
        rule, storage = self.rules[number, spec.key], self.storages[spec.key][1]
        value, slots = storage.taken()
        beside = slots.get(number)
        if beside is None:
            kept = rule.init(value)
        else:
            named = dict(zip(beside.names, beside.leaves, strict=True))
            assert set(named) == set(rule.names), (set(named), rule.names)
            kept = [named[name] for name in rule.names]
        mine = [operands[n] for n in rule.uses]
        if op is UpdateOp.OPTIMIZE:
            new, after = rule.step(value, kept, arrays[0], mine)
        else:
            new, after = self._rows_moved(rule, value, kept, arrays, mine)
        beside = SlotValues(rule.names, list(after), rule.has_rows).on_host()
        storage.put(np.array(new), {self.optimizers[number]: beside})

    @staticmethod
    def _rows_moved(rule, value, kept, arrays, operands):
        """The rows that there are gradients of, and what is kept beside these."""
        indices, inverse = np.unique(arrays[0], return_inverse=True)
        summed = np.zeros((len(indices), *value.shape[1:]), arrays[1].dtype)
        np.add.at(summed, inverse, arrays[1])
        pairs = list(zip(kept, rule.has_rows, strict=True))
        here = [np.asarray(x)[indices] if rows else x for x, rows in pairs]
        moved, after = rule.step(value[indices], here, summed, operands)
        leaves = []
        for (old, rows), new in zip(pairs, after, strict=True):
            leaf = np.array(old if rows else new)
            if rows:
                leaf[indices] = new
            leaves.append(leaf)
        whole = value.copy()
        whole[indices] = moved
        return whole, leaves

    @staticmethod
    def _over(old, at, array):
        if not old.ndim or old.shape == array.shape:
            return array.reshape(old.shape)
        new = old.copy()
        new[at : at + len(array)] = array
        return new


class FakeCluster:
    """A session with such servers; what `ServerVariables` and saving need of one."""

    def __init__(self, count: int, shared: set[int] | None = None) -> None:
        self.session = self.origin = 7
        shared = set(range(count)) if shared is None else shared
        self.client = Servers(count, shared)
        self.variables = ServerVariables(self, count)
        self._variables: dict[int, Variable] = {}
        self.lost: int | None = None
        self.rests = 0
        """How often it was held between two steps."""
        self.on_rest = lambda: None
        self.cut = SimpleNamespace(end=7, besides=[(9, 11)])

    recovers, restores, outages = False, 0, 0

    def require_unrestored(self, since):
        assert since == self.restores

    async def settled(self, since, error):
        return False

    async def remember(self, point, cut, restores):
        raise AssertionError("nobody fills these servers again")

    async def restart_rounds(self, restored):
        """Nothing waits for a round."""

    @contextlib.asynccontextmanager
    async def at_rest(self):
        self.rests += 1
        self.on_rest()
        yield self.cut

    @property
    def servers(self):
        return self

    def run(self, work, what, timeout=None):
        try:
            work.send(None)
        except StopIteration as end:
            return end.value
        raise AssertionError(f"{what}: waits")

    async def run_async(self, work, what):
        if self.lost is not None:
            work.close()
            raise PSUnavailableError(f"/job:ps/task:{self.lost}", "killed")
        return await work

    async def create_variables(self, variables):
        for spec, array in variables:
            self.client.storages[spec.key] = (spec, LocalStorage(array))

    async def withdraw(self, specs, optimizers):
        del optimizers
        for spec in specs:
            self.client.storages.pop(spec.key, None)

    async def create_optimizer(self, optimizer, name, code, rounds=None):
        del optimizer, name, code

    async def read(self, specs):
        return [self.client.storages[spec.key][1].read(None) for spec in specs]

    async def bind_optimizer(self, number, data):
        known = self.client.optimizers[number]
        binding = decoded(known.name, known.transformation, data)
        for rule, keys in zip(binding.rules(), binding.keys, strict=True):
            for key in keys:
                self.client.rules[number, key] = rule

    async def update(self, updates):
        operands = {}
        for spec, op, optimizer, arrays in updates:
            if op is UpdateOp.OPERANDS:
                operands[spec.ps, optimizer] = arrays
            elif optimizer:
                shared = operands.get((spec.ps, optimizer), ())
                self.client.optimize(spec, op, optimizer, arrays, shared)
            else:
                storage = self.client.storages[spec.key][1]
                storage.update(handle(spec, storage), op, tuple(arrays), None)

    @contextlib.contextmanager
    def scope(self):
        token = creator.set(self.variables)
        try:
            yield
        finally:
            creator.reset(token)

    def optimizer(self, transformation, **options) -> Optimizer:
        with self.scope():
            made = Optimizer(transformation, **options)
        self.client.optimizers[made.id] = made
        return made

    def variable(self, value, parts: int = 1, name: str = "v"):
        """A variable in parts of about equal size, on one ps after the other."""
        value = np.asarray(value)
        with self.scope():
            if parts == 1:
                return Variable(value, name=name)
            return ShardedVariable(
                [
                    Variable(part, name=f"{name}/part_{n}")
                    for n, part in enumerate(np.array_split(value, parts))
                ],
                name=name,
            )
