"""Memory that bodies arrive in, and use again."""

import numpy as np

from zstrat.transport._pool import Pool


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
