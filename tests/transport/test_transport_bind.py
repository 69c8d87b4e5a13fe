"""Where an endpoint binds: not where others could command it."""

import asyncio
import errno
import socket

import numpy as np
import pytest
import zmq
from transport_talk import pull

from zstrat.config import Settings, Timeouts
from zstrat.errors import ClosedError, PermissionDeniedError
from zstrat.transport import (
    Endpoint,
    ZeroMQSockets,
    _endpoint,
    hello,
    new_incarnation,
    reached_as,
)
from zstrat.wire import Inspect


def new_endpoint(**options):
    me = hello("ps", 0, new_incarnation())
    return Endpoint(me, lambda *_: None, settings=Settings(), **options)


@pytest.mark.parametrize("address", ["0.0.0.0:0", "*:0", "tcp://[::]:0"])
async def test_other_machines_are_not_served_without_keys(net, address):
    with pytest.raises(PermissionDeniedError, match="DIR"):
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


async def test_a_file_that_is_no_socket_stays(net, tmp_path):
    tmp_path.chmod(0o700)
    (tmp_path / "data").write_text("mine")
    (tmp_path / "link").symlink_to("data")
    (tmp_path / "folder").mkdir()
    for name in ("data", "link", "folder"):
        with pytest.raises(FileExistsError):
            await net.serve(f"ipc://{tmp_path}/{name}")
    assert (tmp_path / "data").read_text() == "mine"


async def test_a_socket_file_in_an_open_directory_is_refused(net, tmp_path):
    tmp_path.chmod(0o755)
    with pytest.raises(PermissionError, match="0700"):
        await net.serve(f"ipc://{tmp_path}/ps0")
    with pytest.raises(FileNotFoundError):
        await net.serve(f"ipc://{tmp_path}/none/ps0")


@pytest.mark.parametrize(
    ("bound", "known", "reached"),
    [
        ("tcp://0.0.0.0:9", "ps-0.cluster:5", "tcp://ps-0.cluster:9"),
        ("tcp://[::]:9", "[fd00::1]:5", "tcp://[fd00::1]:9"),
        ("tcp://*:9", "tcp://10.0.0.3:5", "tcp://10.0.0.3:9"),
        ("tcp://10.0.0.4:9", "10.0.0.3:5", "tcp://10.0.0.4:9"),
        ("tcp://eth0:9", "10.0.0.3:5", "tcp://eth0:9"),
        ("ipc:///run/a", "10.0.0.3:5", "ipc:///run/a"),
    ],
)
def test_another_endpoint_of_a_process_is_reached_where_it_is(bound, known, reached):
    assert reached_as(bound, known) == reached


async def test_connections_are_watched_from_the_first_one_on():
    class Sockets(ZeroMQSockets):
        def monitor(self, socket, *args):
            self.was_bound = socket.get(zmq.LAST_ENDPOINT).strip(b"\0") != b""
            return ZeroMQSockets.monitor(socket, *args)

    sockets = Sockets()
    endpoint = new_endpoint(sockets=sockets)
    address = await endpoint.bind("127.0.0.1:0")
    assert not sockets.was_bound
    with pytest.raises(OSError, match="cannot bind"):
        await new_endpoint(sockets=sockets).bind(address)
    await endpoint.close()


async def test_an_endpoint_that_is_closed_while_its_name_is_looked_up(monkeypatch):
    asked, answered = asyncio.Event(), asyncio.Event()

    async def bindable(address, task):
        asked.set()
        await answered.wait()
        return address

    monkeypatch.setattr(_endpoint, "bindable", bindable)
    endpoint = new_endpoint()
    binding = asyncio.ensure_future(endpoint.bind("127.0.0.1:0"))
    await asked.wait()
    await endpoint.close()
    answered.set()
    with pytest.raises(ClosedError):
        await binding


async def test_a_process_without_descriptors_says_so_and_keeps_nothing():
    class Sockets(ZeroMQSockets):
        def context(self):
            self.made = ZeroMQSockets.context()
            return self.made

        def monitor(self, *_):
            raise zmq.ZMQError(errno.EMFILE)

    sockets = Sockets()
    with pytest.raises(OSError, match="ps:0 cannot bind") as raised:
        await new_endpoint(sockets=sockets).bind("127.0.0.1:0")
    assert raised.value.errno == errno.EMFILE
    assert sockets.made.closed


async def test_an_option_that_a_socket_refuses_is_an_error_and_no_hang():
    settings = Settings(Timeouts(handshake=3e6))  # more milliseconds than an int has
    me = hello("ps", 0, new_incarnation())
    endpoint = Endpoint(me, lambda *_: None, settings=settings)
    with pytest.raises(OverflowError):
        await asyncio.wait_for(endpoint.bind("127.0.0.1:0"), 10)
