"""Ctrl-C in a step: an element is used once, or not at all; a step is made as a whole,
or not at all; and no thread waits for one that has been interrupted."""

import ast
import functools
import itertools
import os
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zstrat as zs
from zstrat.program.stages import _staged

HERE = Path(zs.__file__).parent
PLACES = str(HERE / "program"), str(HERE / "variables")


class Interrupting:
    """What a replica asks in the middle of its computation: presses Ctrl-C, once, when
    the step waits for the devices."""

    def __init__(self, monkeypatch):
        self.is_armed = False
        self.waits = threading.Event()
        self.wait = _staged._wait
        monkeypatch.setattr(_staged, "_wait", self.begin)

    def begin(self, arrays):
        if isinstance(arrays, jax.Array):  # and no list of arguments
            self.waits.set()
        self.wait(arrays)

    def press(self, array):
        if self.is_armed:
            self.is_armed = False
            assert self.waits.wait(60)
            os.kill(os.getpid(), signal.SIGINT)
        return array

    def __call__(self, array):
        return jax.pure_callback(self.press, jnp.zeros(array.shape, array.dtype), array)


def test_an_element_is_used_once_if_the_devices_compute(two, monkeypatch):
    with two.scope():
        seen = zs.Variable(
            np.zeros(6, np.float32), aggregation=zs.VariableAggregation.SUM
        )
    elements = zs.StepIterator(iter(np.arange(6, dtype=np.int32)))
    ask = Interrupting(monkeypatch)

    @zs.function
    def step(elements):
        element = next(elements)
        two.run(lambda: seen.assign_add(jnp.zeros(6).at[ask(element)].add(1)))
        return element

    assert [int(step(elements)) for _ in range(2)] == [0, 1]
    ask.waits.clear()
    ask.is_armed = True
    with pytest.raises(KeyboardInterrupt):
        step(elements)
    assert list(seen.numpy()) == [2, 2, 2, 0, 0, 0]
    assert int(step(elements)) == 3
    assert list(seen.numpy()) == [2, 2, 2, 2, 0, 0]


@functools.cache
def leaving(path):
    """Lines of ``with``: a line comes a second time on the way out, where Python
    handles no signal before the lock of C is released."""
    tree = ast.parse(Path(path).read_text())
    return {node.lineno for node in ast.walk(tree) if isinstance(node, ast.With)}


class Lines:
    """Raises KeyboardInterrupt at one line of zstrat, counted from the call of
    `StagedProgram.run`."""

    def __init__(self, number):
        self.left, self.where = number, None
        self._inside, self._entered = False, set()

    def __enter__(self):
        sys.settrace(self._trace)

    def __exit__(self, *exc):
        sys.settrace(None)

    def _trace(self, frame, event, arg):
        code = frame.f_code
        if code is _staged.StagedProgram.run.__code__:
            self._inside = True
        path = code.co_filename
        if not self._inside or not path.startswith(PLACES):
            return None
        if event == "line" and not self._is_leaving(frame):
            self.left -= 1
            if self.left == 0:
                self.where = f"{path}:{frame.f_lineno}"
                raise KeyboardInterrupt
        if event == "return" and code is _staged.StagedProgram.run.__code__:
            self._inside = False
        return self._trace

    def _is_leaving(self, frame):
        at = frame, frame.f_lineno
        if frame.f_lineno not in leaving(frame.f_code.co_filename):
            return False
        is_second = at in self._entered
        self._entered ^= {at}
        return is_second


class Pair:
    """Two variables that a step moves together, by the elements of a dataset."""

    def __init__(self, strategy):
        mean = zs.VariableAggregation.MEAN
        with strategy.scope():
            self.first = zs.Variable(np.zeros(200, np.float32), aggregation=mean)
            self.second = zs.Variable(np.zeros(200, np.float32), aggregation=mean)
        self.elements = zs.StepIterator(iter(np.arange(1, 5000, dtype=np.float32)))

        def replica(x):
            self.first.assign_add(jnp.full(200, x))
            self.second.assign_add(jnp.full(200, x))

        @zs.function
        def step(elements):
            element = next(elements)
            strategy.run(replica, args=(element,))
            return element

        self.step = step

    def values(self):
        return float(self.first.numpy()[0]), float(self.second.numpy()[0])

    def next(self):
        """The next element, which stays the next."""
        element = self.elements.draw()
        self.elements.unread(element)
        return float(element)


def strategies():
    return {
        "one": zs.OneDeviceStrategy("CPU:0"),
        "two": zs.MirroredStrategy(["CPU:0", "CPU:1"]),
        "central": zs.CentralStorageStrategy(["CPU:0", "CPU:1"], "CPU:3"),
    }


def interrupted(pair, number):
    """Makes a step, and presses Ctrl-C at one line of it; None if it has fewer."""
    lines = Lines(number)
    with lines:
        try:
            pair.step(pair.elements)
        except KeyboardInterrupt:
            return lines.where
    return None


@pytest.mark.parametrize("name", ["one", "two", "central"])
def test_no_thread_waits_for_a_step_that_was_interrupted(name):
    pair = Pair(strategies()[name])
    pair.step(pair.elements)
    with ThreadPoolExecutor(1) as other:
        for number in itertools.count(1):
            where = interrupted(pair, number)
            if where is None:
                break
            storage = pair.first.storage.pool
            for lock in (storage.turn, storage.lock):
                is_free = other.submit(lock.acquire, blocking=False).result()
                assert is_free, where
                other.submit(lock.release).result()
            for variable in (pair.first, pair.second):
                variable.assign(np.zeros(200, np.float32))
    assert number > 20


@pytest.mark.parametrize("is_looked_at", [True, False])
@pytest.mark.parametrize("name", ["one", "two", "central"])
def test_a_step_that_is_interrupted_is_made_as_a_whole_or_not(name, is_looked_at):
    pair = Pair(strategies()[name])
    pair.step(pair.elements)
    for number in itertools.count(1):
        before, element = pair.values(), pair.next()
        steps = pair.first.storage.pool.steps
        # XLA makes no new value in memory that somebody looks at.
        seen = [pair.first.numpy(), pair.second.numpy()] if is_looked_at else []
        where = interrupted(pair, number)
        if where is None:
            break
        first, second = pair.values()
        assert first == second, where
        is_made = first != before[0]
        assert pair.next() == element + is_made, where
        assert pair.first.storage.pool.steps == steps + is_made, where
        del seen
    assert number > 20


def test_so_does_one_with_variables_of_two_strategies():
    found = []
    for device in ("CPU:0", "CPU:0"):
        with zs.OneDeviceStrategy(device).scope():
            found.append(zs.Variable(np.zeros(3, np.float32)))

    class Both(Pair):
        def __init__(self):
            self.first, self.second = found
            self.elements = zs.StepIterator(iter(np.arange(1, 900, dtype=np.float32)))

            @zs.function
            def step(elements):
                element = next(elements)
                self.first.assign_add(jnp.full(3, element))
                self.second.assign_add(jnp.full(3, element))

            self.step = step

    pair = Both()
    pair.step(pair.elements)
    with ThreadPoolExecutor(1) as other:
        for number in itertools.count(1):
            where = interrupted(pair, number)
            if where is None:
                break
            first, second = other.submit(pair.values).result(60)
            assert first == second, where
            storages = [variable.storage.pool for variable in found]
            for lock in [
                x for storage in storages for x in (storage.turn, storage.lock)
            ]:
                is_free = other.submit(lock.acquire, blocking=False).result()
                assert is_free, where
                other.submit(lock.release).result()
    assert number > 20
