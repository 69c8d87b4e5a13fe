"""Turns at an engine: one after the other, whoever gives up."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest

from zstrat.collectives import Pending
from zstrat.collectives.group import CallTurns
from zstrat.collectives.group._executors import EngineExecutor, StartedOperation
from zstrat.errors import ClosedError
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


class Engine:
    """Runs one call, which the test lets end."""

    def __init__(self):
        self.runs, self.may_end = threading.Event(), threading.Event()

    def takes(self, call):
        return True

    def run(self, call):
        self.runs.set()
        assert self.may_end.wait(TIMEOUT)

    def waits(self):
        return ()

    def waited(self):
        return {}

    def close(self):
        pass


def test_an_operation_that_comes_after_the_end_is_over_once():
    engine, over = Engine(), []
    generation = SimpleNamespace(
        group="g", broken=None, wait_broken=lambda seconds: ClosedError("it has ended")
    )
    messages = SimpleNamespace(soon=lambda function, *args: [function(*args)])
    executor = EngineExecutor(messages, generation, engine)

    def put(calls):
        turn = executor.draw(blocking=False)
        pending = Pending("call", lambda: over.append(calls))
        executor.put(turn, StartedOperation(iter(()), calls, pending))
        return pending

    put(["first"])
    assert engine.runs.wait(TIMEOUT)
    generation.broken = ClosedError("it has ended")
    closing = threading.Thread(target=executor.close, daemon=True)
    closing.start()
    while not executor._is_closed:
        closing.join(0.001)
    late = put(["late"])
    engine.may_end.set()
    closing.join(TIMEOUT)
    assert not closing.is_alive()
    with pytest.raises(ClosedError):
        late.result(TIMEOUT)
    assert over == [["late"], ["first"]]
