"""Servers that are told to stop, alone or all at once, with second copies or without,
and programs that are killed: training goes on with what is there, counted."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import optax
import programs
import pytest
from killed_program import IDS, SLOTS, Counting
from system_worlds import left

import zstrat as zs
from zstrat.testing import full_disk

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("programs")]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    folder = tmp_path_factory.mktemp("state")
    folder.chmod(0o700)
    with zs.LocalCluster(2, 1, env={"ZSTRAT_STATE": str(folder)}) as cluster:
        cluster.state = folder
        yield cluster


@pytest.fixture(autouse=True)
def nothing_is_left():
    """Looked at behind all tests: what one has started again may stay for the next."""


def restarted(local, task):
    assert local.terminate(task) == 0
    local.restart(task)


def moved(steps):
    """What Adam makes of so many gradients of ones."""
    adam, value = optax.adam(0.1), np.zeros(3, "f4")
    state = adam.init(value)
    for _ in range(steps):
        updates, state = adam.update(np.ones(3, "f4"), state)
        value = optax.apply_updates(value, updates)
    return value


def _update_behind_each(values, variable):
    for value in values:
        value.fetch()
        variable.assign_add(1.0)


def test_planned_restarts_lose_nothing_and_double_nothing(local, caplog):
    with zs.ParameterServerStrategy(local.resolver) as strategy:
        work = Counting(strategy)
        with strategy.scope():
            mine = zs.Variable(0.0, name="mine")
        with ThreadPoolExecutor(1) as pool:
            for n, task in enumerate(("ps:0", "ps:1")):
                values = work.schedule(range(n * 150, n * 150 + 150))
                updating = pool.submit(_update_behind_each, values, mine)
                values[5].fetch()
                restarted(local, task)
                updating.result()
        for count in work.counts:
            assert count.numpy().sum() == count.numpy()[:300].sum() == 300
            assert count.numpy().max() == 1
        work.check_table()
        assert mine.numpy() == 300
    assert not list(local.state.iterdir())
    assert "ps/task:1 at" in caplog.text
    assert "is to be back within 60 s, with its data" in caplog.text


def test_a_server_that_is_killed_later_has_nothing(local):
    strategy = zs.ParameterServerStrategy(local.resolver)
    with strategy.scope():
        a, b = (zs.Variable(np.zeros(2**17, "f4"), name=n) for n in "ab")
    a.assign_add(np.ones(2**17))
    restarted(local, "ps:0")
    a.assign_add(np.ones(2**17))
    assert a.numpy()[0] == 2
    before = local.log("ps:0").count("takes over what the process before has left")
    assert before
    local.kill("ps:0")
    local.restart("ps:0")
    assert (
        local.log("ps:0").count("takes over what the process before has left") == before
    )
    with pytest.raises(zs.errors.PSUnavailableError, match="task:0"):
        a.numpy()
    with full_disk(2**18, local.pid("ps:1")):
        assert local.terminate("ps:1") == 0
    assert "lost with it: ResourceExhaustedError" in local.log("ps:1")
    local.restart("ps:1")
    with pytest.raises(zs.errors.PSUnavailableError):
        b.numpy()
    strategy.close()


def test_a_program_that_is_killed_goes_on_with_its_variables(local):
    script = Path(__file__).with_name("killed_program.py")
    spec = local.spec.as_dict()
    run = [str(script), json.dumps(spec), "40", "60"]
    assert programs.run(run).returncode == -9
    restarted(local, "ps:0")  # with nobody there
    strategy = zs.ParameterServerStrategy(local.resolver, resume="run")
    assert strategy.resumed
    work = Counting(strategy)
    before = [count.numpy().copy() for count in work.counts]
    for count in before:
        assert (count[:41] == 1).all(), "what was acknowledged is there"
        assert count.max() == 1, "what was under way has had its effect once at most"
        assert not count[100:].any()
    born = work.table.lookup(IDS[:, 0])[:, 0]
    assert (born[:41] == 1).all()
    assert born.max() == 1
    assert not born[100:].any()
    work.schedule(range(100, 130))
    work.coordinator.join()
    for count, old in zip(work.counts, before, strict=True):
        assert (count.numpy()[100:130] == 1).all()
        assert (count.numpy()[:100] == old[:100]).all()
    with pytest.raises(ZeroDivisionError), strategy:
        1 / 0  # noqa: B018
    local.kill("ps:1")
    local.restart("ps:1")
    with pytest.raises(zs.errors.PSUnavailableError, match=r"task:1.*/job:ps/task:0"):
        zs.ParameterServerStrategy(local.resolver, resume="run")
    with zs.ParameterServerStrategy(
        local.resolver, resume="run", on_ps_loss="restore"
    ) as strategy:
        assert not strategy.resumed
        work = Counting(strategy)
        work.schedule(range(SLOTS))
        work.coordinator.join()
        assert all((count.numpy() == 1).all() for count in work.counts)
        work.check_table()
    with zs.ParameterServerStrategy(local.resolver, resume="run") as strategy:
        assert not strategy.resumed  # the one before was closed


def test_stores_are_found_where_they_have_moved(local):
    options = {"resume": "moved", "stores_per_ps": 2}
    strategy = zs.ParameterServerStrategy(local.resolver, **options)
    work = Counting(strategy, learns=True)
    work.schedule(range(20))
    check(work, 20)
    strategy.parameter_servers.drain(local.spec.as_dict()["ps"][0])
    work.schedule(range(20, 30))
    check(work, 30)
    left(strategy)
    with pytest.raises(zs.errors.InvalidArgumentError, match="stores_per_ps"):
        zs.ParameterServerStrategy(local.resolver, resume="moved")
    restarted(local, "ps:1")  # it has all of them, and nobody is there
    for end in (40, 50):
        strategy = zs.ParameterServerStrategy(local.resolver, **options)
        assert strategy.resumed
        work = Counting(strategy, learns=True)
        check(work, end - 10)
        work.schedule(range(end - 10, end))
        check(work, end)
        assert np.allclose(work.w.numpy(), moved(end), atol=1e-5)
        strategy.parameter_servers.rebalance()  # the first is empty, up to then
        stores = work.coordinator.metrics()["stores"]
        assert sorted(each["process"] for each in stores) == sorted(
            2 * ["/job:ps/task:0", "/job:ps/task:1"]
        )
        left(strategy)
    with zs.ParameterServerStrategy(local.resolver, **options) as strategy:
        assert strategy.resumed


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
    work.check_table()


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
