"""Parameter servers are killed and frozen for real, and their second copies go on."""

import itertools
import json
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zstrat as zs
from zstrat.config import Settings, Timeouts
from zstrat.program import prepare
from zstrat.testing import DaemonCluster, leak_check
from zstrat.variables import update_all
from zstrat.wire import EvictionRule, UpdateOp

pytestmark = pytest.mark.processes

SLOTS = 160
NUMBERS = np.random.default_rng(0).integers(-(2**63), 2**63 - 1, SLOTS)
"""The ids that the steps look up in a table of any id: one each."""
SETTINGS = Settings(timeouts=Timeouts(liveness=3.0, reconnect=0.5))
"""Frozen servers are missed sooner than by default."""


@pytest.fixture
def cluster():
    with leak_check(), DaemonCluster(2, 1, settings=SETTINGS) as cluster:
        yield cluster


class Training:
    """Steps that leave a trace of each run on both servers, and own updates."""

    def __init__(self, strategy):
        self.coordinator = zs.ClusterCoordinator(strategy)
        with strategy.scope():
            counts = [zs.Variable(np.zeros(SLOTS, "f4"), name=name) for name in "ab"]
            rows = zs.Variable(np.ones((SLOTS, 2), "f4"), name="rows")
            sgd = zs.Optimizer(optax.adagrad(0.5, initial_accumulator_value=0.0))
            self.own = zs.Variable(0.0, name="own")
            self.any = zs.HashTable(2, initializer=zs.initializers.constant(0.0))
            plain = zs.Optimizer(optax.sgd(1.0))
            # Enough of them to travel as sets.
            small = [zs.Variable(np.zeros(n % 3 + 1, "f4")) for n in range(40)]
            momentum = zs.Optimizer(optax.sgd(1.0, momentum=0.0))
        self.small, self.trained = small, 0
        self.counts, self.rows, self.step = counts, rows, 0
        self.checkpoint = zs.Checkpoint(counts=counts, rows=rows, sgd=sgd)

        @zs.function
        def bump(i, number):
            for count in counts:
                count.assign_add(jax.nn.one_hot(i, SLOTS, dtype=jnp.float32))
            looked_up = zs.grad(lambda t: jnp.sum(zs.embedding_lookup(t, i[None])))
            sgd.apply_gradients([(looked_up(rows), rows)])
            born = zs.grad(lambda t: jnp.sum(zs.embedding_lookup(t, number)))
            plain.apply_gradients([(born(self.any), self.any)])
            return i

        @zs.function
        def train():
            sums = zs.grad(lambda weights: sum(map(jnp.sum, weights)))
            momentum.apply_gradients(sums(small), small)

        self._bump, self._train = bump, train

    def schedule(self, count):
        numbers = range(self.step, self.step + count)
        self.step += count
        self.own.assign_add(1.0)
        return [
            self.coordinator.schedule(self._bump, args=(np.int32(i), NUMBERS[i]))
            for i in numbers
        ]

    def require_sets(self):
        """Both servers get the gradients of their small variables as one array."""
        sent = prepare(self._train, (), {}).plan.sent
        assert [len(numbers) for _, numbers in sent] == [20, 20]

    def train(self, count):
        """Moves small variables, whose gradients and values travel as sets; half of
        the steps have ended when it returns."""
        self.trained += count
        values = [self.coordinator.schedule(self._train) for _ in range(count)]
        values[count // 2].fetch()

    def paired(self):
        """Blocks until each server has a second copy."""
        replication = self.coordinator.strategy.session.cluster.replication
        session = self.coordinator.strategy.session

        async def whole():
            await replication.wait_whole(session.portal.loop.time() + 60)

        session.run(whole(), "the test")

    def check(self, owns):
        """Each step of before has had its effect once, and no other."""
        self.coordinator.join()
        want = (np.arange(SLOTS) < self.step).astype("f4")
        for count in self.counts:
            np.testing.assert_array_equal(count, want)
        moved = np.where(want, 0.5, 1.0)[:, None]
        np.testing.assert_allclose(self.rows, np.tile(moved, 2), rtol=1e-5)
        for value in zs.values(self.small):
            np.testing.assert_array_equal(value, np.float32(-self.trained))
        assert len(self.any) == self.step
        born = np.tile(-want[:, None], 2)
        np.testing.assert_array_equal(self.any.lookup(NUMBERS), born)
        assert float(self.own) == owns


def applied_in(file):
    """The steps that each process has applied, and the arrows that lead there."""
    events = json.loads(file.read_text("utf-8"))["traceEvents"]
    tasks = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    applied, arrows = {}, Counter()
    for event in events:
        if event["ph"] == "X" and event["name"] == "apply" and event["args"]:
            applied.setdefault(tasks[event["pid"]], set()).add(event["args"]["step"])
        elif event["ph"] == "f":
            arrows[tasks[event["pid"]]] += 1
    return applied, arrows


def shows_both_copies(profile, steps):
    """The backup has made again what its primary had, and has served the others."""
    applied, arrows = applied_in(profile.path)
    assert applied["ps:0 backup"] == applied["ps:1"] == steps
    assert arrows["ps:0 backup"] >= len(steps)
    missing = {key for key in profile.about if key.endswith(": missing")}
    assert missing == {"ps:0: missing", "ps:1 backup: missing"}  # of one process


def test_an_eviction_goes_on_with_the_copy(cluster):
    """A server is killed in the middle; the others of what it drops are dropped."""
    with zs.ParameterServerStrategy(cluster.resolver, replicas=1) as strategy:
        work = Training(strategy)
        with strategy.scope():
            table = zs.HashTable(1, eviction=zs.eviction.norm(0.5))
        small = NUMBERS[:80]
        table.assign(NUMBERS, np.ones((SLOTS, 1), "f4"))
        table.assign(small, np.full((80, 1), 0.1, "f4"))
        work.paired()
        slices = [
            (
                part,
                UpdateOp.EVICT_ROWS,
                (np.array([EvictionRule.NORM, 0.5, *each]),),
                None,
            )
            for part in table.components
            for each in itertools.pairwise(range(*part.spec.buckets, 128))
        ]
        for number, each in enumerate(slices):
            if number == len(slices) // 4:
                cluster.local.kill("ps:0")
            update_all([each])
        table.evict()  # and what is in no slice
        assert len(table) == SLOTS - len(small)
        kept = np.sort(np.concatenate([ids for ids, _ in table.items()]))
        np.testing.assert_array_equal(kept, np.sort(NUMBERS[80:]))


def test_no_step_is_lost_or_doubled_whichever_server_is_lost(cluster, tmp_path):
    strategy = zs.ParameterServerStrategy(
        cluster.resolver, replicas=1, settings=SETTINGS
    )
    with strategy, ThreadPoolExecutor(1) as pool:
        training = Training(strategy)
        metrics = training.coordinator.metrics
        with zs.profile(tmp_path / "line.json") as profile:
            values = training.schedule(20)
            saving = pool.submit(training.checkpoint.save, tmp_path / "ckpt")
            cluster.local.kill("ps:0")
            assert metrics()["stores_without_backup"] == 2  # nobody has missed it yet
            values += training.schedule(20)
            training.check(owns=2)
        shows_both_copies(profile, {value.run.step for value in values})
        assert metrics()["failovers"] == 1
        assert metrics()["stores_without_backup"] == 2
        saved = saving.result()
        cluster.local.restart("ps:0")
        training.paired()
        training.require_sets()
        training.train(40)
        values += training.schedule(40)
        with cluster.frozen("ps:1"):  # by now it has the only primaries
            values += training.schedule(40)
            training.check(owns=4)
        assert metrics()["failovers"] == 3
        training.paired()  # with who has slept, and is a backup now
        training.train(40)
        values += training.schedule(40)
        cluster.local.kill("ps:0")
        training.check(owns=5)
        assert [int(value.fetch()) for value in values] == list(range(SLOTS))
        training.checkpoint.restore(saved)
        a, b = zs.values(training.counts)
        np.testing.assert_array_equal(a, b)
        assert metrics()["failovers"] == 5
        assert metrics()["recoverable_worker_failures"] == 0
        cluster.local.restart("ps:0")
