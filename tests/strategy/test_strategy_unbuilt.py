"""What a parameter-server strategy refuses to distribute before a worker sees it."""

import numpy as np
import pytest

import zstrat as zs
from zstrat.data import Dataset


@pytest.fixture
def strategy(make_cluster):
    return make_cluster(devices=2).strategy


def test_what_is_no_options_is_refused(strategy):
    for distribute, source in (
        (strategy.experimental_distribute_dataset, [np.ones(2)]),
        (strategy.distribute_datasets_from_function, lambda context: []),
    ):
        with pytest.raises(TypeError, match=r"zs\.InputOptions"):
            distribute(source, {"prefetch": 2})
        distribute(source, zs.InputOptions())


def test_what_is_no_function_is_refused(strategy):
    for source in (3, Dataset.range(4).batch(2)):
        with pytest.raises(TypeError, match="InputContext"):
            strategy.distribute_datasets_from_function(source)


def test_what_is_no_dataset_is_refused(strategy):
    for source in (3, lambda context: []):
        with pytest.raises(TypeError, match=r"zs\.data\.Dataset"):
            strategy.experimental_distribute_dataset(source)


def test_what_is_distributed_is_not_distributed_again(strategy):
    dataset = Dataset.range(4).batch(2)
    other = zs.OneDeviceStrategy("CPU:0").experimental_distribute_dataset(dataset)
    for source in (other, strategy.experimental_distribute_dataset(dataset)):
        with pytest.raises(TypeError, match="distributed already"):
            strategy.experimental_distribute_dataset(source)


def test_a_generator_is_not_read(strategy):
    elements = iter([np.ones(2)])
    strategy.experimental_distribute_dataset(elements)
    assert len(list(elements)) == 1
