"""Values that a step has lost: of one that fails on the devices, or is still making
them when it does. A read of one raises, an assignment makes it again."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from in_replicas import meet, number

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


def failing(like):
    """An array whose computation has failed."""

    def fail(x):
        raise OSError("the disk is broken")

    def program(x):
        return jax.pure_callback(fail, x, x)

    mapped = jax.shard_map(
        program,
        mesh=like.sharding.mesh,
        in_specs=like.sharding.spec,
        out_specs=like.sharding.spec,
        check_vma=False,
    )
    made = jax.jit(mapped)(jnp.zeros(like.shape, like.dtype))
    with pytest.raises(Exception, match="the disk is broken"):
        made.block_until_ready()
    return made


@pytest.mark.parametrize("is_apart", [True, False])
def test_an_assignment_brings_the_value_back(two, is_apart, capfd):
    options = (
        {"synchronization": zs.VariableSynchronization.ON_READ} if is_apart else {}
    )
    with two.scope():
        variable = zs.Variable(
            np.ones(3, np.float32), aggregation=zs.VariableAggregation.MEAN, **options
        )
    variable.storage.take_over(failing(variable.storage.value()))
    with pytest.raises(Exception, match="the disk is broken"):
        variable.numpy()
    variable.assign(np.full(3, 5, np.float32))
    assert list(variable.numpy()) == [5, 5, 5]
    variable.assign_add(np.ones(3, np.float32))
    assert list(variable.numpy()) == [6, 6, 6]
    capfd.readouterr()  # XLA's own words


def test_slots_begin_anew_with_it(two, capfd):
    with two.scope():
        variable = zs.Variable(np.zeros(3, np.float32))
        optimizer = zs.Optimizer(optax.sgd(1.0, momentum=0.5))

    @zs.function
    def step():
        two.run(lambda: optimizer.apply_gradients([(jnp.ones(3) / 2, variable)]))

    step()
    storage = variable.storage
    rule = optimizer.slot_rule(variable)
    storage.take_over_slots(
        rule, [failing(leaf) for leaf in storage.slots_before(rule)]
    )
    storage.take_over(failing(storage.value()))
    variable.assign(np.zeros(3, np.float32))
    step()
    step()
    # The second step moves by 1 + 0.5.
    np.testing.assert_allclose(variable.numpy(), -2.5, rtol=1e-6)
    capfd.readouterr()


def test_an_assignment_to_a_copy_brings_it_back(two, capfd):
    with two.scope():
        variable = zs.Variable(np.ones(3, np.float32))
    two.run(lambda: variable.assign(jnp.full(3, 2.0)))
    variable.storage.take_over(failing(variable.storage.value()))
    for n, copy in enumerate(two.experimental_local_results(variable)):
        copy.assign(np.full(3, n, np.float32))
    for n, copy in enumerate(two.experimental_local_results(variable)):
        np.testing.assert_array_equal(copy.numpy(), np.full(3, n))
    capfd.readouterr()


ON_READ = zs.VariableSynchronization.ON_READ


@pytest.fixture(params=["apart", "shared", "on_read"])
def lost(request, two):
    """What a step leaves behind that was given the value and failed."""
    options = {}
    if request.param == "on_read":
        options = {
            "synchronization": ON_READ,
            "aggregation": zs.VariableAggregation.SUM,
        }
    with two.scope():
        v = zs.Variable(np.float32([2, 2]), name="gone", **options)
    if request.param == "apart":
        two.run(lambda: v.assign(jnp.full(2, number(), v.dtype)))
    v.storage.value().delete()
    return v


def reads(v):
    return {
        "in turns": lambda: (meet(), v.value())[1],
        "rows in turns": lambda: (meet(), v.sparse_read(np.array([1])))[1],
        "added in turns": lambda: (meet(), v.assign_add(jnp.ones(2)))[0],
    }


@pytest.mark.parametrize("how", list(reads(None)))
def test_who_needs_it_is_told(two, lost, how):
    with pytest.raises(DataLossError, match="'gone'"):
        two.run(reads(lost)[how])


def test_its_copies_are_told(two, lost):
    for copy in two.experimental_local_results(lost):
        with pytest.raises(DataLossError, match="'gone'"):
            copy.numpy()


def test_an_assignment_in_turns_repairs_it(two, lost):
    two.run(lambda: (meet(), lost.assign(jnp.full(2, number() + 1.0)))[0])
    copies = two.experimental_local_results(lost)
    np.testing.assert_array_equal([c.numpy() for c in copies], [[1, 1], [2, 2]])


def test_assignments_to_the_copies_repair_it(two, lost):
    for n, copy in enumerate(two.experimental_local_results(lost)):
        copy.assign([n + 1, n + 1])
    copies = two.experimental_local_results(lost)
    np.testing.assert_array_equal([c.numpy() for c in copies], [[1, 1], [2, 2]])


def test_an_assignment_outside_repairs_it(two, lost):
    lost.assign([3, 3])
    np.testing.assert_array_equal(lost.numpy(), [3, 3])


def test_an_assignment_to_one_copy_repairs_that_one_alone(two, lost):
    first, second = two.experimental_local_results(lost)
    first.assign([9, 9])
    np.testing.assert_array_equal(first.numpy(), [9, 9])
    first.assign_add([1, 1])
    np.testing.assert_array_equal(first.numpy(), [10, 10])
    step = zs.function(lambda: two.run(lost.value))
    for use in (second.numpy, lambda: second.assign_add([1, 1]), lost.numpy, step):
        with pytest.raises(DataLossError, match="'gone'"):
            use()
    second.assign([3, 4])
    copies = [10, 10], [3, 4]
    np.testing.assert_array_equal([first.numpy(), second.numpy()], copies)
    on_read = lost.synchronization is ON_READ
    np.testing.assert_array_equal(lost.numpy(), [13, 14] if on_read else [10, 10])
    results = two.experimental_local_results(step())
    np.testing.assert_array_equal(results, copies)


def test_a_replica_reads_its_own_copy_when_it_has_assigned_it(two, lost):
    def replica():
        meet()
        if number() == 0 or is_last:
            lost.assign(jnp.full(2, number() + 1.0))
        return lost.value() if number() == 0 or is_last else jnp.zeros(2)

    is_last = False
    results = two.experimental_local_results(two.run(replica))
    np.testing.assert_array_equal(results[0], [1, 1])
    for copy in two.experimental_local_results(lost)[1:]:
        with pytest.raises(DataLossError, match="'gone'"):
            copy.numpy()
    is_last = True
    results = two.experimental_local_results(two.run(replica))
    np.testing.assert_array_equal(results, [[1, 1], [2, 2]])
