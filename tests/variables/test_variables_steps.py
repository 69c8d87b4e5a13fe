"""What a variable does while a step is traced: everything goes to the recorder."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zstrat.variables as zv
from zstrat.wire import UpdateOp


class Notes(zv.TraceRecorder):
    """A recorder that hands out constants and notes what it is told."""

    def __init__(self):
        self.updates = []
        self.reads = []
        self.lookups = []

    def read(self, variable):
        self.reads.append(variable.name)
        return jnp.full(variable.shape, 7, variable.dtype)

    def update(self, update):
        self.updates.append(update)

    def lookup(self, table, ids):
        self.lookups.append((table, ids))
        return jnp.full((*ids.shape, *table.shape[1:]), 7, table.dtype)

    def optimize(self, call):
        for _, target, sparse, arrays in call.leaves():
            record = target._record_rows if sparse else target._record
            op = UpdateOp.OPTIMIZE_ROWS if sparse else UpdateOp.OPTIMIZE
            record(self, op, arrays if sparse else arrays[0], call.optimizer)

    def drew(self, leaf):
        return False


@contextlib.contextmanager
def step():
    notes = Notes()
    token = zv.recorder.set(notes)
    try:
        yield notes
    finally:
        zv.recorder.reset(token)


def used(_):
    """Nothing: a step may not return a variable to jax."""


def test_reads_and_updates_go_to_the_recorder_and_not_to_storage():
    x = zv.Variable([1.0, 2.0], name="x")
    with step() as notes:
        np.testing.assert_array_equal(x + 1, [8, 8])
        assert isinstance(x.value(), jax.Array)
        np.testing.assert_array_equal(x.sparse_read([1, 0]), [7, 7])
        x.assign(x * 2)
        x.assign_add([1, 1])
        x.assign_sub(np.ones(2))
        x.scatter_max(zv.IndexedSlices([1.0], [0]))
    assert set(notes.reads) == {"x"}
    ops = [op for _, op, _, _ in notes.updates]
    assert ops == [UpdateOp.ASSIGN, UpdateOp.ADD, UpdateOp.SUB, UpdateOp.SCATTER_MAX]
    for _, _, operands, _ in notes.updates:
        assert all(isinstance(operand, jax.Array) for operand in operands)
        assert operands[-1].dtype == np.float32
    np.testing.assert_array_equal(x.numpy(), [1.0, 2.0])


def test_operands_are_checked_in_a_step_too():
    x = zv.Variable(np.zeros((2, 2), np.float16), name="x")
    with step() as notes:
        with pytest.raises(ValueError, match="shape mismatch"):
            x.assign(jnp.zeros(2, jnp.float16))
        with pytest.raises(ValueError, match=r"astype\('float16'\)"):
            x.assign(jnp.zeros((2, 2), jnp.float32))
        with pytest.raises(ValueError, match="scatter_add"):
            x.scatter_add(zv.IndexedSlices(jnp.zeros((1, 2), jnp.float16), 0))
        x.assign(jnp.zeros((2, 2), jnp.float16))
        jax.eval_shape(lambda: used(x.assign_add(jnp.full((2, 2), 2.0, jnp.float16))))
    assert len(notes.updates) == 2


def test_weakly_typed_values_take_the_variables_dtype():
    x = zv.Variable(np.float16(0))
    with step() as notes:
        jax.jit(lambda scale: used(x.assign(scale * 2.0)))(1.0)
    assert notes.updates[0][2][0].dtype == jnp.float16


@pytest.mark.parametrize("dtype", ["float64", "int64", "complex128"])
def test_wide_variables_are_refused_in_a_step(dtype):
    x = zv.Variable(1, dtype=dtype, name="wide")
    with step():
        for use in (x.value, lambda: x.assign(1), lambda: x + 1):
            with pytest.raises(TypeError, match=r"'wide'.*jax_enable_x64"):
                use()
    x.assign_add(1)
    assert x.numpy() == 2


def test_wide_variables_work_in_a_step_when_jax_is_wide():
    x = zv.Variable(1, dtype="float64")
    with jax.enable_x64(True), step():
        assert x.value().dtype == np.float64


def test_there_is_no_numpy_value_in_a_step():
    with step(), pytest.raises(RuntimeError, match=r"value\(\)"):
        zv_variable().numpy()


def zv_variable():
    token = zv.recorder.set(None)
    try:
        return zv.Variable(1.0)
    finally:
        zv.recorder.reset(token)


def test_a_step_cannot_create_variables():
    with step(), pytest.raises(ValueError, match="'late'"):
        zv.Variable(1.0, name="late")


def test_a_traced_value_outside_a_step_is_explained():
    x = zv.Variable(1.0)

    def wrong(y):
        x.assign(y)
        return y

    with pytest.raises(ValueError, match=r"zs\.function"):
        jax.grad(wrong)(1.0)
    with pytest.raises(RuntimeError, match=r"zs\.function"):
        jax.jit(wrong)(1.0)
    with pytest.raises(ValueError, match="'Variable'"):
        jax.jit(lambda y: zv.Variable(y).shape)(1.0)


def test_gradients_are_recorded_with_their_optimizer():
    params = zv.create_variables({"w": np.ones((3, 2), np.float32), "b": [0.0, 0.0]})
    optimizer = zv.Optimizer(optax.sgd(0.1), count_iterations=True)
    rows = zv.IndexedSlices(jnp.ones((1, 2)), jnp.array([2]))
    with step() as notes:
        optimizer.apply_gradients({"w": rows, "b": [1.0, 1.0]}, params)
    assert [(v.name, op, o) for v, op, _, o in notes.updates] == [
        ("b/0", UpdateOp.OPTIMIZE, optimizer),
        ("b/1", UpdateOp.OPTIMIZE, optimizer),
        ("w", UpdateOp.OPTIMIZE_ROWS, optimizer),
        ("Optimizer/iterations", UpdateOp.ADD, None),
    ]
