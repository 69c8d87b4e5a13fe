"""Tables of any id, beside a dict of rows and beside a variable that has all rows."""

import itertools

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from ps_stores import create_in
from ps_tables import (
    LIMITS,
    OPTIMIZERS,
    WIDTH,
    create,
    entry,
    first_rows,
    in_order,
    items,
    look_up,
    push,
    step,
    store_with,
)
from ps_trees import bind_each

from zstrat import memory
from zstrat.errors import (
    AlreadyExistsError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
)
from zstrat.ids import buckets_of, hashes_of
from zstrat.ps.tables import GrowingCell
from zstrat.wire import PullTable, Read, UpdateOp, VariableEntry

ROWS = UpdateOp.OPTIMIZE_ROWS
REMOVE = UpdateOp.REMOVE_ROWS
ADD, SET = UpdateOp.SCATTER_ADD, UpdateOp.SCATTER_UPDATE
ENDS = np.array([LIMITS.min, -1, 0, 1, LIMITS.max])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_table_moves_as_a_variable_with_the_same_first_rows(name):
    store, rng, count = store_with(name), np.random.default_rng(1), 300
    create_in(store, [VariableEntry(9, "dense", True, True)], [first_rows(range(300))])
    bind_each(store, 1, OPTIMIZERS[name](), [9])
    for size in [5, 0, 100, 1, 80, 300, 40, 3]:
        ids = in_order(rng.choice(count, size, replace=False))
        gradient = rng.normal(size=(len(ids), WIDTH)).astype("f4")
        order = np.argsort(ids)
        step(store, (1, ROWS, ids, gradient), (9, ROWS, ids[order], gradient[order]))
        (dense,) = store.read([Read(9, -1)])[1]
        np.testing.assert_array_equal(look_up(store, range(300)), dense)
    table, dense = store.variables[1], store.variables[9]
    assert table.cell.shape == (300, WIDTH)
    rows = table.table.index.rows(np.arange(300))
    for cell, other, leaf in zip(
        table.slots[1].cells,
        dense.slots[1].cells,
        table.slots[1].leaves,
        strict=True,
    ):
        here = cell.look()[rows] if leaf.rows else cell.look()
        np.testing.assert_array_equal(here, other.look(), err_msg=leaf.name)


@pytest.mark.parametrize(
    ("value", "gradient"), [("f8", "f8"), ("bfloat16", "f4"), ("f4", "bfloat16")]
)
def test_tables_of_other_dtypes(value, gradient):
    import ml_dtypes  # noqa: F401 (names bfloat16)

    store = store_with("adam", dtype=value, given=gradient)
    start = first_rows(range(20), dtype=value)
    create_in(store, [VariableEntry(9, "dense", True, True)], [start])
    bind_each(store, 1, OPTIMIZERS["adam"](), [9], gradient)
    for ids in [2, 3, 5], [3, 7], [0, 2, 19]:
        ids = in_order(ids)
        rows = np.linspace(-1, 1, len(ids) * WIDTH).reshape(-1, WIDTH).astype(gradient)
        order = np.argsort(ids)
        step(store, (1, ROWS, ids, rows), (9, ROWS, ids[order], rows[order]))
    (dense,) = store.read([Read(9, -1)])[1]
    np.testing.assert_array_equal(look_up(store, range(20)), dense)


def test_a_lookup_never_writes():
    store, ids = store_with("adam"), np.concatenate([ENDS, ENDS, [77]])
    np.testing.assert_array_equal(look_up(store, ids), first_rows(ids))
    assert store.variables[1].cell.shape == (0, WIDTH)
    step(store, (1, ROWS, in_order(ENDS), np.zeros((5, WIDTH), "f4")))
    np.testing.assert_array_equal(look_up(store, ids), first_rows(ids))
    found, rows = items(store)
    order = np.lexsort((found, buckets_of(hashes_of(found))))
    np.testing.assert_array_equal(order, np.arange(5))
    np.testing.assert_array_equal(rows, first_rows(found))
    assert sorted(found) == sorted(ENDS)


def test_items_come_by_buckets():
    store, ids = store_with(), np.arange(3000)
    step(store, (1, SET, ids, first_rows(ids)))
    bounds = [0, 1, 700, 700, 4096]
    parts = [items(store, 1, *pair)[0] for pair in itertools.pairwise(bounds)]
    np.testing.assert_array_equal(np.concatenate(parts), items(store)[0])
    assert buckets_of(hashes_of(parts[1])).max() < 700
    sizes = store.table_sizes([1])
    (rows,), (nbytes,) = sizes.rows, sizes.nbytes
    assert (rows, sizes.births, sizes.removed) == (3000, [3000], [0])
    assert nbytes >= 3000 * (WIDTH * 4 + 8 + 16)


