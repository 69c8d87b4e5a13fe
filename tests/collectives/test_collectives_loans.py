"""A large call sends memory of its caller, and is over when all of it is back."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter, deque

import numpy as np
import pytest

from zstrat.collectives import Call, Kind, Loans
from zstrat.collectives._generation import Generation
from zstrat.collectives._plans import LENT, progress_of
from zstrat.errors import ClosedError
from zstrat.wire import GroupFormed, Hop, MemberEntry

KEY, ABOUT, TICKET = 1 << 20, 7, 5


def test_a_loan_ends_with_its_last_view():
    told = []
    loans = Loans(lambda: told.append("back"))
    assert loans.are_back()
    memory = np.arange(8, dtype=np.uint8)
    view = loans.lend(memory)
    assert np.shares_memory(view, memory)
    frame = memoryview(view[2:6])
    del view
    assert not loans.are_back()
    assert frame.tobytes() == b"\2\3\4\5"
    assert not told
    del frame
    assert told == ["back"]
    assert loans.are_back()


def test_who_does_not_wait_is_not_told():
    told = []
    loans = Loans(lambda: told.append("back"))
    first, second = (loans.lend(np.zeros(4, np.uint8)) for _ in range(2))
    del first
    assert not loans.are_back()  # asked: from now on it waits
    del second
    third = loans.lend(np.zeros(4, np.uint8))
    del third  # nobody has asked again
    assert told == ["back"]


def test_loans_that_end_on_many_threads_are_told_of_once():
    told = threading.Semaphore(0)
    loans = Loans(told.release)
    lines = [
        deque(loans.lend(np.zeros(4, np.uint8)) for _ in range(500)) for _ in range(4)
    ]
    assert not loans.are_back()
    threads = [threading.Thread(target=line.clear) for line in lines]
    for thread in threads:
        thread.start()
    assert told.acquire(timeout=60)
    for thread in threads:
        thread.join()
    assert loans.are_back()
    assert not told.acquire(blocking=False)


class Line:
    """Keeps what is sent, as a socket that cannot send it yet."""

    backlog = 0

    def __init__(self):
        self.sent = deque()

    def notify(self, message):
        self.sent.append(message)

    def submit(self, message, *, deadline):
        answer = asyncio.get_running_loop().create_future()
        answer.set_exception(ClosedError("it has left"))
        return answer

    async def close(self, reason):
        self.sent.clear()


def rank_0():
    """The generation of rank 0 of 2, and its line to the other one."""
    line = Line()
    members = [
        MemberEntry(f"/job:worker/task:{i}", f"ipc:///{i}", "h", 1, i, 0, 0, b"")
        for i in range(2)
    ]
    formed = GroupFormed(TICKET, 0, members, {})
    return Generation("group", 0, formed, lambda *_, **__: line, Counter()), line


def sum_of(array):
    deadline = asyncio.get_running_loop().time() + 60
    return Call(
        KEY,
        Kind.ALL_REDUCE,
        array,
        array,
        ABOUT,
        "all_reduce()",
        deadline,
        60.0,
        algorithm="ring",
    )


def carry(hops, other):
    """What rank 1 answers to hops; nothing of them is kept."""
    found = [send for hop in hops for send in other.arrived(hop.place, hop.arrays[0])]
    return [Hop(TICKET, KEY, place, ABOUT, (data.copy(),)) for _, place, data in found]


def rank_1(array, call):
    other = progress_of(call, 1, 2)
    first = list(other.start())
    return other, [Hop(TICKET, KEY, at, ABOUT, (data.copy(),)) for _, at, data in first]


@pytest.mark.parametrize("nbytes", [2 * LENT, 64 * 1024])
async def test_a_call_is_over_when_nobody_reads_its_memory(nbytes):
    generation, line = rank_0()
    mine = np.full(nbytes // 4, 1, np.float32)
    theirs = np.full(nbytes // 4, 2, np.float32)
    outcomes = []
    generation.start(sum_of(mine), outcomes.append)
    other, hops = rank_1(theirs, sum_of(theirs))
    for hop in hops:
        generation.hop(1, hop)
    contributed = len(hops)
    for hop in carry([line.sent.popleft() for _ in range(contributed)], other):
        generation.hop(1, hop)
    np.testing.assert_array_equal(mine, 3)
    is_lent = any(np.shares_memory(hop.arrays[0], mine) for hop in line.sent)
    assert is_lent == (nbytes > LENT)
    if is_lent:
        await asyncio.sleep(0)  # what might end it has its turn
        assert outcomes == []
        line.sent.popleft()
        await asyncio.sleep(0)
        assert outcomes == []  # some is still out
        line.sent.clear()
        await asyncio.sleep(0)
    assert outcomes == [None]
    await generation.close("over", asyncio.get_running_loop().time())


async def test_memory_that_is_out_when_the_generation_ends_is_nobodys_business():
    generation, line = rank_0()
    mine = np.full(2 * LENT // 4, 1, np.float32)
    theirs = mine.copy()
    outcomes = []
    generation.start(sum_of(mine), outcomes.append)
    other, hops = rank_1(theirs, sum_of(theirs))
    for hop in hops:
        generation.hop(1, hop)
    for hop in carry([line.sent.popleft() for _ in range(len(hops))], other):
        generation.hop(1, hop)
    generation.abort(ClosedError("it was closed"), tell=False)
    line.sent.clear()
    await asyncio.sleep(0)
    assert [type(outcome) for outcome in outcomes] == [ClosedError]
    await generation.close("over", asyncio.get_running_loop().time())
