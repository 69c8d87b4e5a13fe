"""Exactly once, against a set that forgets nothing."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zstrat.errors import BusyError
from zstrat.ps._ledger import UNNAMED, Ledger

steps = st.integers(0, 40)
calls = st.tuples(st.sampled_from(["record", "raise"]), steps, st.integers(0, 2))


@given(st.lists(calls, max_size=60))
def test_the_ledger_is_a_set_with_a_horizon(history):
    ledger, seen, mark = Ledger(), set(), 0
    for call, step, part in history:
        assert ledger.is_duplicate(step, part) == (step < mark or (step, part) in seen)
        if call == "record":
            ledger.record(step, part)
            seen.add((step, part))
        else:
            ledger.raise_to(step)
            mark = max(mark, step)
        assert ledger.low_water == mark
        assert len(ledger) == len({s for s, _ in seen if s >= mark})


def test_unnamed_pushes_are_never_duplicates():
    ledger = Ledger()
    ledger.raise_to(10)
    ledger.record(UNNAMED, 0)
    assert not ledger.is_duplicate(UNNAMED, 0)
    assert len(ledger) == 0


def test_a_full_ledger_refuses_new_steps_and_takes_known_ones():
    ledger = Ledger(capacity=2)
    for step in (3, 4):
        ledger.admit(step)
        ledger.record(step, 0)
    ledger.admit(4)
    ledger.admit(UNNAMED)
    with pytest.raises(BusyError, match="2 steps above the low-water mark 0"):
        ledger.admit(5)
    ledger.raise_to(4)
    ledger.admit(5)


def test_a_jump_of_the_mark_is_as_cheap_as_what_it_forgets():
    ledger = Ledger()
    ledger.record(1, 0)
    ledger.raise_to(2**62)
    assert len(ledger) == 0
    assert ledger.is_duplicate(2**62 - 1, 0)
