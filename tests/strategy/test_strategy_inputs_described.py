"""A source that can be read once is described without being read."""

import numpy as np
import pytest

import zstrat as zs
from zstrat.data import Dataset, InputContext
from zstrat.errors import OutOfRangeError
from zstrat.strategy import ProcessInputs


def inputs(replicas=1):
    return ProcessInputs(InputContext(1, 0, replicas), replicas)


def once(count):
    return (np.full(2, number) for number in range(count))


def firsts(elements):
    return [int(element[0]) for element in elements]


@pytest.mark.parametrize("drawn", [0, 1, 2, 6])
def test_of_a_generator_no_element_is_lost(drawn):
    distributed = zs.OneDeviceStrategy("CPU:0").experimental_distribute_dataset(once(6))
    iterator = iter(distributed)
    found = firsts(next(iterator) for _ in range(drawn))
    assert distributed.element_spec.shape == (2,)
    assert found + firsts(iterator) == [0, 1, 2, 3, 4, 5]
    assert distributed.element_spec.shape == (2,)


def test_described_before_and_after_it_is_the_same():
    distributed = inputs().of_dataset(once(3))
    assert distributed.element_spec.shape == (2,)
    assert firsts(distributed) == [0, 1, 2]
    assert distributed.element_spec.shape == (2,)


def test_a_function_is_not_read_again_for_it():
    distributed = inputs().of_function(lambda context: once(4))
    iterator = iter(distributed)
    assert firsts([next(iterator)]) == [0]
    assert distributed.element_spec.shape == (2,)
    assert firsts(iterator) == [1, 2, 3]


def test_a_pass_that_nobody_holds_has_described_it():
    passes = []

    def batches():
        passes.append(True)
        yield from once(3)

    distributed = inputs().of_dataset(Dataset.from_generator(batches))
    iterator = iter(distributed)
    next(iterator)
    iterator.close()
    del iterator
    assert distributed.element_spec.shape == (2,)
    assert len(passes) == 1


def test_after_a_pass_that_was_closed_unread_a_fresh_one_tells():
    begun = []

    def batches():
        begun.append(True)
        if len(begun) > 1:
            yield from once(3)

    distributed = inputs().of_dataset(Dataset.from_generator(batches))
    empty = iter(distributed)
    with pytest.raises(OutOfRangeError):
        distributed.element_spec  # noqa: B018 - that pass is under way
    empty.close()
    assert distributed.element_spec.shape == (2,)
    assert firsts(distributed) == [0, 1, 2]
    assert len(begun) == 2
