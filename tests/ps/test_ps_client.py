"""The client over real links, and over scripted ones for what real ones hardly do."""

import asyncio
from contextlib import asynccontextmanager

import ml_dtypes
import numpy as np
import optax
import pytest
from ps_trees import binding

from zstrat.config import Settings
from zstrat.errors import (
    InvalidArgumentError,
    NotFoundError,
    PeerLostError,
    ProtocolError,
    PSUnavailableError,
)
from zstrat.ps import PsClient, PsService, PsUpdate, Ref, RowsRef
from zstrat.ps.client._reading import Known, Value
from zstrat.transport import Endpoint, Link, hello, new_incarnation
from zstrat.wire import (
    Done,
    Hello,
    InitialEntry,
    InitializeVariables,
    OpenSession,
    Pull,
    Pulled,
    PullRows,
    Pushed,
    UpdateOp,
    VariableEntry,
)

SETTINGS = Settings()


class Servers:
    """Two parameter servers, and the links of one coordinator to them."""

    def __init__(self):
        self.session = new_incarnation()
        self.services, self.endpoints, self.links = [], [], []

    async def start(self, count: int) -> None:
        deadline = asyncio.get_running_loop().time() + 30
        for index in range(count):
            me = hello("ps", index, new_incarnation())
            service = PsService(
                load_code=lambda code: optax.sgd(0.5),
                settings=SETTINGS,
                task=f"/job:ps/task:{index}",
                incarnation=me.incarnation,
            )
            endpoint = Endpoint(
                me, service.handle, settings=SETTINGS, on_lost=service.lost
            )
            address = await endpoint.bind("127.0.0.1:0")
            chief = hello("chief", 0, self.session)
            link = Link(address, chief, name=f"/job:ps/task:{index}", settings=SETTINGS)
            link.start()
            await link.wait_open(deadline)
            await link.request(OpenSession(self.session, index, 1, []))
            self.services.append(service)
            self.endpoints.append(endpoint)
            self.links.append(link)

    async def stop(self) -> None:
        for link in self.links:
            await link.close()
        for endpoint in self.endpoints:
            await endpoint.close()
        for service in self.services:
            await service.drain()


@asynccontextmanager
async def running(count: int = 2):
    servers = Servers()
    try:
        async with asyncio.timeout(60):
            await servers.start(count)
            yield servers, PsClient(servers.links, servers.session)
    finally:
        await servers.stop()


def entry(key: int) -> VariableEntry:
    return VariableEntry(key, f"v{key}", True, False)


def add(ps: int, key: int, array) -> PsUpdate:
    return PsUpdate(ps, key, UpdateOp.ADD, 0, (array,))


async def test_values_of_all_kinds_go_to_their_servers_and_come_back():
    values = [
        np.float64(3).reshape(()),
        np.arange(6, dtype=ml_dtypes.bfloat16).reshape(2, 3),
        np.zeros((0, 4), np.int64),
        np.asfortranarray(np.arange(600_000, dtype=np.float32).reshape(600, 1000)),
    ]
    refs = [Ref(key % 2, key) for key in range(4)]
    async with running() as (_, client):
        await client.create(
            [(ref.ps, entry(ref.key), v) for ref, v in zip(refs, values, strict=True)]
        )
        for order in ([0, 1, 2, 3], [3, 0, 2], [1, 1]):
            got = await client.pull([refs[i] for i in order])
            for array, i in zip(got, order, strict=True):
                assert array.dtype == values[i].dtype
                assert not array.flags.writeable or not array.size
                np.testing.assert_array_equal(array, values[i])
        assert await client.pull([]) == []


async def test_thousands_of_variables_on_one_server():
    count = 8000
    refs = [Ref(0, key) for key in range(count)]
    async with running(1) as (_, client):
        await client.create([(0, entry(k), np.float32(k)) for k in range(count)])
        updates = [add(0, key, np.float32(1)) for key in range(count)]
        assert await client.push(1, 0, 0, updates)
        got = await client.pull(refs)
        np.testing.assert_array_equal(np.array(got), np.arange(count) + 1)
        huge = [add(0, key, np.float32(1)) for key in range(count)] * 3
        with pytest.raises(ValueError, match=r"at most .* may be sent"):
            await client.push(2, 0, 0, huge)
        assert (await client.pull(refs[:1]))[0] == 1


