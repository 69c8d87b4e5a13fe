"""Requests whose connection breaks: which wait for the next one, and what is sent."""

import asyncio

import numpy as np
import pytest

from zstrat.errors import (
    ClosedError,
    DeadlineExceededError,
    NotFoundError,
    NotPrimaryError,
    PeerLostError,
    ProtocolError,
    PSUnavailableError,
)
from zstrat.ps import EagerRun, PsClient, PsUpdate, Ref, ServerLine
from zstrat.wire import (
    AppliedParts,
    AskParts,
    BindOptimizer,
    DeleteVariables,
    Done,
    Exchange,
    Exchanged,
    Hello,
    PinSnapshot,
    Pull,
    Pulled,
    Push,
    Pushed,
    PushPart,
    UpdateOp,
)

SESSION, WRITER = 7, 99
A = np.ones(2)
DELTA = [PsUpdate(0, 1, UpdateOp.ADD, 0, (A,))]


class Script:
    """A link whose connection the test cuts, and whose answers it gives."""

    def __init__(self, incarnation=1):
        self.asked, self.deadlines = [], []
        self.is_cut, self.incarnation = False, incarnation
        self.news = asyncio.Event()

    @property
    def peer(self):
        return None if self.is_cut else Hello(1, "ps", 0, self.incarnation, "here", 1)

    def submit(self, message, *, deadline=None):
        reply = asyncio.get_running_loop().create_future()
        if self.is_cut:
            reply.set_exception(PeerLostError("ps:0", "it is not connected"))
        else:
            self.asked.append((message, reply))
            self.deadlines.append(deadline)
            self.news.set()
        return reply

    def cut(self):
        """What was asked fails, as on a connection that breaks."""
        self.is_cut = True
        for _, reply in self.asked:
            if not reply.done():
                reply.set_exception(PeerLostError("ps:0", "its connection broke"))

    def back(self):
        """There is a connection; what is asked on it from now on."""
        self.is_cut, self.asked = False, []
        self.news.clear()

    @property
    def messages(self):
        return [message for message, _ in self.asked]


async def turns():
    """Until all callbacks have run that follow from what was done."""
    for _ in range(8):
        await asyncio.sleep(0)


class Rig:
    def __init__(self):
        self.link = Script()
        self.client = PsClient([self.link], SESSION, writer=WRITER)
        (self.line,) = self.client.lines
        self.line.resume()

    async def heal(self):
        self.link.back()
        self.line.hold()
        self.line.resume()
        await turns()

    def answer(self, *answers):
        for (_, reply), answer in zip(self.link.asked, answers, strict=True):
            reply.set_result(answer)


@pytest.fixture
async def rig():
    return Rig()


async def test_what_was_under_way_is_sent_again_in_its_order(rig):
    client, link = rig.client, rig.link
    update = client.update(DELTA)
    pull = client.pull([Ref(0, 1)])
    first = link.messages
    link.cut()
    later = client.update(DELTA)  # while nothing is connected
    await turns()
    link.back()
    rig.line.hold()
    last = client.pull([Ref(0, 1)])  # connected, but not known to hold anything yet
    await turns()
    assert link.asked == []
    rig.line.resume()
    assert link.messages[:2] == first
    kinds = [type(message) for message in link.messages]
    assert kinds == [Push, Pull, Push, Pull]
    names = [(m.writer, m.step) for m in link.messages if isinstance(m, Push)]
    assert names == [(WRITER, 0), (WRITER, 1)]
    pulled = Pulled([1], (A,))
    rig.answer(Pushed(False, [1]), pulled, Pushed(True, [2]), pulled)
    assert [await update, await later] == [False, True]
    assert (await pull)[0] is (await last)[0] is A


async def test_what_was_asked_at_the_moment_of_the_return_is_sent(rig):
    rig.link.cut()
    first = rig.client.push(-1, 0, 0, DELTA)  # nobody can have carried it out
    rig.link.back()
    rig.line.hold()
    rig.line.resume()
    second = rig.client.update(DELTA)
    assert [message.step for message in rig.link.messages] == [-1, 0]
    rig.answer(Pushed(True, [1]), Pushed(True, [2]))
    assert await first
    assert await second


async def test_what_is_heard_to_be_lost_after_the_return_is_sent(rig):
    update = rig.client.update(DELTA)
    rig.link.cut()
    await rig.heal()  # before anybody had the time to hear of the loss
    await turns()
    assert [message.step for message in rig.link.messages] == [0]
    rig.answer(Pushed(True, [1]))
    assert await update


