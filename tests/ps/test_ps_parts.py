"""Parts of eager steps at one parameter server: remembered, compared, forgotten."""

import pytest

from zstrat.errors import (
    InvalidArgumentError,
    ResourceExhaustedError,
    RetryDiffersError,
    StaleSessionError,
)
from zstrat.ps import ordinal
from zstrat.ps.store import Ledger, Parts


def apply(parts, ledger, part, *names, step=1, attempt=1):
    parts.note(step, attempt, part, names, ledger)
    ledger.record(step, part)


def test_what_was_applied_is_compared_and_what_was_not_is_replaced():
    parts, ledger = Parts("ps"), Ledger()
    parts.note(1, 1, 0, ["a"], ledger)  # and failed
    apply(parts, ledger, 0, "b", "c")
    apply(parts, ledger, 0, "b", "c", attempt=2)
    for other in (["b"], ["b", "d"], ["b", "c", "e"]):
        with pytest.raises(RetryDiffersError) as raised:
            parts.note(1, 2, 0, other, ledger)
        assert raised.value.step == 1
    assert (raised.value.before, raised.value.now) == ("nothing more", "e")
    applied = parts.applied(1, 0, ledger).parts
    assert [tuple(entry) for entry in applied] == [(0, ["b", "c"])]


def test_a_run_that_was_overtaken_has_no_effect():
    parts, ledger = Parts("ps"), Ledger()
    apply(parts, ledger, 0, "a")
    parts.claim(1, 3, ledger)
    with pytest.raises(StaleSessionError):
        parts.note(1, 2, 1, ["b"], ledger)
    apply(parts, ledger, 0, "a", attempt=3)


def test_it_forgets_what_is_over_and_remembers_so_much(monkeypatch):
    monkeypatch.setattr("zstrat.ps.store._ledger.MAX_PARTS", 3)
    parts, ledger = Parts("ps"), Ledger()
    for step in (1, 2, 3):
        apply(parts, ledger, 0, "a", step=step)
    with pytest.raises(ResourceExhaustedError):
        parts.note(4, 1, 0, ["a"], ledger)
    apply(parts, ledger, 0, "a", step=3)
    ledger.raise_to(3)
    apply(parts, ledger, 0, "a", step=4)
    assert len(parts) == 2
    parts.note(1, 1, 0, ["late"], ledger)  # its push is a duplicate
    assert len(parts) == 2


def test_steps_that_only_ask_are_bounded_too(monkeypatch):
    monkeypatch.setattr("zstrat.ps.store._ledger.MAX_PARTS", 2)
    parts, ledger = Parts("ps"), Ledger()
    for step in (1, 2, 2):
        parts.claim(step, 2, ledger)
    with pytest.raises(ResourceExhaustedError):
        parts.claim(3, 2, ledger)
    ledger.raise_to(2)
    parts.claim(3, 2, ledger)


def test_names_have_a_bound():
    parts, ledger = Parts("ps"), Ledger()
    with pytest.raises(InvalidArgumentError, match=r"\b2048\b"):
        parts.note(1, 1, 0, ["x" * 2049], ledger)


def test_ordinals():
    said = [ordinal(n) for n in (1, 2, 3, 4, 11, 12, 13, 21, 102, 113)]
    words = "1st 2nd 3rd 4th 11th 12th 13th 21st 102nd 113th"
    assert said == words.split()
