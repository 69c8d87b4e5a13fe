"""Both ends of a connection without sockets."""

import asyncio
import operator

import numpy as np
import pytest

from zstrat.errors import BusyError, ClosedError, DeadlineExceededError, PeerLostError
from zstrat.testing import FakeLink, FakeRemote, through_the_codec
from zstrat.wire import CancelSteps, DropResults, Fetched, Inspect, Job, Statistics

PS = FakeRemote(Job.PS, 5).hello


def now():
    return asyncio.get_running_loop().time()


def linked(handler, hello=PS, **options):
    link = FakeLink(handler, name="/job:ps/task:0", hello=hello, **options)
    link.start()
    return link


def statistics(message):
    assert message == Inspect()
    return Statistics({"job": "ps"})


async def test_a_request_has_the_outcome_of_its_handler():
    link = linked(statistics)
    assert await link.request(Inspect()) == Statistics({"job": "ps"})
    assert link.sent == [Inspect()]

    def refuses(message):
        raise BusyError("full")

    with pytest.raises(BusyError, match="full"):
        await linked(refuses).request(Inspect())


async def test_a_handler_may_answer_later_and_fail_later():
    gate = asyncio.Event()

    async def later(message):
        await gate.wait()
        raise BusyError("after all")

    waiting = linked(later).submit(Inspect())
    assert not waiting.done()
    gate.set()
    with pytest.raises(BusyError, match="after all"):
        await waiting


async def test_arrays_arrive_as_copies_that_nobody_can_write_to():
    array = np.arange(3.0)
    link = linked(lambda message: Fetched((array,)))
    (got,) = (await link.request(Inspect())).arrays
    array[0] = 7.0
    assert got.tolist() == [0.0, 1.0, 2.0]
    with pytest.raises(ValueError, match="read-only"):
        got[0] = 1.0
    assert through_the_codec(CancelSteps(3)) == CancelSteps(3)


async def test_what_is_held_arrives_in_order_when_it_is_released():
    seen = []
    link = linked(seen.append)
    link.hold()
    link.submit(Inspect())
    link.notify(CancelSteps(3))
    assert [message for message, _ in link.held] == [Inspect(), CancelSteps(3)]
    assert seen == []
    link.release()
    assert seen == [Inspect(), CancelSteps(3)]


async def test_a_cut_fails_what_is_open_and_nothing_of_it_arrives():
    seen, lost, opened = [], [], []
    link = linked(seen.append, on_lost=lost.append, on_open=opened.append)
    waiting = link.submit(Inspect())
    link.cut("it was killed", left=True)
    with pytest.raises(PeerLostError, match="it was killed"):
        await waiting
    with pytest.raises(PeerLostError):
        await link.request(Inspect())
    with pytest.raises(PeerLostError):
        link.notify(CancelSteps(3))
    assert [error.left for error in lost] == [True]
    link.connect()
    assert opened == [PS, PS]
    await asyncio.wait_for(link.wait_open(now()), 1)
    assert seen == []


async def test_a_task_that_is_not_there_yet():
    link = linked(statistics, hello=None, address="ps0:1")
    with pytest.raises(DeadlineExceededError, match=r"task:0.*\b1\b"):
        await link.wait_open(now())
    with pytest.raises(ValueError, match="was never connected"):
        link.connect()
    waiting = asyncio.ensure_future(link.wait_open(now() + 30))
    asyncio.get_running_loop().call_soon(link.connect, PS)
    assert await waiting == link.peer == PS


async def test_notices_of_the_task_come_unless_the_link_is_cut():
    notices = []
    link = linked(statistics, on_notice=notices.append)
    link.say(DropResults(1, [2]))
    await link.request(Inspect())  # which comes after it
    assert notices == [DropResults(1, [2])]
    link.say(DropResults(1, [3]))
    link.cut()
    link.connect(PS)
    await link.request(Inspect())
    link.cut()
    link.say(DropResults(1, [4]))
    assert notices == [DropResults(1, [2])]


async def test_a_closed_link_cannot_be_used():
    link = linked(lambda message: None)
    waiting = link.submit(Inspect())
    await link.close()
    with pytest.raises(ClosedError):
        await waiting
    for use in (operator.methodcaller("notify", Inspect()), FakeLink.start):
        with pytest.raises(ClosedError):
            use(link)
    with pytest.raises(ClosedError):
        link.submit(Inspect())


def test_a_remote_keeps_its_notices_and_refuses_when_it_is_told_to():
    remote = FakeRemote(Job.WORKER, 7, index=2)
    assert (remote.name, remote.hello.incarnation) == ("worker:2", 7)
    remote.refusals = [lambda message: BusyError("full")]
    with pytest.raises(BusyError):
        remote.notify(CancelSteps(1))
    remote.notify(CancelSteps(1))
    assert remote.notices == [CancelSteps(1)]
    remote.alive = False
    with pytest.raises(PeerLostError, match="worker:2"):
        remote.notify(CancelSteps(1))
