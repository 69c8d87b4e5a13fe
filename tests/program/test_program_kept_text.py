"""Sources that fill one buffer again and again: of text, objects and dates too every
element stays what it was when it was drawn."""

import numpy as np
import pytest

from zstrat.contrib.distribute import PerDeviceDataset
from zstrat.data import Dataset, InputContext, as_dataset, is_steady
from zstrat.program import StepIterator, kept
from zstrat.strategy import ProcessInputs

KINDS = {
    "numbers": np.zeros(2, np.float32),
    "records": np.zeros(2, "S4"),
    "text": np.zeros(2, "U4"),
    "objects": np.empty(2, object),
    "dates": np.zeros(2, "M8[D]"),
    "spans": np.zeros(2, "m8[D]"),
}
STEPS = 4


def value(kind, number):
    """What `refilled` writes for a number, as the array has it."""
    dtype = KINDS[kind].dtype
    if kind in ("dates", "spans"):
        return np.array(number, dtype).item()
    text = str(number)
    return {"records": text.encode(), "text": text, "objects": text}.get(kind, number)


def refilled(kind):
    buffer = KINDS[kind].copy()
    for number in range(STEPS):
        buffer[:] = value(kind, number)
        yield buffer


def wanted(kind):
    return [[value(kind, number)] * 2 for number in range(STEPS)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("foreign", [False, True])
def test_elements_that_are_drawn_and_kept(kind, foreign):
    source = as_dataset(refilled(kind)) if foreign else refilled(kind)
    iterator = StepIterator(source)
    drawn = [iterator.draw() for _ in range(STEPS)]
    assert [element.tolist() for element in drawn] == wanted(kind)


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_of_a_distributed_batch(kind):
    steps = list(ProcessInputs(InputContext(1, 0, 2), 2).of_dataset(refilled(kind)))
    found = [[part.tolist()[0] for part in step.values] for step in steps]
    assert found == wanted(kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("foreign", [False, True])
def test_elements_of_towers(kind, foreign):
    def dataset_fn():
        return as_dataset(refilled(kind)) if foreign else refilled(kind)

    steps = list(PerDeviceDataset(dataset_fn, 2))
    found = [part.tolist() for step in steps for part in step.values]
    assert found == wanted(kind)


def test_read_only_elements_are_not_copied():
    text = np.array(["a", "b"])
    text.setflags(write=False)
    assert kept(text) is text
    whole = "a"
    assert kept(whole) is whole


def test_which_sources_are_steady():
    def numbers():
        return iter([np.zeros(2)])

    owned = Dataset.from_generator(numbers)
    assert all(map(is_steady, (owned, owned.batch(2), [1], (1,), as_dataset([1]))))
    passed = as_dataset(numbers())
    for source in (numbers(), passed, passed.take(1), passed.enumerate()):
        assert not is_steady(source)
    assert is_steady(passed.map(lambda x: x))
