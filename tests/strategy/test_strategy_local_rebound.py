"""What a replica function uses is bound again between two calls of ``run``: a global, a
cell of a closure, a default or code, of itself or of what it calls. That is seen by the
next call, and what is bound to an equal number is not traced once more."""

import cmath
import functools
import importlib
import sys
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zstrat as zs

RATE = OTHER = 1.0
step = 0
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


def bind_default(rate):
    with_default.__defaults__ = (rate,)


def bind_keyword(rate):
    with_keyword.__kwdefaults__["rate"] = rate


def bind_keywords(rate):
    with_keyword.__kwdefaults__ = {"rate": rate}


def bind_code(rate):
    coded.__code__ = CODES[rate]


def bind_global(rate):
    globals()["RATE"] = rate


HELPERS = {1.0: lambda x: x, 3.0: lambda x: 3 * x}
replaced = HELPERS[1.0]


def bind_helper(rate):
    globals()["replaced"] = HELPERS[rate]


def bind_name(name, unbound, bound):
    def bind(rate):
        if rate == unbound:
            globals().pop(name, None)
        else:
            globals()[name] = bound

    return bind


def through_wraps(f):
    @functools.wraps(f)
    def wrapper(*args):
        return f(*args)

    return wrapper


def times_rate(f):
    def inner(x):
        return f(x) * RATE

    return inner


def scaled(x):
    return x * RATE


def outer(x):
    return scaled(x) if OTHER else recursive(x)


def recursive(x):
    return outer(x)


@through_wraps
@through_wraps
def wrapped(x):
    return x * RATE


@times_rate
def plain(x):
    return x


def helper(x):
    return plain(x)


def differentiated(x):
    return jax.grad(lambda x: scaled(x).sum())(x) * x


@jax.custom_jvp
def custom(x):
    return x * RATE


custom.defjvp(lambda p, t: (custom(*p), t[0]))


class Wrapper:
    def __init__(self, f):
        functools.update_wrapper(self, f)
        self.f = f

    def __call__(self, x):
        return self.f(x)


checkpointed = jax.checkpoint(helper)
by_object = Wrapper(helper)
mapped = jax.vmap(helper)


class Base:
    def reg(self, x):
        return x * RATE


class Model(Base):
    def __call__(self, x):
        return self.loss(x)

    def loss(self, x):
        return x * self.rate

    @property
    def rate(self):
        return RATE

    def base(self, x):
        return self.reg(x)

    @staticmethod
    def static(x):
        return helper(x)

    @classmethod
    def of_class(cls, x):
        return x * RATE


class Pair(NamedTuple):
    a: object

    def scaled(self):
        return self.a * RATE


def in_a_class(x):
    class Local:
        factor = RATE

    return x * Local.factor


model = Model()

WAYS = {
    "a cell": (lambda x: from_factory(x), bind_it),
    "a default": (lambda x: with_default(x), bind_default),
    "a keyword's default": (lambda x: with_keyword(x), bind_keyword),
    "keywords' defaults": (lambda x: with_keyword(x), bind_keywords),
    "code": (lambda x: coded(x), bind_code),
    "an optional name": (lambda x: optional(x), bind_name("OPTIONAL", 1.0, 3.0)),
    "a builtin": (lambda x: abs(x), bind_name("abs", 1.0, lambda x: 3 * x)),
    "a helper": (lambda x: replaced(x), bind_helper),
    **{
        f"a global, {name}": (fn, bind_global)
        for name, fn in {
            "direct": scaled,
            "deep": recursive,
            "differentiated": differentiated,
            "wraps": lambda x: wrapped(x),
            "a plain decorator": lambda x: plain(x),
            "beneath a helper": lambda x: helper(x),
            "custom_jvp": lambda x: custom(x),
            "checkpoint": lambda x: checkpointed(x),
            "vmap": lambda x: mapped(x),
            "an object that wraps": lambda x: by_object(x),
            "a method": lambda x: model.loss(x),
            "of a base class": lambda x: model.base(x),
            "a call": lambda x: model(x),
            "static": lambda x: Model.static(x),
            "of a class": lambda x: Model.of_class(x),
            "of one made in it": lambda x: Pair(x).scaled(),
            "of a captured object": (lambda kept: lambda x: kept[0].base(x))([model]),
            "in a class": in_a_class,
            "a method that is run": model.base,
            "a wrapper that is run": wrapped,
            "a checkpoint that is run": checkpointed,
            "a callable object": model,
            "a step": zs.function(lambda x: scaled(x)),
            "a partial": functools.partial(lambda f, x: f(x), helper),
            "a closure": (lambda f: lambda x: f(x))(recursive),
        }.items()
    },
}


