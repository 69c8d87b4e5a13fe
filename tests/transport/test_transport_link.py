"""Endpoints and links over real sockets."""

import asyncio
import errno
import socket
import weakref

import numpy as np
import pytest
import zmq

from zstrat.config import Limits, Settings, Timeouts
from zstrat.errors import (
    BusyError,
    ClosedError,
    DeadlineExceededError,
    NotFoundError,
    PeerLostError,
    PermissionDeniedError,
    ProtocolError,
    VersionMismatchError,
)
from zstrat.transport import Endpoint, Link, _dial, hello, new_incarnation
from zstrat.transport._monitor import Event, Happening
from zstrat.transport._pool import Pool
from zstrat.transport._socket import new_socket
from zstrat.wire import (
    Again,
    Beat,
    CancelSteps,
    DeleteVariables,
    Done,
    DropResults,
    Goodbye,
    Inspect,
    Pull,
    Push,
    Read,
    Statistics,
    Update,
    decode_header,
    encode,
)


def soon(seconds=10.0):
    return asyncio.get_running_loop().time() + seconds


def push(*arrays):
    return Push(1, -1, 0, 0, [Update(1, 0, 0, len(arrays))], arrays)


def pull(nbytes):
    return Pull(1, [Read(nbytes, -1)])


# ---- messages ----


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

    tcp = Settings(lane="tcp")
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


@pytest.mark.parametrize("lane", ["tcp", "shm"])
async def test_odd_bodies_both_ways_among_small_requests(net, lane):
    _, address, _ = await net.serve(settings=Settings(lane=lane))
    link, _ = await net.open(address, settings=Settings(lane=lane))
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


@pytest.mark.parametrize("lane", ["tcp", "shm"])
async def test_large_and_small_arrive_in_the_order_of_sending(net, lane):
    _, address, service = await net.serve(settings=Settings(lane=lane))
    link, _ = await net.open(address, settings=Settings(lane=lane))
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


@pytest.mark.parametrize("lane", ["tcp", "shm"])
async def test_replies_do_not_wait_for_a_large_push(net, lane):
    _, address, service = await net.serve(settings=Settings(lane=lane))
    link, _ = await net.open(address, settings=Settings(lane=lane))
    slow = link.submit(push(np.zeros(64 * 2**20, np.uint8)))
    other, _ = await net.open(address, index=2, settings=Settings(lane=lane))
    for _ in range(5):
        await other.request(Inspect())
    assert not slow.done() or len(service.seen) == 6
    await slow


async def test_pipelined_requests_beyond_the_high_water_mark(net):
    _, address, _ = await net.serve()
    link, _ = await net.open(address)
    replies = [link.submit(Inspect()) for _ in range(5000)]
    assert len(await asyncio.gather(*replies)) == 5000


async def test_a_deadline_ends_a_request_that_is_not_answered(net):
    never = asyncio.get_running_loop().create_future()
    _, address, _ = await net.serve(handler=lambda remote, message: never)
    link, _ = await net.open(address)
    with pytest.raises(DeadlineExceededError, match=r"/job:ps/task:0 .* Inspect"):
        await link.request(Inspect(), deadline=soon(0.05))
    never.cancel()


async def test_too_many_open_requests_are_refused(net):
    never = asyncio.get_running_loop().create_future()
    _, address, _ = await net.serve(handler=lambda remote, message: never)
    link, _ = await net.open(address, settings=Settings(limits=Limits(requests=2)))
    waiting = [link.submit(Inspect()), link.submit(Inspect())]
    with pytest.raises(BusyError, match="2 requests are open"):
        link.submit(Inspect())
    await link.close()
    assert all(isinstance(each.exception(), ClosedError) for each in waiting)
    never.cancel()


@pytest.mark.parametrize("lane", ["tcp"])
async def test_an_array_is_held_until_its_last_byte_has_left(net, lane):
    _, address, _ = await net.serve(settings=Settings(lane=lane))
    link, _ = await net.open(address, settings=Settings(lane=lane))
    array = np.zeros((10_000, 3000), np.uint8)[:, :]
    loop, gone = asyncio.get_running_loop(), asyncio.Event()
    # pyzmq lets go on a thread of its own.
    alive = weakref.ref(array, lambda _: loop.call_soon_threadsafe(gone.set))
    reply = link.submit(push(array, np.zeros(20 * 2**20, np.uint8)))
    del array
    assert alive() is not None  # the window is full, so it waits in our own queue
    await reply
    await gone.wait()


