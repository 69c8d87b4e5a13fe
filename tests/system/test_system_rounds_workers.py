"""Rounds whose workers are late, are lost, freeze, come and leave: the values are
always those of a replay of the closed rounds."""

import random

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from system_rounds import Logged
from system_worlds import all_have_worked, when

import zstrat as zs
from zstrat.testing import Relay

pytestmark = pytest.mark.processes

WORKERS = 3
PATIENCE = "4"
"""Seconds after which a stopped worker is a lost one; too many for one that is slow."""


@pytest.fixture(scope="module")
def cluster():
    env = {"ZSTRAT_LIVENESS": PATIENCE}
    with zs.LocalCluster(2, WORKERS, transport="tcp", env=env) as cluster:
        yield cluster


@pytest.fixture
def patient(monkeypatch):
    monkeypatch.setenv("ZSTRAT_LIVENESS", PATIENCE)


@pytest.fixture
def strategy(local):
    with zs.ParameterServerStrategy(local.resolver) as made:
        yield made


@pytest.mark.parametrize("is_frozen", [False, True], ids=["slow", "frozen"])
@pytest.mark.parametrize("late", ["drop", "next"])
def test_rounds_go_on_without_the_backup_worker(
    local, strategy, tmp_path, late, is_frozen
):
    program = Logged(strategy, zs.Rounds(backup=1, late=late), tmp_path)
    all_have_worked(program.coordinator)
    steps = 14
    with program.hold(2) as hold:
        program.schedule(steps)
        hold.wait()
        program.schedule(steps)  # as the first may have ended before it has read
        if is_frozen:
            local.stop_task("worker:2")
        # Of two workers, if the third one holds two.
        with program.ended(2 * steps - 2):
            hold.release()
            if is_frozen:
                local.continue_task("worker:2")
    program.coordinator.join()
    rounds, late_ones = program.replayed()
    # Two, if it has read while the last round of the others was being closed.
    assert len(late_ones) in (1, 2)
    counted = {"worker:2": len(late_ones)}
    assert program.metrics["late"] == counted
    assert program.metrics["dropped"] == (counted if late == "drop" else {})
    assert all(len(members) == 2 for members in rounds[:-1])
    for step in late_ones:
        where = [n for n, members in enumerate(rounds) if step in members]
        assert where == ([] if late == "drop" else [len(rounds) - 1])


@pytest.mark.parametrize("is_back", [False, True], ids=["gone", "back"])
def test_the_steps_of_a_killed_worker_count_once(local, strategy, tmp_path, is_back):
    """If it is gone, rounds follow the workers that are left; if it comes back, they
    wait for it, or for its steps on others."""
    workers = WORKERS if is_back else None
    program = Logged(strategy, zs.Rounds(workers=workers, late="next"), tmp_path)
    all_have_worked(program.coordinator)
    steps = 5 * WORKERS
    with program.hold(2) as hold:
        program.schedule(steps)
        hold.wait()
        with program.ended(2):
            local.kill("worker:2")
            hold.release()
            if is_back:
                local.restart("worker:2")
    program.coordinator.join()
    assert program.coordinator.metrics()["recoverable_worker_failures"] == 1
    rounds, late = program.replayed()
    assert sum(map(len, rounds)) == steps
    assert len(late) <= 2  # those that the worker had
    assert not program.metrics["dropped"]
    on_time = [len(set(members) - set(late)) for members in rounds[:-1]]
    assert min(on_time) >= (WORKERS if is_back else WORKERS - 1)
    # Its steps may be run by workers that have contributed to the same round.
    assert sum(max(0, count - WORKERS) for count in on_time) <= 2


def test_rounds_have_a_worker_more_when_one_joins_and_one_less_when_it_leaves(
    local, tmp_path
):
    jobs = local.spec.as_dict()
    spec = zs.ClusterSpec({"ps": jobs["ps"], "worker": jobs["worker"][:2]})
    resolver = zs.cluster_resolver.SimpleClusterResolver(spec)
    with zs.ParameterServerStrategy(resolver) as strategy:
        program = Logged(strategy, zs.Rounds(), tmp_path)
        all_have_worked(program.coordinator)
        program.run(4)
        strategy.workers.add(jobs["worker"][2])
        all_have_worked(program.coordinator)
        program.run(6)
        strategy.workers.remove(jobs["worker"][2])
        program.run(4)
        rounds, late = program.replayed()
    assert [len(members) for members in rounds] == [2, 2, 3, 3, 2, 2]
    assert not late


