"""Batches in a list: what is known about them beforehand, and what must not be."""

from __future__ import annotations

import dataclasses
from collections import UserDict

import jax
import numpy as np
import pytest

from zstrat.data import Worker, allotted, as_dataset


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Batch:
    """One that jax knows as a pytree."""

    x: np.ndarray
    y: np.ndarray


class Told:
    """As an array of another library: it has a shape, and numpy can read it."""

    shape = (4, 2)

    def __array__(self, dtype=None, copy=None):
        raise AssertionError("the data lie on a device: they are not to be copied")


@pytest.mark.parametrize(
    ("batches", "size", "ranks"),
    [
        ([np.zeros((4, 2)), np.zeros((4, 2)), np.zeros((1, 2))], 4, (2,)),
        ([np.zeros((4, 2))], 4, (2,)),
        ([np.zeros((4, 2)), np.zeros((4, 3))], None, (2,)),
        ([np.zeros(4), np.zeros(3), np.zeros(4)], None, (1,)),
        ([{"x": np.zeros(4), "y": [np.zeros((4, 1))]}], 4, (1, 2)),
        ([{"x": np.zeros(4), "y": np.zeros(5)}], None, (1, 1)),
        ([np.float32(1)], None, (0,)),
        ([], None, None),
        # Batches without any rows tell nothing about the size of the others.
        ([np.zeros((0, 2)), np.ones((4, 2))], None, (2,)),
        ([np.zeros((0, 2))], None, (2,)),
        ([np.zeros(0), np.zeros(0), np.zeros(0)], None, (1,)),
        ([Told(), Told()], 4, (2,)),
        ([UserDict(x=np.zeros(4))] * 2, None, None),
        ([object()] * 2, None, None),
    ],
)
def test_batches_in_a_list_are_looked_at(batches, size, ranks):
    recipe = as_dataset(batches).recipe
    assert (recipe.batch_size, recipe.ranks) == (size, ranks)
    assert recipe.size() == len(batches)


@pytest.mark.parametrize(
    "batch",
    [
        Batch(np.zeros((4, 2)), np.zeros(4)),
        {"x": np.zeros((4, 2)), "more": Batch(np.zeros((4, 2)), np.zeros(4))},
    ],
)
def test_of_what_only_jax_can_open_nothing_is_known(batch):
    recipe = as_dataset([batch, batch]).recipe
    assert (recipe.batch_size, recipe.ranks) == (None, None)
    assert (recipe.size(), recipe.is_steady) == (2, True)
    allotment = allotted([batch, batch], Worker(replicas=2))
    assert list(allotment.elements()) == [batch, batch]


@pytest.mark.parametrize("scalar", [3, 2.5, True, 1j, b"ab", "ab", np.float32(1)])
def test_scalars_cannot_be_cut(scalar):
    assert as_dataset([{"n": scalar}]).recipe.ranks == (0,)
    with pytest.raises(ValueError, match="`batch`"):
        allotted([{"n": scalar}], Worker(replicas=2))
