"""What strategies and groups compute on the devices that jax has, of whatever kind.

Run by `test_accelerator_devices`, in processes of their own: with virtual devices of a
CPU, and with the accelerators of this machine.
"""

from __future__ import annotations

import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor

import digits_model as model
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zstrat as zs
from zstrat.cluster import ClusterSpec, SimpleClusterResolver, TPUClusterResolver
from zstrat.collectives import Group

DEVICES = jax.local_devices()
COUNT = len(DEVICES)
KIND = {"cuda": "gpu", "rocm": "gpu"}.get(DEVICES[0].platform, DEVICES[0].platform)
NAMES = [f"/device:{KIND.upper()}:{n}" for n in range(COUNT)]
RNG = np.random.default_rng(1)


(HOST, *_) = jax.local_devices(backend="cpu")


class Made:
    """A strategy, the devices of its replicas, and the name of the first one of those
    that its variables are on."""

    def __init__(self, strategy, replicas, home):
        self.strategy, self.replicas, self._home = strategy, replicas, home
        assert strategy.num_replicas_in_sync == len(replicas)

    def has(self, *variables):
        """Whether they are there, and steps have them where the replicas are."""
        where = [variable.storage.value().devices() for variable in variables]
        return all(devices == set(self.replicas) for devices in where) and all(
            variable.device.endswith(self._home) for variable in variables
        )


@pytest.fixture(params=["one", "mirrored", "central", "host"])
def made(request):
    match request.param:
        case "one":
            return Made(zs.OneDeviceStrategy(NAMES[-1]), DEVICES[-1:], NAMES[-1])
        case "mirrored":
            return Made(zs.MirroredStrategy(), DEVICES, NAMES[0])
        case "central":
            strategy = zs.CentralStorageStrategy(NAMES, "CPU:0")
            return Made(strategy, DEVICES, "/device:CPU:0")
    return Made(zs.OneDeviceStrategy("CPU:0"), [HOST], "/device:CPU:0")


def test_steps_of_training_are_those_of_numpy(made):
    strategy = made.strategy
    with strategy.scope():
        params = {name: zs.Variable(value) for name, value in model.START.items()}
        optimizer = zs.Optimizer(optax.sgd(model.RATE))

    def replica(pixels, labels):
        value, gradients = zs.value_and_grad(model.loss)(params, pixels, labels)
        pairs = [(gradients[name], params[name]) for name in params]
        optimizer.apply_gradients(pairs)
        return value

    @zs.function
    def step(iterator):
        losses = strategy.run(replica, args=next(iterator))
        return strategy.reduce("sum", losses, axis=None)

    rows = zs.data.Dataset.from_tensor_slices((model.PIXELS, model.LABELS))
    batches = rows.batch(model.ROWS).repeat()
    iterator = iter(strategy.experimental_distribute_dataset(batches))
    losses = [float(step(iterator)) for _ in range(model.STEPS)]
    model.same(losses, {name: v.numpy() for name, v in params.items()})
    assert made.has(*params.values())


def test_batches_of_a_dataset_are_on_the_devices_of_the_replicas(made):
    strategy = made.strategy
    replicas = strategy.num_replicas_in_sync
    rows = np.arange(4 * replicas * 3, dtype=np.float32).reshape(-1, 3)
    dataset = zs.data.Dataset.from_tensor_slices(rows).batch(2 * replicas)
    found = []
    for batch in strategy.experimental_distribute_dataset(dataset):
        assert isinstance(batch, zs.PerReplica) == (replicas > 1)
        parts = strategy.experimental_local_results(batch)
        where = [device for part in parts for device in part.devices()]
        assert where == made.replicas
        found += parts
    np.testing.assert_array_equal(np.concatenate(found), rows)


def on_replicas(strategy, parts):
    return strategy.experimental_distribute_values_from_function(
        lambda context: parts[context.replica_id_in_sync_group]
    )


@pytest.mark.parametrize("in_step", [False, True])
def test_replicas_in_turns_meet_in_a_merge_call(made, in_step):
    strategy = made.strategy
    replicas = strategy.num_replicas_in_sync
    parts = RNG.integers(0, 9, (replicas, 4, 3)).astype(np.float32)

    def replica(x):
        context = zs.get_replica_context()
        total = context.merge_call(
            lambda strategy, x: strategy.reduce("sum", x, axis=0), args=(x,)
        )
        return total - x[0]

    def run(x):
        return strategy.run(replica, args=(x,))

    result = (zs.function(run) if in_step else run)(on_replicas(strategy, parts))
    found = strategy.experimental_local_results(result)
    total = parts.sum((0, 1))
    for value, part in zip(found, parts, strict=True):
        np.testing.assert_array_equal(value, total - part[0])


def test_python_looks_at_a_value_on_the_device(made):
    strategy = made.strategy
    replicas = strategy.num_replicas_in_sync
    parts = [np.float32([n, -n]) * (-1) ** n for n in range(replicas)]
    result = strategy.run(
        lambda x: x if x[0] > x[1] else -x, args=(on_replicas(strategy, parts),)
    )
    found = strategy.experimental_local_results(result)
    for n, value in enumerate(found):
        np.testing.assert_array_equal(value, [n, -n])