@pytest.mark.parametrize("way", WAYS)
def test_it_is_seen(two, way):
    fn, bind = WAYS[way]

    def traced(x):
        TRACES.append(1)
        return fn(x)

    try:
        for rate in (1.0, 3.0):
            bind(rate)
            assert first(two, traced) == first(two, fn) == rate
            count = len(TRACES)
            if "default" not in way:  # another tuple of them is another one
                bind(float(str(rate)))
            assert first(two, traced) == rate
            assert len(TRACES) == count
    finally:
        bind(1.0)
    assert first(two, traced) == first(two, fn) == 1.0


def test_one_that_is_bound_back_finds_its_program_again(two, monkeypatch):
    def traced(x):
        TRACES.append(1)
        return recursive(x)

    for rate in (1.0, 3.0):
        monkeypatch.setattr(f"{__name__}.RATE", rate)
        first(two, traced)
    count = len(TRACES)
    for rate in (1.0, 3.0, 1.0):
        monkeypatch.setattr(f"{__name__}.RATE", rate)
        assert first(two, traced) == rate
    assert len(TRACES) == count


def test_others_are_not_looked_at(two, monkeypatch):
    def traced(x):
        TRACES.append(1)
        return helper(x) + jax.nn.relu(x)

    first(two, traced)
    count = len(TRACES)
    monkeypatch.setattr(f"{__name__}.Pair", None)
    monkeypatch.setattr(f"{__name__}.custom", None)
    first(two, traced)
    assert len(TRACES) == count


class State:
    def __init__(self, step):
        self.step = step


def decay(state):
    return 0.5 * state.step


def set_directly(x):
    state = State(x)
    state.step = state.step * 0.5
    return state.step


ATTRIBUTES = {
    "direct": set_directly,
    "helped": lambda x: decay(State(x)),
    "in a lambda": lambda x: (lambda state: state.step * 0.5)(State(x)),
}


@pytest.mark.parametrize("fn", ATTRIBUTES.values(), ids=ATTRIBUTES)
def test_an_attribute_that_is_called_as_a_global_is_not_that_global(
    two, fn, monkeypatch
):
    def traced(x):
        TRACES.append(1)
        return fn(x)

    first(two, traced)
    count = len(TRACES)
    for number in range(1, 8):
        monkeypatch.setattr(f"{__name__}.step", number)
        assert first(two, traced) == 0.5
    assert len(TRACES) == count


def test_a_module_may_have_a_name_of_the_standard_library(two, tmp_path, monkeypatch):
    (tmp_path / "profile.py").write_text(
        "RATE = 1.0\n\ndef scaled(x):\n    return x * RATE\n\n"
        "def step(x):\n    return scaled(x)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "profile", raising=False)
    profile = importlib.import_module("profile")
    try:
        assert first(two, profile.step) == 1
        profile.RATE = 3.0
        assert first(two, profile.step) == 3
    finally:
        del sys.modules["profile"]  # the next one to ask gets Python's


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


@pytest.mark.parametrize("imaginary", [0.0, -0.0])
def test_signs_of_complex_zeros_are_told_apart(two, imaginary):
    def run(number):
        return first(two, lambda x: jnp.angle(jnp.asarray(number)) * x)

    run(complex(-1, -imaginary))
    number = complex(-1, imaginary)
    assert run(number) == np.float32(cmath.phase(number))


def phases(two):
    found = []
    for phase in (2.0, 3.0):  # bound again in the cell of both, and of those before

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
