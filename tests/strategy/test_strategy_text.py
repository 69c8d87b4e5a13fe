"""Leaves of elements that no device knows stay on the host; the others do not."""

import jax
import numpy as np
import pytest

import zstrat as zs
from zstrat.data import Dataset

ONE = [
    lambda: zs.OneDeviceStrategy("CPU:0"),
    lambda: zs.MirroredStrategy(["CPU:0"]),
]


@pytest.fixture(params=ONE, ids=["one device", "mirrored"])
def alone(request):
    return request.param()


@pytest.mark.parametrize("dtype", ["U3", "S3", "O", "M8[D]", "m8[s]"])
def test_what_a_device_does_not_know_stays_on_the_host(alone, dtype):
    told = {"U3": ["abc", "d"], "S3": [b"abc", b"d"], "O": ["abc", None]}
    ids = np.array(told.get(dtype, [3, 5]), dtype)
    batch = {"id": ids, "x": np.array([1.0, 2.0], np.float32)}
    distributed = alone.experimental_distribute_dataset([batch, batch])
    for element in distributed:
        assert isinstance(element["id"], np.ndarray)
        assert element["id"].dtype == dtype
        np.testing.assert_array_equal(element["id"], ids)
        assert isinstance(element["x"], jax.Array)
        total = alone.run(lambda x: x.sum(), args=(element["x"],))
        assert float(total) == 3.0


def test_lines_of_text_are_elements(alone, tmp_path):
    path = tmp_path / "lines"
    path.write_text("one\ntwo\nthree\n")
    dataset = Dataset.from_text_lines([path]).batch(2)
    found = [
        [line.decode() if isinstance(line, bytes) else str(line) for line in element]
        for element in alone.experimental_distribute_dataset(dataset)
    ]
    assert found == [["one", "two"], ["three"]]


def test_an_element_of_text_is_described(alone):
    batch = {"id": np.array(["a", "b"]), "x": np.ones((2, 3), np.float32)}
    spec = alone.experimental_distribute_dataset([batch]).element_spec
    assert (spec["id"].shape, spec["x"].shape) == ((2,), (2, 3))
    assert spec["x"].dtype == np.float32


def test_keys_go_to_the_device(alone):
    keys = jax.random.split(jax.random.key(3), 2)
    (found,) = alone.experimental_distribute_dataset([{"key": keys}])
    assert isinstance(found["key"], jax.Array)
    want = jax.random.key_data(keys)
    np.testing.assert_array_equal(jax.random.key_data(found["key"]), want)


def test_numbers_of_every_kind_go_to_the_device(alone):
    batch = [
        np.ones(2, bool),
        np.ones(2, np.int8),
        np.ones(2, jax.numpy.bfloat16),
        np.ones(2, np.complex64),
    ]
    (found,) = alone.experimental_distribute_dataset([batch])
    assert all(isinstance(leaf, jax.Array) for leaf in found)
    assert [leaf.dtype for leaf in found] == [leaf.dtype for leaf in batch]