def test_too_few_workers_for_too_long_are_an_error_that_says_who_is_lost(
    patient, local, tmp_path
):
    with zs.ParameterServerStrategy(local.resolver) as strategy:
        program = Logged(strategy, zs.Rounds(workers=WORKERS), tmp_path)
        all_have_worked(program.coordinator)
        program.run(WORKERS)
        with when("lost /job:worker/task:2"):
            local.kill("worker:2")
        program.schedule(3)  # of which one waits for the next round
        with pytest.raises(zs.UnavailableError, match="worker/task:2") as raised:
            program.coordinator.join()
        for word in ("'logged'", "workers=None", "backup="):
            assert word in str(raised.value)
        # What waits is not lost, and the worker completes the round when it is back.
        del program.values[5:]
        local.restart("worker:2")
        program.run(1)
        rounds, late = program.replayed()
    assert rounds == [[0, 1, 2], [3, 4, 5]]
    assert not late


def test_workers_that_have_run_no_step_compute_what_a_round_needs(local):
    """All workers are others by the time that the round of a clipped optimizer is
    closed, and no step is left to run."""
    clipped = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0))
    with zs.ParameterServerStrategy(local.resolver) as strategy:
        with strategy.scope():
            first, second = (zs.Variable(np.zeros(1, np.float32)) for _ in range(2))
            optimizer = zs.Optimizer(clipped, rounds=zs.Rounds())
        coordinator = zs.ClusterCoordinator(strategy)

        @zs.function
        def step():
            three, four = jnp.full(1, 3.0), jnp.full(1, 4.0)
            optimizer.apply_gradients([(three, first), (four, second)])

        coordinator.schedule(step).fetch()  # its round waits for the other workers
        for worker in range(WORKERS):
            with when(f"lost /job:worker/task:{worker}"):
                local.kill(f"worker:{worker}")
            local.restart(f"worker:{worker}")
        coordinator.join()
        np.testing.assert_allclose([first.numpy(), second.numpy()], [[-0.6], [-0.8]])


def test_gradients_of_two_trees_are_not_clipped_together(local):
    clipped = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0))
    with zs.ParameterServerStrategy(local.resolver) as strategy:
        with strategy.scope():
            variables = [zs.Variable(np.zeros(1, np.float32)) for _ in range(2)]
            optimizer = zs.Optimizer(clipped, "two", rounds=zs.Rounds())
        coordinator = zs.ClusterCoordinator(strategy)

        def stepping(variable):
            @zs.function
            def step():
                optimizer.apply_gradients([(jnp.ones(1), variable)])

            return step

        for variable in variables:
            coordinator.schedule(stepping(variable)).fetch()
        with pytest.raises(zs.UnavailableError, match="params=params"):
            coordinator.join()


def test_a_line_that_breaks_again_and_again_changes_no_bit(local, tmp_path):
    jobs = local.spec.as_dict()
    with Relay(jobs["ps"][0]) as relay:
        spec = zs.ClusterSpec({**jobs, "ps": [relay.address, jobs["ps"][1]]})
        resolver = zs.cluster_resolver.SimpleClusterResolver(spec)
        with zs.ParameterServerStrategy(resolver) as strategy:
            program = Logged(strategy, zs.Rounds(workers=WORKERS), tmp_path)
            all_have_worked(program.coordinator)
            program.schedule(12 * WORKERS)
            for value in program.values[:: 2 * WORKERS]:
                value.fetch()
                relay.reset()
            program.coordinator.join()
            rounds, late = program.replayed()
    assert [len(members) for members in rounds] == [WORKERS] * 12
    assert not late


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(8))
def test_whatever_happens_each_step_counts_in_one_round_at_most(local, tmp_path, seed):
    """Workers are killed and frozen, and lines to a server break, in any order."""
    chosen = random.Random(seed)
    backup, late = seed % 2, ("drop", "next")[seed // 2 % 2]
    jobs = local.spec.as_dict()
    with Relay(jobs["ps"][0]) as relay:
        spec = zs.ClusterSpec({**jobs, "ps": [relay.address, jobs["ps"][1]]})
        resolver = zs.cluster_resolver.SimpleClusterResolver(spec)
        with zs.ParameterServerStrategy(resolver) as strategy:
            program = Logged(strategy, zs.Rounds(backup=backup, late=late), tmp_path)
            all_have_worked(program.coordinator)
            for _ in range(8):
                program.schedule(24)
                program.values[chosen.randrange(-20, 0)].fetch()
                worker = f"worker:{chosen.randrange(WORKERS)}"
                match chosen.choice(("kill", "freeze", "cut")):
                    case "kill":
                        local.kill(worker)
                        program.values[-3].fetch()  # on others
                        local.restart(worker)
                    case "freeze":
                        local.stop_task(worker)
                        relay.reset()
                        local.continue_task(worker)
                    case "cut":
                        relay.reset(chosen.choice((1, 2)))
            program.coordinator.join()
            program.replayed()
            if late == "next":
                assert not program.metrics["dropped"]
