"""Datasets of others: grain's, one of tf.data's shape, lists, and what is none."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest

from zstrat.data import (
    INFINITE_CARDINALITY,
    UNKNOWN_CARDINALITY,
    AutoShardPolicy,
    Worker,
    allotted,
    as_dataset,
)


@dataclass
class Spec:
    shape: tuple
    dtype: str = "float32"


class Unranked:
    @property
    def shape(self):
        return self

    def __iter__(self):
        raise ValueError("Cannot iterate over a shape with unknown rank.")


class TheirPolicy(enum.IntEnum):
    """TensorFlow's own class, with its values."""

    AUTO = 0
    OFF = -1


class StandIn:
    """The parts of tf.data.Dataset that are looked at."""

    def __init__(self, batches, spec, cardinality=-2, policy=TheirPolicy.AUTO):
        self.batches, self.element_spec = batches, spec
        self._cardinality, self._policy = cardinality, policy

    def as_numpy_iterator(self):
        return iter(self.batches)

    def cardinality(self):
        return np.int64(self._cardinality)

    def options(self):
        policy = SimpleNamespace(auto_shard_policy=self._policy)
        return SimpleNamespace(experimental_distribute=policy)


# tf.data


def test_a_dataset_of_tensorflow_is_told_by_its_shape():
    batches = [(np.zeros((4, 2)), np.zeros(4)), (np.ones((4, 2)), np.ones(4))]
    recipe = as_dataset(StandIn(batches, (Spec((4, 2)), Spec((4,))), 2)).recipe
    assert recipe.batch_size == 4
    assert recipe.ranks == (2, 1)
    assert recipe.size() == 2
    assert recipe.is_steady
    for _ in range(2):
        assert list(recipe.elements()) == batches


@pytest.mark.parametrize(
    ("spec", "size", "ranks"),
    [
        ({"x": Spec((None, 3))}, None, (2,)),
        ({"x": Spec((4, 3)), "y": Spec((2,))}, None, (2, 1)),
        ({"x": Spec(())}, None, (0,)),
        ({"x": Spec((4,)), "y": Unranked()}, None, None),
    ],
)
def test_what_its_spec_says(spec, size, ranks):
    recipe = as_dataset(StandIn([], spec)).recipe
    assert (recipe.batch_size, recipe.ranks) == (size, ranks)


def test_its_policy_counts():
    off = StandIn([np.zeros(4)], Spec((4,)), policy=TheirPolicy.OFF)
    assert allotted(off, Worker(2, 1)).policy is AutoShardPolicy.OFF
    auto = StandIn([np.zeros(4)], Spec((4,)))
    assert allotted(auto, Worker(2, 1)).policy is AutoShardPolicy.DATA


def test_scalars_of_it_are_refused_before_they_are_read():
    with pytest.raises(ValueError, match="`batch`"):
        allotted(StandIn([], Spec(())), Worker(replicas=2))


# grain


@pytest.fixture
def grain():
    return pytest.importorskip("grain", reason="grain is not installed")


def test_a_dataset_of_grain_says_what_it_knows(grain):
    numbers = grain.MapDataset.range(12).map(lambda i: {"x": np.float32(i)})
    recipe = as_dataset(numbers.batch(4)).recipe
    assert (recipe.batch_size, recipe.ranks) == (None, None)  # a map does not say
    assert recipe.size() == UNKNOWN_CARDINALITY
    here = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    passed = as_dataset(numbers.batch(4).to_iter_dataset(here)).recipe
    found = [x for batch in passed.elements() for x in batch["x"]]
    assert found == list(range(12))
    assert passed.size() == UNKNOWN_CARDINALITY


def test_batch_sizes_that_grain_knows(grain):
    numbers = grain.MapDataset.range(12)
    whole = as_dataset(numbers.batch(4, drop_remainder=True)).recipe
    assert (whole.batch_size, whole.ranks) == (4, (1,))
    assert as_dataset(numbers.batch(4)).recipe.batch_size is None
    assert as_dataset(numbers.repeat()).recipe.size() == INFINITE_CARDINALITY
    with pytest.raises(ValueError, match="`batch`"):
        allotted(numbers, Worker(replicas=2))


def test_threads_of_grain_end_with_the_pass(grain):
    elements = as_dataset(grain.MapDataset.range(100).batch(2)).recipe.elements()
    assert next(elements).tolist() == [0, 1]
    elements.close()  # the fixture of all tests looks for what is left


# others


def test_arrays_are_data_themselves():
    x, y = np.arange(6.0).reshape(3, 2), np.arange(3)
    for data in ((x, y), {"x": x, "y": y}):
        dataset = as_dataset(data)
        assert len(dataset) == 3
    assert [a.tolist() for a in as_dataset(x)] == x.tolist()
    dataset = as_dataset(x)
    assert as_dataset(dataset) is dataset


def test_a_generator_is_passed_over_as_it_is():
    ended = []

    def batches():
        try:
            yield np.zeros(2)
            yield np.ones(2)
        finally:
            ended.append(True)

    recipe = as_dataset(batches()).recipe
    assert not recipe.is_steady
    elements = recipe.elements()
    next(elements)
    elements.close()
    assert ended == [True]


@pytest.mark.parametrize("what", [3, None, object()])
def test_what_is_no_dataset_is_refused(what):
    with pytest.raises(TypeError, match=r"zs\.data\.Dataset"):
        as_dataset(what)
