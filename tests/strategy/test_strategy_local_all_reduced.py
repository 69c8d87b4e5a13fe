"""The all-reduces that TF has by name: one program on the devices where the values are,
with the results of a reduction on one device."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zstrat as zs
from zstrat.strategy._local_strategy import _usual
from zstrat.strategy.reduce import _all_reduced

D = jax.devices()
OPS = [
    zs.NcclAllReduce(),
    zs.NcclAllReduce(num_packs=3),
    zs.HierarchicalCopyAllReduce(num_packs=0),
]
R = 4


ROWS = jax.NamedSharding(
    jax.sharding.Mesh(np.array(D[:R]), ("replica",)), jax.P("replica")
)


def one_array(values):
    """As what a replica function returned."""
    is_scalar = not np.shape(values[0])
    whole = (np.array if is_scalar else np.concatenate)(values)
    return zs.PerReplica.of_whole(jax.device_put(whole, ROWS), R, stacked=is_scalar)


def views(values):
    """Bound to no device, as the views of such a value are."""
    return zs.PerReplica(one_array(values).values)


def bound(values):
    return zs.PerReplica([jax.device_put(x, D[n]) for n, x in enumerate(values)])


@dataclass
class Device:
    platform: str


KINDS = [one_array, views, bound]


def places_of(array):
    return [next(iter(x.devices())) for x in array.values]


def lowered(number):
    """The program for so many values of one dtype."""
    value = jax.device_put(np.ones(3 * R, np.float32), ROWS)
    mesh, spread = _all_reduced.spread_out(zs.PerReplica.of_whole(value, R))
    assert spread.array is value
    flags = (False,) * number
    return _all_reduced.reduced.lower([value] * number, mesh, flags, False)


def test_what_is_compiled_is_an_all_reduce():
    words = lowered(1).compile().as_text()
    assert "all-reduce" in words
    assert "all-gather" not in words


@pytest.mark.parametrize("ops", OPS)
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_copied_from_device_to_device(ops, kind):
    value = kind(list(np.arange(R * 3, dtype=np.float32).reshape(R, 3)))
    one = zs.ReductionToOneDevice()
    with jax.transfer_guard_device_to_device("disallow_explicit"):
        found = ops.reduce("sum", value, value)
        there = ops.reduce("mean", value, "CPU:2")
        with pytest.raises(Exception, match="Disallowed device-to-device"):
            one.reduce("sum", value, value)  # so the guard is one
    assert places_of(found) == D[:R]
    for copy in found.values:
        np.testing.assert_array_equal(copy, [18, 22, 26])
    assert there.devices() == {D[2]}
    np.testing.assert_array_equal(there, [4.5, 5.5, 6.5])


def test_what_replicas_returned_is_reduced_where_it_is():
    strategy = zs.MirroredStrategy(["CPU:1", "CPU:2"])
    value = strategy.run(
        lambda: (1.0 + zs.get_replica_context().replica_id_in_sync_group) * jnp.ones(2)
    )
    with jax.transfer_guard_device_to_device("disallow_explicit"):
        found = zs.NcclAllReduce().reduce("sum", value, value)
    assert places_of(found) == D[1:3]
    assert [x.tolist() for x in found.values] == [[3.0, 3.0]] * 2


@pytest.mark.parametrize("ops", OPS)
def test_in_a_step_it_is_part_of_its_program(ops):
    value = one_array([np.arange(2.0, dtype=np.float32) + n for n in range(R)])

    @zs.function
    def given(x):
        return ops.reduce("sum", x, "CPU:0")

    @zs.function
    def known():
        return ops.reduce("sum", value, "CPU:0")

    for found in (given(value), known()):
        np.testing.assert_array_equal(found, [6, 10])


def test_copies_of_a_variable_get_it():
    ops = zs.NcclAllReduce()
    two = zs.MirroredStrategy(["CPU:2", "CPU:3"], cross_device_ops=ops)
    with two.scope():
        weights = zs.Variable([1.0, 2.0])
        apart = zs.Variable([1.0, 2.0], aggregation=zs.VariableAggregation.NONE)
        gradients = two.run(
            lambda: (
                jnp.ones(2) * (1 + zs.get_replica_context().replica_id_in_sync_group)
            )
        )
        two.run(lambda: apart.assign_add(jnp.zeros(2)))
        for variable in (weights, apart):
            total = two.extended.reduce_to("sum", gradients, variable)
            assert places_of(total) == D[2:4]
            two.extended.update(variable, lambda v, g: v.assign_add(g), args=(total,))
            assert np.asarray(variable.numpy()).tolist() == [4.0, 5.0]


@pytest.mark.parametrize(
    ("platforms", "expected"),
    [
        (["cuda", "cuda"], zs.NcclAllReduce),
        (["rocm"], zs.NcclAllReduce),
        (["cpu", "cpu"], zs.ReductionToOneDevice),
        (["cuda", "cpu"], zs.ReductionToOneDevice),
    ],
)
def test_what_a_strategy_takes_by_itself(platforms, expected):
    assert type(_usual([Device(platform) for platform in platforms])) is expected