def test_rows_that_are_born_again_begin_anew_with_their_slots():
    store, twin = store_with("momentum"), store_with("momentum")
    ids, ones = in_order([1, 2, 3]), np.ones((3, WIDTH), "f4")
    for _ in range(2):
        step(store, (1, ROWS, ids, ones))
        step(twin, (1, ROWS, ids, ones))
    step(store, (1, REMOVE, np.array([2, 55, 2])))
    np.testing.assert_array_equal(look_up(store, [2]), first_rows([2]))
    np.testing.assert_array_equal(look_up(store, [1, 3]), look_up(twin, [1, 3]))
    one = np.array([2])
    step(store, (1, ROWS, one, ones[:1]))
    np.testing.assert_allclose(look_up(store, [2]), first_rows([2]) - 0.1, rtol=1e-6)
    step(store, (1, ROWS, one, ones[:1]))
    # 0.1 * (1 + 1.9): the momentum began at 0.
    np.testing.assert_allclose(look_up(store, [2]), first_rows([2]) - 0.29, rtol=1e-5)


def test_updates_of_one_push_apply_in_order():
    store, one = store_with("sgd"), np.ones((1, WIDTH), "f4")
    five, seven = np.array([5]), np.array([7])
    answer = step(
        store,
        (1, ADD, five, one),
        (1, ROWS, five, one),
        (1, REMOVE, five),
        (1, ROWS, seven, one),
        (1, ADD, np.array([5, 5]), np.concatenate([one, one])),
    )
    assert answer.versions == [5] * 5
    np.testing.assert_array_equal(look_up(store, five), first_rows(five) + 1 + 1)
    np.testing.assert_allclose(look_up(store, seven), first_rows(seven) - 0.1, 1e-6)
    sizes = store.table_sizes([1])
    assert (sizes.rows, sizes.births, sizes.removed) == ([2], [3], [1])


class Failing(Exception):
    pass


@pytest.mark.parametrize("slots", [False, True])
def test_a_push_that_fails_leaves_no_births(monkeypatch, slots):
    store, one = store_with("momentum", 1, 2), np.ones((1, WIDTH), "f4")
    two, three = np.array([2]), np.array([3])
    if slots:
        step(store, (1, ROWS, two, one), (2, ROWS, two, one))
    before = [items(store, key) for key in (1, 2)]
    rows = store.engine.get(1).programs.rows

    def fail(*arguments):
        raise Failing

    with monkeypatch.context() as patched:
        patched.setattr(rows, "_calls", fail)
        patched.setattr(rows, "ready", lambda steps: None)
        with pytest.raises(Failing):
            step(
                store,
                (1, REMOVE, two),
                (1, ROWS, three, one),
                (2, ROWS, three, one),
            )
    for key, (ids, values) in zip((1, 2), before, strict=True):
        np.testing.assert_array_equal(items(store, key)[0], ids)
        np.testing.assert_array_equal(items(store, key)[1], values)
        assert store.variables[key].cell.shape[0] == len(ids)
    assert store.table_sizes([1]).births == [int(slots)]
    step(store, (1, ROWS, three, one))
    np.testing.assert_allclose(look_up(store, three), first_rows(three) - 0.1, 1e-5)


def test_a_machine_without_memory_refuses_rows(monkeypatch, tmp_path):
    facts, cell = tmp_path / "meminfo", GrowingCell((2**14,), np.dtype("f4"))
    facts.write_text("MemAvailable: 70000 kB\n")
    monkeypatch.setattr(memory, "_FACTS", facts)
    cell.extend(1)[...] = 3
    with pytest.raises(ResourceExhaustedError):
        cell.extend(2000)
    assert cell.shape == (1, 2**14)
    cell.extend(1025)
    assert cell.look()[0, 0] == 3


WHOLE = [
    (UpdateOp.ASSIGN, np.zeros((0, WIDTH), "f4")),
    (UpdateOp.ADD, np.zeros((0, WIDTH), "f4")),
    (UpdateOp.OPTIMIZE, np.zeros((0, WIDTH), "f4")),
    (REMOVE, np.array([1.0])),
    (REMOVE, np.array([[1]])),
    (ROWS, np.array([1], np.int32), np.zeros((1, WIDTH), "f4")),
    (ROWS, np.array([1, 1]), np.zeros((2, WIDTH), "f4")),
    (ROWS, in_order(range(9))[::-1], np.zeros((9, WIDTH), "f4")),
    (ROWS, np.array([1]), np.zeros((2, WIDTH), "f4")),
    (ADD, np.array([1], np.uint64), np.zeros((1, WIDTH), "f4")),
    (ADD, np.array([1]), np.zeros((1, WIDTH + 1), "f4")),
]


@pytest.mark.parametrize("update", WHOLE, ids=range(len(WHOLE)))
def test_what_a_table_cannot_do_is_refused(update):
    store = store_with("sgd")
    with pytest.raises(InvalidArgumentError, match="'t1'"):
        store.plan_push(push((1, ADD, ENDS, first_rows(ENDS)), (1, *update)))
    assert store.variables[1].version == 0


