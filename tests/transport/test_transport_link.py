"""Messages between endpoints and links over real sockets."""

import asyncio
import weakref

import numpy as np
import pytest
from transport_talk import pull, push, soon

from zstrat.config import Limits, Settings
from zstrat.errors import BusyError, ClosedError, DeadlineExceededError, NotFoundError
from zstrat.transport import POOL
from zstrat.wire import (
    Again,
    CancelSteps,
    DeleteVariables,
    Done,
    DropResults,
    Inspect,
    Pull,
    Push,
    Statistics,
)


async def test_requests_notices_and_errors(net):
    _, address, service = await net.serve()
    link, caller = await net.open(address, expect=("ps", 0))
    assert link.is_open
    assert link.peer.job == "ps"
    assert await link.request(Inspect()) == Statistics({"role": "worker"})
    link.notify(CancelSteps(9))
    assert await caller.notices.get() == DropResults(9, [])
    with pytest.raises(KeyError) as failed:
        await link.request(DeleteVariables(1, [2]))
    assert failed.value.args == ("DeleteVariables",)
    assert "Traceback of the other task" in failed.value.__notes__[0]
    assert service.seen[0][0].name == "worker:1"


class Last:
    """A sink that keeps what came last, and at first wants all of it again."""

    def __init__(self, seen):
        self.seen = seen

    def take(self, memory, offset, chunk):
        memory[offset : offset + len(chunk)] = chunk
        self.memory = memory

    def finish(self):
        self.seen.append(bytes(self.memory[-4:]))
        if len(self.seen) == 1:
            return Again()
        if len(self.seen) == 2:
            raise NotFoundError("variable 3")
        return Done()


