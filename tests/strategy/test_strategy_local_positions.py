"""Iterators of distributed datasets in checkpoints, on several devices and ranks."""

from __future__ import annotations

import itertools

import jax.numpy as jnp
import numpy as np
import pytest
from ranks import ranks

import zstrat as zs
from zstrat.data import Dataset

ROWS = 22


def mixed():
    """Its last batch is an uneven one."""
    return Dataset.range(ROWS).shuffle(ROWS).batch(8).repeat(2)


def drawn(strategy, iterator, count=9):
    return [
        [np.asarray(part).tolist() for part in strategy.experimental_local_results(x)]
        for x in itertools.islice(iterator, count)
    ]


@pytest.mark.parametrize(
    "make",
    [
        lambda: zs.MirroredStrategy([f"CPU:{n}" for n in range(3)]),
        lambda: zs.MirroredStrategy(["CPU:0", "CPU:1"]),
        lambda: zs.TPUStrategy(),
        lambda: zs.OneDeviceStrategy("CPU:1"),
        lambda: zs.CentralStorageStrategy(),
    ],
    ids=["mirrored 3", "mirrored 2", "tpu", "one device", "central storage"],
)
@pytest.mark.parametrize("by_function", [False, True])
def test_the_steps_behind_a_restore_are_those_of_one_run(make, by_function, tmp_path):
    strategy = make()

    @zs.function
    def step(total, iterator):
        sums = strategy.run(lambda x: jnp.sum(x), args=(next(iterator),))
        total.assign_add(strategy.reduce("sum", sums, None))

    def training():
        dataset = mixed()
        if strategy.num_replicas_in_sync == 8:  # whose shapes are static
            dataset = Dataset.range(ROWS).shuffle(ROWS).batch(8, drop_remainder=True)
        if by_function:
            made = strategy.distribute_datasets_from_function(lambda _: dataset)
        else:
            made = strategy.experimental_distribute_dataset(dataset)
        with strategy.scope():
            total = zs.Variable(np.int32(0))
        iterator = iter(made)
        return total, iterator, zs.Checkpoint(total=total, iterator=iterator)

    total, iterator, checkpoint = training()
    is_one = by_function and strategy.num_replicas_in_sync == 8
    if not is_one:  # eight elements are one step, and there are two
        step(total, iterator)
    path = checkpoint.save(tmp_path / "a")
    here, rest = int(total.numpy()), drawn(strategy, iterator)
    iterator.close()
    total, iterator, checkpoint = training()
    drawn(strategy, iterator, 1)
    checkpoint.restore(path).assert_consumed()
    assert int(total.numpy()) == here
    assert drawn(strategy, iterator) == rest
    iterator.close()


def test_one_file_serves_all_workers(tmp_path):
    def program(strategy, rank, path=None):
        dataset = Dataset.range(ROWS).shuffle(ROWS, seed=3).batch(4).repeat(2)
        distributed = strategy.experimental_distribute_dataset(dataset)
        iterator = iter(distributed)
        checkpoint = zs.Checkpoint(iterator=iterator)
        if path is None:
            drawn(strategy, iterator, 7)
            path = checkpoint.write(tmp_path / f"of {rank}")
        else:
            checkpoint.read(path).assert_consumed()
        return path, drawn(strategy, iterator, 20), drawn(strategy, distributed, 3)

    (path, *first), (_, *second) = ranks(2, program)
    found = ranks(2, lambda strategy, rank: program(strategy, rank, path))
    assert [each[1:] for each in found] == [tuple(first), tuple(second)]
    assert len(first[0]) == 5
