"""Servers with second copies that are told to stop: one alone, and all at once."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from killed_program import Counting
from system_worlds import all_running

import zstrat as zs

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    folder = tmp_path_factory.mktemp("state")
    folder.chmod(0o700)
    with zs.LocalCluster(2, 1, env={"ZSTRAT_STATE": str(folder)}) as cluster:
        yield cluster


@pytest.fixture
def local(cluster):
    return all_running(cluster)


@pytest.fixture(autouse=True)
def nothing_is_left():
    """Looked at behind all tests: what one has started again may stay for the next."""


def stopped(local, *tasks):
    """All at once."""
    with ThreadPoolExecutor(len(tasks)) as pool:
        assert set(pool.map(local.terminate, tasks)) == {0}


def check(work, count):
    """Each step has had its effect once on both, and no other has."""
    work.coordinator.join()
    for each in work.counts:
        assert each.numpy()[:count].min() == each.numpy().max() == 1
        assert not each.numpy()[count:].any()


def test_nothing_is_lost_whoever_is_stopped(local):
    with zs.ParameterServerStrategy(local.resolver, replicas=1) as strategy:
        work = Counting(strategy)
        with strategy.scope():
            mine = zs.Variable(0.0, name="mine")
        values = work.schedule(range(100))
        values[5].fetch()
        mine.assign_add(1.0)
        stopped(local, "ps:0", "ps:1")
        local.restart("ps:1")
        local.restart("ps:0")
        values = work.schedule(range(100, 120))
        mine.assign_add(1.0)
        check(work, 120)
        assert mine.numpy() == 2
        work.schedule(range(120, 160))[0].fetch()
        stopped(local, "ps:0")
        check(work, 160)
        work.schedule(range(160, 180))
        local.restart("ps:0")
        check(work, 180)
        # By now one process serves both, and what the other one had left is gone.
        work.schedule(range(180, 240))
        stopped(local, "ps:0", "ps:1")
        local.restart("ps:0")
        local.restart("ps:1")
        check(work, 240)
        mine.assign_add(1.0)
        assert mine.numpy() == 3


def test_a_server_leaves_all_its_stores(local):
    with zs.ParameterServerStrategy(local.resolver, stores_per_ps=2) as strategy:
        work = Counting(strategy)
        work.schedule(range(60))[5].fetch()
        stopped(local, "ps:0")
        local.restart("ps:0")
        work.schedule(range(60, 80))
        check(work, 80)
        assert len(set(strategy.session.cluster.ps)) == 4
