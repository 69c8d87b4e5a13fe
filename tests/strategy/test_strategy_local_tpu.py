"""TPUStrategy on eight devices: TensorFlow's examples with jax in place of it,
its errors, and the same numbers as on one device."""

import functools
import gc
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zstrat as zs
from zstrat.cluster import ClusterSpec, SimpleClusterResolver, TPUClusterResolver
from zstrat.strategy._tpu import _require_own
from zstrat.tpu.experimental import DeviceAssignment, Topology, initialize_tpu_system

RNG = np.random.default_rng(0)
X = RNG.normal(size=(8, 6)).astype(np.float32)
Y = RNG.normal(size=(8, 4)).astype(np.float32)
W = RNG.normal(size=(6, 4)).astype(np.float32)


@pytest.fixture
def resolver():
    return TPUClusterResolver("local")


@pytest.fixture
def make(resolver):
    """TensorFlow's first lines."""

    def make(
        computation_shape=None, num_replicas=1, mesh_shape=(1, 2, 2, 2), **options
    ):
        zs.experimental_connect_to_cluster(resolver)
        topology = zs.tpu.experimental.initialize_tpu_system(
            resolver, mesh_shape=mesh_shape
        )
        assignment = zs.tpu.experimental.DeviceAssignment.build(
            topology, computation_shape=computation_shape, num_replicas=num_replicas
        )
        return zs.TPUStrategy(
            resolver, experimental_device_assignment=assignment, **options
        )

    return make


def on_replicas(strategy, array):
    """Its rows, dealt out to the replicas."""
    parts = np.split(array, strategy.num_replicas_in_sync)
    return strategy.experimental_distribute_values_from_function(
        lambda context: parts[context.replica_id_in_sync_group]
    )


def whole(strategy, value):
    parts = strategy.experimental_local_results(value)
    return np.concatenate([np.asarray(part) for part in parts])


# ---- the face --------------------------------------------------------------------


@pytest.mark.shows("TPUStrategy.cluster_resolver", "TPUStrategy.extended")
@pytest.mark.shows("TPUStrategy.num_replicas_in_sync")
def test_each_core_is_a_replica(resolver):
    strategy = zs.TPUStrategy(resolver)
    assert strategy.num_replicas_in_sync == 8
    assert strategy.cluster_resolver is resolver
    assert strategy.extended.worker_devices == tuple(
        f"/job:localhost/replica:0/task:0/device:CPU:{n}" for n in range(8)
    )
    assert strategy.extended.parameter_devices == strategy.extended.worker_devices
    assert strategy.extended.num_hosts == 1
    assert strategy.extended.num_replicas_per_host == 8
    assert strategy.extended.experimental_require_static_shapes is True
    assert "8 replicas of 1" in repr(strategy)


@pytest.mark.shows("TPUStrategy(tpu_cluster_resolver=)")
def test_without_arguments_it_is_the_tpu_of_this_machine():
    strategy = zs.TPUStrategy()
    assert isinstance(strategy.cluster_resolver, TPUClusterResolver)
    assert strategy.cluster_resolver.cluster_spec() == ClusterSpec({})


@pytest.mark.shows("TPUStrategy(experimental_device_assignment=)")
def test_replicas_of_a_device_assignment(make):
    strategy = make([1, 1, 1, 2], 3)
    assert strategy.num_replicas_in_sync == 3
    assert strategy.extended.num_hosts == 1
    assert strategy.extended.num_replicas_per_host == 3
    assert "3 replicas of 2" in repr(strategy)


@pytest.mark.shows("StrategyExtended.worker_devices")
def test_the_devices_of_a_logical_device(make):
    """Cores of a chip are neighbours in the order of ids; replicas go along y, then
    along z: the cores of a mesh of 1x2x2x2 by hand, in a ring of chips."""
    strategy = make([1, 1, 1, 2], 4)
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


def test_arguments_that_are_something_else(resolver):
    with pytest.raises(TypeError, match="must be a ClusterResolver or None, got str"):
        zs.TPUStrategy("local")
    with pytest.raises(TypeError, match=r"must be a DeviceAssignment.*got list"):
        zs.TPUStrategy(resolver, [[[0, 0, 0, 0]]])


