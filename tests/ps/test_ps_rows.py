"""Gradients of rows: optax on the whole table, all rows but the named ones kept."""

import jax
import ml_dtypes
import numpy as np
import optax
import optax.contrib
import pytest
from ps_stores import create_in, push_to
from ps_trees import bind_each
from tiers import combined

from zstrat.errors import InvalidArgumentError, NotFoundError, UnavailableError
from zstrat.native import IS_BUILT, LoopProgram
from zstrat.ps import OptimizerEngine, Store
from zstrat.ps.engine import _row_programs as row_kinds
from zstrat.ps.engine import gather
from zstrat.wire import Push, Read, Update, UpdateOp, VariableEntry

BF16 = np.dtype(ml_dtypes.bfloat16)


ROWS, WIDTH = 40, 5


OPTIMIZERS = {
    "sgd": lambda: optax.sgd(0.1),
    "momentum": lambda: optax.sgd(0.1, 0.9, nesterov=True),
    "adam": lambda: optax.adam(1e-2),
    "adamw": lambda: optax.adamw(1e-2),
    "adagrad": lambda: optax.adagrad(0.1),
    "rmsprop": lambda: optax.rmsprop(0.1),
    "schedule": lambda: optax.adam(optax.exponential_decay(0.1, 2, 0.5)),
    "inject": lambda: optax.inject_hyperparams(optax.adam)(learning_rate=0.1),
    "adadelta": lambda: optax.adadelta(0.1),
    "lion": lambda: optax.lion(1e-2),
    "clipped": lambda: optax.chain(optax.clip(0.5), optax.adagrad(0.1)),
    "every second": lambda: optax.MultiSteps(
        optax.sgd(0.1), 2
    ).gradient_transformation(),
    "schedule free": lambda: optax.contrib.schedule_free_sgd(0.1),
    "no nans": lambda: optax.chain(optax.zero_nans(), optax.sgd(0.1)),
    "lamb": lambda: optax.lamb(1e-2),
    "adafactor": lambda: optax.adafactor(1e-2),
}


WHOLE = ("lamb", "adafactor", "no nans")


class Lazy:
    """What a table should be, by optax on all of it: rows that a gradient does not
    name stay, and so do theirs of the state."""

    def __init__(self, name: str, value: np.ndarray) -> None:
        self.transformation = OPTIMIZERS[name]()
        self.value, self.rows = value, len(value)
        with jax.enable_x64(value.dtype == "f8"):
            self.state = self.transformation.init(value)
        self.step = jax.jit(self._step)

    def _step(self, gradient, state, value):
        updates, state = self.transformation.update(gradient, state, value)
        return optax.apply_updates(value, updates), state

    def push(self, indices: np.ndarray, gradient: np.ndarray) -> None:
        summed = np.zeros((self.rows, *gradient.shape[1:]), "f8")
        np.add.at(summed, indices, gradient.astype("f8"))
        with jax.enable_x64(self.value.dtype == "f8"):
            gradient = summed.astype(gradient.dtype)
            value, state = self.step(gradient, self.state, self.value)
        named = np.isin(np.arange(self.rows), indices)
        self.value = self._only(named, value, self.value)
        self.state = jax.tree.map(
            lambda new, old: self._only(named, new, old), state, self.state
        )

    def _only(self, named: np.ndarray, new: object, old: object) -> np.ndarray:
        new, old = np.asarray(new), np.asarray(old)
        if new.shape[:1] != (self.rows,):
            return new
        chosen = named.reshape(-1, *[1] * (new.ndim - 1))
        return np.where(chosen, new, old.astype(new.dtype))


def store_with(*names: str) -> Store:
    store = Store(OptimizerEngine(lambda code: OPTIMIZERS[code.decode()]()), task="ps")
    for number, name in enumerate(names, 1):
        plan = store.plan_optimizer(number, name, name.encode())
        plan.compute()
        store.commit(plan)
    return store


def table(seed: int, rows: int = ROWS, row=(WIDTH,), dtype="f4") -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(rows, *row)).astype(dtype)


def create(store: Store, values: dict[int, np.ndarray], gradients=None) -> None:
    """Variables, each a tree of its own of the optimizer, if there is one."""
    entries = [VariableEntry(key, f"t{key}", True, True) for key in values]
    create_in(store, entries, list(values.values()))
    if 1 in store.engine:
        made = OPTIMIZERS[store.engine.get(1).name]()
        bind_each(store, 1, made, values, gradients)


