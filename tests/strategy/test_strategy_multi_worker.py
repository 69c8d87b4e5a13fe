"""Several processes in step, here as threads: what they compute together."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from ranks import ranks

import zstrat as zs

X = np.random.default_rng(0).normal(size=(8, 5)).astype(np.float32)
Y = np.random.default_rng(1).normal(size=(8, 3)).astype(np.float32)


def model(params, x):
    return jnp.tanh(x @ params["w"]) @ params["u"] + params["b"]


def first_params(seed):
    rng = np.random.default_rng(seed)
    return {
        "w": rng.normal(size=(5, 7)).astype(np.float32),
        "u": rng.normal(size=(7, 3)).astype(np.float32),
        "b": np.zeros(3, np.float32),
    }


def by_optax(transformation, steps):
    """One process with the whole batch."""
    params = {k: jnp.asarray(v) for k, v in first_params(0).items()}
    state = {k: transformation.init(v) for k, v in params.items()}
    losses = []

    @jax.jit
    def step(params, state):
        def loss(params):
            return jnp.mean((model(params, X) - Y) ** 2)

        value, grads = jax.value_and_grad(loss)(params)
        for k in params:
            delta, state[k] = transformation.update(grads[k], state[k], params[k])
            params[k] = params[k] + delta
        return params, state, value

    for _ in range(steps):
        params, state, value = step(params, state)
        losses.append(float(value))
    return params, losses


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    "transformation", [optax.sgd(0.1), optax.adam(0.05)], ids=["sgd", "adam"]
)
def test_training_is_that_of_one_process_with_the_whole_batch(size, transformation):
    steps = 10

    def program(strategy, rank):
        with strategy.scope():
            params = zs.create_variables(first_params(rank))
            optimizer = zs.Optimizer(transformation)

        @zs.function
        def train_step(x, y):
            def replica(x, y):
                def loss(params):
                    errors = (model(params, x) - y) ** 2
                    return jnp.mean(errors) / strategy.num_replicas_in_sync

                value, grads = zs.value_and_grad(loss)(params)
                optimizer.apply_gradients(grads, params)
                return value

            return strategy.reduce("sum", strategy.run(replica, args=(x, y)), None)

        mine = slice(rank * 8 // size, (rank + 1) * 8 // size)
        losses = [float(train_step(X[mine], Y[mine])) for _ in range(steps)]
        return {k: v.numpy() for k, v in params.items()}, losses, train_step.trace_count

    params, losses = by_optax(transformation, steps)
    for values, seen, traces in ranks(size, program):
        assert traces == 1
        np.testing.assert_allclose(seen, losses, rtol=1e-5)
        for name, value in params.items():
            np.testing.assert_allclose(values[name], value, rtol=1e-5, atol=1e-6)
