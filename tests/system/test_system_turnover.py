"""Real daemons that are added, move and are removed while a program trains."""

import contextlib
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from system_worlds import when

import zstrat as zs
from zstrat.config import Settings, Timeouts
from zstrat.testing import Relay, leak_check

pytestmark = pytest.mark.processes

SLOTS = 600
PATIENCE = 120.0


def write(path, cluster, **workers):
    lines = [f'{number} = "{address}"' for number, address in workers.items()]
    path.write_text(
        f'[cluster]\nps = ["{cluster.spec.task_address("ps", 0)}"]\n'
        "[cluster.worker]\n" + "\n".join(lines)
    )


def test_workers_change_under_a_program_that_counts_its_steps(tmp_path, caplog):
    caplog.set_level(logging.INFO, "zstrat.coordinator")
    file = tmp_path / "cluster.toml"
    settings = Settings(timeouts=Timeouts(resolve=0.1, liveness=PATIENCE))
    with contextlib.ExitStack() as stack:
        stack.enter_context(leak_check())
        cluster = stack.enter_context(zs.LocalCluster(1, 2, transport="tcp"))
        at = [cluster.spec.task_address("worker", index) for index in range(2)]
        write(file, cluster, **{"0": at[0]})
        strategy = stack.enter_context(
            zs.ParameterServerStrategy(
                zs.cluster_resolver.TomlClusterResolver(file), settings=settings
            )
        )
        coordinator = zs.ClusterCoordinator(strategy)
        with strategy.scope():
            counts = zs.Variable(np.zeros(SLOTS, "f4"))
        iterator = iter(coordinator.create_per_worker_dataset(batches))

        @zs.function
        def bump(batches, i):
            counts.assign_add(jax.nn.one_hot(i, SLOTS, dtype=jnp.float32))
            return next(batches)

        def bumps(first, last):
            return [
                coordinator.schedule(bump, args=(iterator, np.int32(i)))
                for i in range(first, last)
            ]

        values = bumps(0, 100)
        assert strategy.workers.add(at[1]) == 1
        values += bumps(100, 200)
        coordinator.join()
        told = coordinator.metrics()["workers"]
        assert told["/job:worker/task:1"]["completed"] > 0

        values += bumps(200, 300)
        relay = stack.enter_context(Relay(at[0]))
        with when(f"/job:worker/task:0 moves from {at[0]} to {relay.address}"):
            cluster.kill("worker:0")
            write(file, cluster, **{"0": relay.address})
        cluster.restart("worker:0")
        values += bumps(300, 400)
        strategy.workers.remove(at[1])
        assert strategy.workers.addresses == {0: relay.address}
        values += bumps(400, SLOTS)
        coordinator.join()

        assert np.array_equal(counts.numpy(), np.ones(SLOTS, "f4"))
        ran = {value.run.worker for value in values[400:]}
        assert ran == {"/job:worker/task:0"}
        metrics = coordinator.metrics()
        assert (metrics["workers_added"], metrics["workers_moved"]) == (1, 1)
        assert metrics["workers_removed"] == 1
        assert metrics["resolver_questions"] > 0
        strategy.workers.add(at[1])
        strategy.workers.remove(at[1])
    assert "Traceback" not in caplog.text


def batches():
    return (np.float32(n) for n in range(10**6))
