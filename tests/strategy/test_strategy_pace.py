"""How workers with more and with less data come to one end, and what they ask."""

import itertools
import threading
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ranks import ranks
from tiers import examples

from zstrat.data import Dataset, Elements
from zstrat.strategy.input import PassLength, SynchronizedPass

FOREVER = "endless"
DRAWN = 7
"""Of a pass without an end."""


class Table:
    """Exchanges numbers of workers that are threads; keeps what was asked."""

    def __init__(self, size):
        self.barrier = threading.Barrier(size, timeout=100)
        self.asked = [[] for _ in range(size)]

    def all_max(self, worker):
        def largest(numbers):
            mine = self.asked[worker]
            mine.append(list(map(int, numbers)))
            self.barrier.wait()
            rows = [each[len(mine) - 1] for each in self.asked]
            assert len({len(row) for row in rows}) == 1, "different questions"
            self.barrier.wait()
            return [max(column) for column in zip(*rows, strict=True)]

        return largest


def endless():
    number = 0
    while True:
        yield number
        number += 1


def passes(lengths, *, is_partial, common=False, draws=DRAWN):
    """What each worker draws, and how often each asked; -1 are empty elements."""
    table = Table(len(lengths))
    found = [None] * len(lengths)

    def one(worker, length, is_known):
        forever = length == FOREVER
        steps = length if is_known and not forever else None
        paced = SynchronizedPass(
            Elements(endless() if forever else range(length)),
            table.all_max(worker),
            length=PassLength(steps, forever, common),
            empty=lambda: -1,
            is_partial=is_partial,
        )
        found[worker] = [x for x, _ in zip(paced, range(draws), strict=False)]

    threads = [
        threading.Thread(target=one, args=(n, *each)) for n, each in enumerate(lengths)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    return found, [len(each) for each in table.asked]


sizes = st.tuples(st.one_of(st.just(FOREVER), st.integers(0, DRAWN - 1)), st.booleans())


@examples(60)
@given(st.lists(sizes, min_size=2, max_size=3), st.booleans())
def test_all_draw_as_often_and_ask_the_same(lengths, is_partial):
    found, asked = passes(lengths, is_partial=is_partial)
    counts = [DRAWN if length == FOREVER else length for length, _ in lengths]
    steps = max(counts) if is_partial else min(counts)
    for count, mine in zip(counts, found, strict=True):
        own = list(range(min(count, steps)))
        assert mine == own + [-1] * (steps - len(own))
    assert len(set(asked)) == 1
    forever = [length == FOREVER for length, _ in lengths]
    is_known = all(known or length == FOREVER for length, known in lengths)
    if any(forever) if is_partial else all(forever):
        assert asked[0] == 1, "a worker with endless data asked again"
    elif is_known:
        assert asked[0] == 1


def test_those_whose_length_is_common_ask_once_and_go_their_way():
    found, asked = passes([(3, False)] * 2, is_partial=True, common=True)
    assert found == [[0, 1, 2]] * 2
    assert asked == [1, 1]


@pytest.mark.parametrize("many", [0, 1])
def test_functions_without_and_with_an_end_go_on_for_ever(many):
    def program(strategy, rank):
        def of(context):
            dataset = Dataset.range(2).batch(1)
            return dataset.repeat() if rank == many else dataset

        drawn = []
        for element in strategy.distribute_datasets_from_function(of):
            drawn.append(element.tolist())
            strategy._channel.collective.all_reduce([np.ones(1)])  # a step of all
            if len(drawn) == 5:
                return drawn
        return drawn

    found = ranks(2, program)
    assert found[many] == [[0], [1], [0], [1], [0]]
    assert found[1 - many] == [[0], [1], [], [], []]


@pytest.mark.parametrize("is_counted", [True, False])
def test_workers_go_on_together_behind_the_end_of_one(is_counted):
    """The whole pass: what a program draws that is not interrupted."""

    def program(strategy, rank, draws, state=None):
        def of(_):
            rows = Dataset.range(5 if rank == 0 else 2)
            return (rows if is_counted else rows.filter(lambda _: True)).batch(1)

        iterator = iter(strategy.distribute_datasets_from_function(of))
        if state is not None:
            iterator.set_state(state)
        drawn = [x.tolist() for x in itertools.islice(iterator, draws)]
        return drawn, iterator.get_state()

    whole = [drawn for drawn, _ in ranks(2, partial(program, draws=9))]
    assert whole == [[[0], [1], [2], [3], [4]], [[0], [1], [], [], []]]
    for before in range(6):
        (first, state), (other, _) = ranks(2, partial(program, draws=before))
        rest = ranks(2, partial(program, draws=9, state=state))
        assert [first + rest[0][0], other + rest[1][0]] == whole


def test_files_without_rows_repeated_are_no_silent_end(tmp_path):
    np.save(tmp_path / "0.npy", np.arange(6))
    np.save(tmp_path / "1.npy", np.arange(0))
    paths = [tmp_path / "0.npy", tmp_path / "1.npy"]
    dataset = Dataset.from_npy(paths).repeat().batch(2)

    def program(strategy, rank):
        iterator = iter(strategy.experimental_distribute_dataset(dataset))
        if rank == 1:
            with pytest.raises(ValueError, match="auto_shard_policy"):
                next(iterator)
            return None
        return next(iterator).tolist()

    assert ranks(2, program) == [[0], None]


def test_what_was_to_be_repeated_and_cannot_be_says_so():
    def program(strategy, rank):
        once = iter([np.zeros(1), np.ones(1)])
        made = strategy.distribute_datasets_from_function(
            lambda context: Dataset.from_generator(lambda: once).repeat()
        )
        iterator = iter(made)
        assert [float(next(iterator)[0]) for _ in range(2)] == [0.0, 1.0]
        with pytest.raises(ValueError, match=r"repeat\(\)"):
            next(iterator)

    ranks(2, program)
