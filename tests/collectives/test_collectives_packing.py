"""Pytrees of small and large arrays: what shares a call, and that all come back."""

import math

import jax.numpy as jnp
import numpy as np
import pytest
from collectives_groups import ranks_of
from hypothesis import given
from hypothesis import strategies as st

from zstrat.collectives.group._arguments import CallOptions
from zstrat.collectives.group._operations import (
    ALONE,
    CallFactory,
    all_reduce,
    broadcast,
)
from zstrat.errors import InvalidArgumentError

SMALL = [np.full(size, at, np.float32) for at, size in enumerate([10, 15, 25, 1, 24])]


def calls_of(arrays, bytes_per_pack=0, in_place=False):
    options = CallOptions(1.0, bytes_per_pack=bytes_per_pack)
    request = all_reduce(2, arrays, "sum", in_place, False, options)
    return next(request.make(CallFactory(0, 2, 1, "words", math.inf, options)))


def contents(calls):
    """The arrays of each call, by the number that fills them."""
    return [list(dict.fromkeys(call.source.tolist())) for call in calls]


def test_packs_from_the_last_array_to_the_first():
    """A pack is closed by what is in it already, not by what would come."""
    assert contents(calls_of(SMALL, 100)) == [[4, 3, 2], [1, 0]]
    assert contents(calls_of(SMALL, 99)) == [[4, 3], [2], [1, 0]]
    assert contents(calls_of(SMALL)) == [[4, 3, 2, 1, 0]]


@pytest.mark.parametrize("rank", [0, 1])
def test_broadcasts_share_calls_as_well(rank):
    options = CallOptions(1.0, bytes_per_pack=100)
    factory = CallFactory(rank, 2, 1, "words", math.inf, options)
    arrays = [*SMALL, np.full(ALONE // 4, 7, np.float32)]
    request = broadcast(2, arrays, root=0, in_place=False, options=options)
    calls = next(request.make(factory))
    assert [call.target.size for call in calls] == [ALONE // 4, 50, 25]
    if rank == 0:
        assert contents(calls) == [[7], [4, 3, 2], [1, 0]]
        assert np.shares_memory(calls[0].target, arrays[-1])


def test_dtypes_do_not_mix():
    arrays = [np.full(5, 0, np.int32), *SMALL[1:3], np.full(5, 3, np.int32)]
    assert contents(calls_of(arrays)) == [[3, 0], [2, 1]]


def test_large_arrays_travel_alone_and_are_not_copied():
    large = np.full(ALONE // 4, 7, np.float32)
    calls = calls_of([SMALL[1], large, SMALL[2]])
    assert contents(calls) == [[2, 1], [7]]
    assert np.shares_memory(calls[1].source, large)
    assert not np.shares_memory(calls[1].target, large)
    again = calls_of([SMALL[1], large], in_place=True)
    assert again[0].source is again[0].target
    assert np.shares_memory(again[0].target, large)


@given(
    counts=st.lists(st.integers(0, 70_000), max_size=20),
    bytes_per_pack=st.integers(0, 2**20),
)
def test_every_element_goes_out_once(counts, bytes_per_pack):
    arrays = [np.full(count, at, np.float32) for at, count in enumerate(counts)]
    calls = calls_of(arrays, bytes_per_pack)
    sent = [call.source for call in calls]
    assert sum(each.size for each in sent) == sum(counts)
    alone = [each for each in arrays if each.nbytes >= ALONE]
    assert sum(each.size > 0 and each.nbytes >= ALONE for each in sent) >= len(alone)
    assert len({call.key for call in calls}) == len(calls)


@pytest.fixture(scope="module", params=[0, 10, 300_000])
def pair(request):
    with ranks_of(2) as ranks:
        ranks.all = ranks.groups(bytes_per_pack=request.param)
        yield ranks


def tree_of(rank):
    draw = np.random.default_rng(5)
    counts = [0, 1, 100, 40_000, 3, 70_000, 12]
    arrays = [draw.integers(0, 50, count).astype(np.float32) for count in counts]
    tree = {f"x{at}": array * (rank + 1) for at, array in enumerate(arrays)}
    tree["integers"] = np.arange(7) + rank
    tree["turned"] = (np.arange(12.0).reshape(3, 4) * (rank + 1)).T
    tree["jax"] = jnp.arange(5.0) * (rank + 1)
    tree["number"] = np.float64(rank + 1)
    return tree


def test_the_tree_comes_back_in_order(pair):
    trees = [tree_of(rank) for rank in range(2)]
    for result in pair.each(lambda g: g.all_reduce(trees[g.rank]), pair.all):
        assert list(result) == sorted(trees[0])
        for name, got in result.items():
            np.testing.assert_array_equal(got, trees[0][name] + trees[1][name])
            assert got.dtype == trees[0][name].dtype
        assert isinstance(result["jax"], jnp.ndarray)


@pytest.mark.parametrize("root", [0, 1])
def test_the_tree_of_the_root_comes_back_in_order(pair, root):
    trees = [tree_of(rank) for rank in range(2)]
    results = pair.each(lambda g: g.broadcast(trees[g.rank], root), pair.all)
    for rank, result in enumerate(results):
        assert list(result) == sorted(trees[root])
        for name, got in result.items():
            np.testing.assert_array_equal(got, trees[root][name])
            assert got.dtype == trees[root][name].dtype
            if isinstance(got, np.ndarray):
                assert not np.shares_memory(got, trees[rank][name])
        assert isinstance(result["jax"], jnp.ndarray)


def test_in_place(pair):
    names = [f"x{at}" for at in range(7)] + ["integers", "turned"]
    trees = [{name: tree_of(rank)[name] for name in names} for rank in range(2)]
    expected = {name: trees[0][name] + trees[1][name] for name in names}
    found = pair.each(lambda g: g.all_reduce(trees[g.rank], in_place=True), pair.all)
    for tree, result in zip(trees, found, strict=True):
        for name in names:
            assert result[name] is tree[name]
            np.testing.assert_array_equal(tree[name], expected[name])


@pytest.mark.parametrize("count", [10, ALONE])
def test_one_array_at_two_places_cannot_be_reduced_in_place(pair, count):
    array = np.ones(count)
    with pytest.raises(ValueError, match="in_place"):
        pair.all[0].all_reduce({"a": array, "b": array[:]}, in_place=True)
    empty = [np.ones(0), np.ones(0)[:]]
    pair.each(lambda group: group.all_reduce(empty, in_place=True), pair.all)
    for a, b in pair.each(lambda group: group.all_reduce([array, array]), pair.all):
        np.testing.assert_array_equal([a, b], np.full((2, count), 2.0))


def test_ranks_that_pack_differently_are_told():
    def reduce(group):
        return group.all_reduce([np.ones(5), np.ones(6)], timeout=5)

    with ranks_of(2) as ranks:
        groups = ranks.each(
            lambda rank: ranks.group(rank, bytes_per_pack=10 * rank), range(2)
        )
        for error in ranks.outcomes(reduce, groups):
            assert isinstance(error, InvalidArgumentError)
            assert "bytes_per_pack=10" in str(error)


def test_a_negative_limit():
    with ranks_of(1) as ranks, pytest.raises(ValueError, match="bytes_per_pack=-1"):
        ranks.group(0, bytes_per_pack=-1)
