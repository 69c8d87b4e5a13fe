"""Daemons of this machine are forked from a process that has imported all they need."""

import json
import os
import signal
import subprocess
import sys

import psutil
import pytest

import zstrat as zs
from zstrat.errors import UnavailableError
from zstrat.launch import LocalCluster

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(sys.platform != "linux", reason="they are started one by one"),
]


def server_of(cluster):
    """The process that the daemons of a cluster are forked from."""
    (parent,) = {psutil.Process(cluster.pid(task)).ppid() for task in cluster.tasks}
    return psutil.Process(parent)


def test_the_next_cluster_has_the_same_one_and_other_libraries_another():
    with LocalCluster(1, 1) as cluster:
        server = server_of(cluster)
        assert server.ppid() == os.getpid()
        worker = psutil.Process(cluster.pid("worker:0"))
        assert worker.cmdline()[:3] == ["zstrat-worker", "--index", "0"]
        assert worker.name() == "zstrat-worker"
    later = {"NPROC": "2", "ZSTRAT_DRAIN": "3", "PYTEST_CURRENT_TEST": "the next"}
    with LocalCluster(1, 0, env=later) as cluster:
        assert server_of(cluster) == server
        with LocalCluster(1, 0, env={"MALLOC_ARENA_MAX": "2"}) as other:
            assert server_of(other) != server
            assert server_of(cluster) == server, "it stays as long as it has daemons"
    with LocalCluster(1, 0) as cluster:
        assert server_of(cluster) != server


def test_daemons_end_with_it_and_are_forked_from_another_then():
    # One of its own: clusters of other tests may have daemons of the common one.
    with LocalCluster(1, 1, env={"MALLOC_ARENA_MAX": "3"}) as cluster:
        killed = server_of(cluster)
        daemons = [psutil.Process(cluster.pid(task)) for task in cluster.tasks]
        killed.kill()
        gone, _ = psutil.wait_procs(daemons, timeout=100)
        assert len(gone) == len(daemons)
        assert not any(cluster.is_running(task) for task in cluster.tasks)
        for task in cluster.tasks:
            cluster.restart(task)
        assert server_of(cluster) != killed


def test_a_process_that_the_program_forks_may_end_and_may_stay():
    body = """
import json, os, signal, sys
from zstrat.launch import LocalCluster
cluster = LocalCluster(1, 0)
if (child := os.fork()) == 0:
    sys.exit()
assert os.waitpid(child, 0)[1] == 0
with LocalCluster(1, 0) as other:
    pass
assert cluster.is_running("ps:0")
if (child := os.fork()) == 0:
    signal.pause()
print(json.dumps([child, cluster.pid("ps:0")]), flush=True)
signal.pause()
"""
    with subprocess.Popen([sys.executable, "-c", body], stdout=subprocess.PIPE) as run:
        child, daemon = map(psutil.Process, json.loads(run.stdout.readline()))
        try:
            run.kill()
            psutil.wait_procs([daemon], timeout=100)
            assert not daemon.is_running()
            assert child.is_running(), "and it has the other end of all pipes"
        finally:
            child.send_signal(signal.SIGKILL)


def test_that_it_cannot_import_is_said(tmp_path):
    (tmp_path / "jax.py").write_text("raise ImportError('half installed')")
    words = r"ps:0.*\b1\b"
    with pytest.raises(UnavailableError, match=words):
        LocalCluster(1, 0, env={"PYTHONPATH": str(tmp_path)})


def test_daemons_draw_other_random_numbers():
    """As daemons that are started do, though they begin as copies of one process."""

    def numbers():
        import random
        import tempfile
        import uuid

        import numpy as np

        name = next(tempfile._get_candidate_names())
        drawn = {
            "numpy": np.random.bytes(4),
            "its sequence": np.random.get_bit_generator().seed_seq.entropy,
            "generator": np.random.default_rng().bytes(4),
            "python": random.randbytes(4),
            "uuid": uuid.uuid4().bytes,
            "name": int.from_bytes(name.encode()),
        }
        while True:
            yield {
                key: np.int32(
                    (value if isinstance(value, int) else hash(value)) % 2**31
                )
                for key, value in drawn.items()
            }

    drawn = []
    draw = zs.function(lambda iterator: next(iterator))
    for _ in range(3):
        with (
            zs.LocalCluster(1, 1) as cluster,
            zs.ParameterServerStrategy(cluster) as strategy,
        ):
            coordinator = zs.ClusterCoordinator(strategy)
            iterator = iter(coordinator.create_per_worker_dataset(numbers))
            value = coordinator.schedule(draw, args=(iterator,))
            drawn.append(value.fetch(timeout=60))
    for kind in drawn[0]:
        assert len({int(each[kind]) for each in drawn}) == len(drawn), kind
