"""Python numbers among the arguments of ``run``: what Python makes of them, however
often the function was called."""

import warnings

import jax.numpy as jnp
import numpy as np
import pytest

import zstrat as zs
from zstrat.program import RetraceWarning
from zstrat.strategy import PerReplica


@pytest.fixture(params=[1, 2])
def some(request):
    return zs.MirroredStrategy([f"CPU:{n}" for n in range(request.param)])


def first(strategy, result):
    return strategy.experimental_local_results(result)[0]


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RetraceWarning)
        yield


def test_integers_do_not_wrap(some):
    def fn(x, step):
        return x + step**3 % 97

    for step in (2000, 2001, 2002, 2003, 2**40, 2000):
        assert first(some, some.run(fn, (jnp.float32(0), step))) == step**3 % 97


def test_floats_have_all_their_digits(some):
    def fn(x, step, *, decay):
        return x / (1 - decay**step)

    for step in (1, 2, 3, 4, 5):
        found = first(some, some.run(fn, (jnp.float32(1), step), {"decay": 0.999}))
        np.testing.assert_allclose(found, 1 / (1 - 0.999**step), rtol=1e-7)


def test_python_may_ask_what_they_are_and_branch(some):
    def fn(x, rate, rows):
        if rows > 2 and isinstance(rate, float):
            return jnp.zeros((rows, 1)) + x * rate
        return x * 0

    for rate, rows in ((0.1, 3), (0.2, 4), (0.3, 5), (0.4, 6)):
        found = first(some, some.run(fn, (jnp.float32(1), rate, rows)))
        np.testing.assert_allclose(found, np.full((rows, 1), rate), rtol=1e-6)


def test_they_are_returned_as_they_are(some):
    for number in (1, 2.5, 3, 2**60, -0.0):
        found = some.run(lambda n: n, (number,))
        assert repr(found) == repr(number)


def test_the_same_of_numbers_that_all_replicas_have():
    two = zs.MirroredStrategy(["CPU:0", "CPU:1"])

    def fn(x, step):
        return x + step**3 % 97

    for step in (2000, 2001, 2002, 2003):
        found = two.run(fn, (jnp.float32(0), PerReplica((step, step))))
        assert first(two, found) == step**3 % 97


def test_each_value_is_compiled_once_and_arrays_are_inputs(some):
    traced = []

    def fn(x, rate):
        traced.append(rate)
        return x * rate

    for rate in (0.5, 1.5, 0.5, 1.5):
        some.run(fn, (jnp.float32(1), rate))
    count = len(traced)
    for rate in (0.5, 1.5, 0.5, 1.5):
        some.run(fn, (jnp.float32(1), rate))
    assert len(traced) == count
    some.run(fn, (jnp.float32(1), np.float32(0.5)))
    count = len(traced)
    for rate in (1.5, 2.5, 3.5):
        some.run(fn, (jnp.float32(1), np.float32(rate)))
    assert len(traced) == count


def test_one_that_changes_at_each_call_is_warned_about_with_words(some):
    def train(x, rate, *, step):
        return x * rate * step

    for step in range(4):
        some.run(train, (jnp.float32(1), 0.5), {"step": step})
    words = r"\b5\b.*\['step'\].*\b3\b"
    with pytest.warns(RetraceWarning, match=words) as told:
        some.run(train, (jnp.float32(1), 0.5), {"step": 4})
    assert "np.float32" not in str(told[0].message)


def test_a_step_of_the_user_takes_them_as_arrays():
    two = zs.MirroredStrategy(["CPU:0", "CPU:1"])

    @zs.function
    def step(rate):
        return two.run(lambda x: x * rate, (jnp.float32(2),))

    for rate in (0.5, 1.5, 2.5):
        assert first(two, step(rate)) == 2 * rate
    assert step.trace_count == 1


@pytest.mark.parametrize("kind", [float, complex])
def test_zeros_of_different_signs_are_not_the_same_in_a_step(kind):
    two = zs.MirroredStrategy(["CPU:0", "CPU:1"])
    zeros = PerReplica((kind(0.0), -kind(0.0)))

    def angle(x):
        # Of x itself, as jnp.angle would lose the sign of a float.
        return jnp.arctan2(jnp.imag(jnp.asarray(x)), jnp.real(jnp.asarray(x)))

    found = zs.function(lambda: two.run(angle, (zeros,)))()
    expected = [np.angle(kind(0.0)), np.angle(-kind(0.0))]
    if kind is float:
        expected = [np.arctan2(0.0, 0.0), np.arctan2(0.0, -0.0)]
    np.testing.assert_allclose([float(x) for x in found.values], expected, rtol=1e-6)
