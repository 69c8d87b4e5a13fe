"""Rounds on a real cluster: which worker has the next step, what is merged, and what is
refused. That they are steps of optax is in `test_system_rounds_optax`."""

import itertools
import json
import math
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax
import programs
import pytest
from killed_rounds import CountingRounds

import zstrat as zs
from zstrat.launch import LocalCluster

pytestmark = pytest.mark.processes

WORKERS = 2


@pytest.fixture(scope="module")
def cluster():
    with LocalCluster(2, WORKERS) as running:
        yield running


@pytest.fixture
def strategy(cluster):
    with zs.ParameterServerStrategy(cluster.resolver) as made:
        yield made


def test_a_step_goes_to_the_worker_that_the_round_waits_for(strategy):
    with strategy.scope():
        weights = zs.Variable(np.zeros(2, np.float32))
        optimizer = zs.Optimizer(optax.sgd(1.0), rounds=zs.Rounds())
    coordinator = zs.ClusterCoordinator(strategy)

    @zs.function
    def train(gradient):
        before = weights.value()
        optimizer.apply_gradients([(gradient + 0 * before, weights)])
        return before

    @zs.function
    def look():
        return weights.value()

    one = np.ones(2, np.float32)
    for number in range(3):
        first = coordinator.schedule(train, args=(one,))
        coordinator.schedule(look)
        second = coordinator.schedule(train, args=(3 * one,))
        for value in (first, second):
            assert value.fetch().tolist() == [-2.0 * number] * 2
    coordinator.schedule(train, args=(one,))
    coordinator.join()  # the last round has one contribution
    assert weights.numpy().tolist() == [-7.0] * 2


@pytest.mark.usefixtures("programs")
def test_programs_that_are_killed_go_on_with_their_rounds(cluster):
    """What a step has contributed that has ended counts once, on both servers; what was
    under way once or not at all, but never on one alone."""
    script, spec = str(Path(__file__).with_name("killed_rounds.py")), cluster.spec

    def run(first, fetched, more):
        numbers = map(str, (first, fetched, more))
        run = programs.run([script, json.dumps(spec.as_dict()), *numbers])
        assert run.returncode == -9

    def counted(work):
        a, b = (-count.numpy() for count in work.counts)
        assert np.array_equal(a, b), "a server has a round that the other lacks"
        assert set(a) <= {0, 1}
        return set(np.flatnonzero(a))

    run(0, 21, 0)
    strategy = zs.ParameterServerStrategy(cluster.resolver, resume="rounds")
    with pytest.raises(ZeroDivisionError), strategy:
        assert strategy.resumed
        work = CountingRounds(strategy)
        work.coordinator.join()  # nothing of this program waits
        assert counted(work) == set(range(20)), "the last step waits for its round"
        assert work.coordinator.metrics()["scheduled_closures"] == 0
        1 / 0  # noqa: B018
    run(21, 10, 60)
    run(91, 10, 60)
    ended = {*range(32), *range(91, 102)}
    with zs.ParameterServerStrategy(cluster.resolver, resume="rounds") as strategy:
        work = CountingRounds(strategy)
        before = counted(work)
        assert before >= set(range(20))
        work.schedule([200])
        work.coordinator.join()
        assert counted(work) >= before | ended | {200}


def test_a_restore_drops_what_waits_for_a_round(strategy, tmp_path):
    with strategy.scope():
        weights = zs.Variable(np.zeros(2, np.float32))
        optimizer = zs.Optimizer(optax.sgd(1.0), rounds=zs.Rounds(workers=WORKERS))
    coordinator = zs.ClusterCoordinator(strategy)

    @zs.function
    def step(gradient):
        optimizer.apply_gradients([(gradient + 0 * weights.value(), weights)])

    one = np.ones(2, np.float32)
    saved = zs.Checkpoint(weights=weights)
    path = saved.save(tmp_path / "c")
    coordinator.schedule(step, args=(100 * one,)).fetch()  # waits for the other one
    saved.restore(path)
    coordinator.join()
    assert weights.numpy().tolist() == [0.0, 0.0]
    for _ in range(WORKERS):
        coordinator.schedule(step, args=(one,))
    coordinator.join()
    assert weights.numpy().tolist() == [-1.0, -1.0]


