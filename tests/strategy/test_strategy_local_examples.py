"""Gradients of single examples: those of all replicas, one behind the other, move the
variables as plain optax is moved by all of them at once."""

import jax
import numpy as np
import optax
import pytest
from ranks import ranks
from tiers import combined

import zstrat as zs

START = {"b": np.float32(0.5), "w": np.float32([[1, -2], [3, 4]])}
FACTORS = np.float32([0.1, -3, 2, 5])
"""One for each example."""


def transformation():
    clipped = optax.contrib.differentially_private_aggregate(
        l2_norm_clip=1.5, noise_multiplier=0.0, key=jax.random.key(0)
    )
    return optax.chain(clipped, optax.sgd(0.5, momentum=0.9))


def gradients(factors):
    return jax.tree.map(
        lambda leaf: factors.reshape(-1, *[1] * leaf.ndim) * np.cos(leaf), START
    )


def by_optax(steps):
    values = jax.tree.map(np.asarray, START)
    state = transformation().init(values)
    for _ in range(steps):
        updates, state = transformation().update(gradients(FACTORS), state, values)
        values = optax.apply_updates(values, updates)
    return values


def moved(strategy, batch, *, is_looked_at, is_inside):
    with strategy.scope():
        params = zs.create_variables(START)
        optimizer = zs.Optimizer(transformation(), params=params)

    def replica_fn(factors):
        if is_looked_at:
            int(zs.get_replica_context().replica_id_in_sync_group)
        optimizer.apply_gradients(gradients(factors), params)

    def step(factors):
        strategy.run(replica_fn, args=(factors,))

    for _ in range(2):
        (zs.function(step) if is_inside else step)(batch)
    return jax.tree.map(lambda variable: variable.numpy(), params)


def assert_as_optax(values):
    expected = by_optax(2)
    for name, value in values.items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-6)


@pytest.mark.parametrize(
    ("is_looked_at", "is_inside"), combined([True, False], [True, False])
)
def test_replicas_of_one_process(is_looked_at, is_inside):
    strategy = zs.MirroredStrategy(["CPU:0", "CPU:1"])
    batch = strategy.experimental_distribute_values_from_function(
        lambda context: np.split(FACTORS, 2)[context.replica_id_in_sync_group]
    )
    ways = {"is_looked_at": is_looked_at, "is_inside": is_inside}
    assert_as_optax(moved(strategy, batch, **ways))


@pytest.mark.parametrize("is_looked_at", [True, False])
def test_replicas_of_two_processes(is_looked_at):
    def program(strategy, rank):
        batch = np.split(FACTORS, 2)[rank]
        return moved(strategy, batch, is_looked_at=is_looked_at, is_inside=True)

    for values in ranks(2, program):
        assert_as_optax(values)


def test_what_does_not_bring_them_together_is_refused():
    params = zs.create_variables(START)
    optimizer = zs.Optimizer(optax.adam(0.1), params=params)
    with pytest.raises(ValueError, match=r"\(4,\)"):
        optimizer.apply_gradients(gradients(FACTORS), params)
    for name, value in zs.values(params).items():
        np.testing.assert_array_equal(value, START[name])
