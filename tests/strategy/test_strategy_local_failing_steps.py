"""Steps that fail on the devices: what is lost, who says so, and how to go on."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zstrat as zs
from zstrat.errors import DataLossError


class Disk:
    """What a replica asks in the middle of its computation."""

    def __init__(self):
        self.is_broken = False

    def read(self, array):
        if self.is_broken:
            raise OSError("the disk is broken")
        return array

    def __call__(self, array):
        return jax.pure_callback(self.read, jnp.zeros(array.shape), array)


def doubling(strategy, variable, disk):
    """A step in which each replica asks the disk, and the variable grows to twice what
    it was."""

    @zs.function
    def step():
        def replica():
            read = disk(variable.value())
            variable.assign_add(read)
            return read.sum()

        return strategy.reduce("mean", strategy.run(replica), axis=None)

    return step


def created(strategy, name):
    with strategy.scope():
        return zs.Variable(
            np.full(3, 2, np.float32),
            name=name,
            aggregation=zs.VariableAggregation.MEAN,
        )


def test_values_that_a_failed_step_had_overwritten_are_reported_until_they_are_assigned(
    capfd,
):
    strategy, disk = zs.MirroredStrategy(), Disk()
    moved, other = created(strategy, "moved"), created(strategy, "other")
    step = doubling(strategy, moved, disk)
    assert float(step()) == 6
    disk.is_broken = True
    with pytest.raises(Exception, match="the disk is broken"):
        step()
    disk.is_broken = False
    for use in (step, moved.numpy):
        with pytest.raises(DataLossError, match="'moved'"):
            use()
    assert list(other.numpy()) == [2, 2, 2]
    assert float(doubling(strategy, other, disk)()) == 6
    moved.assign(np.ones(3, np.float32))
    assert float(step()) == 3
    assert list(moved.numpy()) == [2, 2, 2]
    capfd.readouterr()  # XLA's own words


def test_slots_that_a_failed_step_had_overwritten_begin_anew_with_the_value(capfd):
    strategy, disk = zs.MirroredStrategy(), Disk()
    with strategy.scope():
        variable = zs.Variable(np.zeros(3, np.float32), name="v")
        optimizer = zs.Optimizer(optax.sgd(1.0, momentum=0.5))

    @zs.function
    def step():
        def replica():
            gradient = disk(jnp.ones(3)) / strategy.num_replicas_in_sync
            optimizer.apply_gradients([(gradient, variable)])

        strategy.run(replica)

    step()
    disk.is_broken = True
    with pytest.raises(Exception, match="the disk is broken"):
        step()
    disk.is_broken = False
    with pytest.raises(DataLossError, match="'v'"):
        step()
    variable.assign(np.zeros(3, np.float32))
    step()
    np.testing.assert_allclose(variable.numpy(), -1, rtol=1e-6)
    step()
    np.testing.assert_allclose(variable.numpy(), -2.5, rtol=1e-6)
    capfd.readouterr()


@pytest.mark.parametrize("store", [0, 1, 2])
def test_values_that_are_kept_elsewhere_stay(store, capfd):
    devices = ["CPU:1", "CPU:2"]
    strategy, disk = zs.CentralStorageStrategy(devices, f"CPU:{store}"), Disk()
    variable = created(strategy, "central")
    step = doubling(strategy, variable, disk)
    step()
    disk.is_broken = True
    with pytest.raises(Exception, match="the disk is broken"):
        step()
    assert list(variable.numpy()) == [4, 4, 4]
    disk.is_broken = False
    assert float(step()) == 12
    assert list(variable.numpy()) == [8, 8, 8]
    capfd.readouterr()
