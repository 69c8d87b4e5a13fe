"""What ranks of one host hear when one of them dies, hangs, or calls something else;
and what is left behind."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
from shm_ranks import Ranks, Refused, given, rank_processes, run, same

from zstrat.collectives import CallKind, CollectiveCall, SharedMemory
from zstrat.collectives.memory import _barrier
from zstrat.collectives.memory._barrier import (
    MISSES,
    REST,
    SLOW,
    SpinPolicy,
    sleep_while,
)
from zstrat.errors import ClosedError
from zstrat.wire import MemberEntry

LARGE = 2**22
"""Elements: a call of eight chunks and more, that a kill cuts in the middle."""


@pytest.fixture(scope="module")
def processes():
    """For tests that kill none of them, one after another."""
    with rank_processes(3) as processes:
        yield processes


@pytest.fixture
def mortal():
    """For a test that kills one."""
    with rank_processes(3) as processes:
        yield processes


@pytest.fixture
def ranks(processes):
    ranks = Ranks(processes)
    yield ranks
    ranks.close()


def lost(rank):
    return Refused("PeerLostError", (f"rank {rank}", "the link is gone", False))


@pytest.mark.parametrize(
    ("hosts", "count"), [("aaa", 10), ("aaa", LARGE), ("aab", LARGE)]
)
def test_a_killed_rank_is_named(mortal, hosts, count) -> None:
    """Told by the node that the link is gone, ranks that wait for it wake up."""
    Ranks(mortal, hosts)
    *left, victim = mortal if hosts == "aaa" else [mortal[0], mortal[1]]
    number = mortal.index(victim)
    calling = [process.ask("run_for_ever", "all_reduce", count) for process in mortal]
    while not any(process.tell("waits") for process in left):
        continue  # so that the kill meets ranks that run
    victim.kill()
    for process in left:
        assert process.tell("lose", number) is None
    for process in left:
        assert process.answer(calling[mortal.index(process)]) == lost(number)
        again = process.tell("run_for_ever", "all_reduce", count)
        assert again == lost(number)  # the first error stays
    if hosts == "aab":
        mortal[2].kill()  # it waits for the network, which the node would abort


def test_a_stopped_rank_is_overdue(ranks) -> None:
    patient, hasty, stopped = ranks.processes
    os.kill(stopped.process.pid, signal.SIGSTOP)
    call = ("run", "all_reduce", "float32", bytes(400), 100)
    calling = patient.ask(*call, {})
    while patient.tell("waits") != (1, 2):  # it has called: it is not overdue
        assert not patient.is_answered(calling)
    overdue = Refused("Overdue", ((2,),))
    assert hasty.tell(*call, {"deadline": time.monotonic() + 0.2}) == overdue
    patient.tell("lose", 2)
    assert patient.answer(calling) == lost(2)
    os.kill(stopped.process.pid, signal.SIGCONT)


def test_waits_names_who_has_not_called(ranks) -> None:
    first, second, third = ranks.processes
    call = ("run", "all_reduce", "float32", bytes(400), 100, {})
    calling = first.ask(*call)
    while first.tell("waits") != (1, 2):
        assert not first.is_answered(calling)
    late = second.ask(*call)
    while first.tell("waits") != (2,):
        assert not second.is_answered(late)
    assert not first.is_answered(calling)
    last = third.ask(*call)
    sums = [first.answer(calling), second.answer(late), third.answer(last)]
    assert sums == [bytes(400)] * 3
    assert first.tell("waits") == ()


@pytest.mark.parametrize("kind", ["all_reduce", "broadcast", "barrier"])
def test_another_call_is_found_out(ranks, kind) -> None:
    """Whatever it is, however many steps it takes."""
    call = ("run", "all_reduce", "float32", bytes(4 * LARGE), None, {})
    other = ("run", kind, "float32", bytes(40), None, {"about": 9})
    first, second, third = ranks.processes
    numbers = [first.ask(*call), second.ask(*other), third.ask(*call)]
    assert first.answer(numbers[0]) == Refused("Differs", (1, 9))
    assert second.answer(numbers[1]) == Refused("Differs", (0, 7))
    assert third.answer(numbers[2]) == Refused("Differs", (1, 9))
    assert first.tell(*call) == Refused("Differs", (1, 9))


def test_abort_before_a_call(ranks) -> None:
    for process in ranks.processes:
        assert process.tell("lose", 2) is None
        assert process.tell("run_for_ever", "barrier", 0) == lost(2)


def test_memory_that_is_not_what_was_said_is_refused(processes) -> None:
    entries = [process.tell("entry", i, "h") for i, process in enumerate(processes)]
    wrong = [list(map(list, entry)) for entry in entries]
    wrong[1][0][-1] = bytes(16)
    assert processes[0].tell("reach", 0, wrong) == [True, False, True]
    wrong = [list(map(list, entry)) for entry in entries]
    wrong[2][0][-2] *= 2
    assert processes[0].tell("reach", 0, wrong) == [True, True, False]


def test_nothing_grows_in_1000_calls(ranks) -> None:
    """Neither descriptors, threads and mappings, nor memory."""
    sizes = (40_000, 300_000)

    def call_all(times):
        for count in sizes:
            sources = given("float32", [count] * 3)
            got = run(ranks, "all_reduce", sources, [count] * 3, times)
            same(got, np.sum(sources, 0, np.float32))
            run(ranks, "broadcast", sources, [None] * 3, times, root=1)

    call_all(20)
    before = ranks.all("used", [()] * 3)
    call_all(250)
    for was, now in zip(before, ranks.all("used", [()] * 3), strict=True):
        assert now[:3] == was[:3]
        # A tenth of what 1,000 kept arrays of the smaller size would take; the pages
        # that malloc keeps of what tests send to and fro stay below it.
        assert now[3] - was[3] < 2**24


def test_nothing_is_left_of_generations(processes) -> None:
    """Made, used and closed 50 times."""

    def generation():
        ranks = Ranks(processes)
        run(ranks, "barrier", given("float32", [0] * 3), [None] * 3)
        ranks.close()

    generation()
    before = [process.tell("used")[:3] for process in processes]
    for _ in range(50):
        generation()
    assert [process.tell("used")[:3] for process in processes] == before


def test_a_sleep_ends_at_its_deadline() -> None:
    word = np.array([5], np.uint64)
    sleep_while(word.ctypes.data, 5, time.monotonic() - 1.0)
    sleep_while(word.ctypes.data, 5, -1.0)
    sleep_while(word.ctypes.data, 4, time.monotonic() + 1000.0)  # it is not 4


def test_a_sleep_on_no_memory_is_an_error() -> None:
    with pytest.raises(OSError, match="futex"):
        sleep_while(64, 0, time.monotonic())


def test_spinning_rests_where_looks_do_not_pay() -> None:
    spin = SpinPolicy(is_crowded=False)
    for _ in range(MISSES):
        assert spin.looks()
        spin.ended(False, 0.0)
    for _ in range(2):
        assert [spin.looks() for _ in range(REST)] == [0] * REST
        assert spin.looks()  # one try, and it is the same
        spin.ended(True, SLOW * 2)
    assert [spin.looks() for _ in range(REST)] == [0] * REST
    for _ in range(3):
        assert spin.looks()
        spin.ended(True, 0.0)


@pytest.fixture
def pair():
    """Two ranks of one process: the engine of the first, and that of the second."""
    memories = [SharedMemory(), SharedMemory()]
    entries = [
        MemberEntry("", "", "h", os.getpid(), 1, m.descriptor, m.capacity, m.word)
        for m in memories
    ]
    for rank, memory in enumerate(memories):
        assert memory.reach(rank, entries) == [True, True]
    engines = [m.attach(rank, [0, 0], None) for rank, m in enumerate(memories)]
    yield engines
    for engine, memory in zip(engines, memories, strict=True):
        engine.close()
        memory.close()


def barrier():
    nothing = np.zeros(0, np.float32)
    return CollectiveCall(
        1, CallKind.BARRIER, nothing, nothing, 7, "barrier()", math.inf, 60.0
    )


def test_ctrl_c_ends_a_call_and_all_after_it(pair) -> None:
    """In the thread of the caller, as a blocking call of the user's program."""
    main = threading.main_thread().ident

    def interrupt():
        while not pair[0].waits():
            continue
        signal.pthread_kill(main, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        pair[0].run(barrier())
    thread.join()
    with pytest.raises(ClosedError, match="KeyboardInterrupt"):
        pair[0].run(barrier())


def test_fences_of_machines_that_order_weakly(pair, monkeypatch) -> None:
    """They are calls into the kernel; calls with them come to the same end."""
    monkeypatch.setattr(_barrier, "_ORDERS_STORES", False)
    count = 300_000
    sources = [np.full(count, 1.5, np.float32), np.full(count, 2.0, np.float32)]
    calls = [
        replace(barrier(), kind=CallKind.ALL_REDUCE, source=s, target=s)
        for s in sources
    ]
    thread = threading.Thread(target=pair[1].run, args=(calls[1],))
    thread.start()
    pair[0].run(calls[0])
    thread.join()
    same(sources, np.full(count, 3.5, np.float32))


def test_it_knows_for_whom_it_has_waited(pair) -> None:

    def late():
        while pair[0]._shared.barrier._asleep is None:
            continue
        pair[1].run(barrier())

    assert dict(pair[0].waited()) == {1: 0.0}
    thread = threading.Thread(target=late)
    thread.start()
    pair[0].run(barrier())
    thread.join()
    waited = pair[0].waited()[1]
    assert waited > 0.0
    pair[0].close()
    assert pair[0].waited() == {1: waited}


def test_a_closed_engine_waits_for_nobody(pair) -> None:
    pair[0].close()
    assert pair[0].waits() == ()
    pair[0].abort(ClosedError("the group is closed"))
