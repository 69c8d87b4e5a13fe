"""Several threads, and what the devices ask in the middle of a step: no update is lost,
copies are parted once, and who reads what a step does not move waits for nobody."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec
from lockstep import A, S

import zstrat as zs

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


@pytest.mark.parametrize("in_turns", [True, False])
def test_counts_of_several_threads_add_up(four, in_turns):
    with four.scope():
        count = zs.Variable(
            0, name="count", dtype="int32", aggregation=A.SUM, synchronization=S.ON_READ
        )

    def replica():
        if in_turns:
            zs.get_replica_context().merge_call(lambda strategy: None)
        count.assign_add(1)

    in_threads(lambda: [four.run(replica) for _ in range(ROUNDS)])
    assert int(count.numpy()) == THREADS * ROUNDS * REPLICAS


def test_threads_that_part_the_copies_at_once(four):
    """The first update of each replica's own: all threads come to it together."""
    for _ in range(5):
        with four.scope():
            own = zs.Variable(np.zeros(2, np.float32), name="own", aggregation=A.NONE)

        def replica(own=own):
            zs.get_replica_context().merge_call(lambda strategy: None)
            number = zs.get_replica_context().replica_id_in_sync_group
            own.assign_add(jnp.full(2, number + 1.0))

        in_threads(lambda replica=replica: four.run(replica))
        copies = [copy.numpy() for copy in four.experimental_local_results(own)]
        sums = [[THREADS * (n + 1.0)] * 2 for n in range(REPLICAS)]
        assert np.stack(copies).tolist() == sums


SHAPE = (3, 4)


@pytest.fixture
def variable(two):
    with two.scope():
        return zs.Variable(np.zeros(SHAPE, np.float32))


def parting(two, variable):
    """Each replica adds one more than its number to its own copy, in a thread."""

    def own():
        number = zs.get_replica_context().replica_id_in_sync_group
        variable.assign_add(jnp.full(SHAPE, number + 1, jnp.float32))

    def part():
        thread = threading.Thread(target=two.run, args=(own,))
        thread.start()
        thread.join()

    return part


class Before:
    """A lock that calls a function before somebody takes it."""

    def __init__(self, lock, comes):
        self.lock, self.comes = lock, comes

    def acquire(self):
        self.comes()
        return self.lock.acquire()

    def release(self):
        self.lock.release()

    def __enter__(self):
        self.acquire()

    def __exit__(self, *exc):
        self.release()


def once(act):
    """Calls the function the first time alone."""
    acts = [act]
    return lambda: acts.pop()() if acts else None


@pytest.mark.parametrize("is_moved", [True, False])
def test_after_the_program_was_found(two, variable, is_moved):
    @zs.function
    def step():
        if is_moved:
            variable.assign_add(jnp.full(SHAPE, 10.0))
        return variable.value() + 100

    step()
    storage = variable.storage.pool
    storage.turn = Before(storage.turn, once(parting(two, variable)))
    first = 20 * is_moved + 1  # that of replica 0, as TF reads it
    np.testing.assert_array_equal(step(), np.full(SHAPE, first + 100))
    np.testing.assert_array_equal(variable.numpy(), np.full(SHAPE, first))
    assert step.trace_count == 2


@pytest.mark.parametrize("during", [1, 2])
@pytest.mark.parametrize("how", ["read", "assign", "assign_add"])
def test_while_it_is_traced(two, variable, during, how):
    part, traces = parting(two, variable), []

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


def test_what_was_drawn_is_drawn_again(two, variable):
    @zs.function
    def step(iterator):
        return variable.value() + next(iterator)

    elements = zs.StepIterator(iter([np.float32(n) for n in (10, 20)]))
    step(elements)
    storage = variable.storage.pool
    storage.turn = Before(storage.turn, once(parting(two, variable)))
    np.testing.assert_array_equal(step(elements), np.full(SHAPE, 21))


def test_two_threads_part_it_once(two, variable):
    part = parting(two, variable)
    storage = variable.storage
    storage.pool.turn = Before(storage.pool.turn, once(part))
    storage.part()  # it has found it whole, and waits for its turn
    copies = [np.full(SHAPE, 1, np.float32), np.full(SHAPE, 2, np.float32)]
    np.testing.assert_array_equal(storage.copies(variable), copies)


WAYS = {
    "one": lambda: zs.OneDeviceStrategy("CPU:0"),
    "two": lambda: zs.MirroredStrategy(["CPU:0", "CPU:1"]),
    "eight": lambda: zs.MirroredStrategy([f"CPU:{n}" for n in range(8)]),
    "central": lambda: zs.CentralStorageStrategy(["CPU:0", "CPU:1"], "CPU:3"),
    "at home": lambda: zs.CentralStorageStrategy(["CPU:0", "CPU:1"], "CPU:0"),
}


def ended(act):
    """The result, of another thread: who hangs fails here."""
    found = []
    thread = threading.Thread(target=lambda: found.append(act()), daemon=True)
    thread.start()
    thread.join(60)
    assert found, "it hangs"
    return found[0]


@pytest.fixture(params=list(WAYS))
def strategy(request):
    return WAYS[request.param]()


def asking(strategy, moved, ask):
    """A step in which replicas add to a variable what is made of its value outside of
    the program."""

    def replica():
        value = moved.value()
        moved.assign_add(jax.pure_callback(ask, value, value))

    return zs.function(lambda: [strategy.run(replica)][1:])


def two_variables(strategy):
    with strategy.scope():
        return [
            zs.Variable(np.full(3, value, np.float32), aggregation=A.MEAN)
            for value in (1, 7)
        ]


def test_what_a_step_asks_may_read_another_variable(strategy):
    moved, other = two_variables(strategy)
    step = asking(strategy, moved, lambda x: x + other.numpy())
    for _ in range(3):
        ended(step)
    # v + (v + 7), three times of 1: 9, 25, 57.
    assert list(moved.numpy()) == [57] * 3


def test_where_values_are_kept_elsewhere_the_old_one_is_read():
    strategy = WAYS["central"]()
    moved, _ = two_variables(strategy)
    ended(asking(strategy, moved, lambda x: x + moved.numpy()))
    assert list(moved.numpy()) == [3] * 3


def test_a_thread_that_waits_for_the_next_value_stops_nobody():
    strategy = WAYS["two"]()
    moved, other = two_variables(strategy)
    asked, goes_on = threading.Event(), threading.Event()

    def ask(x):
        asked.set()
        assert goes_on.wait(60)
        return x + other.numpy()

    found = []
    step = asking(strategy, moved, ask)
    threads = [
        threading.Thread(target=step, daemon=True),
        threading.Thread(target=lambda: found.append(moved.numpy()), daemon=True),
    ]
    threads[0].start()
    assert asked.wait(60)
    threads[1].start()
    goes_on.set()
    for thread in threads:
        thread.join(60)
    np.testing.assert_array_equal(found, [[9] * 3])


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
    pool, thread, ready = variable.storage.pool, threading.current_thread(), []

    def note():
        if threading.current_thread() is thread:
            ready.append(whole.is_ready())

    pool.turn = Before(pool.turn, note)
    timer = threading.Timer(0.2, goes_on.set)
    timer.start()
    result = strategy.run(step, (zs.PerReplica.of_whole(whole, count),))
    assert np.array_equal(np.ravel(result.values), np.arange(3.0 * count) + 2)
    assert ready
    assert ready[-1]
    timer.join()
