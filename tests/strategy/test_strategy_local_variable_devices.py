"""Where TF says that a variable is: on the device that has it, the first of several."""

import jax
import jax.numpy as jnp
import pytest

import zstrat as zs
from zstrat.cluster import TPUClusterResolver
from zstrat.tpu.experimental import DeviceAssignment, initialize_tpu_system

HERE = "/job:localhost/replica:0/task:0/device:CPU:"
A, S = zs.VariableAggregation, zs.VariableSynchronization


def cpu(number):
    return jax.devices()[number]


def test_the_variable_of_one_device_is_on_it():
    one = zs.OneDeviceStrategy("CPU:1")
    with one.scope():
        v = zs.Variable(1.0, name="v")
        with one.extended.colocate_vars_with(v):
            beside = zs.Variable(2.0, name="beside")
    assert v.device == beside.device == f"{HERE}1"
    assert one.extended.parameter_devices == (v.device,)
    assert f"{HERE}1" in repr(v)
    assert one.run(v.value).devices() == {cpu(1)}


def test_what_is_kept_beside_a_variable_is_where_it_is():
    one = zs.OneDeviceStrategy("CPU:1")
    with one.scope():
        v = zs.Variable(1.0)
        where = one.extended.non_slot_devices([v])
        assert where == f"{HERE}1"
        for destination in (where, v):
            there = one.extended.reduce_to("SUM", jnp.float32(2), destination)
            assert there.devices() == {cpu(1)}
        assert one.extended.broadcast_to(jnp.ones(2), where).devices() == {cpu(1)}


@pytest.mark.parametrize("synchronization", [S.AUTO, S.ON_READ])
def test_each_copy_is_on_the_device_of_its_replica(synchronization):
    mirrored = zs.MirroredStrategy(["CPU:2", "CPU:1"])
    with mirrored.scope():
        v = zs.Variable(1.0, synchronization=synchronization, aggregation=A.MEAN)
    assert v.device == f"{HERE}2"
    copies = mirrored.experimental_local_results(v)
    assert [each.device for each in copies] == [f"{HERE}2", f"{HERE}1"]
    assert tuple(each.device for each in copies) == mirrored.extended.parameter_devices


def test_what_is_kept_in_one_place_is_there():
    central = zs.CentralStorageStrategy(["CPU:0", "CPU:1"], "CPU:3")
    with central.scope():
        v = zs.Variable(1.0)
        seen = zs.Variable(0.0, synchronization=S.ON_READ, aggregation=A.SUM)
    assert v.device == seen.device == f"{HERE}3"
    copies = central.experimental_local_results(seen)
    assert [each.device for each in copies] == [f"{HERE}3"] * 2


def test_of_replicas_of_several_devices_the_first_ones_are_named():
    resolver = TPUClusterResolver("local")
    zs.experimental_connect_to_cluster(resolver)
    topology = initialize_tpu_system(resolver, mesh_shape=(1, 2, 2, 2))
    assignment = DeviceAssignment.build(
        topology, computation_shape=[1, 1, 1, 2], num_replicas=4
    )
    strategy = zs.TPUStrategy(resolver, experimental_device_assignment=assignment)
    with strategy.scope():
        v = zs.Variable(1.0)
    names = strategy.extended.worker_devices
    assert len(set(names)) == 4
    assert v.device == names[0]
    copies = strategy.experimental_local_results(v)
    assert tuple(each.device for each in copies) == names


def test_elsewhere_it_is_on_the_host():
    with zs.OneDeviceStrategy("CPU:1").scope():
        v = zs.Variable(1.0)
    plain = zs.Variable(1.0)
    assert plain.device == f"{HERE}0"
    default = zs.get_strategy().extended
    assert default.variable_created_in_scope(plain)
    assert not default.variable_created_in_scope(v)
