"""What jax is told in the program holds for the steps that it schedules.

Settings of context managers are those of a thread: the workers do not see them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zstrat as zs


def drawn(seed):
    return jax.random.normal(jax.random.key(seed), (5,))


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize(
    "setting",
    [lambda: jax.default_prng_impl("rbg"), lambda: jax.threefry_partitionable(False)],
)
def test_keys_give_the_numbers_that_they_give_in_the_program(world, setting, eager):
    step = zs.function(drawn, eager=eager)

    def scheduled():
        return world.coordinator.schedule(step, args=(np.int32(3),)).fetch()

    before = drawn(3)
    np.testing.assert_array_equal(scheduled(), before)
    with setting():
        inside = drawn(3)
        np.testing.assert_array_equal(scheduled(), inside)
    assert (inside != before).any()
    np.testing.assert_array_equal(scheduled(), before)  # it is over


def test_products_are_as_exact_as_the_program_says(world):
    @zs.function
    def step(x):
        return str(jax.make_jaxpr(jnp.dot)(x, x))

    def scheduled():
        x = np.ones((2, 2), np.float32)
        return world.coordinator.schedule(step, args=(x,)).fetch()

    assert "HIGHEST" not in scheduled()
    with jax.default_matmul_precision("highest"):
        assert "HIGHEST" in scheduled()
    assert "HIGHEST" not in scheduled()


def test_a_worker_of_32_bits_refuses_what_is_scheduled_with_64(world):
    step = zs.function(lambda x: x + 1)
    with jax.enable_x64(True):
        value = world.coordinator.schedule(step, args=(np.float64(1) / 3,))
        with pytest.raises(RuntimeError, match="JAX_ENABLE_X64=1"):
            value.fetch()
    with pytest.raises(RuntimeError, match="JAX_ENABLE_X64"):
        world.coordinator.join()


def moved_by_optax(transformation, value, gradient, steps=3):
    state = transformation.init(value)
    for _ in range(steps):
        updates, state = transformation.update(gradient, state, value)
        value = optax.apply_updates(value, updates)
    return np.asarray(value)


@pytest.mark.parametrize("is_scheduled", [False, True])
@pytest.mark.parametrize(
    "setting",
    [lambda: jax.default_prng_impl("rbg"), lambda: jax.threefry_partitionable(False)],
)
def test_optimizers_draw_the_numbers_that_they_draw_in_the_program(
    world, setting, is_scheduled
):
    def noisy():
        return optax.chain(optax.add_noise(0.1, 0.5, 3), optax.sgd(0.1))

    value = np.linspace(0.1, 1, 5, dtype=np.float32)
    gradient = value - 0.5
    before = moved_by_optax(noisy(), value, gradient)
    with setting():
        expected = moved_by_optax(noisy(), value, gradient)
        with world.strategy.scope():
            w, optimizer = zs.Variable(value), zs.Optimizer(noisy())

        @zs.function
        def step(gradient):
            optimizer.apply_gradients([(gradient, w)])

        for _ in range(3):
            if is_scheduled:
                world.coordinator.schedule(step, args=(gradient,)).fetch()
            else:
                optimizer.apply_gradients([(gradient, w)])
    np.testing.assert_allclose(w.numpy(), expected, atol=1e-6)
    assert abs(expected - before).max() > 1e-3


def test_optimizers_have_the_64_bits_of_the_program(world):
    """Parameter servers compute with 32, but where there are variables of 64."""
    value = np.linspace(0.1, 1, 5)
    with jax.enable_x64(True):
        rate = jnp.float64(1) / 3  # an array that travels with the optimizer
        expected = moved_by_optax(optax.sgd(rate), jnp.asarray(value), value)
        with world.strategy.scope():
            w, optimizer = zs.Variable(value), zs.Optimizer(optax.sgd(rate))
        for _ in range(3):
            optimizer.apply_gradients([(value, w)])
    np.testing.assert_allclose(w.numpy(), expected, rtol=1e-15)
