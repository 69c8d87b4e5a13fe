"""An optimizer updates the rows of a table equally under any partitioning.

What it keeps for all rows moves on components without rows too.
"""

import jax
import numpy as np
import optax
import pytest

import zstrat.variables as zv
from zstrat.optimizers import Binding, TreeRule, TreeStructure
from zstrat.ps import OptimizerEngine, Store, create_plan
from zstrat.variables import row_updates
from zstrat.wire import Push, Read, Update, UpdateOp, VariableEntry

STEPS = ([0], [], [0, 0], [4], [0, 3, 5])


def rule():
    return optax.adam(optax.exponential_decay(0.5, 1, 0.5))


def by_hand():
    """Adam on rows of one number: moments by row, one count for all of them."""
    value, first, second = np.zeros((3, 6))
    for turn, ids in enumerate(STEPS):
        gradient = np.bincount(ids, minlength=6).astype(float)
        at = sorted(set(ids))
        first[at] = 0.9 * first[at] + 0.1 * gradient[at]
        second[at] = 0.999 * second[at] + 0.001 * gradient[at] ** 2
        mean, square = (
            first / (1 - 0.9 ** (turn + 1)),
            second / (1 - 0.999 ** (turn + 1)),
        )
        move = -0.5 * 0.5**turn * mean / (np.sqrt(square) + 1e-8)
        value[at] += move[at]
    return value


def gradient(ids):
    return zv.IndexedSlices(np.ones((len(ids), 1), np.float32), np.array(ids, int))


@pytest.mark.parametrize("parts", [1, 7])
def test_of_variables_of_this_process(parts):
    pieces = np.array_split(np.zeros((6, 1), np.float32), parts)
    components = [zv.Variable(piece) for piece in pieces]
    table = zv.ShardedVariable(components) if parts > 1 else components[0]
    optimizer = zv.Optimizer(rule())
    for ids in STEPS:
        optimizer.apply_gradients(gradient(ids), table)
    np.testing.assert_allclose(table.numpy()[:, 0], by_hand(), rtol=1e-4, atol=1e-6)


def commit(store, plan):
    plan.compute()
    store.commit(plan)


@pytest.mark.parametrize("parts", [1, 3])
def test_on_a_parameter_server(parts):
    engine = OptimizerEngine(lambda code: rule())
    store = Store(engine)
    commit(store, store.plan_optimizer(1, "adam", b"code"))
    pieces = np.array_split(np.zeros((6, 1), np.float32), parts)
    entries = [VariableEntry(n, "t", True, parts > 1) for n in range(parts)]
    commit(store, create_plan(entries, list(pieces), store.variables))
    kind = jax.ShapeDtypeStruct((6, 1), np.float32)
    tree = TreeRule(
        "adam", rule(), TreeStructure.of({"t": 0}), (kind,), (np.dtype("float32"),)
    )
    told = Binding(tree, (tuple(range(parts)),)).encoded()
    commit(store, store.plan_binding(1, (np.frombuffer(told, np.uint8),)))
    components = tuple(zv.Variable(piece) for piece in pieces)
    table = zv.Table("t", components)
    keys = {part.spec.key: n for n, part in enumerate(components)}
    for turn, ids in enumerate(STEPS):
        slices = gradient(ids)
        operands = (slices.indices, slices.values)
        updates = row_updates(table, UpdateOp.OPTIMIZE_ROWS, operands, None)
        assert len(updates) == parts
        pushed = [Update(keys[v.spec.key], int(op), 1, 2) for v, op, _, _ in updates]
        arrays = tuple(array for *_, arrays, _ in updates for array in arrays)
        commit(store, store.plan_push(Push(1, turn, 0, 0, pushed, arrays)))
    values = [store.read([Read(n, -1)])[1][0] for n in range(parts)]
    np.testing.assert_allclose(
        np.concatenate(values)[:, 0], by_hand(), rtol=1e-4, atol=1e-6
    )