def test_an_assignment_of_another_system(resolver):
    topology = Topology(
        mesh_shape=[1, 1, 1, 2], device_coordinates=[[[0, 0, 0, 0], [0, 0, 0, 1]]]
    )
    assignment = DeviceAssignment.build(topology)
    with pytest.raises(ValueError, match=r"1 tasks of 2 devices.*this job have \[8\]"):
        zs.TPUStrategy(resolver, assignment)


# ---- annotations ---------------------------------------------------------------


@pytest.mark.shows("TPUStrategy.experimental_assign_to_logical_device")
def test_tensorflows_addition_on_logical_device_0(make):
    strategy = make([1, 1, 1, 2], 1)

    @zs.function
    def step_fn(inputs):
        features, _ = inputs
        output = jnp.add(features, features)
        return strategy.experimental_assign_to_logical_device(output, 0)

    result = strategy.run(step_fn, args=((X, Y),))
    np.testing.assert_allclose(whole(strategy, result), X + X)


def test_the_same_with_four_replicas(make):
    strategy = make([1, 1, 1, 2], 4)

    @zs.function
    def step_fn(inputs):
        output = jnp.add(inputs, inputs)
        return strategy.experimental_assign_to_logical_device(output, 0)

    result = strategy.run(step_fn, args=(on_replicas(strategy, X),))
    np.testing.assert_allclose(whole(strategy, result), X + X)


@pytest.mark.shows("TPUStrategy.experimental_split_to_logical_devices")
@pytest.mark.parametrize("spmd", [False, True])
def test_tensorflows_image_split_over_eight(make, spmd):
    strategy = make([1, 2, 2, 2], 1, experimental_spmd_xla_partitioning=spmd)
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


def test_tensorflows_shape_does_not_fit_another_mesh(make):
    words = r"computation footprint \[1, 2, 2, 2\] does not fit"
    with pytest.raises(ValueError, match=words):
        make([1, 2, 2, 2], 1, mesh_shape=(2, 2, 1, 2))


def test_tensorflows_replicate_example_as_written_splits_over_too_few(make):
    """Over 8, with an assignment of two logical devices: it must raise."""
    strategy = make([1, 1, 1, 2], 4)
    images = np.zeros((4, 8, 8, 3), np.float32)

    @zs.function
    def step_fn(images):
        return strategy.experimental_split_to_logical_devices(images, [1, 2, 4, 1])

    words = r"same as the number of logical devices \(=2\).*their product is 8"
    with pytest.raises(ValueError, match=words):
        strategy.run(step_fn, args=(on_replicas(strategy, images),))


@pytest.mark.shows("TPUStrategy.experimental_replicate_to_logical_devices")
def test_split_images_and_replicated_labels(make):
    """The replicate example with a split that fits: its loss is that of the whole."""
    strategy = make([1, 1, 1, 2], 4)

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
def test_the_checks_of_annotations_and_their_order(make):
    strategy = make([1, 1, 1, 2], 4)
    x = np.zeros((3, 4), np.float32)
    split = strategy.experimental_split_to_logical_devices
    with pytest.raises(ValueError, match="Length of `partition_dimensions` must equal"):
        split(x, [2])
    with pytest.raises(ValueError, match=r"Tensor shape at partition_dimensions\[0\]"):
        split(x, [2, 2])
    with pytest.raises(ValueError, match="The product of `partition_dimensions`"):
        split(x, [1, 4])
    for number in (2, -1):
        with pytest.raises(ValueError, match="`logical_core_id` to assign must be low"):
            strategy.experimental_assign_to_logical_device(x, number)
    assert strategy.experimental_replicate_to_logical_devices(x) is x
    with_one = zs.TPUStrategy()
    assert with_one.experimental_split_to_logical_devices(x, [1, 1]) is x
    with pytest.raises(ValueError, match="only total of 1 logical devices in replica"):
        with_one.experimental_assign_to_logical_device(x, 1)


