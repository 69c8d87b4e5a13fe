"""A function that is another one at each call of ``run``: what is said about it, and
what stays of those that are gone."""

import functools
import gc
import inspect
import warnings
import weakref
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zstrat as zs
from zstrat.program import RetraceWarning

RATE = BATCH = None
TRACES = []


@pytest.fixture
def two():
    TRACES.clear()
    return zs.MirroredStrategy(["CPU:0", "CPU:1"])


@pytest.fixture
def run(two, monkeypatch):
    """Runs a function that is made of a number, on 1; its result is the number."""
    monkeypatch.setattr(f"{__name__}.RATE", None)
    monkeypatch.setattr(f"{__name__}.BATCH", None)

    def run(make, number):
        fn = make(number)
        assert two.run(fn, (jnp.ones(1),)).values[0][0] == number

    return run


def helper(x):
    return x * RATE


def helped(x):
    TRACES.append(1)
    return helper(x)


class Model:
    def __init__(self, factor):
        self.factor = factor

    def scaled(self, x):
        return x * self.factor

    def __call__(self, x):
        return x * self.factor


class Slim:
    __slots__ = ("factor",)

    def __init__(self, factor):
        self.factor = factor

    def __call__(self, x):
        return x * self.factor


def changing(number):
    globals()["RATE"] = number
    return helped


def closures(number):
    def fn(x, rate=number):
        return x * rate

    return fn


def cells(rate):
    return lambda x: x * rate


def partials(number):
    return functools.partial(lambda rate, x: x * rate, number)


def methods(number):
    return Model(number).scaled


def compiled(number):
    model = Model(number)
    return jax.jit(lambda x, model=model: model(x))


def steps(rate):
    return zs.function(lambda x: x * rate)


REBOUND = "captured name 'rate' of .*lambda> was 1.5 and is 2.0"
# The name of the function, and what is said of its change from 1.5 to 2.0.
NEW = {
    Model: ("Model", "object that is called was <Model at|is another one"),
    Slim: ("Slim", "object that is called (was <Slim at|is another one)"),
    # As the version of jax has it.
    compiled: (mock.ANY, "was <PjitFunction at|is another one|of .* was <Model at"),
    steps: ("steps.<lambda>", REBOUND),
    methods: ("Model.scaled", "is a method of,? (was <Model at|is another one)"),
    changing: (mock.ANY, "global 'RATE' of .* was 1.5 and is 2.0"),
    closures: ("closures.fn", "the default of 'rate' of .*fn was 1.5 and is 2.0"),
    cells: ("cells.<lambda>", REBOUND),
    partials: ("partials.<lambda>", r"args\[0\] of the partial was 1.5 and is 2.0"),
}


@pytest.mark.parametrize("make", NEW)
def test_the_fifth_is_told_with_its_name_its_line_and_what_changed(run, make):
    name, change = NEW[make]
    for number in range(4):
        run(make, number / 2)
    words = f"5th time.*{change}.*args of run"
    with pytest.warns(RetraceWarning, match=words) as told:
        run(make, 2.0)
    (each,) = told
    assert str(each.message).split("'")[1] == name
    lines, first = inspect.getsourcelines(run)
    (line,) = [first + n for n, text in enumerate(lines) if "two.run" in text]
    assert (each.filename, each.lineno) == (__file__, line)


def test_many_that_live_are_found_again_in_silence(two):
    models = [Model(number) for number in range(6)]
    fns = [
        *(model.scaled for model in models),
        *(Model.scaled.__get__(m) for m in models),
        *models,
    ]
    for _ in range(2):
        for number, fn in enumerate(fns):
            assert two.run(fn, (jnp.ones(1),)).values[0][0] == number % 6


def test_a_few_of_a_global_are_kept(run):
    def is_traced(rate):
        count = len(TRACES)
        run(changing, rate)
        return len(TRACES) > count

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RetraceWarning)
        assert all(is_traced(float(rate)) for rate in range(20))
        assert not any(is_traced(float(rate)) for rate in range(12, 20))
        assert is_traced(0.0)


def of_batch(x):
    return x * BATCH.size


def by_global(number):
    globals()["BATCH"] = np.ones(number)
    return of_batch, BATCH


def by_partial(number):
    batch = np.ones(number)
    return functools.partial(lambda batch, x: x * batch.size, batch), batch


def by_object(use):
    """``use`` makes a function of a model."""

    def by_object(number):
        model = Model(number)
        return use(model), model

    return by_object


def by_itself(make):
    def by_itself(number):
        fn = make(number)
        return fn, fn

    return by_itself


# A function that is made of a number, and what should go when nobody has it.
MADE = {
    "global": by_global,
    "partial": by_partial,
    "method": by_object(lambda model: model.scaled),
    "object": by_object(lambda model: model),
    "partial of an object": by_object(
        lambda model: functools.partial(lambda f, x: f(x), model)
    ),
    "step of an object": by_object(zs.function),
    "closure over an object": by_object(lambda model: lambda x: model(x)),
    "compiled": by_itself(lambda number: jax.jit(lambda x: x * number)),
    "step": by_itself(lambda number: zs.function(lambda x: x * number)),
}


@pytest.mark.parametrize("name", MADE)
def test_what_is_gone_does_not_stay(run, name, monkeypatch):
    found = []

    def make(number):
        fn, kept = MADE[name](number)
        found.append(weakref.ref(kept))
        return fn

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RetraceWarning)
        for number in range(1, 8):
            run(make, number)
    monkeypatch.undo()
    gc.collect()
    assert sum(ref() is not None for ref in found) <= 2  # for the next ones