# ---- memory ----


def test_the_pool_lends_memory_again_when_the_arrays_are_gone():
    pool = Pool(kept=4 * 2**20)
    memory = pool.allocate(2_000_000)
    array = np.ndarray((1000,), np.uint8, memory.toreadonly()[64:1064])
    place = array.ctypes.data - 64
    part = array[5:]
    del memory, array
    assert pool.statistics() == {"leases": 1, "idle_bytes": 0}
    other = pool.allocate(2_000_000)
    del part
    assert pool.statistics()["leases"] == 1
    again = np.ndarray((1,), np.uint8, pool.allocate(1_999_999))
    assert again.ctypes.data == place
    del other, again
    assert pool.statistics() == {"leases": 0, "idle_bytes": 2 * 2_031_616}
    pool.age(100.0)
    pool.age(129.0)
    assert pool.statistics()["idle_bytes"]
    pool.age(131.0)
    assert pool.statistics()["idle_bytes"] == 0


def test_the_pool_keeps_no_more_than_its_bound():
    pool = Pool(kept=2**20)
    del (first := [pool.allocate(2**20) for _ in range(3)])[:]
    assert not first
    assert pool.statistics() == {"leases": 0, "idle_bytes": 2**20}


# ---- loss and return ----


async def test_goodbyes_are_told_at_once_with_the_reason(net):
    endpoint, address, service = await net.serve()
    link, _ = await net.open(address)
    await link.close("the program ended")
    remote, reason = await service.lost.get()
    assert reason == "it left: the program ended"
    assert not remote.alive
    with pytest.raises(PeerLostError, match="worker:1"):
        remote.notify(CancelSteps(1))
    link, caller = await net.open(address)
    waiting = link.submit(DeleteVariables(1, [1]))
    await endpoint.close("the ps was stopped")
    lost = await caller.lost.get()
    assert lost.peer == "/job:ps/task:0"
    assert "the ps was stopped" in lost.reason
    assert lost.left
    assert isinstance(waiting.exception(), PeerLostError | KeyError)
    with pytest.raises(PeerLostError, match="not connected"):
        await link.request(Inspect())
    with pytest.raises(PeerLostError, match="not connected"):
        link.notify(CancelSteps(1))


async def test_a_server_that_restarts_is_lost_and_opened_anew(net):
    endpoint, address, _ = await net.serve()
    link, caller = await net.open(address)
    first = await caller.opened.get()
    await endpoint.close()
    await net.serve(address)
    second = await caller.opened.get()
    assert first.incarnation != second.incarnation
    assert await caller.lost.get()
    assert caller.lost.empty()
    assert await link.request(Inspect())


async def test_a_cut_connection_fails_requests_at_once_and_comes_back(net):
    never = asyncio.get_running_loop().create_future()
    _, address, service = await net.serve(
        handler=lambda r, m: never if isinstance(m, Pull) else Done()
    )
    relay = await net.relay(address)
    link, caller = await net.open(relay.address)
    first = await caller.opened.get()
    waiting = link.submit(pull(1))
    relay.cut()
    with pytest.raises(PeerLostError, match="its connection broke"):
        await waiting
    assert (await caller.opened.get()).incarnation == first.incarnation
    assert await link.request(Inspect()) == Done()
    assert caller.lost.empty()
    assert service.lost.empty()
    never.cancel()


async def test_a_connection_that_libzmq_made_anew_by_itself_is_a_new_one(net):
    never = asyncio.get_running_loop().create_future()
    _, address, _ = await net.serve(
        handler=lambda r, m: never if isinstance(m, Pull) else Done()
    )
    link, caller = await net.open(address)
    first = await caller.opened.get()
    waiting = link.submit(pull(1))
    # What the monitor says at once when the loop was held up meanwhile.
    link._happened(Event(Happening.BROKEN, 0))
    link._happened(Event(Happening.READY, 0))
    async with asyncio.timeout(10):
        with pytest.raises(PeerLostError, match="its connection broke"):
            await waiting
        assert (await caller.opened.get()).incarnation == first.incarnation
    assert await link.request(Inspect()) == Done()
    assert caller.lost.empty()
    never.cancel()


