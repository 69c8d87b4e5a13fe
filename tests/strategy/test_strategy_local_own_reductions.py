"""A program's own reduction between devices, with the hooks that TF has."""

import jax.numpy as jnp
import numpy as np
import pytest

import zstrat as zs
from zstrat.experimental import CommunicationOptions

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