async def test_a_pull_right_behind_a_push_reads_what_it_wrote():
    big = np.ones(2_000_000, np.float32)
    async with running() as (_, client):
        await client.create([(0, entry(0), big * 0), (1, entry(1), np.zeros(3))])
        refs = [Ref(0, 0), Ref(1, 1)]
        for turn in range(1, 4):
            pushed = client.push(turn, 0, 0, [add(0, 0, big), add(1, 1, np.ones(3))])
            pulled = client.pull(refs)
            first, second = await pulled
            assert (first == turn).all()
            assert (second == turn).all()
            assert await pushed is True
        assert await client.push(3, 0, 0, [add(0, 0, big)]) is False
        assert await client.push(-1, 0, 0, []) is True


async def test_what_did_not_change_is_not_sent_again():
    async with running() as (servers, client):
        await client.create([(0, entry(0), np.ones(5)), (0, entry(1), np.ones(5))])
        refs = [Ref(0, 0), Ref(0, 1)]
        first = await client.pull(refs)
        again = await client.pull(refs)
        assert [a is b for a, b in zip(first, again, strict=True)] == [True, True]
        await client.push(-1, 0, 0, [add(0, 1, np.ones(5))])
        third = await client.pull(refs)
        assert third[0] is first[0]
        assert third[1].tolist() == [2] * 5
        assert first[1].tolist() == [1] * 5
        assert servers.services[0].statistics()["unchanged"] == 3


async def test_optimizers_deletion_and_statistics():
    async with running() as (_, client):
        await client.create([(ps, entry(ps), np.ones(3, np.float32)) for ps in (0, 1)])
        await client.create_optimizer(1, "sgd", b"any")
        tree = {"a": ((0,), (3,), "f4"), "b": ((1,), (3,), "f4")}
        await client.bind(1, binding(optax.sgd(0.5), tree).encoded())
        gradient = (np.ones(3, np.float32),)
        updates = [PsUpdate(ps, ps, UpdateOp.OPTIMIZE, 1, gradient) for ps in (0, 1)]
        assert await client.push(1, 0, 0, updates)
        assert [v.tolist() for v in await client.pull([Ref(0, 0), Ref(1, 1)])] == [
            [0.5] * 3
        ] * 2
        await client.delete([Ref(0, 0), Ref(1, 1)])
        with pytest.raises(NotFoundError, match=r"task:0.*\b0\b"):
            await client.pull([Ref(0, 0)])
        statistics = await client.statistics()
        assert [each["task"] for each in statistics] == [
            "/job:ps/task:0",
            "/job:ps/task:1",
        ]
        assert [each["variables"] for each in statistics] == [0, 0]


async def test_a_push_that_a_server_refuses_says_why():
    async with running() as (_, client):
        await client.create([(1, entry(1), np.ones(3))])
        with pytest.raises(
            InvalidArgumentError, match=r"'v1': ADD expects shape \(3,\), got \(4,\)"
        ):
            await client.push(1, 0, 0, [add(1, 1, np.ones(4))])
        assert await client.push(1, 0, 0, [add(1, 1, np.ones(3))])


async def test_a_server_that_goes_away_is_named():
    async with running() as (servers, client):
        await client.create([(1, entry(1), np.ones(3))])
        await servers.endpoints.pop().close()
        with pytest.raises(PSUnavailableError, match="/job:ps/task:1"):
            await client.pull([Ref(1, 1)])
        with pytest.raises(PSUnavailableError, match="/job:ps/task:1"):
            await client.push(1, 0, 0, [add(1, 1, np.ones(3))])


async def test_creation_is_cut_into_messages_that_fit():
    count = 1300
    async with running() as (_, client):
        await client.create([(0, entry(key), np.full(2, key)) for key in range(count)])
        values = await client.pull([Ref(0, key) for key in range(count)])
        assert [v[0] for v in values] == list(range(count))


class Script:
    """A link whose answers the test gives, in any order."""

    def __init__(self, incarnation: int = 1):
        self.peer = Hello(1, "ps", 0, incarnation, "here", 1)
        self.asked = []

    def submit(self, message, *, deadline=None):
        reply = asyncio.get_running_loop().create_future()
        self.asked.append((message, reply))
        return reply


A, B = np.zeros(2), np.ones(2)


async def test_an_answer_is_matched_with_what_was_known_when_it_was_asked_for():
    link = Script()
    client = PsClient([link], 7, memory=A.nbytes)  # room for one value
    first = client.pull([Ref(0, 1)])
    link.asked[0][1].set_result(Pulled([4], (A,)))
    assert (await first)[0] is A
    second, other = client.pull([Ref(0, 1)]), client.pull([Ref(0, 2)])
    assert link.asked[1][0].reads[0].known == 4
    link.asked[2][1].set_result(Pulled([1], (B,)))
    assert (await other)[0] is B  # drops what was known of variable 1
    link.asked[1][1].set_result(Pulled([4], ()))
    assert (await second)[0] is A