async def test_a_link_waits_until_there_are_descriptors_for_it(net, monkeypatch):
    _, address, _ = await net.serve()
    tries = []

    def scarce(*args):
        tries.append(args)
        if len(tries) < 4:
            raise zmq.ZMQError(errno.EMFILE)
        return new_socket(*args)

    monkeypatch.setattr(_dial, "new_socket", scarce)
    link, _ = net.link(address)
    with pytest.raises(DeadlineExceededError, match="Too many open files"):
        await link.wait_open(soon(0))
    await link.wait_open(soon())
    assert len(tries) == 4


async def test_a_notice_that_fails_after_its_sender_left_is_in_the_log(net, caplog):
    loop = asyncio.get_running_loop()
    later, told = loop.create_future(), loop.create_future()

    def handler(remote, message):
        return later if isinstance(message, CancelSteps) else Done()

    _, address, service = await net.serve(handler=handler)
    link, _ = await net.open(address)
    link.notify(CancelSteps(1))
    await link.request(Inspect())
    await link.close()
    await service.lost.get()
    later.set_exception(ValueError("too late"))
    later.add_done_callback(lambda _: told.set_result(None))
    await told
    assert "a notice of worker:1" in caplog.text
    assert "too late" in caplog.text


async def test_a_cut_connection_that_stays_away_is_a_loss_on_both_sides(net, swift):
    _, address, service = await net.serve(settings=swift)
    relay = await net.relay(address)
    _, caller = await net.open(relay.address, settings=swift)
    await relay.close()
    assert "connection broke" in (await caller.lost.get()).reason
    _, reason = await service.lost.get()
    assert "did not come back" in reason
    assert caller.lost.empty()


async def test_a_half_open_connection_is_lost_by_silence_and_greets_again(net, swift):
    _, address, service = await net.serve(settings=swift)
    relay = await net.relay(address)
    link, caller = await net.open(relay.address, settings=swift)
    await caller.opened.get()
    with relay.held():
        waiting = link.submit(Inspect())
        with pytest.raises(PeerLostError, match="silent"):
            await waiting
        lost = await caller.lost.get()
        assert "silent" in lost.reason
        assert not lost.left
        assert "silent" in (await service.lost.get())[1]
    await caller.opened.get()
    assert await link.request(Inspect())


class Raw:
    """A DEALER that says what the test wants."""

    def __init__(self, address, routing=None):
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.rcvtimeo = 10_000
        if routing is not None:
            self.socket.routing_id = routing
        self.socket.connect(f"tcp://{address}")

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.socket.close()
        self._context.term()

    def say(self, *frames):
        self.socket.send_multipart(frames)

    async def hear(self, kind):
        """The next message of a kind, other kinds thrown away."""
        while True:
            frames = await asyncio.to_thread(self.socket.recv_multipart)
            announced = decode_header(frames[0], Limits())
            if announced.message_kind is kind:
                return announced.build(())


def greeting(job="worker", index=5):
    return encode(hello(job, index, new_incarnation()))[0]


async def test_a_client_that_wakes_up_after_its_loss_is_told_to_greet(net, swift):
    _, address, service = await net.serve(settings=swift)
    with Raw(address) as raw:
        raw.say(greeting())
        remote, reason = await service.lost.get()
        assert remote.name == "worker:5"
        assert "silent" in reason
        raw.say(encode(Beat(False))[0])
        goodbye = await raw.hear(Goodbye)
        assert "expected Hello" in goodbye.reason


async def test_of_two_that_claim_one_task_the_newer_wins(net):
    _, address, service = await net.serve()
    old, told = await net.open(address, index=3)
    new, _ = await net.open(address, index=3)
    remote, reason = await service.lost.get()
    assert remote.name == "worker:3"
    assert "replaced by a newer process" in reason
    assert "replaced" in (await told.lost.get()).reason
    with pytest.raises(ProtocolError, match="was replaced by"):
        await old.wait_open(soon())
    assert await new.request(Inspect())
    assert service.lost.empty()


