"""Optimizers with wire= on a real cluster, over sockets."""

import time

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zstrat as zs
from zstrat.launch import LocalCluster

pytestmark = pytest.mark.processes

STEPS = 12


@pytest.fixture(scope="module")
def cluster():
    with LocalCluster(2, 1, transport="tcp") as running:
        yield running


@pytest.fixture(scope="module")
def other_cluster():
    """One whose workers have encoded no gradients."""
    with LocalCluster(1, 1, transport="tcp") as running:
        yield running


@pytest.fixture
def strategy(cluster):
    with zs.ParameterServerStrategy(
        cluster.resolver, variable_partitioner=zs.partitioners.FixedShardsPartitioner(2)
    ) as made:
        yield made


def encoded(coordinator, table, least):
    """Bytes before and after, as soon as the worker has told of ``least`` before."""
    deadline = time.monotonic() + 60
    while True:
        task = coordinator.metrics()["tasks"]["worker:0"]
        if task.get("encoded_from", -1) >= least:
            return task["encoded_from"], task["encoded_to"]
        assert time.monotonic() < deadline, task
        np.asarray(table)  # takes a moment


@pytest.mark.parametrize(
    ("wire", "most", "is_eager"),
    [
        ("int8", 0.02, False),
        (zs.Wire(push="int4", error_feedback=True), 0.05, False),
        (zs.Wire(push="int4", error_feedback=True), 0.05, True),
        (zs.Wire(push="topk", density=0.25), 0.6, False),
    ],
    ids=["int8", "int4", "eager", "topk"],
)
def test_steps_move_variables_by_their_gradients(strategy, wire, most, is_eager):
    gradient = np.random.default_rng(0).uniform(-1, 1, (100, 20)).astype(np.float32)
    with strategy.scope():
        table = zs.Variable(jnp.zeros((100, 20)), name="table")
        optimizer = zs.Optimizer(optax.sgd(1.0), wire=wire)
    coordinator = zs.ClusterCoordinator(strategy)

    @zs.function(eager=is_eager)
    def step(x):
        optimizer.apply_gradients([(x, table)])

    for _ in range(STEPS):
        coordinator.schedule(step, args=(gradient,))
    coordinator.join()
    # Rounding at random is off by a step of the format at most, in each of STEPS; with
    # error feedback, by what is kept.
    assert np.abs(np.asarray(table) / -STEPS - gradient).max() < most
    before, after = encoded(coordinator, table, STEPS * gradient.nbytes)
    assert after <= 0.4 * before


def test_a_restore_drops_what_was_left_out_of_gradients_of_other_values(
    strategy, tmp_path
):
    with strategy.scope():
        table = zs.Variable(jnp.zeros((100, 20)), name="table")
        wire = zs.Wire(push="topk", density=0.5)
        optimizer = zs.Optimizer(optax.sgd(1.0), wire=wire)
    coordinator = zs.ClusterCoordinator(strategy)
    saved = zs.Checkpoint(table=table)
    path = saved.save(tmp_path / "c")

    @zs.function
    def step(x):
        optimizer.apply_gradients([(x, table)])

    def trained(gradient):
        coordinator.schedule(step, args=(gradient,))
        coordinator.join()
        return np.count_nonzero(np.asarray(table))

    assert 0 < trained(np.ones((100, 20), np.float32)) < 2000
    saved.restore(path)
    assert trained(np.zeros((100, 20), np.float32)) == 0


def test_rows_of_tables_in_rounds(strategy):
    with strategy.scope():
        table = zs.Variable(jnp.zeros((100, 20)), name="table")
        optimizer = zs.Optimizer(optax.sgd(1.0), wire="int8", rounds=zs.Rounds())
    coordinator = zs.ClusterCoordinator(strategy)
    ids = np.arange(0, 100, 2)

    @zs.function
    def step(ids):
        loss = lambda t: jnp.sum(zs.embedding_lookup(t, ids) * jnp.arange(20.0))  # noqa: E731
        optimizer.apply_gradients([(zs.value_and_grad(loss)(table)[1], table)])

    for _ in range(STEPS):
        coordinator.schedule(step, args=(ids,))
    coordinator.join()
    value = np.asarray(table) / -STEPS
    assert not value[1::2].any()
    assert np.abs(value[::2] - np.arange(20)).max() <= 19 / 127


@pytest.mark.parametrize("fragments", [0, 1, 2])
def test_values_that_are_trained_are_pulled_as_bfloat16(other_cluster, fragments):
    """By plain steps, and by windows, also where those continue with a copy."""
    first = np.random.default_rng(0).uniform(-1, 1, (100, 20)).astype(np.float32)
    wire, sgd = zs.Wire(pull="bfloat16"), optax.sgd(1.0)
    strategy = zs.ParameterServerStrategy(other_cluster.resolver)
    with strategy.scope():
        table, more = (zs.Variable(first, name=name) for name in ("table", "more"))
        scale = zs.Variable(first, trainable=False, name="scale")
        if fragments:
            optimizer = zs.LocalOptimizer(
                sgd, sgd, every=2, fragments=fragments, wire=wire
            )
        else:
            optimizer = zs.Optimizer(sgd, wire=wire)
    coordinator = zs.ClusterCoordinator(strategy)

    def step(x):
        given = table.value(), more.value(), scale.value()
        optimizer.apply_gradients([(x, table), (2 * x, more)])
        return given

    step = optimizer.window(step) if fragments else zs.function(step)
    gradient = np.full((100, 20), 0.25, np.float32)
    values = [coordinator.schedule(step, args=(gradient,)) for _ in range(3)]
    coordinator.join()
    found = values[0].fetch()
    if fragments:
        found = [x[0] for x in found]
    narrow = first.astype(jnp.bfloat16).astype(np.float32)
    for value, wanted in zip(found, (narrow, narrow, first), strict=True):
        np.testing.assert_array_equal(value, wanted)
    # Servers have not rounded what they keep.
    moves = (first - np.asarray(table)) / 0.25
    np.testing.assert_allclose(moves, np.full_like(moves, moves.mean().round()), 1e-4)
    assert moves.mean().round() >= 1
    # Both at first, and later at least those that the step goes on with.
    before, after = encoded(coordinator, table, 4 * first.nbytes)
    assert after == before / 2
    strategy.close()


def test_a_format_is_for_gradients_that_travel():
    with pytest.raises(ValueError, match="scope"):
        zs.Optimizer(optax.sgd(1.0), wire="int8")
