"""What is on devices has memory of its own, which is used again when it is gone."""

import gc
import time
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zstrat as zs
from zstrat.data import Dataset
from zstrat.transport import POOL

ROWS, COLUMNS = 64, 1024
"""Of float32 more than the pool thinks too small to lend."""


@pytest.fixture(params=[1, 2], ids=["one device", "two devices"])
def layout(request):
    names = [f"CPU:{n}" for n in range(request.param)]
    strategy = zs.MirroredStrategy(names)
    return strategy._mesh.layout


def leases():
    gc.collect(0)  # with it jax lets go of what it was given
    return POOL.statistics()["leases"]


def comes_back(count):
    """Whether so many are lent again, soon. Of what is on several devices jax lets go
    on threads of its own, and gives it back with one of the collections that follow."""
    late = time.monotonic() + 20.0
    while leases() != count and time.monotonic() < late:
        pass
    return leases() == count


def whole(layout, placed):
    return np.asarray(placed if layout.replicas == 1 else placed.whole)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bool", "bfloat16"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_a_batch_is_a_copy_of_what_its_user_fills_again(layout, dtype, order):
    numbers = np.arange(ROWS * COLUMNS).reshape(ROWS, COLUMNS) % 5
    buffer = numbers.astype(jnp.dtype(dtype), order=order)
    wanted = buffer.copy()
    placed = layout.place_batch({"x": buffer})["x"]
    buffer[...] = 3
    np.testing.assert_array_equal(whole(layout, placed), wanted)


def test_parts_are_copies_of_what_their_user_fills_again(layout):
    buffers = [np.full((ROWS, COLUMNS), n, np.float32) for n in range(layout.replicas)]
    placed = layout.place(buffers)
    for buffer in buffers:
        buffer[...] = 7
    parts = np.split(whole(layout, placed), layout.replicas)
    assert [np.unique(part).tolist() for part in parts] == [
        [n] for n in range(layout.replicas)
    ]


def test_the_memory_of_a_batch_is_lent_as_long_as_a_device_has_it(layout):
    before = leases()
    placed = layout.place_batch(np.ones((ROWS, COLUMNS), np.float32))
    jax.block_until_ready(placed)
    assert leases() == before + 1
    view = whole(layout, placed)[1:2]
    del placed
    assert view.sum() == COLUMNS
    del view
    assert comes_back(before)


def test_small_arrays_are_not_lent(layout):
    before = leases()
    placed = layout.place_batch(np.ones((ROWS, 2), np.float32))
    assert leases() == before
    assert whole(layout, placed).sum() == 2 * ROWS


def test_batches_that_are_kept_stay_what_they_are(layout):
    """Every third one is kept; the others make room for those that follow."""
    kept = {}
    for n in range(30):
        placed = layout.place_batch(np.full((ROWS, COLUMNS), n, np.float32))
        if n % 3 == 0:
            kept[n] = placed
    for n, placed in kept.items():
        assert np.unique(whole(layout, placed)).tolist() == [n]


def test_what_a_program_reads_stays_until_it_ends():
    """Nobody has the batch any more while its program is still under way."""
    strategy = zs.OneDeviceStrategy("CPU:3")
    layout = strategy._mesh.layout

    @jax.jit
    def slow(x):
        square = x[:ROWS, :ROWS]
        for _ in range(50):
            square = jnp.tanh(square @ square)
        return square.sum() * 0 + x.sum()  # the batch is read at the end

    batch = np.ones((1024, 1024), np.float32)
    layout.place_batch(batch)
    results = [slow(layout.place_batch(batch * n)) for n in range(1, 9)]
    assert [float(x) for x in results] == [batch.size * n for n in range(1, 9)]


def drawn(strategy, data):
    """The first batch, and what the strategy has made of it."""
    layout, shares = strategy._mesh.layout, []

    def place(share):
        shares.append(share)
        return layout.place_share(share)

    inputs = replace(strategy._inputs(), place=place)
    placed = next(iter(inputs.of_dataset(data)))
    return shares[0].rows, np.asarray(placed.whole.addressable_shards[0].data)


@pytest.mark.parametrize("after", [Dataset.prefetch, Dataset.repeat, Dataset.take])
def test_a_batch_that_nobody_else_has_is_not_copied(after):
    rows = Dataset.from_tensor_slices(np.ones((8, COLUMNS), np.float32))
    strategy = zs.MirroredStrategy(["CPU:0", "CPU:1"])
    batch, placed = drawn(strategy, after(rows.batch(4), 2))
    assert np.shares_memory(batch, placed)


def test_a_batch_that_a_function_has_seen_is_a_copy():
    seen = []

    def keep(batch):
        seen.append(batch)
        return True

    rows = Dataset.from_tensor_slices(np.ones((8, COLUMNS), np.float32))
    strategy = zs.MirroredStrategy(["CPU:0", "CPU:1"])
    for data in (rows.batch(4).filter(keep), rows.batch(4).cache()):
        batch, placed = drawn(strategy, data)
        assert not np.shares_memory(batch, placed)
    seen[0][...] = 3
    np.testing.assert_array_equal(placed, np.ones((2, COLUMNS)))
