"""A push applies whole or not at all, whatever fails on the way; one after another, its
updates see what those before them left."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import optax.contrib
import pytest
from ps_stores import create_in, push_to
from ps_trees import bind_each, binding

from zstrat.errors import ResourceExhaustedError, UnavailableError
from zstrat.ps import OptimizerEngine, Store
from zstrat.ps.engine._slots import Ahead, SlotStep
from zstrat.ps.engine._xla import UpdatePrograms
from zstrat.ps.store import Cell
from zstrat.ps.store import _cell as cell_module
from zstrat.wire import Push, Read, Update, UpdateOp, VariableEntry

BF16 = np.dtype(ml_dtypes.bfloat16)
TASK = "/job:ps/task:0"
OPTIMIZERS = {
    "adam": lambda: optax.adam(0.1),
    "schedule free": lambda: optax.contrib.schedule_free_sgd(0.1),
    # Which compiled loops do not have, so XLA updates rows.
    "tanh": lambda: optax.chain(
        optax.adam(0.1), optax.stateless(lambda g, _: jax.tree.map(jnp.tanh, g))
    ),
}
ONES = np.ones((8, 2), "f4")
ROWS = (np.array([1, 3]), np.ones((2, 2), "f4"))


def store_with(name: str, *values: np.ndarray, gradients="f4") -> Store:
    """Optimizer 1, and variables from 1 on (two of zeros)."""
    store = Store(OptimizerEngine(lambda code: OPTIMIZERS[code.decode()]()), task=TASK)
    plan = store.plan_optimizer(1, name, name.encode())
    plan.compute()
    store.commit(plan)
    values = values or (np.zeros((8, 2), "f4"), np.zeros((8, 2), "f4"))
    entries = [
        VariableEntry(k, f"v{k}", True, False) for k in range(1, 1 + len(values))
    ]
    create_in(store, entries, values)
    bind_each(store, 1, OPTIMIZERS[name](), range(1, 1 + len(values)), gradients)
    return store


def push(*updates) -> Push:
    """``updates``: (key, op, array, ...)."""
    entries = [
        Update(key, int(op), int("OPTIMIZE" in op.name), len(arrays))
        for key, op, *arrays in updates
    ]
    return Push(
        7, -1, 0, 0, entries, tuple(a for _, _, *arrays in updates for a in arrays)
    )


def value_of(store: Store, key: int) -> np.ndarray:
    return np.array(store.read([Read(key, -1)])[1][0])


def failing_once(call):
    """A program whose first call fails after it has taken what it was given."""
    left = [RuntimeError("RESOURCE_EXHAUSTED: out of memory")]

    def flaky(*arguments):
        out = call(*arguments)
        if left:
            raise left.pop()
        return out

    return flaky


def test_one_failure_of_xla_does_not_break_updates_of_rows():
    store, twin = store_with("tanh"), store_with("tanh")
    update = push((1, UpdateOp.OPTIMIZE_ROWS, *ROWS))
    for each in (store, twin):
        push_to(each, update)
    (kind,) = store.engine.get(1).programs.rows._kinds._alike.values()
    (program,) = kind.programs.values()
    program.call = failing_once(program.call)
    with pytest.raises(RuntimeError, match="out of memory"):
        push_to(store, update)
    np.testing.assert_array_equal(value_of(store, 1), value_of(twin, 1))
    for _ in range(2):
        push_to(store, update)
        push_to(twin, update)
        np.testing.assert_array_equal(value_of(store, 1), value_of(twin, 1))


FIVES = np.full((8, 2), 5, "f4")


@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize(
    "earlier",
    [
        (UpdateOp.ASSIGN, FIVES),
        (UpdateOp.ADD, FIVES),
        (UpdateOp.SCATTER_UPDATE, np.arange(8), FIVES),
    ],
)
def test_slots_that_start_from_the_value_start_from_the_one_before_them(earlier, rows):
    """The average of schedule-free begins at 5 and not at 0."""
    store, twin = store_with("schedule free"), store_with("schedule free")
    gradient = (UpdateOp.OPTIMIZE_ROWS, *ROWS) if rows else (UpdateOp.OPTIMIZE, ONES)
    assert push_to(store, push((1, *earlier), (1, *gradient))).versions == [2, 2]
    push_to(twin, push((1, *earlier)))
    push_to(twin, push((1, *gradient)))
    for _ in range(2):
        np.testing.assert_array_equal(value_of(store, 1), value_of(twin, 1))
        push_to(store, push((1, *gradient)))
        push_to(twin, push((1, *gradient)))
    assert (value_of(store, 1)[ROWS[0]] < 5).all()
    assert (value_of(store, 1)[ROWS[0]] > 4).all()


def test_new_slots_are_there_before_numpy_may_write_the_value():
    def init(value):
        return jax.lax.fori_loop(0, 60, lambda _, x: jnp.tanh(x @ (x.T @ x)), value)

    slow = optax.GradientTransformation(init, lambda g, s, _=None: (g, s))
    programs = UpdatePrograms(1, "slow")
    (rule,) = binding(slow, ((1,), (400, 400), "f4")).rules()
    step = SlotStep(Cell(np.eye(400, dtype="f4")), {}, rule, np.dtype("f4"))
    programs.prepare([step], [], Ahead())
    (slot,) = step.slots[1].cells
    assert slot.give().is_ready()


MIXED = [
    (UpdateOp.OPTIMIZE, UpdateOp.OPTIMIZE_ROWS),
    (UpdateOp.OPTIMIZE_ROWS, UpdateOp.OPTIMIZE_ROWS),
    (UpdateOp.OPTIMIZE_ROWS, UpdateOp.OPTIMIZE),
    (UpdateOp.OPTIMIZE, UpdateOp.OPTIMIZE),
]


@pytest.mark.parametrize("kinds", MIXED)
def test_gradients_of_another_dtype_than_their_variable_in_one_push(kinds):
    """bfloat16 with its first float32 gradient: its slots become float32."""
    values = (np.zeros((8, 2), BF16), np.zeros(3, "f4"))
    store, twin = store_with("adam", *values), store_with("adam", *values)
    updates = [
        (1, op, *(ROWS if op is UpdateOp.OPTIMIZE_ROWS else [ONES])) for op in kinds
    ]
    push_to(store, push((2, UpdateOp.ADD, np.ones(3, "f4")), *updates))
    assert (value_of(store, 2) == 1).all()
    for update in updates:
        push_to(twin, push(update))
    np.testing.assert_array_equal(value_of(store, 1), value_of(twin, 1))


def no_memory(*_):
    raise MemoryError


SCATTER = (UpdateOp.SCATTER_ADD, *ROWS)
ADD = (UpdateOp.ADD, ONES)


@pytest.mark.parametrize(
    "updates",
    [
        [SCATTER, ADD],
        [(UpdateOp.OPTIMIZE, ONES), ADD],
        [ADD, (UpdateOp.OPTIMIZE, ONES), SCATTER],
        [(UpdateOp.OPTIMIZE, ONES), (UpdateOp.OPTIMIZE_ROWS, *ROWS)],
        [(UpdateOp.ASSIGN, FIVES), (UpdateOp.OPTIMIZE_ROWS, *ROWS)],
    ],
)
def test_memory_for_all_of_a_push_is_there_before_it_begins(monkeypatch, updates):
    store, twin = store_with("adam"), store_with("adam")
    pin = store.variables.find([1])[0].cell.pin()
    whole = push(*[(1, *update) for update in updates])
    with monkeypatch.context() as patch:
        for module in ("store._cell", "engine._row_updates"):
            patch.setattr(f"zstrat.ps.{module}.lasting", no_memory)
        with pytest.raises(ResourceExhaustedError, match=f"{TASK}: variable 'v1'"):
            push_to(store, whole)
    np.testing.assert_array_equal(value_of(store, 1), np.zeros((8, 2)))
    plan = store.plan_push(whole)
    plan._reserve()
    held = store.variables.find([1])[0].cell
    with monkeypatch.context() as patch:
        # What the value needs is set aside; slots may still need some.
        make = cell_module.lasting
        patch.setattr(
            "zstrat.ps.store._cell.Cell._beside",
            lambda cell: no_memory() if cell is held else _beside(cell, make),
        )
        plan.compute()
    store.commit(plan)
    for update in updates:
        push_to(twin, push((1, *update)))
    np.testing.assert_allclose(value_of(store, 1), value_of(twin, 1), rtol=1e-6)
    before = np.empty(64, np.uint8)
    pin.copy(0, before)
    assert not before.any()


def test_a_push_that_is_refused_late_holds_no_memory(monkeypatch):
    """Memory beside what a reader looks at was there; the program was not."""
    store = store_with("adam")
    reader = store.read([Read(2, -1)])
    before = store.statistics()["held_bytes"]

    def refuse(*_):
        raise RuntimeError("this program cannot be compiled")

    monkeypatch.setattr("zstrat.ps.store._plans.UpdateRun.prepare", refuse)
    with pytest.raises(RuntimeError, match="cannot be compiled"):
        push_to(store, push((2, UpdateOp.ADD, ONES), (1, UpdateOp.OPTIMIZE, ONES)))
    assert store.statistics()["held_bytes"] == before
    assert not reader[1][0].any()


def test_a_push_without_memory_for_its_last_value_holds_none_for_its_first(monkeypatch):
    store = store_with("adam")
    readers = store.read([Read(1, -1), Read(2, -1)])
    before = store.statistics()["held_bytes"]
    first, make = store.variables.find([1])[0].cell, cell_module.lasting
    monkeypatch.setattr(
        "zstrat.ps.store._cell.Cell._beside",
        lambda cell: _beside(cell, make if cell is first else no_memory),
    )
    with pytest.raises(MemoryError):
        push_to(store, push((1, UpdateOp.ADD, ONES), (2, UpdateOp.ADD, ONES)))
    assert store.statistics()["held_bytes"] == before
    del readers


def _beside(cell, make):
    return cell_module.Buffer(make(cell.shape, cell.dtype))


def test_half_of_a_push_that_xla_could_not_finish_is_never_seen():
    store = store_with("tanh")
    rows = (1, UpdateOp.OPTIMIZE_ROWS, *ROWS)
    push_to(store, push(rows))
    (kind,) = store.engine.get(1).programs.rows._kinds._alike.values()
    (program,) = kind.programs.values()
    program.call = failing_once(program.call)
    before = value_of(store, 1)
    with pytest.raises(RuntimeError, match="out of memory"):
        push_to(store, push((2, UpdateOp.ADD, ONES), rows))
    np.testing.assert_array_equal(value_of(store, 1), before)
    with pytest.raises(UnavailableError, match=rf"{TASK}: variable 'v2'.*assign"):
        store.read([Read(2, -1)])
    push_to(store, push((2, UpdateOp.ASSIGN, FIVES)))
    np.testing.assert_array_equal(value_of(store, 2), FIVES)


def test_a_lost_value_heals_with_an_assignment_before_its_gradient():
    store, twin = store_with("adam"), store_with("adam")
    store.variables.find([1])[0].cell.lose("XLA was out of memory")
    words = f"{TASK}: variable 'v1'.*XLA was out of memory"
    with pytest.raises(UnavailableError, match=words):
        push_to(store, push((1, UpdateOp.OPTIMIZE, ONES), (1, UpdateOp.ASSIGN, FIVES)))
    with pytest.raises(UnavailableError, match=words):
        store.plan_rows([], [1], [ROWS[0]]).compute()
    heal = push((1, UpdateOp.ASSIGN, FIVES), (1, UpdateOp.OPTIMIZE, ONES))
    for each in (store, twin):
        push_to(each, heal)
    np.testing.assert_array_equal(value_of(store, 1), value_of(twin, 1))
    np.testing.assert_allclose(value_of(store, 1), FIVES - 0.1, rtol=1e-5)


def test_a_new_variable_without_memory_is_named(monkeypatch):
    store = store_with("adam")
    monkeypatch.setattr("zstrat.ps.store._cell.lasting", no_memory)
    entries = [VariableEntry(9, "table", True, False)]
    with pytest.raises(
        ResourceExhaustedError, match=f"{TASK}: variable 'table'.*64 bytes"
    ):
        create_in(store, entries, [np.zeros((8, 2), "f4")])
    assert 9 not in store