async def test_cut_after_cut(rig):
    update = rig.client.update(DELTA)
    for _ in range(5):
        rig.link.cut()
        await turns()
        await rig.heal()
    assert [message.step for message in rig.link.messages] == [0]
    rig.answer(Pushed(True, [1]))
    assert await update


async def test_an_exchange_is_sent_again_with_both_its_parts(rig):
    pushed, pulled = rig.client.exchange(5, 0, 0, DELTA, [Ref(0, 1)])
    (first,) = rig.link.messages
    rig.link.cut()
    await turns()
    await rig.heal()
    assert rig.link.messages == [first]
    assert isinstance(first, Exchange)
    rig.answer(Exchanged(True, None, None, [1], (A,)))
    assert await pushed
    assert (await pulled)[0] is A


async def test_parts_of_an_eager_step_and_questions_about_them_are_sent_again(rig):
    run = EagerRun(3, 2, 0)
    before = asyncio.ensure_future(rig.client.applied_parts(run))
    await asyncio.sleep(0)  # it asks
    pushed = rig.client.push_part(run, 0, ["a"], DELTA)
    bound = asyncio.ensure_future(rig.client.bind(9, b"tree"))
    await turns()
    first = rig.link.messages
    assert [type(each) for each in first] == [AskParts, PushPart, BindOptimizer]
    rig.link.cut()
    await rig.heal()
    assert rig.link.messages == first
    rig.answer(AppliedParts([], 0), Pushed(True, [1]), Done())
    assert (await before, await pushed) == ({}, True)
    await bound


async def test_a_deletion_comes_again_as_one_that_may_be_done_already(rig):
    deleting = asyncio.ensure_future(rig.client.delete([Ref(0, 4)]))
    await turns()
    assert rig.link.messages == [DeleteVariables(SESSION, [4])]
    rig.link.cut()
    await turns()
    await rig.heal()
    assert rig.link.messages == [DeleteVariables(SESSION, [4], again=True)]
    rig.answer(Done())
    await deleting


async def test_what_has_no_name_is_not_sent_again(rig):
    nameless = rig.client.push(-1, 0, 0, DELTA)
    pin = PinSnapshot(SESSION, 3, [1], [])
    pinning = asyncio.ensure_future(rig.client.each([(0, pin)], Done))
    await turns()
    rig.link.cut()
    for asked in (nameless, pinning):
        with pytest.raises(PSUnavailableError) as raised:
            await asked
        assert not raised.value.lost
    await rig.heal()
    assert rig.link.asked == []


async def test_a_server_that_has_lost_all_is_said_to_have(rig):
    update, pull = rig.client.update(DELTA), rig.client.pull([Ref(0, 1)])
    rig.link.cut()
    await turns()
    rig.link.back()
    rig.line.hold()
    rig.line.lose("it was started again", gone=True, keep_pushes=True)
    later = rig.client.pull([Ref(0, 1)])
    for asked in (update, pull, later):
        with pytest.raises(PSUnavailableError) as one:
            await asked
        assert one.value.lost
    assert rig.link.asked == []


async def test_what_ends_with_the_link_of_a_server_that_is_gone_says_so(rig):
    """Not that a link was closed: nobody of the program has closed anything."""
    pull, update = rig.client.pull([Ref(0, 1)]), rig.client.update(DELTA)
    rig.line.move(Script())  # where nothing is
    rig.line.lose("both copies are gone", gone=True)
    for _, reply in rig.link.asked:
        reply.set_exception(ClosedError("the link to ps:0 was closed"))
    for asked in (pull, update):
        with pytest.raises(PSUnavailableError):
            await asked


async def test_own_updates_outlast_the_patience_with_a_line_that_is_silent(rig):
    update, pull = rig.client.update(DELTA), rig.client.pull([Ref(0, 1)])
    rig.link.cut()
    await turns()
    rig.line.lose("silent for 5 s", gone=False, keep_pushes=True)
    later = rig.client.update(DELTA)
    for asked in (pull, later):
        with pytest.raises(PSUnavailableError) as raised:
            await asked
        assert "lost" not in str(raised.value)
    await rig.heal()
    assert [message.step for message in rig.link.messages] == [0]
    rig.answer(Pushed(True, [1]))
    assert await update
    # The one that was given up is over: should it still arrive, it comes too late.
    rig.client.update(DELTA)
    assert (rig.link.messages[-1].step, rig.link.messages[-1].low_water) == (2, 2)


