"""The device on which values are brought together, by any of its names."""

import jax
import jax.numpy as jnp
import pytest

import zstrat as zs

BOTH = zs.PerReplica((jnp.float32(1), jnp.float32(2)))


def spied(device):
    """Where the values are that are added for one that reduces on this device."""
    seen = []

    def added(arrays):
        seen.extend(next(iter(array.devices())) for array in arrays)
        return sum(arrays)

    ops = zs.ReductionToOneDevice(device, added)
    assert float(ops.reduce("sum", BOTH, "CPU:0")) == 3
    return seen


@pytest.mark.parametrize(
    "name",
    [
        "CPU:2",
        "/cpu:2",
        "/device:CPU:2",
        "/job:localhost/replica:0/task:0/device:CPU:2",
        2,
    ],
)
def test_a_device_is_named_as_everywhere(name):
    assert spied(name) == [jax.devices()[2]] * 2


def test_a_device_is_itself():
    assert spied(jax.devices()[3]) == [jax.devices()[3]] * 2


def test_the_result_goes_where_it_is_wanted():
    ops = zs.ReductionToOneDevice(reduce_to_device="CPU:1")
    assert ops.reduce("sum", BOTH, "CPU:5").devices() == {jax.devices()[5]}
    strategy = zs.MirroredStrategy(["CPU:0", "CPU:1"], cross_device_ops=ops)
    assert float(strategy.extended.reduce_to("sum", BOTH, "CPU:0")) == 3


@pytest.mark.parametrize("name", ["CPU:99", 99, -1])
def test_a_device_that_there_is_not_is_refused(name):
    with pytest.raises(ValueError, match="/job:loc"):
        zs.ReductionToOneDevice(name)


@pytest.mark.parametrize("name", ["one", "", 1.5])
def test_what_is_no_name_is_refused(name):
    with pytest.raises(ValueError, match="GPU"):
        zs.ReductionToOneDevice(name)
