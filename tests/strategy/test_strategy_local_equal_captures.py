"""What a function has captured may be made anew of the same parts at each call: it is
traced once. Of other parts it is another one."""

import functools
import gc
import types
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zstrat as zs

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

# What is captured, made anew of a number; what is done with it.
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


ANEW = {
    "partial": lambda: functools.partial(Model.times, MODELS[2], by=1.0),
    "partial of jax": lambda: jax.tree_util.Partial(Model.times, MODELS[2], by=1.0),
    "another partial": lambda: Twice(lambda x: x),
    "method of a function": lambda: types.MethodType(of_function, lambda x: x * 2),
    "step": lambda: zs.function(MODELS[2].scaled),
    "step of an object": lambda: zs.function(functools.partial(MODELS[2].times, by=1)),
}


@pytest.mark.filterwarnings("ignore::zstrat.program.RetraceWarning")
@pytest.mark.parametrize("make", ANEW.values(), ids=ANEW)
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
