"""The all-reduces that TF has by name, and a program's own reductions between devices,
with the hooks that TF has."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_strategy_local_reductions import (
    ROWS,
    D,
    R,
    bound,
    one_array,
    places_of,
    views,
)

import zstrat as zs
from zstrat.experimental import CommunicationOptions
from zstrat.strategy._local_strategy import _usual
from zstrat.strategy.reduce import _on_devices

OPS = [
    zs.NcclAllReduce(),
    zs.NcclAllReduce(num_packs=3),
    zs.HierarchicalCopyAllReduce(num_packs=0),
]
KINDS = [one_array, views, bound]


@dataclass
class Device:
    platform: str


def lowered(number):
    """The program for so many values of one dtype."""
    value = jax.device_put(np.ones(3 * R, np.float32), ROWS)
    mesh, spread = _on_devices.spread_out(zs.PerReplica.of_whole(value, R))
    assert spread.array is value
    flags = (False,) * number
    return _on_devices.reduced.lower([value] * number, mesh, flags, False)


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


PAIR = zs.PerReplica((jnp.float32(1), jnp.float32(2)))


OTHER = zs.PerReplica((jnp.float32(5), jnp.float32(7)))


class Largest(zs.CrossDeviceOps):
    """Neither sum nor mean, so that it is known who reduced."""

    def __init__(self):
        self.asked = []

    def reduce_implementation(
        self, reduce_op, per_replica_value, destinations, options
    ):
        self.asked.append((reduce_op, per_replica_value, destinations, options))
        return max(per_replica_value.values)


class Batches(Largest):
    def batch_reduce_implementation(self, reduce_op, value_destination_pairs, options):
        self.asked.append((reduce_op, value_destination_pairs, options))
        return [min(value.values) for value, _ in value_destination_pairs]

    def broadcast_implementation(self, tensor, destinations):
        self.asked.append((tensor, destinations))
        return "broadcast"


def extended_of(ops):
    return zs.MirroredStrategy(["CPU:0", "CPU:1"], cross_device_ops=ops).extended


def test_the_hook_for_one_value():
    ops = Largest()
    assert float(extended_of(ops).reduce_to("sum", PAIR, "CPU:0")) == 2
    default = CommunicationOptions()
    assert ops.asked == [(zs.ReduceOp.SUM, PAIR, "CPU:0", default)]
    given = CommunicationOptions(bytes_per_pack=7)
    assert float(ops.reduce("MEAN", OTHER, PAIR, given)) == 7
    assert ops.asked[1:] == [(zs.ReduceOp.MEAN, OTHER, PAIR, given)]


def test_several_values_are_given_one_by_one_without_another_hook():
    ops = Largest()
    pairs = [(PAIR, "CPU:0"), (OTHER, "CPU:1")]
    assert [float(x) for x in extended_of(ops).batch_reduce_to("sum", pairs)] == [2, 7]
    assert [asked[1:3] for asked in ops.asked] == pairs
    found = extended_of(Largest()).reduce_to("sum", {"a": PAIR, "b": OTHER}, "CPU:0")
    assert {name: float(x) for name, x in found.items()} == {"a": 2, "b": 7}


def test_the_hook_for_several_values():
    ops = Batches()
    pairs = [(PAIR, "CPU:0"), (OTHER, "CPU:1")]
    assert [float(x) for x in extended_of(ops).batch_reduce_to("mean", pairs)] == [1, 5]
    assert ops.asked == [(zs.ReduceOp.MEAN, pairs, CommunicationOptions())]


def test_the_hook_that_broadcasts():
    ops = Batches()
    assert extended_of(ops).broadcast_to(np.ones(2), "CPU:1") == "broadcast"
    assert ops.asked[0][1] == "CPU:1"
    copies = extended_of(Largest()).broadcast_to(jnp.float32(3), zs.PerReplica((0, 0)))
    assert [float(x) for x in copies.values] == [3, 3]


def test_a_value_that_is_not_distributed_is_that_of_one_device():
    ops = Largest()
    assert float(ops.reduce("sum", np.float32(4), "CPU:0")) == 4
    (_, value, _, _) = ops.asked[0]
    assert isinstance(value, zs.PerReplica)
    assert value.values == (4,)


def test_no_hook_is_asked_for_what_is_wrong():
    ops = Batches()
    where = "NoneType"
    for words, call in (
        ("SUM", lambda: ops.reduce("max", PAIR, "CPU:0")),
        (where, lambda: ops.reduce("sum", PAIR, None)),
        ("`per_replica_value`", lambda: ops.reduce("sum", zs.PerReplica(()), "CPU:0")),
        (where, lambda: ops.batch_reduce("sum", [(PAIR, None)])),
        ("`value_destination_pairs`", lambda: ops.batch_reduce("sum", [PAIR])),
        (where, lambda: ops.broadcast(1.0, None)),
    ):
        with pytest.raises(ValueError, match=words):
            call()
    assert ops.asked == []


def test_the_hook_for_one_value_must_be_there():
    class Nothing(zs.CrossDeviceOps):
        pass

    with pytest.raises(TypeError, match="reduce_implementation"):
        Nothing()


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


def test_the_result_goes_where_it_is_wanted():
    ops = zs.ReductionToOneDevice(reduce_to_device="CPU:1")
    assert ops.reduce("sum", BOTH, "CPU:5").devices() == {jax.devices()[5]}
    strategy = zs.MirroredStrategy(["CPU:0", "CPU:1"], cross_device_ops=ops)
    assert float(strategy.extended.reduce_to("sum", BOTH, "CPU:0")) == 3


@pytest.mark.parametrize("device", ["CPU:2", 2, D[2]])
def test_a_device_is_named_or_itself(device):
    assert spied(device) == [D[2]] * 2


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("CPU:99", "/job:loc"),
        (99, "there is no device 99 in this process; there are /job:.*from 0"),
        (-1, "there is no device -1 in this process; there are /job:.*from 0"),
        ("one", "GPU"),
        ("", "GPU"),
        (1.5, "GPU"),
    ],
)
def test_what_is_no_device_is_refused(name, words):
    with pytest.raises(ValueError, match=words):
        zs.ReductionToOneDevice(name)


def test_packs_are_counted():
    with pytest.raises(ValueError, match="num_packs >= 0"):
        zs.HierarchicalCopyAllReduce(num_packs=-1)
