"""Partitioners: the numbers and the errors of the reference."""

import math
import pickle

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zstrat.variables.partitioners import (
    FixedShardsPartitioner,
    MaxSizePartitioner,
    MinSizePartitioner,
    Partitioner,
)

F32 = np.dtype(np.float32)


# The numbers are those of TensorFlow's own documentation and tests.
@pytest.mark.shows("tf.distribute.experimental.partitioners.Partitioner")
@pytest.mark.shows("tf.distribute.experimental.partitioners.FixedShardsPartitioner")
@pytest.mark.shows("tf.distribute.experimental.partitioners.MaxSizePartitioner")
@pytest.mark.parametrize(
    ("partitioner", "shape", "dtype", "parts"),
    [
        (FixedShardsPartitioner(2), (10, 3), F32, [2, 1]),
        (FixedShardsPartitioner(num_shards=12), (10, 3), F32, [10, 1]),
        (MinSizePartitioner(2, max_shards=2), (6, 1), F32, [2, 1]),
        (MinSizePartitioner(2, max_shards=6), (6, 1), F32, [6, 1]),
        (MinSizePartitioner(4, max_shards=2), (6, 1), F32, [2, 1]),
        (MinSizePartitioner(4, max_shards=10), (6, 1), F32, [6, 1]),
        (MinSizePartitioner(8, max_shards=10), (6, 1), F32, [3, 1]),
        (MinSizePartitioner(), (10**6, 64), F32, [1, 1]),
        (MinSizePartitioner(256 << 10, 2), (10**6, 64), F32, [2, 1]),
        (MinSizePartitioner(max_shards=100), (65536 + 1,), F32, [2]),
        (MaxSizePartitioner(max_shard_bytes=4), (6, 1), F32, [6, 1]),
        (MaxSizePartitioner(4, max_shards=3), (6, 1), F32, [3, 1]),
        (MaxSizePartitioner(1024), (6, 1), F32, [1, 1]),
        (MaxSizePartitioner(1), (6, 100), F32, [6, 1]),
        (MaxSizePartitioner(9), (7,), F32, [4]),
    ],
)
def test_numbers_of_parts(partitioner, shape, dtype, parts):
    assert partitioner(shape, dtype) == parts
    assert partitioner(shape=shape, dtype="float32") == parts
    assert isinstance(partitioner, Partitioner)
    assert pickle.loads(pickle.dumps(partitioner)) == partitioner


def test_another_axis():
    fixed = FixedShardsPartitioner(2)
    assert fixed((10, 3, 8), F32, axis=2) == [1, 1, 2]
    assert fixed((10, 3, 8), F32, axis=-1) == [1, 1, 2]
    assert MaxSizePartitioner(160)((10, 8), F32, axis=1) == [1, 2]
    assert MinSizePartitioner(160, 8)((10, 8), F32, axis=1) == [1, 2]
    for partitioner in (fixed, MinSizePartitioner(), MaxSizePartitioner(4)):
        with pytest.raises(ValueError, match="Cannot partition variable along axis 2"):
            partitioner((3, 4), F32, axis=2)


@pytest.mark.parametrize("dtype", [str, "string", bytes, np.dtype("U5"), object])
def test_strings_count_as_the_user_says(dtype):
    assert MaxSizePartitioner(8, bytes_per_string=8)((6, 1), dtype) == [6, 1]
    assert MinSizePartitioner(48, 10)((6, 1), dtype) == [2, 1]


def test_small_floats_count_their_own_bytes():
    assert MaxSizePartitioner(4)((6, 1), jnp.bfloat16) == [3, 1]


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: FixedShardsPartitioner(0), "num_shards"),
        (lambda: MinSizePartitioner(0), "min_shard_bytes"),
        (lambda: MinSizePartitioner(max_shards=0), "max_shards"),
        (lambda: MinSizePartitioner(bytes_per_string=-1), "bytes_per_string"),
        (lambda: MaxSizePartitioner(0), "max_shard_bytes"),
        (lambda: MaxSizePartitioner(4, max_shards=0), "max_shards"),
        (lambda: MaxSizePartitioner(4, bytes_per_string=0), "bytes_per_string"),
    ],
)
def test_arguments_are_positive(make, name):
    with pytest.raises(ValueError, match=f"`{name}` must be positive"):
        make()


@pytest.mark.parametrize("shape", [(None, 3), (4, -1), (2.0,), ("x",)])
def test_a_shape_must_be_known(shape):
    with pytest.raises(ValueError, match="Shape is not fully defined"):
        FixedShardsPartitioner(2)(shape, F32)


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), (0,)])
def test_nothing_is_one_part_or_a_part_a_row(shape):
    assert MinSizePartitioner(1, 8)(shape, F32)[0] == 1
    assert MaxSizePartitioner(1)(shape, F32)[0] == 1
    assert FixedShardsPartitioner(2)(shape, F32)[0] == max(1, min(2, shape[0]))


@given(
    rows=st.integers(1, 10**7),
    width=st.integers(1, 1000),
    limit=st.integers(1, 10**9),
    shards=st.integers(1, 64),
)
def test_the_promise_of_the_names(rows, width, limit, shards):
    nbytes = rows * width * 4
    (least, _) = MinSizePartitioner(limit, shards)((rows, width), F32)
    assert 1 <= least <= min(rows, shards)
    assert least == 1 or nbytes / (least - 1) > limit
    (most, _) = MaxSizePartitioner(limit)((rows, width), F32)
    largest = math.ceil(rows / most)
    assert largest == 1 or largest * width * 4 <= limit
    assert MaxSizePartitioner(limit, shards)((rows, width), F32)[0] == min(most, shards)
