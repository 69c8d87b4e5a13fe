"""The end of a generation, with lines that a test holds."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from zstrat.collectives import CallKind, CollectiveCall
from zstrat.collectives.group import FORGOTTEN, Generation
from zstrat.collectives.group._traffic import key_of
from zstrat.collectives.schedules import progress_of
from zstrat.errors import (
    ClosedError,
    CollectiveTimeoutError,
    DeadlineExceededError,
    PeerLostError,
    to_wire,
)
from zstrat.wire import (
    AbortCall,
    AskCall,
    CallState,
    GroupFormed,
    Hop,
    LeaveGroup,
    MemberEntry,
)

X = np.zeros(8, np.float32)


class SlowLink:
    """A line that is full until something is sent behind what waits. What is asked is
    answered by the test."""

    def __init__(self, on_flushed):
        self.backlog, self.sent, self.goodbye = 7, [], None
        self.asked = {}
        self._on_flushed = on_flushed

    def submit(self, message, *, deadline):
        loop = asyncio.get_running_loop()
        answer = self.asked[message] = loop.create_future()
        late = DeadlineExceededError("no answer")
        loop.call_at(deadline, lambda: answer.done() or answer.set_exception(late))
        return answer

    def notify(self, message):
        self.sent.append(message)
        self.backlog = 0
        self._on_flushed()

    async def close(self, reason):
        self.goodbye = reason


def full_line():
    """A generation of two ranks, and its line to the other one."""
    generation, (link,) = full_lines(2)
    return generation, link


def full_lines(size):
    """A generation of so many ranks, and its lines to the others."""
    links = []

    def make_link(address, *, name, expect, on_open, on_lost, on_flushed):
        links.append(SlowLink(on_flushed))
        return links[-1]

    task = "/job:worker/task:"
    members = [
        MemberEntry(f"{task}{rank}", f"ipc:///{rank}", "h", 1, rank, 0, 0, b"")
        for rank in range(size)
    ]
    formed = GroupFormed(5, 0, members, {})
    return Generation("group", 0, formed, make_link, Counter()), links


async def test_a_line_that_is_emptied_too_late_does_not_disturb_the_end():
    generation, link = full_line()
    await generation.close("its test is over", asyncio.get_running_loop().time())
    assert link.sent == [LeaveGroup(5, 0, "its test is over")]
    assert link.goodbye == "its test is over"
    assert isinstance(generation.broken, ClosedError)


async def leaving(generation):
    """The end of the generation, which waits for the lines to be empty."""
    deadline = asyncio.get_running_loop().time() + 1000
    closing = asyncio.create_task(generation.close("over", deadline), name="closing")
    await asyncio.sleep(0)  # it runs until it waits
    return closing


async def test_who_leaves_waits_until_the_others_have_what_was_sent_to_them():
    """A socket that is closed gives its last messages a moment, and no more."""
    generation, link = full_line()
    closing = await leaving(generation)
    ((question, answer),) = link.asked.items()
    assert isinstance(question, AskCall)
    assert (link.sent, link.goodbye, closing.done()) == ([], None, False)
    answer.set_result(CallState("", [], False, False))
    await closing
    assert link.sent == [LeaveGroup(5, 0, "over")]
    assert link.goodbye == "over"


async def test_who_has_all_hears_of_the_leave_though_another_one_is_slow():
    generation, (quick, slow) = full_lines(3)
    closing = await leaving(generation)
    (answer,) = quick.asked.values()
    answer.set_result(CallState("", [], False, False))
    await asyncio.sleep(0)  # the answer is looked at
    assert (quick.sent, slow.sent) == ([LeaveGroup(5, 0, "over")], [])
    assert not closing.done()
    (answer,) = slow.asked.values()
    answer.set_exception(DeadlineExceededError("no answer"))
    await closing
    assert quick.sent == slow.sent == [LeaveGroup(5, 0, "over")]
    assert (quick.goodbye, slow.goodbye) == ("over", "over")


async def test_who_gives_up_leaving_has_left():
    generation, link = full_line()
    closing = await leaving(generation)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert link.sent == [LeaveGroup(5, 0, "over")]
    assert link.goodbye == "over"
    assert all(answer.cancelled() for answer in link.asked.values())


async def test_nobody_waits_for_the_line_to_a_rank_that_is_lost():
    generation, link = full_line()
    closing = await leaving(generation)
    assert not closing.done()
    generation.gone(1, "it is silent")
    await closing
    assert not link.sent
    assert link.goodbye == "over"
    assert isinstance(generation.broken, PeerLostError)


async def test_what_an_operation_was_is_known_after_its_end():
    """The engine's, too: another rank asks when this one has given it up."""
    generation, _ = full_line()
    asked = AskCall(5, key_of(None, 1, 0))
    assert generation.state(asked) == CallState("", [], False, False)
    generation.begun[1], generation.calls = "barrier()", 1
    assert generation.state(asked) == CallState("barrier()", [], False, False)
    generation.end(1)
    assert generation.state(asked) == CallState("barrier()", [], True, False)
    for number in range(2, 100):
        generation.begun[number], generation.calls = "barrier()", number
        generation.end(number)
    assert generation.state(asked) == CallState(FORGOTTEN, [], True, False)


async def test_who_has_ended_the_generation_says_so_and_is_believed():
    """Two ranks ask at one time. One has found out and failed its call when the other
    one asks it: that call has not ended well there, and its notice says more."""
    generation, link = full_line()
    call = CollectiveCall(
        1 << 20, CallKind.BROADCAST, X, X, 7, "broadcast()", 0.0, 0.6, root=1
    )
    outcomes = []
    generation.traffic.start(call, outcomes.append)
    generation.mesh.ask = partial(answer_of, CallState(call.words, [], True, True))
    generation.inquire(call, [1])
    for _ in range(20):
        await asyncio.sleep(0)  # it runs until it waits
    assert generation.broken is None
    error = CollectiveTimeoutError("rank 2 has not called it")
    generation.aborted(1, AbortCall(5, call.key, to_wire(error), []))
    await generation._inquiry
    assert [str(each) for each in outcomes] == ["rank 2 has not called it"]
    assert not [sent for sent in link.sent if isinstance(sent, AbortCall)]
    assert generation.state(AskCall(5, call.key)).is_broken


def answer_of(state, rank, *, message, deadline):
    assert rank == 1
    answer = asyncio.get_running_loop().create_future()
    answer.set_result(state)
    return answer


async def test_what_a_rank_sent_before_it_left_is_enough():
    """Though this one begins the call when the root has gone already."""
    generation, _ = full_line()
    data = np.arange(750_000, dtype=np.float32)
    target, outcomes = np.zeros_like(data), []
    mine, roots = (
        CollectiveCall(
            1 << 20, CallKind.BROADCAST, x, x, 7, "broadcast()", math.inf, 60.0, root=1
        )
        for x in (target, data)
    )
    hops = [
        Hop(5, mine.key, place, 7, (chunk,))
        for _, place, chunk in progress_of(roots, 1, 2).start()
    ]
    assert len(hops) > 1
    for hop in hops:
        generation.hop(1, hop)
    generation.left(1, LeaveGroup(5, 1, "it closed the group"))
    generation.traffic.start(
        replace(mine, deadline=asyncio.get_running_loop().time() + 60), outcomes.append
    )
    assert outcomes == [None]
    np.testing.assert_array_equal(target, data)
    await generation.close("over", asyncio.get_running_loop().time())
