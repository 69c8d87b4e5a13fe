"""Workers that are killed or frozen while an error is raised: counted effects."""

import os
import signal
import threading

import numpy as np
import pytest
from system_worlds import all_have_worked, all_running

import zstrat as zs

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def cluster():
    env = {"ZSTRAT_LIVENESS": "60"}
    with zs.LocalCluster(num_ps=2, num_workers=2, env=env) as cluster:
        yield cluster


@pytest.fixture
def local(cluster, monkeypatch):
    """With all its tasks: what an earlier test has killed is started again."""
    # A stopped worker is soon lost to the program, and to no parameter server: it goes
    # on where it was when it wakes up.
    monkeypatch.setenv("ZSTRAT_LIVENESS", "4")
    return all_running(cluster)


@pytest.fixture
def coordinator(local):
    with zs.ParameterServerStrategy(local.resolver) as strategy:
        # Else a step may freeze the only worker, and be tried again on the next.
        yield all_have_worked(zs.ClusterCoordinator(strategy))


@pytest.fixture
def pipe(tmp_path):
    """Makes pipes by which steps and the test wait for each other."""

    def make(name):
        path = os.fspath(tmp_path / name)
        os.mkfifo(path)
        return path

    return make


def heard(path):
    with open(path) as file:
        return file.read()


@zs.function(eager=True)
def fail():
    raise ValueError("boom")


def test_a_step_that_was_applied_is_not_called_cancelled(coordinator, pipe):
    with coordinator.strategy.scope():
        v = zs.Variable(np.float32(0))
    told, never = pipe("told"), pipe("never")

    @zs.function(eager=True)
    def step():
        v.assign_add(1.0)
        v.value()
        with open(told, "w") as file:
            file.write(str(os.getpid()))
        heard(never)

    value = coordinator.schedule(step)
    pid = int(heard(told))
    failing = coordinator.schedule(fail)
    with pytest.raises(ValueError, match="boom"):
        failing.fetch()
    raised = []

    def join():
        with pytest.raises(ValueError, match="boom"):
            coordinator.join()
        raised.append(True)

    joining = threading.Thread(target=join)
    joining.start()
    while coordinator._core.engine.queue.phase.value != "cancelling":
        pass
    os.kill(pid, signal.SIGKILL)
    joining.join(60)
    assert raised
    assert v.numpy() == 1.0
    with pytest.raises(zs.ResultLostError, match="/job:ps/task:0"):
        value.fetch()


def test_when_the_error_was_raised_nothing_runs_any_more(local, coordinator, pipe):
    with coordinator.strategy.scope():
        v = zs.Variable(np.float32(0))
    told, thawed, done = pipe("told"), pipe("thawed"), pipe("done")

    @zs.function(eager=True)
    def step():
        with open(told, "w") as file:
            file.write(str(os.getpid()))
        heard(thawed)
        try:
            v.assign_add(1.0)
            v.value()
        finally:
            with open(done, "w") as file:
                file.write("done")

    value = coordinator.schedule(step)
    pid = int(heard(told))
    local.stop_task(next(task for task in local.tasks if local.pid(task) == pid))
    coordinator.schedule(fail)
    with pytest.raises(ValueError, match="boom"):
        coordinator.join()
    with pytest.raises(zs.CancelledError):
        value.fetch()
    os.kill(pid, signal.SIGCONT)
    with open(thawed, "w") as file:
        file.write("thawed")
    assert heard(done) == "done"
    assert v.numpy() == 0.0


def test_an_eager_step_that_branches_otherwise_is_told(coordinator, pipe):
    with coordinator.strategy.scope():
        first, second = (zs.Variable(np.float32(0), name=n) for n in ("a", "b"))
    assert first.device != second.device

    @zs.function(eager=True)
    def step():
        if zs.get_worker_context().attempt == 1:
            first.assign_add(1.0)
            first.value()
            os.kill(os.getpid(), signal.SIGKILL)
        second.assign_add(1.0)

    coordinator.schedule(step)
    with pytest.raises(zs.RetryDiffersError, match=r"ADD.*'a'"):
        coordinator.join()
    assert (first.numpy(), second.numpy()) == (1.0, 0.0)
