"""Passes over distributed datasets begin where they are asked for."""

import threading

import numpy as np

from zstrat.data import Dataset, InputContext, Recipe
from zstrat.strategy import ProcessInputs


class Watched(Recipe):
    """Says in which thread its passes begin, and where their elements are made."""

    def __init__(self):
        self.begins, self.makes = [], []

    def begun(self):
        self.begins.append(threading.current_thread())
        return self

    def items(self):
        self.makes.append(threading.current_thread())
        yield np.arange(4)

    def size(self):
        return 1


def check(distribute, watched):
    distributed = distribute(Dataset(watched))
    assert watched.begins == []
    passes = [iter(distributed), iter(distributed)]
    assert watched.begins == [threading.current_thread()] * 2
    assert [len(list(each)) for each in passes] == [1, 1]
    assert len(watched.begins) == len(watched.makes) == 2
    # The elements are made in advance all the same.
    assert threading.current_thread() not in watched.makes


def inputs(replicas, **more):
    return ProcessInputs(InputContext(num_replicas_in_sync=replicas), replicas, **more)


def test_passes_begin_in_the_thread_that_calls_iter():
    for replicas in (1, 2):
        check(inputs(replicas).of_dataset, Watched())


def test_passes_of_dataset_functions_begin_there_too():
    check(lambda d: inputs(1).of_function(lambda context: d), Watched())