async def test_several_coordinators_and_links_of_one_process_are_served(net):
    _, address, service = await net.serve()
    same = new_incarnation()
    links = [
        (await net.open(address, job="chief", index=0, incarnation=which))[0]
        for which in (same, same, new_incarnation())
    ]
    for link in links:
        assert await link.request(Inspect())
    assert service.lost.empty()


# ---- refusals ----


async def test_another_protocol_is_refused_at_once(net):
    _, address, _ = await net.serve()
    link, _ = net.link(address, protocol=77)
    with pytest.raises(VersionMismatchError, match="speaks protocol 77"):
        await link.wait_open(soon())
    with pytest.raises(VersionMismatchError):
        await link.wait_open(soon())


async def test_the_wrong_task_is_refused_at_once(net):
    _, address, _ = await net.serve(job="worker")
    link, _ = net.link(address, expect=("ps", 2))
    with pytest.raises(ProtocolError, match=r"expected ps:2, but worker:0"):
        await link.wait_open(soon())


async def test_a_task_that_does_not_answer_is_named(net):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        link, _ = net.link(address)
        with pytest.raises(
            DeadlineExceededError, match=rf"/job:ps/task:0 at {address}"
        ):
            await link.wait_open(soon(0.1))


async def test_a_port_that_is_taken_is_named(net):
    _, address, _ = await net.serve()
    with pytest.raises(OSError, match=rf"ps:0 cannot bind {address}"):
        await net.serve(address)


@pytest.mark.parametrize(
    "address", ["", "host", "host:x", ":80", "udp://h:1", "h:70000", "ipc://relative"]
)
async def test_no_address(net, address):
    with pytest.raises(ValueError, match="address"):
        await net.serve(address)
    with pytest.raises(ValueError, match="address"):
        net.link(address)


async def test_garbage_bytes_are_counted_and_the_endpoint_goes_on(net, swift):
    endpoint, address, _ = await net.serve(settings=swift)
    host, port = address.split(":")
    for garbage in (
        b"GET / HTTP/1.1\r\n\r\n",
        bytes(range(256)) * 50,
        b"\x01\x00" * 99,
    ):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(garbage)
        await writer.drain()
        writer.close()
        await writer.wait_closed()
        del reader
    with Raw(address) as raw, Raw(address, b"I-am-worker-0") as chosen:
        raw.say(b"\xc1 no msgpack")
        await raw.hear(Goodbye)
        raw.say(b"x" * 300_000)
        await raw.hear(Goodbye)
        raw.say(*[b""] * 5000)
        await raw.hear(Goodbye)
        chosen.say(greeting())
        link, _ = await net.open(address)
        assert await link.request(Inspect())
        counts = endpoint.statistics()["counts"]
        assert counts["refused"] >= 4
        assert counts["greetings"] == 1


async def test_an_oversized_frame_drops_its_sender_alone(net, swift):
    _, address, service = await net.serve(settings=swift)
    link, _ = await net.open(address)
    with Raw(address) as raw:
        raw.say(greeting())
        await raw.hear(type(hello("ps", 0, 1)))
        raw.say(bytes(5 * 2**20))
        _, reason = await service.lost.get()
        assert "did not come back" in reason
    assert await link.request(Inspect())


async def test_callbacks_that_raise_stop_nothing(net, caplog):
    def broken(_):
        raise RuntimeError("a bug of the caller")

    _, address, _ = await net.serve()
    link, _ = await net.open(address, on_notice=broken, on_open=broken)
    link.notify(CancelSteps(1))
    assert await link.request(Inspect())
    assert await link.request(pull(3_000_000))
    assert caplog.text.count("RuntimeError: a bug of the caller") == 2


async def test_what_cannot_be_sent_raises_at_once(net):
    _, address, _ = await net.serve()
    link, _ = await net.open(address)
    with pytest.raises(TypeError, match="object"):
        link.submit(push(np.array([object()])))
    assert await link.request(Inspect())


async def test_a_closed_link_says_so(net):
    _, address, _ = await net.serve()
    link, _ = await net.open(address)
    await link.close()
    await link.close()
    with pytest.raises(ClosedError):
        link.submit(Inspect())
    with pytest.raises(ClosedError):
        link.notify(CancelSteps(1))
    with pytest.raises(ClosedError):
        await link.wait_open(soon())


