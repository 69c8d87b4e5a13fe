"""What a function calls is seen to be another one: by a cell of its closure, its code,
a default, or a name that nothing was bound to."""

import cmath

import jax.numpy as jnp
import numpy as np
import pytest

import zstrat as zs

TRACES = []


@pytest.fixture
def two():
    TRACES.clear()
    return zs.MirroredStrategy(["CPU:0", "CPU:1"])


def first(strategy, fn):
    return float(strategy.run(fn, (jnp.ones(1),)).values[0][0])


def made(rate):
    def from_factory(x):
        return x * rate

    def bind(value):
        nonlocal rate
        rate = value

    return from_factory, bind


from_factory, bind_it = made(1.0)


def with_default(x, rate=1.0):
    return x * rate


def with_keyword(x, *, rate=1.0):
    return x * rate


def coded(x):
    return x * 1.0


CODES = {1.0: coded.__code__, 3.0: (lambda x: x * 3.0).__code__}


def optional(x):
    try:
        return x * OPTIONAL
    except NameError:
        return x


def absolute(x):
    return abs(x)


def bind_default(rate):
    with_default.__defaults__ = (rate,)


def bind_keyword(rate):
    with_keyword.__kwdefaults__["rate"] = rate


def bind_keywords(rate):
    with_keyword.__kwdefaults__ = {"rate": rate}


def bind_code(rate):
    coded.__code__ = CODES[rate]


def bind_name(name, unbound, bound):
    def bind(rate):
        if rate == unbound:
            globals().pop(name, None)
        else:
            globals()[name] = bound

    return bind


WAYS = {
    "cell": (lambda x: from_factory(x), bind_it),
    "default": (lambda x: with_default(x), bind_default),
    "a keyword's default": (lambda x: with_keyword(x), bind_keyword),
    "keywords' defaults": (lambda x: with_keyword(x), bind_keywords),
    "code": (lambda x: coded(x), bind_code),
    "optional name": (lambda x: optional(x), bind_name("OPTIONAL", 1.0, 3.0)),
    "builtin": (lambda x: absolute(x), bind_name("abs", 1.0, lambda x: 3 * x)),
}


@pytest.mark.parametrize(("fn", "bind"), WAYS.values(), ids=WAYS)
def test_it_is_seen(two, fn, bind):
    def traced(x):
        TRACES.append(1)
        return fn(x)

    try:
        for rate in (1.0, 3.0):
            bind(rate)
            assert first(two, traced) == rate
            count = len(TRACES)
            assert first(two, traced) == rate
            assert len(TRACES) == count
    finally:
        bind(1.0)
    assert first(two, traced) == 1.0


def beneath(fn, depth):
    for _ in range(depth):
        fn = (lambda inner: lambda x: inner(x))(fn)
    return fn


@pytest.mark.parametrize("depth", [0, 5])
def test_a_cell_far_beneath_is_seen(two, depth):
    fn, bind = made(2.0)
    fn = beneath(fn, depth)
    assert first(two, fn) == 2.0
    bind(3.0)
    assert first(two, fn) == 3.0


@pytest.mark.parametrize("depth", [0, 5])
def test_a_cell_that_is_bound_late_is_seen(two, depth):
    def late(x):
        try:
            return x if rate is None else x * rate
        except NameError:
            return x * 5

    fn = beneath(late, depth)
    assert first(two, fn) == 5.0
    rate = None
    assert first(two, fn) == 1.0
    rate = 3.0
    assert first(two, fn) == 3.0


def keyword(rate):
    def fn(x, *, rate=rate):
        return x * rate

    return fn, lambda value: fn.__kwdefaults__.update(rate=value)


def inner(rate):
    def helper(x):
        return x * rate

    def fn(x):
        return helper(x)

    def bind(value):
        nonlocal rate
        rate = value

    return fn, bind


@pytest.mark.parametrize("make", [made, keyword, inner])
def test_an_equal_function_does_not_run_with_what_another_is_bound_to(two, make):
    one, bind = make(2.0)
    other, _ = make(2.0)
    assert first(two, one) == 2.0
    bind(3.0)
    found = two.run(other, (jnp.ones(2),))  # to be traced for another shape
    np.testing.assert_array_equal(found.values[0], [2.0, 2.0])


def test_an_equal_number_in_a_cell_is_the_same(two):
    def fn(x):
        TRACES.append(1)
        return from_factory(x)

    try:
        bind_it(2.5)
        first(two, fn)
        count = len(TRACES)
        bind_it(float("2.5"))
        assert first(two, fn) == 2.5
        assert len(TRACES) == count
    finally:
        bind_it(1.0)


@pytest.mark.parametrize("imaginary", [0.0, -0.0])
def test_signs_of_complex_zeros_are_told_apart(two, imaginary):
    def run(number):
        return first(two, lambda x: jnp.angle(jnp.asarray(number)) * x)

    run(complex(-1, -imaginary))
    number = complex(-1, imaginary)
    assert run(number) == np.float32(cmath.phase(number))


def phases(two):
    found = []
    for phase in (2.0, 3.0):  # bound anew in the cell of both, and of those before

        def step(x):
            TRACES.append(1)
            return x * phase  # noqa: B023 - that is what is tested

        found.append(first(two, step))
    return found


def counted(two):
    number = 2.0

    def step(x):
        TRACES.append(1)
        return x * number

    found = [first(two, step)]
    number = 3.0
    return [*found, first(two, step)]


@pytest.mark.parametrize("train", [phases, counted])
def test_functions_made_anew_find_the_steps_of_their_like(two, train):
    """Though what those that were there first have captured is other by now."""
    assert train(two) == [2.0, 3.0]
    count = len(TRACES)
    for _ in range(10):
        assert train(two) == [2.0, 3.0]
    assert len(TRACES) == count
