"""Ctrl-C in a step: an element is used once, or not at all; a step is made as a whole,
or not at all; and no thread waits for one that has been interrupted."""

import os
import signal
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zstrat as zs
from zstrat.program import _settled


@pytest.fixture
def two():
    return zs.MirroredStrategy(["CPU:0", "CPU:1"])


class Interrupting:
    """What a replica asks in the middle of its computation: presses Ctrl-C, once, when
    the step waits for the devices."""

    def __init__(self, monkeypatch):
        self.is_armed = False
        self.waits = threading.Event()
        self.wait = _settled._wait
        monkeypatch.setattr(_settled, "_wait", self.begin)

    def begin(self, arrays):
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