@pytest.mark.shows("TPUStrategy(experimental_spmd_xla_partitioning=)")
def test_nothing_is_assigned_in_spmd_mode(make):
    strategy = make([1, 1, 1, 2], 4, experimental_spmd_xla_partitioning=True)
    with pytest.raises(ValueError, match="Cannot assign a tensor to a logical device"):
        strategy.experimental_assign_to_logical_device(X, 0)


def test_a_split_result_lies_in_tiles_on_its_replica(make):
    strategy = make([1, 1, 2, 2], 2)

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
def test_a_value_of_a_replica_is_the_view_that_its_logical_device_0_has(make):
    strategy = make([1, 1, 1, 2], 4)

    @zs.function
    def step_fn(x):
        return x + 1

    result = strategy.run(step_fn, args=(on_replicas(strategy, X),))
    parts = strategy.experimental_local_results(result)
    names = [f":{next(iter(part.devices())).id}" for part in parts]
    assert names == [name[-2:] for name in strategy.extended.worker_devices]
    np.testing.assert_array_equal(np.concatenate(parts), X + 1)


def test_the_program_of_a_step_computes_with_tiles(make):
    """One device multiplies its columns alone, and talks to its replica alone."""
    strategy = make([1, 1, 2, 2], 2)

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


def test_replicas_on_devices_of_other_processes_are_refused():
    devices = np.array(
        [[types.SimpleNamespace(process_index=n)] for n in range(3)], object
    )
    with pytest.raises(NotImplementedError, match=r"process 0 .* devices of \[1, 2\]"):
        _require_own(devices)


# ---- run -------------------------------------------------------------------------


@pytest.mark.shows("TPUStrategy.run")
def test_tensorflows_run(resolver):
    strategy = zs.TPUStrategy(resolver)

    @zs.function
    def run():
        def value_fn(value_context):
            return value_context.num_replicas_in_sync

        distributed_values = strategy.experimental_distribute_values_from_function(
            value_fn
        )

        def replica_fn(value):
            return value * 2

        return strategy.run(replica_fn, args=(distributed_values,))

    result = strategy.experimental_local_results(run())
    assert {int(value) for value in result} == {16}


def test_a_plain_function_outside_of_a_step_is_refused(resolver):
    strategy = zs.TPUStrategy(resolver)
    words = r"TPUStrategy.run\(fn, ...\) does not support pure eager execution"
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


def test_a_partial_of_a_step_function_is_one(resolver):
    strategy = zs.TPUStrategy(resolver)

    @zs.function
    def double(x, scale):
        return x * scale

    result = strategy.run(functools.partial(double, scale=2), args=(jnp.float32(3),))
    assert float(strategy.experimental_local_results(result)[0]) == 6


def test_a_function_returns_tensors(resolver):
    strategy = zs.TPUStrategy(resolver)

    @zs.function
    def step():
        return strategy.run(lambda: ("words", 1))

    with pytest.raises(TypeError, match=r"must return a nest of tensors; 'words'"):
        step()

    @zs.function
    def nothing():
        return strategy.run(lambda: None)

    assert nothing() is None


@pytest.mark.parametrize(("shape", "replicas"), [([1, 1, 2, 2], 2), ([1, 1, 1, 2], 4)])
def test_replicas_reduce_among_themselves(make, shape, replicas):
    strategy = make(shape, replicas)

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


# ---- training --------------------------------------------------------------------


def losses_of(strategy, lay):
    """Five steps of Adam; replicas share the batch."""
    count = strategy.num_replicas_in_sync
    with strategy.scope():
        w = zs.Variable(W)
        seen = zs.Variable(0.0, aggregation=zs.VariableAggregation.SUM)
        optimizer = zs.Optimizer(optax.adam(0.1))

    @zs.function
    def train_step(batch):
        def replica(batch):
            x, y = batch

            def loss(w):
                return jnp.mean((jnp.tanh(lay(x) @ lay(w)) - y) ** 2) / count

            value, gradient = zs.value_and_grad(loss)(w)
            optimizer.apply_gradients([(gradient, w)])
            seen.assign_add(jnp.float32(x.shape[0]))
            return value

        losses = strategy.run(replica, args=(batch,))
        return strategy.reduce("sum", losses, axis=None)

    batch = on_replicas(strategy, X), on_replicas(strategy, Y)
    losses = [float(train_step(batch)) for _ in range(5)]
    assert train_step.trace_count == 1
    assert float(seen.numpy()) == 40
    assert strategy.extended.variable_created_in_scope(w)
    return losses, w.numpy()


