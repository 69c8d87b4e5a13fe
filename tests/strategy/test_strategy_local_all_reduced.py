"""The all-reduces that TF has by name: one program on the devices where the values are,
with the results of a reduction on one device."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zstrat as zs
from zstrat.strategy._local_strategy import _usual
from zstrat.strategy.reduce import _on_devices

D = jax.devices()
OPS = [
    zs.NcclAllReduce(),
    zs.NcclAllReduce(num_packs=3),
    zs.HierarchicalCopyAllReduce(num_packs=0),
]
R = 4
DTYPES = ["f4", "f2", jnp.bfloat16, "i4", "u1", "i1", "?", "c8"]


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


@pytest.mark.parametrize("ops", OPS)
@pytest.mark.parametrize("op", ["sum", "mean"])
def test_a_batch_of_all_dtypes_and_shapes(ops, op):
    rng = np.random.default_rng(0)
    numbers = [
        [rng.integers(0, 30, shape).astype(dtype) for _ in range(R)]
        for shape in [(), (5,), (2, 3)]
        for dtype in DTYPES
    ]
    pairs = [
        (KINDS[n % 3](each), ["CPU:1", "CPU:6"][n % 2])
        for n, each in enumerate(numbers)
    ]
    for n, found in enumerate(ops.batch_reduce(op, pairs)):
        given = np.array(numbers[n])
        wide = np.complex64 if given.dtype.kind == "c" else np.float32
        expected = given.astype(wide).sum(0)
        expected = expected if op == "sum" else expected / R
        assert found.shape == given.shape[1:]
        assert found.devices() == {D[[1, 6][n % 2]]}
        if op == "sum" and given.dtype != bool:
            assert found.dtype == given.dtype
        elif op == "mean" and given.dtype.kind in "iub":
            assert found.dtype == np.float32
        np.testing.assert_allclose(np.asarray(found).astype(wide), expected, rtol=1e-2)


def test_float32_is_exact_to_its_rounding():
    numbers = np.random.default_rng(1).normal(size=(R, 100)).astype(np.float32)
    value = one_array(list(numbers))
    for op, expected in (
        ("sum", numbers.astype(float).sum(0)),
        ("mean", numbers.astype(float).mean(0)),
    ):
        found = zs.NcclAllReduce().reduce(op, value, "CPU:0")
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


def test_narrow_integers_wrap_in_sums_alone():
    value = one_array([np.full(2, 100, np.uint8)] * R)
    ops = zs.NcclAllReduce()
    assert ops.reduce("sum", value, "CPU:0").tolist() == [400 - 256] * 2
    assert ops.reduce("mean", value, "CPU:0").tolist() == [100.0] * 2


@pytest.mark.parametrize("shape", [(), (2,)])
def test_the_result_is_where_it_is_wanted(shape):
    ops = zs.NcclAllReduce()
    value = one_array([np.full(shape, n, np.float32) for n in range(R)])
    for devices in (D[:R], D[1:3], [D[2], D[0]], [D[1], D[7]], D[5:7], D):
        like = zs.PerReplica([jax.device_put(0.0, device) for device in devices])
        found = ops.reduce("sum", value, like)
        assert isinstance(found, zs.Mirrored)
        assert places_of(found) == list(devices)
        for copy in found.values:
            np.testing.assert_array_equal(copy, np.full(shape, 6))
    for device in (D[0], D[3], D[7]):
        found = ops.reduce("sum", value, jax.device_put(0.0, device))
        assert found.devices() == {device}
        np.testing.assert_array_equal(found, np.full(shape, 6))
    nowhere = ops.reduce("sum", value, np.zeros(1))
    np.testing.assert_array_equal(nowhere, np.full(shape, 6))


def test_what_lies_otherwise_keeps_its_order_among_the_others():
    """Of numpy, on one device twice, sparse, without numbers, too wide for jax."""
    there = one_array([np.float32(n) for n in range(R)])
    rows = tuple(
        zs.IndexedSlices(jnp.full((1, 2), n), jnp.array([n]), (R, 2)) for n in range(R)
    )
    twice = [jax.device_put(np.float32(n), D[n % 2]) for n in range(R)]
    values = [
        zs.PerReplica([np.float32(n) for n in range(R)]),
        there,
        zs.PerReplica(twice),
        zs.PerReplica(rows),
        zs.PerReplica([np.array(3_000_000_000 + n) for n in range(R)]),
        zs.PerReplica([jnp.zeros((0, 2))] * R),
        one_array([np.zeros((0, 2), np.float32)] * R),
        zs.PerReplica([there.values[0]]),
        there,
    ]
    found = zs.NcclAllReduce().batch_reduce("sum", [(x, "CPU:1") for x in values])
    assert [float(found[n]) for n in (0, 1, 2, 7, 8)] == [6, 6, 6, 0, 6]
    assert found[3].indices.tolist() == [0, 1, 2, 3]
    assert int(found[4]) == 12_000_000_006
    assert found[5].shape == found[6].shape == (0, 2)


def test_what_replicas_returned_is_reduced_where_it_is():
    strategy = zs.MirroredStrategy(["CPU:1", "CPU:2"])
    value = strategy.run(
        lambda: (1.0 + zs.get_replica_context().replica_id_in_sync_group) * jnp.ones(2)
    )
    with jax.transfer_guard_device_to_device("disallow_explicit"):
        found = zs.NcclAllReduce().reduce("sum", value, value)
    assert places_of(found) == D[1:3]
    assert [x.tolist() for x in found.values] == [[3.0, 3.0]] * 2


def test_different_shapes_are_refused():
    parts = [jax.device_put(np.ones(n + 1), D[n]) for n in range(2)]
    with pytest.raises(ValueError, match=r"\(1,\).*\(2,\)"):
        zs.NcclAllReduce().reduce("sum", zs.PerReplica(parts), "CPU:0")


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
