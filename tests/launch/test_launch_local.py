"""Clusters of real daemons: started, looked at, hurt, ended, never left behind."""

import itertools
import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import programs
import pytest
from launch_ends import wait_gone
from programs import Program

import zstrat as zs
from zstrat.config import Settings, Timeouts
from zstrat.errors import ClosedError, DeadlineExceededError, UnavailableError
from zstrat.launch import LocalCluster, observe
from zstrat.transport import run

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("programs")]


def look(cluster, timeout=30):
    return run(observe(cluster.spec, Settings(), timeout))


def test_a_cluster_without_workers_killed_and_restarted_at_the_same_address():
    with LocalCluster(1, 0, transport="tcp") as cluster:
        assert cluster.tasks == ("ps:0",)
        assert cluster.spec.jobs == ["ps"]
        (before,), spec = look(cluster), cluster.spec
        assert not before.problem
        cluster.kill("ps:0")
        assert not cluster.is_running("ps:0")
        cluster.restart("ps:0")
        (after,) = look(cluster)
        assert cluster.spec == spec
        incarnations = [each.number("task", "incarnation") for each in (before, after)]
        assert incarnations[0] != incarnations[1]


def found(cluster, folder, workers):
    """The environment of each worker, as what runs there finds it."""

    def write(context):
        place = folder / f"worker-{context.input_pipeline_id}.json"
        place.with_suffix(".part").write_text(json.dumps(dict(os.environ)))
        place.with_suffix(".part").rename(place)
        return itertools.repeat(np.float32(0))

    files = []
    with zs.ParameterServerStrategy(cluster) as strategy:
        coordinator = zs.ClusterCoordinator(strategy)
        iterator = iter(coordinator.create_per_worker_dataset(write))
        draw = zs.function(lambda iterator: next(iterator))
        while len(files) < workers:  # one may join later than the other
            for _ in range(workers):
                coordinator.schedule(draw, args=(iterator,))
            coordinator.join()
            files = sorted(folder.glob("worker-*.json"))
    return [json.loads(file.read_text()) for file in files]


@pytest.mark.parametrize(
    ("transport", "cores", "each"), [("tcp", range(7), "3"), ("ipc", [5], "1")]
)
def test_a_cluster(transport, cores, each, monkeypatch, caplog, tmp_path):
    """Its workers share the cores and GPUs, unless they are told otherwise."""
    monkeypatch.delenv("NPROC", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    monkeypatch.setenv("JAX_PLATFORMS", "")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(cores))
    caplog.set_level("INFO", "zstrat.launch")
    with LocalCluster(1, 2, transport=transport) as cluster:
        assert cluster.tasks == ("ps:0", "worker:0", "worker:1")
        folder = cluster.directory
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        spec = cluster.resolver.cluster_spec()
        assert spec == cluster.spec
        assert (spec.num_tasks("ps"), spec.num_tasks("worker")) == (1, 2)
        seen = look(cluster)
        assert [sight.task for sight in seen] == list(cluster.tasks)
        assert not [sight.problem for sight in seen if sight.problem]
        pids = [int(sight.number("task", "pid")) for sight in seen]
        assert pids == [cluster.pid(task) for task in cluster.tasks]
        addresses = [sight.text("task", "address") for sight in seen]
        assert addresses == [sight.address for sight in seen]
        environments = found(cluster, tmp_path, 2)
        assert [env["NPROC"] for env in environments] == [each, each]
        gpus = [env["CUDA_VISIBLE_DEVICES"] for env in environments]
        assert gpus == ["0,1", "2,3"]
        assert "task 1 of 2 here uses GPU 2, 3" in caplog.text
        assert "ready at" in cluster.log("worker:1")
        assert "running" in repr(cluster)
    assert "stopped" in repr(cluster)
    with pytest.raises(ClosedError, match="LocalCluster"):
        _ = cluster.resolver  # a strategy would look for its daemons for a minute
    assert not folder.exists()
    cluster.stop()
    assert not any(cluster.is_running(task) for task in cluster.tasks)


