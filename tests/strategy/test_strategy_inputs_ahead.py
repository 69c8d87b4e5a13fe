"""Distributed datasets of one process: what is read ahead, on which thread, and what
is known of an element before it is drawn."""

import threading

import jax
import numpy as np
import pytest
from process_inputs import drawn, inputs, values

import zstrat as zs
from zstrat.data import Dataset
from zstrat.errors import ClosedError, OutOfRangeError


class Counted:
    """Batches, and who made how many; `wait` returns when so many were made."""

    def __init__(self, count):
        self.count, self.made, self.threads = count, 0, set()
        self.changed = threading.Condition()

    def __call__(self):
        for number in range(self.count):
            with self.changed:
                self.made += 1
                self.threads.add(threading.current_thread().name)
                self.changed.notify_all()
            yield np.full(2, number)

    def wait(self, made):
        with self.changed:
            assert self.changed.wait_for(lambda: self.made >= made, 30.0)


@pytest.mark.parametrize("ahead", [1, 3])
def test_elements_are_made_ahead_on_a_thread_and_no_more_than_asked_for(ahead):
    source = Counted(100)
    options = zs.InputOptions(experimental_per_replica_buffer_size=ahead)
    distributed = inputs().of_dataset(Dataset.from_generator(source), options)
    iterator = iter(distributed)
    source.wait(ahead + 1)  # what is buffered, and the one that has no room
    assert values(next(iterator)) == [[0], [0]]
    source.wait(ahead + 2)
    iterator.close()
    assert source.made == ahead + 2
    assert source.threads == {"zstrat prefetch"}
    with pytest.raises(ClosedError):
        next(iterator)


def test_an_iterator_that_nobody_holds_ends_its_thread():
    source = Counted(100)
    iterator = iter(inputs().of_dataset(Dataset.from_generator(source)))
    next(iterator)
    del iterator  # the fixture of all tests looks for the thread


def test_an_error_of_the_source_comes_to_who_draws():
    def broken():
        yield np.arange(2)
        raise KeyError("row 7")

    iterator = iter(inputs().of_dataset(Dataset.from_generator(broken)))
    next(iterator)
    for _ in range(2):
        with pytest.raises(KeyError, match="row 7"):
            next(iterator)


def test_a_generator_may_fill_its_buffer_again():
    def batches():
        buffer = np.zeros(2)
        for number in range(5):
            buffer[:] = number
            yield {"x": [buffer]}

    options = zs.InputOptions(experimental_per_replica_buffer_size=9)
    found = list(inputs().of_dataset(batches(), options))
    assert [[p.tolist() for p in each["x"][0].values] for each in found] == [
        [[n], [n]] for n in range(5)
    ]


def spec(shape, dtype):
    return jax.ShapeDtypeStruct(shape, dtype)


@pytest.mark.shows("DistributedDataset.element_spec")
def test_the_element_spec_has_a_part_for_each_replica():
    data = {"x": np.zeros((6, 3), np.float32), "y": np.zeros(6, np.int64)}
    distributed = inputs().of_dataset(Dataset.from_tensor_slices(data).batch(4))
    found = distributed.element_spec
    assert found["x"].values == (spec((2, 3), np.float32),) * 2
    assert found["y"].values == (spec((2,), np.int64),) * 2
    iterator = iter(distributed)
    assert iterator.element_spec["x"].values == found["x"].values
    assert len(list(iterator)) == 2
    assert distributed.element_spec["y"].values == found["y"].values


def test_of_one_replica_it_is_that_of_the_element():
    distributed = inputs(1).of_dataset([(np.zeros((2, 3), np.int8), np.float32(1))])
    assert distributed.element_spec == (spec((2, 3), np.int8), spec((), np.float32))


def test_asking_for_it_makes_no_pass_of_its_own():
    passes = []

    def batches():
        passes.append(True)
        yield from [np.arange(2), np.arange(2, 4)]

    distributed = inputs().of_dataset(Dataset.from_generator(batches))
    assert distributed.element_spec.values == (spec((1,), np.int64),) * 2
    assert distributed.element_spec.values == (spec((1,), np.int64),) * 2
    assert drawn(distributed) == [[[0], [1]], [[2], [3]]]
    assert len(passes) == 1
    assert drawn(distributed) == [[[0], [1]], [[2], [3]]]
    assert len(passes) == 2


def test_without_elements_there_is_no_spec():
    distributed = inputs().of_dataset(Dataset.range(0).batch(2))
    with pytest.raises(OutOfRangeError):
        distributed.element_spec  # noqa: B018
    assert list(distributed) == []
