"""Turns at an engine: one after the other, whoever gives up."""

from __future__ import annotations

import threading

import pytest

from zstrat.collectives.group import CallTurns
from zstrat.threads import ThreadBell

TIMEOUT = 100.0


@pytest.fixture
def interrupted(monkeypatch):
    """Waits that begin while it holds are cut off by Ctrl-C."""

    def wait(bell, timeout):
        raise KeyboardInterrupt

    monkeypatch.setattr(ThreadBell, "wait", wait)
    return monkeypatch


def is_through(turn):
    """Whether it comes, and is left."""
    through = threading.Event()

    def take():
        with turn:
            through.set()

    threading.Thread(target=take, daemon=True).start()
    return through.wait(TIMEOUT)


def test_turns_come_in_the_order_in_which_they_were_drawn():
    turns, order = CallTurns(), []
    drawn = [turns.draw() for _ in range(3)]

    def take(number):
        with drawn[number]:
            order.append(number)

    threads = [threading.Thread(target=take, args=(n,)) for n in (2, 1, 0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT)
    assert order == [0, 1, 2]


def test_who_is_interrupted_while_it_waits_holds_nobody_up(interrupted):
    turns = CallTurns()
    first, second, third = (turns.draw() for _ in range(3))
    with pytest.raises(KeyboardInterrupt):
        second.__enter__()
    interrupted.undo()
    assert is_through(first)
    assert is_through(third)


def test_who_is_interrupted_when_its_turn_has_come_passes_it_on(interrupted):
    turns = CallTurns()
    first, second, third = (turns.draw() for _ in range(3))
    with first:
        pass
    with pytest.raises(KeyboardInterrupt):
        second.__enter__()
    interrupted.undo()
    assert is_through(third)
    assert is_through(turns.draw())