def test_a_variable_is_read_and_written_in_the_memory_of_the_devices(made):
    strategy = made.strategy
    value = RNG.integers(-9, 9, (6, 3)).astype(np.float32)
    with strategy.scope():
        v = zs.Variable(value)
        count = zs.Variable(np.int32(3))
    index, rows = np.array([4, 1, 4]), np.arange(9, dtype=np.float32).reshape(3, 3)
    v.assign(value + 1)
    v.assign_add(2 * value)
    v.assign_sub(np.ones_like(value))
    v.scatter_add(zs.IndexedSlices(rows, index))
    v.scatter_update(zs.IndexedSlices(rows[:1], index[1:2]))
    count.assign_add(2)
    expected = 3 * value
    np.add.at(expected, index, rows)
    expected[1] = rows[0]
    np.testing.assert_array_equal(v.numpy(), expected)
    assert count.numpy() == 5
    assert made.has(v, count)


def test_a_variable_comes_back_from_a_checkpoint(made, tmp_path):
    strategy = made.strategy
    value = RNG.normal(size=(5, 3)).astype(np.float32)
    small = jnp.asarray(value, jnp.bfloat16)
    with strategy.scope():
        v, half = zs.Variable(value), zs.Variable(small)
    path = zs.Checkpoint(v=v, half=half).save(tmp_path / "kept")
    v.assign(np.zeros_like(value))
    half.assign(jnp.zeros_like(small))
    zs.Checkpoint(v=v, half=half).restore(path).assert_consumed()
    np.testing.assert_array_equal(v.numpy(), value)
    np.testing.assert_array_equal(
        half.numpy().astype(np.float32), np.asarray(small, np.float32)
    )
    assert made.has(v, half)


def of_logical_devices():
    """A strategy of one replica, which has all devices as logical ones."""
    resolver = TPUClusterResolver("local")
    topology = zs.tpu.experimental.initialize_tpu_system(resolver)
    assignment = zs.tpu.experimental.DeviceAssignment.build(
        topology, computation_shape=topology.mesh_shape, num_replicas=1
    )
    return zs.TPUStrategy(resolver, experimental_device_assignment=assignment)


def test_a_value_is_split_over_the_logical_devices():
    strategy = of_logical_devices()
    x = RNG.normal(size=(4 * COUNT, 6)).astype(np.float32)
    w = RNG.normal(size=(6, 5)).astype(np.float32)

    def replica(x):
        cut = strategy.experimental_split_to_logical_devices(x, [COUNT, 1])
        return cut @ w

    program = jax.jit(lambda x: strategy.run(replica, args=(x,)))
    compiled = program.lower(x).compile()
    assert compiled.output_shardings.device_set == set(DEVICES)
    assert compiled.output_shardings.shard_shape((4 * COUNT, 5)) == (4, 5)
    np.testing.assert_allclose(
        strategy.run(zs.function(replica), args=(x,)), x @ w, rtol=1e-4, atol=1e-5
    )


def test_a_value_is_assigned_to_each_logical_device():
    strategy = of_logical_devices()
    x = RNG.normal(size=(3, 4)).astype(np.float32)
    for number in range(COUNT):

        def replica(x, number=number):
            return strategy.experimental_assign_to_logical_device(x + x, number)

        program = jax.jit(lambda x, replica=replica: strategy.run(replica, args=(x,)))
        where = program.lower(x).compile().output_shardings
        assert DEVICES[number] in where.device_set
        assert where.is_fully_replicated  # so that this device has all of it
        np.testing.assert_array_equal(
            strategy.run(zs.function(replica), args=(x,)), x + x
        )


def test_a_group_reduces_arrays_of_the_devices():
    """Two ranks on threads, each with arrays on a device of its own if there are two;
    what comes back is where it came from."""
    folder = tempfile.mkdtemp(prefix="zs-")
    spec = ClusterSpec({"worker": [f"ipc://{folder}/{rank}" for rank in (0, 1)]})
    homes = DEVICES[0], DEVICES[-1]
    parts = RNG.integers(0, 99, (2, 70_000)).astype(np.float32)

    def rank(n):
        resolver = SimpleClusterResolver(spec, task_type="worker", task_id=n)
        with Group(resolver, timeout=30, rendezvous_timeout=30) as group:
            mine = jax.device_put(parts[n], homes[n])
            total = group.all_reduce(mine)
            tree = group.all_reduce({"a": mine[:3], "b": np.float64(n)}, "max")
            both = group.all_gather(mine[:2])
            group.barrier()
        np.testing.assert_array_equal(mine, parts[n])
        return total, tree, both

    try:
        with ThreadPoolExecutor(2) as threads:
            found = list(threads.map(rank, (0, 1)))
    finally:
        shutil.rmtree(folder)
    for home, (total, tree, both) in zip(homes, found, strict=True):
        np.testing.assert_array_equal(total, parts.sum(0))
        np.testing.assert_array_equal(tree["a"], parts[:, :3].max(0))
        assert tree["b"] == 1
        np.testing.assert_array_equal(both, parts[:, :2].ravel())
        for array in (total, tree["a"], both):
            assert array.devices() == {home}
