"""Mapped functions on threads, and what their errors tell."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from zstrat.data import AUTOTUNE, Dataset
from zstrat.testing import leak_check


@pytest.mark.shows("tf.data.Dataset.map(num_parallel_calls=, deterministic=)")
def test_elements_are_made_together_and_come_in_order():
    together = threading.Barrier(3, timeout=100)

    def meet(x):
        together.wait()  # three calls at a time, or nobody comes through
        return x * 2

    dataset = Dataset.range(9).map(meet, num_parallel_calls=3)
    assert list(dataset) == list(range(0, 18, 2))


def test_what_is_ready_comes_first_if_the_order_does_not_count():
    others_are_out = threading.Event()

    def late(x):
        if x == 0:
            assert others_are_out.wait(100)
        return x

    dataset = Dataset.range(4).map(late, num_parallel_calls=2, deterministic=False)
    found = []
    for element in dataset:
        found.append(int(element))
        if len(found) == 3:
            others_are_out.set()
    assert sorted(found) == [0, 1, 2, 3]
    assert found[-1] == 0


def test_the_source_is_drawn_no_further_than_needed():
    drawn = []

    def generate():
        for i in range(100):
            drawn.append(i)
            yield i

    elements = iter(Dataset.from_generator(generate).map(abs, num_parallel_calls=2))
    assert next(elements) == 0
    assert len(drawn) <= 4
    elements.close()


@pytest.mark.parametrize("calls", [1, AUTOTUNE])
def test_threads_end_with_the_pass(calls):
    dataset = Dataset.range(50).map(np.negative, num_parallel_calls=calls)
    with leak_check():
        assert len(list(dataset)) == 50
        given_up = iter(dataset)
        next(given_up)
        given_up.close()
        left = iter(dataset.prefetch(2))
        next(left)
        del left


def test_the_context_of_the_reader_is_that_of_the_function():
    import contextvars

    name = contextvars.ContextVar("name", default="nobody")
    name.set("somebody")
    dataset = Dataset.range(4).map(lambda x: name.get(), num_parallel_calls=2)
    assert {str(x) for x in dataset} == {"somebody"}


def picky(x):
    doubled = x * 2
    if doubled == 4:
        raise KeyError("no such word")
    return doubled


@pytest.mark.parametrize("calls", [None, 3])
def test_an_error_names_the_line_and_the_element(calls):
    line = picky.__code__.co_firstlineno + 3
    elements = iter(Dataset.range(5).map(picky, num_parallel_calls=calls))
    assert [next(elements), next(elements)] == [0, 2]
    with pytest.raises(KeyError, match="no such word") as caught:
        next(elements)
    (note,) = caught.value.__notes__
    assert f"map(picky) at {__file__}:{line}, of element 2 of this pass" in note
    assert "np.int64(2)" in note


def test_errors_of_predicates_and_of_functions_in_c():
    pairs = Dataset.zip(Dataset.range(3), Dataset.range(3).map(lambda x: np.zeros(3)))
    with pytest.raises(ZeroDivisionError) as caught:
        list(pairs.filter(lambda x, _: 1 // int(x) > 0))
    (note,) = caught.value.__notes__
    assert "filter(<lambda>)" in note
    assert "element 0" in note
    assert "TensorSpec(shape=(3,), dtype=float64)" in note
    with pytest.raises(TypeError) as caught:
        list(Dataset.range(3).map(len))
    assert "map(len) at " in caught.value.__notes__[0]