async def test_a_small_value_does_not_keep_the_memory_of_a_large_answer():
    link = Script()
    client = PsClient([link], 7)
    pulling = client.pull([Ref(0, 1), Ref(0, 2), Ref(0, 1)])
    body = np.zeros(2**20, np.uint8)
    link.asked.pop()[1].set_result(
        Pulled([1, 1, 1], (body[:4], body[64:], body[:4].view(np.float32)))
    )
    small, large, again = await pulling
    assert large.base is body
    assert (small.tolist(), again.tolist()) == ([0, 0, 0, 0], [0.0])
    assert not small.flags.writeable
    assert not np.shares_memory(small, body)
    assert not np.shares_memory(again, body)


async def test_a_restarted_server_is_not_asked_for_versions_of_its_former_life():
    link = Script()
    client = PsClient([link], 7)
    first = client.pull([Ref(0, 1)])
    link.asked[0][1].set_result(Pulled([4], (A,)))
    await first
    link.peer = Hello(1, "ps", 0, 2, "here", 1)
    client.pull([Ref(0, 1)])
    assert link.asked[1][0].reads[0].known == -1


@pytest.mark.parametrize(
    "answer", [Done(), Pulled([], ()), Pulled([3], ()), Pushed(True, [])]
)
async def test_an_answer_to_another_question_is_a_protocol_error(answer):
    link = Script()
    pulling = PsClient([link], 7).pull([Ref(0, 1)])
    link.asked[0][1].set_result(answer)
    with pytest.raises(ProtocolError, match="/job:ps/task:0"):
        await pulling


def rows(ps, key, *indices):
    return RowsRef(ps, key, np.array(indices, np.int64))


async def test_values_and_rows_take_one_message_per_server():
    links = [Script(), Script()]
    pulling = PsClient(links, 7).pull(
        [Ref(0, 1), Ref(1, 2), Ref(0, 3)], [rows(0, 4, 5, 9), rows(0, 6), rows(1, 4, 0)]
    )
    ((first, reply),), ((second, other),) = links[0].asked, links[1].asked
    assert isinstance(first, PullRows)
    assert [read.key for read in first.reads] == [1, 3]
    assert (first.rows, [a.tolist() for a in first.arrays]) == ([4, 6], [[5, 9], []])
    assert ([read.key for read in second.reads], second.rows) == ([2], [4])
    found, nothing = np.array([[1.0], [2.0]]), np.zeros((0, 1))
    other.set_result(Pulled([1], (B, np.array([[3.0]]))))
    reply.set_result(Pulled([1, 1], (A, A + 2, found, nothing)))
    values = await pulling
    assert [v.tolist() for v in values[:3]] == [[0, 0], [1, 1], [2, 2]]
    assert values[3] is found
    assert (values[4].shape, values[5].tolist()) == ((0, 1), [[3.0]])


async def test_a_pull_without_rows_is_a_plain_one_and_rows_alone_are_no_reads():
    links = [Script(), Script()]
    client = PsClient(links, 7)
    pulling = client.pull([Ref(0, 1)], [rows(1, 2, 3)])
    (((plain, first),), ((named, second),)) = links[0].asked, links[1].asked
    assert isinstance(plain, Pull)
    assert (named.reads, named.rows) == ([], [2])
    first.set_result(Pulled([1], (A,)))
    second.set_result(Pulled([], (B[:1],)))
    assert [v.tolist() for v in await pulling] == [[0, 0], [1]]


async def test_rows_are_asked_for_again_beside_a_value_that_did_not_change():
    link = Script()
    client = PsClient([link], 7)
    for turn, arrays in enumerate([(A, B[:1]), (B[:1],)]):
        pulling = client.pull([Ref(0, 1)], [rows(0, 2, 4)])
        link.asked[turn][1].set_result(Pulled([8], arrays))
        assert [v.tolist() for v in await pulling] == [[0, 0], [1]]
    assert link.asked[1][0].reads[0].known == 8


async def test_a_remembered_value_does_not_keep_the_rows_beside_it():
    link = Script()
    client = PsClient([link], 7)
    body = np.zeros(2**20, np.uint8)
    value, found = body[: 2**17], body[2**17 :].reshape(7, -1)
    pulling = client.pull([Ref(0, 1)], [rows(0, 2, *range(7))])
    link.asked[0][1].set_result(Pulled([1], (value, found)))
    kept, given = await pulling
    assert not np.shares_memory(kept, body)
    assert given is found


