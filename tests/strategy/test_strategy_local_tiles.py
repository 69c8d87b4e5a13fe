"""Annotations in plain programs of jax over eight devices: how the compiled program
lays values, that values are the same, and their gradients too."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from zstrat.strategy._logical_devices import LogicalDevices

RNG = np.random.default_rng(0)
X = RNG.normal(size=(8, 4, 8)).astype(np.float32)
W = RNG.normal(size=(8, 3)).astype(np.float32)


def logical(replicas, count, **options):
    devices = np.array(jax.devices()[: replicas * count]).reshape(replicas, count)
    return LogicalDevices(devices, **options)


REPLICA = P("replica")


def mapped(devices, body, out=REPLICA):
    """The body for each replica: by hand over replicas, by XLA over the rest."""
    return jax.jit(
        jax.shard_map(
            body,
            mesh=devices.mesh,
            axis_names={"replica"},
            in_specs=(REPLICA, P()),
            out_specs=out,
            check_vma=False,
        )
    )


def tiles_of(array, replicas, split):
    """By hand: what each device should have of ``array``, replica by replica."""
    found = []
    for part in np.split(np.asarray(array), replicas):
        blocks = [part]
        for axis, parts in enumerate(split):
            blocks = [x for block in blocks for x in np.split(block, parts, axis)]
        found += blocks
    return found


def on_devices(array):
    shards = sorted(array.addressable_shards, key=lambda shard: shard.device.id)
    return [np.asarray(shard.data) for shard in shards]


@pytest.mark.parametrize(
    ("replicas", "split"),
    [
        (1, [1, 2, 4]),
        (1, [4, 2, 1]),
        (1, [2, 2, 2]),
        (2, [1, 2, 2]),
        (2, [1, 1, 4]),
        (2, [4, 1, 1]),
        (4, [2, 1, 1]),
    ],
)
def test_tile_after_tile_on_the_logical_devices(replicas, split):
    devices = logical(replicas, 8 // replicas)
    step = mapped(devices, lambda x, w: devices.split(x * 2, split))
    result = step(X, W)
    np.testing.assert_array_equal(result, X * 2)
    expected = tiles_of(X * 2, replicas, split)
    for found, tile in zip(on_devices(result), expected, strict=True):
        np.testing.assert_array_equal(found, tile)


def test_the_compiled_program_takes_tiles_and_computes_with_tiles():
    devices = logical(2, 4)
    step = mapped(devices, lambda x, w: jnp.tanh(devices.split(x, [1, 2, 2])))
    compiled = step.lower(X, W).compile()
    (given, _), _ = compiled.input_shardings
    assert given.shard_shape(X.shape) == (4, 2, 4)
    # One device of one replica computes 4 x 2 x 4 numbers, and talks to nobody.
    assert re.search(r"f32\[4,2,4\]\S* tanh\(", compiled.as_text())
    assert "all-" not in compiled.as_text()


def test_what_is_replicated_is_whole_everywhere():
    devices = logical(2, 4)

    def body(x, w):
        return devices.replicated(devices.split(x, [1, 2, 2]) + 1)

    step = mapped(devices, body)
    result = step(X, W)
    np.testing.assert_array_equal(result, X + 1)
    for n, found in enumerate(on_devices(result)):
        np.testing.assert_array_equal(found, np.split(X + 1, 2)[n // 4])
    assert "all-gather" in step.lower(X, W).compile().as_text()


@pytest.mark.shows("TPUStrategy.experimental_assign_to_logical_device")
def test_what_is_assigned_is_there_and_its_number_in_the_program():
    devices = logical(2, 4)
    step = mapped(devices, lambda x, w: devices.assigned(x @ w, 3))
    result = step(X, W)
    np.testing.assert_allclose(result, X @ W, rtol=1e-5)
    for replica in range(2):
        found = on_devices(result)[replica * 4 + 3]
        np.testing.assert_allclose(found, np.split(X @ W, 2)[replica], rtol=1e-5)
    lowered = step.lower(X, W).as_text(debug_info=True)
    assert "assigned_to_logical_device_3" in lowered


def test_gradients_are_those_without_a_split():
    devices = logical(2, 4)

    def loss(x, w):
        return jnp.sum(jnp.tanh(x @ w) ** 2)

    def body(x, w):
        def of_replica(x, w):
            hidden = devices.split(x, [1, 1, 4]) @ w
            return jnp.sum(jnp.tanh(devices.replicated(hidden)) ** 2)

        by_x, by_w = jax.grad(of_replica, argnums=(0, 1))(x, w)
        return by_x, jax.lax.psum(by_w, "replica")

    step = mapped(devices, body, (REPLICA, P()))
    by_x, by_w = step(X, W)
    expected = jax.grad(loss, argnums=(0, 1))(X, W)
    np.testing.assert_allclose(by_x, expected[0], rtol=2e-4, atol=1e-5)
    np.testing.assert_allclose(by_w, expected[1], rtol=2e-4, atol=1e-5)
    # The gradient of what is split is split alike.
    tiles = tiles_of(expected[0], 2, [1, 1, 4])
    for found, tile in zip(on_devices(by_x), tiles, strict=True):
        np.testing.assert_allclose(found, tile, rtol=2e-4, atol=1e-5)


def test_in_loops_and_under_transformations():
    devices = logical(2, 4)

    @jax.checkpoint
    def layer(carry, _):
        return jnp.tanh(devices.split(carry, [2, 2])), None

    def body(x, w):
        carry, _ = jax.lax.scan(layer, x.reshape(-1, 8), None, length=3)
        return jax.vmap(lambda row: row * 2)(carry)

    expected = np.tanh(np.tanh(np.tanh(X.reshape(-1, 8)))) * 2
    np.testing.assert_allclose(
        mapped(devices, body)(X, W), expected, rtol=1e-4, atol=1e-6
    )


DEVICES = logical(2, 4)
CUT = jax.jit(lambda x: DEVICES.split(x, [1, 2, 2]))


def cut_again(carry, _):
    return DEVICES.split(carry, [1, 2, 2]) + 1, None


@pytest.mark.parametrize(
    "fn", [CUT, lambda x: jax.lax.scan(cut_again, x, None, length=2)[0]]
)
def test_what_jax_has_traced_elsewhere_is_traced_again_in_a_replica(fn):
    """Functions that jax keeps traces of, met outside of the mesh first."""
    jax.eval_shape(jax.vmap(fn, axis_name="replica"), X.reshape(2, 4, 4, 8))
    jax.jit(fn)(X[:4])
    result = mapped(DEVICES, lambda x, w: fn(x))(X, W)
    assert {data.shape for data in on_devices(result)} == {(4, 2, 4)}


@pytest.mark.parametrize("split", [[2, 3], [3, 2]])
def test_six_logical_devices_of_one_replica(split):
    """Of the order of the primes that the mesh has row by row, of the other one by
    columns: a device has tile (d % 3, d // 3)."""
    devices = logical(1, 6)
    x = np.arange(36, dtype=np.float32).reshape(6, 6)
    result = jax.jit(lambda x: devices.split(x + 1, split))(x)
    tiles = tiles_of(x + 1, 1, split)
    if split == [3, 2]:
        tiles = [tiles[2 * (d % 3) + d // 3] for d in range(6)]
    for found, tile in zip(on_devices(result), tiles, strict=True):
        np.testing.assert_array_equal(found, tile)


def test_one_logical_device_lays_down_nothing():
    devices = logical(8, 1)
    step = mapped(devices, lambda x, w: devices.split(x, [1, 1, 1]) + 1)
    np.testing.assert_array_equal(step(X, W), X + 1)
    assert "sharding_constraint" not in step.lower(X, W).as_text()


def test_outside_of_a_replica_an_annotation_is_checked_and_no_more():
    devices = logical(2, 4)
    assert devices.split(X, [2, 1, 2]) is X
    assert devices.replicated(X) is X
    assert devices.assigned(X, 1) is X
    with pytest.raises(ValueError, match="`partition_dimensions`"):
        devices.split(X, [2, 2])
    for number in (4, -1):
        words = rf"Received logical device id {number} but there are only total of 4"
        with pytest.raises(ValueError, match=words):
            devices.assigned(X, number)

    with pytest.raises(TypeError, match="'float'"):
        devices.assigned(X, 1.0)


def test_in_spmd_mode_nothing_is_assigned():
    """And that is what is said first."""
    devices = logical(2, 4, is_spmd=True)
    with pytest.raises(ValueError, match="SPMD"):
        devices.assigned(X, 77)
    assert devices.split(X, [2, 1, 2]) is X
