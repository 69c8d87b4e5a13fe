"""A push and the pull behind it: what is sent to whom, and what becomes of the two."""

import asyncio

import numpy as np
import optax
import pytest

from zstrat.config import Settings
from zstrat.errors import (
    BusyError,
    DeadlineExceededError,
    InvalidArgumentError,
    NotFoundError,
    PeerLostError,
    ProtocolError,
    PSUnavailableError,
    to_wire,
)
from zstrat.ps import PsClient, PsService, PsUpdate, Ref, RowsRef
from zstrat.ps.client import _pushing as exchange_module
from zstrat.transport import Endpoint, Link, hello, new_incarnation
from zstrat.wire import (
    Done,
    Exchange,
    Exchanged,
    Hello,
    OpenSession,
    Pull,
    Pulled,
    PullRows,
    Push,
    Pushed,
    Read,
    Update,
    UpdateOp,
    VariableEntry,
)

ADD = int(UpdateOp.ADD)


class Script:
    """A link whose answers the test gives."""

    def __init__(self, *refusals):
        self.peer = Hello(1, "ps", 0, 1, "here", 1)
        self.asked, self.deadlines, self.refusals = [], [], list(refusals)

    def submit(self, message, *, deadline=None):
        if self.refusals and (error := self.refusals.pop(0)) is not None:
            raise error
        reply = asyncio.get_running_loop().create_future()
        self.asked.append((message, reply))
        self.deadlines.append(deadline)
        return reply


def add(ps, key, array):
    return PsUpdate(ps, key, UpdateOp.ADD, 0, (array,))


def rows(ps, key, *indices):
    return RowsRef(ps, key, np.array(indices, np.int64))


A, B = np.zeros((2, 2)), np.ones((1, 2))


async def test_one_message_to_a_server_that_has_both_parts_and_a_plain_one_to_others():
    links = [Script() for _ in range(4)]
    client = PsClient(links, 7)
    updates = [add(0, 1, A), add(2, 4, A), add(0, 2, B)]
    refs, wanted = [Ref(0, 1), Ref(1, 3)], [rows(0, 2, 0), rows(3, 5, 1)]
    pushed, pulled = client.exchange(9, 0, 5, updates, refs, wanted, deadline=8.5)
    ((both, first),), ((whole, second),), ((push, third),), ((some, fourth),) = [
        link.asked for link in links
    ]
    assert isinstance(both, Exchange)
    assert both.arrays[0] is A
    assert both.arrays[1] is B
    assert (both.session, both.step, both.part, both.low_water) == (7, 9, 0, 5)
    assert both.updates == [Update(1, ADD, 0, 1), Update(2, ADD, 0, 1)]
    assert (both.reads, both.rows) == ([Read(1, -1)], [2])
    assert both.arrays[2].tolist() == [0]
    assert [type(message) for message in (whole, push, some)] == [Pull, Push, PullRows]
    assert [link.deadlines for link in links] == [[8.5]] * 4
    fourth.set_result(Pulled([], (B + 3,)))
    third.set_result(Pushed(False, [1]))
    second.set_result(Pulled([1], (A + 2,)))
    assert not pushed.done()
    first.set_result(Exchanged(True, None, None, [1], (A + 1, B)))
    assert [value[0, 0] for value in await pulled] == [1, 2, 1, 4]
    assert await pushed is True


async def test_nothing_to_push_or_nothing_to_pull():
    link = Script()
    client = PsClient([link], 7)
    pushed, pulled = client.exchange(1, 0, 0, [], [Ref(0, 1)])
    assert await pushed is True  # as an empty push
    link.asked.pop()[1].set_result(Pulled([1], (A,)))
    assert len(await pulled) == 1
    pushed, pulled = client.exchange(1, 0, 0, [add(0, 1, A)], [])
    assert await pulled == []
    link.asked.pop()[1].set_result(Pushed(False, [1]))
    assert await pushed is False


