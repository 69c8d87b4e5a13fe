"""Distributed datasets of one process, as tests look at them."""

import numpy as np

import zstrat as zs
from zstrat.data import InputContext
from zstrat.strategy import ProcessInputs


def inputs(local=2, workers=1, index=0, **more):
    return ProcessInputs(InputContext(workers, index, workers * local), local, **more)


def parts_of(element):
    """The element of each replica."""
    return zs.get_strategy().experimental_local_results(element)


def values(element):
    """The rows of each replica, as lists."""
    return [np.asarray(part).tolist() for part in parts_of(element)]


def drawn(dataset):
    return [values(element) for element in dataset]
