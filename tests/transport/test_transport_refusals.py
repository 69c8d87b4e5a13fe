"""What links and endpoints refuse, with words, and go on."""

import asyncio
import socket

import numpy as np
import pytest
from transport_talk import Raw, greeting, pull, push, soon

from zstrat.config import Settings
from zstrat.errors import (
    ClosedError,
    DeadlineExceededError,
    ProtocolError,
    VersionMismatchError,
)
from zstrat.transport import Link, hello
from zstrat.wire import CancelSteps, Goodbye, Inspect


async def test_another_protocol_is_refused_at_once(net):
    _, address, _ = await net.serve()
    link, _ = net.link(address, protocol=77)
    with pytest.raises(VersionMismatchError):
        await link.wait_open(soon())
    with pytest.raises(VersionMismatchError):
        await link.wait_open(soon())


async def test_the_wrong_task_is_refused_at_once(net):
    _, address, _ = await net.serve(job="worker")
    link, _ = net.link(address, expect=("ps", 2))
    with pytest.raises(ProtocolError, match=r"ps:2.*worker:0"):
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


async def test_garbage_bytes_are_counted_and_the_endpoint_goes_on(net, brittle):
    endpoint, address, _ = await net.serve(settings=brittle)
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
    for garbage in ([b"\xc1 no msgpack"], [b"x" * 300_000], [b""] * 5000):
        with Raw(address) as raw:
            raw.say(*garbage)
            await raw.hear(Goodbye)
    with Raw(address, b"I-am-worker-0") as chosen:
        chosen.say(greeting())
        link, _ = await net.open(address)
        assert await link.request(Inspect())
        counts = endpoint.statistics()["counts"]
        assert counts["refused"] >= 4
        assert counts["greetings"] == 1


async def test_a_probe_of_the_port_is_none_that_was_refused(net, swift):
    """As load balancers and engines look whether somebody listens."""
    endpoint, address, _ = await net.serve(settings=swift)
    host, port = address.split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    writer.close()
    await writer.wait_closed()
    while not endpoint.statistics()["counts"]["probes"]:
        await net.open(address)
    counts = endpoint.statistics()["counts"]
    assert (counts["probes"], counts["refused"]) == (1, 0)


async def test_an_oversized_frame_drops_its_sender_alone(net, brittle):
    _, address, service = await net.serve(settings=brittle)
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
    with pytest.raises(TypeError, match="float8_e3m4"):
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
