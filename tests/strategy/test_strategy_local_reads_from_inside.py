"""What the devices ask in the middle of a step may read variables that the step does
not move, also while other threads wait for those that it moves."""

import threading

import jax
import numpy as np
import pytest

import zstrat as zs

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


def created(strategy, value):
    with strategy.scope():
        return zs.Variable(
            np.full(3, value, np.float32), aggregation=zs.VariableAggregation.MEAN
        )


def test_what_a_step_asks_may_read_another_variable(strategy):
    moved, other = created(strategy, 1), created(strategy, 7)

    def ask(x):
        return x + other.numpy()

    @zs.function
    def step():
        def replica():
            value = moved.value()
            moved.assign_add(jax.pure_callback(ask, value, value))

        strategy.run(replica)

    for _ in range(3):
        ended(step)
    # v + (v + 7), three times of 1: 9, 25, 57.
    assert list(moved.numpy()) == [57] * 3


def test_where_values_are_kept_elsewhere_the_old_one_is_read():
    strategy = WAYS["central"]()
    moved = created(strategy, 2)

    def ask(x):
        return x + moved.numpy()

    @zs.function
    def step():
        def replica():
            value = moved.value()
            moved.assign_add(jax.pure_callback(ask, value, value))

        strategy.run(replica)

    ended(step)
    assert list(moved.numpy()) == [6] * 3


def test_a_thread_that_waits_for_the_next_value_stops_nobody():
    strategy = WAYS["two"]()
    moved, other = created(strategy, 1), created(strategy, 7)
    asked, goes_on = threading.Event(), threading.Event()

    def ask(x):
        asked.set()
        assert goes_on.wait(60)
        return x + other.numpy()

    @zs.function
    def step():
        def replica():
            value = moved.value()
            moved.assign_add(jax.pure_callback(ask, value, value))

        strategy.run(replica)

    found = []
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
