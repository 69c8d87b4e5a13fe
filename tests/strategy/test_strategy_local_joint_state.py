"""What a step makes is kept as one list for its next call. Whoever comes in between, in
another step or outside of steps, meets the values and slots of now."""

import gc
import itertools
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zstrat as zs
from zstrat.errors import DataLossError

SIZE = 1000


class Training:
    """Two variables that Adam moves together, and the same by plain optax."""

    def __init__(self, strategy):
        self.strategy, self.adam = strategy, optax.adam(0.1)
        start = {"a": np.full(SIZE, 1, np.float32), "b": np.full(SIZE, 2, np.float32)}
        with strategy.scope():
            self.params = zs.create_variables(start)
            self.optimizer = zs.Optimizer(self.adam)
        self.expected = {name: jnp.asarray(value) for name, value in start.items()}
        self.state = self.adam.init(self.expected)

        def replica():
            grads = {name: v.value() / 8 for name, v in self.params.items()}
            self.optimizer.apply_gradients(grads, self.params)

        self.step = zs.function(lambda: strategy.run(replica))

    def train(self):
        self.step()
        count = self.strategy.num_replicas_in_sync
        grads = jax.tree.map(lambda x: count * (x / 8), self.expected)
        updates, self.state = self.adam.update(grads, self.state)
        self.expected = optax.apply_updates(self.expected, updates)

    def require_same(self):
        for name, value in self.expected.items():
            np.testing.assert_allclose(self.params[name].numpy(), value, rtol=1e-6)


@pytest.fixture(params=["mirrored", "one device", "central"])
def training(request):
    return Training(
        {
            "mirrored": lambda: zs.MirroredStrategy(["CPU:0", "CPU:1"]),
            "one device": lambda: zs.OneDeviceStrategy("CPU:0"),
            "central": lambda: zs.CentralStorageStrategy(["CPU:0", "CPU:1"], "CPU:2"),
        }[request.param]()
    )


def test_a_step_goes_on_from_what_others_made_in_between(training):
    a, b = training.params["a"], training.params["b"]
    put = zs.function(lambda x: a.assign(x))  # does not read what it replaces
    double = zs.function(lambda: b.assign(2 * b.value()))
    look = zs.function(lambda: a.value() + b.value())
    others = [
        lambda: put(jnp.full(SIZE, 5.0)),
        double,
        lambda: a.assign(np.full(SIZE, 3, np.float32)),
        lambda: b.assign_add(np.ones(SIZE, np.float32)),
        look,
    ]
    moved = [
        lambda e: e | {"a": jnp.full(SIZE, 5.0)},
        lambda e: e | {"b": 2 * e["b"]},
        lambda e: e | {"a": jnp.full(SIZE, 3.0)},
        lambda e: e | {"b": e["b"] + 1},
        lambda e: e,
    ]
    for number in itertools.chain(range(5), range(5)):
        training.train()
        training.train()
        others[number]()
        training.expected = moved[number](training.expected)
        if number % 2:
            training.require_same()
    training.train()
    total = training.expected["a"] + training.expected["b"]
    np.testing.assert_allclose(look(), total, rtol=1e-6)
    training.require_same()


def test_slots_are_those_of_now(training):
    for _ in range(3):
        training.train()
        found = training.optimizer.state[0]
        assert int(found.count) == int(training.state[0].count)
        for name, moment in training.state[0].mu.items():
            np.testing.assert_allclose(found.mu[name], moment, rtol=1e-6)


def test_a_value_that_was_replaced_takes_no_memory(training):
    a = training.params["a"]
    put = zs.function(lambda x: a.assign(x))
    training.step()
    put(np.ones(SIZE, np.float32))
    training.step()
    found = []
    for _ in range(2):
        put(np.ones(SIZE, np.float32))
        a.assign(np.ones(SIZE, np.float32))
        found.append(sum(x.nbytes for x in jax.live_arrays()))
        training.step()
        found.append(sum(x.nbytes for x in jax.live_arrays()))
    assert max(found) - min(found) < 4 * SIZE


def test_another_thread_may_read_all_the_while(training):
    """Each value is one that training has had, and they never go back."""
    b = training.params["b"]
    with ThreadPoolExecutor(1) as other:
        reading = other.submit(lambda: [float(b.numpy()[0]) for _ in range(200)])
        while not reading.done():
            training.train()
        seen = reading.result()
    assert seen == sorted(seen, reverse=True)
    training.require_same()


def test_a_variable_that_lives_on_keeps_nothing_of_those_that_moved_with_it():
    strategy = zs.OneDeviceStrategy("CPU:0")
    with strategy.scope():
        counter = zs.Variable(np.float32(0))

    def trial():
        with strategy.scope():
            model = zs.Variable(np.zeros(SIZE, np.float32))

        @zs.function
        def step():
            model.assign_add(np.ones(SIZE, np.float32))
            counter.assign_add(np.float32(1))

        step()
        step()

    before = sum(x.nbytes for x in jax.live_arrays())
    trial()
    gc.collect()
    assert sum(x.nbytes for x in jax.live_arrays()) - before < 4 * SIZE
    assert float(counter.numpy()) == 2


def interrupted(number, act, handler):
    """Acts; before the so-many-th function begins that the storage of a variable calls,
    ``handler`` runs, as that of a signal may. Whether it came to that."""
    count = 0

    def look(frame, event, _):
        nonlocal count
        caller = frame.f_back
        if event == "call" and caller is not None:
            count += caller.f_code.co_filename.endswith("variables/_device.py")
            if count == number:
                sys.settrace(None)
                handler()

    before = sys.gettrace()
    sys.settrace(look)
    try:
        act()
    finally:
        sys.settrace(before)
    return count >= number


@pytest.mark.parametrize("what", ["read", "step"])
def test_a_handler_of_a_signal_may_read(training, what):
    a, b = training.params["a"], training.params["b"]
    training.train()
    act = a.numpy if what == "read" else training.train

    def read():
        for variable in (b, a):
            with suppress(DataLossError):  # a step is just replacing it
                variable.numpy()

    for number in itertools.count(1):
        training.train()
        if what == "step":
            a.numpy()  # the next step puts it beside the others again
        was_there = interrupted(number, act, read)
        found = training.optimizer.state[0]
        assert int(found.count) == int(training.state[0].count)
        for name, moment in training.state[0].mu.items():
            # After dozens of steps: each rounds.
            np.testing.assert_allclose(found.mu[name], moment, rtol=1e-3)
            value = training.expected[name]
            np.testing.assert_allclose(
                training.params[name].numpy(), value, rtol=1e-3, atol=1e-5
            )
        if not was_there:
            break
    assert number > 1
