"""Ids and indices of 64 bits where jax computes with 32: none names another row."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

import zstrat.program as zs
from zstrat.variables import (
    IndexedSlices,
)

TABLE = np.arange(40, dtype=np.float32).reshape(10, 4) / 7


@pytest.mark.parametrize("dtype", ["int64", "uint64"])
def test_wide_integers_that_ids_are_computed_of_have_to_fit(home, dtype):
    table = home.sharded(TABLE, 2)
    wide = np.array([2, 2**32 + 1], dtype)

    def step(batch, other):
        plus = batch["ids"] + (0 if dtype == "int64" else jnp.uint32(0))
        return zs.embedding_lookup(table, plus), other * 2

    run = zs.function(step)
    with pytest.raises(ValueError, match=r"args\[0\]\['ids'\].*contains 4294967297"):
        run({"ids": wide}, np.int32(1))
    drawn = zs.function(lambda it: step(next(it), np.int32(1)))
    with pytest.raises(ValueError, match=r"element 0\['ids'\].*contains 4294967297"):
        drawn(zs.StepIterator([{"ids": wide}]))
    # What no id depends on may be cut, and what fits is looked up.
    fits = np.array([2, 9], dtype)
    rows, _ = run({"ids": fits}, np.int64(2**40))
    np.testing.assert_array_equal(rows, TABLE[[2, 9]])

    @zs.function
    def update(ids, index):
        rows = zs.embedding_lookup(table, ids)
        table.scatter_add(IndexedSlices(rows, jnp.flip(index)))

    with pytest.raises(ValueError, match=r"args\[1\].*contains"):
        update(fits, wide)

    @zs.function
    def other_ids(ids, index):
        rows = zs.embedding_lookup(table, ids)
        table.scatter_add(IndexedSlices(rows, index))

    with pytest.raises(ValueError, match=r"args\[1\].*contains"):
        other_ids(fits, wide)
    with pytest.raises(IndexError, match="no row 4294967297"):
        zs.function(lambda ids: zs.embedding_lookup(table, ids))(wide)
