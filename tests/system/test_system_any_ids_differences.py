"""Checkpoints with what has changed in tables since another one."""

import os
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from test_system_any_ids_rules import World

import zstrat as zs

pytestmark = pytest.mark.processes

RULES = {
    "follow_changes": True,
    "eviction": zs.eviction.steps(100),
    "admission": zs.admission.count(2),
}


@pytest.fixture(scope="module")
def local():
    with zs.LocalCluster(num_ps=3, num_workers=1) as local:
        yield local


def own_bytes(path):
    files = [each for each in Path(path).iterdir() if "base" not in each.name]
    return sum(os.stat(each).st_size for each in files)


def trained(world, draw, ids):
    for _ in range(2):
        world.push(*draw.choice(ids, 40))
    world.table.evict()
    world.table.remove(draw.choice(ids, 5))
    world.table.assign(draw.choice(ids, 5), np.full((5, 2), 9, np.float32))


def test_a_difference_is_restored_as_the_whole(local, tmp_path, caplog):
    draw = np.random.default_rng(0)
    ids = draw.integers(-(2**63), 2**63 - 1, 5000)
    with World(local, 2, **RULES) as world:
        manager = zs.CheckpointManager(world.checkpoint, tmp_path, 2, full_every=3)
        world.push(*ids)
        world.push(*ids)
        paths, sizes = [], []
        for turn in range(5):
            if turn:
                trained(world, draw, ids[:500])
            paths.append(manager.save())
            sizes.append(own_bytes(paths[-1]))
        assert max(sizes[1], sizes[2], sizes[4]) * 4 < min(sizes[0], sizes[3])
        assert not Path(paths[0]).exists(), "the base of others may go"
        rows, count = world.rows(*ids), len(world.table)
        trained(world, draw, ids[:500])
        after = world.rows(*ids)
        manager.close()
        with pytest.raises(zs.errors.InvalidArgumentError, match="full_every"):
            zs.export_safetensors(paths[-1], tmp_path / "x.safetensors")
    for servers in (3, 1):
        # The same draws as above, from where they were.
        draw = np.random.default_rng(0)
        draw.integers(-(2**63), 2**63 - 1, 5000)
        with World(local, servers, **RULES) as world:
            manager = zs.CheckpointManager(world.checkpoint, tmp_path, 2, full_every=3)
            world.push(1, 2, 3)
            assert manager.restore_or_initialize() == paths[-1]
            assert len(world.table) == count
            assert world.rows(*ids) == rows
            for turn in range(5):
                if turn == 4:
                    trained(world, draw, ids[:500])
                else:
                    skip(draw, ids[:500])
            assert world.rows(*ids) == after
            manager.close()


def skip(draw, ids):
    """Draws what `trained` draws."""
    for count in (40, 40, 5, 5):
        draw.choice(ids, count)


def test_what_is_not_known_any_more_is_saved_whole(local, tmp_path, caplog):
    ids = np.arange(3000)
    with World(local, 2, follow_changes=True) as world:
        manager = zs.CheckpointManager(world.checkpoint, tmp_path, 5, full_every=10)
        world.push(*ids)
        first = manager.save()
        world.push(1)
        small = own_bytes(manager.save())
        world.checkpoint.restore(first)  # with its number: the next is the second again
        whole = manager.save()
        assert "is written whole" in caplog.text
        assert small * 4 < min(own_bytes(first), own_bytes(whole))
        world.push(1)
        assert own_bytes(manager.save()) * 4 < own_bytes(whole)
        manager.close()


def test_slots_that_are_younger_than_the_base_are_saved_whole(local, tmp_path):
    ids, rule = np.arange(300), optax.sgd(1.0, momentum=0.5)
    with World(local, 2, rule, follow_changes=True) as world:
        manager = zs.CheckpointManager(world.checkpoint, tmp_path, 3, full_every=5)
        world.table.assign(ids, np.ones((300, 2), np.float32))
        manager.save()
        world.push(1, 2, 3)
        world.table.remove([5])
        path = manager.save()
        world.push(1, 7)
        rows = world.rows(*ids)
        manager.close()
    with World(local, 1, rule, follow_changes=True) as world:
        world.checkpoint.restore(path)  # before the optimizer knows what it updates
        world.push(1, 7)
        assert world.rows(*ids) == rows


