"""Gradients equal those of plain jax on the same mathematics."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zstrat.program as zs

X = np.arange(6, dtype=np.float32).reshape(2, 3) / 7
Y = np.array([1.0, -1.0], np.float32)
W = np.array([0.5, -0.25, 2.0], np.float32)
B = np.float32(0.1)


def plain_loss(params, scale, batch):
    x, y = batch
    return scale * jnp.mean((x @ params["w"] + params["b"] - y) ** 2)


APART = X @ W + B - Y
EXPECTED = (
    2 * np.mean(APART**2),
    ({"w": 2 * X.T @ APART, "b": 4 * np.mean(APART)}, np.mean(APART**2)),
)
"""The loss with a scale of 2, and its gradients, of the mean over two rows."""


def close(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), a, b)


@pytest.fixture
def params(storage):
    return {"w": storage.variable(W, "w"), "b": storage.variable(B, "b")}


@pytest.mark.parametrize("inside", [True, False], ids=["in a step", "outside"])
def test_arguments_with_variables(params, inside):
    def run(scale, batch):
        return zs.value_and_grad(plain_loss, (0, 1))(params, scale, batch)

    run = zs.function(run) if inside else run
    value, grads = run(np.float32(2), (X, Y))
    close((value, grads), EXPECTED)


@pytest.mark.parametrize("inside", [True, False], ids=["in a step", "outside"])
def test_variables_read_by_closure(params, inside):
    w, b = params["w"], params["b"]

    def loss(scale, batch):
        x, y = batch
        return scale * jnp.mean((x @ w.value() + b - y) ** 2)

    def of_variables(scale, batch):
        return zs.value_and_grad(loss, variables=params)(scale, batch)

    def of_both(scale, batch):
        return zs.value_and_grad(loss, 0, variables=[b, (w,)])(scale, batch)

    if inside:
        of_variables, of_both = zs.function(of_variables), zs.function(of_both)
    expected, (of_params, of_scale) = EXPECTED
    args = np.float32(2), (X, Y)
    close(of_variables(*args), (expected, of_params))
    pair = (of_scale, [of_params["b"], (of_params["w"],)])
    close(of_both(*args), (expected, pair))


def test_mixed_leaves_and_other_reads(storage, params):
    scale = storage.variable(np.float32(2), "scale")

    @zs.function
    def step(b, batch):
        def loss(params, batch):
            return plain_loss(params, scale.value(), batch)

        return zs.grad(loss)({"w": params["w"], "b": b}, batch)

    close(step(B, (X, Y)), EXPECTED[1][0])


def test_inner_jit_that_closes_over_variables(params):
    w = params["w"]

    @jax.jit
    def predict(x):
        return x @ w.value()

    def loss(x):
        return jnp.sum(predict(x) ** 2)

    @zs.function
    def step(x):
        plain = predict(x)
        grads = zs.grad(loss, variables=w)(x)
        w.assign_sub(grads)
        return plain, grads, zs.grad(loss, variables=w)(x)

    plain, first, second = step(X)
    expected = jax.grad(lambda w: jnp.sum((X @ w) ** 2))
    close(plain, X @ W)
    close(first, expected(W))
    np.testing.assert_allclose(second, expected(W - expected(W)), rtol=1e-5)


def test_inner_jit_outside_of_a_step(params):
    """No stale value: other variables are read anew, differentiated ones refused."""
    w, b = params["w"], params["b"]

    @jax.jit
    def shifted(x):
        return x + b.value()

    def loss():
        return jnp.sum(shifted(w.value()))

    for shift in (1.0, 5.0):
        b.assign(shift)
        value, grads = zs.value_and_grad(loss, variables=w)()
        np.testing.assert_allclose(value, np.sum(W) + 3 * shift, rtol=1e-6)
        close(grads, np.ones(3, np.float32))
    with pytest.raises(RuntimeError, match="'b'"):
        zs.grad(loss, variables=b)()


def test_other_reads_of_a_compiled_loss_are_never_stale(storage):
    a, b = storage.variable(np.float32(1)), storage.variable(np.float32(3), "b")
    loss = jax.jit(lambda a: a * b.value())
    differentiate = zs.value_and_grad(loss)
    assert differentiate(a) == (3.0, 3.0)
    b.assign(100.0)
    assert differentiate(a) == (100.0, 100.0)
    with pytest.raises(RuntimeError, match="'b'"):
        jax.jit(lambda a: zs.grad(loss)(a))(np.float32(1))
    assert zs.function(lambda: differentiate(a))() == (100.0, 100.0)


def test_reads_of_a_compiled_loss_come_before_later_updates(storage):
    """Although jax computes what the loss is given while Python goes on."""
    a, b = storage.variable(np.ones((), np.float32)), storage.variable(np.float32(3))
    slow = jax.jit(lambda x: jnp.sum(x @ x @ x @ x))
    differentiate = zs.value_and_grad(jax.jit(lambda a, shift: a * (b.value() + shift)))
    x = jnp.zeros((1500, 1500))
    differentiate(a, slow(x))
    _, grads = differentiate(a, slow(x))
    b.assign(100.0)
    assert grads == 3.0


@pytest.mark.parametrize("inside", [True, False], ids=["in a step", "outside"])
def test_a_variable_that_is_named_twice_has_one_gradient(storage, inside):
    v, w = storage.variable(np.float32(3)), storage.variable(np.float32(5))

    def run():
        tied = {"in": v, "out": v, "other": w}
        return zs.value_and_grad(lambda: v.value() ** 2 * w.value(), variables=tied)()

    run = zs.function(run) if inside else run
    assert run() == (45.0, {"in": 30.0, "out": 30.0, "other": 9.0})


def test_aux_and_negative_argnums(params):
    def loss(batch, params):
        return plain_loss(params, np.float32(2), batch), {"n": batch[0].shape[0]}

    (value, aux), grads = zs.value_and_grad(loss, -1, has_aux=True)((X, Y), params)
    close((value, grads), (EXPECTED[0], EXPECTED[1][0]))
    assert aux == {"n": 2}
    grads, aux = zs.grad(loss, [1], has_aux=True)((X, Y), params)
    close(grads, (EXPECTED[1][0],))
    assert aux == {"n": 2}


def test_second_derivatives(storage):
    v = storage.variable(np.float32(3))

    @zs.function
    def step():
        return zs.grad(lambda x: zs.grad(lambda y: y**3)(x))(v)

    assert step() == 18.0


def test_argument_gradients_ignore_closure_reads(storage):
    v = storage.variable(np.float32(3))
    assert zs.grad(lambda x: x * v.value())(v) == 3.0


def test_refusals(storage, params):
    count = storage.variable(np.int32(1), "count")
    loss = plain_loss
    with pytest.raises(TypeError, match=r"\[0\].*\['c'\].*'count'"):
        zs.grad(loss)({"c": count}, 1.0, None)
    with pytest.raises(TypeError, match=r"args\[0\]\[0\], int32 array"):
        zs.grad(loss)([np.int32(1)], 1.0, None)
    with pytest.raises(ValueError, match=r"argnums=3.*\b1\b"):
        zs.grad(loss, 3)(params)
    with pytest.raises(ValueError, match="variables="):
        zs.grad(loss, variables=[X])
    with pytest.raises(ValueError, match="variables="):
        zs.grad(loss, variables=[])


def test_a_method_is_shipped_with_its_variables(params):
    differentiated = zs.value_and_grad(plain_loss)
    step = zs.function(lambda batch: differentiated(params, 2.0, batch))
    loaded = zs.load(zs.dump_code(step))
    prepared = zs.prepare(loaded, ((X, Y),), {})
    result = prepared.run([B, W])
    rebuilt = zs.rebuild(result.layout.structure, result.leaves)
    close(rebuilt, (EXPECTED[0], EXPECTED[1][0]))
