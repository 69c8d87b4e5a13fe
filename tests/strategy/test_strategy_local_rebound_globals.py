"""A global that is bound anew is seen by the next call of ``run``, also if a helper of
the module names it."""

import functools
import importlib
import sys

import jax
import jax.numpy as jnp
import pytest

import zstrat as zs

RATE = 1.0
OTHER = 1.0
TRACES = []


@pytest.fixture
def two(monkeypatch):
    TRACES.clear()
    monkeypatch.setattr(f"{__name__}.RATE", 1.0)
    return zs.MirroredStrategy(["CPU:0", "CPU:1"])


def scaled(x):
    return x * RATE


def outer(x):
    return scaled(x) if OTHER else recursive(x)


def recursive(x):
    return outer(x)


def direct(x):
    TRACES.append("direct")
    return x * RATE


def helped(x):
    TRACES.append("helped")
    return scaled(x)


def deep(x):
    TRACES.append("deep")
    return recursive(x)


def differentiated(x):
    TRACES.append("differentiated")
    return jax.grad(lambda x: scaled(x).sum())(x) * x


class Model:
    def loss(self, x):
        TRACES.append("loss")
        return outer(x)


@zs.function
def step(x):
    TRACES.append("step")
    return scaled(x)


WAYS = {
    "direct": direct,
    "helped": helped,
    "deep": deep,
    "differentiated": differentiated,
    "a method": Model().loss,
    "a step": step,
    "a partial": functools.partial(lambda f, x: f(x), helped),
    "a closure": (lambda f: lambda x: f(x))(deep),
}


def first(strategy, fn):
    return float(strategy.run(fn, (jnp.ones(1),)).values[0][0])


@pytest.mark.parametrize("fn", WAYS.values(), ids=WAYS)
def test_one_that_is_bound_anew_is_seen(two, fn, monkeypatch):
    for rate in (1.0, 3.0, 5.0, 3):
        monkeypatch.setattr(f"{__name__}.RATE", rate)
        assert first(two, fn) == rate


@pytest.mark.parametrize("fn", WAYS.values(), ids=WAYS)
def test_an_equal_number_is_the_same(two, fn, monkeypatch):
    monkeypatch.setattr(f"{__name__}.RATE", 2.5)
    first(two, fn)
    count = len(TRACES)
    monkeypatch.setattr(f"{__name__}.RATE", float("2.5"))
    assert first(two, fn) == 2.5
    assert len(TRACES) == count


def test_one_that_is_bound_back_finds_its_program_again(two, monkeypatch):
    for rate in (1.0, 3.0):
        monkeypatch.setattr(f"{__name__}.RATE", rate)
        first(two, deep)
    count = len(TRACES)
    for rate in (1.0, 3.0, 1.0):
        monkeypatch.setattr(f"{__name__}.RATE", rate)
        assert first(two, deep) == rate
    assert len(TRACES) == count


def test_a_helper_that_is_defined_anew_is_seen(two, monkeypatch):
    assert first(two, deep) == 1
    monkeypatch.setattr(f"{__name__}.scaled", lambda x: x * 7)
    assert first(two, deep) == 7


def test_a_module_may_have_a_name_of_the_standard_library(two, tmp_path, monkeypatch):
    (tmp_path / "profile.py").write_text(
        "RATE = 1.0\n\ndef scaled(x):\n    return x * RATE\n\n"
        "def step(x):\n    return scaled(x)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "profile", raising=False)
    profile = importlib.import_module("profile")
    try:
        assert [float(x) for x in two.run(profile.step, (jnp.float32(2),)).values] == [
            2,
            2,
        ]
        profile.RATE = 3.0
        assert [float(x) for x in two.run(profile.step, (jnp.float32(2),)).values] == [
            6,
            6,
        ]
    finally:
        del sys.modules["profile"]  # the next one to ask gets Python's
