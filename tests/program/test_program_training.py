"""A training loop through a storage equals the same loop in plain jax and optax."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zstrat.program as zs

RNG = np.random.default_rng(3)
BATCHES = [
    {
        "x": RNG.normal(size=(8, 5)).astype(np.float32),
        "y": RNG.normal(size=(8, 2)).astype(np.float32),
    }
    for _ in range(12)
]
START = {
    "hidden": [
        RNG.normal(size=(5, 7)).astype(np.float32),
        np.zeros(7, np.float32),
    ],
    "out": [RNG.normal(size=(7, 2)).astype(np.float32), np.zeros(2, np.float32)],
}


def loss_fn(params, batch):
    (a, b), (c, d) = params["hidden"], params["out"]
    hidden = jnp.tanh(batch["x"] @ a + b[None])
    return jnp.mean((hidden @ c + d[None] - batch["y"]) ** 2)


def plain_loop(rule):
    params, losses = START, []
    state = rule.init(params)
    step = jax.jit(jax.value_and_grad(loss_fn))
    for batch in BATCHES:
        loss, grads = step(params, batch)
        with jax.numpy_dtype_promotion("standard"):  # optax itself needs it
            updates, state = rule.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        losses.append(float(loss))
    return params, losses


@pytest.mark.parametrize("eager", [False, True], ids=["captured", "eager"])
@pytest.mark.parametrize(
    "rule", [optax.sgd(0.1), optax.adam(0.01)], ids=["sgd", "adam"]
)
def test_training(storage, rule, eager):
    params = jax.tree.map(storage.variable, START)
    counter = storage.variable(np.int32(0))
    optimizer = storage.optimizer(rule)

    @zs.function(eager=eager)
    def train_step(iterator):
        loss, grads = zs.value_and_grad(loss_fn)(params, next(iterator))
        optimizer.apply_gradients(grads, params)
        counter.assign_add(1)
        return loss

    iterator = zs.StepIterator(iter(BATCHES))
    losses = [float(train_step(iterator)) for _ in BATCHES]
    expected, expected_losses = plain_loop(rule)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    got = jax.tree.map(lambda v: storage.values[v.spec.key], params)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6),
        got,
        expected,
    )
    assert storage.values[counter.spec.key] == len(BATCHES)
    assert train_step.trace_count == (0 if eager else 1)
