"""Results that go into the arrays which were given."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from collectives_groups import ranks_of
from collectives_hosts import ranks_on

from zstrat.collectives.group._operations import ALONE


def tree_of(rank):
    """What travels alone and what is packed, in C order and not."""
    return {
        "large": np.full((ALONE // 8, 2), rank, np.float64),
        "small": np.full(3, rank, np.float32),
        "number": np.array(rank, np.int32),
        "empty": np.zeros((0, 2)),
        "turned": np.full((2, ALONE // 8), rank, np.float64).T,
        "every other": np.full((ALONE // 4, 5), rank, np.float64)[::2],
        "other end": np.full(ALONE // 4, rank, ">f4"),
    }


@pytest.fixture(params=["tcp", "shm", "two hosts"], scope="module")
def groups(request):
    with pytest.MonkeyPatch.context() as patch:
        hosts = "aba" if request.param == "two hosts" else "aaa"
        with ranks_on(hosts, patch) as ranks:
            transport = "tcp" if request.param == "tcp" else "auto"
            found = ranks.groups(transport=transport)
            yield lambda call: ranks.each(call, found)


@pytest.mark.parametrize("algorithm", [None, "tree", "scatter", "chain"])
@pytest.mark.parametrize("root", [0, 2])
def test_broadcast(groups, root, algorithm):
    trees = [tree_of(rank) for rank in range(3)]
    found = groups(
        lambda g: g.broadcast(trees[g.rank], root, in_place=True, algorithm=algorithm)
    )
    for tree, result in zip(trees, found, strict=True):
        for name, array in tree.items():
            assert result[name] is array
            np.testing.assert_array_equal(array, np.full_like(array, root))


@pytest.mark.parametrize(("op", "want"), [("sum", 0 + 1 + 2), ("max", 2)])
def test_all_reduce(groups, op, want):
    trees = [tree_of(rank) for rank in range(3)]
    found = groups(lambda g: g.all_reduce(trees[g.rank], op, in_place=True))
    for tree, result in zip(trees, found, strict=True):
        for name, array in tree.items():
            assert result[name] is array
            np.testing.assert_array_equal(array, np.full_like(array, want))


def test_tagged_and_async(groups):
    """By messages, wherever the ranks are."""
    data = [np.full(ALONE, rank, np.float32) for rank in range(3)]

    def call(group):
        mine = data[group.rank]
        return group.broadcast_async(mine, 1, in_place=True, tag="mine").result()

    for array, result in zip(data, groups(call), strict=True):
        assert result is array
        np.testing.assert_array_equal(array, np.ones(ALONE, np.float32))


@pytest.fixture(scope="module")
def alone():
    with ranks_of(1) as ranks:
        yield ranks.group(0)


LINE = np.arange(10.0)
READ_ONLY = np.frombuffer(bytes(8))


@pytest.mark.parametrize("call", ["all_reduce", "broadcast"])
@pytest.mark.parametrize(
    ("tree", "error", "words"),
    [
        (1.0, TypeError, "in_place"),
        (jnp.ones(3), TypeError, "in_place"),
        (READ_ONLY, ValueError, "in_place"),
        ([LINE, LINE], ValueError, "in_place"),
        ([LINE[:6], LINE[4:]], ValueError, "in_place"),
    ],
)
def test_what_cannot_be_written_to(alone, call, tree, error, words):
    with pytest.raises(error, match=words):
        getattr(alone, call)(tree, in_place=True)


def test_neighbours_in_one_memory(alone):
    parts = [LINE[5:], LINE[:5]]
    alone.all_reduce(parts, in_place=True)
    np.testing.assert_array_equal(LINE, np.arange(10))
