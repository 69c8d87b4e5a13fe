"""A push applies whole or not at all, whatever fails on the way; one after another, its
updates see what those before them left."""

import numpy as np
import optax
import optax.contrib
import pytest

from zstrat.ps import OptimizerEngine, Store
from zstrat.wire import Push, Read, Update, UpdateOp, VariableEntry

TASK = "/job:ps/task:0"
OPTIMIZERS = {
    "adam": lambda: optax.adam(0.1),
    "schedule free": lambda: optax.contrib.schedule_free_sgd(0.1),
}
ONES = np.ones((8, 2), "f4")
ROWS = (np.array([1, 3]), np.ones((2, 2), "f4"))


@pytest.fixture(autouse=True)
def _no_probe(monkeypatch):
    monkeypatch.setattr("zstrat.ps._probe.probe", lambda *_: True)


def store_with(name: str, *values: np.ndarray) -> Store:
    """Optimizer 1, and variables from 1 on (two of zeros)."""
    store = Store(OptimizerEngine(lambda code: OPTIMIZERS[code.decode()]()), task=TASK)
    plan = store.plan_optimizer(1, name, name.encode())
    plan.compute()
    store.commit(plan)
    values = values or (np.zeros((8, 2), "f4"), np.zeros((8, 2), "f4"))
    entries = [
        VariableEntry(k, f"v{k}", True, False) for k in range(1, 1 + len(values))
    ]
    store.create(entries, values)
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
    store, twin = store_with("adam"), store_with("adam")
    update = push((1, UpdateOp.OPTIMIZE_ROWS, *ROWS))
    for each in (store, twin):
        each.push(update)
    (kind,) = store.engine.get(1).programs.rows._kinds._alike.values()
    (program,) = kind.programs.values()
    program.call = failing_once(program.call)
    with pytest.raises(RuntimeError, match="out of memory"):
        store.push(update)
    np.testing.assert_array_equal(value_of(store, 1), value_of(twin, 1))
    for _ in range(2):
        store.push(update)
        twin.push(update)
        np.testing.assert_array_equal(value_of(store, 1), value_of(twin, 1))