async def test_each_part_has_its_own_error():
    link = Script()
    client = PsClient([link], 7)
    wrong = to_wire(NotFoundError("gone"))
    for answer, fails in [
        (Exchanged(False, wrong, None, [1], (A,)), "push"),
        (Exchanged(True, None, wrong, [], ()), "pull"),
        (Exchanged(False, wrong, wrong, [], ()), "both"),
    ]:
        outcomes = client.exchange(1, 0, 0, [add(0, 1, A)], [Ref(0, 1)])
        link.asked.pop()[1].set_result(answer)
        pushed, pulled = await asyncio.gather(*outcomes, return_exceptions=True)
        assert isinstance(pushed, NotFoundError) is (fails != "pull")
        assert isinstance(pulled, NotFoundError) is (fails != "push")


async def test_an_error_at_one_server_is_the_outcome_of_that_part_alone():
    links = [Script(), Script()]
    client = PsClient(links, 7)
    outcomes = client.exchange(
        1, 0, 0, [add(0, 1, A), add(1, 1, A)], [Ref(0, 1), Ref(1, 1)]
    )
    refused = to_wire(InvalidArgumentError("does not fit"))
    links[1].asked[0][1].set_result(Exchanged(False, refused, None, [1], (A,)))
    links[0].asked[0][1].set_result(Exchanged(True, None, None, [1], (A,)))
    pushed, pulled = await asyncio.gather(*outcomes, return_exceptions=True)
    assert isinstance(pushed, InvalidArgumentError)
    assert len(pulled) == 2


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (PeerLostError("ps 0", "silent for 5 s"), PSUnavailableError),
        (DeadlineExceededError("too late"), DeadlineExceededError),
    ],
)
async def test_without_an_answer_both_fail(error, kind):
    link = Script()
    outcomes = PsClient([link], 7).exchange(1, 0, 0, [add(0, 1, A)], [Ref(0, 1)])
    link.asked[0][1].set_exception(error)
    found = await asyncio.gather(*outcomes, return_exceptions=True)
    assert [type(each) for each in found] == [kind] * 2


@pytest.mark.parametrize("answer", [Done(), Pushed(True, []), Pulled([1], (A,))])
async def test_an_answer_to_another_question_fails_both(answer):
    link = Script()
    outcomes = PsClient([link], 7).exchange(1, 0, 0, [add(0, 1, A)], [Ref(0, 1)])
    link.asked[0][1].set_result(answer)
    for outcome in outcomes:
        with pytest.raises(ProtocolError):
            await outcome


@pytest.mark.parametrize(
    ("versions", "arrays"), [([], ()), ([1], ()), ([1], (A, A)), ([1, 1], (A,))]
)
async def test_an_answer_without_the_values_fails_the_pull_alone(versions, arrays):
    link = Script()
    pushed, pulled = PsClient([link], 7).exchange(1, 0, 0, [add(0, 1, A)], [Ref(0, 1)])
    link.asked[0][1].set_result(Exchanged(True, None, None, versions, arrays))
    assert await pushed
    with pytest.raises(ProtocolError):
        await pulled


async def test_giving_up_one_part_leaves_the_other_alone():
    link = Script()
    client = PsClient([link], 7)
    for gives_up in (0, 1):
        outcomes = client.exchange(1, 0, 0, [add(0, 1, A)], [Ref(0, 1)])
        outcomes[gives_up].cancel()
        link.asked.pop()[1].set_result(Exchanged(True, None, None, [1], (A,)))
        assert await outcomes[1 - gives_up]
        assert outcomes[gives_up].cancelled()


async def test_what_was_read_is_remembered():
    link = Script()
    client = PsClient([link], 7)
    _, pulled = client.exchange(1, 0, 0, [add(0, 2, A)], [Ref(0, 1)])
    link.asked.pop()[1].set_result(Exchanged(True, None, None, [4], (A,)))
    assert (await pulled)[0] is A
    _, pulled = client.exchange(2, 0, 0, [add(0, 2, A)], [Ref(0, 1)])
    message, reply = link.asked.pop()
    assert message.reads == [Read(1, 4)]
    reply.set_result(Exchanged(True, None, None, [4], ()))
    assert (await pulled)[0] is A