@pytest.mark.parametrize(
    "answer",
    [
        Done(),
        Pulled([1], (A,)),
        Pulled([1], ()),
        Pulled([1], (A, A, A)),
        Pulled([1], (A, np.zeros((2, 3)))),
        Pulled([1], (A, np.zeros(()))),
        Pulled([], (A, A)),
    ],
)
async def test_an_answer_without_the_rows_is_a_protocol_error(answer):
    link = Script()
    pulling = PsClient([link], 7).pull([Ref(0, 1)], [rows(0, 2, 3)])
    link.asked[0][1].set_result(answer)
    with pytest.raises(ProtocolError, match="PullRows"):
        await pulling


async def test_rows_of_thousands_of_variables_are_cut_into_messages():
    link = Script()
    client = PsClient([link], 7)
    refs, some = [Ref(0, n) for n in range(5000)], [rows(0, n, n) for n in range(1500)]
    pulling = client.pull(refs, some)
    asked = [message for message, _ in link.asked]
    assert [(len(m.reads), len(getattr(m, "rows", ()))) for m in asked] == [
        (1024, 1024),
        (1024, 476),
        (1024, 0),
        (1024, 0),
        (904, 0),
    ]
    for message, reply in reversed(link.asked):
        whole = [np.full(1, read.key) for read in message.reads]
        parts = [np.full((1, 1), -key) for key in getattr(message, "rows", ())]
        reply.set_result(Pulled([1] * len(whole), (*whole, *parts)))
    values = np.concatenate([value.ravel() for value in await pulling])
    np.testing.assert_array_equal(values, [*range(5000), *(-np.arange(1500))])


async def test_initializers_go_to_the_servers_of_their_variables():
    links = [Script(), Script()]

    def entry(key):
        return InitialEntry(key, f"w/{key}", True, True, "float32", [4], [8], [0])

    entries = [(key % 2, entry(key)) for key in range(1030)]
    making = asyncio.ensure_future(PsClient(links, 7).initialize(entries, b"code"))
    await asyncio.sleep(0)
    asked = [message for link in links for message, _ in link.asked]
    assert asked[:2] == [
        InitializeVariables(7, [entry(k) for k in range(0, 1024, 2)], b"code"),
        InitializeVariables(7, [entry(k) for k in range(1024, 1030, 2)], b"code"),
    ]
    assert sum(len(message.variables) for message in asked) == 1030
    for link in links:
        for _, reply in link.asked:
            reply.set_result(Done())
    await making


async def test_an_initializer_that_a_server_refuses_says_why():
    link = Script()
    entry = InitialEntry(1, "w", True, False, "float32", [4], [4], [0])
    making = asyncio.ensure_future(PsClient([link], 7).initialize([(0, entry)], b""))
    await asyncio.sleep(0)
    link.asked[0][1].set_exception(InvalidArgumentError("'w': it returned (3,)"))
    with pytest.raises(InvalidArgumentError):
        await making


async def test_the_first_error_is_the_outcome_and_nobody_hears_the_second():
    links = [Script(), Script()]
    pulling = PsClient(links, 7).pull([Ref(0, 1), Ref(1, 1)])
    links[1].asked[0][1].set_exception(PeerLostError("ps 1", "silent for 5 s"))
    with pytest.raises(PSUnavailableError, match="/job:ps/task:1"):
        await pulling
    links[0].asked[0][1].set_exception(NotFoundError("no such key"))
    await asyncio.sleep(0)


async def test_giving_up_a_call_leaves_the_links_alone():
    link = Script()
    pulling = PsClient([link], 7).pull([Ref(0, 1)])
    pulling.cancel()
    link.asked[0][1].set_result(Pulled([1], (A,)))
    await asyncio.sleep(0)
    assert pulling.cancelled()


def test_what_is_known_is_bounded_and_never_goes_back():
    known = Known(3 * A.nbytes)
    for name in "abc":
        known.put(name, Value(1, A))
    assert known.get("a")
    known.put("d", Value(1, B))
    assert known.get("b") is None
    assert (len(known), known.nbytes) == (3, 3 * A.nbytes)
    known.put("a", Value(3, B))
    known.put("a", Value(2, A))
    assert known.get("a") == (3, B)
    known.put("a", Value(4, np.zeros(100)))
    assert known.get("a") is None
    known.drop("d")
    assert (len(known), known.nbytes) == (1, A.nbytes)
    known.clear()
    assert (len(known), known.nbytes) == (0, 0)
