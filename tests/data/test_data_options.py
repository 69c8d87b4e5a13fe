"""Options of a dataset, hints, and what is known of a recipe without a pass."""

from __future__ import annotations

import numpy as np
import pytest

from zstrat.data import (
    SHARD_HINT,
    AutoShardPolicy,
    Dataset,
    DistributeOptions,
    Options,
    Worker,
    allotted,
    experimental,
)
from zstrat.data._lineage import shapes_of


def test_the_values_are_those_of_tensorflow():
    values = {policy.name: policy.value for policy in AutoShardPolicy}
    assert values == {"OFF": -1, "AUTO": 0, "FILE": 1, "DATA": 2, "HINT": 3}
    assert experimental.AutoShardPolicy is AutoShardPolicy
    assert experimental.DistributeOptions is DistributeOptions
    assert experimental.SHARD_HINT == SHARD_HINT == -1


@pytest.mark.shows("tf.data.experimental.DistributeOptions")
@pytest.mark.shows("tf.data.experimental.DistributeOptions.auto_shard_policy")
def test_a_user_sets_the_policy_as_in_tensorflow():
    options = Options()
    assert options.experimental_distribute.auto_shard_policy is AutoShardPolicy.AUTO
    options.experimental_distribute.auto_shard_policy = AutoShardPolicy.OFF
    dataset = Dataset.range(4).with_options(options).batch(2)
    options.auto_shard_policy = AutoShardPolicy.DATA  # too late for the dataset
    found = dataset.options()
    assert found.experimental_distribute.auto_shard_policy is AutoShardPolicy.OFF
    assert found == Options(AutoShardPolicy.OFF)
    assert found != Options()
    assert "OFF" in repr(found)
    assert [x.tolist() for x in dataset] == [[0, 1], [2, 3]]


def test_the_last_options_count_and_unset_ones_change_nothing():
    dataset = Dataset.range(4).with_options(Options(AutoShardPolicy.DATA))
    assert dataset.with_options(Options()).options().auto_shard_policy == 2
    newer = dataset.with_options(Options(AutoShardPolicy.FILE))
    assert newer.options().auto_shard_policy is AutoShardPolicy.FILE
    merged = Options(AutoShardPolicy.DATA).merge(Options())
    assert merged.auto_shard_policy is AutoShardPolicy.DATA


def test_what_is_no_policy_is_refused():
    options = Options()
    with pytest.raises(TypeError, match=r"OFF, AUTO, FILE, DATA, HINT.*'DATA'"):
        options.auto_shard_policy = "DATA"
    with pytest.raises(AttributeError):
        options.auto_sharding = AutoShardPolicy.OFF
    with pytest.raises(TypeError, match="`options`"):
        Dataset.range(1).with_options({"auto_shard_policy": 0})


# hints


def test_a_hint_is_filled_in_for_each_worker():
    dataset = Dataset.range(10).shard(SHARD_HINT, SHARD_HINT).batch(2)
    dataset = dataset.with_options(Options(AutoShardPolicy.HINT))
    for index, expected in enumerate([[0, 3, 6, 9], [1, 4, 7], [2, 5, 8]]):
        elements = allotted(dataset, Worker(3, index)).elements()
        assert np.concatenate(list(elements)).tolist() == expected
    alone = allotted(dataset, Worker()).elements()
    assert np.concatenate(list(alone)).tolist() == list(range(10))


def test_a_hint_is_for_a_strategy_alone():
    dataset = Dataset.range(4).shard(SHARD_HINT, SHARD_HINT).batch(2)
    assert dataset.cardinality() == 2
    with pytest.raises(RuntimeError, match="HINT"):
        next(iter(dataset))
    with pytest.raises(ValueError, match="num_shards"):
        Dataset.range(4).shard(SHARD_HINT, 0)


def test_the_policy_needs_a_hint_where_there_are_workers():
    dataset = Dataset.range(4).batch(2).with_options(Options(AutoShardPolicy.HINT))
    assert len(list(allotted(dataset, Worker()).elements())) == 2
    with pytest.raises(ValueError, match=r"AutoShardPolicy\.HINT"):
        allotted(dataset, Worker(2, 0))


# what is known without a pass


def never():
    raise AssertionError("the dataset was passed over")
    yield


ROWS = np.zeros((5, 3))
NUMBERS = Dataset.range(12)


@pytest.mark.parametrize(
    ("dataset", "size", "ranks"),
    [
        (NUMBERS.batch(4), 4, (1,)),
        (NUMBERS.batch(4).repeat().shuffle(3).take(9).prefetch(2), 4, (1,)),
        (NUMBERS.batch(4).batch(3), 3, (2,)),
        (NUMBERS.batch(2).enumerate(), None, (0, 1)),
        (NUMBERS.batch(4).map(lambda x: x), None, None),
        (NUMBERS, None, (0,)),
        (NUMBERS.padded_batch(4), 4, (1,)),
        (NUMBERS.batch(2).rebatch(4), None, (1,)),
        (NUMBERS.batch(2).rebatch(4, drop_remainder=True), 4, (1,)),
        (NUMBERS.batch(2).rebatch([4, 2]), None, (1,)),
        (Dataset.zip(NUMBERS.batch(4), NUMBERS.batch(4)), 4, (1, 1)),
        (Dataset.zip(NUMBERS.batch(4), NUMBERS.batch(3)), None, (1, 1)),
        (NUMBERS.batch(4).cache().concatenate(NUMBERS.batch(4)), 4, (1,)),
        (Dataset.from_generator(never).batch(4), 4, None),
        (Dataset.from_generator(never), None, None),
        (Dataset.from_tensor_slices(np.zeros((5, 3, 2))), 3, (2,)),
        (Dataset.from_tensor_slices((ROWS, ROWS[:, :2])), None, (1, 1)),
        (Dataset.from_tensor_slices({"a": ROWS, "b": np.zeros(5)}), None, (1, 0)),
        (Dataset.from_tensor_slices(np.zeros(5)), None, (0,)),
    ],
)
def test_batch_sizes_and_ranks(dataset, size, ranks):
    found = shapes_of(dataset.recipe)
    assert (found.batch_size, found.ranks) == (size, ranks)


@pytest.mark.parametrize(
    "dataset",
    [
        NUMBERS,
        Dataset.zip(NUMBERS, NUMBERS),
        NUMBERS.concatenate(NUMBERS),
        NUMBERS.batch(2).unbatch(),
        NUMBERS.cache(),
    ],
)
def test_what_is_not_batched_is_refused_before_it_is_read(dataset):
    with pytest.raises(ValueError, match="`batch`"):
        allotted(dataset, Worker(replicas=2))
    assert len(list(allotted(dataset.take(2), Worker()).elements())) == 2
