"""A user's program that knows one worker of a cluster: its steps are in order."""

import asyncio

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from system_worlds import of_one_worker

import zstrat as zs

pytestmark = pytest.mark.processes


@pytest.fixture
def resolver(daemons):
    return of_one_worker(daemons)


def test_one_worker_reads_what_it_wrote(resolver):
    with zs.ParameterServerStrategy(resolver) as strategy:
        coordinator = zs.ClusterCoordinator(strategy)
        with strategy.scope():
            v = zs.Variable(np.float32(0.0))

        @zs.function
        def increment():
            v.assign(v.value() + 1.0)
            return v.value()

        values = [coordinator.schedule(increment) for _ in range(100)]
        coordinator.join()
        # One worker runs one closure after the other: no read may be stale.
        assert [float(value.fetch()) for value in values] == list(range(1, 101))
        assert v.numpy() == 100.0


def test_training_equals_plain_optax_on_one_worker(resolver):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((64, 3)).astype(np.float32)
    y = (x @ np.array([1.0, -2.0, 0.5], np.float32)).astype(np.float32)
    initial = {"w": np.zeros(3, np.float32), "b": np.zeros((), np.float32)}

    def loss_fn(params, x, y):
        return jnp.mean((x @ params["w"] + params["b"] - y) ** 2)

    transformation = optax.adam(0.1)
    expected, state, losses = initial, transformation.init(initial), []
    for _ in range(20):
        loss, grads = jax.value_and_grad(loss_fn)(expected, x, y)
        updates, state = transformation.update(grads, state, expected)
        expected = optax.apply_updates(expected, updates)
        losses.append(float(loss))

    with zs.ParameterServerStrategy(resolver) as strategy:
        coordinator = zs.ClusterCoordinator(strategy)
        with strategy.scope():
            params = zs.create_variables(initial)
            optimizer = zs.Optimizer(optax.adam(0.1))

        @zs.function
        def step(x, y):
            loss, grads = zs.value_and_grad(loss_fn)(params, x, y)
            optimizer.apply_gradients(grads, params)
            return loss

        values = [coordinator.schedule(step, args=(x, y)) for _ in range(20)]
        coordinator.join()
        got = [float(value.fetch()) for value in values]
        np.testing.assert_allclose(got, losses, rtol=1e-5)
        np.testing.assert_allclose(params["w"].numpy(), expected["w"], rtol=1e-5)
        np.testing.assert_allclose(params["b"].numpy(), expected["b"], atol=1e-6)
        assert step.trace_count == 1


def test_the_same_through_the_async_client(resolver):
    async def program(strategy):
        async with zs.AsyncClusterCoordinator(strategy) as coordinator:

            @zs.function
            def double(x):
                return x * 2

            values = [
                await coordinator.schedule(double, args=(np.float32(i),))
                for i in range(20)
            ]
            await coordinator.join()
            return [float(await value) for value in values]

    with zs.ParameterServerStrategy(resolver) as strategy:
        assert asyncio.run(program(strategy)) == [2.0 * i for i in range(20)]
