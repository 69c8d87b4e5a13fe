"""Iterators in checkpoints: beside variables, attached later, in another process."""

from __future__ import annotations

import itertools
import signal
import subprocess
import textwrap

import numpy as np
import pytest
from programs import Program

from zstrat.data import Dataset
from zstrat.errors import InvalidArgumentError, NotFoundError
from zstrat.saving import Checkpoint, CheckpointManager, latest_checkpoint
from zstrat.variables import Module, Variable

SIZE = 20


def passing(drawn=0, size=SIZE):
    """A pass that was begun, in an order of its own."""
    iterator = iter(Dataset.range(size).shuffle(size))
    list(itertools.islice(iterator, drawn))
    return iterator


def left(iterator):
    return [int(x) for x in iterator]


@pytest.fixture
def value():
    return Variable(np.float32(1.0))


def test_an_iterator_goes_on_wherever_it_is_held(value, tmp_path):
    one, other = passing(3), passing(5)
    held = {"value": value, "one": one, "deep": {"list": [other, one], "none": None}}
    path = Checkpoint(**held).save(tmp_path / "a")
    expected = left(one), left(other)
    value.assign(2.0)
    one, other = passing(1), passing()
    held = {"value": value, "one": one, "deep": {"list": [other, one], "none": None}}
    Checkpoint(**held).restore(path).assert_consumed()
    assert (left(one), left(other)) == expected
    assert value.numpy() == 1.0


@pytest.mark.parametrize("restore", [Checkpoint.restore, Checkpoint.read])
def test_the_same_iterator_goes_back(restore, value, tmp_path):
    iterator = passing(7)
    checkpoint = Checkpoint(value=value, iterator=iterator)
    path = checkpoint.save(tmp_path / "a")
    expected = left(iterator)
    for _ in range(2):
        restore(checkpoint, path).assert_consumed()
        assert left(iterator) == expected


def test_an_iterator_that_is_attached_later_goes_on(value, tmp_path):
    iterator = passing(4)
    path = Checkpoint(value=value, data={"train": iterator}).save(tmp_path / "a")
    checkpoint = Checkpoint(value=value)
    status = checkpoint.restore(path)
    assert "data/train" in status.unused
    with pytest.raises(AssertionError, match="data/train"):
        status.assert_consumed()
    checkpoint.data = {"train": passing()}
    status.assert_consumed()
    assert left(checkpoint.data["train"]) == left(iterator)


def test_the_pass_after_the_restored_one_begins_at_its_beginning(tmp_path):
    def made():
        return Dataset.range(6).shuffle(6, seed=1)

    dataset = made()
    checkpoint = Checkpoint(data=iter(dataset))
    for _ in range(2):
        next(checkpoint.data)
    path = checkpoint.save(tmp_path / "a")
    expected = [left(checkpoint.data)] + [left(dataset) for _ in range(2)]
    dataset = made()
    checkpoint = Checkpoint(data=iter(dataset))
    status = checkpoint.restore(path)
    found = [left(checkpoint.data)]
    for _ in range(2):
        checkpoint.data = iter(dataset)
        status.assert_consumed()
        found.append(left(checkpoint.data))
    assert found == expected


def test_an_iterator_of_a_list_that_grows_goes_on_once(tmp_path):
    iterator = passing(4)
    path = Checkpoint(data=[iterator]).save(tmp_path / "a")
    data: list[object] = []
    checkpoint = Checkpoint(data=data)
    status = checkpoint.restore(path)
    data.append(passing())
    status.assert_consumed()
    assert left(data[0]) == left(iterator)
    data[0] = passing()
    status.assert_consumed()
    assert len(left(data[0])) == SIZE


# what is refused


def test_what_cannot_be_found_again_is_not_saved(value, tmp_path):
    iterator = iter(Dataset.range(4).shuffle(4).cache())
    checkpoint = Checkpoint(value=value, iterator=iterator)
    with pytest.raises(InvalidArgumentError, match="`cache`"):
        checkpoint.save(tmp_path / "a")
    assert checkpoint.save_counter.numpy() == 0
    assert latest_checkpoint(tmp_path) is None
    del checkpoint.iterator
    assert checkpoint.save(tmp_path / "a").endswith("a-1")


def closed():
    iterator = passing()
    iterator.close()
    return iterator


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (lambda: passing(size=SIZE + 1), r"\b20\b"),
        (lambda: iter(Dataset.range(SIZE).shuffle(SIZE).batch(2)), "elements"),
        (lambda: iter(Dataset.range(SIZE)), "seed="),
        (closed, "it was closed"),
    ],
)
def test_what_does_not_fit_restores_nothing(other, words, value, tmp_path):
    saved = Checkpoint(value=value, iterator=passing(3), fits=passing(3))
    path = saved.save(tmp_path / "a")
    value.assign(2.0)
    fits = passing(1)
    checkpoint = Checkpoint(value=value, iterator=other(), fits=fits)
    with pytest.raises(InvalidArgumentError, match=f"iterator at iterator.*{words}"):
        checkpoint.restore(path)
    assert value.numpy() == 2.0
    assert len(left(fits)) == SIZE - 1
    checkpoint = Checkpoint(value=value)
    checkpoint.restore(path)
    with pytest.raises(InvalidArgumentError, match=words):
        checkpoint.iterator = other()