def expected_losses():
    transformation = optax.adam(0.1)
    w, losses = jnp.asarray(W), []
    state = transformation.init(w)
    for _ in range(5):
        value, gradient = jax.value_and_grad(
            lambda w: jnp.mean((jnp.tanh(X @ w) - Y) ** 2)
        )(w)
        delta, state = transformation.update(gradient, state, w)
        w = w + delta
        losses.append(float(value))
    return losses, w


@pytest.mark.parametrize(
    ("shape", "replicas"),
    [([1, 1, 1, 1], 8), ([1, 1, 1, 2], 4), ([1, 1, 2, 2], 2), ([1, 1, 1, 2], 1)],
)
def test_training_is_training_on_one_device(make, shape, replicas):
    """With a layer whose weight is split over the logical devices."""
    strategy = make(shape, replicas)
    parts = int(np.prod(shape))

    def lay(array):
        by_column = array.shape[1] == 4
        split = [1, parts] if by_column else [1, 1]
        if np.prod(split) != parts:
            return strategy.experimental_replicate_to_logical_devices(array)
        return strategy.experimental_split_to_logical_devices(array, split)

    losses, w = losses_of(strategy, lay)
    expected, value = expected_losses()
    np.testing.assert_allclose(losses, expected, rtol=1e-4)
    np.testing.assert_allclose(w, value, rtol=1e-3, atol=1e-5)


@pytest.mark.shows("TPUStrategy.scope")
def test_a_variable_is_whole_on_every_core(make):
    strategy = make([1, 1, 1, 2], 4)
    with strategy.scope():
        v = zs.Variable(W)
    value = v.home.value()
    assert len(value.addressable_shards) == 8
    assert value.sharding.is_fully_replicated


@pytest.mark.parametrize("split", [[2, 3], [3, 2], [1, 6], [6, 1]])
def test_training_with_splits_of_several_primes(make, split):
    """A step with a variable, over six of the devices; by hand in numpy."""
    strategy = make([1, 1, 1, 6], 1, mesh_shape=(1, 1, 1, 8))
    x = RNG.normal(size=(6, 6)).astype(np.float32)
    with strategy.scope():
        w = zs.Variable(W)
        optimizer = zs.Optimizer(optax.sgd(0.5))

    @zs.function
    def train_step(x):
        def replica(x):
            cut = strategy.experimental_split_to_logical_devices(x, split)
            gradient = zs.grad(lambda w: jnp.mean((cut @ w) ** 2))(w)
            optimizer.apply_gradients([(gradient, w)])
            return cut * 2

        return strategy.run(replica, args=(x,))

    expected = W.astype(np.float64)
    for _ in range(3):
        np.testing.assert_allclose(train_step(x), 2 * x)
        expected -= 0.5 * 2 * x.T @ (x @ expected) / 24
    np.testing.assert_allclose(w.numpy(), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("shape", "replicas"), [([1, 1, 1, 2], 4), ([1, 2, 2, 2], 1)])
def test_a_variable_that_is_brought_together_when_it_is_read(make, shape, replicas):
    strategy = make(shape, replicas)
    with strategy.scope():
        total = zs.Variable(
            0.0,
            synchronization=zs.VariableSynchronization.ON_READ,
            aggregation=zs.VariableAggregation.SUM,
        )

    @zs.function
    def step_fn(x):
        total.assign_add(jnp.sum(x))

    for _ in range(2):
        strategy.run(step_fn, args=(on_replicas(strategy, X),))
    np.testing.assert_allclose(total.numpy(), 2 * X.sum(), rtol=1e-4)


