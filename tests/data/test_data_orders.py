"""Seeded shuffles: the order of a pass is that of its number, and of nothing else."""

from __future__ import annotations

import itertools
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiers import examples

from zstrat.data import Dataset, Worker, allotted

ROWS = 24


def shuffled(**how):
    return Dataset.range(ROWS).shuffle(ROWS, seed=1, **how)


def drawn(iterator, count):
    return [int(x) for x in itertools.islice(iterator, count)]


PIPELINES = {
    "plain": lambda d: d,
    "prefetched": lambda d: d.prefetch(3),
    "mapped": lambda d: d.map(lambda x: x).prefetch(1),
    "again": lambda d: d.shuffle(7, seed=2),
    "within": lambda d: d.repeat(2).shuffle(40, seed=5),
}


@pytest.mark.shows("tf.data.Dataset.shuffle")
@pytest.mark.parametrize("pipeline", PIPELINES.values(), ids=PIPELINES)
@examples(20)
@given(before=st.lists(st.integers(0, 100), min_size=1, max_size=3))
def test_the_order_of_a_pass_is_the_same_however_far_others_went(pipeline, before):
    hasty, idle = (pipeline(shuffled()).repeat() for _ in range(2))
    for count in before:
        drawn(iter(hasty), count)
        iter(idle)
    assert drawn(iter(hasty), 60) == drawn(iter(idle), 60)


@pytest.mark.parametrize("size", [4, 6])
def test_workers_that_share_the_data_draw_every_row_once_in_each_pass(size):
    def worker(index, ahead):
        dataset = shuffled().repeat().batch(size)
        mine = allotted(dataset, Worker(2, index))
        steps = ROWS // size
        for _ in range(4):
            elements, cutter = mine.elements(), mine.cutter()
            rows = []
            for _ in range(steps):
                batch = next(elements)
                for ((span, *_),) in cutter.take(len(batch)):
                    rows += batch[span.start : span.stop].tolist()
            # A thread that makes elements in advance has gone on by so many of them.
            assert len(list(itertools.islice(elements, ahead))) == ahead
            yield rows

    for mine, others in zip(worker(0, ahead=0), worker(1, ahead=9), strict=True):
        assert sorted(mine + others) == list(range(ROWS))


def test_passes_that_are_open_at_once_have_the_order_in_which_they_began():
    one, other = shuffled().repeat(), shuffled().repeat()
    first, second = iter(one), iter(one)
    late, early = drawn(second, 50), drawn(first, 50)  # the second is drawn first
    assert drawn(iter(other), 50) == early
    assert drawn(iter(other), 50) == late


def test_every_repeat_of_every_pass_has_an_order_of_its_own():
    dataset = shuffled().repeat(3).repeat(2)
    orders = [tuple(drawn(iter(dataset), 200)) for _ in range(3)]
    repeats = [o[n : n + ROWS] for o in orders for n in range(0, 6 * ROWS, ROWS)]
    assert all(sorted(repeat) == list(range(ROWS)) for repeat in repeats)
    assert len(set(repeats)) == 18


def test_without_reshuffling_every_repeat_of_every_pass_has_the_same_order():
    dataset = shuffled(reshuffle_each_iteration=False).repeat(3)
    orders = [drawn(iter(dataset), 100) for _ in range(2)]
    assert orders[0] == orders[1] == orders[0][:ROWS] * 3
    mine = allotted(dataset.batch(6), Worker(2, 1))
    assert [rows(mine.elements()) for _ in range(2)] == orders
    assert sorted(orders[0][:ROWS]) == list(range(ROWS))


def test_datasets_made_of_one_shuffle_count_their_passes_together():
    base = shuffled()
    whole, part = base.batch(ROWS), base.take(ROWS)
    (first,) = whole
    assert drawn(iter(part), ROWS) != first.tolist()
    again = shuffled()
    assert drawn(iter(again), ROWS) == first.tolist()


def test_a_copy_begins_at_the_first_pass():
    dataset = shuffled().repeat(2).batch(5)
    before = pickle.dumps(dataset)
    first = np.concatenate(list(dataset))
    assert pickle.dumps(dataset) == before  # what was shipped is known to be the same
    copy = pickle.loads(pickle.dumps(dataset))
    np.testing.assert_array_equal(np.concatenate(list(copy)), first)


# who looks into a dataset before it is distributed changes nothing for the others


def batched():
    return shuffled().batch(6)


def rows(iterator):
    return np.concatenate(list(iterator)).tolist()


def test_passes_of_what_a_worker_reads_are_counted_by_themselves():
    plain, looked_into = batched(), batched()
    for _ in range(3):
        next(iter(looked_into))
    mine = allotted(plain, Worker(2, 0))
    others = allotted(looked_into, Worker(2, 1))
    first = rows(mine.elements())
    assert rows(others.elements()) == first
    next(iter(plain))  # in the middle of training
    second = rows(mine.elements())
    assert rows(others.elements()) == second
    assert first != second
    assert sorted(first) == sorted(second) == list(range(ROWS))


def test_distributed_again_a_dataset_is_in_another_order():
    dataset = batched()
    orders = [tuple(rows(allotted(dataset, Worker(2, 0)).elements())) for _ in range(4)]
    assert len(set(orders)) == 4


def test_it_does_not_change_the_passes_of_the_dataset_itself():
    dataset, other = batched(), batched()
    allotment = allotted(dataset, Worker(2, 0))
    for _ in range(2):
        rows(allotment.elements())
        assert rows(iter(dataset)) == rows(iter(other))