def rows_push(*updates, optimizer: int = 1) -> Push:
    """Of ``(key, indices, gradient)``."""
    op = int(UpdateOp.OPTIMIZE_ROWS)
    heads = [Update(key, op, optimizer, 2) for key, *_ in updates]
    arrays = tuple(array for _, *pair in updates for array in pair)
    return Push(7, -1, 0, 0, heads, arrays)


def dense_push(key: int, gradient: np.ndarray, optimizer: int = 1) -> Push:
    return Push(
        7, -1, 0, 0, [Update(key, int(UpdateOp.OPTIMIZE), optimizer, 1)], (gradient,)
    )


def value_of(store: Store, key: int) -> np.ndarray:
    return np.array(store.read([Read(key, -1)])[1][0])


@pytest.mark.parametrize(
    "name", combined([n for n in OPTIMIZERS if n not in WHOLE], step=2)
)
def test_only_the_named_rows_and_their_slots_change(name):
    store, rng = store_with(name), np.random.default_rng(1)
    create(store, {1: table(0)})
    want = Lazy(name, table(0))
    for turn in range(5):
        indices = rng.integers(0, ROWS, [7, 1, 40, 0, 9][turn])
        gradient = table(turn, len(indices))
        assert push_to(store, rows_push((1, indices, gradient))).versions == [turn + 1]
        want.push(indices, gradient)
        np.testing.assert_allclose(
            value_of(store, 1), want.value, rtol=1e-4, atol=1e-6, err_msg=name
        )


@pytest.mark.parametrize("name", ["sgd", "adam", "schedule free"])
def test_whole_gradients_and_rows_share_slots(name):
    store, rng = store_with(name), np.random.default_rng(1)
    create(store, {1: table(0)})
    want = Lazy(name, table(0))
    everything = np.arange(ROWS)
    for turn in range(6):
        if turn in (1, 2, 4):
            gradient = table(turn)
            push_to(store, dense_push(1, gradient))
            want.push(everything, gradient)
        else:
            indices, gradient = rng.integers(0, ROWS, 9), table(turn, 9)
            push_to(store, rows_push((1, indices, gradient)))
            want.push(indices, gradient)
        np.testing.assert_allclose(
            value_of(store, 1), want.value, rtol=1e-4, atol=1e-6, err_msg=name
        )


@pytest.mark.parametrize("row", [(), (0,), (3, 2)])
def test_rows_of_any_shape(row):
    store = store_with("adam")
    create(store, {1: table(0, row=row)})
    want = Lazy("adam", table(0, row=row))
    for turn in range(2):
        indices = np.array([3, 0, 3, 39])
        gradient = table(turn, 4, row)
        push_to(store, rows_push((1, indices, gradient)))
        want.push(indices, gradient)
    np.testing.assert_allclose(value_of(store, 1), want.value, rtol=1e-4)


@pytest.mark.parametrize(
    ("value", "gradient"),
    [
        ("f8", "f8"),
        ("f4", "f8"),
        ("f2", "f2"),
        (BF16, BF16),
        (BF16, "f4"),
        ("f4", BF16),
    ],
)
def test_rows_of_other_dtypes(value, gradient):
    store, want = store_with("adam"), Lazy("adam", table(0, dtype=value))
    taken = "f4" if (value, gradient) == ("f4", "f8") else gradient
    create(store, {1: table(0, dtype=value)}, taken)
    for turn in range(3):
        indices = np.array([5, 2, 5, 30])
        rows = table(turn, 4, dtype=gradient)
        push_to(store, rows_push((1, indices, rows)))
        kept = rows.astype("f4") if (value, gradient) == ("f4", "f8") else rows
        want.push(indices, kept)
    got = value_of(store, 1)
    assert got.dtype == want.value.dtype == value
    # Of 16 bits, XLA rounds fewer times than optax does op by op.
    tolerance = {2: 2e-2, 4: 1e-5, 8: 1e-12}[got.itemsize]
    tolerance = max(tolerance, 1e-4 if rows.itemsize == 2 else 0)
    np.testing.assert_allclose(
        got.astype("f8"), want.value.astype("f8"), rtol=tolerance, atol=tolerance
    )


