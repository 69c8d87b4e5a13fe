"""Elements: look ahead, put back, end, errors, closing."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from zstrat.data import Dataset, Elements
from zstrat.errors import ClosedError, OutOfRangeError


class Reading(RuleBasedStateMachine):
    """Whatever is drawn, looked at and put back: the order is that of the source."""

    def __init__(self):
        super().__init__()
        self.size = 12
        self.elements = Elements(iter(range(self.size)))
        self.drawn = []

    @rule()
    def draw(self):
        if len(self.drawn) < self.size:
            self.drawn.append(self.elements.draw())
        else:
            with pytest.raises(OutOfRangeError):
                self.elements.draw()

    @rule()
    def peek(self):
        if len(self.drawn) < self.size:
            assert self.elements.peek() == len(self.drawn)
        else:
            with pytest.raises(OutOfRangeError):
                self.elements.peek()

    @precondition(lambda self: self.drawn)
    @rule(data=st.data())
    def unread(self, data):
        for _ in range(data.draw(st.integers(1, len(self.drawn)))):
            self.elements.unread(self.drawn.pop())

    @invariant()
    def in_order(self):
        assert self.drawn == list(range(len(self.drawn)))


TestReading = Reading.TestCase


def test_iterates_as_python_does():
    assert list(Elements([1, 2, 3])) == [1, 2, 3]
    assert list(Elements(())) == []


def test_end_is_out_of_range_and_names_the_dataset():
    elements = Elements([1], "the dataset of worker 3")
    assert elements.draw() == 1
    for _ in range(2):
        with pytest.raises(OutOfRangeError, match="worker 3"):
            elements.draw()


def test_what_cannot_be_iterated_is_refused():
    with pytest.raises(TypeError, match="got int"):
        Elements(3)  # type: ignore[arg-type]


def test_error_of_a_generator_passes_and_does_not_become_the_end():
    def broken():
        yield 1
        raise KeyError("row 7")

    elements = Elements(broken())
    assert elements.draw() == 1
    depths = set()
    for _ in range(3):
        with pytest.raises(KeyError, match="row 7") as caught:
            elements.draw()
        depths.add(len(caught.traceback))
    assert len(depths) <= 2  # the traceback does not grow with every draw


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_a_source_that_can_go_on_after_an_error_does(error):
    class Flaky:
        def __init__(self):
            self.left = [1, error(), 2]

        def __iter__(self):
            return self

        def __next__(self):
            if not self.left:
                raise StopIteration
            found = self.left.pop(0)
            if isinstance(found, BaseException):
                raise found
            return found

    elements = Elements(Flaky())
    assert elements.draw() == 1
    with pytest.raises(error):
        elements.draw()
    assert elements.draw() == 2
    with pytest.raises(OutOfRangeError):
        elements.draw()


def test_close_runs_the_generators_finally():
    ended = []

    def source():
        try:
            yield from range(5)
        finally:
            ended.append(True)

    elements = Elements(source())
    elements.draw()
    elements.close()
    elements.close()
    assert ended == [True]
    elements.unread(0)
    with pytest.raises(ClosedError):
        elements.draw()


def test_close_of_what_has_nothing_to_close():
    elements = Elements([1, 2])
    elements.close()
    with pytest.raises(ClosedError):
        elements.peek()


@pytest.mark.parametrize(
    "made",
    [
        lambda numbers: numbers,
        lambda numbers: numbers.prefetch(2),
        lambda numbers: numbers.cache().take(4),
        lambda numbers: numbers.batch(1).unbatch(),
    ],
)
def test_who_goes_on_after_an_error_does_not_see_the_end(made):
    def refused(number):
        if number == 2:
            raise ValueError("a bad record")
        return number

    iterator = iter(made(Dataset.range(5).map(refused)))
    assert [int(next(iterator)) for _ in range(2)] == [0, 1]
    for _ in range(3):
        with pytest.raises(ValueError, match="a bad record"):
            next(iterator)


def test_a_pass_that_ctrl_c_has_ended_is_not_at_its_end():
    def interrupted(number):
        if number == 2:
            raise KeyboardInterrupt
        return number

    dataset = Dataset.range(4).map(interrupted)
    drawing = iter(dataset)
    assert [next(drawing) for _ in range(2)] == [0, 1]
    with pytest.raises(KeyboardInterrupt):
        next(drawing)
    for _ in range(2):
        with pytest.raises(ClosedError, match="KeyboardInterrupt"):
            next(drawing)
    assert [int(next(iter(dataset))) for _ in range(2)] == [0, 0]
