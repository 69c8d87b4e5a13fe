"""A connection to a cluster whose tables are cut as each test wants them."""

import contextlib
import logging
import threading
from pathlib import Path

import numpy as np
import pytest

import zstrat as zs
import zstrat.cli

ROWS, DIM = 11, 3
PATIENCE = 120.0


class Partition:
    """A partitioner that each test gives its answer: a number of parts, or a list, or
    what a broken one would say."""

    def __init__(self):
        self.answer = 1

    def __call__(self, shape, dtype):
        if callable(self.answer):
            return self.answer(shape, dtype)
        if isinstance(self.answer, int):
            return [self.answer, *[1] * (len(shape) - 1)]
        return self.answer


class World:
    """``local`` is the cluster."""

    def __init__(self, local, strategy, partition):
        self.local, self.strategy, self._partition = local, strategy, partition
        self.coordinator = zs.ClusterCoordinator(strategy)

    def scope(self, answer):
        """The scope of the strategy, in which tables are cut so (`Partition`)."""
        self._partition.answer = answer
        return self.strategy.scope()

    def table(self, value, parts=2, name="table"):
        with self.scope(parts):
            return zs.Variable(np.asarray(value), name=name)


@contextlib.contextmanager
def connected(local):
    partition = Partition()
    with zs.ParameterServerStrategy(
        local.resolver, variable_partitioner=partition
    ) as strategy:
        yield World(local, strategy, partition)


def of_one_worker(local):
    """The resolver of a program that knows all servers of a cluster and one worker."""
    jobs = local.spec.as_dict()
    some = {"ps": jobs["ps"], "worker": jobs["worker"][:1]}
    return zs.cluster_resolver.SimpleClusterResolver(zs.ClusterSpec(some))


def numbered(rows, columns=DIM, first=0):
    count = rows * columns
    return np.arange(first, first + count, dtype="f4").reshape(rows, columns)


def names(folder):
    return sorted(path.name for path in Path(folder).iterdir())


def all_running(cluster):
    """The cluster, with what an earlier test has killed started again."""
    for task in cluster.tasks:
        if not cluster.is_running(task):
            cluster.restart(task)
    return cluster


def keygen(folder):
    """Makes the keys of a cluster as `zstrat keygen` does, and returns their folder."""
    zstrat.cli.main(["keygen", str(folder)], standalone_mode=False)
    return str(folder)


@zs.function(eager=True)
def _nothing():
    pass


def all_have_worked(coordinator):
    """The coordinator, when each worker has completed a step for it: a strategy waits
    for one worker alone, and who was started again may come after the first step."""
    while not all(w["completed"] for w in coordinator.metrics()["workers"].values()):
        for _ in range(32):
            coordinator.schedule(_nothing)
        coordinator.join()
    return coordinator


@contextlib.contextmanager
def when(words, act=None):
    """``act`` is called once, on the thread that logs these words; waits at the end of
    the block until it was."""
    heard = threading.Event()

    class Listener(logging.Handler):
        def emit(self, record):
            if words in record.getMessage() and not heard.is_set():
                if act is not None:
                    act()
                heard.set()

    listener, log = Listener(), logging.getLogger("zstrat.coordinator")
    log.addHandler(listener)
    try:
        yield
        assert heard.wait(PATIENCE), words
    finally:
        log.removeHandler(listener)


def left(strategy):
    """It ends as one that has failed."""
    with pytest.raises(ZeroDivisionError), strategy:
        1 / 0  # noqa: B018
