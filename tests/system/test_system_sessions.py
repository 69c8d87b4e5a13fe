"""Handles that outlive their strategy, and handles that no worker can reach."""

import numpy as np
import optax
import pytest

import zstrat as zs

pytestmark = pytest.mark.processes


@pytest.fixture
def stale(daemons):
    """A variable and an optimizer of a strategy that is closed."""
    with zs.ParameterServerStrategy(daemons.resolver) as strategy, strategy.scope():
        made = zs.Variable(np.float32(1), name="stale"), zs.Optimizer(optax.sgd(1.0))
    return made


@pytest.fixture
def strategy(daemons, stale):
    with zs.ParameterServerStrategy(daemons.resolver) as strategy:
        yield strategy


def step_with(variable, *, eager):
    @zs.function(eager=eager)
    def step():
        variable.assign_add(np.float32(1))
        return variable.value()

    return step


@pytest.mark.parametrize("eager", [False, True])
def test_a_variable_of_an_earlier_strategy_is_refused_by_name(strategy, stale, eager):
    with strategy.scope():
        fresh = zs.Variable(np.float32(7), name="fresh")
    coordinator = zs.ClusterCoordinator(strategy)
    with pytest.raises(zs.NotFoundError, match="'stale'"):
        coordinator.schedule(step_with(stale[0], eager=eager)).fetch()
    if eager:
        with pytest.raises(zs.NotFoundError):
            coordinator.join()
    assert fresh.numpy() == 7


def test_an_optimizer_of_an_earlier_strategy_is_refused_by_name(strategy, stale):
    with strategy.scope():
        fresh = zs.Variable(np.float32(7), name="fresh")

    @zs.function
    def step():
        stale[1].apply_gradients([(np.float32(1), fresh)])

    with pytest.raises(zs.NotFoundError, match="'Optimizer'"):
        zs.ClusterCoordinator(strategy).schedule(step)
    assert fresh.numpy() == 7


@pytest.mark.parametrize("eager", [False, True])
def test_a_variable_from_outside_of_the_scope_is_refused_by_name(strategy, eager):
    coordinator = zs.ClusterCoordinator(strategy)
    step = step_with(zs.Variable(np.float32(1), name="outside"), eager=eager)
    with pytest.raises(ValueError, match=r"'outside'.*strategy\.scope"):
        coordinator.schedule(step).fetch()
    if eager:
        with pytest.raises(ValueError, match="'outside'"):
            coordinator.join()
