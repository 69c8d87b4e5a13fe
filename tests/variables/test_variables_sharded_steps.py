"""A sharded variable in a step: the calls of its recorder."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zstrat.variables as zv
from zstrat.wire import UpdateOp

VALUE = np.arange(20, dtype=np.float32).reshape(10, 2)


class Notes(zv.TraceRecorder):
    """A recorder that knows the values, and notes what it is told."""

    def __init__(self, *variables):
        self.values = {v.spec.key: v.numpy() for v in variables}
        self.updates, self.rows, self.lookups = [], [], []

    def read(self, variable):
        return jnp.asarray(self.values[variable.spec.key])

    def update(self, update):
        if isinstance(update.target, zv.Table):
            self.rows.append(update)
        else:
            self.updates.append(update._replace(target=update.variable.name))

    def lookup(self, table, ids):
        self.lookups.append((table, ids))
        rows = [self.values[key] for key in table.keys]
        return jnp.take(jnp.concatenate(rows), ids, axis=0)

    def optimize(self, call):
        for _, target, sparse, arrays in call.leaves():
            record = target._record_rows if sparse else target._record
            op = UpdateOp.OPTIMIZE_ROWS if sparse else UpdateOp.OPTIMIZE
            record(self, op, arrays if sparse else arrays[0], call.optimizer)

    def drew(self, leaf):
        return False


@pytest.fixture
def w():
    parts = [
        zv.Variable(rows, name=f"w/part_{n}")
        for n, rows in enumerate(np.split(VALUE, [4, 7]))
    ]
    return zv.ShardedVariable(parts, "w")


@contextlib.contextmanager
def step(*variables):
    notes = Notes(*(part for v in variables for part in v.components))
    token = zv.recorder.set(notes)
    try:
        yield notes
    finally:
        zv.recorder.reset(token)


def test_the_value_is_that_of_all_components(w):
    with step(w):
        value = w.value()
        assert isinstance(value, jax.Array)
        np.testing.assert_array_equal(value, VALUE)
        np.testing.assert_array_equal(w @ jnp.ones(2), VALUE.sum(1))
        with pytest.raises(RuntimeError, match=r"'w'.*numpy\(\)"):
            w.numpy()


def test_dense_updates_go_to_each_component(w):
    optimizer = zv.Optimizer(optax.sgd(0.1))
    with step(w) as notes:
        assert w.assign(VALUE * 2) is w
        w.assign_add(jnp.ones((10, 2))).assign_sub(np.ones((10, 2)))
        optimizer.apply_gradients(jnp.asarray(VALUE), w)
    names = [f"w/part_{n}" for n in range(3)]
    assert [name for name, *_ in notes.updates] == names * 4
    ops = [UpdateOp.ASSIGN, UpdateOp.ADD, UpdateOp.SUB, UpdateOp.OPTIMIZE]
    assert [op for _, op, *_ in notes.updates] == [op for op in ops for _ in range(3)]
    assigned = [operands[0] for _, _, operands, _ in notes.updates[:3]]
    np.testing.assert_array_equal(np.concatenate(assigned), VALUE * 2)
    assert [rows.shape for rows in assigned] == [(4, 2), (3, 2), (3, 2)]
    assert {o for *_, o in notes.updates[9:]} == {optimizer}


def test_rows_go_to_the_table(w):
    optimizer = zv.Optimizer(optax.sgd(0.1))
    slices = zv.IndexedSlices(jnp.ones((2, 2)), jnp.array([9, 0]))
    with step(w) as notes:
        assert w.scatter_max(slices) is w
        w.batch_scatter_update(slices)
        optimizer.apply_gradients([(slices, w)])
    assert not notes.updates
    assert [op for _, op, *_ in notes.rows] == [
        UpdateOp.SCATTER_MAX,
        UpdateOp.SCATTER_UPDATE,
        UpdateOp.OPTIMIZE_ROWS,
    ]
    for table, _, (indices, rows), _ in notes.rows:
        assert table == w.table
        np.testing.assert_array_equal(indices, [9, 0])
        np.testing.assert_array_equal(rows, np.ones((2, 2)))
    assert [o for *_, o in notes.rows] == [None, None, optimizer]


def test_gradient_rows_of_a_whole_variable_go_to_its_table():
    x, optimizer = zv.Variable(VALUE, name="x"), zv.Optimizer(optax.sgd(0.1))
    slices = zv.IndexedSlices(jnp.ones((2, 2)), jnp.array([9, 0]))
    with step(x) as notes:
        optimizer.apply_gradients([slices], [x])
        x.scatter_add(slices)
    ((table, op, _, _),) = notes.rows
    assert (table.name, table.keys, op) == ("x", x.table.keys, UpdateOp.OPTIMIZE_ROWS)
    assert [op for _, op, *_ in notes.updates] == [UpdateOp.SCATTER_ADD]


def test_rows_are_looked_up(w):
    x = zv.Variable(VALUE, name="x")
    with step(w, x) as notes:
        np.testing.assert_array_equal(w.sparse_read([9, 0]), VALUE[[9, 0]])
        np.testing.assert_array_equal(x.sparse_read([[3], [1]]), VALUE[[[3], [1]]])
    assert [table.name for table, _ in notes.lookups] == ["w", "x"]
    assert notes.lookups[1][1].shape == (2, 1)


def test_known_indices_out_of_bounds_are_refused(w):
    with step(w) as notes:
        with pytest.raises(IndexError, match=r"'w'.*\b10\b"):
            w.sparse_read([10])
        with pytest.raises(IndexError, match=r"\b4294967297\b"):
            w.sparse_read(np.array([2**32 + 1]))
        with pytest.raises(ValueError, match="rank 1"):
            w.sparse_read(jnp.zeros((1, 1), int))
        with pytest.raises(ValueError, match="'w'"):
            w.sparse_read(jnp.zeros(1))
        with pytest.raises(ValueError, match=r"must be integers, got float32"):
            jax.eval_shape(lambda ids: w.sparse_read(ids), jnp.zeros(1))
        with pytest.raises(IndexError, match="index -1 is out of bounds"):
            w.scatter_add(zv.IndexedSlices(np.ones((1, 2)), [-1]))
        with pytest.raises(ValueError, match="shape mismatch"):
            w.assign(jnp.zeros((9, 2)))
        with pytest.raises(ValueError, match="'w'"):
            w.assign(jnp.zeros((10, 2), jnp.float16))
    assert not notes.updates
    assert not notes.rows
    assert not notes.lookups


def test_a_scalar_has_no_rows():
    with pytest.raises(ValueError, match="'Variable'"):
        zv.Variable(1.0).sparse_read([0])


def test_wide_tables_are_refused_in_a_step():
    wide = zv.ShardedVariable(
        [zv.Variable(np.zeros(2), dtype="float64") for _ in range(2)], "wide"
    )
    with step(wide):
        for use in (wide.value, lambda: wide[0], lambda: wide.sparse_read([0])):
            with pytest.raises(TypeError, match="'wide'"):
                use()
