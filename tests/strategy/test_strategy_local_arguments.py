"""Python numbers among the arguments of ``run``, and what a function has captured: what
Python makes of them, and traced once for each."""

import functools
import gc
import inspect
import types
import warnings
import weakref

import jax
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


def branching(x, rate, rows):
    if rows > 2 and isinstance(rate, float):
        return jnp.zeros((rows, 1)) + x * rate
    return x * 0


NUMBERS = {
    "integers do not wrap": (
        lambda x, step: x - 1 + step**3 % 97,
        [(n,) for n in (2000, 2001, 2002, 2003, 2**40, 2000)],
        lambda step: step**3 % 97,
    ),
    "floats have all their digits": (
        lambda x, step, decay: x / (1 - decay**step),
        [(step, 0.999) for step in (1, 2, 3, 4, 5)],
        lambda step, decay: 1 / (1 - decay**step),
    ),
    "Python may ask what they are and branch": (
        branching,
        [(0.1, 3), (0.2, 4), (0.3, 5), (0.4, 6)],
        lambda rate, rows: np.full((rows, 1), rate),
    ),
}


@pytest.mark.parametrize("how", ["args", "kwargs", "of each replica"])
@pytest.mark.parametrize("name", NUMBERS)
def test_they_are_pythons_numbers(some, name, how):
    fn, calls, expected = NUMBERS[name]
    names = list(inspect.signature(fn).parameters)[1:]
    for numbers in calls:
        given, kwargs = numbers, {}
        if how == "kwargs":
            given, kwargs = (), dict(zip(names, numbers, strict=True))
        elif how == "of each replica":
            given = [PerReplica((n,) * some.num_replicas_in_sync) for n in numbers]
        found = first(some, some.run(fn, (jnp.float32(1), *given), kwargs))
        np.testing.assert_allclose(found, expected(*numbers), rtol=1e-6)


def test_they_are_returned_as_they_are(some):
    for number in (1, 2.5, 3, 2**60, -0.0):
        found = some.run(lambda n: n, (number,))
        assert repr(found) == repr(number)


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


TRACES = []


@pytest.fixture
def two():
    TRACES.clear()
    return zs.MirroredStrategy(["CPU:0", "CPU:1"])


class Model:
    def __init__(self, factor):
        self.factor = factor

    def scaled(self, x):
        return x * self.factor

    def times(self, x, by):
        return x * self.factor * by


MODELS = {number: Model(number) for number in (1, 2)}


X = np.arange(1, 5, dtype=np.float32)


# A captured value, made again of a number; what is done with it.
KINDS = {
    "tuple": (lambda n: (4 // n, n), lambda c, x: x.reshape(c)),
    "nested": (lambda n: ((0, n - 1), (n,)), lambda c, x: jnp.pad(x, c[0]) * c[1][0]),
    "of functions": (lambda n: (lambda x: x * n,), lambda c, x: c[0](x)),
    "float32": (lambda n: np.float32(n), lambda c, x: x * c),
    "bfloat16": (lambda n: jnp.bfloat16.dtype.type(n), lambda c, x: x * c.astype("f4")),
    "slice": (lambda n: slice(0, n), lambda c, x: x[c]),
    "method": (lambda n: MODELS[n].scaled, lambda c, x: c(x)),
    "partial": (
        lambda n: functools.partial(MODELS[n].times, by=float(n)),
        lambda c, x: c(x),
    ),
}


BY_HAND = {
    "tuple": lambda n: X.reshape(4 // n, n),
    "nested": lambda n: np.pad(X, (0, n - 1)) * n,
    "slice": lambda n: X[:n],
    "partial": lambda n: X * n * n,
}


def run(strategy, kind, number):
    make, use = KINDS[kind]
    captured = make(number)

    def fn(x):
        TRACES.append(1)
        return use(captured, x)

    return np.asarray(strategy.run(fn, (X,)).values[1])


@pytest.mark.parametrize("kind", KINDS)
def test_of_the_same_parts_it_is_traced_once(two, kind):
    by_hand = BY_HAND.get(kind, lambda n: X * n)
    for number in (1, 2):
        np.testing.assert_array_equal(run(two, kind, number), by_hand(number))
        count = len(TRACES)
        np.testing.assert_array_equal(run(two, kind, number), by_hand(number))
        assert len(TRACES) == count


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (np.float32(0.0), np.float32(-0.0)),
        (np.float32(1), np.float16(1)),
        (np.float32(1), 1.0),
        ((0.0,), (-0.0,)),
        ((1,), (True,)),
        ((1, 2), (1,)),
        (slice(0, 1), slice(0, 1, 1)),
    ],
)
def test_of_other_parts_it_is_traced_anew(two, one, other):
    def make(captured):
        def fn(x):
            TRACES.append(captured)
            return x

        return fn

    for captured in (one, other):
        two.run(make(captured), (X,))
        assert repr(TRACES[-1]) == repr(captured)


class Twice(functools.partial):
    def __call__(self, *args):
        return 2 * super().__call__(*args)


def of_function(f, x):
    return f(x)


MADE_AGAIN = {
    "partial": lambda: functools.partial(Model.times, MODELS[2], by=1.0),
    "partial of jax": lambda: jax.tree_util.Partial(Model.times, MODELS[2], by=1.0),
    "another partial": lambda: Twice(lambda x: x),
    "method of a function": lambda: types.MethodType(of_function, lambda x: x * 2),
    "step": lambda: zs.function(MODELS[2].scaled),
    "step of an object": lambda: zs.function(functools.partial(MODELS[2].times, by=1)),
}


@pytest.mark.filterwarnings("ignore::zstrat.program.RetraceWarning")
@pytest.mark.parametrize("make", MADE_AGAIN.values(), ids=MADE_AGAIN)
def test_one_made_anew_is_traced_for_other_shapes(two, make):
    for size in range(1, 4):
        x = np.ones(size)
        np.testing.assert_array_equal(two.run(make(), (x,)).values[0], 2 * x)


def test_an_object_in_a_tuple_is_known_by_itself(two):
    def make(captured):
        return lambda x: x * captured[0].size

    def run(size):
        array = np.ones(size)
        assert two.run(make((array,)), (X,)).values[0][0] == size
        return weakref.ref(array)

    found = [run(size) for size in range(1, 5)]
    gc.collect()
    assert sum(ref() is not None for ref in found) <= 2  # for the next ones
