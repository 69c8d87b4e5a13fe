"""What windows keep on a worker: arrays that count once, and the place of a window."""

from dataclasses import replace

import numpy as np
import pytest

from zstrat.errors import NotFoundError
from zstrat.program import Exchanges, Segment, StepUpdate
from zstrat.variables import RESIDENT, VariableSpec
from zstrat.wire import (
    PinSnapshot,
    ReadSnapshot,
    RoundNumber,
    StoreEntry,
    StoreTensors,
    UpdateOp,
)
from zstrat.worker import Residents

ARRAY = VariableSpec(-(1 << 60), "/copy 3 7 local/w", (2,), "float32", RESIDENT)
NUMBER = VariableSpec(-(1 << 60) - 1, "/round 0 7 local", (), "int32", RESIDENT)
PULLED = VariableSpec(3, "w", (2,), "float32", 0)


class Outer:
    id = 7


def exchanges(fragments):
    return Exchanges("local", Outer(), Outer(), 6, fragments, 0, 0.5)


def left(value):
    array = np.full(2, value, np.float32)
    return [StepUpdate(ARRAY, UpdateOp.ASSIGN, 0, (array,))]


def kept(residents, step=99):
    return residents.filled([ARRAY], [], step, RoundNumber(7, 0))[0].tolist()


def test_arrays_take_the_places_of_reads_that_are_not_pulled():
    residents = Residents()
    residents.put(1, left(5.0))
    reads = [PULLED, ARRAY, NUMBER, PULLED]
    values = residents.filled(reads, ["first", "second"], 2, RoundNumber(7, 8))
    assert (values[0], values[1].tolist()) == ("first", [5.0] * 2)
    assert values[2:] == [8, "second"]


@pytest.mark.parametrize("first", [True, False])
def test_a_run_that_failed_leaves_what_was_there_before(first):
    residents = Residents()
    if not first:
        residents.put(1, left(5.0))
        residents.settle(1, failed=False)
    residents.put(2, left(6.0))
    version = residents.version
    residents.settle(2, failed=True)
    assert kept(residents) == [0.0 if first else 5.0] * 2
    assert residents.version != version  # what has begun with it begins again


def test_a_run_of_the_same_step_begins_where_it_began_before():
    residents = Residents()
    residents.put(1, left(5.0))
    residents.settle(1, failed=False)
    residents.put(2, left(6.0))
    assert kept(residents, step=2) == [5.0] * 2


def test_a_run_counts_once_another_one_has_run():
    residents = Residents()
    residents.put(1, left(5.0))
    residents.put(2, left(6.0))
    residents.settle(1, failed=True)
    assert kept(residents) == [6.0] * 2


def test_another_session_of_the_same_program_takes_the_arrays_over():
    before, after = Residents(), Residents()
    before.put(1, left(5.0))
    after.inherit(before)
    assert kept(after) == [5.0] * 2
    after.settle(1, failed=True)
    assert kept(after) == [0.0] * 2


def test_copies_of_values_that_were_rolled_back_are_dropped():
    residents = Residents()
    for _ in range(2):
        residents.take_place(exchanges(3))
    residents.put(1, left(5.0))
    residents.restart(8, 4)  # that of rounds without windows
    residents.restart(7, 5)
    place = residents.take_place(exchanges(3))
    assert place.segment == Segment(2, restart=True)
    assert kept(residents) == [0.0] * 2


@pytest.mark.parametrize("has_copy", [True, False])
def test_what_a_checkpoint_has_takes_the_place_of_all_else(has_copy):
    residents, restored = Residents(), Residents()
    moment = VariableSpec(-(1 << 60) - 2, "/.mu 3 7 local/w", (2,), "f4", RESIDENT)
    arrays = np.arange(2, dtype=np.float32), np.ones(2, np.float32)
    saved = [moment, ARRAY][: 1 + has_copy]
    pairs = zip(saved, arrays, strict=False)
    residents.put(1, [StepUpdate(spec, UpdateOp.ASSIGN, 0, (x,)) for spec, x in pairs])
    pinned = residents.pin(PinSnapshot(1, 5, [], [7]))
    residents.put(2, left(9.0))  # an array is replaced, and not written to
    assert pinned.total == len(saved)
    assert residents.pin(PinSnapshot(1, 6, [], [8])).total == 0

    restored.take_place(exchanges(3))
    restored.put(3, left(8.0))
    restored.restart(7, 4)
    for place, entry in enumerate(pinned.tensors):
        parts = [residents.read(ReadSnapshot(1, 5, place, at, 4)) for at in (0, 4)]
        array = np.concatenate(parts).view(entry.dtype).reshape(entry.shape)
        to = StoreEntry(entry.key, 7, entry.leaf, 0)
        restored.store(StoreTensors(1, [to], (array,)))
    found = restored.filled([moment, ARRAY], [], 4, RoundNumber(7, 4))
    assert found[0].tolist() == [0.0, 1.0]
    assert found[1].tolist() == [1.0 * has_copy] * 2
    place = restored.take_place(exchanges(3))
    assert (place.round, place.segment) == (4, Segment(1, restart=not has_copy))
    later = Residents()
    later.inherit(residents)  # of a connection that broke meanwhile
    assert later.read(ReadSnapshot(1, 5, 0, 0, 8)).view("f4").tolist() == [0.0, 1.0]
    later.release(5)
    with pytest.raises(NotFoundError):
        later.read(ReadSnapshot(1, 5, 0, 0, 4))
    with pytest.raises(NotFoundError):  # as of another process, which has none of it
        later.pin(PinSnapshot(1, 5, [], [7], 1))


