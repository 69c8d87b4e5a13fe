"""A real daemon that reports itself is taken in while a program trains."""

import os
import socket
import subprocess

import jax.numpy as jnp
import numpy as np
import pytest
from programs import Program

import zstrat as zs

pytestmark = [
    pytest.mark.processes,
    pytest.mark.timeout(400),
    pytest.mark.usefixtures("programs"),
]


def late_worker(server):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
    command = ["-m", "zstrat.daemons.worker", "--join", server]
    started = Program(
        [*command, "--bind", address],
        env={**os.environ, "ZSTRAT_CONNECT_TIMEOUT": "300"},  # where cores are busy
        stderr=subprocess.PIPE,
        text=True,
    )
    return started, address


def test_a_daemon_that_reports_itself_gets_closures():
    with zs.LocalCluster(1, 1, transport="tcp") as cluster:
        server = cluster.spec.task_address("ps", 0)
        first = cluster.spec.task_address("worker", 0)
        with zs.ParameterServerStrategy(cluster.resolver) as strategy:
            coordinator = zs.ClusterCoordinator(strategy)
            with strategy.scope():
                count = zs.Variable(np.float32(0))

            @zs.function
            def step():
                count.assign_add(jnp.float32(1))

            refused, _ = late_worker(server)
            words = refused.communicate(timeout=300)[1]
            assert refused.returncode == 2
            assert "strategy.workers.accept_joining()" in words

            strategy.workers.accept_joining()
            strategy.workers.remove(first)
            values = [coordinator.schedule(step) for _ in range(10)]
            late, address = late_worker(server)
            coordinator.join()
            assert strategy.workers.addresses == {1: address}
            assert {value.run.worker for value in values} == {"/job:worker/task:1"}
            assert count.numpy() == 10

            strategy.workers.remove(address)
            words = late.communicate(timeout=300)[1]
            assert late.returncode == 2
            assert "the program removed worker 1 at" in words

            other, _ = late_worker(server)
            values = [coordinator.schedule(step) for _ in range(10)]
            coordinator.join()
            assert {value.run.worker for value in values} == {"/job:worker/task:2"}

        workers = {0: first, 2: "127.0.0.1:9"}
        spec = zs.ClusterSpec({"ps": [server], "worker": workers})
        resolver = zs.cluster_resolver.SimpleClusterResolver(spec)
        with zs.ParameterServerStrategy(resolver) as strategy:
            strategy.workers.accept_joining()
            words = other.communicate(timeout=300)[1]
            assert other.returncode == 75, "started again, it gets another number"
            assert "worker 2 of the cluster is at 127.0.0.1:9" in words