@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_tables_of_one_push_are_updated_as_if_each_were_alone(name, monkeypatch):
    # Calls of 8 rows, so that tables share calls and calls share tables.
    monkeypatch.setattr(row_kinds, "CALL_BYTES", 8 * WIDTH * 4)
    store, rng = store_with(name), np.random.default_rng(3)
    values = {key: table(key, ROWS + key) for key in range(5)}
    values[7] = table(7, 12, (3,))
    create(store, values)
    want = {key: Lazy(name, value) for key, value in values.items()}
    for turn in range(4):
        updates = []
        for key, lazy in want.items():
            if (turn + key) % 4 == 0:
                continue  # counts drift apart
            indices = np.sort(rng.choice(lazy.rows, 3 * key % 12, replace=False))
            gradient = table(turn + key, len(indices), lazy.value.shape[1:])
            updates.append((key, indices, gradient))
            lazy.push(indices, gradient)
        push_to(store, rows_push(*updates))
    for key, lazy in want.items():
        np.testing.assert_allclose(
            value_of(store, key), lazy.value, rtol=1e-4, atol=1e-6, err_msg=name
        )


def test_one_table_twice_in_a_push_takes_two_steps():
    store, want = store_with("adam"), Lazy("adam", table(0))
    create(store, {1: table(0), 2: table(0)})
    first, second = np.array([1, 5]), np.array([5, 7])
    g = table(9, 2)
    push_to(store, rows_push((1, first, g), (1, second, g), (2, first, g)))
    want.push(first, g)
    np.testing.assert_allclose(value_of(store, 2), want.value, rtol=1e-5)
    want.push(second, g)
    np.testing.assert_allclose(value_of(store, 1), want.value, rtol=1e-5)


def test_programs_are_few_and_shared_by_tables():
    store, rng = store_with("adam"), np.random.default_rng(0)
    create(store, {1: table(0, 3000), 2: table(1, 777)})
    for size in [*range(1, 200, 37), 700]:
        for key in (1, 2):
            rows = rng.choice(777, size, replace=False)
            push_to(store, rows_push((key, rows, table(2, size))))
    # 16 to 1024 rows in steps of two per doubling, and two for slots.
    assert store.engine.programs <= 12 + 2
    before = store.engine.programs
    rows = rng.choice(777, 333, replace=False)
    push_to(store, rows_push((1, rows, table(2, 333)), (2, rows, table(2, 333))))
    assert store.engine.programs == before


def test_a_reader_never_sees_a_row_change():
    store = store_with("adam")
    create(store, {1: table(0)})
    indices, gradient = np.arange(0, ROWS, 3), np.ones((14, WIDTH), "f4")

    def address() -> int:
        return store.read([Read(1, -1)])[1][0].__array_interface__["data"][0]

    places = set()
    for _ in range(3):
        places.add(address())
        push_to(store, rows_push((1, indices, gradient)))
    assert len(places) == 1  # in place while nobody looks
    (lease,) = store.read([Read(1, -1)])[1]
    slots = [cell.lease() for cell in store.variables[1].slots[1].cells]
    before = [x.tobytes() for x in (lease, *slots)]
    push_to(store, rows_push((1, indices, gradient)))
    assert [x.tobytes() for x in (lease, *slots)] == before
    now = value_of(store, 1)
    changed = (now != lease).any(axis=1)
    assert changed[indices].all()
    assert changed.sum() == len(indices)


def test_slots_of_a_table_larger_than_a_block_are_made_in_blocks(monkeypatch):
    monkeypatch.setattr(row_kinds, "CALL_BYTES", 16 * WIDTH * 4)
    # Its slots begin as the value: every row shows whether it was made.
    store, want = store_with("schedule free"), Lazy("schedule free", table(0))
    create(store, {1: table(0)})
    push_to(store, rows_push((1, np.empty(0, int), np.empty((0, WIDTH), "f4"))))
    want.push(np.empty(0, int), np.empty((0, WIDTH), "f4"))
    leaves = jax.tree.leaves(want.state)
    slots = store.variables[1].slots[1]
    assert any(leaf.rows for leaf in slots.leaves)
    for cell, leaf, about in zip(slots.cells, leaves, slots.leaves, strict=True):
        assert about.rows == (leaf.shape == (ROWS, WIDTH))
        np.testing.assert_allclose(cell.lease(), leaf, rtol=1e-6)


@pytest.mark.parametrize("name", WHOLE)
def test_what_is_not_row_by_row_is_refused_for_rows(name):
    store = store_with(name)
    create_in(store, [VariableEntry(1, "v", True, False)], [table(0)])
    bind_each(store, 1, OPTIMIZERS[name](), [1])
    push_to(store, dense_push(1, table(1)))
    with pytest.raises(InvalidArgumentError, match="'v'"):
        push_to(store, rows_push((1, np.array([1]), table(1, 1))))