async def test_nothing_waits_beyond_its_deadline_or_the_end_of_the_link(rig):
    now = asyncio.get_running_loop().time()
    late = rig.client.update(DELTA, deadline=now)
    waiting = rig.client.pull([Ref(0, 1)])
    rig.link.cut()
    with pytest.raises(DeadlineExceededError, match="task:0"):
        await late
    rig.line.close(ClosedError("the link was closed"))
    with pytest.raises(ClosedError):
        await waiting
    await rig.heal()
    assert rig.link.asked == []


async def test_what_has_no_deadline_has_none_when_it_is_sent_again(rig):
    """So progress puts that of the link off, as at the first time. Once the time to
    come back is over, the next break ends it: nothing is sent again without end."""
    line = ServerLine(rig.link, "/job:ps/task:0", 0.0)
    line.resume()
    rig.link.cut()
    asked = line.submit(Pull(SESSION, []))
    rig.link.back()
    line.hold()
    line.resume()
    assert rig.link.deadlines == [None]
    rig.link.cut()
    with pytest.raises(DeadlineExceededError, match="/job:ps/task:0"):
        await asked


async def test_an_error_of_the_server_is_the_outcome(rig):
    update = rig.client.update(DELTA)
    rig.link.cut()
    await turns()
    await rig.heal()
    rig.link.asked[0][1].set_exception(NotFoundError("no such key"))
    with pytest.raises(NotFoundError):
        await update


async def test_marks_follow_the_lowest_update_that_is_not_over(rig):
    updates = [rig.client.update(DELTA) for _ in range(3)]
    replies = [reply for _, reply in rig.link.asked]
    replies[1].set_result(Pushed(True, [1]))
    await updates[1]
    rig.client.update(DELTA)
    replies[0].set_result(Pushed(True, [2]))
    await updates[0]
    rig.client.update(DELTA)
    assert [(m.step, m.low_water) for m in rig.link.messages] == [
        (0, 0),
        (1, 0),
        (2, 0),
        (3, 0),
        (4, 2),
    ]


async def test_who_does_not_own_the_link_hears_of_its_loss_at_once():
    link = Script()
    pull = PsClient([link], SESSION).pull([Ref(0, 1)])
    link.cut()
    with pytest.raises(PSUnavailableError):
        await pull


async def test_parts_that_are_told_in_circles_are_an_error_that_names_the_server(rig):
    asking = asyncio.ensure_future(rig.client.applied_parts(EagerRun(3, 2, 0)))
    await turns()
    rig.answer(AppliedParts([], -1))
    with pytest.raises(ProtocolError, match=r"/job:ps/task:0.*\b1\b"):
        await asking


async def test_a_server_that_is_elsewhere_is_sent_what_was_under_way(rig):
    client, old, new = rig.client, rig.link, Script()
    first = client.update(DELTA)
    pin = asyncio.ensure_future(client.pin(5, [Ref(0, 1)], []))
    await turns()
    asked = old.asked
    rig.line.move(new)
    second = client.update(DELTA)
    assert new.asked == []
    for _, reply in asked:  # its link is closed
        reply.set_exception(ClosedError("the link to ps:0 was closed"))
    await turns()
    rig.line.resume()
    assert [(m.writer, m.step) for m in new.messages] == [(WRITER, 0), (WRITER, 1)]
    for (_, reply), applied in zip(new.asked, [False, True], strict=True):
        reply.set_result(Pushed(applied, [2]))
    assert [await first, await second] == [False, True]
    with pytest.raises(PSUnavailableError):
        await pin  # it has no meaning there


async def test_who_says_that_another_one_serves_is_asked_again_after_a_while(rig):
    update = rig.client.update(DELTA)
    (asked,) = rig.link.asked
    rig.link.back()
    asked[1].set_exception(NotPrimaryError("ps:0: another process serves"))
    await turns()
    later = rig.client.update(DELTA)
    assert rig.line.is_held
    assert rig.link.asked == []
    async with asyncio.timeout(100):
        await rig.link.news.wait()
    assert not rig.line.is_held
    rig.answer(Pushed(True, [1]), Pushed(True, [2]))
    assert [await update, await later] == [True, True]


async def test_values_of_a_server_are_not_remembered_beyond_its_place(rig):
    pull = rig.client.pull([Ref(0, 1)])
    rig.answer(Pulled([1], (A,)))
    await pull
    new = Script(incarnation=2)
    rig.line.move(new)
    rig.line.resume()
    rig.client.pull([Ref(0, 1)])
    (read,) = new.messages[0].reads
    assert read.known == -1