def test_rounds_read_nothing_ahead(cluster):
    ahead = zs.ParameterServerStrategy(cluster.resolver, prefetch=1)
    with ahead, ahead.scope(), pytest.raises(ValueError, match="prefetch=0"):
        zs.Optimizer(optax.sgd(1.0), rounds=zs.Rounds())


@pytest.mark.parametrize(
    "options",
    [
        {"replicas": 1},
        pytest.param({"on_ps_loss": "restore"}, marks=pytest.mark.thorough),
    ],
    ids=["replicas", "restore"],
)
def test_a_server_is_killed_amid_rounds(options, tmp_path):
    """Each round moves by -1, so values count the rounds that are in them."""
    rounds = 60
    with LocalCluster(2, WORKERS) as cluster:
        strategy = zs.ParameterServerStrategy(cluster.resolver, **options)
        with strategy.scope():
            variables = [zs.Variable(np.zeros(2, np.float32)) for _ in range(2)]
            clipped = optax.chain(optax.clip_by_global_norm(100.0), optax.sgd(1.0))
            optimizer = zs.Optimizer(
                clipped, params=variables, rounds=zs.Rounds(workers=WORKERS)
            )
        coordinator = zs.ClusterCoordinator(strategy)

        @zs.function
        def step():
            before = [variable.value() for variable in variables]
            optimizer.apply_gradients([1.0 + 0.0 * x for x in before], variables)
            return before[0]

        saved = zs.Checkpoint(variables=variables, optimizer=optimizer)
        coordinator.schedule(step)
        coordinator.schedule(step)
        coordinator.join()
        saved.save(tmp_path / "c")
        values = [coordinator.schedule(step) for _ in range(WORKERS * rounds)]
        values[10].fetch()
        cluster.kill("ps:1")
        if "replicas" not in options:
            cluster.restart("ps:1")
        coordinator.join()
        lost = coordinator.metrics()["steps_lost"]
        assert isinstance(lost, int)
        # `join` closes the last round even if it has one contribution.
        made = math.ceil((WORKERS * (1 + rounds) - lost) / WORKERS)
        for variable in variables:
            assert variable.numpy().tolist() == [-made] * 2
        strategy.close()


def unit(array):
    norm = np.linalg.norm(array)
    return array / norm if norm else array


def merged(rule, weights, gradients):
    """What a rule makes of weighted gradients: Chen et al. (2016), Douillard et al.
    (2026)."""
    pairs = list(zip(weights, gradients, strict=True))
    total = sum(w * g for w, g in pairs)
    if rule == "sum":
        return total
    if rule == "rda":
        size = sum(w * np.linalg.norm(g) for w, g in pairs) / sum(weights)
        return size * unit(sum(w * unit(g) for w, g in pairs))
    return total / sum(weights)


def test_gradients_are_merged_by_each_rule_with_the_weights_of_results(strategy):
    rng = np.random.default_rng(1)
    kinds = list(itertools.product(("mean", "sum", "rda"), (False, True)))
    with strategy.scope():
        whole = [zs.Variable(np.zeros((2, 3), np.float32)) for _ in kinds]
        tables = [zs.Variable(np.zeros((6, 2), np.float32)) for _ in kinds]
        optimizers = [
            zs.Optimizer(
                optax.sgd(1.0),
                rounds=zs.Rounds(
                    workers=WORKERS,
                    merge=rule,
                    weights=(lambda result: result["n"]) if weighted else None,
                ),
            )
            for rule, weighted in kinds
        ]
    coordinator = zs.ClusterCoordinator(strategy)

    @zs.function
    def step(n, gradient, ids, rows):
        for optimizer, one, table in zip(optimizers, whole, tables, strict=True):
            slices = zs.IndexedSlices(rows, ids, table.shape)
            optimizer.apply_gradients([gradient, slices], [one, table])
        return {"n": n}

    counts = np.array([3.0, 0.5], np.float32)
    gradients = rng.normal(size=(WORKERS, 2, 3)).astype("f4")
    ids = np.array([[0, 4, 1], [4, 2, 4]], np.int32)
    rows = rng.normal(size=(WORKERS, 3, 2)).astype("f4")
    for given in zip(counts, gradients, ids, rows, strict=True):
        coordinator.schedule(step, args=given)
    coordinator.join()
    dense = np.zeros((WORKERS, 6, 2))
    np.add.at(dense, (np.arange(WORKERS)[:, None], ids), rows)
    for (rule, weighted), one, table in zip(kinds, whole, tables, strict=True):
        weights = counts if weighted else np.ones(WORKERS)
        want = merged(rule, weights, gradients)
        np.testing.assert_allclose(one.numpy(), -want, rtol=1e-5, err_msg=rule)
        of_rows = "mean" if rule == "rda" else rule
        want = merged(of_rows, weights, dense)
        np.testing.assert_allclose(table.numpy(), -want, rtol=1e-5, err_msg=rule)