HOSTILE = [
    (np.array([ROWS]), r"indices in \[0, 40\), got 40 at place 0"),
    (np.array([3, -1]), r"got -1 at place 1"),
    (np.array([0, 2**64 - 1], "u8"), r"got 18446744073709551615 at place 1"),
    (np.array([-(2**63), 2**62]), r"got -9223372036854775808 at place 0"),
    (np.array([1.0]), r"integer indices of shape \(n,\), got float64"),
    (np.array([True]), r"got bool"),
    (np.array([[1]]), r"of shape \(1, 1\)"),
]


@pytest.mark.parametrize(("indices", "words"), HOSTILE)
def test_hostile_indices_change_nothing_and_are_named(indices, words):
    store = store_with("sgd")
    create(store, {1: table(0)})
    gradient = np.ones((*indices.shape, WIDTH), "f4")
    with pytest.raises(InvalidArgumentError, match=rf"'t1'.*{words}"):
        push_to(
            store,
            rows_push(
                (1, np.array([0]), np.ones((1, WIDTH), "f4")), (1, indices, gradient)
            ),
        )
    with pytest.raises(InvalidArgumentError, match=rf"'t1': a lookup.*{words}"):
        store.plan_rows([], [1], (indices,))
    np.testing.assert_array_equal(value_of(store, 1), table(0))


def test_gradients_of_rows_must_fit():
    store = store_with("sgd")
    create(store, {1: table(0)})
    create_in(store, [VariableEntry(2, "scalar", True, False)], [np.ones((), "f4")])
    bind_each(store, 1, OPTIMIZERS["sgd"](), [2])
    one = np.array([1])
    with pytest.raises(InvalidArgumentError, match=r"\(1, 5\)"):
        push_to(store, rows_push((1, one, np.ones((1, 4), "f4"))))
    with pytest.raises(InvalidArgumentError, match="'sgd'"):
        push_to(store, rows_push((1, one, np.ones((1, WIDTH), int))))
    with pytest.raises(InvalidArgumentError, match=r"'scalar'.*'sgd'"):
        push_to(store, rows_push((2, one, np.ones(1, "f4"))))
    with pytest.raises(NotFoundError):
        push_to(store, rows_push((1, one, np.ones((1, WIDTH), "f4")), optimizer=9))
    push = Push(7, -1, 0, 0, [Update(1, int(UpdateOp.OPTIMIZE_ROWS), 1, 1)], (one,))
    with pytest.raises(InvalidArgumentError):
        push_to(store, push)


def test_a_failing_call_changes_nothing_or_loses_the_value_in_words(monkeypatch):
    monkeypatch.setattr(row_kinds, "CALL_BYTES", 16 * WIDTH * 4)
    monkeypatch.setattr(row_kinds, "IS_BUILT", False)  # loops cannot fail
    store = store_with("adagrad")
    create(store, {1: table(0)})
    rows, gradient = np.arange(ROWS), table(1)
    push_to(store, rows_push((1, rows, gradient)))
    before = value_of(store, 1)
    calls, run = [], row_kinds.RowProgram.run

    def failing(program, *given):
        calls.append(program)
        if len(calls) in (1, 3):
            raise RuntimeError("RESOURCE_EXHAUSTED")
        return run(program, *given)

    monkeypatch.setattr(row_kinds.RowProgram, "run", failing)
    with pytest.raises(RuntimeError, match="EXHAUSTED"):
        push_to(store, rows_push((1, rows, gradient)))
    np.testing.assert_array_equal(value_of(store, 1), before)
    with pytest.raises(RuntimeError, match="EXHAUSTED"):
        push_to(store, rows_push((1, rows, gradient)))  # its second call
    with pytest.raises(UnavailableError, match="EXHAUSTED"):
        store.read([Read(1, -1)])
    push = Push(7, -1, 0, 0, [Update(1, int(UpdateOp.ASSIGN), 0, 1)], (table(0),))
    push_to(store, push)
    push_to(store, rows_push((1, rows, gradient)))
    want = Lazy("adagrad", table(0))
    want.push(rows, gradient)
    np.testing.assert_allclose(value_of(store, 1), want.value, rtol=1e-5)


OF_LOOPS = {
    "sgd", "momentum", "adam", "adamw", "adagrad", "rmsprop", "schedule", "inject",
    "schedule free", "adadelta", "lion", "clipped",
}  # fmt: skip