@pytest.mark.parametrize(("shape", "replicas"), [([1, 1, 1, 2], 4), ([1, 2, 2, 2], 1)])
def test_arrays_of_any_device_are_arguments(make, shape, replicas):
    strategy = make(shape, replicas)
    with strategy.scope():
        w = zs.Variable(W)
    elsewhere = jax.device_put(X, jax.devices()[3])
    step_fn = zs.function(lambda x: x @ w.value())
    for given in (elsewhere, X, jnp.asarray(X)):
        result = strategy.run(step_fn, args=(given,))
        for part in strategy.experimental_local_results(result):
            np.testing.assert_allclose(part, X @ W, rtol=1e-4, atol=1e-5)
    again = strategy.run(zs.function(lambda y: y * 2), args=(result,))
    for part in strategy.experimental_local_results(again):
        np.testing.assert_allclose(part, 2 * X @ W, rtol=1e-4, atol=1e-5)


def test_a_merge_call_is_made_once_for_all_replicas(make):
    strategy = make([1, 1, 1, 2], 4)

    @zs.function
    def step(x):
        def replica(x):
            context = zs.get_replica_context()
            return context.merge_call(
                lambda strategy, x: strategy.reduce("sum", x, axis=0), args=(x,)
            )

        return strategy.run(replica, args=(x,))

    result = step(on_replicas(strategy, X))
    for part in strategy.experimental_local_results(result):
        np.testing.assert_allclose(part, X.sum(0), rtol=1e-4, atol=1e-5)


def test_a_merge_call_of_a_step_of_its_own_is_compiled_too(make):
    strategy = make([1, 1, 1, 2], 4)

    @zs.function
    def replica(x):
        context = zs.get_replica_context()
        total = context.merge_call(
            lambda strategy, x: strategy.reduce("sum", x, axis=None), args=(x,)
        )
        assert isinstance(total, jax.core.Tracer)
        return total * 2

    for _ in range(2):
        result = strategy.run(replica, args=(on_replicas(strategy, X),))
        for part in strategy.experimental_local_results(result):
            np.testing.assert_allclose(
                part, 2 * sum(np.split(X, 4)), rtol=1e-4, atol=1e-5
            )


def test_replicas_with_batches_of_different_sizes_are_one_program(make):
    strategy = make([1, 1, 1, 2], 4)
    sizes = [3, 3, 2, 0]
    parts = np.split(X, np.cumsum(sizes)[:-1])
    given = strategy.experimental_distribute_values_from_function(
        lambda context: parts[context.replica_id_in_sync_group]
    )
    result = strategy.run(zs.function(lambda x: x * 2), args=(given,))
    for part, expected in zip(
        strategy.experimental_local_results(result), parts, strict=True
    ):
        np.testing.assert_allclose(part, 2 * expected)


def test_python_that_looks_at_a_value_is_refused(make):
    """Elsewhere it would run replica by replica, on values."""
    for shape, replicas in (([1, 1, 1, 2], 4), ([1, 2, 2, 2], 1)):
        strategy = make(shape, replicas)
        step_fn = zs.function(lambda x: x if x.sum() > 0 else -x)
        words = "a Python branch .* on a value that is known only when the step runs"
        with pytest.raises(TypeError, match=words):
            strategy.run(step_fn, args=(on_replicas(strategy, X),))


def test_a_step_of_its_own_returns_what_programs_return(make):
    strategy = make([1, 1, 1, 2], 4)
    step_fn = zs.function(lambda: {1, 2})
    with pytest.raises(TypeError, match=r"is compiled, and it returns a set"):
        strategy.run(step_fn)


@pytest.mark.shows("experimental.TPUStrategy")
def test_the_strategy_of_the_first_version(make):
    strategy = zs.compat.v1.distribute.experimental.TPUStrategy(steps_per_run=2)
    assert isinstance(strategy, zs.TPUStrategy)
    assert strategy.num_replicas_in_sync == 8


def test_strategies_may_go(make):
    strategy = make([1, 1, 1, 2], 4)
    del strategy
    gc.collect()


def test_a_resolver_of_hosts_without_a_tpu_is_no_obstacle():
    resolver = SimpleClusterResolver(ClusterSpec({}))
    topology = initialize_tpu_system(resolver, mesh_shape=[2, 2, 1, 2])
    strategy = zs.TPUStrategy(
        resolver, DeviceAssignment.build(topology, num_replicas=8)
    )
    assert strategy.cluster_resolver is resolver


