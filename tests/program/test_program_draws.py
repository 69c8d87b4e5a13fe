"""Draws of elements by steps: none is lost, and none is drawn twice."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zstrat.program as zs
from zstrat.errors import OutOfRangeError


def test_draws(storage):
    v = storage.variable(np.float32(0))

    @zs.function
    def step(it, other):
        a, b, c = next(it), next(other), next(it)
        v.assign_add(a["x"] + b + c["x"])
        return a["x"], b, c["x"]

    it = zs.StepIterator({"x": np.float32(n)} for n in range(5))
    other = zs.StepIterator(iter(range(100, 105)))
    with jax.numpy_dtype_promotion("standard"):
        assert [float(x) for x in step(it, other)] == [0, 100, 1]
        plan = step.plan((it, other))
        assert plan.draws == (0, 1, 0)
        assert [float(x) for x in step(it, other)] == [2, 101, 3]
        for _ in range(2):
            # The second draw fails: the first element and the other's go back.
            with pytest.raises(OutOfRangeError):
                step(it, other)
    assert next(it)["x"] == 4
    assert next(other) == 102


def test_the_same_iterator_twice_is_one_iterator():
    @zs.function
    def step(a, b):
        return next(a), next(b)

    def numbers():
        return zs.StepIterator(iter(np.arange(10, dtype=np.float32)))

    it = numbers()
    assert [float(x) for x in step(it, it)] == [0, 1]
    assert [float(x) for x in step(it, numbers())] == [2, 0]
    assert step.trace_count == 2


def test_elements_of_another_shape_get_a_new_plan_and_none_is_lost():
    @zs.function
    def step(it):
        return jnp.sum(next(it))

    batches = [np.ones(4, np.float32), np.ones(4, np.float32), np.ones(3, np.float32)]
    it = zs.StepIterator(iter(batches))
    assert [float(step(it)) for _ in batches] == [4, 4, 3]
    assert step.trace_count == 2


def test_prepared_steps_give_their_elements_back_in_order():
    @zs.function
    def step(it):
        return next(it)

    it = zs.StepIterator(iter(np.arange(5, dtype=np.float32)))
    first, second, third = (zs.prepare(step, (it,), {}) for _ in range(3))
    assert first.run([]).leaves[0] == 0
    third.unread()
    second.unread()
    assert [float(step(it)) for _ in range(4)] == [1, 2, 3, 4]


@pytest.mark.parametrize("foreign", [False, True])
def test_a_source_that_fills_one_buffer(foreign):
    class Foreign:
        """An array of another library, over the same memory."""

        def __init__(self, array):
            self.array = array

        def __array__(self, dtype=None, copy=None):
            return self.array

    @zs.function
    def step(it):
        return next(it)["x"], next(it)["x"]

    def source():
        buffer = np.zeros(2, np.float32)
        for n in range(6):
            buffer[:] = n
            yield {"x": Foreign(buffer) if foreign else buffer}

    it = zs.StepIterator(source())
    first, second = (zs.prepare(step, (it,), {}) for _ in range(2))
    second.unread()
    drawn = [*first.run([]).leaves, *step(it), next(it)["x"], next(it)["x"]]
    assert [x.tolist() for x in drawn] == [[n, n] for n in range(6)]


def test_planning_draws_nothing_for_good():
    seen = []

    def source():
        for n in range(3):
            seen.append(n)
            yield np.float32(n)

    @zs.function
    def step(it):
        return next(it), next(it)

    it = zs.StepIterator(source())
    step.plan((it,))
    assert [float(x) for x in step(it)] == [0, 1]


def test_an_abstract_iterator_plans_without_elements():
    spec = {"x": jax.ShapeDtypeStruct((4, 2), np.float32)}

    @zs.function
    def step(it):
        return jnp.sum(next(it)["x"], axis=0)

    plan = step.plan((zs.StepIterator(None, spec),))
    assert plan.out_specs[0].shape == (2,)
    assert plan.layout.structure == 0
    step.plan((zs.StepIterator(None, spec),))
    assert step.trace_count == 1


def test_no_element_is_lost_when_another_one_is_refused():
    good = zs.StepIterator(iter([np.float32(1), np.float32(2)]))
    mixed = zs.StepIterator(iter([np.float32(5), "a text", np.float32(7)]))
    step = zs.function(lambda a, b: next(a) + next(b))
    assert step(good, mixed) == 6.0
    for _ in range(2):  # of a known program, then of one that is traced
        with pytest.raises(TypeError, match="contains text"):
            step(good, mixed)
        step = zs.function(lambda a, b: next(a) + next(b))
    assert next(mixed) == "a text"
    assert step(good, mixed) == 9.0
