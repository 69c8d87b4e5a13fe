"""Data connections: who may connect, what strangers reach, and how they end."""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import subprocess
import sys
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace

import pytest
import zmq

from zstrat.config import Settings, Timeouts
from zstrat.errors import PermissionDeniedError
from zstrat.transport import DataConnections, Portal, generate_keys
from zstrat.transport import Security as Keys

SETTINGS = Settings(timeouts=Timeouts(handshake=2.0))
HERE = "127.0.0.1:1"
ENDS = zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
ENDS |= zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH


@pytest.fixture(params=["plain", "curve"])
def keys(request, tmp_path):
    if request.param == "plain":
        return None
    generate_keys(tmp_path / "keys", [("worker", None)])
    return Keys.load(tmp_path / "keys", "worker")


@pytest.fixture
def portal():
    portal = Portal("data connections")
    yield portal
    portal.close()


@pytest.fixture
def pair(portal, keys):
    """Two members that know each other, not yet connected."""
    with two_members(portal, keys) as both:
        yield both


@contextmanager
def two_members(portal, keys):
    with ExitStack() as stack:
        both = []
        for member in (0, 1):
            bound = DataConnections.bound(member, 2, HERE, SETTINGS, keys)
            each = portal.run(bound, 30, "binding")
            stack.callback(on_loop, portal, each.close, 0.0)
            both.append(each)
        for member, each in enumerate(both):
            each.admit(1 - member, both[1 - member].credential)
        yield both


def on_loop(portal, function, *args):
    async def call():
        return function(*args)

    return portal.run(call(), 30, function.__name__)


def connect(pair):
    for member, each in enumerate(pair):
        there = pair[1 - member]
        asyncio.run(
            each.connect(1 - member, f"127.0.0.1:{there.port}", there.credential)
        )
    for member, each in enumerate(pair):
        assert each.send(1 - member, b"hello", memoryview(b"you"))
    for member, each in enumerate(pair):
        assert received(each) == (1 - member, b"hello", b"you")


def received(connections):
    for _ in range(30):
        if (message := connections.receive()) is not None:
            return message
        connections.wait((), 1.0)
    raise AssertionError("nothing has come")


def test_members_hear_each_other_and_none_is_heard_before_it_is_known(pair) -> None:
    connect(pair)
    for number in range(100):
        data = memoryview(bytes([number]) * number * 10_000)
        assert pair[0].send(1, b"%d" % number, data)
        assert received(pair[1]) == (0, b"%d" % number, data)


def has_changed(connections, full=()):
    return any(connections.wait(full, 1.0) for _ in range(30))


def stranger_options(pair, keys):
    """How a stranger may try: without a word, with a wrong one, and as who knows one
    half of what has to be known."""
    public, secret = zmq.curve_keypair()
    other, _ = zmq.curve_keypair()
    yield {}
    yield {"plain_username": b"member", "plain_password": b"guess"}
    yield {
        "curve_serverkey": other,
        "curve_publickey": public,
        "curve_secretkey": secret,
    }
    if keys is not None:  # the password of a member; its key, without his own
        yield {"plain_username": b"member", "plain_password": pair[1].credential}
        yield {
            "curve_serverkey": pair[0].credential,
            "curve_publickey": public,
            "curve_secretkey": secret,
        }


def test_nothing_of_a_stranger_arrives(pair, keys) -> None:
    with zmq.Context() as context:
        for options in stranger_options(pair, keys):
            line = context.socket(zmq.DEALER)
            line.linger, line.routing_id, line.reconnect_ivl = 0, b"1", -1
            for name, value in options.items():
                setattr(line, name, value)
            ended = line.get_monitor_socket(ENDS)
            line.connect(f"tcp://127.0.0.1:{pair[0].port}")
            with suppress(zmq.Again):  # it was refused already
                line.send_multipart([b"hello", b"I am 1"], zmq.NOBLOCK)
            assert ended.poll(30_000), options
            line.disable_monitor()
            ended.close()
            line.close()
            assert pair[0].receive() is None, options
        connect(pair)  # they have taken nobody's place


@pytest.mark.parametrize("mechanism", [b"NULL", b"PLAIN", b"CURVE"])
@pytest.mark.parametrize("flags", [b"\x03", b"\x06"], ids=["parts", "commands"])
def test_a_message_without_end_is_cut_off_at_its_begin(pair, mechanism, flags) -> None:
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + mechanism.ljust(20, b"\0")
    part = flags + struct.pack(">Q", 2**19) + bytes(2**19)
    sent = 0
    with socket.create_connection(("127.0.0.1", pair[0].port)) as line:
        line.settimeout(30)
        line.sendall(greeting.ljust(64, b"\0"))
        with suppress(ConnectionError):
            while sent < 2**26:
                line.sendall(part)
                sent += len(part)
    assert sent < 2**26  # what the buffers of the system take, and no more
    connect(pair)


