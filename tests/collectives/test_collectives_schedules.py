"""How many hops schedules have, and who knows of whom: for sizes up to 17.

That values come out right, and alike on all ranks, is seen in those of progress.
"""

from __future__ import annotations

import pytest
from collectives_hops import all_made_by, made_by

from zstrat.collectives import ALGORITHMS, Act

SIZES = range(1, 18)


def all_ranks(schedule, size, *rest):
    found = [schedule(rank, size, *rest) for rank in range(size)]
    assert len({each.places for each in found}) == 1
    assert len({len(each.blocks) for each in found}) == 1
    return found


def sent(schedule) -> int:
    return sum(a.act is Act.SEND for actions in schedule.blocks for a in actions)


@pytest.mark.parametrize("size", SIZES)
def test_nobody_leaves_the_barrier_before_all_have_come(size) -> None:
    """Each hop tells all that its sender knows; in the end everyone knows of all."""
    ranks = all_ranks(made_by("barrier", "dissemination"), size)
    knows = [{rank} for rank in range(size)]
    told: dict[tuple[int, int], set[int]] = {}
    for step in range(ranks[0].places):
        for rank, schedule in enumerate(ranks):
            send, take = schedule.blocks[0][2 * step : 2 * step + 2]
            assert (send.act, take.act) == (Act.SEND, Act.TAKE)
            assert (send.place, take.place) == (step, step)
            told[send.peer, step] = set(knows[rank])
        for rank, schedule in enumerate(ranks):
            assert schedule.blocks[0][2 * step + 1].peer == (rank - 2**step) % size
            knows[rank] |= told[rank, step]
    assert knows == [set(range(size))] * size


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("call", ALGORITHMS)
def test_no_two_hops_to_a_rank_have_one_place(call, size) -> None:
    for schedule in all_made_by(call):
        for root in [(0,), (size - 1,)] if call == "broadcast" else [()]:
            ranks = all_ranks(schedule, size, *root)
            actions = [a for rank in ranks for block in rank.blocks for a in block]
            hops = [(a.peer, a.place) for a in actions if a.act is Act.SEND]
            assert len(set(hops)) == len(hops)
            assert all(0 <= place < ranks[0].places for _, place in hops)


@pytest.mark.parametrize("size", SIZES)
def test_hops_are_as_many_as_the_docstrings_say(size) -> None:
    others, depth = size - 1, (size - 1).bit_length()

    def hops(call, algorithm, *root) -> list[int]:
        """Of each rank."""
        return [sent(each) for each in all_ranks(made_by(call, algorithm), size, *root)]

    twice, once = [2 * others] * size, [others] * size
    assert hops("all_reduce", "ring") == twice  # of 1/size each
    assert hops("all_reduce", "direct") == twice
    assert hops("reduce_scatter", "ring") == once
    assert hops("all_gather", "ring") == once
    assert hops("all_gather", "doubling") == once
    assert hops("all_to_all", "pairwise") == once
    assert hops("barrier", "dissemination") == [depth] * size
    assert max(hops("broadcast", "tree", 0)) <= depth
    assert max(hops("broadcast", "chain", 0)) <= 1
    assert max(hops("all_reduce", "double_tree")) <= 4  # of half the array
    assert sum(hops("all_reduce", "tree")) == 2 * others
    if size & others == 0:
        assert hops("all_reduce", "halving_doubling") == twice
        assert hops("all_reduce", "doubling") == [depth] * size


@pytest.mark.parametrize("size", SIZES)
def test_an_inner_rank_of_one_tree_is_a_leaf_of_the_other(size) -> None:
    """Ranks may be the root of one of them besides: it has one child."""
    for rank in range(size):
        trees = made_by("all_reduce", "double_tree")(rank, size).blocks
        inner = [
            any(action.act is Act.REDUCE for action in actions)
            and all(action.act is not Act.FINISH for action in actions)
            for actions in trees
        ]
        assert sum(inner) <= 1
