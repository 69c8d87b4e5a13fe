"""StrategyExtended over two devices of their own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zstrat as zs

OPS = {
    "one": zs.ReductionToOneDevice,
    "nccl": zs.NcclAllReduce,
    "copies": zs.HierarchicalCopyAllReduce,
    "second": lambda: zs.ReductionToOneDevice(1),
}


@pytest.fixture(params=sorted(OPS))
def strategy(request):
    return zs.MirroredStrategy(["CPU:0", "CPU:1"], OPS[request.param]())


@pytest.fixture
def mirrored():
    return zs.MirroredStrategy(["CPU:0", "CPU:1"])


def made(strategy, shape=()):
    """1 in the first replica, 2 in the second one, each on its device."""

    def fn():
        number = zs.get_replica_context().replica_id_in_sync_group
        return jnp.full(shape, number + 1.0)

    return strategy.run(fn)


def plain(tree):
    return jax.tree.map(lambda leaf: np.asarray(leaf).tolist(), tree)


@pytest.mark.shows("Mirrored values")
def test_a_mirrored_value_stays_itself(strategy):
    with strategy.scope():
        v = zs.Variable(0.0)
        found = strategy.extended.reduce_to("SUM", made(strategy), v)
        again = strategy.extended.reduce_to("MEAN", found, v)
        assert plain(strategy.experimental_local_results(again)) == (3.0, 3.0)
        sent = strategy.extended.broadcast_to(jnp.ones(2), v)
        assert isinstance(sent, zs.Mirrored)
        assert plain(sent.values) == ([1, 1], [1, 1])
        assert plain(strategy.run(lambda x: x * 2, (sent,)).values) == ([2, 2],) * 2


def test_an_update_in_a_replica_function_is_made_once(mirrored):
    with mirrored.scope():
        v = zs.Variable(1.0)

    def fn(x):
        context = zs.get_replica_context()
        total = context.all_reduce("SUM", x * (context.replica_id_in_sync_group + 1))
        mirrored.extended.update(v, lambda var, x: var.assign_add(x), args=(total,))
        return v.value()

    found = mirrored.run(fn, args=(jnp.float32(2),))
    assert plain(mirrored.experimental_local_results(found))[0] == 7.0
    assert v.numpy() == 7.0

    @zs.function
    def step(x):
        return mirrored.run(fn, args=(x,))

    found = step(np.float32(1))
    assert plain(mirrored.experimental_local_results(found))[0] == 10.0
    assert v.numpy() == 10.0
    with pytest.raises(ValueError, match=r"non_slot_devices\(\)"):
        mirrored.extended.non_slot_devices([])
    values = made(mirrored)
    with pytest.raises(ValueError, match="reduce_to"):
        mirrored.extended.update(v, lambda var, x: var.assign(x), args=(values,))

    def wrong(x):
        number = zs.get_replica_context().replica_id_in_sync_group
        mirrored.extended.update(v, lambda var, x: var.assign(x), args=(x * number,))

    with pytest.raises(ValueError, match=r"get_replica_context\(\).*all_reduce"):
        mirrored.run(wrong, args=(jnp.float32(1),))


def test_outputs_of_replicas_in_a_loop(mirrored):
    def step(context, x):
        def fn():
            number = zs.get_replica_context().replica_id_in_sync_group
            context.set_last_step_output("x", x * (number + 1), "MEAN")
            context.set_non_tensor_output("n", ("replica", int(number)))

        mirrored.run(fn)

    context = mirrored.extended.experimental_run_steps_on_iterator(
        step, iter([1.0, 2.0]), 2
    )
    assert plain(context.last_step_outputs) == {"x": 3.0}
    assert context.non_tensor_outputs == {"n": [("replica", 0), ("replica", 1)]}


def test_each_replica_has_a_device_of_its_own(mirrored):
    def fn():
        return zs.get_replica_context().devices

    names = mirrored.extended.worker_devices
    for found in (mirrored.run(fn), zs.function(lambda: mirrored.run(fn))()):
        assert mirrored.experimental_local_results(found) == tuple(
            (name,) for name in names
        )


def test_variables_are_colocated_with_those_of_the_scope(mirrored):
    outside = zs.Variable(1.0)
    with mirrored.scope():
        v = zs.Variable(1.0)
        with mirrored.extended.colocate_vars_with(v):
            beside = zs.Variable(1.0)
        assert mirrored.extended.variable_created_in_scope(beside)
        assert mirrored.extended.non_slot_devices([v]) == v.device
        assert mirrored.extended.read_var(v) == 1.0
        with pytest.raises(
            ValueError, match=r"`colocate_vars_with`.*'Variable'.*device="
        ):
            mirrored.extended.colocate_vars_with(outside)
    with pytest.raises(RuntimeError, match=r"colocate_vars_with\(\)"):
        mirrored.extended.colocate_vars_with(v)


def test_updates_of_what_central_storage_keeps_are_brought_together():
    strategy = zs.CentralStorageStrategy(["CPU:0", "CPU:1"])
    with strategy.scope():
        kept = zs.Variable(0.0, synchronization=zs.VariableSynchronization.NONE)
        assert strategy.experimental_local_results(kept) == (kept,)
        read = zs.Variable(
            0.0,
            synchronization=zs.VariableSynchronization.ON_READ,
            aggregation=zs.VariableAggregation.SUM,
        )
        found = strategy.extended.reduce_to("SUM", made(strategy), read)
        assert found.devices() == {jax.devices()[0]}
        strategy.run(lambda x: read.assign_add(x), (zs.PerReplica((1.0, 2.0)),))
        assert read.numpy() == 3.0
        with pytest.raises(ValueError, match=r"'Variable'.*zs\.Variable.*aggregation="):
            strategy.run(lambda: kept.assign_add(1.0))
        assert kept.numpy() == 0.0
