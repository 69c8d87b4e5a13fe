"""MirroredStrategy on eight devices: their names, and values that lie on them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zstrat as zs
from zstrat.strategy import PerReplica

R = 8
RNG = np.random.default_rng(0)
X = RNG.normal(size=(16, 3)).astype(np.float32)


@pytest.fixture
def eight():
    return zs.MirroredStrategy()


def test_its_devices_are_all_of_this_process(eight):
    names = tuple(f"/job:localhost/replica:0/task:0/device:CPU:{n}" for n in range(R))
    assert eight.num_replicas_in_sync == R
    assert eight.extended.worker_devices == names
    assert eight.extended.parameter_devices == names
    assert eight.cluster_resolver is None


@pytest.mark.parametrize(
    "name",
    [
        "CPU:1",
        "/cpu:1",
        "/device:CPU:1",
        "/job:localhost/replica:0/task:0/device:CPU:1",
    ],
)
def test_a_device_has_tensorflows_names(name):
    strategy = zs.MirroredStrategy([name, jax.devices()[3]])
    assert [name[-5:] for name in strategy.extended.worker_devices] == [
        "CPU:1",
        "CPU:3",
    ]


@pytest.mark.parametrize(
    ("devices", "words"),
    [
        ([], "GPU"),
        ("CPU:0", "GPU"),
        (["CPU:0", "CPU:0"], "CPU"),
        (["GPU:0"], r"'GPU:0'.*CPU.*\b7\b"),
        (["CPU:8"], r"'CPU:8'.*CPU.*\b7\b"),
        (["/job:worker/task:1/device:CPU:0"], "CPU"),
        (["nonsense"], "GPU"),
    ],
)
def test_what_is_no_device_is_refused(devices, words):
    with pytest.raises(ValueError, match=words):
        zs.MirroredStrategy(devices)
    with pytest.raises(TypeError, match=r"CrossDeviceOps.*'nccl'"):
        zs.MirroredStrategy(["CPU:0", "CPU:1"], cross_device_ops="nccl")


def test_gradients_per_replica_are_refused_outside_of_the_replicas(two):
    with two.scope():
        v = zs.Variable(np.ones(3, np.float32))
        optimizer = zs.Optimizer(optax.sgd(0.1))
    gradient = two.run(lambda: jnp.ones(3))
    with pytest.raises(TypeError, match="'Variable'"):
        optimizer.apply_gradients([(gradient, v)])
    optimizer.apply_gradients([(two.reduce("sum", gradient, None), v)])
    np.testing.assert_allclose(v.numpy(), 0.8, rtol=1e-6)
    mirrored = two.extended.broadcast_to(np.ones(3, np.float32), v)
    optimizer.apply_gradients([(mirrored, v)])  # the same for all copies
    np.testing.assert_allclose(v.numpy(), 0.7, rtol=1e-6)


@pytest.mark.shows("PerReplica values")
def test_values_per_replica_go_in_and_come_out_where_they_are(eight):
    given = eight._mesh.layout.place_batch(X)
    result = eight.run(lambda x: (x * 2, x.sum()), args=(given,))
    for value, shape in zip(result, [(2, 3), ()], strict=True):
        assert isinstance(value, PerReplica)
        assert value.whole.sharding.is_equivalent_to(given.whole.sharding, 1)
        for number, part in enumerate(value.values):
            assert part.devices() == {jax.devices()[number]}
            assert part.shape == shape
    shards = result[0].whole.addressable_shards
    for part, shard in zip(result[0].values, shards, strict=True):
        assert part.unsafe_buffer_pointer() == shard.data.unsafe_buffer_pointer()
    # As in TensorFlow, values of several devices may be added.
    np.testing.assert_allclose(
        sum(eight.experimental_local_results(result[1])), X.sum(), rtol=1e-5
    )
    assert eight.gather(result[0], 0) is result[0].whole


def test_a_number_that_is_the_same_everywhere_stays_a_number(two):
    numbers = two.experimental_distribute_values_from_function(
        lambda context: context.num_replicas_in_sync
    )
    result = two.run(lambda x: x * 2, args=(numbers,))
    assert result == 4
    assert isinstance(result, int)
    differ = two.experimental_distribute_values_from_function(
        lambda context: context.replica_id_in_sync_group + 1
    )
    found = two.run(lambda x: x * 2, args=(differ,))
    assert [int(x) for x in found.values] == [2, 4]


def test_axes_of_one_array_are_checked(eight):
    value, scalars = eight.run(
        lambda x: (x, x.sum()), (eight._mesh.layout.place_batch(X),)
    )
    for op in ("sum", "mean"):
        with pytest.raises(ValueError, match="out of bounds"):
            eight.reduce(op, value, 2)
        with pytest.raises(TypeError, match="axis must be"):
            eight.reduce(op, value, 1.0)
        with pytest.raises(ValueError, match="axis="):
            eight.reduce(op, scalars, 0)
    with pytest.raises(ValueError, match="rank of at least 1"):
        eight.gather(scalars, 0)
    with pytest.raises(ValueError, match="DistributedValues"):
        eight.reduce("sum", 1.0, None)


@pytest.mark.parametrize("as_step", [True, False], ids=["in a step", "by itself"])
def test_an_uneven_last_batch_weighs_each_element_once(two, as_step):
    """Six elements, four on one replica and two on the other."""
    parts = PerReplica((np.arange(4.0, dtype=np.float32), np.float32([4.0, 5.0])))

    def step(batch):
        doubled = two.run(lambda x: x * 2, args=(batch,))
        return two.reduce("mean", doubled, axis=0), two.gather(doubled, 0)

    mean, gathered = (zs.function(step) if as_step else step)(parts)
    assert mean == 5.0
    np.testing.assert_array_equal(gathered, np.arange(6) * 2)


def test_place_gives_each_device_its_part(two):
    placed = two._mesh.layout.place([{"x": np.ones(2)}, {"x": np.zeros(2)}])
    assert placed["x"].whole.shape == (4,)
    assert [x.tolist() for x in placed["x"].values] == [[1, 1], [0, 0]]
    uneven = two._mesh.layout.place([np.ones(2), np.ones(1)])
    assert uneven.whole is None
    scalars = two._mesh.layout.place([1.0, 2.0])
    assert [float(x) for x in scalars.values] == [1.0, 2.0]
    buffer = np.ones(4, np.float32)
    batch = two._mesh.layout.place_batch(buffer)
    buffer[:] = 7
    assert two.reduce("sum", batch, 0) == 4.0


def test_a_program_over_parts_of_the_cpu_is_done_when_its_step_returns(eight):
    """Two of them under way could wait for each other's threads for ever."""

    def work(x):
        for _ in range(20):
            x = jnp.tanh(x @ x)
        return zs.get_replica_context().all_reduce("sum", x)

    @zs.function
    def step(x):
        return eight.run(work, args=(x,))

    for once in (step, lambda x: eight.run(work, args=(x,))):
        once(jnp.ones((400, 400)))  # compiles it
        assert once(jnp.ones((400, 400))).whole.is_ready()