def test_places_are_of_successive_rounds_and_the_first_takes_all_values():
    residents = Residents()
    segments = [residents.take_place(exchanges(3)).segment for _ in range(4)]
    assert segments == [Segment(n % 3, restart=n == 0) for n in range(4)]


def test_windows_of_different_lengths_weigh_examples_times_those_of_a_step():
    residents = Residents()
    assert residents.take_place(exchanges(1)).weight(12) == 1.0
    pace = Outer()
    place = residents.take_place(replace(exchanges(1), pace=pace))
    assert (place.steps, place.weight(12), place.weight(0)) == (6, 24.0, 6.0)
    # Half as many steps with as many examples in each: half the weight.
    shorter = place._replace(steps=3)
    assert (shorter.weight(6), shorter.weight(0)) == (12.0, 3.0)


def test_a_window_that_will_not_run_gives_its_place_back():
    residents = Residents()
    first, second = (residents.take_place(exchanges(3)) for _ in range(2))
    residents.give_back(second)
    residents.give_back(first)
    assert residents.take_place(exchanges(3)) == first
    assert residents.take_place(exchanges(3)) == second


def test_a_worker_that_has_miscounted_contributes_nothing_once():
    residents = Residents()
    first, ahead = (residents.take_place(exchanges(3)) for _ in range(2))
    assert not residents.has_run(first, 4)  # it has joined in round 4
    assert not residents.has_run(ahead, 5)  # its program was chosen before that
    place = residents.take_place(exchanges(3))
    assert (place.round, place.segment) == (6, Segment(0, restart=False))
    assert residents.has_run(place, 6)
    late = residents.take_place(exchanges(3))
    assert not residents.has_run(late, 9)
    assert residents.take_place(exchanges(3)).segment == Segment(10 % 3, restart=True)


def test_a_run_that_reads_before_the_end_of_its_round_keeps_the_copy():
    residents = Residents()
    assert residents.has_run(residents.take_place(exchanges(3)), 0)
    assert not residents.has_run(residents.take_place(exchanges(3)), 0)
    assert residents.take_place(exchanges(3)).segment == Segment(1, restart=False)


def test_a_whole_tree_is_exchanged_in_any_round():
    residents = Residents()
    assert residents.has_run(residents.take_place(exchanges(1)), 4)


def test_without_a_copy_the_next_window_takes_all_values():
    residents = Residents()
    residents.take_place(exchanges(3))  # and fails
    place = residents.take_place(exchanges(3))
    assert not residents.may_run(2, place, [PULLED, ARRAY])
    assert residents.take_place(exchanges(3)).segment.restart
    residents.put(1, left(5.0))
    assert residents.may_run(2, place, [PULLED, ARRAY])


@pytest.mark.parametrize("fragments", [1, 3])
@pytest.mark.parametrize("ran", [True, False])
def test_fragments_begin_again_after_a_window_that_failed(fragments, ran):
    """The failed window has not taken what the round before made of its fragment."""
    residents = Residents()
    residents.put(1, left(5.0), residents.take_place(exchanges(fragments)))
    residents.settle(1, failed=False)
    failed, queued = (residents.take_place(exchanges(fragments)) for _ in range(2))
    version = residents.version
    if ran:
        residents.put(2, left(6.0), failed)
        residents.settle(2, failed=True)
    else:
        residents.lose_copies(failed)
    is_whole = fragments == 1
    assert residents.may_run(3, queued, [PULLED, ARRAY]) == is_whole
    assert residents.take_place(exchanges(fragments)).segment.restart != is_whole
    assert is_whole or residents.version != version


def test_a_run_of_the_same_step_has_no_copy_of_fragments():
    residents = Residents()
    residents.put(1, left(5.0), residents.take_place(exchanges(3)))
    again = residents.take_place(exchanges(3))
    assert not residents.may_run(1, again, [PULLED, ARRAY])


@pytest.mark.parametrize("read", [0, 2])
def test_what_has_begun_with_another_round_begins_again(read):
    """A schedule counts the steps before the round."""
    residents = Residents()
    place = residents.take_place(exchanges(1))
    assert residents.early([PULLED, NUMBER], 1, place) == [None, 0]
    version = residents.version
    residents.filled([PULLED, NUMBER], [None], 1, RoundNumber(7, read))
    assert (residents.version == version) == (read == 0)
