"""Where the data of a step end: an error, as of get_next(), for loops in Python that
call steps; only ``for`` ends quietly."""

import pytest

import zstrat as zs
from zstrat.data import Dataset


@pytest.fixture
def strategy():
    return zs.OneDeviceStrategy("CPU:0")


def test_a_loop_of_the_first_version_ends_with_an_error(strategy):
    iterator = strategy.make_dataset_iterator(Dataset.range(4).batch(2))
    for expected in ([1, 2], [3, 4]):
        found = strategy.experimental_run(lambda x: x + 1, iterator)
        assert found.tolist() == expected
    for _ in range(2):
        with pytest.raises(zs.errors.OutOfRangeError):
            strategy.experimental_run(lambda x: x, iterator)


def test_so_does_one_over_an_input_function(strategy):
    iterator = strategy.make_input_fn_iterator(lambda _: Dataset.range(1))
    assert strategy.experimental_run(lambda x: x, iterator) == 0
    with pytest.raises(zs.errors.OutOfRangeError):
        strategy.experimental_run(lambda x: x, iterator)


def test_too_few_elements_for_several_steps(strategy):
    data = strategy.experimental_distribute_dataset(Dataset.range(4).batch(2))
    found = []
    run = strategy.extended.experimental_run_steps_on_iterator
    with pytest.raises(zs.errors.OutOfRangeError):
        run(lambda _, x: found.append(x.tolist()), iter(data), 3)
    assert found == [[0, 1], [2, 3]]


def test_an_iterator_of_python_ends_as_python_has_it(strategy):
    with pytest.raises(StopIteration):
        strategy.experimental_run(lambda x: x, iter([]))
