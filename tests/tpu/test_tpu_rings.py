"""Rings: the reference orders of TensorFlow, and what makes an order a ring."""

import itertools
import logging
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zstrat.tpu._device_assignment import ring

FLAT_4X4 = "00 10 20 30 31 21 11 12 22 32 33 23 13 03 02 01"

REFERENCE = {
    (1, 1, 3): "000 001 002",
    (1, 1, 1): "000",
    (4, 1, 1): "000 100 200 300",
    (2, 2, 1): "000 100 110 010",
    (4, 4, 1): " ".join(f"{place}0" for place in FLAT_4X4.split()),
    (4, 1, 2): "000 100 200 300 301 201 101 001",
    (1, 2, 4): "000 010 011 012 013 003 002 001",
    (2, 2, 2): "000 100 110 010 011 111 101 001",
}


@pytest.mark.parametrize("extents", REFERENCE)
def test_the_orders_of_the_reference(extents):
    expected = [tuple(map(int, place)) for place in REFERENCE[extents].split()]
    assert ring(extents) == expected


def test_three_even_extents_are_planes_strung_along_z():
    """The first and last chips of each plane of the 4x4x4 ring that TensorFlow draws:
    planes are left in the corner where the next one is entered."""
    found = ring((4, 4, 4))
    number = {chip: n for n, chip in enumerate(found)}
    assert found[:16] == [(*map(int, p), 0) for p in FLAT_4X4.split()]
    assert [number[0, 1, z] for z in range(4)] == [15, 16, 45, 46]
    assert [number[1, 0, z] for z in range(4)] == [1, 30, 31, 60]
    assert [number[0, 0, z] for z in range(4)] == [0, 63, 62, 61]


def test_an_odd_extent_is_row_major_with_x_fastest(caplog):
    with caplog.at_level(logging.WARNING):
        assert ring((3, 2, 1)) == [
            (0, 0, 0),
            (1, 0, 0),
            (2, 0, 0),
            (0, 1, 0),
            (1, 1, 0),
            (2, 1, 0),
        ]
    assert "needs even sides" in caplog.text


def distance(a, b):
    return sum(abs(i - j) for i, j in zip(a, b, strict=True))


extent = st.integers(1, 6)
even = st.sampled_from([1, 2, 4, 6])


@given(st.tuples(extent, extent, extent))
def test_every_chip_is_there_once(extents):
    found = ring(extents)
    assert found[0] == (0, 0, 0)
    assert len(found) == len(set(found)) == math.prod(extents)
    assert all(
        0 <= place < size
        for chip in found
        for place, size in zip(chip, extents, strict=True)
    )


@given(st.tuples(even, even, even))
def test_of_even_extents_each_chip_is_next_to_the_one_before(extents):
    found = ring(extents)
    steps = [distance(a, b) for a, b in itertools.pairwise(found)]
    assert set(steps) <= {1}
    is_line = sum(size > 1 for size in extents) < 2
    if not is_line:
        assert distance(found[-1], found[0]) == 1
