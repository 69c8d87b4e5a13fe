"""Arguments of a step that are still being computed by what reads a variable."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

import zstrat as zs


class Noting:
    """A lock that notes whether an array was ready when this thread took it."""

    def __init__(self, lock, array):
        self.lock, self.array, self.ready = lock, array, []
        self.thread = threading.current_thread()

    def acquire(self):
        if threading.current_thread() is self.thread:
            self.ready.append(self.array.is_ready())
        return self.lock.acquire()

    def release(self):
        self.lock.release()

    def __enter__(self):
        self.acquire()

    def __exit__(self, *exc):
        self.release()


@pytest.mark.parametrize("count", [2, 8])
def test_a_step_waits_for_them_before_it_takes_the_variables(count):
    strategy = zs.MirroredStrategy([f"CPU:{n}" for n in range(count)])
    mesh = Mesh(np.array(jax.devices()[:count]), ("replica",))
    rows = PartitionSpec("replica")
    goes_on = threading.Event()
    with strategy.scope():
        variable = zs.Variable(np.ones(3, np.float32))

    def gate(array):
        assert goes_on.wait(60)
        return array + variable.numpy()  # in another thread

    def replica(x):
        return jax.pure_callback(gate, x, x)

    late = jax.jit(
        jax.shard_map(
            replica, mesh=mesh, in_specs=rows, out_specs=rows, check_vma=False
        )
    )

    def step(x):
        return x + variable.value()

    whole = late(jnp.arange(3.0 * count))
    spy = Noting(variable.storage.pool.turn, whole)
    variable.storage.pool.turn = spy
    timer = threading.Timer(0.2, goes_on.set)
    timer.start()
    result = strategy.run(step, (zs.PerReplica.of_whole(whole, count),))
    assert np.array_equal(np.ravel(result.values), np.arange(3.0 * count) + 2)
    assert spy.ready
    assert spy.ready[-1]
    timer.join()
