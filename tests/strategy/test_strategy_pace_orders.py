"""Workers that shard a shuffled dataset are at the same pass of it, or get an error."""

import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ranks import ranks
from tiers import examples

from zstrat.data import SHARD_HINT, AutoShardPolicy, Dataset, Elements, Options
from zstrat.strategy.input import PassLength, SynchronizedPass

ROWS = 12
WORDS = r"reform\(\)"


class Barrier:
    """Exchanges numbers of workers that are threads, for one question."""

    def __init__(self, size):
        self.barrier = threading.Barrier(size, timeout=100)
        self.given = []

    def __call__(self, numbers):
        assert all(-(2**31) < number < 2**31 for number in numbers)
        self.given.append(numbers)
        self.barrier.wait()
        return [max(column) for column in zip(*self.given, strict=True)]


@examples(60)
@given(
    st.lists(st.sampled_from(["", "1.1", "1.2", "2.1, 1.1"]), min_size=1, max_size=3)
)
def test_all_get_an_error_if_two_that_shard_are_not_at_the_same_pass(orders):
    barrier, found = Barrier(len(orders)), [None] * len(orders)

    def one(worker, order):
        paced = SynchronizedPass(
            Elements([5]),
            barrier,
            length=PassLength(1),
            empty=lambda: -1,
            is_partial=True,
            order=order,
        )
        try:
            found[worker] = list(paced)
        except ValueError as error:
            found[worker] = str(error)

    threads = [threading.Thread(target=one, args=each) for each in enumerate(orders)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    if len(set(orders) - {""}) > 1:
        for order, said in zip(orders, found, strict=True):
            assert "same pass of its shuffle" in said
            assert f"begins {order} (dist" in said if order else "begins" not in said
    else:
        assert found == [[5]] * len(orders)


def sharded_rows(policy=AutoShardPolicy.DATA):
    """A dataset that is in another order in each pass; batches of all rows."""
    dataset = Dataset.range(ROWS).shuffle(ROWS, seed=1)
    if policy is AutoShardPolicy.HINT:
        dataset = dataset.shard(SHARD_HINT, SHARD_HINT)
    options = Options()
    options.experimental_distribute.auto_shard_policy = policy
    return dataset.batch(ROWS).with_options(options)


def rows(distributed):
    return [int(row) for element in distributed for row in np.ravel(element)]


def restarted(strategy, rank, make):
    """As after reform(): worker 1 has begun no pass, and the other one has."""
    distributed = strategy.experimental_distribute_dataset(make())
    if rank == 0:
        iter(distributed).close()
    return distributed


@pytest.mark.parametrize("policy", [AutoShardPolicy.DATA, AutoShardPolicy.HINT])
def test_a_restarted_one_is_at_another_pass_until_the_dataset_is_made_again(policy):
    def program(strategy, rank):
        distributed = restarted(strategy, rank, lambda: sharded_rows(policy))
        with pytest.raises(ValueError, match=WORDS):
            next(iter(distributed))
        again = strategy.experimental_distribute_dataset(sharded_rows(policy))
        return [rows(again) for _ in range(2)]

    one, other = ranks(2, program)
    for mine, others in zip(one, other, strict=True):
        assert sorted(mine + others) == list(range(ROWS))
    assert one[0] != one[1]


def test_distributed_again_it_is_at_another_pass_too():
    def program(strategy, rank):
        dataset = sharded_rows()
        for _ in range(2 - rank):
            distributed = strategy.experimental_distribute_dataset(dataset)
        with pytest.raises(ValueError, match=WORDS):
            next(iter(distributed))

    ranks(2, program)


def of_each(strategy, rank):
    """After the hint each worker shuffles its own rows."""
    dataset = Dataset.range(ROWS).shard(SHARD_HINT, SHARD_HINT).shuffle(ROWS, seed=rank)
    options = Options()
    options.experimental_distribute.auto_shard_policy = AutoShardPolicy.HINT
    dataset = dataset.batch(ROWS).with_options(options)
    return restarted(strategy, rank, lambda: dataset)


def of_one_order(strategy, rank):
    dataset = Dataset.range(ROWS).shuffle(ROWS, 1, reshuffle_each_iteration=False)
    return restarted(strategy, rank, lambda: dataset.batch(ROWS))


def of_a_function(strategy, rank):
    def dataset_fn(context):
        mine = Dataset.range(ROWS).shard(2, context.input_pipeline_id)
        return mine.shuffle(ROWS, seed=rank).batch(ROWS)

    distributed = strategy.distribute_datasets_from_function(dataset_fn)
    if rank == 0:
        iter(distributed).close()
    return distributed


@pytest.mark.parametrize("begun", [of_each, of_one_order, of_a_function])
def test_orders_that_nobody_shares_need_not_be_at_the_same_pass(begun):
    one, other = ranks(2, lambda strategy, rank: rows(begun(strategy, rank)))
    assert sorted(one + other) == list(range(ROWS))


def test_nor_need_files_that_each_reads_alone(tmp_path):
    paths = [tmp_path / "0.npy", tmp_path / "1.npy"]
    np.save(paths[0], np.arange(6))
    np.save(paths[1], np.arange(6, ROWS))

    def make():
        return Dataset.from_npy(paths).shuffle(ROWS, seed=1).batch(ROWS)

    one, other = ranks(2, lambda *each: rows(restarted(*each, make)))
    assert sorted(one + other) == list(range(ROWS))