async def test_an_endpoint_offers_large_requests_of_those_who_greeted(net):
    asked, seen = [], []

    def absorb(remote, message, specs):
        asked.append((remote.name, message.session, specs[0].shape))
        return Last(seen) if len(asked) != 3 else None

    tcp = Settings(transport="tcp")
    _, address, service = await net.serve(absorb=absorb, settings=tcp)
    link, _ = await net.open(address, settings=tcp)
    large = push(np.arange(3 * 2**20 // 4, dtype="<i4"))
    with pytest.raises(NotFoundError, match="variable 3"):
        await link.request(large)
    assert seen == [(3 * 2**20 // 4 - 1).to_bytes(4, "little")] * 2
    answer = await link.request(large)  # this one goes to the handler
    np.testing.assert_array_equal(answer.arrays[0], large.arrays[0])
    assert await link.request(large) == Done()
    assert asked == [("worker:1", 1, (3 * 2**20 // 4,))] * 4
    assert len(service.seen) == 1


async def test_handlers_may_answer_later(net):
    loop, waiting = asyncio.get_running_loop(), []

    def handler(remote, message):
        match message:
            case Pull():
                waiting.append(loop.create_future())
                return waiting[-1]
            case Inspect():
                return later()
            case CancelSteps():
                return None
        return "no message"

    async def later():
        waiting[0].set_result(Done())
        raise NotFoundError("variable 3")

    _, address, _ = await net.serve(handler=handler)
    link, _ = await net.open(address)
    first = link.submit(pull(1))
    with pytest.raises(NotFoundError, match="variable 3"):
        await link.request(Inspect())
    assert await first == Done()
    assert await link.request(CancelSteps(1)) == Done()
    with pytest.raises(TypeError, match="the handler returned str"):
        await link.request(DeleteVariables(1, []))


@pytest.mark.parametrize("transport", ["tcp", "shm"])
async def test_odd_bodies_both_ways_among_small_requests(net, transport):
    _, address, _ = await net.serve(settings=Settings(transport=transport))
    link, _ = await net.open(address, settings=Settings(transport=transport))
    random = np.random.default_rng(1)
    sizes = [0, 1, 63, 65_536, 1_048_576, 1_048_577, 3_000_001, 7_654_321]
    batches = [
        [random.integers(0, 255, size, np.uint8) for size in random.permutation(sizes)]
        for _ in range(3)
    ]
    replies = []
    for batch in batches:
        replies.append(link.submit(push(*batch)))
        replies += [link.submit(Inspect()) for _ in range(20)]
        replies.append(link.submit(pull(2_000_003)))
    got = await asyncio.gather(*replies)
    echoes = [reply.arrays for reply in got if type(reply).__name__ == "Fetched"]
    for batch, echo in zip(batches, echoes, strict=True):
        assert all(map(np.array_equal, batch, echo))
        assert not any(array.flags.writeable for array in echo)
    pulled = [reply.arrays[0] for reply in got if type(reply).__name__ == "Pulled"]
    for array in pulled:
        assert np.array_equal(array, np.arange(2_000_003, dtype=np.uint8))
        assert array.ctypes.data % 64 == 0


@pytest.mark.parametrize("transport", ["tcp", "shm"])
async def test_large_and_small_arrive_in_the_order_of_sending(net, transport):
    _, address, service = await net.serve(settings=Settings(transport=transport))
    link, _ = await net.open(address, settings=Settings(transport=transport))
    for session in range(40):
        if session % 4 == 0:
            link.notify(push(np.full(2_500_000, session, np.uint8)))
        link.notify(CancelSteps(session))
    await link.request(Inspect())
    order = [
        message.session if isinstance(message, CancelSteps) else message.arrays[0][0]
        for _, message in service.seen[:-1]
    ]
    assert order == sorted(order)
    assert len(order) == 50


@pytest.mark.parametrize("transport", ["tcp", "shm"])
async def test_replies_do_not_wait_for_a_large_push(net, transport):
    _, address, service = await net.serve(settings=Settings(transport=transport))
    link, _ = await net.open(address, settings=Settings(transport=transport))
    other, _ = await net.open(address, index=2, settings=Settings(transport=transport))
    slow = link.submit(push(np.zeros(64 * 2**20, np.uint8)))
    await asyncio.gather(slow, *[other.submit(Inspect()) for _ in range(5)])
    order = [type(message) for _, message in service.seen]
    assert order == [*[Inspect] * 5, Push]  # each body needs several round trips


async def test_a_body_too_large_to_copy_at_once_lies_in_shared_memory(net):
    _, address, service = await net.serve(settings=Settings(transport="shm"))
    link, _ = await net.open(address, settings=Settings(transport="shm"))
    await link.request(push(np.zeros(100_000, np.uint8)))  # from then on it is shared
    before = POOL.statistics()["leases"]
    large = np.tile(np.arange(250, dtype=np.uint8), 300_000)
    replies = [link.submit(push(large, large[:7])), link.submit(Inspect())]
    echo, _ = await asyncio.gather(*replies)
    assert all(map(np.array_equal, echo.arrays, (large, large[:7])))
    assert [type(message) for _, message in service.seen] == [Push, Push, Inspect]
    assert POOL.statistics()["leases"] == before  # no memory received any of it


async def test_memory_of_a_large_body_is_used_again_as_soon_as_it_was_read(net):
    _, address, _ = await net.serve(settings=Settings(transport="shm"))
    link, _ = await net.open(address, settings=Settings(transport="shm"))
    await link.request(pull(100_000))  # from then on it is shared
    places = set()
    for _ in range(3):
        answer = await link.request(pull(3_000_000))
        places.add(answer.arrays[0].ctypes.data)
        del answer
        await link.request(Inspect())
    assert len(places) == 1


async def test_pipelined_requests_beyond_the_high_water_mark(net):
    _, address, _ = await net.serve()
    link, _ = await net.open(address)
    replies = [link.submit(Inspect()) for _ in range(5000)]
    assert len(await asyncio.gather(*replies)) == 5000


async def test_a_deadline_ends_a_request_that_is_not_answered(net):
    never = asyncio.get_running_loop().create_future()
    _, address, _ = await net.serve(handler=lambda remote, message: never)
    link, _ = await net.open(address)
    with pytest.raises(DeadlineExceededError, match="/job:ps/task:0"):
        await link.request(Inspect(), deadline=soon(0.05))
    never.cancel()


async def test_too_many_open_requests_are_refused(net):
    never = asyncio.get_running_loop().create_future()
    _, address, _ = await net.serve(handler=lambda remote, message: never)
    link, _ = await net.open(address, settings=Settings(limits=Limits(requests=2)))
    waiting = [link.submit(Inspect()), link.submit(Inspect())]
    with pytest.raises(BusyError):
        link.submit(Inspect())
    await link.close()
    assert all(isinstance(each.exception(), ClosedError) for each in waiting)
    never.cancel()


@pytest.mark.parametrize("transport", ["tcp"])
async def test_an_array_is_held_until_its_last_byte_has_left(net, transport):
    _, address, _ = await net.serve(settings=Settings(transport=transport))
    link, _ = await net.open(address, settings=Settings(transport=transport))
    array = np.zeros((10_000, 3000), np.uint8)[:, :]
    loop, gone = asyncio.get_running_loop(), asyncio.Event()
    # pyzmq lets go on a thread of its own.
    alive = weakref.ref(array, lambda _: loop.call_soon_threadsafe(gone.set))
    reply = link.submit(push(array, np.zeros(20 * 2**20, np.uint8)))
    del array
    assert alive() is not None  # the window is full, so it waits in our own queue
    await reply
    await gone.wait()
