"""Tables of any id under random operations on 1, 3 and 2 servers, compared with a dict
of numpy."""

import contextlib
import itertools
from unittest import mock

import numpy as np
import optax
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

import zstrat as zs
from zstrat.ps import PsClient

pytestmark = [pytest.mark.processes]

WIDTH, RATE, SERVERS = 2, 0.1, (1, 3, 2)
IDS = np.array(
    [0, 1, -1, 2**32, 2**32 + 1, -(2**32), 2**62, -(2**63), 2**63 - 1, 77, 2**40, -5]
)
"""Ids of which several have the same lower half."""

SOME = st.lists(st.sampled_from(range(len(IDS))), min_size=1, max_size=8)


class Tables:
    """One table, with its optimizer, on each cluster."""

    def __init__(self, strategies, folder):
        self.tables, self.optimizers, self.checkpoints = [], [], []
        self.folder, self.count = folder, itertools.count()
        for strategy in strategies:
            with strategy.scope():
                self.tables.append(zs.HashTable(WIDTH, name="any", seed=3))
                self.optimizers.append(zs.Optimizer(optax.adagrad(RATE)))
            whole = {"table": self.tables[-1], "optimizer": self.optimizers[-1]}
            self.checkpoints.append(zs.Checkpoint(**whole))
        self.first = self.tables[0].lookup(IDS)


class Dict:
    """What adagrad keeps of each id, by the formula of optax."""

    def __init__(self, first):
        self.first = first
        self.rows = {}
        self.sums = {}

    def row(self, number):
        return self.rows.get(number, self.first[number])

    def train(self, numbers, gradients):
        for number in dict.fromkeys(numbers):
            here = [n == number for n in numbers]
            gradient = gradients[here].sum(0, dtype=np.float32)
            total = self.sums.get(number, np.full(WIDTH, 0.1, "f4")) + gradient**2
            self.rows[number] = self.row(number) - np.float32(
                RATE
            ) * gradient / np.sqrt(total + np.float32(1e-7))
            self.sums[number] = total

    def copy(self):
        other = Dict(self.first)
        other.rows, other.sums = dict(self.rows), dict(self.sums)
        return other


class AnyIds(RuleBasedStateMachine):
    def __init__(self, tables):
        super().__init__()
        self.tables, self.at = tables, 0
        self.model = Dict(tables.first)
        self.table.remove(IDS)
        self.saved = []

    @property
    def table(self):
        return self.tables.tables[self.at]

    @rule(numbers=SOME, seed=st.integers(0, 9))
    def train(self, numbers, seed):
        draw = np.random.default_rng(seed)
        gradients = draw.normal(size=(len(numbers), WIDTH)).astype("f4")
        slices = zs.IndexedSlices(gradients, IDS[numbers])
        self.tables.optimizers[self.at].apply_gradients([(slices, self.table)])
        self.model.train(numbers, gradients)
        self.check()

    @rule(numbers=SOME)
    def assign(self, numbers):
        rows = np.arange(len(numbers) * WIDTH, dtype="f4").reshape(-1, WIDTH)
        self.table.assign(IDS[numbers], rows)
        self.model.rows.update(zip(numbers, rows, strict=True))
        self.check()

    @rule(numbers=SOME)
    def remove(self, numbers):
        self.table.remove(IDS[numbers])
        for number in numbers:
            self.model.rows.pop(number, None)
            self.model.sums.pop(number, None)
        self.check()

    @rule()
    def save(self):
        path = f"{self.tables.folder}/{next(self.tables.count)}"
        saved = self.tables.checkpoints[self.at].save(path)
        self.saved.append((saved, self.model.copy(), self.table.lookup(IDS)))

    @rule(back=st.integers(1, 2), at=st.sampled_from([1, 2, 0]), sees=st.booleans())
    def restore(self, back, at, sees):
        """On any number of servers, whatever is there; or has the rows sent."""
        if len(self.saved) < back:
            self.save()
        path, model, rows = self.saved[-min(back, len(self.saved))]
        self.at, self.model = at, model.copy()
        with contextlib.nullcontext() if sees else blind():
            self.tables.checkpoints[at].restore(path)
        np.testing.assert_array_equal(self.table.lookup(IDS), rows)
        self.check()

    def check(self):
        wanted = [self.model.row(number) for number in range(len(IDS))]
        found = self.table.lookup(IDS)
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
        assert len(self.table) == len(self.model.rows)
        items = {
            number: row
            for ids, rows in self.table.items()
            for number, row in zip(ids.tolist(), rows, strict=True)
        }
        assert items.keys() == {int(IDS[number]) for number in self.model.rows}
        for number in self.model.rows:
            np.testing.assert_array_equal(items[int(IDS[number])], found[number])


def blind():
    """No server finds the folder of a checkpoint."""

    async def sees(client, path):
        return [False] * max(SERVERS)

    return mock.patch.object(PsClient, "sees", sees)


def test_random_operations_equal_a_dict(tmp_path):
    with contextlib.ExitStack() as stack:
        strategies = []
        for count in SERVERS:
            local = stack.enter_context(zs.LocalCluster(num_ps=count, num_workers=1))
            strategy = zs.ParameterServerStrategy(local.resolver)
            strategies.append(stack.enter_context(strategy))
        tables = Tables(strategies, tmp_path)
        run_state_machine_as_test(
            lambda: AnyIds(tables),
            settings=settings(max_examples=6, stateful_step_count=20),
        )
