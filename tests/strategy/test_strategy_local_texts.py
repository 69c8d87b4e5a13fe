"""Texts and dates, which no device knows, as arguments of replica functions."""

import jax
import numpy as np
import pytest
from in_replicas import meet

import zstrat as zs

WORDS = np.array(["a", "bb", "c", "dd"])


@pytest.fixture(scope="module", params=[1, 2])
def strategy(request):
    if request.param == 1:
        return zs.OneDeviceStrategy("CPU:1")
    return zs.MirroredStrategy(["CPU:0", "CPU:1"])


def joined(texts):
    return "".join(text if isinstance(text, str) else text.decode() for text in texts)


def meeting(texts):
    meet()
    return joined(texts)


EXPECTED = {1: ("abbcdd",), 2: ("abb", "cdd")}


@pytest.mark.parametrize("fn", [joined, meeting])
@pytest.mark.parametrize("dtype", ["U2", "S2", object])
def test_drawn_from_a_dataset(strategy, fn, dtype):
    texts = WORDS.astype(dtype)
    dataset = zs.data.Dataset.from_tensor_slices(texts).batch(4)
    found = [
        strategy.experimental_local_results(strategy.run(fn, (batch,)))
        for batch in strategy.experimental_distribute_dataset(dataset)
    ]
    assert found == [EXPECTED[strategy.num_replicas_in_sync]]


def test_beside_numbers(strategy):
    """The numbers are arrays of jax on the replica's device."""
    dataset = zs.data.Dataset.from_tensor_slices(
        {"word": WORDS, "number": np.arange(4, dtype=np.float32)}
    ).batch(4)
    (batch,) = strategy.experimental_distribute_dataset(dataset)

    def fn(batch):
        return len(batch["word"]) * 100 + batch["number"].sum()

    found = strategy.experimental_local_results(strategy.run(fn, (batch,)))
    expected = {1: [406], 2: [201, 205]}
    np.testing.assert_array_equal(found, expected[strategy.num_replicas_in_sync])


def test_an_array_that_all_replicas_are_given(strategy):
    found = strategy.experimental_local_results(strategy.run(joined, (WORDS,)))
    assert set(found) == {"abbcdd"}


def test_dates(strategy):
    days = np.array(["2020-01-31", "2020-03-01"], dtype="datetime64[D]")

    def fn(days):
        return int((days[1] - days[0]).astype(int))

    found = strategy.experimental_local_results(strategy.run(fn, (days,)))
    assert set(found) == {30}


def test_the_next_batch_of_numbers_is_compiled(strategy):
    def fn(batch):
        return isinstance(batch, jax.core.Tracer)

    assert not strategy.run(fn, (WORDS,))
    assert strategy.run(fn, (np.ones(4, np.float32),))


def test_a_step_refuses_them(strategy):
    @zs.function
    def step(words):
        return strategy.run(joined, (words,))

    with pytest.raises(TypeError, match="numbers or booleans"):
        step(WORDS)
