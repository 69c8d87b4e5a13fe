"""Ranks that had ended the generation before they made the call are not blamed."""

from __future__ import annotations

import asyncio
from collections import Counter

import numpy as np
import pytest

from zstrat.collectives import CallKind, CollectiveCall
from zstrat.collectives.group import FailureInquiry, Generation, verdict
from zstrat.errors import CollectiveTimeoutError, StaleSessionError, to_wire
from zstrat.wire import AbortCall, AskCall, CallState, GroupFormed, MemberEntry

WORDS = "barrier()"
ENDED = CallState("", [], False, True)
X = np.zeros(8, np.float32)


def test_who_has_ended_the_generation_could_not_make_the_call():
    inquiry = FailureInquiry(0, WORDS)
    inquiry.ask([1])
    assert inquiry.answered(1, ENDED) == []
    assert inquiry.has_ended_elsewhere
    assert not inquiry.guilty
    error = verdict(inquiry, "barrier(), call 3", lambda rank: f"rank {rank}", 5.0)
    assert isinstance(error, CollectiveTimeoutError)
    assert "another rank has ended the generation" in str(error)


@pytest.mark.parametrize("ended_first", [False, True])
def test_who_has_not_called_in_a_generation_that_goes_on_is_guilty(ended_first):
    inquiry = FailureInquiry(0, WORDS)
    states = {1: ENDED, 2: CallState("", [], False, False)}
    for rank in sorted(inquiry.ask(states), reverse=not ended_first):
        inquiry.answered(rank, states[rank])
    assert inquiry.guilty == {2: "has not called it"}
    assert not inquiry.has_ended_elsewhere


class Link:
    """A line to another rank."""

    def __init__(self):
        self.backlog, self.sent = 0, []

    def notify(self, message):
        self.sent.append(message)


class Asked:
    """A generation of two ranks whose call is overdue; the other one is asked."""

    def __init__(self):
        task = "/job:worker/task:"
        members = [
            MemberEntry(f"{task}{rank}", f"ipc:///{rank}", "h", 1, rank, 0, 0, b"")
            for rank in range(2)
        ]
        self.link, self.outcomes = Link(), []
        formed = GroupFormed(5, 0, members, {})
        self.generation = Generation(
            "group", 0, formed, lambda *_, **__: self.link, Counter()
        )
        self.answer = asyncio.get_running_loop().create_future()
        self.generation.mesh.ask = lambda *_, **__: self.answer
        self.call = CollectiveCall(
            1 << 20, CallKind.BROADCAST, X, X, 7, "broadcast()", 0.0, 600.0, root=1
        )
        self.generation.traffic.start(self.call, self.outcomes.append)
        self.generation.inquire(self.call, [1])

    async def is_answered(self, answer=ENDED):
        if isinstance(answer, Exception):
            self.answer.set_exception(answer)
        else:
            self.answer.set_result(answer)
        for _ in range(20):
            await asyncio.sleep(0)  # it runs until it waits

    def is_told(self):
        error = to_wire(CollectiveTimeoutError("rank 2 has not called it"))
        self.generation.aborted(1, AbortCall(5, self.call.key, error, []))


LEFT = StaleSessionError("worker:0 asks about a generation that this task is not in")


@pytest.mark.parametrize("answer", [ENDED, LEFT])
async def test_the_notice_says_why_the_call_failed(answer):
    """Two ranks ask at one time. One has found out and failed its call when the other
    one asks it: that call has not ended well there, and its notice says more."""
    asked = Asked()
    await asked.is_answered(answer)
    assert asked.generation.broken is None
    asked.is_told()
    await asked.generation._inquiry
    assert [str(each) for each in asked.outcomes] == ["rank 2 has not called it"]
    assert not [sent for sent in asked.link.sent if isinstance(sent, AbortCall)]
    assert asked.generation.state(AskCall(5, asked.call.key)).is_broken


async def test_a_notice_that_came_before_the_answer_is_not_waited_for():
    asked = Asked()
    await asyncio.sleep(0)  # it asks
    asked.is_told()
    await asked.is_answered()
    assert asked.generation._inquiry.done()
    assert [str(each) for each in asked.outcomes] == ["rank 2 has not called it"]