async def test_a_link_that_was_not_started_says_so():
    link = Link("h:1", hello("chief", 0, 1), name="ps", settings=Settings())
    with pytest.raises(RuntimeError, match="not started"):
        link.submit(Inspect())
    with pytest.raises(ValueError, match="port above 0"):
        Link("h:0", hello("chief", 0, 1), name="ps", settings=Settings())
    await link.close()


async def test_closing_wakes_who_waits(net):
    link, _ = net.link("127.0.0.1:1")
    waiting = asyncio.ensure_future(link.wait_open(soon(100)))
    await asyncio.sleep(0)
    await link.close()
    with pytest.raises(ClosedError):
        await waiting


# ---- where it binds ----


@pytest.mark.parametrize("address", ["0.0.0.0:0", "*:0", "tcp://[::]:0"])
async def test_other_machines_are_not_served_without_keys(net, address):
    with pytest.raises(PermissionDeniedError, match="zstrat keygen"):
        await net.serve(address)


async def test_insecure_serves_other_machines(net):
    _, address, _ = await net.serve("0.0.0.0:0", settings=Settings(insecure=True))
    link, _ = await net.open(address.replace("0.0.0.0", "127.0.0.1"))
    assert await link.request(Inspect())


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "tcp://127.0.0.1"])
async def test_this_machine_is_served(net, host):
    _, address, _ = await net.serve(f"{host}:0")
    link, _ = await net.open(address)
    assert link.is_open


async def test_a_socket_file_carries_bodies_too(net, tmp_path):
    tmp_path.chmod(0o700)
    _, address, _ = await net.serve(f"ipc://{tmp_path}/ps0")
    assert address == f"ipc://{tmp_path}/ps0"
    link, _ = await net.open(address)
    reply = await link.request(pull(5_000_001))
    assert np.array_equal(reply.arrays[0], np.arange(5_000_001, dtype=np.uint8))


async def test_a_socket_file_in_use_is_refused_and_a_stale_one_taken(net, tmp_path):
    tmp_path.chmod(0o700)
    endpoint, address, _ = await net.serve(f"ipc://{tmp_path}/ps0")
    with pytest.raises(OSError, match="another process listens there"):
        await net.serve(address)
    await endpoint.close()
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(f"{tmp_path}/ps1")
    await net.serve(f"ipc://{tmp_path}/ps1")


async def test_a_socket_file_in_an_open_directory_is_refused(net, tmp_path):
    tmp_path.chmod(0o755)
    with pytest.raises(PermissionError, match="0700"):
        await net.serve(f"ipc://{tmp_path}/ps0")
    with pytest.raises(FileNotFoundError, match="create it"):
        await net.serve(f"ipc://{tmp_path}/none/ps0")


# ---- the end ----


@pytest.mark.parametrize("lane", ["tcp", "shm"])
async def test_nothing_is_left_after_close(net, lane, held):
    async def round_trip():
        endpoint, address, _ = await net.serve(settings=Settings(lane=lane))
        link, _ = await net.open(address, settings=Settings(lane=lane))
        await link.request(push(np.zeros(2_000_000, np.uint8)))
        waiting = link.submit(Inspect())
        await link.close()
        await endpoint.close()
        assert waiting.done()
        waiting.exception()

    await round_trip()  # pyzmq starts its collector thread with the first large array
    before = held()
    for _ in range(3):
        await round_trip()
    assert held() == before
    assert len(asyncio.all_tasks()) == 1


async def test_closing_an_endpoint_cancels_its_handlers(net):
    began, ended = asyncio.Event(), asyncio.Event()

    async def wait():
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    endpoint, address, _ = await net.serve(handler=lambda remote, message: wait())
    link, _ = await net.open(address)
    waiting = link.submit(Inspect())
    await began.wait()
    await endpoint.close()
    assert ended.is_set()
    with pytest.raises(PeerLostError):
        await waiting


async def test_an_endpoint_is_bound_once(net):
    endpoint, _, _ = await net.serve()
    with pytest.raises(ClosedError):
        await endpoint.bind("127.0.0.1:0")
    unbound = Endpoint(
        hello("ps", 0, new_incarnation()), print, settings=Settings(timeouts=Timeouts())
    )
    await unbound.close()
