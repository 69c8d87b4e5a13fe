"""Methods as step functions: each instance has its own."""

from __future__ import annotations

import copy

import numpy as np
import pytest

import zstrat.program as zs
from zstrat.variables import Variable


def test_methods_are_step_functions_of_their_instance(storage):
    class Model:
        def __init__(self, scale):
            self.scale = scale
            self.v = storage.variable(np.float32(scale))

        @zs.function
        def step(self, x):
            return self.v.value() * x

    two, three = Model(2), Model(3)
    assert (float(two.step(np.float32(5))), float(three.step(np.float32(5)))) == (
        10,
        15,
    )
    assert two.step is two.step
    assert two.step.trace_count == 1


def test_a_method_under_another_name_is_still_one_function(storage):
    def body(self, x):
        return x + self.offset

    class Model:
        offset = 1
        renamed = zs.function(body)

    model = Model()
    assert model.renamed(np.float32(1)) == 2.0
    assert model.renamed is model.renamed


def test_a_subclass_calls_the_step_of_its_parent():
    class Parent:
        @zs.function
        def step(self):
            return self.offset

    class Child(Parent):
        offset = 3

        @zs.function
        def step(self):
            return 10 + super().step()

    child = Child()
    assert [child.step() for _ in range(3)] == [13, 13, 13]
    assert child.step.trace_count == 1
    assert super(Child, child).step is super(Child, child).step


@pytest.mark.parametrize(
    "copied",
    [copy.copy, copy.deepcopy, lambda m: zs.load(*zs.dump(m))],
    ids=["copy", "deepcopy", "pickle"],
)
def test_a_copy_of_an_object_runs_its_own_steps(copied):
    class Model:
        def __init__(self, k):
            self.k = k

        @zs.function
        def step(self):
            return self.k

    first = Model(1)
    assert first.step() == 1
    second = copied(first)
    second.k = 2
    for _ in range(2):
        assert (second.step(), first.step()) == (2, 1)
    assert (second.step.trace_count, first.step.trace_count) == (1, 1)


def test_two_names_of_a_method_are_one_function():
    class Model:
        @zs.function
        def step(self):
            return 1

        other = step

    model = Model()
    assert model.other is model.step is model.other
    model.other()
    model.other()
    assert model.step.trace_count == 1


def test_an_object_may_have_a_step_of_its_own():
    class Model:
        @zs.function
        def step(self):
            return 1

    model = Model()
    model.step()
    model.step = zs.function(lambda: 2)
    assert model.step() == 2


def test_methods_that_have_no_place_are_refused():
    class Slotted:
        __slots__ = ("k",)

        @zs.function
        def step(self):
            return self.k

    class Model:
        step = zs.function(lambda cls: 1)

    with pytest.raises(TypeError, match=r"Slotted.*__slots__.*'__dict__'"):
        Slotted().step  # noqa: B018
    # What @classmethod above @zs.function does in Python 3.11.
    with pytest.raises(TypeError, match="@staticmethod"):
        vars(Model)["step"].__get__(Model)


def test_attributes_of_a_callable_object_stay_its_own():
    class Doubled:
        def __init__(self):
            self.name, self.eager, self.body = None, True, lambda x: -x

        def __call__(self, x):
            return 2 * x

    step = zs.function(Doubled())
    assert (step(np.float32(3)), step.eager) == (6.0, False)
    assert step.name.endswith("Doubled")


class Late:
    """Makes its variable when a step is called for the first time."""

    def __init__(self):
        self.v = None

    @zs.function
    def step(self, x):
        if self.v is None:
            self.v = Variable(0.0 * x)
        return self.v.assign_add(x)

    @zs.function
    def always(self):
        return Variable(1.0).value()


def test_a_step_may_create_variables_on_its_first_call():
    late = Late()
    assert [float(late.step(np.float32(n))) for n in (1, 2, 3)] == [1, 3, 6]
    assert late.step.trace_count == 1
    with pytest.raises(ValueError, match="at its first call"):
        Late().step.plan((np.float32(1),))
    assert float(late.always()) == 1
    with pytest.raises(ValueError, match="at its first call"):
        late.always()
