"""TPUStrategy on eight devices: TensorFlow's examples with jax in place of it,
its errors, and the same numbers as on one device."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tpu_replicas import RNG, W, X, Y, on_replicas, whole

import zstrat as zs
from zstrat.cluster import ClusterSpec, TPUClusterResolver
from zstrat.tpu.experimental import DeviceAssignment, Topology


@pytest.mark.shows("TPUStrategy.cluster_resolver", "TPUStrategy.extended")
@pytest.mark.shows("TPUStrategy.num_replicas_in_sync")
@pytest.mark.shows("TPUStrategy(tpu_cluster_resolver=)")
@pytest.mark.shows("TPUStrategy(experimental_device_assignment=)")
def test_each_core_or_several_of_them_are_a_replica(tpu_resolver, make_tpu):
    strategy = zs.TPUStrategy(tpu_resolver)
    assert strategy.num_replicas_in_sync == 8
    assert strategy.cluster_resolver is tpu_resolver
    assert strategy.extended.worker_devices == tuple(
        f"/job:localhost/replica:0/task:0/device:CPU:{n}" for n in range(8)
    )
    assert strategy.extended.parameter_devices == strategy.extended.worker_devices
    assert strategy.extended.experimental_require_static_shapes is True
    three = make_tpu([1, 1, 1, 2], 3)
    for each, replicas, words in ((strategy, 8, "8 replicas of 1"), (three, 3, "of 2")):
        assert each.num_replicas_in_sync == replicas
        assert each.extended.num_hosts == 1
        assert each.extended.num_replicas_per_host == replicas
        assert words in repr(each)
    here = zs.TPUStrategy().cluster_resolver  # the TPU of this machine
    assert isinstance(here, TPUClusterResolver)
    assert here.cluster_spec() == ClusterSpec({})


def test_what_is_no_system_of_tpus(tpu_resolver, monkeypatch):
    with pytest.raises(TypeError, match="ClusterResolver"):
        zs.TPUStrategy("local")
    with pytest.raises(TypeError, match="DeviceAssignment"):
        zs.TPUStrategy(tpu_resolver, [[[0, 0, 0, 0]]])
    topology = Topology(
        mesh_shape=[1, 1, 1, 2], device_coordinates=[[[0, 0, 0, 0], [0, 0, 0, 1]]]
    )
    another = DeviceAssignment.build(topology)
    with pytest.raises(ValueError, match=r"1 tasks of 2 devices.*this job have \[8\]"):
        zs.TPUStrategy(tpu_resolver, another)
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    with pytest.raises(NotImplementedError):
        zs.TPUStrategy(tpu_resolver)


@pytest.mark.shows("StrategyExtended.worker_devices")
def test_the_devices_of_a_logical_device(make_tpu):
    """Cores of a chip are neighbours in the order of ids; replicas go along y, then
    along z: the cores of a mesh of 1x2x2x2 by hand, in a ring of chips."""
    strategy = make_tpu([1, 1, 1, 2], 4)
    extended = strategy.extended

    def numbers():
        return [int(name.rpartition(":")[2]) for name in extended.worker_devices]

    assert numbers() == [0, 2, 6, 4]
    with extended.experimental_logical_device(1):
        assert numbers() == [1, 3, 7, 5]
        with extended.experimental_logical_device(0):
            assert numbers() == [0, 2, 6, 4]
        assert numbers() == [1, 3, 7, 5]
    assert numbers() == [0, 2, 6, 4]
    for number in (2, -1):
        words = (
            rf"`logical_device_id` not in range \(was {number}, but there are only 2"
        )
        with pytest.raises(ValueError, match=words):
            with extended.experimental_logical_device(number):
                pass


@pytest.mark.shows("TPUStrategy.run")
@pytest.mark.shows("TPUStrategy.experimental_assign_to_logical_device")
@pytest.mark.parametrize("replicas", [1, 4])
def test_tensorflows_addition_on_logical_device_0(make_tpu, replicas):
    strategy = make_tpu([1, 1, 1, 2], replicas)

    @zs.function
    def step_fn(inputs, times):
        features, _ = inputs
        output = jnp.add(features, features) * times
        return strategy.experimental_assign_to_logical_device(output, 0)

    numbers = strategy.experimental_distribute_values_from_function(
        lambda context: context.num_replicas_in_sync
    )
    given = on_replicas(strategy, X), on_replicas(strategy, Y)
    for step in (step_fn, functools.partial(step_fn)):  # a partial of a step is one
        result = strategy.run(step, args=(given, numbers))
        np.testing.assert_allclose(whole(strategy, result), replicas * (X + X))


@pytest.mark.shows("TPUStrategy.experimental_split_to_logical_devices")
@pytest.mark.parametrize("spmd", [False, True])
def test_tensorflows_image_split_over_eight(make_tpu, spmd):
    strategy = make_tpu([1, 2, 2, 2], 1, experimental_spmd_xla_partitioning=spmd)
    images = RNG.normal(size=(2, 4, 8, 3)).astype(np.float32)
    kernel = RNG.normal(size=(3, 5)).astype(np.float32)

    @zs.function
    def step_fn(inputs):
        inputs = strategy.experimental_split_to_logical_devices(inputs, [1, 2, 4, 1])
        return jnp.tanh(inputs @ kernel)

    result = strategy.run(step_fn, args=(images,))
    np.testing.assert_allclose(
        whole(strategy, result), np.tanh(images @ kernel), rtol=1e-4, atol=1e-5
    )


@pytest.mark.shows("TPUStrategy.experimental_replicate_to_logical_devices")
def test_split_images_and_replicated_labels(make_tpu):
    """The replicate example with a split that fits: its loss is that of the whole."""
    strategy = make_tpu([1, 1, 1, 2], 4)

    @zs.function
    def step_fn(inputs):
        images, labels = inputs
        images = strategy.experimental_split_to_logical_devices(images, [1, 2])
        output = jnp.tanh(images @ W)
        labels = strategy.experimental_replicate_to_logical_devices(labels)
        output = strategy.experimental_replicate_to_logical_devices(output)
        return jnp.mean((labels - output) ** 2)

    inputs = on_replicas(strategy, X), on_replicas(strategy, Y)
    losses = strategy.run(step_fn, args=(inputs,))
    loss = strategy.reduce("mean", losses, axis=None)
    np.testing.assert_allclose(loss, np.mean((Y - np.tanh(X @ W)) ** 2), rtol=1e-5)


@pytest.mark.shows("experimental_assign_to_logical_device(logical_device_id=)")
@pytest.mark.shows("experimental_split_to_logical_devices(partition_dimensions=)")
@pytest.mark.shows("TPUStrategy(experimental_spmd_xla_partitioning=)")
def test_the_checks_of_annotations(make_tpu):
    """Those of tests/strategy/test_strategy_tpu_tiles.py, by the strategy."""
    strategy = make_tpu([1, 1, 1, 2], 4)
    x = np.zeros((3, 4), np.float32)
    split = strategy.experimental_split_to_logical_devices
    for wrong in ([2], [2, 2], [1, 4]):
        with pytest.raises(ValueError, match="partition_dimensions"):
            split(x, wrong)
    for number in (2, -1):
        with pytest.raises(ValueError, match="`logical_core_id`"):
            strategy.experimental_assign_to_logical_device(x, number)
    assert strategy.experimental_replicate_to_logical_devices(x) is x
    with_one = zs.TPUStrategy()
    assert with_one.experimental_split_to_logical_devices(x, [1, 1]) is x
    spmd = make_tpu([1, 1, 1, 2], 4, experimental_spmd_xla_partitioning=True)
    with pytest.raises(ValueError, match="experimental_spmd_xla_partitioning="):
        spmd.experimental_assign_to_logical_device(X, 0)


def test_a_split_result_lies_in_tiles_on_its_replica(make_tpu):
    strategy = make_tpu([1, 1, 2, 2], 2)

    @zs.function
    def step_fn(x):
        return strategy.experimental_split_to_logical_devices(x * 2, [2, 2])

    result = strategy.run(step_fn, args=(on_replicas(strategy, X),))
    np.testing.assert_allclose(whole(strategy, result), X * 2)
    shards = {shard.device.id: shard.data for shard in result.whole.addressable_shards}
    assert {data.shape for data in shards.values()} == {(2, 3)}
    assignment = strategy.extended.worker_devices
    first = int(assignment[0].rpartition(":")[2])
    np.testing.assert_allclose(shards[first], X[:2, :3] * 2)


@pytest.mark.shows("TPUStrategy.experimental_local_results")
def test_a_value_of_a_replica_is_the_view_that_its_logical_device_0_has(make_tpu):
    strategy = make_tpu([1, 1, 1, 2], 4)

    @zs.function
    def step_fn(x):
        return x + 1

    result = strategy.run(step_fn, args=(on_replicas(strategy, X),))
    parts = strategy.experimental_local_results(result)
    names = [f":{next(iter(part.devices())).id}" for part in parts]
    assert names == [name[-2:] for name in strategy.extended.worker_devices]
    np.testing.assert_array_equal(np.concatenate(parts), X + 1)


def test_the_program_of_a_step_computes_with_tiles(make_tpu):
    """One device multiplies its columns alone, and talks to its replica alone."""
    strategy = make_tpu([1, 1, 2, 2], 2)

    def replica(x):
        w = strategy.experimental_split_to_logical_devices(jnp.asarray(W), [1, 4])
        hidden = jnp.tanh(x @ w)
        return strategy.experimental_replicate_to_logical_devices(hidden)

    program = jax.jit(lambda x: strategy.run(replica, args=(x,)))
    x = strategy._mesh.layout.place(np.split(X, 2))
    np.testing.assert_allclose(
        whole(strategy, program(x)), np.tanh(X @ W), rtol=1e-4, atol=1e-5
    )
    compiled = program.lower(x).compile()
    text = compiled.as_text()
    assert "f32[4,1]" in text
    assert re.search(
        r"all-gather\(.*replica_groups=(\[2,4\]<=\[8\]|{{0,1,2,3},{4,5,6,7}})", text
    )
    for sharding in jax.tree.leaves(compiled.input_shardings[0]):
        assert sharding.shard_shape(X.shape) == (4, 6)


def test_a_plain_function_outside_of_a_step_is_refused(tpu_resolver):
    strategy = zs.TPUStrategy(tpu_resolver)
    words = "TPUStrategy"
    eager = zs.function(lambda: 1, eager=True)
    for fn in (lambda: 1, functools.partial(int, 1), eager):
        with pytest.raises(NotImplementedError, match=words):
            strategy.run(fn)

    for fn in (lambda: 1, zs.function(lambda: 1)):

        @zs.function(eager=True)
        def step(fn=fn):
            return strategy.run(fn)

        with pytest.raises(NotImplementedError, match=words):
            step()


def test_a_function_returns_tensors(tpu_resolver):
    strategy = zs.TPUStrategy(tpu_resolver)

    @zs.function
    def step():
        return strategy.run(lambda: ("words", 1))

    with pytest.raises(TypeError, match="'words'"):
        step()

    @zs.function
    def nothing():
        return strategy.run(lambda: None)

    assert nothing() is None


@pytest.mark.parametrize(("shape", "replicas"), [([1, 1, 2, 2], 2), ([1, 1, 1, 2], 4)])
def test_replicas_reduce_among_themselves(make_tpu, shape, replicas):
    strategy = make_tpu(shape, replicas)

    @zs.function
    def step(x):
        def replica(x):
            context = zs.get_replica_context()
            x = strategy.experimental_split_to_logical_devices(
                x, [1, 8 // replicas][: x.ndim]
            )
            number = context.replica_id_in_sync_group
            return (
                context.all_reduce("sum", x),
                context.all_gather(x, axis=0),
                jnp.asarray(number),
            )

        return strategy.run(replica, args=(x,))

    x = RNG.normal(size=(8, 4)).astype(np.float32)
    total, joined, numbers = step(on_replicas(strategy, x))
    expected = np.sum(np.split(x, replicas), axis=0)
    for part in strategy.experimental_local_results(total):
        np.testing.assert_allclose(part, expected, rtol=1e-5)
    for part in strategy.experimental_local_results(joined):
        np.testing.assert_allclose(part, x, rtol=1e-6)
    numbers = strategy.experimental_local_results(numbers)
    assert [int(number) for number in numbers] == list(range(replicas))
