"""A global beneath a helper that is decorated, or beneath a method, is seen when it is
bound anew."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import pytest

import zstrat as zs

RATE = 1.0
TRACES = []


def through_wraps(f):
    @functools.wraps(f)
    def wrapper(*args):
        return f(*args)

    return wrapper


def times_rate(f):
    def inner(x):
        return f(x) * RATE

    return inner


@through_wraps
def wrapped(x):
    return x * RATE


@through_wraps
@through_wraps
def wrapped_twice(x):
    return x * RATE


@times_rate
def plain(x):
    return x


def helper(x):
    return plain(x)


@jax.custom_jvp
def custom(x):
    return x * RATE


custom.defjvp(lambda p, t: (custom(*p), t[0]))

compiled = jax.jit(jax.checkpoint(lambda x: x * RATE), static_argnums=())


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


model = Model()


WAYS = {
    "wraps": lambda x: wrapped(x),
    "wraps twice": lambda x: wrapped_twice(x),
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
    "a method of a captured object": (lambda kept: lambda x: kept[0].base(x))([model]),
    "a method that is run": model.base,
    "a wrapper that is run": wrapped,
    "a checkpoint that is run": checkpointed,
    "a callable object": model,
}


@pytest.mark.parametrize("fn", WAYS.values(), ids=WAYS)
def test_it_is_seen(fn, monkeypatch):
    two = zs.MirroredStrategy(["CPU:0", "CPU:1"])
    for rate in (1.0, 3.0, 1.0):
        monkeypatch.setattr(f"{__name__}.RATE", rate)
        assert two.run(fn, (jnp.ones(1),)).values[0][0] == rate


def test_others_are_not_looked_at(monkeypatch):
    def fn(x):
        TRACES.append(1)
        return helper(x) + jax.nn.relu(x)

    two = zs.MirroredStrategy(["CPU:0", "CPU:1"])
    two.run(fn, (jnp.ones(1),))
    count = len(TRACES)
    monkeypatch.setattr(f"{__name__}.Pair", None)
    monkeypatch.setattr(f"{__name__}.custom", None)
    two.run(fn, (jnp.ones(1),))
    assert len(TRACES) == count
