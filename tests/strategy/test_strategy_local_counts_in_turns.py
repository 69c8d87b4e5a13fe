"""Threads that each run replicas in turns: no update of an own copy is lost."""

import threading

import jax.numpy as jnp
import numpy as np
import pytest

import zstrat as zs

NONE, SUM = zs.VariableAggregation.NONE, zs.VariableAggregation.SUM
ON_READ = zs.VariableSynchronization.ON_READ
THREADS, ROUNDS, REPLICAS = 3, 20, 4


@pytest.fixture
def four():
    return zs.MirroredStrategy([f"CPU:{n}" for n in range(REPLICAS)])


def in_threads(work):
    """Lets all threads begin together; raises what one of them raised."""
    start, errors = threading.Barrier(THREADS), []

    def loop():
        try:
            start.wait()
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=loop) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def test_counts_of_several_threads_add_up(four):
    with four.scope():
        count = zs.Variable(
            0, name="count", dtype="int32", aggregation=SUM, synchronization=ON_READ
        )

    def replica():
        zs.get_replica_context().merge_call(lambda strategy: None)
        count.assign_add(1)

    in_threads(lambda: [four.run(replica) for _ in range(ROUNDS)])
    assert int(count.numpy()) == THREADS * ROUNDS * REPLICAS


def test_threads_that_part_the_copies_at_once(four):
    """The first update of each replica's own: all threads come to it together."""
    for _ in range(5):
        with four.scope():
            own = zs.Variable(np.zeros(2, np.float32), name="own", aggregation=NONE)

        def replica(own=own):
            zs.get_replica_context().merge_call(lambda strategy: None)
            number = zs.get_replica_context().replica_id_in_sync_group
            own.assign_add(jnp.full(2, number + 1.0))

        in_threads(lambda replica=replica: four.run(replica))
        copies = [copy.numpy() for copy in four.experimental_local_results(own)]
        sums = [[THREADS * (n + 1.0)] * 2 for n in range(REPLICAS)]
        assert np.stack(copies).tolist() == sums


def test_rows_of_the_own_copy_are_updated_and_named(four):
    """Duplicates accumulate; a row that is not there is an error."""
    with four.scope():
        own = zs.Variable(np.zeros((3, 1), np.float32), name="own", aggregation=NONE)

    def replica(row):
        zs.get_replica_context().merge_call(lambda strategy: None)
        number = zs.get_replica_context().replica_id_in_sync_group
        rows = jnp.full((2, 1), number + 1.0)
        own.scatter_add(zs.IndexedSlices(rows, jnp.array([row, row])))

    four.run(replica, args=(2,))
    copies = [copy.numpy()[:, 0] for copy in four.experimental_local_results(own)]
    assert np.stack(copies).tolist() == [[0, 0, 2.0 * (n + 1)] for n in range(REPLICAS)]
    for row in (3, -1):
        with pytest.raises(IndexError, match=f"no row {row}|{row}"):
            four.run(replica, args=(row,))
