"""Batches without any rows tell nothing about the size of the others."""

from __future__ import annotations

import numpy as np
import pytest

from zstrat.data import (
    Allotment,
    AutoShardPolicy,
    Dataset,
    Worker,
    allotted,
    as_dataset,
)


@pytest.mark.parametrize(
    "batches",
    [
        [np.zeros((0, 2)), np.ones((4, 2))],
        [np.zeros((0, 2))],
        [np.zeros(0), np.zeros(0), np.zeros(0)],
    ],
)
def test_batches_without_rows_say_nothing_about_the_others(batches):
    assert as_dataset(batches).recipe.batch_size is None
    assert as_dataset(batches).recipe.ranks == (batches[0].ndim,)


@pytest.mark.parametrize("policy", [AutoShardPolicy.OFF, AutoShardPolicy.DATA])
def test_a_batch_size_of_nothing_is_cut_as_an_unknown_one(policy):
    recipe, worker = as_dataset([np.zeros(2)]).recipe, Worker(replicas=2)
    empty, unknown = (
        Allotment(recipe, worker, policy, size, None).cutter() for size in (0, None)
    )
    for rows in (0, 5, 1):
        assert empty.take(rows) == unknown.take(rows)
    assert empty.finish() == unknown.finish()


def test_rows_without_columns_are_cut_to_nothing():
    allotment = allotted(Dataset.from_tensor_slices(np.zeros((3, 0))), Worker(1, 0, 2))
    cuts = allotment.cutter()
    assert [cuts.take(len(row)) for row in allotment.elements()] == [[], [], []]