# ---- datasets ---------------------------------------------------------------------


def rows_fn(context):
    """TensorFlow's two rows, again and again, one at a time."""
    del context
    labels = np.array([[1], [0]], np.int32)
    rows = zs.data.Dataset.from_tensor_slices((X[:2, :5], labels))
    return rows.repeat().batch(1, drop_remainder=True)


@pytest.mark.shows("tf.distribute.TPUStrategy")
@pytest.mark.shows("TPUStrategy.distribute_datasets_from_function", "tape.gradient")
@pytest.mark.shows("optimizer.apply_gradients")
def test_tensorflows_training_loop(resolver):
    """Every replica draws a row of its own: four times each of two."""
    strategy = zs.TPUStrategy(resolver)
    start = RNG.normal(size=(5, 2)).astype(np.float32)
    with strategy.scope():
        w = zs.Variable(start)
        optimizer = zs.Optimizer(optax.sgd(0.1))
    iterator = iter(strategy.distribute_datasets_from_function(rows_fn))

    def loss(w, features, labels):
        scores = jax.nn.log_softmax(features @ w)
        return -jnp.mean(jnp.take_along_axis(scores, labels, axis=1))

    @zs.function
    def train_step(iterator):
        def step_fn(inputs):
            features, labels = inputs
            gradient = zs.grad(lambda w: loss(w, features, labels))(w)
            optimizer.apply_gradients(zip([gradient], [w], strict=True))

        strategy.run(step_fn, args=(next(iterator),))

    train_step(iterator)
    labels = np.array([[1], [0]], np.int32)
    # The mean over two rows, times two rows, times four of each.
    gradient = 8 * jax.grad(loss)(start, X[:2, :5], labels)
    np.testing.assert_allclose(w.numpy(), start - 0.1 * gradient, rtol=1e-4, atol=1e-5)


def test_a_step_outside_of_a_step_draws_from_a_distributed_dataset(make):
    strategy = make([1, 1, 1, 2], 4)

    @zs.function
    def step_fn(inputs):
        features, _ = inputs
        output = jnp.add(features, features)
        return strategy.experimental_assign_to_logical_device(output, 0)

    iterator = iter(strategy.distribute_datasets_from_function(rows_fn))
    result = strategy.run(step_fn, args=(next(iterator),))
    np.testing.assert_allclose(
        whole(strategy, result), 2 * np.tile(X[:2, :5], (2, 1)), rtol=1e-6
    )


@pytest.mark.shows("TPUStrategy.experimental_distribute_dataset")
def test_batches_that_are_too_short_for_all_replicas_end_the_data(make):
    """Shapes are static: of ten rows in batches of eight the last two are left out."""
    strategy = make([1, 1, 1, 2], 4)
    rows = np.arange(10, dtype=np.float32)
    dataset = zs.data.Dataset.from_tensor_slices(rows).batch(8)
    double = zs.function(lambda x: x * 2)
    found = [
        whole(strategy, strategy.run(double, args=(x,)))
        for x in strategy.experimental_distribute_dataset(dataset)
    ]
    np.testing.assert_array_equal(np.concatenate(found), 2 * rows[:8])


@pytest.mark.shows("TPUStrategy.experimental_distribute_values_from_function")
def test_values_that_were_placed_by_hand(resolver):
    """TensorFlow's fourth example of distributed values."""
    strategy = zs.TPUStrategy(resolver)
    multiple_values = []
    for i in range(strategy.num_replicas_in_sync):
        with jax.default_device(jax.devices()[i]):
            multiple_values.append(jnp.ones(()) * i)

    def value_fn(ctx):
        return multiple_values[ctx.replica_id_in_sync_group]

    distributed = strategy.experimental_distribute_values_from_function(value_fn)
    result = strategy.run(zs.function(lambda x: x + 1), args=(distributed,))
    results = strategy.experimental_local_results(result)
    assert [float(value) for value in results] == [1, 2, 3, 4, 5, 6, 7, 8]
