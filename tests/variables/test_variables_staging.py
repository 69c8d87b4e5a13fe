"""Outside of steps: traces by jax must not keep a value, or lose an update."""

from __future__ import annotations

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zstrat.variables as zv

ONE = np.float32(1)

STAGED = {
    "jit": lambda fn: jax.jit(fn)(ONE),
    "eval_shape": lambda fn: jax.eval_shape(fn, ONE),
    "checkpoint": lambda fn: jax.checkpoint(fn)(ONE),
    "cond": lambda fn: jax.lax.cond(True, fn, lambda x: x, ONE),
    "scan": lambda fn: jax.lax.scan(lambda c, _: (fn(c), None), ONE, None, length=2),
    "grad of jit": lambda fn: jax.grad(jax.jit(fn))(ONE),
    "jit of grad": lambda fn: jax.jit(jax.grad(fn))(ONE),
    "jit of vmap": lambda fn: jax.jit(jax.vmap(fn))(np.ones(2, np.float32)),
}

AT_ONCE = {
    "eager": lambda fn: fn(ONE),
    "grad": lambda fn: jax.grad(fn)(ONE),
    "vmap": lambda fn: jax.vmap(fn)(np.ones(2, np.float32)),
    "linearize": lambda fn: jax.linearize(fn, ONE)[0],
    "vmap of grad": lambda fn: jax.vmap(jax.grad(fn))(np.ones(2, np.float32)),
}


def each(table):
    return pytest.mark.parametrize("run", table.values(), ids=table)


@each(STAGED)
@pytest.mark.parametrize(
    "read",
    [
        lambda v: v.value(),
        lambda v: v.numpy(),
        lambda v: v[0],
        lambda v: 1 + v,
        lambda v: v.sparse_read([0]),
        lambda v: float(v),
    ],
    ids=["value", "numpy", "item", "sum", "rows", "float"],
)
def test_a_read_that_jax_would_keep_is_refused(run, read):
    v = zv.Variable([2.0], name="weight")
    with pytest.raises(RuntimeError, match=r"'weight'.*jax\.jit.*zs\.func"):
        run(lambda x: x * jnp.sum(read(v)))


@each(STAGED)
@pytest.mark.parametrize(
    ("update", "words"),
    [
        (lambda v: v.assign([5.0]), "assign to"),
        (lambda v: v.assign_add([5.0]), "assign_add to"),
        (lambda v: v.scatter_update(zv.IndexedSlices([[5.0]], [0])), "scatter_update"),
    ],
    ids=["assign", "add", "scatter"],
)
def test_an_update_that_would_happen_once_is_refused(run, update, words):
    v = zv.Variable([2.0], name="weight")

    def fn(x):
        update(v)
        return x

    with pytest.raises(RuntimeError, match=rf"{words}.*'weight'.*once, while jax trac"):
        run(fn)
    np.testing.assert_array_equal(v.numpy(), [2.0])


@each(AT_ONCE)
def test_transformations_that_compute_at_once_read_the_present_value(run):
    v = zv.Variable(2.0)
    for value in (2.0, 7.0):
        v.assign(value)
        # x * value: its derivative at x is the value as well as it is its value at 1.
        np.testing.assert_array_equal(run(lambda x: x * v.value()), value)


def test_other_threads_compute_at_once_while_one_traces():
    v = zv.Variable(2.0)
    seen = []

    def fn(x):
        thread = threading.Thread(target=lambda: seen.append(float(v.value())))
        thread.start()
        thread.join()
        return x

    jax.jit(fn)(ONE)
    assert seen == [2.0]
