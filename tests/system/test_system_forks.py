"""Processes that a program or a step forks: they end as others do, hold nothing of the
task that they come from, and are refused its strategy."""

import contextlib
import json
import os
import pickle

import numpy as np
import psutil
import pytest

import zstrat as zs


@contextlib.contextmanager
def drawing():
    """A cluster, its coordinator, and a function that draws the first element of a
    dataset on its worker."""
    with (
        zs.LocalCluster(1, 1, transport="tcp") as cluster,
        zs.ParameterServerStrategy(cluster) as strategy,
    ):
        coordinator = zs.ClusterCoordinator(strategy)
        draw = zs.function(lambda iterator: next(iterator))

        def drawn(dataset_fn):
            iterator = iter(coordinator.create_per_worker_dataset(dataset_fn))
            return coordinator.schedule(draw, args=(iterator,)).fetch(timeout=60)

        yield cluster, coordinator, drawn


def test_processes_that_a_dataset_function_forks():
    def with_pool():
        import math
        import multiprocessing

        with multiprocessing.get_context("fork").Pool(2) as pool:
            roots = pool.map(math.sqrt, [4.0, 9.0])
        while True:
            yield from map(np.float32, roots)

    def with_fork():
        import os
        import signal

        child, stays = os.fork(), 0
        if child:
            stays = os.fork()
        if not child or not stays:
            while True:
                signal.pause()
        os.kill(child, signal.SIGTERM)
        ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        while True:
            yield np.array([ended, stays])

    with drawing() as (cluster, coordinator, drawn):
        for _ in range(3):
            assert drawn(with_pool) == 2.0
        assert coordinator.metrics()["recoverable_worker_failures"] == 0

        ended, stays = map(int, drawn(with_fork))
        assert ended == -15
        child = psutil.Process(stays)
        assert child.name() != psutil.Process(cluster.pid("worker:0")).name()
        cluster.kill("worker:0")
        assert child.is_running()
        # At the port that it had.
        cluster.restart("worker:0")
        assert drawn(with_pool) == 2.0
        child.terminate()
        child.wait(100)


def _twice(number):
    return 2 * number


_twice.__module__ = "__main__"  # as that of a script


def test_a_function_of_the_script_that_a_pool_cannot_have_comes_with_advice():
    def with_pool():
        import multiprocessing

        with multiprocessing.get_context("fork").Pool(1) as pool:
            yield from map(np.float32, pool.map(_twice, [4.0, 9.0]))

    def with_threads():
        from multiprocessing.pool import ThreadPool

        with ThreadPool(1) as pool:
            yield from map(np.float32, pool.map(_twice, [4.0, 9.0]))

    with drawing() as (_, _, drawn):
        assert drawn(with_threads) == 8.0
        with pytest.raises(zs.errors.ClosureInputError) as raised:
            drawn(with_pool)
        cause = raised.value.original_exception
        assert isinstance(cause, pickle.PicklingError)
        assert any("ThreadPool" in note for note in cause.__notes__)


def test_a_strategy_is_refused_in_a_process_that_was_forked(daemons, programs):
    body = """
import os, sys, time, traceback, warnings
import numpy as np, zstrat as zs
warnings.simplefilter("ignore")  # of jax, about every fork

def forked(what):
    if (pid := os.fork()) == 0:
        try:
            what()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0

def connected():
    strategy = zs.ParameterServerStrategy()
    with strategy.scope():
        w = zs.Variable(np.float32(1), name="w")
    return strategy, w

def by_itself():
    strategy, w = connected()
    w.assign(2.0)
    assert w.numpy() == 2.0
    strategy.close()

forked(by_itself)
strategy, w = connected()
coordinator = zs.ClusterCoordinator(strategy)
step = zs.function(lambda: w.value())
value = coordinator.schedule(step)
assert value.fetch() == 1.0

def refused():
    began = time.monotonic()
    assert value.fetch() == 1.0  # it is here
    dataset = coordinator.create_per_worker_dataset(lambda: iter([1]))
    for call in (
        lambda: coordinator.schedule(step),
        coordinator.join,
        coordinator.done,
        coordinator.cancel,
        coordinator.metrics,
        lambda: iter(dataset),
        w.numpy,
        lambda: w.assign(3.0),
        lambda: zs.ClusterCoordinator(strategy),
        connected_scope,
    ):
        try:
            call()
        except zs.errors.ForkedError as error:
            assert "fork" in str(error) and "'spawn'" in str(error)
        else:
            raise AssertionError(call)
    coordinator.shutdown()
    strategy.close()

def connected_scope():
    with strategy.scope():
        zs.Variable(np.float32(1), name="of the child")

forked(refused)
assert coordinator.schedule(step).fetch() == 1.0
assert w.numpy() == 1.0
strategy.close()
"""
    config = json.dumps({"cluster": daemons.spec.as_dict()})
    env = {**os.environ, "TF_CONFIG": config}
    done = programs.run(["-c", body], env=env, timeout=100)
    assert done.returncode == 0


def test_a_group_is_refused_in_a_process_that_was_forked(programs):
    body = """
import os, warnings
import numpy as np, zstrat as zs
from zstrat.cluster import free_ports
warnings.simplefilter("ignore")  # of jax, about every fork

port = free_ports(1)[0]
here = {"worker": [f"127.0.0.1:{port}"]}
alone = zs.cluster_resolver.SimpleClusterResolver(
    zs.cluster_resolver.ClusterSpec(here), task_type="worker", task_id=0
)
with zs.collectives.Group(alone) as group:
    if (pid := os.fork()) == 0:
        try:
            group.all_reduce(np.ones(2))
        except zs.errors.ForkedError:
            group.close()
            os._exit(0)
        os._exit(1)
    assert os.waitpid(pid, 0)[1] == 0
    assert (group.all_reduce(np.ones(2)) == 1).all()
"""
    assert programs.run(["-c", body], timeout=100).returncode == 0