def test_changes_behind_a_lost_server_are_not_taken_for_those_before(local, tmp_path):
    ids = np.arange(3000)
    with World(local, 1, on_ps_loss="restore", follow_changes=True) as world:
        manager = zs.CheckpointManager(world.checkpoint, tmp_path, 5, full_every=10)
        for _ in range(4):
            world.push(1)
        world.push(*ids)
        manager.save()
        cut = world.table.changes().cut
        for wrong in 5, ("a", "b"), [0.5] * len(cut):
            with pytest.raises(TypeError, match="since"):
                world.table.changes(wrong)
        assert world.table.changes(np.array(cut)).cut == cut
        local.kill("ps:0")
        local.restart("ps:0")
        for turn in range(6):  # as many changes as the table had before
            world.push(100 + turn)
        rows = world.rows(*ids)
        with pytest.raises(zs.errors.InvalidArgumentError, match="cut"):
            world.table.changes(cut)
        world.checkpoint.restore(manager.save())
        assert world.rows(*ids) == rows
        manager.close()


def test_a_base_that_was_deleted_is_in_the_difference_that_was_kept(
    local, tmp_path, caplog
):
    ids = np.arange(3000)
    with World(local, 2, follow_changes=True) as world:
        manager = zs.CheckpointManager(world.checkpoint, tmp_path, 1, full_every=6)
        world.push(*ids)
        whole = own_bytes(manager.save())
        for turn in range(5):
            world.push(turn)
            world.table.remove([1000 + turn])
            path = manager.save()
            assert own_bytes(path) * 4 < whole
        rows, count = world.rows(*ids), len(world.table)
        world.push(*ids)
        manager.close()
    assert "is written whole" not in caplog.text
    with World(local, 3, follow_changes=True) as world:
        world.checkpoint.restore(path)
        assert (world.rows(*ids), len(world.table)) == (rows, count)


def test_tables_that_do_not_follow_changes_are_saved_whole(local, tmp_path):
    with World(local, 1) as world:
        manager = zs.CheckpointManager(world.checkpoint, tmp_path, 5, full_every=10)
        world.push(*range(100))
        sizes = [own_bytes(manager.save()) for _ in range(2)]
        assert sizes[1] > sizes[0] * 0.9
        manager.close()
    with pytest.raises(ValueError, match="full_every"):
        zs.CheckpointManager(world.checkpoint, tmp_path, 5, full_every=0)


def test_slots_of_rows_that_did_not_change_are_those_of_the_base(local, tmp_path):
    ids = np.arange(2000) * 2**40
    states = []
    for servers in (2, 3):
        tasks = local.spec.as_dict()
        spec = zs.ClusterSpec({**tasks, "ps": tasks["ps"][:servers]})
        resolver = zs.cluster_resolver.SimpleClusterResolver(spec)
        with zs.ParameterServerStrategy(resolver) as strategy:
            coordinator = zs.ClusterCoordinator(strategy)
            with strategy.scope():
                table = zs.HashTable(4, name="t", follow_changes=True)
                adam = zs.Optimizer(optax.adam(0.1))

            @zs.function
            def step(ids):
                gradient = zs.grad(lambda t: jnp.sum(zs.embedding_lookup(t, ids) ** 2))
                adam.apply_gradients([(gradient(table), table)])  # noqa: B023

            def train(some):
                coordinator.fetch(coordinator.schedule(step, args=(some,)))  # noqa: B023

            manager = zs.CheckpointManager(
                zs.Checkpoint(table=table, adam=adam), tmp_path, 5, full_every=3
            )
            if servers == 2:
                train(ids)
                manager.save()
                train(ids[:50])
                manager.save()
            else:
                manager.restore_or_initialize()
            for some in (ids[:10], ids[40:100]):
                train(some)
            states.append(table.lookup(ids))
            manager.close()
    np.testing.assert_array_equal(*states)
