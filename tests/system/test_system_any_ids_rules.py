"""Admission to tables of any id, and eviction, on servers that come and go."""

import asyncio

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zstrat as zs
from zstrat.ps import PsClient

pytestmark = pytest.mark.processes

ZEROS = zs.initializers.constant(0.0)


@pytest.fixture(scope="module")
def local():
    with zs.LocalCluster(num_ps=3, num_workers=1) as local:
        yield local


class World:
    """A program on the first servers of a cluster."""

    def __init__(
        self, local, servers, transformation=None, on_ps_loss="raise", **rules
    ):
        tasks = local.spec.as_dict()
        spec = {**tasks, "ps": tasks["ps"][:servers]}
        resolver = zs.cluster_resolver.SimpleClusterResolver(zs.ClusterSpec(spec))
        self.strategy = zs.ParameterServerStrategy(resolver, on_ps_loss=on_ps_loss)
        self.coordinator = zs.ClusterCoordinator(self.strategy)
        with self.strategy.scope():
            table = zs.HashTable(2, initializer=ZEROS, name="t", **rules)
            rule = zs.Optimizer(transformation or optax.sgd(1.0))

        @zs.function
        def step(ids):
            gradient = zs.grad(lambda t: -jnp.sum(zs.embedding_lookup(t, ids)))
            rule.apply_gradients([(gradient(table), table)])

        self._step, self.table, self.optimizer = step, table, rule
        self.checkpoint = zs.Checkpoint(table=table, rule=rule)

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.strategy.close()

    def push(self, *ids):
        """One step with gradients of these ids: each row grows by 1."""
        step = self.coordinator.schedule(self._step, args=(np.array(ids, np.int64),))
        self.coordinator.fetch(step)

    def rows(self, *ids):
        return self.table.lookup(np.array(ids, np.int64))[:, 0].tolist()


FAR = 2**62


def test_a_learning_rate_changes_between_steps(local):
    rate = optax.inject_hyperparams(optax.sgd)(learning_rate=1.0)
    with World(local, 2, rate) as world:
        world.push(1, FAR)
        assert world.optimizer.hyperparams["learning_rate"] == 1
        world.optimizer.hyperparams["learning_rate"] = 0.5
        world.push(1, 2)
        assert world.rows(1, 2, FAR) == [1.5, 0.5, 1]
        state = optax.tree_utils.tree_set(world.optimizer.state, learning_rate=2.0)
        world.optimizer.state = state
        world.push(FAR)
        assert world.rows(1, 2, FAR) == [1.5, 0.5, 3]


def test_hyperparameters_before_the_first_step(local):
    """They do not need the values of a table, which it does not have."""
    rate = optax.inject_hyperparams(optax.adam)(learning_rate=0.1)
    with World(local, 2) as world:
        with world.strategy.scope():
            optimizer = zs.Optimizer(rate, params=[world.table])
        assert optimizer.hyperparams["learning_rate"] == np.float32(0.1)
        optimizer.hyperparams["learning_rate"] = 0.5
        assert optimizer.hyperparams["learning_rate"] == 0.5
        with pytest.raises(ValueError, match=r"'t'.*hyperparams"):
            print(optimizer.state)


@pytest.mark.parametrize(
    "rule", [zs.admission.count(3), zs.admission.sketch(3, bytes=2**20)]
)
def test_a_row_is_born_with_its_third_gradient(local, tmp_path, rule):
    with World(local, 2, admission=rule) as world:
        world.push(1, FAR, FAR)  # twice in one step: one gradient
        world.push(1, 2)
        assert world.rows(1, 2, FAR) == [0, 0, 0]
        for _ in range(5):
            world.rows(2, FAR)  # what is looked up does not count
        saved = world.checkpoint.save(tmp_path / "c")
        world.push(1, FAR)
        assert world.rows(1, FAR) == [1, 0]
        world.push(FAR)
        assert world.rows(1, 2, FAR) == [1, 0, 1]
        assert len(world.table) == 2
    with World(local, 3, admission=rule) as world:
        world.checkpoint.restore(saved)
        assert len(world.table) == 0
        world.push(1, 2, FAR)
        assert world.rows(1, 2, FAR) == [1, 0, 0]
        world.push(2, FAR)
        assert world.rows(1, 2, FAR) == [1, 1, 1]