def test_reads_that_a_table_or_a_variable_has_not_are_refused():
    store = store_with()
    create_in(store, [VariableEntry(9, "w", True, False)], [np.zeros((4, 2), "f4")])
    for wrong in (
        lambda: store.read([Read(1, -1)]),
        lambda: store.plan_rows([], [1], (np.array([1.5]),)),
        lambda: store.plan_items(PullTable(7, 9, 0, 1)),
        lambda: store.plan_items(PullTable(7, 1, 0, 4097)),
        lambda: store.table_sizes([9]),
        lambda: store.plan_push(push((9, REMOVE, np.array([1])))),
    ):
        with pytest.raises(InvalidArgumentError):
            wrong()
    with pytest.raises(NotFoundError):
        store.plan_items(PullTable(7, 2, 0, 1))


def test_creating_again_keeps_a_table_and_nothing_else():
    store, ids = store_with(), np.array([3])
    step(store, (1, ADD, ids, first_rows(ids)))
    create(store, entry(1))
    assert len(items(store)[0]) == 1
    for wrong in entry(1, (4,)), entry(1, dtype="f8"), entry(1)._replace(seed=1):
        with pytest.raises(AlreadyExistsError):
            create(store, wrong)
    with pytest.raises(AlreadyExistsError):
        create_in(store, [VariableEntry(1, "t1", True, True)], [first_rows(ids)])
    for wrong in entry(2, (0,)), entry(2, (2**20,)), entry(2, [1] * 99):
        with pytest.raises(InvalidArgumentError):
            create(store, wrong)
    with pytest.raises(InvalidArgumentError):
        create(store, entry(2, dtype="i4"), code=b"-0.5 1")
    store.delete([1])
    create(store, entry(1))
    assert not len(items(store)[0])
    assert store.variables[1].version > 1


class Training(RuleBasedStateMachine):
    """A table and a dict of rows: descent by 0.5 times the gradient, and scatters."""

    ids = st.lists(st.sampled_from([*range(-20, 40), *ENDS.tolist()]), max_size=30)

    @initialize(name=st.sampled_from(["sgd", "momentum"]))
    def begin(self, name):
        self.store = store_with(name)
        self.rate, self.decay = 0.1, 0.9 if name == "momentum" else 0.0
        self.rows, self.speed, self.pinned = {}, {}, []

    def row(self, number):
        if number not in self.rows:
            self.rows[number] = first_rows([number])[0]
            self.speed[number] = np.zeros(WIDTH, "f4")
        return self.rows[number]

    @rule(ids=ids)
    def train(self, ids):
        ids = in_order(ids)
        gradient = np.arange(len(ids) * WIDTH, dtype="f4").reshape(-1, WIDTH) / 8
        step(self.store, (1, ROWS, ids, gradient))
        for number, each in zip(ids.tolist(), gradient, strict=True):
            before = self.row(number)
            speed = each + np.float32(self.decay) * self.speed[number]
            self.speed[number] = speed
            self.rows[number] = before - np.float32(self.rate) * speed

    @rule(ids=ids, sets=st.booleans())
    def scatter(self, ids, sets):
        ids = np.array(ids, np.int64)
        values = np.arange(len(ids) * WIDTH, dtype="f4").reshape(-1, WIDTH)
        step(self.store, (1, SET if sets else ADD, ids, values))
        for number, each in zip(ids.tolist(), values, strict=True):
            before = self.row(number)
            self.rows[number] = each if sets else before + each

    @rule(ids=ids, born=ids)
    def remove(self, ids, born):
        born = np.array(born, np.int64)
        values = np.ones((len(born), WIDTH), "f4")
        step(self.store, (1, REMOVE, np.array(ids, np.int64)), (1, SET, born, values))
        for number in ids:
            self.rows.pop(number, None)
        for number in born.tolist():
            self.row(number)
            self.rows[number] = values[0]

    @rule()
    def pin(self):
        cells = [self.store.variables[1].cell, self.store.variables[1].table.ids]
        slots = self.store.variables[1].slots.get(1)
        cells += slots.with_rows if slots else []
        self.pinned += [(cell.pin(), cell.look().copy()) for cell in cells]
        del self.pinned[:-6]

    @invariant()
    def is_equal(self):
        known = sorted(self.rows)
        ids, rows = items(self.store)
        assert sorted(ids.tolist()) == known
        wanted = np.array([self.rows[n] for n in ids.tolist()]).reshape(-1, WIDTH)
        np.testing.assert_allclose(rows, wanted, rtol=2e-5, atol=1e-5)
        unknown = np.array([n for n in range(30, 50) if n not in self.rows], int)
        np.testing.assert_array_equal(look_up(self.store, unknown), first_rows(unknown))
        for pin, value in self.pinned:
            out = np.empty(pin.nbytes, np.uint8)
            pin.copy(0, out)
            np.testing.assert_array_equal(out, value.reshape(-1).view(np.uint8))


Training.TestCase.settings = settings(
    max_examples=25, stateful_step_count=15, deadline=None, derandomize=True
)
TestTraining = Training.TestCase


def test_many_tables_have_their_memory_beside_each_other():
    cells = [GrowingCell((WIDTH,), np.dtype("f4")) for _ in range(600)]
    for number, cell in enumerate(cells):
        cell.extend(2)[...] = number
    assert [cell.look().sum() for cell in cells] == [6 * n for n in range(600)]
