"""A shuffle without a seed under what several workers deal out among themselves."""

from __future__ import annotations

import pickle
import warnings

import pytest

from zstrat.data import SHARD_HINT, AutoShardPolicy, Dataset, Options, Worker, allotted

DATA, HINT = AutoShardPolicy.DATA, AutoShardPolicy.HINT
FILE, OFF = AutoShardPolicy.FILE, AutoShardPolicy.OFF
WORDS = "`shuffle`"


def mixed(**how):
    return Dataset.range(100).shuffle(100, **how)


PLAIN = Dataset.range(100)


def two_of(dataset, policy):
    return allotted(dataset.with_options(Options(policy)), Worker(2, 1))


def hinted(dataset):
    return dataset.shard(SHARD_HINT, SHARD_HINT)


@pytest.mark.parametrize(
    "dataset",
    [
        mixed(),
        mixed(reshuffle_each_iteration=False),
        mixed().map(lambda x: x).shuffle(5, seed=1),
        mixed(seed=1).shuffle(5).repeat(),
        pickle.loads(pickle.dumps(mixed())),
        Dataset.zip(PLAIN, mixed()).map(max),
        PLAIN.concatenate(mixed()),
        mixed().cache(),
    ],
)
def test_it_is_warned_about_where_the_data_are_dealt_out(dataset):
    for policy in (AutoShardPolicy.AUTO, DATA):
        with pytest.warns(UserWarning, match=WORDS):
            two_of(dataset.batch(10), policy)
    with pytest.warns(UserWarning, match=WORDS):
        two_of(hinted(dataset).batch(10), HINT)


def test_a_map_in_any_order_is_warned_about_as_well():
    in_any_order = PLAIN.map(abs, num_parallel_calls=2, deterministic=False)
    with pytest.warns(UserWarning, match="`deterministic`"):
        two_of(in_any_order.batch(10), DATA)


def read(path):
    yield int(path)


FILES = Dataset.from_files(["0", "1"], read).shuffle(9).batch(1)


@pytest.mark.parametrize(
    ("dataset", "policy", "workers"),
    [
        (mixed(seed=0).batch(10), DATA, 2),
        (mixed(seed=0, reshuffle_each_iteration=False).batch(10), DATA, 2),
        (PLAIN.batch(10), DATA, 2),
        (Dataset.zip(PLAIN, mixed(seed=1)).batch(10), DATA, 2),
        (mixed().batch(10), DATA, 1),
        (mixed().batch(10), OFF, 2),
        (FILES, AutoShardPolicy.AUTO, 2),
        (FILES, FILE, 2),
        (hinted(PLAIN).shuffle(100).batch(10), HINT, 2),
        (hinted(mixed(seed=3)).shuffle(100).batch(10), HINT, 2),
    ],
)
def test_it_is_not_where_every_worker_may_have_its_own_order(dataset, policy, workers):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        allotted(dataset.with_options(Options(policy)), Worker(workers, 0))
