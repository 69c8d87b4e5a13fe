"""Results wanted at values of several replicas of which some share a device."""

import jax.numpy as jnp
import numpy as np

import zstrat as zs


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
