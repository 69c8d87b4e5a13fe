"""Training under every strategy, in each way that a step runs, moves variables as plain
optax moves them by the whole batch."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fake_cluster import FakeCluster
from in_replicas import context, number
from ranks import ranks

import zstrat as zs
from zstrat.tpu.experimental import DeviceAssignment, initialize_tpu_system

RNG = np.random.default_rng(0)
BATCH, STEPS = 8, 3
DATA = {
    "x": RNG.normal(size=(BATCH * STEPS, 5)).astype(np.float32),
    "y": RNG.normal(size=(BATCH * STEPS, 3)).astype(np.float32),
    "ids": RNG.integers(0, 5, BATCH * STEPS).astype(np.int32),
}
START = {
    "w": RNG.normal(size=(5, 8)).astype(np.float32),
    "u": RNG.normal(size=(8, 3)).astype(np.float32),
    "b": np.zeros(3, np.float32),
    "table": RNG.normal(size=(6, 5)).astype(np.float32),
}
BATCHES = [
    {name: rows[n : n + BATCH] for name, rows in DATA.items()}
    for n in range(0, BATCH * STEPS, BATCH)
]
DENSE, SPARSE = optax.adam(0.05), optax.adagrad(0.1)


def loss_fn(params, batch, mean, look_up):
    """Normalized over the whole batch, and with rows of a table."""
    x = batch["x"] - mean + look_up(params["table"], batch["ids"])
    found = jnp.tanh(x @ params["w"]) @ params["u"] + params["b"]
    return jnp.mean((found - batch["y"]) ** 2)


@functools.cache
def by_optax():
    params = jax.tree.map(jnp.asarray, START)
    dense = {name: value for name, value in params.items() if name != "table"}
    states, losses = [DENSE.init(dense), SPARSE.init(params["table"])], []
    for batch in BATCHES:
        mean = batch["x"].mean(0)
        loss, grads = jax.value_and_grad(loss_fn)(params, batch, mean, rows_of)
        losses.append(float(loss))
        rows = grads.pop("table")
        moves, states[0] = DENSE.update(grads, states[0], params)
        # Rows that nobody looked up do not move, and adagrad does not move them.
        moves["table"], states[1] = SPARSE.update(rows, states[1], params["table"])
        params = optax.apply_updates(params, moves)
    return losses, params


def tpu(cores, replicas):
    topology = initialize_tpu_system(mesh_shape=(1, 2, 2, 2))
    assignment = DeviceAssignment.build(topology, cores, None, replicas)
    return zs.TPUStrategy(None, assignment)


STRATEGIES = {
    "one": lambda: zs.OneDeviceStrategy("CPU:3"),
    "two": lambda: zs.MirroredStrategy(["CPU:1", "CPU:2"]),
    "eight": zs.MirroredStrategy,
    "central": lambda: zs.CentralStorageStrategy(["CPU:1", "CPU:2"], "CPU:5"),
    "tpu": zs.TPUStrategy,
    "tpu of two": lambda: tpu([1, 1, 1, 2], 4),
    "tpu of four": lambda: tpu([1, 1, 2, 2], 2),
    "one tpu": lambda: tpu([1, 1, 1, 2], 1),
}


def rows_of(table, ids):
    return table[ids]


def laid_out(strategy, array):
    """A weight is split over the logical devices of a replica."""
    if not isinstance(strategy, zs.TPUStrategy):
        return array
    count = strategy._mesh.mesh.size // strategy.num_replicas_in_sync
    return strategy.experimental_split_to_logical_devices(array, [1, count])


def trained(strategy, way, rank=0, cluster=None):
    """Losses and values; the processes begin with different ones."""
    with strategy.scope():
        params = zs.create_variables(jax.tree.map(lambda x: x * (rank == 0), START))
        dense = zs.Optimizer(DENSE, count_iterations=True)
        sparse = zs.Optimizer(SPARSE)
        seen = zs.Variable(0, aggregation=zs.VariableAggregation.SUM)
    replicas = strategy.num_replicas_in_sync
    # A cluster without processes has no lookups: there it is one more dense variable.
    look_up = zs.embedding_lookup if cluster is None else rows_of

    def replica(batch):
        if "turns" in way:
            int(number())
        mean = context().all_reduce("mean", jnp.mean(batch["x"], 0))

        def loss(params):
            laid = {**params, "w": laid_out(strategy, params["w"])}
            return loss_fn(laid, batch, mean, look_up) / replicas

        value, grads = zs.value_and_grad(loss)(params)
        rows = grads.pop("table")
        assert isinstance(rows, zs.IndexedSlices) == (cluster is None)
        dense.apply_gradients(grads, {name: params[name] for name in grads})
        sparse.apply_gradients([(rows, params["table"])])
        seen.assign_add(jnp.int32(len(batch["x"])))
        return value

    def step(batch):
        losses = strategy.run(replica, args=(batch,))
        return strategy.reduce("sum", losses, axis=None)

    drawing = zs.function(lambda iterator: step(next(iterator)))
    rows = zs.data.Dataset.from_tensor_slices(DATA)
    if cluster is not None:
        drawing = functools.partial(cluster.run, cluster.ship(drawing))
        data = zs.StepIterator(iter(BATCHES), BATCHES[0])
    elif "function" in way:
        data = strategy.distribute_datasets_from_function(
            lambda context: rows.batch(context.get_per_replica_batch_size(BATCH))
        )
    else:
        data = strategy.experimental_distribute_dataset(rows.batch(BATCH))
    if "step" in way:
        iterator = iter(data)
        losses = [float(drawing(iterator)) for _ in range(STEPS)]
        assert cluster is not None or drawing.trace_count == 1
    else:
        losses = [float(step(batch)) for batch in data]
    assert dense.iterations.numpy() == STEPS
    assert seen.numpy() == BATCH * STEPS
    return losses, {name: each.numpy() for name, each in params.items()}


CASES = [
    *[(name, way) for name in STRATEGIES for way in ("in a step", "by itself")],
    *[(name, "in turns, by itself") for name in ("two", "central")],
    ("two", "in turns in a step"),
    ("eight", "in a step, of a function"),
    ("tpu", "in a step, of a function"),
    ("processes of one", "in a step"),
    ("processes of two", "in a step"),
    ("processes of two", "in turns, by itself"),
    ("servers", "in a step"),
]


@pytest.mark.shows("MirroredStrategy", "TPUStrategy.scope")
@pytest.mark.shows("ParameterServerStrategy.run")
@pytest.mark.parametrize(
    ("name", "way"),
    [case for case in CASES if "tpu" not in case[0] or "step" in case[1]],
    ids=str,
)
def test_training_is_that_of_the_whole_batch(name, way):
    if "processes" in name:
        local = 2 if name.endswith("two") else 1
        found = ranks(2, lambda strategy, rank: trained(strategy, way, rank), local)
    elif name == "servers":
        cluster = FakeCluster(devices=2)
        found = [trained(cluster.strategy, way, cluster=cluster)]
    else:
        found = [trained(STRATEGIES[name](), way)]
    losses, params = by_optax()
    for seen, values in found:
        np.testing.assert_allclose(seen, losses, rtol=1e-4)
        for each, value in params.items():
            np.testing.assert_allclose(values[each], value, rtol=1e-3, atol=1e-5)
