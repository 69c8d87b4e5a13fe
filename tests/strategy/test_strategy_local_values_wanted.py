"""Results wanted at values of several replicas of which some share a device."""

import jax
import jax.numpy as jnp
import numpy as np

import zstrat as zs
from zstrat.strategy import Mirrored, PerReplica

DEVICES = jax.devices("cpu")


def on(*numbers):
    return PerReplica([jax.device_put(jnp.zeros(2), DEVICES[n]) for n in numbers])


def test_each_replica_has_its_own_on_its_device():
    value = PerReplica([jax.device_put(jnp.arange(2.0), DEVICES[n]) for n in (0, 1)])
    for ops in (zs.ReductionToOneDevice(), zs.NcclAllReduce()):
        found = ops.reduce("SUM", value, on(3, 5, 3, 5))
        assert isinstance(found, Mirrored)
        assert [next(iter(x.devices())).id for x in found.values] == [3, 5, 3, 5]
        np.testing.assert_array_equal(found.values, [[0, 2]] * 4)


def test_replicas_of_several_devices_have_one_value_each():
    topology = zs.tpu.experimental.initialize_tpu_system()
    assignment = zs.tpu.experimental.DeviceAssignment.build(
        topology, computation_shape=[1, 1, 1, 2], num_replicas=4
    )
    strategy = zs.TPUStrategy(experimental_device_assignment=assignment)
    value = strategy.run(zs.function(lambda: jnp.ones(3)))
    found = strategy.extended.reduce_to("SUM", value, value)
    entries = strategy.experimental_local_results(found)
    np.testing.assert_array_equal(entries, [[4, 4, 4]] * 4)