def test_a_share_of_ids_is_admitted_wherever_they_are(local):
    ids = np.random.default_rng(0).integers(-(2**63), 2**63 - 1, 2000)
    found = []
    for servers in (1, 3):
        with World(local, servers, admission=zs.admission.probability(0.3)) as world:
            world.push(*ids)
            world.push(*ids)
            found.append(world.rows(*ids))
            assert len(world.table) == np.count_nonzero(found[-1])
    assert found[0] == found[1]
    assert set(found[0]) == {0, 2}
    assert abs(np.count_nonzero(found[0]) - 600) < 5 * np.sqrt(2000 * 0.3 * 0.7)


def test_rows_without_gradients_for_some_steps_are_evicted(local, tmp_path):
    with World(local, 2, eviction=zs.eviction.steps(3)) as world:
        world.push(1, 2, FAR)
        world.push(2)
        world.push(FAR)
        with pytest.raises(ValueError, match="age"):
            world.table.evict(now=1.0)
        world.table.evict()
        assert len(world.table) == 3
        saved = world.checkpoint.save(tmp_path / "c")
        world.push(FAR)
        world.table.evict()
        assert world.rows(1, 2, FAR) == [0, 1 + 1, 3]
    with World(local, 3, eviction=zs.eviction.steps(3)) as world:
        world.checkpoint.restore(saved)
        world.push(FAR)
        world.table.evict()
        assert world.rows(1, 2, FAR) == [0, 2, 3]
        world.push(1)
        assert world.rows(1) == [1], "born again from its first value"


def test_rows_without_gradients_for_some_time_are_evicted(local, tmp_path):
    with World(local, 2, eviction=zs.eviction.age(60)) as world:
        world.push(1, 2, FAR)
        world.table.evict(now=1000.0)
        world.push(2)
        world.table.evict(now=1050.0)
        assert len(world.table) == 3
        saved = world.checkpoint.save(tmp_path / "c")
        world.table.evict(now=1060.0)
        assert world.rows(1, 2, FAR) == [0, 2, 0]
    with World(local, 3, eviction=zs.eviction.age(60)) as world:
        world.checkpoint.restore(saved)
        asyncio.run(world.table.evict_async(now=1109.0))
        assert world.rows(1, 2, FAR) == [0, 2, 0]
        world.table.evict()  # now: long after
        assert len(world.table) == 0


@pytest.mark.parametrize("by", ["recency", "frequency"])
def test_a_table_keeps_about_its_capacity(local, by):
    ids = np.random.default_rng(0).integers(-(2**63), 2**63 - 1, 3000)
    rule = zs.eviction.capacity(1000, by)
    with World(local, 3, eviction=rule) as world:
        world.push(*ids)
        world.push(*ids[:500])
        world.table.evict()
        assert abs(len(world.table) - 1000) <= 3
        assert world.rows(*ids[:500]) == [2] * 500


def test_rows_of_small_norm_are_evicted(local):
    with World(local, 2, eviction=zs.eviction.norm(1.5)) as world:
        world.push(1, FAR)
        world.push(FAR)
        world.table.assign([5], np.zeros((1, 2), np.float32))
        world.table.evict()  # (1, 1) has 1.41
        assert world.rows(1, FAR, 5) == [0, 2, 0]
        assert len(world.table) == 1


def test_ids_that_wait_are_forgotten_when_they_are_too_many(local):
    few = zs.admission.count(3, waiting=40)
    ids = np.random.default_rng(0).integers(-(2**63), 2**63 - 1, 2000)
    with World(local, 2, admission=few) as world:
        world.push(*ids)
        world.push(*ids[:10])
        world.table.evict()
        world.push(*ids)
        assert world.rows(*ids[:10]) == [1] * 10, "those with the largest counts stay"
        assert len(world.table) == 10


