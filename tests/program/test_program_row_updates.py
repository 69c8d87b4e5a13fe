"""Updates of rows in steps: sums, the rows that are sent, and counts of steps.

Expected rows are those that numpy makes of the whole table.
"""

from __future__ import annotations

import re

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zstrat.program as zs
from zstrat.variables import (
    IndexedSlices,
    apply,
)
from zstrat.wire import UpdateOp

TABLE = np.arange(40, dtype=np.float32).reshape(10, 4) / 7


def test_an_index_of_an_update_that_is_not_there_is_named(storage):
    table = storage.sharded(TABLE, 2)

    @zs.function
    def step(ids):
        table.scatter_add(IndexedSlices(jnp.ones((2, 4)), ids))

    with pytest.raises(IndexError, match=rf"{re.escape(__file__)}.*'t'.*no row 10"):
        step(np.array([1, 10]))
    np.testing.assert_array_equal(storage.whole(table), TABLE)


SCATTERS = [op for op in UpdateOp if op.name.startswith("SCATTER")]


@pytest.mark.parametrize("op", SCATTERS, ids=lambda op: op.name.lower())
def test_updates_of_rows(storage, op):
    """Duplicates too, and a read after them sees them."""
    table = storage.sharded(TABLE + 1, 3)
    indices = np.array([9, 2, 9, 0, 2, 2, 5])
    rows = np.linspace(1, 5, 28, dtype=np.float32).reshape(7, 4)

    @zs.function
    def step(indices, rows):
        table._sparse(op, IndexedSlices(rows, indices))
        return table.value()

    seen = step(indices, rows)
    expected = apply(op, TABLE + 1, (indices, rows))
    np.testing.assert_allclose(storage.whole(table), expected, rtol=1e-6)
    np.testing.assert_allclose(seen, expected, rtol=1e-6)
    for _, _, (local, _) in storage.updates:
        assert sorted(local) == local.tolist()


@pytest.mark.parametrize("eager", [False, True], ids=["captured", "eager"])
def test_gradient_rows_are_summed_before_they_travel(storage, eager):
    table, other = storage.sharded(TABLE, 3), storage.variable(TABLE[:, :2], "other")
    optimizer = storage.optimizer(optax.sgd(1.0))

    @zs.function(eager=eager)
    def step(ids):
        rows = zs.embedding_lookup(table, ids)
        flat = ids.reshape(-1)
        slices = IndexedSlices(rows.reshape(-1, 4), flat)
        again = IndexedSlices(jnp.ones((4, 2)), jnp.concatenate([flat[2:], flat[:2]]))
        optimizer.apply_gradients([(slices, table), (again, other)])

    ids = np.array([[3, 9], [3, 0]])
    step(ids)
    counts = np.bincount(ids.ravel(), minlength=10)[:, None]
    np.testing.assert_allclose(storage.whole(table), TABLE * (1 - counts), rtol=1e-6)
    np.testing.assert_allclose(storage.whole(other), TABLE[:, :2] - counts, rtol=1e-6)
    assert [(name, index.tolist()) for name, _, (index, _) in storage.updates] == [
        ("t/part_0", [0, 3]),
        ("t/part_1", []),  # it counts this step too
        ("t/part_2", [2]),
        ("other", [0, 3, 9]),
    ]


@pytest.mark.parametrize("eager", [False, True], ids=["captured", "eager"])
@pytest.mark.parametrize("shared", [False, True], ids=["other ids", "its own ids"])
def test_an_optimizer_steps_on_components_without_rows(storage, eager, shared):
    table = storage.sharded(TABLE, 3)
    adam = storage.optimizer(optax.adam(0.1))

    @zs.function(eager=eager)
    def step(ids):
        rows = zs.embedding_lookup(table, ids)
        index = ids if shared else ids + 1
        adam.apply_gradients([(IndexedSlices(rows, index), table)])
        table.scatter_add(IndexedSlices(rows, index))

    step(np.array([5, 5]))
    row = 1 if shared else 2
    optimized = [u for u in storage.updates if u[1] is UpdateOp.OPTIMIZE_ROWS]
    assert sorted((name, at.tolist()) for name, _, (at, _) in optimized) == [
        ("t/part_0", []),
        ("t/part_1", [row]),
        ("t/part_2", []),
    ]
    assert all(rows.shape == (len(at), 4) for _, _, (at, rows) in optimized)
    # What no optimizer counts is not sent.
    assert [u[0] for u in storage.updates if u[1] is UpdateOp.SCATTER_ADD] == [
        "t/part_1"
    ]
    storage.updates.clear()
    step(np.zeros(0, np.int32))
    assert [(name, op, len(at)) for name, op, (at, _) in storage.updates] == [
        (f"t/part_{n}", UpdateOp.OPTIMIZE_ROWS, 0) for n in range(3)
    ]


def test_several_tables_leave_as_one_and_in_their_order(storage):
    """Tables alike, one looked up twice, one without a gradient between them."""
    rng = np.random.default_rng(0)
    values = [rng.normal(size=(rows, 3)).astype(np.float32) for rows in (7, 5, 9, 4)]
    tables = [storage.sharded(v, 2, f"t{n}") for n, v in enumerate(values)]
    optimizer = storage.optimizer(optax.sgd(1.0))
    counter = storage.variable(np.int32(0), "counter")

    @zs.function
    def step(ids):
        rows = [table.sparse_read(ids[n]) for n, table in enumerate(tables)]
        more = tables[0].sparse_read(ids[3])
        joined = jnp.concatenate([rows[0], more])
        optimizer.apply_gradients(IndexedSlices(rows[3], ids[3]), tables[3])
        counter.assign_add(1)
        index = jnp.concatenate([ids[0], ids[3]])
        optimizer.apply_gradients(IndexedSlices(joined, index), tables[0])
        optimizer.apply_gradients(IndexedSlices(rows[1], ids[1]), tables[1])
        return rows

    ids = rng.integers(0, 4, (4, 6))
    rows = step(ids)
    for n, value in enumerate(values):
        np.testing.assert_array_equal(rows[n], value[ids[n]])
    used = [np.concatenate([ids[0], ids[3]]), ids[1], None, ids[3]]
    for n, (value, index) in enumerate(zip(values, used, strict=True)):
        counts = 0 if index is None else np.bincount(index, minlength=len(value))
        expected = value * (1 - np.reshape(counts, (-1, 1)))
        np.testing.assert_allclose(storage.whole(tables[n]), expected, rtol=1e-6)
    order = [name.split("/")[0] for name, _, _ in storage.updates]
    assert list(dict.fromkeys(order)) == ["t3", "counter", "t0", "t1"]
