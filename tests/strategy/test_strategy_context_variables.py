"""What ``strategy.run`` does to the context variables of a program."""

from __future__ import annotations

import contextvars

import numpy as np
import pytest

import zstrat as zs
from zstrat.errors import OutOfRangeError

SEEN = contextvars.ContextVar("seen", default=0)


def numbers():
    """Keeps a token of numpy's between two draws."""
    with np.errstate(divide="ignore"):
        yield from np.arange(3, dtype=np.float32)


@pytest.mark.parametrize(
    "dataset", [numbers, lambda: zs.data.Dataset.from_generator(numbers)]
)
def test_a_generator_that_keeps_a_token_is_drawn_to_its_end(dataset):
    strategy = zs.MirroredStrategy()
    iterator = zs.StepIterator(iter(dataset()))
    before = np.geterr()

    def step(iterator):
        return next(iterator) + 1

    found = [float(strategy.run(step, args=(iterator,))) for _ in range(3)]
    assert found == [1, 2, 3]
    with pytest.raises(OutOfRangeError):
        strategy.run(step, args=(iterator,))
    assert np.geterr() == before


def test_what_a_function_sets_that_is_one_program_is_there_behind_it():
    def step(x):
        SEEN.set(SEEN.get() + 1)
        return x + 1

    def run():
        assert zs.MirroredStrategy().run(step, args=(np.float32(1),)) == 2
        return SEEN.get()

    assert contextvars.copy_context().run(run) >= 1