def test_servers_that_do_not_see_the_folder(local, tmp_path, monkeypatch):
    async def sees(self, path):
        return [False] * self.count

    monkeypatch.setattr(PsClient, "sees", sees)
    ids = np.random.default_rng(0).integers(-(2**63), 2**63 - 1, 3000)
    rules = {"admission": zs.admission.count(2), "eviction": zs.eviction.steps(2)}
    with World(local, 2, **rules) as world:
        world.push(*ids)
        world.push(*ids[:2000])
        saved = world.checkpoint.save(tmp_path / "c")
    for servers in (3, 1):
        with World(local, servers, **rules) as world:
            world.push(7)
            world.push(7)
            world.checkpoint.restore(saved)
            assert len(world.table) == 2000
            world.push(*ids[1000:])
            world.table.evict()
            wanted = [1] * 1000 + [2] * 1000 + [1] * 1000
            assert world.rows(*ids) == wanted
            world.push(1)
            world.table.evict()
            assert world.rows(*ids) == [0] * 1000 + wanted[1000:]


def test_a_copy_that_serves_follows_by_changes(local):
    draw = np.random.default_rng(0)
    ids = draw.integers(-(2**63), 2**63 - 1, 400)
    with World(local, 3, follow_changes=True) as world:
        table, copy, cut = world.table, {}, None
        for _ in range(4):
            world.push(*draw.choice(ids, 50))
            table.remove(draw.choice(ids, 30))
            table.assign(draw.choice(ids, 5), np.full((5, 2), 9, np.float32))
            found = table.changes(cut)
            assert cut is None or len(found.ids) <= 55
            for number in found.removed.tolist():
                copy.pop(number, None)
            for number, row in zip(found.ids.tolist(), found.rows, strict=True):
                copy[number] = row.tolist()
            first, cut = cut, found.cut
            whole = {
                i: r.tolist()
                for a, b in table.items()
                for i, r in zip(a.tolist(), b, strict=True)
            }
            assert copy == whole
        assert len(table.changes(cut).ids) == 0
        with pytest.raises(zs.errors.InvalidArgumentError, match="cut"):
            table.changes(first)
        with pytest.raises(ValueError, match="parts"):
            table.changes(cut[:2])
    with World(local, 1) as world, pytest.raises(ValueError, match="follow_changes"):
        world.table.changes()


def test_ids_without_a_row_read_a_default(local):
    with World(local, 2, admission=zs.admission.count(2)) as world:
        world.push(1, 5)
        world.push(1, FAR)
        ids = np.array([[1, 5], [FAR, 1]])
        found = world.table.lookup(ids, default=[7, 8])
        assert found.dtype == np.float32
        assert found.tolist() == [[[1, 1], [7, 8]], [[7, 8], [1, 1]]]
        asked = world.table.lookup_async([3, 1], default=np.nan)
        np.testing.assert_array_equal(asyncio.run(asked), [[np.nan] * 2, [1, 1]])
        assert world.table.lookup(np.empty(0, np.int64), default=0).shape == (0, 2)
        with pytest.raises(ValueError, match="default"):
            world.table.lookup(ids, default=[1, 2, 3])
        with pytest.raises(ValueError, match="default"):
            world.table.lookup(ids, default=1j)


def test_rules_that_are_not_are_refused():
    for wrong in (
        lambda: zs.admission.count(0),
        lambda: zs.admission.count(2, waiting=0),
        lambda: zs.admission.probability(0),
        lambda: zs.admission.sketch(1, bytes=2**20),
        lambda: zs.admission.sketch(3, bytes=2**19),
        lambda: zs.eviction.age(0),
        lambda: zs.eviction.steps(0),
        lambda: zs.eviction.norm(0.0),
        lambda: zs.eviction.capacity(10, "age"),
    ):
        with pytest.raises(ValueError, match="expected"):
            wrong()
    for name, value in {
        "admission": 3,
        "eviction": "lru",
        "follow_changes": "yes",
        "trainable": 1,
        "name": 5,
        "seed": 1.5,
    }.items():
        with pytest.raises(TypeError, match=name):
            zs.HashTable(2, **{name: value})
    with pytest.raises(ValueError, match="65536"):
        zs.HashTable(2**40)


def test_a_table_without_a_rule_says_so(local):
    with World(local, 1) as world, pytest.raises(ValueError, match="eviction="):
        world.table.evict()