@pytest.mark.skipif(not IS_BUILT, reason="the extension is not built")
@pytest.mark.parametrize(
    ("name", "row"),
    [
        *((name, (3,)) for name in OPTIMIZERS if name not in WHOLE),
        ("adam", ()),
        ("adagrad", (2, 300)),
    ],
)
def test_compiled_loops_update_rows_as_xla_does(monkeypatch, name, row):
    """But for the last bits, as XLA joins a product and a sum."""
    updates, update = [], LoopProgram.update

    def counted(program, *given):
        updates.append(program)
        update(program, *given)

    def trained():
        store, rng = store_with(name), np.random.default_rng(0)
        create(store, {1: table(0, row=row)})
        for turn, count in enumerate((5, 40, 0, 17, 1)):
            rows = rng.permutation(ROWS)[:count]
            push_to(store, rows_push((1, rows, table(turn, count, row))))
        return value_of(store, 1)

    monkeypatch.setattr(LoopProgram, "update", counted)
    by_loops = trained()
    assert len(updates) == (5 if name in OF_LOOPS else 0)
    monkeypatch.setattr(row_kinds, "IS_BUILT", False)
    updates.clear()
    np.testing.assert_allclose(by_loops, trained(), rtol=2e-5, atol=1e-6)
    assert not updates


@pytest.mark.parametrize("dtype", ["f4", "f8", "i4", "?", "f2", BF16])
@pytest.mark.parametrize("row", [(), (0,), (3,), (2, 2)])
def test_rows_are_read_in_the_order_of_the_indices(dtype, row):
    value = table(0, 9, row, "f4").astype(dtype)
    indices = np.array([8, 0, 8, 3], "i4")
    np.testing.assert_array_equal(gather(value, indices.astype(int)), value[indices])
    store = store_with()
    create(store, {1: value, 2: value})
    none = np.empty(0, "u2")
    plan = store.plan_rows([Read(2, -1)], [1, 1, 2], (indices, none, indices))
    plan.compute()
    answer = store.commit(plan)
    assert answer.versions == [0]
    dense, some, nothing, others = answer.arrays
    np.testing.assert_array_equal(dense, value)
    np.testing.assert_array_equal(some, value[indices])
    np.testing.assert_array_equal(others, value[indices])
    assert nothing.shape == (0, *row)
    assert nothing.dtype == some.dtype == value.dtype
    assert store.statistics()["rows"] == 8


def test_a_lookup_must_name_variables_and_is_bounded():
    store = Store(
        OptimizerEngine(lambda code: None), task="/job:ps/task:0", largest=900
    )
    create(store, {1: table(0)})
    one = np.array([1])
    with pytest.raises(NotFoundError):
        store.plan_rows([], [5], (one,))
    with pytest.raises(InvalidArgumentError):
        store.plan_rows([], [1, 1], (one,))
    with pytest.raises(InvalidArgumentError, match=r"\b1080\b"):
        store.plan_rows([], [1], (np.zeros(30, int),))


def with_truth_beside():
    """Half a step where the gradient keeps its sign; the signs are the state."""

    def moved(gradient, was_up):
        same = (gradient > 0) == was_up
        return jax.numpy.where(same, -0.5, -1.0) * gradient

    def signs(tree):
        return jax.tree.map(lambda leaf: leaf > 0, tree)

    def update(gradients, state, value=None):
        del value
        return jax.tree.map(moved, gradients, state), signs(gradients)

    return optax.GradientTransformation(signs, update)


def test_slots_of_truth_beside_rows_are_updated(monkeypatch):
    monkeypatch.setitem(OPTIMIZERS, "signs", with_truth_beside)
    store, lazy = store_with("signs"), Lazy("signs", table(0, row=(4,)))
    create(store, {1: table(0, row=(4,))})
    for turn, rows in enumerate(([1, 2], [2, 3, 7], [1, 3])):
        gradient = table(turn + 1, len(rows), (4,))
        push_to(store, rows_push((1, np.array(rows), gradient)))
        lazy.push(np.array(rows), gradient)
    np.testing.assert_allclose(value_of(store, 1), lazy.value, rtol=1e-6)


@pytest.mark.skipif(not IS_BUILT, reason="the extension is not built")
def test_no_row_is_updated_without_memory_for_all_gradients(monkeypatch):
    store = store_with("sgd")
    create(store, {1: table(0), 2: table(1)})
    updates = [(key, np.arange(3), table(key, 3)) for key in (1, 2)]
    push_to(store, rows_push(*updates))
    before, copied, copy = [value_of(store, 1), value_of(store, 2)], [], np.array

    def failing(array, *rest):
        copied.append(array)
        if len(copied) == 2:
            raise MemoryError
        return copy(array, *rest)

    monkeypatch.setattr(np, "ascontiguousarray", failing)
    with pytest.raises(MemoryError):
        push_to(store, rows_push(*updates))
    np.testing.assert_array_equal([value_of(store, 1), value_of(store, 2)], before)
