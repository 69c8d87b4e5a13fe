"""Datasets of grain, and of what has the shape of tf.data, under a strategy."""

from types import SimpleNamespace

import numpy as np
import pytest
from ranks import ranks

import zstrat as zs
from zstrat.data import Dataset, InputContext
from zstrat.strategy import ProcessInputs


@pytest.fixture
def grain():
    return pytest.importorskip("grain", reason="grain is not installed")


def inputs(local=2):
    return ProcessInputs(InputContext(1, 0, local), local)


def parts_of(element):
    return zs.get_strategy().experimental_local_results(element)


def here(grain):
    return grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)


def test_batches_of_grain_are_cut_for_the_replicas(grain):
    def element(i):
        return {"x": np.full(3, i, np.float32), "y": np.int32(i)}

    source = grain.MapDataset.range(10).shuffle(seed=3).map(element).batch(4)
    order = [int(y) for n in range(len(source)) for y in source[n]["y"]]
    assert sorted(order) == list(range(10))
    for dataset in (source, source.to_iter_dataset(here(grain))):
        found = [parts_of(element) for element in inputs().of_dataset(dataset)]
        sizes = [[len(part["y"]) for part in parts] for parts in found]
        assert sizes == [[2, 2], [2, 2], [1, 1]]
        rows = [int(y) for parts in found for part in parts for y in part["y"]]
        assert rows == order


def test_elements_of_grain_are_not_copied(grain):
    batches = [np.arange(4), np.arange(4, 8)]
    source = grain.MapDataset.source(batches).to_iter_dataset(here(grain))
    for element, batch in zip(inputs().of_dataset(source), batches, strict=True):
        assert all(np.shares_memory(part, batch) for part in element.values)


def test_tfrecords_are_shared_by_files(grain, tmp_path):
    record = b"\x03\0\0\0\0\0\0\0" + b"\0" * 4 + b"%d|\0" + b"\0" * 4
    for number in range(2):
        content = b"".join(record % (2 * number + n) for n in range(2))
        (tmp_path / f"{number}").write_bytes(content)
    paths = [tmp_path / "0", tmp_path / "1"]

    def program(strategy, rank):
        records = Dataset.from_tfrecords(paths).map(lambda r: np.int32(r[:1])).batch(4)
        found = strategy.experimental_distribute_dataset(records)
        return [x.tolist() for x in found]

    assert ranks(2, program) == [[[0, 1]], [[2, 3]]]


# tf.data


class StandIn:
    """The parts of tf.data.Dataset that are looked at."""

    def __init__(self, count):
        self.count = count
        x, y = SimpleNamespace(shape=(4,)), SimpleNamespace(shape=(4, 1))
        self.element_spec = {"x": x, "y": y}

    def as_numpy_iterator(self):
        for n in range(self.count):
            x = np.arange(4 * n, 4 * n + 4)
            yield {"x": x, "y": x[:, None]}

    def cardinality(self):
        return np.int64(self.count)

    def options(self):
        policy = SimpleNamespace(auto_shard_policy=0)
        return SimpleNamespace(experimental_distribute=policy)


def test_a_dataset_of_tensorflow_is_distributed():
    found = list(inputs(3).of_dataset(StandIn(2)))
    assert [[x.tolist() for x in e["x"].values] for e in found] == [
        [[0, 1], [2, 3], []],
        [[4, 5], [6, 7], []],
    ]
    assert [y.shape for y in found[0]["y"].values] == [(2, 1), (2, 1), (0, 1)]