def test_garbage_disturbs_nobody(pair) -> None:
    with socket.create_connection(("127.0.0.1", pair[0].port)) as line:
        line.settimeout(30)
        with suppress(ConnectionError):
            line.sendall(os.urandom(2**22))
    connect(pair)


def test_when_all_are_here_the_port_is_shut_and_they_go_on(portal, pair) -> None:
    connect(pair)
    for each in pair:
        on_loop(portal, each.shut)
        with socket.socket() as line:
            line.settimeout(0.2)
            with pytest.raises(OSError, match="timed out"):
                line.connect(("127.0.0.1", each.port))
    assert pair[0].send(1, b"more", memoryview(b"of it"))
    assert received(pair[1]) == (0, b"more", b"of it")


def test_who_pretends_to_be_another_member_is_not_heard(portal, keys, pair) -> None:
    with two_members(portal, keys) as (_, third):
        pair[0].admit(2, third.credential)
        there = f"127.0.0.1:{pair[0].port}"
        asyncio.run(third.connect(0, there, pair[0].credential))
        assert third.send(0, b"hello", memoryview(b"I am 1"))  # as its routing id says
        assert has_changed(pair[0])
        assert pair[0].receive() is None


def test_the_end_of_a_connection_is_found(portal, pair) -> None:
    connect(pair)
    assert pair[0].ended([0, 1]) == []
    assert pair[1].send(0, b"last", memoryview(b"words"))
    on_loop(portal, pair[1].close)
    assert received(pair[0]) == (1, b"last", b"words")
    for _ in range(30):
        assert pair[0].receive() is None
        if pair[0].ended([0, 1]):
            break
        pair[0].wait((), 1.0)
    assert pair[0].ended([0, 1]) == [1]


def test_who_does_not_read_is_sent_little(pair) -> None:
    connect(pair)
    data = memoryview(bytes(2**20))
    sent = 0
    while sent < 1000 and pair[0].send(1, b"%d" % sent, data):
        sent += 1
    assert 1 <= sent < 200
    for number in range(sent):
        assert received(pair[1]) == (0, b"%d" % number, data)
    assert has_changed(pair[0], [1])  # there is room again
    assert pair[0].send(1, b"more", data)


def test_a_wait_is_ended_from_anywhere_and_after_the_close_nothing_happens(
    portal, pair
) -> None:
    pair[0].wake()
    assert has_changed(pair[0])
    on_loop(portal, pair[0].close)
    pair[0].wake()
    on_loop(portal, pair[0].close)


def test_nothing_is_left_open(portal, keys) -> None:
    def descriptors():
        return len(os.listdir("/proc/self/fd"))

    with two_members(portal, keys) as pair:
        connect(pair)
    before = descriptors()
    for _ in range(3):
        with two_members(portal, keys) as pair:
            connect(pair)
            for each in pair:
                on_loop(portal, each.shut)
    assert descriptors() <= before


def test_an_address_of_the_network_needs_keys_or_insecure(portal) -> None:
    bound = DataConnections.bound(0, 2, "0.0.0.0:1", SETTINGS, None)
    with pytest.raises(PermissionDeniedError, match="DIR"):
        portal.run(bound, 30, "binding")


def test_an_address_of_another_machine_cannot_be_bound(portal) -> None:
    settings = replace(SETTINGS, insecure=True)
    bound = DataConnections.bound(0, 2, "192.0.2.1:1", settings, None)
    with pytest.raises(OSError, match=r"\b192\.0\.2\.1\b"):
        portal.run(bound, 30, "binding")


def test_what_was_sent_keeps_its_memory_until_it_has_left() -> None:
    """pyzmq frees it when its collector ends, and who registers first ends last."""
    program = (
        "import atexit; names, register = [], atexit.register\n"
        "def note(function, *args, **kwargs):\n"
        "    names.append(function.__qualname__)\n"
        "    return register(function, *args, **kwargs)\n"
        "atexit.register = note\n"
        "from zstrat.transport import DataConnections, Portal\n"
        "print(*names)"
    )
    said = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout.split()
    collector = said.index("GarbageCollector._atexit")
    assert collector < said.index("_close_all")
    assert collector < said.index("close_portals")
