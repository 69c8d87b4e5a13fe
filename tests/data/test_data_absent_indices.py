"""Datasets of grain with random access count indices; some have no element.

The stand-in has the parts of grain's interface that are looked at, so that this runs
where grain is not installed, too.
"""

import sys
from types import SimpleNamespace

import numpy as np
import pytest

from zstrat.data import (
    INFINITE_CARDINALITY,
    UNKNOWN_CARDINALITY,
    InputContext,
    as_dataset,
)
from zstrat.strategy import ProcessInputs


class MapDataset:
    """Elements by index, None where there is none; passes leave those out."""

    def __init__(self, elements, length=None):
        self.elements, self.length = elements, length

    def __len__(self):
        return len(self.elements) if self.length is None else self.length

    def __getitem__(self, index):
        return self.elements[index]

    def __iter__(self):
        return (element for element in self.elements if element is not None)


class IterDataset:
    pass


def get_element_spec(dataset):
    raise NotImplementedError


@pytest.fixture
def stand_in(monkeypatch):
    made = SimpleNamespace(
        MapDataset=MapDataset,
        IterDataset=IterDataset,
        experimental=SimpleNamespace(get_element_spec=get_element_spec),
    )
    monkeypatch.setitem(sys.modules, "grain", made)


def size(dataset):
    return as_dataset(dataset).recipe.size()


@pytest.mark.usefixtures("stand_in")
def test_indices_are_not_counted_as_elements():
    assert size(MapDataset([np.zeros(1), None, np.ones(1)])) == UNKNOWN_CARDINALITY
    for length in (sys.maxsize, sys.maxsize // 1024):  # such a one in batches
        assert size(MapDataset([], length)) == INFINITE_CARDINALITY


def drawn(dataset):
    inputs = ProcessInputs(InputContext(1, 0, 1), all_max=list)
    steps = inputs.of_function(lambda context: dataset)
    return [np.asarray(element).tolist() for element in steps]


@pytest.mark.usefixtures("stand_in")
def test_workers_do_not_agree_on_steps_that_have_no_element():
    elements = [np.array([number]) if number % 2 == 0 else None for number in range(4)]
    assert drawn(MapDataset(elements)) == [[0], [2]]


def test_filters_of_grain():
    grain = pytest.importorskip("grain", reason="grain is not installed")
    rows = grain.MapDataset.source([np.array([number]) for number in range(4)])
    even = rows.filter(lambda x: x[0] % 2 == 0)
    assert drawn(even) == [[0], [2]]
    assert drawn(rows) == [[0], [1], [2], [3]]
    assert size(even) == size(even.map(lambda x: x)) == UNKNOWN_CARDINALITY
    assert size(even.repeat()) == INFINITE_CARDINALITY
    assert size(rows.repeat().batch(2)) == INFINITE_CARDINALITY
    assert size(rows.repeat()[:5]) == UNKNOWN_CARDINALITY
