"""The table of algorithms: rank 0's is that of all, and it decides."""

import math
from dataclasses import replace

import numpy as np
import pytest
from collectives_groups import QUICK, ranks_of
from hypothesis import given
from hypothesis import strategies as st

import zstrat as zs
from zstrat.collectives import (
    CallKind,
    Choices,
    CollectiveCall,
    Rule,
    choices_from,
    read_choices,
)
from zstrat.collectives.schedules import progress_of

RULES = (
    Rule("all_reduce", "double_tree", ranks=2, nbytes=1000, one_host=True),
    Rule("all_reduce", "direct", one_host=False),
    Rule("broadcast", "chain", nbytes=0),
    Rule("all_gather", "doubling"),
)

NUMBERS = st.none() | st.integers(0, 2**40)
ALGORITHMS = st.sampled_from(
    [("all_reduce", "ring"), ("all_reduce", "tree"), ("broadcast", "scatter")]
)


@given(st.lists(st.tuples(ALGORITHMS, NUMBERS, NUMBERS, st.none() | st.booleans())))
def test_a_table_travels_as_plain_data(tmp_path_factory, rules):
    table = Choices(tuple(Rule(*names, *rest) for names, *rest in rules))
    assert choices_from(table.to_plain()) == table
    file = tmp_path_factory.getbasetemp() / "table.toml"
    file.write_text(table.to_toml())
    assert read_choices(file) == table


def first_hops(choices, nbytes, size=4):
    """How many hops rank 0 begins with."""
    data = np.zeros(nbytes, np.uint8)
    call = CollectiveCall(1, CallKind.ALL_REDUCE, data, data, 0, "", math.inf, 1.0)
    return len(list(progress_of(call, 0, size, choices=choices).start()))


def test_the_table_decides():
    """Rank 0 of a ring begins with a block to its right; of "direct" with one to
    everybody; of a tree it is the root and begins with nothing."""
    for algorithm, hops in (("ring", 1), ("direct", 3), ("tree", 0)):
        table = Choices((Rule("all_reduce", algorithm),))
        assert first_hops(table, 4000) == hops


def with_table(ranks, tmp_path, rank, text):
    file = tmp_path / f"{rank}.toml"
    file.write_text(text)
    return ranks.group(rank, settings=replace(QUICK, choices=file))


def test_rank_0_hands_its_table_out(tmp_path):
    """Rank 1 would take a ring and rank 2 cannot even read its file: with tables of
    their own they would wait for each other."""
    texts = [Choices(RULES).to_toml(), '[[rule]]\ncall="all_reduce"\n', "nonsense"]
    data = [np.arange(1000.0) * (rank + 1) for rank in range(3)]
    with ranks_of(3) as ranks:
        groups = ranks.each(
            lambda rank: with_table(ranks, tmp_path, rank, texts[rank]), range(3)
        )
        for group in groups:
            assert group._work.generation.traffic.choices == Choices(RULES)
        for result in ranks.each(lambda g: g.all_reduce(data[g.rank]), groups):
            np.testing.assert_array_equal(result, data[0] * 6)


def test_a_table_that_cannot_be_read_is_said_at_rank_0(tmp_path):
    with (
        ranks_of(1) as ranks,
        pytest.raises(ValueError, match=r"0\.toml: rule 1: .*algorithm"),
    ):
        with_table(ranks, tmp_path, 0, '[[rule]]\ncall="all_reduce"\n')


@pytest.mark.parametrize(
    ("call", "algorithm"),
    [
        ("all_reduce", "double_tree"),
        ("all_reduce", "doubling"),
        ("all_gather", "doubling"),
        ("all_gather", "ring"),
        ("reduce_scatter", "direct"),
        ("broadcast", "scatter"),
    ],
)
def test_a_caller_may_choose(trio, call, algorithm):
    data = [np.arange(6.0) + rank for rank in range(3)]
    expected = {
        "all_reduce": [sum(data)] * 3,
        "all_gather": [np.concatenate(data)] * 3,
        "reduce_scatter": np.split(sum(data), 3),
        "broadcast": [data[0]] * 3,
    }[call]
    found = trio.each(
        lambda g: getattr(g, call)(data[g.rank], algorithm=algorithm), trio.all
    )
    for got, right in zip(found, expected, strict=True):
        np.testing.assert_array_equal(got, right)


@pytest.mark.parametrize("call", ["all_gather", "reduce_scatter", "broadcast"])
def test_there_must_be_such_an_algorithm(trio, call):
    with pytest.raises(ValueError, match=f"algorithm 'pigeon' for {call}"):
        getattr(trio.all[0], call)(np.ones(3), algorithm="pigeon")


def test_what_every_rank_finishes_by_itself_is_not_compressed(trio):
    """Each would keep its own contribution as it is, and have the others' rounded."""
    with pytest.raises(ValueError, match=r"'doubling'.*compression='bf16'"):
        trio.all[0].all_reduce(np.ones(3), algorithm="doubling", compression="bf16")


def test_a_table_that_asks_for_it_is_for_what_is_not_compressed(tmp_path):
    text = '[[rule]]\ncall = "all_reduce"\nalgorithm = "doubling"\n'
    values = np.random.default_rng(0).standard_normal((2, 100)).astype(np.float32)
    with ranks_of(2) as ranks:
        groups = ranks.each(
            lambda rank: with_table(ranks, tmp_path, rank, text), range(2)
        )
        for compression in (None, "int8"):
            found = ranks.each(
                lambda g, how=compression: g.all_reduce(
                    values[g.rank], compression=how
                ),
                groups,
            )
            assert found[0].tobytes() == found[1].tobytes()
            np.testing.assert_allclose(found[0], values.sum(0), atol=0.1)


def test_sparse_arrays_are_gathered_whatever_reduces_the_others(trio):
    """A gather has no trees."""

    def reduce(group):
        slices = zs.IndexedSlices(np.ones((1, 2)), np.array([group.rank]), (3, 2))
        tree = [slices, np.ones(3)]
        return group.all_reduce(tree, algorithm="double_tree")

    for slices, dense in trio.each(reduce, trio.all):
        np.testing.assert_array_equal(slices.indices, [0, 1, 2])
        np.testing.assert_array_equal(dense, [3.0, 3.0, 3.0])


@pytest.fixture(scope="module")
def trio():
    with ranks_of(3) as ranks:
        ranks.all = ranks.groups()
        yield ranks
