"""Datasets whose elements have None in a place: it is structure, wherever the rows of
a step come from, and no value that replicas have each for themselves."""

import numpy as np
import pytest

import zstrat as zs
from zstrat.data import Dataset
from zstrat.experimental import CentralStorageStrategy

DEVICES = ["CPU:0", "CPU:1"]


@pytest.fixture(params=["mirrored", "central"])
def two(request):
    if request.param == "mirrored":
        return zs.MirroredStrategy(DEVICES)
    return CentralStorageStrategy(DEVICES)


def batches(count, size):
    """The numbers below ``count`` in batches, each beside a None."""
    rows = Dataset.from_generator(lambda: ((np.float32(i), None) for i in range(count)))
    return rows.batch(size)


def parts(strategy, element):
    x, absent = element
    assert absent is None
    values = strategy.experimental_local_results(x)
    return [np.asarray(value).tolist() for value in values]


def absence(x, absent):
    assert absent is None
    return x.sum()


@pytest.mark.parametrize(
    ("count", "size", "expected"),
    [
        (8, 4, [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]),
        (5, 4, [[[0, 1], [2, 3]], [[4], []]]),
        (3, 3, [[[0, 1], [2]]]),
        (1, 4, [[[0], []]]),
    ],
)
def test_an_absent_component_stays_absent(two, count, size, expected):
    distributed = two.experimental_distribute_dataset(batches(count, size))
    assert [parts(two, element) for element in distributed] == expected
    sums = [two.run(absence, args=element) for element in distributed]
    found = [[float(x) for x in two.experimental_local_results(s)] for s in sums]
    assert found == [[sum(part) for part in step] for step in expected]


def test_elements_of_a_function_may_lack_one(two):
    def dataset_fn(context):
        return [{"x": np.full(2, i, np.float32), "y": None} for i in range(3)]

    found = list(two.distribute_datasets_from_function(dataset_fn))
    assert [element["y"] for element in found] == [None, None]
    values = [two.experimental_local_results(element["x"]) for element in found]
    assert [[np.asarray(v).tolist() for v in step] for step in values] == [
        [[0, 0], [1, 1]],
        [[2, 2], []],
    ]


@pytest.mark.parametrize("count", [8, 3])
def test_its_description_lacks_it_too(two, count):
    distributed = two.experimental_distribute_dataset(batches(count, count))
    described, absent = distributed.element_spec
    assert absent is None
    assert [each.shape for each in described.values] == (
        [(4,), (4,)] if count == 8 else [(2,), (1,)]
    )


def test_replicas_need_the_same_components(two):
    elements = [(np.ones(2), None), (np.ones(2), np.ones(2))]
    distributed = two.distribute_datasets_from_function(lambda context: elements)
    with pytest.raises(ValueError, match="tree_map"):
        next(iter(distributed))