async def test_parts_of_thousands_of_variables_travel_apart(monkeypatch):
    monkeypatch.setattr(exchange_module, "MAX_EXCHANGED_VARIABLES", 1000)
    link = Script()
    client = PsClient([link], 7)
    many = [Ref(0, key) for key in range(5000)]
    _, pulled = client.exchange(1, 0, 0, [add(0, 1, A)], many)
    assert [type(message) for message, _ in link.asked] == [Push, *5 * [Pull]]
    for message, reply in link.asked[1:]:
        arrays = tuple([np.full(1, read.key) for read in message.reads])
        reply.set_result(Pulled([1] * len(arrays), arrays))
    assert [int(value[0]) for value in await pulled] == list(range(5000))


async def test_a_second_message_to_a_server_only_reads(monkeypatch):
    monkeypatch.setattr(exchange_module, "MAX_EXCHANGED_VARIABLES", 10**6)
    link = Script()
    many = [Ref(0, key) for key in range(5000)]
    PsClient([link], 7).exchange(1, 0, 0, [add(0, 1, A)], many)
    assert [type(message) for message, _ in link.asked] == [Exchange, *4 * [Pull]]


async def test_a_part_that_cannot_be_sent_does_not_keep_the_other_back():
    odd = TypeError("Push.arrays: dtype object")
    link = Script(TypeError("Exchange.arrays: dtype object"), odd)
    pushed, pulled = PsClient([link], 7).exchange(1, 0, 0, [add(0, 1, A)], [Ref(0, 1)])
    with pytest.raises(TypeError, match=r"Push\.arrays"):
        await pushed
    ((message, reply),) = link.asked
    assert isinstance(message, Pull)
    reply.set_result(Pulled([1], (A,)))
    assert len(await pulled) == 1


async def test_a_link_that_takes_nothing_fails_both_and_sends_no_more_of_them():
    links = [Script(BusyError("too many")), Script()]
    outcomes = PsClient(links, 7).exchange(
        1, 0, 0, [add(0, 1, A), add(1, 1, A)], [Ref(0, 1), Ref(1, 1)]
    )
    for outcome in outcomes:
        with pytest.raises(BusyError):
            await outcome
    assert links[1].asked == []


async def test_over_real_links_the_pull_reads_what_the_push_wrote():
    session, deadline = new_incarnation(), asyncio.get_running_loop().time() + 60
    services, endpoints, links = [], [], []
    async with asyncio.timeout(60):
        for index in range(2):
            me = hello("ps", index, new_incarnation())
            service = PsService(
                load_code=lambda code: optax.sgd(0.5), settings=Settings(), task="ps"
            )
            endpoint = Endpoint(me, service.handle, settings=Settings())
            address = await endpoint.bind("127.0.0.1:0")
            chief = hello("chief", 0, session)
            link = Link(address, chief, name=f"ps {index}", settings=Settings())
            link.start()
            await link.wait_open(deadline)
            await link.request(OpenSession(session, index, 1, []))
            services.append(service)
            endpoints.append(endpoint)
            links.append(link)
        client = PsClient(links, session)
        big = np.ones((300_000, 2), np.float32)  # its body travels in chunks
        entries = [VariableEntry(key, f"v{key}", True, False) for key in range(2)]
        await client.create([(ps, entries[ps], big * 0) for ps in range(2)])
        refs, wanted = [Ref(0, 0)], [rows(1, 1, 7, 7)]
        for turn in range(1, 4):
            updates = [add(0, 0, big), add(1, 1, big)]
            pushed, pulled = client.exchange(turn, 0, 0, updates, refs, wanted)
            whole, some = await pulled
            assert await pushed
            assert (whole == turn).all()
            assert some.tolist() == [[turn, turn]] * 2
        wrong = np.array([None], object)
        pushed, pulled = client.exchange(9, 0, 0, [add(1, 1, wrong)], [], wanted)
        with pytest.raises(TypeError, match=r"Push\.arrays"):
            await pushed
        assert (await pulled)[0].tolist() == [[3, 3]] * 2
        await endpoints[1].close()
        for outcome in client.exchange(10, 0, 0, [add(1, 1, big)], [], wanted):
            with pytest.raises(PSUnavailableError, match="/job:ps/task:1"):
                await outcome
        for link in links:
            await link.close()
        await endpoints[0].close()
        for service in services:
            await service.drain()