def test_frozen_thawed_and_drained_by_who_says_where_its_logs_are(tmp_path):
    folder, env = tmp_path / "run", {"NPROC": "9", "PYTHONPATH": "given"}
    with LocalCluster(1, 1, transport="tcp", directory=folder, env=env) as cluster:
        (environment,) = found(cluster, tmp_path, 1)
        assert environment["NPROC"] == "9"
        path = f"{os.path.abspath(sys.path[0])}:given"
        assert environment["PYTHONPATH"] == path
        cluster.stop_task("worker:0")
        frozen = look(cluster, timeout=5)
        assert [bool(sight.problem) for sight in frozen] == [False, True]
        assert "worker:0" in frozen[1].problem
        cluster.continue_task("worker:0")
        assert not look(cluster)[1].problem
        with pytest.raises(ValueError, match="'ps:7'"):
            cluster.kill("ps:7")
        assert cluster.terminate("worker:0") == 0
        assert not cluster.is_running("worker:0")
        assert cluster.log("worker:0").rstrip().endswith("ended")
    assert "ended" in (folder / "worker-0.log").read_text()
    assert "ended" in (folder / "ps-0.log").read_text()


def test_a_daemon_that_cannot_start():
    with pytest.raises(UnavailableError) as caught:
        LocalCluster(1, 1, env={"ZSTRAT_LIVENESS": "never"})
    words = str(caught.value)
    assert "exit code 2 before it was ready" in words
    assert "ZSTRAT_LIVENESS='never'" in words  # the end of its log
    (path,) = re.findall(r"last lines of (/.+-0\.log):", words)
    assert "never" in Path(path).read_text(), "the log that it names is there"


def test_a_daemon_that_is_no_program(monkeypatch):
    """What fails on the thread that starts children is raised by who asked for it."""
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(OSError, match="/nowhere/python"):
        LocalCluster(1, 0)


def test_daemons_that_are_not_ready_in_time():
    hasty = Settings(timeouts=Timeouts(connect=0.001))
    with pytest.raises(DeadlineExceededError, match="not ready in time"):
        LocalCluster(1, 1, settings=hasty)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"num_ps": 0}, ValueError, "num_ps=0"),
        ({"worker_devices": 0}, ValueError, "worker_devices=0"),
        ({"num_workers": -1}, ValueError, r"num_workers=-1.*\b0\b"),
        ({"transport": "pigeon"}, ValueError, "transport='pigeon'"),
        ({"logs": "nowhere"}, ValueError, "logs='nowhere'"),
        ({"directory": ""}, ValueError, "directory"),
        ({"num_ps": True}, TypeError, "num_ps=True"),
        ({"num_workers": "2"}, TypeError, "num_workers='2'"),
        ({"env": {"A": 1}}, TypeError, "'A': 1"),
        ({"env": {"A": None}}, TypeError, "'A': None"),
        ({"env": {1: "a"}}, TypeError, "1: 'a'"),
    ],
    ids=str,
)
def test_arguments_that_cannot_be(arguments, error, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=words):
        LocalCluster(**arguments)
    assert not list(tmp_path.iterdir())


def test_a_count_of_numpy_is_a_number():
    with LocalCluster(np.int64(1), np.int32(0), coordinates=False) as cluster:
        assert cluster.resolver.cluster_spec().num_tasks("ps") == 1


def test_a_closed_cluster_starts_and_kills_nothing(tmp_path):
    """A task that was started again ran on until the program ended."""
    cluster = LocalCluster(1, 0, coordinates=False, directory=tmp_path)
    cluster.stop()
    for call in (cluster.restart, cluster.kill, cluster.pid):
        with pytest.raises(ClosedError, match="is closed"):
            call("ps:0")
    assert not cluster.is_running("ps:0")


@pytest.mark.parametrize("has_state", [False, True])
def test_a_server_that_saves_its_state_gets_the_time_for_it(has_state, tmp_path):
    """It was killed after the drain, and all that it held was lost."""
    env = {"ZSTRAT_STATE": str(tmp_path)} if has_state else {}
    with LocalCluster(1, 0, env=env, coordinates=False) as cluster:
        child, left = cluster._tasks["ps:0"], []
        wait = child.wait

        def watched(deadline):
            left.append(deadline - time.monotonic())
            return wait(deadline)

        child.wait = watched
        cluster.terminate("ps:0")
    times = cluster.settings.timeouts
    assert [seconds > times.handover for seconds in left] == [has_state] * 2


def test_a_folder_too_deep_for_sockets(tmp_path):
    with pytest.raises(ValueError, match="transport="):
        LocalCluster(transport="ipc", directory=tmp_path / ("x" * 120))