def test_a_weight_that_is_no_number_is_named_by_its_step(strategy):
    with strategy.scope():
        w = zs.Variable(np.zeros(2, np.float32))
        optimizer = zs.Optimizer(
            optax.sgd(1.0), "weighted", rounds=zs.Rounds(weights=lambda result: result)
        )
    coordinator = zs.ClusterCoordinator(strategy)

    @zs.function
    def step(weight):
        optimizer.apply_gradients([(weight + w.value(), w)])
        return weight

    value = coordinator.schedule(step, args=(np.float32(np.nan),))
    with pytest.raises(ValueError, match=r"'weighted'.*weights=.*nan"):
        value.fetch()
    with pytest.raises(ValueError, match="weights="):
        coordinator.join()
    coordinator.schedule(step, args=(np.float32(2.0),))
    coordinator.join()
    assert w.numpy().tolist() == [-2.0, -2.0]


def test_rounds_count_in_multisteps(strategy):
    """A round is one of the updates that are accumulated."""
    transformation = optax.MultiSteps(optax.sgd(1.0), 2)
    with strategy.scope():
        w = zs.Variable(np.zeros((), np.float32))
        optimizer = zs.Optimizer(transformation, rounds=zs.Rounds(workers=WORKERS))
    coordinator = zs.ClusterCoordinator(strategy)

    @zs.function
    def step(gradient):
        before = w.value()
        optimizer.apply_gradients([(gradient + 0 * before, w)])
        return before

    gradients = [1, 3, 2, 6, 8, 8]
    values = [coordinator.schedule(step, args=(np.float32(g),)) for g in gradients]
    coordinator.join()
    # The means are 2, 4, 8; of the first two their mean is applied.
    assert [value.fetch() for value in values] == [0, 0, 0, 0, -3, -3]
    assert w.numpy() == -3


def test_what_takes_no_part_in_rounds_is_refused_where_it_is_written(strategy):
    with pytest.raises(ValueError, match="backup has to be less"):
        zs.Rounds(workers=2, backup=2)
    with pytest.raises(ValueError, match="merge="):
        zs.Rounds(merge=["mean"])
    with pytest.raises(ValueError, match=r"zs\.ParameterServerStrategy"):
        zs.Optimizer(optax.sgd(1.0), rounds=zs.Rounds())
    with strategy.scope():
        w = zs.Variable(np.zeros(2, np.float32))
        with pytest.raises(TypeError, match=r"expected a zs\.Rounds"):
            zs.Optimizer(optax.sgd(1.0), rounds=2)
        optimizer = zs.Optimizer(optax.sgd(1.0), rounds=zs.Rounds())
    with pytest.raises(ValueError, match=r"zs\.function"):
        optimizer.apply_gradients([(jnp.ones(2), w)])

    def step():
        optimizer.apply_gradients([(jnp.ones(2), w)])

    with pytest.raises(ValueError, match=r"coordinator\.schedule"):
        zs.function(step)()
    assert w.numpy().tolist() == [0, 0]
    eager = zs.function(step, eager=True)
    coordinator = zs.ClusterCoordinator(strategy)
    with pytest.raises(ValueError, match="eager=True"):
        coordinator.schedule(eager).fetch()
    with pytest.raises(ValueError, match="eager=True"):
        coordinator.join()
