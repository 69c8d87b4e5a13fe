"""Memory that bodies arrive in, and use again."""

import numpy as np
import pytest

from zstrat.transport import Pool


def test_the_pool_lends_memory_again_when_the_arrays_are_gone():
    pool = Pool(kept=4 * 2**20)
    memory = pool.allocate(2_000_000)
    array = np.ndarray((1000,), np.uint8, memory.toreadonly()[64:1064])
    place = array.ctypes.data - 64
    part = array[5:]
    del memory, array
    assert pool.statistics() == {"leases": 1, "idle_bytes": 0}
    other = pool.allocate(2_000_000)
    del part
    assert pool.statistics()["leases"] == 1
    again = np.ndarray((1,), np.uint8, pool.allocate(1_999_999))
    assert again.ctypes.data == place
    del other, again
    assert pool.statistics() == {"leases": 0, "idle_bytes": 2 * 2_031_616}
    pool.age(100.0)
    pool.age(129.0)
    assert pool.statistics()["idle_bytes"]
    pool.age(131.0)
    assert pool.statistics()["idle_bytes"] == 0


def test_the_pool_keeps_no_more_than_its_bound():
    pool = Pool(kept=2**20)
    del (first := [pool.allocate(2**20) for _ in range(3)])[:]
    assert not first
    assert pool.statistics() == {"leases": 0, "idle_bytes": 2**20}


def asked_for(pool, size, now):
    """What a step at ``now`` leaves behind, between two looks at the clock."""
    del (body := [pool.allocate(size)])[:]
    assert not body
    pool.age(now)


def test_a_new_size_is_kept_though_old_ones_fill_the_pool_that_is_in_use():
    pool = Pool(kept=3 * 2**20)
    for size in (2**20, 2**21):
        asked_for(pool, size, 100.0)
    asked_for(pool, 2**20, 105.0)
    asked_for(pool, 3 * 2**19, 106.0)
    # What was used last but one second ago has stayed, the older one has gone.
    assert pool.statistics()["idle_bytes"] == 2**20 + 3 * 2**19


def test_sizes_that_take_turns_do_not_drive_each_other_out():
    pool = Pool(kept=2**20)
    asked_for(pool, 2**20, 100.0)
    for turn in range(10):
        asked_for(pool, 2**19, 100.5 + turn)
        asked_for(pool, 2**20, 101.0 + turn)
    assert pool.statistics()["idle_bytes"] == 2**20


def test_a_size_that_nobody_asks_for_goes_though_others_are_in_use():
    pool = Pool()
    for now in range(100, 140):
        asked_for(pool, 2**21 if now < 102 else 2**20, float(now))
    assert pool.statistics()["idle_bytes"] == 2**20


@pytest.mark.parametrize("shape", [40_000, (200, 200), (1, 40_000)])
def test_large_arrays_of_the_pool_are_lent_and_lie_at_a_multiple_of_64(shape):
    pool = Pool()
    array = pool.empty(shape, np.dtype(np.float32))
    assert array.shape == np.empty(shape).shape
    assert array.dtype == np.float32
    assert array.flags.writeable
    assert array.ctypes.data % 64 == 0
    part = array.reshape(-1)[3:5]
    del array
    assert pool.statistics()["leases"] == 1
    del part
    assert pool.statistics()["leases"] == 0


@pytest.mark.parametrize("shape", [0, (), (3, 0), 100])
def test_small_arrays_of_the_pool_are_numpys(shape):
    pool = Pool()
    array = pool.empty(shape, np.dtype(np.int8))
    assert array.shape == np.empty(shape).shape
    assert pool.statistics()["leases"] == 0
