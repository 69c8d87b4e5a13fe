"""`delayed_nesterov` against Nesterov momentum of optax."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from zstrat.optimizers import delayed_nesterov

START = {"a": jnp.arange(3.0), "b": jnp.ones((2, 2))}
GRADIENTS = [jax.tree.map(lambda x, n=n: jnp.sin(n + x), START) for n in range(1, 9)]


def moved(transformation, gradients):
    """The parameters after each gradient."""
    params, state, after = START, transformation.init(START), []
    for gradient in gradients:
        updates, state = transformation.update(gradient, state, params)
        params = optax.apply_updates(params, updates)
        after.append(params)
    return after


def close(found, wanted):
    jax.tree.map(lambda *x: np.testing.assert_allclose(*x, rtol=1e-5), found, wanted)


def test_a_period_of_one_is_nesterov_momentum():
    nesterov = optax.sgd(0.3, momentum=0.9, nesterov=True)
    close(moved(delayed_nesterov(0.3, 0.9, 1), GRADIENTS), moved(nesterov, GRADIENTS))


@pytest.mark.parametrize("period", [2, 4])
def test_equal_updates_of_a_period_are_one_step(period):
    nesterov = optax.sgd(0.3, momentum=0.9, nesterov=True)
    repeated = [gradient for gradient in GRADIENTS for _ in range(period)]
    found = moved(delayed_nesterov(0.3, 0.9, period), repeated)
    close(found[period - 1 :: period], moved(nesterov, GRADIENTS))


def test_updates_of_a_period_are_a_step_of_their_mean():
    nesterov = optax.sgd(0.3, momentum=0.9, nesterov=True)
    pairs = zip(GRADIENTS[::2], GRADIENTS[1::2], strict=True)
    means = [jax.tree.map(lambda x, y: (x + y) / 2, *pair) for pair in pairs]
    found = moved(delayed_nesterov(0.3, 0.9, 2), GRADIENTS)
    close(found[1::2], moved(nesterov, means))


def test_a_period_is_at_least_one():
    with pytest.raises(ValueError, match="period=0"):
        delayed_nesterov(0.3, 0.9, 0)
