"""An attribute that is called as some global is not that global."""

import jax.numpy as jnp
import pytest

import zstrat as zs

TRACES = []
step = 0
FACTOR = 1.0


@pytest.fixture
def two():
    TRACES.clear()
    return zs.MirroredStrategy(["CPU:0", "CPU:1"])


class State:
    def __init__(self, step):
        self.step = step


def decay(state):
    return 0.5 * state.step


def direct(x):
    TRACES.append(1)
    state = State(x)
    state.step = state.step * 0.5
    return state.step


def helped(x):
    TRACES.append(1)
    return decay(State(x))


def in_a_lambda(x):
    TRACES.append(1)
    return (lambda state: state.step * 0.5)(State(x))


def in_a_class(x):
    TRACES.append(1)

    class Local:
        factor = FACTOR

    return x * Local.factor


@pytest.mark.parametrize("fn", [direct, helped, in_a_lambda])
def test_it_may_be_bound_anew(two, fn, monkeypatch):
    two.run(fn, (jnp.ones(1),))
    count = len(TRACES)
    for number in range(1, 8):
        monkeypatch.setattr(f"{__name__}.step", number)
        assert two.run(fn, (jnp.ones(1),)).values[0][0] == 0.5
    assert len(TRACES) == count


def test_a_global_that_a_class_in_it_names_may_not(two, monkeypatch):
    for factor in (1.0, 3.0):
        monkeypatch.setattr(f"{__name__}.FACTOR", factor)
        assert two.run(in_a_class, (jnp.ones(1),)).values[0][0] == factor