def test_another_kind_of_object_is_told(value, tmp_path):
    path = Checkpoint(a=value, b=passing(3)).save(tmp_path / "a")
    for other in ({"a": passing()}, {"b": Variable(np.float32(0.0))}):
        with pytest.raises(NotFoundError, match="expect_partial"):
            Checkpoint(**other).restore(path)


def test_a_checkpoint_without_the_iterator_is_told(value, tmp_path):
    path = Checkpoint(value=value).save(tmp_path / "a")
    value.assign(2.0)
    iterator = passing(2)
    checkpoint = Checkpoint(value=value, iterator=iterator)
    with pytest.raises(NotFoundError, match="expect_partial="):
        checkpoint.restore(path)
    assert value.numpy() == 2.0
    checkpoint.restore(path, expect_partial=True)
    assert value.numpy() == 1.0
    assert len(left(iterator)) == SIZE - 2


class Trainer(Module):
    def __init__(self, number, size):
        self.weight = Variable(np.float32(number))
        unordered = Dataset.range(size).map(int, 2, deterministic=False)
        self.data = iter(Dataset.range(size))
        self.more = [{"data": iter(unordered)}, (self.data, self.weight)]


def test_an_iterator_of_a_module_is_its_own(tmp_path):
    path = Checkpoint(trainer=Trainer(1.0, 3)).save(tmp_path / "a")
    trainer = Trainer(2.0, 4)  # whose data would not fit
    checkpoint = Checkpoint(trainer=trainer)
    checkpoint.restore(path).assert_consumed()
    assert trainer.weight.numpy() == 1.0
    trainer.more = [{"data": iter(Dataset.range(5))}]
    assert left(trainer.data) == [0, 1, 2, 3]


def test_an_iterator_of_a_module_is_saved_where_it_is_named(tmp_path):
    trainer = Trainer(1.0, 4)
    next(trainer.data)
    held = [trainer.data]
    trainer.held = held
    path = Checkpoint(trainer=trainer, held=held).save(tmp_path / "a")
    trainer = Trainer(2.0, 4)
    trainer.held = [trainer.data]
    Checkpoint(trainer=trainer, held=trainer.held).restore(path).assert_consumed()
    assert left(trainer.data) == [1, 2, 3]


# a process that is killed

TRAINING = """
import sys
import zstrat as zs

def main(folder, draws, dies):
    numbers = zs.data.Dataset.range(30).shuffle(30)
    evens = numbers.filter(lambda x: x % 2 == 0).batch(4).repeat().prefetch(3)
    checkpoint = zs.Checkpoint(numbers=iter(numbers), evens=iter(evens))
    manager = zs.CheckpointManager(checkpoint, folder, 2)
    manager.restore_or_initialize()
    for at in range(draws):
        print("drawn", next(checkpoint.numbers), *next(checkpoint.evens), flush=True)
        if at % 3 == 2:
            manager.save()
            print("saved", flush=True)
    if dies:
        print("lost", next(checkpoint.numbers), flush=True)
        sys.stdin.read()

main(sys.argv[1], int(sys.argv[2]), len(sys.argv) > 3)
"""


@pytest.mark.usefixtures("programs")
def test_killed_programs_draw_together_what_one_would(tmp_path):
    program = tmp_path / "training.py"
    program.write_text(textwrap.dedent(TRAINING))
    found: list[list[int]] = []
    for draws in (6, 9):  # one more, which is drawn again
        arguments = [program, tmp_path / "saved", str(draws), "dies"]
        pipe = subprocess.PIPE
        with Program(arguments, stdin=pipe, stdout=pipe, text=True) as child:
            for line in iter(child.stdout.readline, ""):
                what, *numbers = line.split()
                if what == "lost":
                    break
                if what == "drawn":
                    found.append(list(map(int, numbers)))
            child.send_signal(signal.SIGKILL)
            assert child.wait(100) == -signal.SIGKILL
    lost = int(numbers[0])
    checkpoint = Checkpoint(numbers=iter(Dataset.range(30).shuffle(30)))
    manager = CheckpointManager(checkpoint, tmp_path / "saved", 2)
    checkpoint.read(manager.latest_checkpoint)
    rest = left(checkpoint.numbers)
    assert rest[0] == lost
    assert sorted([row[0] for row in found] + rest) == list(range(30))
    # 15 of them are one pass: three whole batches and one of three.
    evens = [row[1:] for row in found]
    assert [len(batch) for batch in evens] == ([4, 4, 4, 3] * 4)[:15]
    for at in (0, 4, 8):
        assert sorted(itertools.chain(*evens[at : at + 4])) == list(range(0, 30, 2))
    assert evens[:4] != evens[4:8]