@pytest.mark.parametrize("transport", ["pigeon", "ipc"])
def test_what_cannot_be_leaves_no_folder(transport, tmp_path, monkeypatch):
    deep = tmp_path / ("x" * 120)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with pytest.raises(ValueError, match=r"transport=|path is too long"):
        LocalCluster(transport=transport)
    assert not list(deep.iterdir())


def program(body):
    """A program that calls ``tell(cluster)``: it prints the ids of the daemons."""
    head = """
import json, signal, sys, threading
from zstrat.launch import LocalCluster

def tell(cluster):
    print(json.dumps([cluster.pid(task) for task in cluster.tasks]), flush=True)
"""
    return Program(
        ["-c", head + body],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def pids(process):
    line = process.stdout.readline()
    assert line, process.stderr.read()
    return json.loads(line)


def test_no_orphans_of_a_program_that_is_killed():
    process = program(
        """
cluster = LocalCluster(2, 0)
cluster.stop_task("ps:1")
tell(cluster)
print(cluster.directory, flush=True)
signal.pause()
"""
    )
    daemons = pids(process)
    folder = process.stdout.readline().strip()
    process.kill()
    process.communicate()
    assert all(wait_gone(pid) for pid in daemons)
    shutil.rmtree(folder)  # nobody else is left who would


def test_no_orphans_of_a_program_that_is_interrupted():
    process = program(
        "with LocalCluster(1, 0) as cluster: tell(cluster), signal.pause()"
    )
    daemons = pids(process)
    process.send_signal(signal.SIGINT)
    process.communicate()
    assert all(wait_gone(pid) for pid in daemons)


def test_daemons_of_a_program_that_forgets_them_are_drained():
    process = program("cluster = LocalCluster(1, 0); tell(cluster)")
    daemons = pids(process)
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, "")
    assert all(wait_gone(pid, 0) for pid in daemons)


def test_daemons_outlive_the_thread_that_asked_for_them():
    """The kernel's parent-death signal goes by threads."""
    process = program(
        """
made = []
thread = threading.Thread(target=lambda: made.append(LocalCluster(1, 0)))
thread.start()
thread.join()
cluster = made[0]
tell(cluster)
sys.stdin.read(0)
print(all(cluster.is_running(task) for task in cluster.tasks), flush=True)
cluster.stop()
"""
    )
    daemons = pids(process)
    assert process.stdout.readline() == "True\n"
    process.communicate(timeout=60)
    assert all(wait_gone(pid) for pid in daemons)


def test_stopping_ends_who_is_frozen_or_dead(caplog):
    impatient = Settings(timeouts=Timeouts(drain=0.2))
    cluster = LocalCluster(2, 0, settings=impatient)
    cluster.stop_task("ps:0")
    os.kill(cluster.pid("ps:1"), signal.SIGKILL)
    pids = [cluster.pid(task) for task in cluster.tasks]
    cluster.stop()
    assert all(wait_gone(pid, 0) for pid in pids)
    # Whom others have killed is looked into afterwards; nobody else is.
    (line,) = [r.getMessage() for r in caplog.records if r.name == "zstrat.launch"]
    assert line.startswith("ps:1 was killed by SIGKILL; its log is kept: /")
    kept = Path(line.rpartition(" ")[2])
    assert stat.S_IMODE(kept.parent.stat().st_mode) == 0o700
    assert [path.name for path in kept.parent.iterdir()] == ["ps-1.log"]
    assert not cluster.directory.exists()


_COORDINATES = """
import jax
import zstrat as zs
with zs.LocalCluster(1, 1) as local, zs.ParameterServerStrategy(local) as strategy:
    coordinator = zs.ClusterCoordinator(strategy)
    with strategy.scope():
        total = zs.Variable(1.0)
    @zs.function
    def step():
        def replica():
            total.assign_add(2.0)
            return total.value()
        return strategy.run(replica)
    assert float(coordinator.schedule(step).fetch()) == 3.0
    jax.config.update("jax_num_cpu_devices", 3)  # refused if it has looked for some
print(jax.device_count())
"""


def test_a_program_that_coordinates_looks_for_no_device():
    """On a machine with accelerators it would take them from the workers beside it."""
    done = programs.run(["-c", _COORDINATES], text=True, capture_output=True)
    assert done.stdout.split() == ["3"], done.stderr
