"""Parameter servers are added, drained and killed while a program counts its steps."""

import asyncio
import contextlib
import logging
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from system_worlds import when

import zstrat as zs
from zstrat.config import Settings, Timeouts
from zstrat.errors import (
    InvalidArgumentError,
    NotFoundError,
    PSUnavailableError,
    StaleSessionError,
)
from zstrat.testing import leak_check
from zstrat.transport import Link, hello, run
from zstrat.wire import CloseSession

pytestmark = pytest.mark.processes

SLOTS = 600
LARGE = 2**20 + 1
"""Elements of a variable whose changes are made on the compute thread: above 4 MiB."""
ONES = np.ones(LARGE, "f4")
SETTINGS = Settings(timeouts=Timeouts(reconnect=0.5))


class Training:
    """Steps that leave a trace of each run in each store, and own updates."""

    def __init__(self, strategy):
        self.coordinator = zs.ClusterCoordinator(strategy)
        with strategy.scope():
            counts = [zs.Variable(np.zeros(SLOTS, "f4"), name=name) for name in "ab"]
            rows = zs.Variable(np.ones((SLOTS, 2), "f4"), name="rows")
            adagrad = zs.Optimizer(optax.adagrad(0.5, initial_accumulator_value=0.0))
            self.own = zs.Variable(0.0, name="own")
            self.large = zs.Variable(np.zeros(LARGE, "f4"), name="large")
        self.counts, self.rows, self.step, self.owns = counts, rows, 0, 0
        self.checkpoint = zs.Checkpoint(
            counts=counts, rows=rows, adagrad=adagrad, own=self.own, large=self.large
        )

        @zs.function
        def bump(i):
            for count in counts:
                count.assign_add(jax.nn.one_hot(i, SLOTS, dtype=jnp.float32))
            looked_up = zs.grad(lambda t: jnp.sum(zs.embedding_lookup(t, i[None])))
            adagrad.apply_gradients([(looked_up(rows), rows)])
            return i

        self._bump = bump

    def during(self, work, steps=10):
        """Trains until the work has ended, and some steps more; returns its outcome."""
        with ThreadPoolExecutor(1) as pool:
            working = pool.submit(work)
            while not working.done():
                self.train(steps)
            self.train(steps)
            return working

    def train(self, count):
        for i in range(self.step, self.step + count):
            self.coordinator.schedule(self._bump, args=(np.int32(i % SLOTS),))
        self.own.assign_add(1.0)
        self.step, self.owns = self.step + count, self.owns + 1
        if self.owns % 4 == 1:
            self.large.assign_add(ONES)
        self.coordinator.join()

    def check(self):
        """Each step has had its effect once."""
        runs, rest = divmod(self.step, SLOTS)
        want = (runs + (np.arange(SLOTS) < rest)).astype("f4")
        for count in self.counts:
            np.testing.assert_array_equal(count, want)
        # The n-th gradient of 1 moves a row by 0.5 / sqrt(n).
        moved = 1.0 - 0.5 * np.cumsum(np.r_[0.0, 1 / np.sqrt(np.arange(1, 2e4))])
        np.testing.assert_allclose(
            self.rows, np.tile(moved[want.astype(int)][:, None], 2), rtol=1e-4
        )
        assert float(self.own) == self.owns
        np.testing.assert_array_equal(
            self.large, np.full(LARGE, (self.owns + 3) // 4, "f4")
        )


def test_parameter_servers_come_and_go_and_no_step_is_lost_or_doubled(tmp_path, caplog):
    caplog.set_level(logging.INFO, "zstrat.coordinator")
    with contextlib.ExitStack() as stack:
        stack.enter_context(leak_check())
        cluster = stack.enter_context(zs.LocalCluster(3, 1, transport="tcp"))
        at = [cluster.spec.task_address("ps", index) for index in range(3)]
        worker = cluster.spec.task_address("worker", 0)
        spec = zs.ClusterSpec({"ps": at[:2], "worker": [worker]})
        strategy = stack.enter_context(
            zs.ParameterServerStrategy(
                zs.cluster_resolver.SimpleClusterResolver(spec),
                on_ps_loss="restore",
                settings=SETTINGS,
            )
        )
        training, servers = Training(strategy), strategy.parameter_servers
        training.train(20)
        with pytest.raises(InvalidArgumentError, match="worker 0"):
            servers.add(worker)
        with pytest.raises(NotFoundError, match=r"strategy\.workers\.remove"):
            servers.drain(worker)

        # The newcomer is killed when the first store is on its way there.
        assert training.during(lambda: servers.add(at[2])).result() == 2
        with when("copied to the process of /job:ps/task:2", lambda: kill(cluster, 2)):
            training.during(lambda: servers.drain(at[0])).result()
        assert servers.addresses == {1: at[1], 2: at[2]}
        assert _processes(training) == ["/job:ps/task:1"] * 2
        training.check()

        # All of it moves, while a checkpoint is saved.
        with when(f"/job:ps/task:2 at {at[2]} is back"):
            cluster.restart("ps:2")
        saving = ThreadPoolExecutor(1)
        stack.enter_context(saving)
        saved = saving.submit(training.checkpoint.save, tmp_path / "first")
        training.during(lambda: servers.drain(at[1])).result()
        saved.result()
        assert _processes(training) == ["/job:ps/task:2"] * 2
        cluster.kill("ps:1")
        with pytest.raises(InvalidArgumentError, match="/job:ps/task:2"):
            servers.drain(at[2])
        with pytest.raises(NotFoundError):
            servers.drain(at[1])
        training.check()
        assert training.coordinator.metrics()["stores_moved"] == 3
        assert training.coordinator.metrics()["ps_restores"] == 0

        # The source is killed in the middle: what follows is what on_ps_loss says.
        assert servers.add(at[0]) == 0  # which has served nobody meanwhile
        training.checkpoint.save(tmp_path / "second")
        with (
            when("copied to the process of /job:ps/task:0", lambda: kill(cluster, 2)),
            pytest.raises(PSUnavailableError, match="/job:ps/task:0"),
        ):
            servers.drain(at[2])
        cluster.restart("ps:2")
        training.train(20)
        training.check()
        assert training.coordinator.metrics()["ps_restores"] == 1
        training.during(lambda: servers.drain(at[2])).result()
        cluster.kill("ps:2")
        training.check()


@pytest.mark.parametrize("replicas", [0, 1])
def test_a_server_that_is_added_again_serves_though_it_hears_the_goodbye_late(replicas):
    """One that is frozen has both on two connections when it goes on."""
    with (
        zs.LocalCluster(2 + replicas, 1) as cluster,
        zs.ParameterServerStrategy(cluster.resolver, replicas=replicas) as strategy,
    ):
        training, servers = Training(strategy), strategy.parameter_servers
        address = cluster.spec.task_address("ps", 0)
        training.train(20)
        goodbye = CloseSession(strategy.session.session, False, run(clock()))
        servers.drain(address)
        assert servers.add(address, 0) == 0
        with pytest.raises(StaleSessionError):
            run(asked(address, goodbye))
        servers.rebalance()
        training.train(20)
        training.check()


async def clock():
    return asyncio.get_running_loop().time()


async def asked(address, message):
    """Says it as the program does, by a connection of its own."""
    me = hello("chief", 0, message.session)
    link = Link(address, me, name="/job:ps/task:0", settings=SETTINGS)
    link.start()
    try:
        await link.wait_open(await clock() + 60)
        return await link.request(message)
    finally:
        await link.close()


def kill(cluster, index):
    cluster.kill(f"ps:{index}")


def _processes(training):
    return [store["process"] for store in training.coordinator.metrics()["stores"]]
