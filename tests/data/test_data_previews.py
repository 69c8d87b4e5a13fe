"""Who looks into a dataset before it is distributed changes nothing for the others."""

from __future__ import annotations

import numpy as np

from zstrat.data import Dataset, Worker, allotted

ROWS = 30


def shuffled():
    return Dataset.range(ROWS).shuffle(ROWS, seed=4).batch(6)


def rows(iterator):
    return np.concatenate(list(iterator)).tolist()


def test_passes_of_what_a_worker_reads_are_counted_by_themselves():
    plain, looked_into = shuffled(), shuffled()
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
    dataset = shuffled()
    orders = [tuple(rows(allotted(dataset, Worker(2, 0)).elements())) for _ in range(4)]
    assert len(set(orders)) == 4


def test_it_does_not_change_the_passes_of_the_dataset_itself():
    dataset, other = shuffled(), shuffled()
    allotment = allotted(dataset, Worker(2, 0))
    for _ in range(2):
        rows(allotment.elements())
        assert rows(iter(dataset)) == rows(iter(other))


def test_without_reshuffling_there_is_one_order_for_all():
    dataset = Dataset.range(ROWS).shuffle(ROWS, 4, reshuffle_each_iteration=False)
    dataset = dataset.batch(6)
    one = rows(iter(dataset))
    for _ in range(2):
        assert rows(allotted(dataset, Worker(2, 1)).elements()) == one
