"""Iterators of TF's first version: how programs begin them, and how they end: with an
error, as of get_next(), for loops in Python that call steps; only ``for`` ends
quietly."""

import pytest

import zstrat as zs
from zstrat.data import Dataset
from zstrat.errors import OutOfRangeError


def stops(numbers):
    return lambda: next(numbers)


def runs_out(numbers):
    def make():
        for number in numbers:
            return number
        raise OutOfRangeError("no more")

    return make


@pytest.fixture
def strategy():
    return zs.OneDeviceStrategy("CPU:0")


@pytest.mark.parametrize("make", [stops, runs_out])
def test_a_function_that_has_no_more_ends_the_data(strategy, make):
    iterator = strategy.make_input_fn_iterator(lambda context: make(iter(range(3))))
    assert [int(element) for element in iterator] == [0, 1, 2]
    with pytest.raises(OutOfRangeError):
        iterator.get_next()


def test_another_error_of_the_function_is_no_end(strategy):
    def broken():
        raise KeyError("row 7")

    iterator = strategy.make_input_fn_iterator(lambda context: broken)
    with pytest.raises(KeyError, match="row 7"):
        next(iterator)


def test_an_iterator_needs_no_initializing_but_takes_it(strategy):
    dataset = Dataset.range(4).batch(2)
    of_dataset = strategy.make_dataset_iterator(dataset)
    of_function = strategy.make_input_fn_iterator(lambda context: dataset)
    for iterator in (of_dataset, of_function):
        assert iterator.initialize() == []
        assert [element.tolist() for element in iterator] == [[0, 1], [2, 3]]


def test_a_loop_over_steps_ends_with_an_error(strategy):
    dataset = Dataset.range(4).batch(2)
    for iterator in (
        strategy.make_dataset_iterator(dataset),
        strategy.make_input_fn_iterator(lambda _: dataset),
    ):
        for expected in ([1, 2], [3, 4]):
            found = strategy.experimental_run(lambda x: x + 1, iterator)
            assert found.tolist() == expected
        for _ in range(2):
            with pytest.raises(OutOfRangeError):
                strategy.experimental_run(lambda x: x, iterator)
    with pytest.raises(StopIteration):  # as Python's own iterators
        strategy.experimental_run(lambda x: x, iter([]))


def test_too_few_elements_for_several_steps(strategy):
    data = strategy.experimental_distribute_dataset(Dataset.range(4).batch(2))
    found = []
    run = strategy.extended.experimental_run_steps_on_iterator
    with pytest.raises(OutOfRangeError):
        run(lambda _, x: found.append(x.tolist()), iter(data), 3)
    assert found == [[0, 1], [2, 3]]
