"""Steps with variables on devices of this process and tables on parameter servers."""

from __future__ import annotations

import re

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zstrat.program as zs
from zstrat.variables import IndexedSlices

TABLE = np.arange(20, dtype=np.float32).reshape(10, 2)


@pytest.fixture
def count(storage):
    return storage.on_devices(np.float32(0), "count")


def test_rows_go_to_the_component_that_has_them(storage, count):
    table = storage.sharded(TABLE, 3)  # rows 0-3, 4-6, 7-9

    @zs.function
    def step(index, rows):
        count.assign_add(rows.sum())
        table.scatter_add(IndexedSlices(rows, index))

    index, rows = np.array([9, 0, 5, 9], np.int32), np.ones((4, 2), np.float32)
    step(index, rows)
    expected = TABLE.copy()
    np.add.at(expected, index, rows)
    np.testing.assert_array_equal(storage.whole(table), expected)
    assert count.numpy() == 8


def test_a_gradient_of_rows_is_one_step_of_every_component(storage, count):
    table = storage.sharded(TABLE, 3)
    momentum = storage.optimizer(optax.sgd(1.0, momentum=0.5))

    @zs.function
    def step(index, rows):
        count.assign_add(1.0)
        momentum.apply_gradients(IndexedSlices(rows, index), table)

    index, rows = np.array([8, 8], np.int32), np.ones((2, 2), np.float32)
    expected, trace = TABLE.copy(), np.zeros_like(TABLE)
    for _ in range(2):
        step(index, rows)
        trace = 0.5 * trace
        trace[8] += 2
        expected -= trace
    np.testing.assert_array_equal(storage.whole(table), expected)


def test_a_row_that_is_not_there_is_named(storage, count):
    table = storage.sharded(TABLE, 3)

    @zs.function
    def step(it):
        count.assign_add(1.0)
        table.scatter_add(IndexedSlices(jnp.ones((1, 2)), next(it)))

    drawn = zs.StepIterator([np.array([10], np.int32), np.array([4], np.int32)])
    with pytest.raises(IndexError, match=rf"{re.escape(__file__)}.*no row 10"):
        step(drawn)
    np.testing.assert_array_equal(storage.whole(table), TABLE)
    step(drawn)  # goes on with the next element
    assert storage.whole(table)[4, 0] == TABLE[4, 0] + 1
