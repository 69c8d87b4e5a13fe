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

RATE = 1.0
BATCH = None
TRACES = []


@pytest.fixture
def two():
    TRACES.clear()
    return zs.MirroredStrategy(["CPU:0", "CPU:1"])


def helper(x):
    return x * RATE


def helped(x):
    TRACES.append(1)
    return helper(x)


def of_batch(x):
    return x * BATCH.size


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


def changing(two, monkeypatch):
    for number in range(5):
        monkeypatch.setattr(f"{__name__}.RATE", number / 2)
        assert two.run(helped, (jnp.ones(1),)).values[0][0] == number / 2


def closures(two, _):
    for number in range(5):
        rate = number / 2

        def fn(x, rate=rate):
            return x * rate

        two.run(fn, (jnp.ones(1),))


def cells(two, _):
    def make(rate):
        return lambda x: x * rate

    for number in range(5):
        two.run(make(number / 2), (jnp.ones(1),))


def partials(two, _):
    for number in range(5):
        two.run(functools.partial(lambda rate, x: x * rate, number / 2), (jnp.ones(1),))


def methods(two, _):
    for number in range(5):
        two.run(Model(number).scaled, (jnp.ones(1),))


def objects(two, _):
    for number in range(5):
        two.run(Model(number), (jnp.ones(1),))


def compiled(two, _):
    for number in range(5):
        model = Model(number)
        two.run(jax.jit(lambda x, model=model: model(x)), (jnp.ones(1),))


def steps(two, _):
    def make(rate):
        return zs.function(lambda x: x * rate)

    for number in range(5):
        two.run(make(number / 2), (jnp.ones(1),))


def slim_objects(two, _):
    for number in range(5):
        two.run(Slim(number), (jnp.ones(1),))


NAMES = {
    objects: "Model",
    slim_objects: "Slim",
    steps: "steps.make.<lambda>",
    methods: "Model.scaled",
    closures: "closures.fn",
    cells: "cells.make.<lambda>",
    partials: "partials.<lambda>",
}
CHANGES = {
    objects: "object that is called was <Model at|is another one",
    slim_objects: "object that is called (was <Slim at|is another one)",
    compiled: "object that is called was <PjitFunction at|is another one|"
    "the default of 'model' of .* was <Model at",  # as the version of jax has it
    steps: "captured name 'rate' of .*lambda> was 1.5 and is 2.0",
    methods: "object that it .*is a method of,? (was <Model at|is another one)",
    changing: "global 'RATE' of .* was 1.5 and is 2.0",
    closures: "the default of 'rate' of .*fn was 1.5 and is 2.0",
    cells: "captured name 'rate' of .*lambda> was 1.5 and is 2.0",
    partials: r"args\[0\] of the partial was 1.5 and is 2.0",
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_fifth_is_told_with_its_name_its_line_and_what_changed(
    two, change, monkeypatch
):
    with pytest.warns(
        RetraceWarning, match=f"5th time.*{CHANGES[change]}.*args of run"
    ) as told:
        change(two, monkeypatch)
    (each,) = told
    assert str(each.message).split("'")[1] == NAMES.get(change, mock.ANY)
    (line,) = [
        change.__code__.co_firstlineno + number
        for number, text in enumerate(inspect.getsourcelines(change)[0])
        if "two.run" in text
    ]
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


def test_a_few_of_a_global_are_kept(two, monkeypatch):
    def run(rate):
        count = len(TRACES)
        monkeypatch.setattr(f"{__name__}.RATE", rate)
        assert two.run(helped, (jnp.ones(1),)).values[0][0] == rate
        return len(TRACES) > count

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RetraceWarning)
        assert all(run(float(rate)) for rate in range(20))
        assert not any(run(float(rate)) for rate in range(12, 20))
        assert run(0.0)


def made_by_global(two, number, monkeypatch):
    monkeypatch.setattr(f"{__name__}.BATCH", np.ones(number))
    assert two.run(of_batch, (jnp.ones(1),)).values[0][0] == number
    return weakref.ref(BATCH)


def made_by_partial(two, number, _):
    batch = np.ones(number)
    fn = functools.partial(lambda batch, x: x * batch.size, batch)
    assert two.run(fn, (jnp.ones(1),)).values[0][0] == number
    return weakref.ref(batch)


def made_by_method(two, number, _):
    model = Model(number)
    assert two.run(model.scaled, (jnp.ones(1),)).values[0][0] == number
    return weakref.ref(model)


def made_by_object(two, number, _):
    model = Model(number)
    assert two.run(model, (jnp.ones(1),)).values[0][0] == number
    return weakref.ref(model)


def made_by_partial_of_object(two, number, _):
    model = Model(number)
    assert two.run(functools.partial(model, jnp.ones(1))).values[0][0] == number
    return weakref.ref(model)


def made_by_compiled(two, number, _):
    fn = jax.jit(lambda x: x * number)
    assert two.run(fn, (jnp.ones(1),)).values[0][0] == number
    return weakref.ref(fn)


def made_by_step(two, number, _):
    fn = zs.function(lambda x: x * number)
    assert two.run(fn, (jnp.ones(1),)).values[0][0] == number
    return weakref.ref(fn)


def made_by_step_of_object(two, number, _):
    model = Model(number)
    assert two.run(zs.function(model), (jnp.ones(1),)).values[0][0] == number
    return weakref.ref(model)


MADE = [
    made_by_global,
    made_by_partial,
    made_by_method,
    made_by_object,
    made_by_partial_of_object,
    made_by_compiled,
    made_by_step,
    made_by_step_of_object,
]


@pytest.mark.parametrize("made", MADE)
def test_what_is_gone_does_not_stay(two, made, monkeypatch):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RetraceWarning)
        found = [made(two, number, monkeypatch) for number in range(1, 8)]
    monkeypatch.undo()
    gc.collect()
    assert sum(ref() is not None for ref in found) <= 2  # for the next ones
