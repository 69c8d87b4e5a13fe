"""Exactly once, against a set that forgets nothing."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zstrat.coordinator._queue import MAX_AHEAD
from zstrat.errors import BusyError, InvalidArgumentError
from zstrat.ps.store import CAPACITY, UNNAMED, Ledger, _ledger
from zstrat.wire import LEASE

steps = st.integers(0, 40) | st.just(2**62)  # a jump costs as much as it forgets
parts = st.integers(0, 2)
calls = st.one_of(
    st.tuples(st.just("record"), steps | st.just(UNNAMED), parts),
    st.tuples(st.just("raise"), steps, parts),
)


@given(st.lists(calls, max_size=60))
def test_the_ledger_is_a_set_with_a_horizon(history):
    ledger, seen, mark = Ledger(), set(), 0
    for call, step, part in history:
        is_over = UNNAMED < step < mark
        assert ledger.is_duplicate(step, part) == (is_over or (step, part) in seen)
        if call == "record":
            ledger.record(step, part)
            if step != UNNAMED:  # such a push is never a duplicate
                seen.add((step, part))
        else:
            ledger.raise_to(step)
            mark = max(mark, step)
        assert ledger.low_water == mark
        assert len(ledger) == len({s for s, _ in seen if s >= mark})


def test_steps_of_a_window_above_the_mark_are_taken_and_none_beyond():
    ledger = Ledger(capacity=3)
    ledger.raise_to(10)
    for step in (11, 12):
        ledger.admit(step)
        ledger.record(step, 0)
    ledger.admit(UNNAMED)
    with pytest.raises(BusyError):
        ledger.admit(13)
    ledger.admit(10)  # its end alone raises the mark
    ledger.raise_to(11)
    ledger.admit(13)


@given(st.lists(steps, max_size=60), st.integers(1, 8))
def test_the_step_at_the_mark_is_always_taken_and_memory_is_bounded(asked, capacity):
    """Whatever pushes come and however slow the lowest step is."""
    ledger = Ledger(capacity)
    for step in asked:
        with contextlib.suppress(BusyError):
            ledger.admit(step)
            ledger.record(step, 0)
        ledger.admit(ledger.low_water)
        assert len(ledger) <= capacity


def test_a_coordinator_hands_out_no_more_than_half_of_what_can_be_remembered():
    assert 2 * MAX_AHEAD <= CAPACITY


def test_ranges_that_no_message_could_hold_are_refused():
    """Joined with others they would keep a backup from being filled."""
    last = 2**64 - 1
    leases = _ledger.DoneLeases()
    fits = LEASE.pack(1, 0, 5, last - 5)
    leases.require(fits)
    leases.note(LEASE.pack(1, 0, 0, 5) + fits)
    assert b"".join(leases.packed()) == LEASE.pack(1, 0, 0, last)
    with pytest.raises(InvalidArgumentError):
        leases.require(fits + LEASE.pack(1, 0, 6, last - 5))
