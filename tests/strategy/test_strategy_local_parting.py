"""A step of one thread, and another thread that begins to keep a copy for each replica
meanwhile: the step finds out before it takes any value."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zstrat as zs

SHAPE = (3, 4)


@pytest.fixture
def replicas():
    return zs.MirroredStrategy(["CPU:0", "CPU:1"])


@pytest.fixture
def variable(replicas):
    with replicas.scope():
        return zs.Variable(np.zeros(SHAPE, np.float32))


def parting(replicas, variable):
    """Each replica adds one more than its number to its own copy, in a thread."""

    def own():
        number = zs.get_replica_context().replica_id_in_sync_group
        variable.assign_add(jnp.full(SHAPE, number + 1, jnp.float32))

    def part():
        thread = threading.Thread(target=replicas.run, args=(own,))
        thread.start()
        thread.join()

    return part


class Before:
    """A lock before which another thread comes once."""

    def __init__(self, lock, comes):
        self.lock, self.comes = lock, comes

    def acquire(self):
        comes, self.comes = self.comes, None
        if comes is not None:
            comes()
        return self.lock.acquire()

    def release(self):
        self.lock.release()

    def __enter__(self):
        self.acquire()

    def __exit__(self, *exc):
        self.release()


@pytest.mark.parametrize("is_moved", [True, False])
def test_after_the_program_was_found(replicas, variable, is_moved):
    @zs.function
    def step():
        if is_moved:
            variable.assign_add(jnp.full(SHAPE, 10.0))
        return variable.value() + 100

    step()
    storage = variable.storage.pool
    storage.turn = Before(storage.turn, parting(replicas, variable))
    first = 20 * is_moved + 1  # that of replica 0, as TF reads it
    np.testing.assert_array_equal(step(), np.full(SHAPE, first + 100))
    np.testing.assert_array_equal(variable.numpy(), np.full(SHAPE, first))
    assert step.trace_count == 2


@pytest.mark.parametrize("during", [1, 2])
@pytest.mark.parametrize("how", ["read", "assign", "assign_add"])
def test_while_it_is_traced(replicas, variable, during, how):
    part, traces = parting(replicas, variable), []

    @zs.function
    def step():
        traces.append(1)
        if len(traces) == during:
            part()
        # Read inside of what jax traces by itself: the body is traced twice.
        read = jax.lax.fori_loop(
            0, 1, lambda _, x: x + variable.value(), jnp.zeros(SHAPE)
        )
        if how != "read":
            getattr(variable, how)(jnp.full(SHAPE, 10.0))
        return variable.value() + 100 + 0 * read

    first = {"read": 1, "assign": 10, "assign_add": 11}[how]
    np.testing.assert_array_equal(step(), np.full(SHAPE, first + 100))
    np.testing.assert_array_equal(variable.numpy(), np.full(SHAPE, first))


def test_what_was_drawn_is_drawn_again(replicas, variable):
    @zs.function
    def step(iterator):
        return variable.value() + next(iterator)

    elements = zs.StepIterator(iter([np.float32(n) for n in (10, 20)]))
    step(elements)
    storage = variable.storage.pool
    storage.turn = Before(storage.turn, parting(replicas, variable))
    np.testing.assert_array_equal(step(elements), np.full(SHAPE, 21))


def test_two_threads_part_it_once(replicas, variable):
    part = parting(replicas, variable)
    storage = variable.storage
    storage.pool.turn = Before(storage.pool.turn, part)
    storage.part()  # it has found it whole, and waits for its turn
    copies = [np.full(SHAPE, 1, np.float32), np.full(SHAPE, 2, np.float32)]
    np.testing.assert_array_equal(storage.copies(variable), copies)


@pytest.mark.parametrize("in_turns", [True, False])
def test_no_count_of_several_threads_is_lost(replicas, in_turns):
    with replicas.scope():
        count = zs.Variable(
            0,
            aggregation=zs.VariableAggregation.SUM,
            synchronization=zs.VariableSynchronization.ON_READ,
        )

    def replica():
        if in_turns:
            zs.get_replica_context().merge_call(lambda strategy: None)
        count.assign_add(1)

    def loop():
        for _ in range(30):
            replicas.run(replica)

    threads = [threading.Thread(target=loop) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert count.numpy() == 2 * 3 * 30
