"""A checkpoint during training is one cut: counted on several parameter servers."""

import json
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zstrat as zs
from zstrat.wire import UpdateOp

pytestmark = pytest.mark.processes

SLOTS, WIDE = 64, 4096
PATIENCE = "4"
"""Seconds after which a stopped worker is a lost one; too many for one that is slow."""


class Counting:
    """Each step adds one to a slot of its own on every server: plainly, to rows, and
    through an optimizer. Each update of the program adds one to both its variables."""

    def __init__(self, coordinator, servers=2):
        with coordinator.strategy.scope():
            plain = [zs.Variable(np.zeros((SLOTS, WIDE), "f4")) for _ in range(servers)]
            rows = [zs.Variable(np.zeros((SLOTS, 1), "f4")) for _ in range(servers)]
            moved = [zs.Variable(np.zeros(SLOTS, "f4")) for _ in range(servers)]
            self.own = [zs.Variable(np.zeros((), "f4")) for _ in range(servers)]
            optimizer = zs.Optimizer(optax.sgd(1.0))
        assert len({v.device for v in plain}) == servers

        @zs.function
        def step(slot):
            hot = jax.nn.one_hot(slot, SLOTS, dtype=jnp.float32)
            for v in plain:
                v.assign_add(jnp.broadcast_to(hot[:, None], (SLOTS, WIDE)))
            for v in rows:
                v.scatter_add(zs.IndexedSlices(jnp.ones((1, 1)), slot[None]))
            optimizer.apply_gradients([(-hot, v) for v in moved])
            return slot

        self.coordinator, self.step = coordinator, step
        self.all = [*plain, *rows, *moved]
        self.checkpoint = zs.Checkpoint(all=self.all, own=self.own)
        self.scheduled = 0

    def schedule(self):
        slot = np.int32(self.scheduled % SLOTS)
        self.scheduled += 1
        return self.coordinator.schedule(self.step, args=(slot,))

    def counts(self):
        """What each variable counted; the same on all, if this is a cut."""
        found = [v.numpy().reshape(SLOTS, -1)[:, 0] for v in self.all]
        for count in found[1:]:
            np.testing.assert_array_equal(count, found[0])
        return found[0]


def steps_of(path):
    """How many steps the manifest says are in a checkpoint."""
    metadata = json.loads(Path(path, "manifest.json").read_bytes())["manifest"]
    (cut,) = metadata["metadata"]["steps"]
    return cut["below"] - 1 + sum(end - first for first, end in cut["besides"])


@pytest.fixture(scope="module")
def local():
    """For programs one after another: each leaves all tasks running."""
    env = {"ZSTRAT_LIVENESS": PATIENCE}
    with zs.LocalCluster(num_ps=2, num_workers=2, env=env) as cluster:
        yield cluster


@pytest.fixture
def counting(local, monkeypatch):
    monkeypatch.setenv("ZSTRAT_LIVENESS", PATIENCE)
    with zs.ParameterServerStrategy(local.resolver) as strategy:
        yield Counting(zs.ClusterCoordinator(strategy))


def test_what_is_saved_while_training_goes_on_is_whole_steps(counting, tmp_path):
    over, updates, batches = threading.Event(), [0], threading.Semaphore(0)

    def train():
        while not over.is_set():
            values = [counting.schedule() for _ in range(30)]
            values[-1].fetch()
            batches.release()

    def update():
        # One update of the program on several servers.
        session, one = counting.coordinator.strategy.session, np.ones((), "f4")
        adds = [(v.spec, UpdateOp.ADD, 0, [one]) for v in counting.own]
        while not over.is_set():
            session.run(session.servers.update(adds), "adding")
            updates[0] += 1

    threads = [threading.Thread(target=f) for f in (train, update)]
    for thread in threads:
        thread.start()
    try:
        paths = []
        for number in range(4):
            if number in (0, 3):
                batches.acquire(timeout=60)  # there is more than before
            paths.append(counting.checkpoint.save(tmp_path / "c"))
    finally:
        over.set()
        for thread in threads:
            thread.join(60)
    counting.coordinator.join()
    assert counting.counts().sum() == counting.scheduled
    assert [v.numpy() for v in counting.own] == [updates[0]] * 2
    sums = []
    for path in paths:
        counting.checkpoint.restore(path)
        sums.append(counting.counts().sum())
        assert sums[-1] == steps_of(path)
        assert len({v.numpy().item() for v in counting.own}) == 1
    assert sums == sorted(sums)
    assert sums[-1] > sums[0]


def test_a_silent_worker_is_fenced_and_its_steps_are_whole(local, counting, tmp_path):
    for _ in range(30):
        counting.schedule()
    counting.coordinator.join()  # what is in flight from now on is not whole
    local.stop_task("worker:0")
    workers = counting.coordinator.metrics
    while not workers()["workers"]["/job:worker/task:0"]["in_flight"]:
        assert not workers()["recoverable_worker_failures"]
        counting.schedule()
    path = counting.checkpoint.save(tmp_path / "c")
    assert workers()["recoverable_worker_failures"] == 1
    local.continue_task("worker:0")
    counting.coordinator.join()
    assert counting.counts().sum() == counting.scheduled
    counting.checkpoint.restore(path)
    assert counting.counts().sum() == steps_of(path)


def test_restoring_while_training_goes_on_is_between_two_steps(counting, tmp_path):
    path = counting.checkpoint.save(tmp_path / "c")
    values = [counting.schedule() for _ in range(100)]
    values[20].fetch()
    counting.checkpoint.restore(path)
    counting.coordinator.join()
    assert 0 <= counting.counts().sum() <= 100
