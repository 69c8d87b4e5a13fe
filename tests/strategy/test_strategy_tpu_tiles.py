"""Splits over logical devices as axes of a mesh, with integers alone."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from zstrat.strategy._logical_devices import axes_for, axes_of, require_split


@pytest.mark.parametrize(
    ("shape", "split", "words"),
    [
        # All three are wrong in the first, two in the second: the order of the checks.
        ((3, 4), [2, 3, 1], "`partition_dimensions`"),
        ((3, 4), [2, 2], r"partition_dimensions.*\[0\].*\(2\)"),
        ((4, 5), [2, 2], r"partition_dimensions.*\[1\].*\b5\b"),
        ((4, 4), [2, 2], r"\b8\b.*\b4\b"),
        ((4, 4), [4, 4], r"\b8\b.*\b16\b"),
        ((8,), 8, r"\b8\b"),
        ((8, 1), [[8], 1], "`partition_dimensions`"),
        ((8,), [0], "`partition_dimensions`"),
        ((8, 1), [8, True], "`partition_dimensions`"),
        ((8,), [8.0], "`partition_dimensions`"),
        ((8, 8), [-2, -4], "`partition_dimensions`"),
    ],
)
def test_what_is_no_split(shape, split, words):
    with pytest.raises(ValueError, match=words):
        require_split(shape, split, 8)


def test_a_split():
    assert require_split((3, 4, 8, 5), [1, 2, 4, 1], 8) == (1, 2, 4, 1)
    assert require_split((8, 4), (np.int64(4), 2), 8) == (4, 2)
    assert require_split((), [], 1) == ()


def splits_of(count, rank):
    """All splits of so many dimensions into so many tiles."""
    divisors = [d for d in range(1, count + 1) if count % d == 0]
    every = itertools.product(divisors, repeat=rank)
    return [split for split in every if math.prod(split) == count]


def tiles(extents, axes):
    """The device of each tile: axes of a dimension come one after the other."""
    devices = np.arange(math.prod(extents)).reshape(extents)
    order = [axis for each in axes for axis in each]
    shape = [math.prod(extents[axis] for axis in each) for each in axes]
    return devices.transpose(order).reshape(shape)


@pytest.mark.parametrize("count", [1, 2, 4, 6, 8, 12, 16, 30, 36])
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_tiles_go_to_devices_row_by_row(count, rank):
    """TensorFlow's tile assignment: numbers in a row, reshaped to the split."""
    extents = axes_for(count)
    assert list(extents) == sorted(extents)
    for split in splits_of(count, rank):
        primes = [prime for parts in split for prime in axes_for(parts)]
        if primes != sorted(primes):
            continue
        found = tiles(extents, axes_of(extents, split))
        np.testing.assert_array_equal(found, np.arange(count).reshape(split))


@pytest.mark.parametrize("count", [2, 4, 8, 16, 32])
def test_of_a_power_of_two_all_splits_go_together(count):
    extents = axes_for(count)
    for split in splits_of(count, 3):
        found = tiles(extents, axes_of(extents, split))
        np.testing.assert_array_equal(found, np.arange(count).reshape(split))


@given(st.integers(1, 60), st.data())
def test_in_any_mesh_every_device_has_one_tile(count, data):
    extents = data.draw(st.permutations(axes_for(count)))
    assert math.prod(extents) == count
    for split in splits_of(count, 2):
        found = tiles(extents, axes_of(extents, split))
        assert found.shape == split
        assert sorted(found.ravel().tolist()) == list(range(count))


def test_a_split_without_a_row_takes_other_axes():
    assert axes_for(6) == (2, 3)
    assert axes_of((2, 3), (2, 3)) == [(0,), (1,)]
    assert axes_of((2, 3), (3, 2)) == [(1,), (0,)]
