"""Time and breaks: when a peer is asked, given up, or waited for."""

import os
import signal
import socket
import subprocess
import sys

import pytest
from transport_pair import Carrier, flow, hello, kinds, new_peer
from transport_talk import soon

from zstrat.config import Settings, Timeouts
from zstrat.errors import PeerLostError
from zstrat.testing import Relay
from zstrat.transport import Link, Sending, ZeroMQSockets, new_incarnation
from zstrat.transport import hello as own_hello
from zstrat.wire import Beat, CancelSteps, Done, Inspect, encode
from zstrat.wire.connection import Closed


def test_a_quiet_connection_beats_and_a_busy_one_does_not(pair):
    pair.client.tick(0.9)
    assert pair.client.transmit(0.9) is None
    pair.client.tick(1.0)
    assert kinds(pair.client.transmit(1.0)) is Beat
    pair.client.notify(CancelSteps(1))
    pair.client.transmit(1.8)
    pair.client.tick(2.4)
    assert pair.client.transmit(2.4) is None


def tick_until(peer, start, end, step=0.5):
    now, orders = start, []
    while now < end:
        now += step
        orders += peer.tick(now)
    return orders


def test_silence_loses_the_peer_once_with_all_its_requests(pair):
    pair.client.request(Inspect(), "a", 99.0)
    failed, closed = tick_until(pair.client, 0.0, 20.0)
    assert isinstance(failed.error, PeerLostError)
    assert closed == Closed("it was silent for 5.5 s")
    assert pair.client.received([encode(Beat(False))[0]], 21.0) == ()


def test_a_process_that_slept_does_not_blame_its_peer(pair):
    tick_until(pair.client, 0.0, 3.0)
    assert pair.client.tick(60.0) == []
    assert [type(each) for each in tick_until(pair.client, 60.0, 80.0)] == [Closed]


def test_a_wanted_beat_is_answered(pair):
    pair.server.received([encode(Beat(True))[0]], 0.0)
    assert kinds(pair.server.transmit(0.0)) is Beat


def test_a_broken_connection_fails_the_initiators_requests_at_once(pair):
    pair.client.request(Inspect(), "a", 99.0)
    failed, closed = pair.client.disconnected("its connection broke", 1.0)
    assert isinstance(failed.error, PeerLostError)
    assert closed.broken


def test_an_acceptor_waits_for_a_peer_that_broke_off(pair):
    assert pair.server.disconnected("", 1.0) == ()
    assert pair.server.tick(3.0) == []
    pair.server.received([encode(Beat(False))[0]], 3.0)  # the alarm was false
    assert pair.server.tick(3.5) == []
    pair.server.disconnected("", 4.0)
    (closed,) = tick_until(pair.server, 4.0, 9.0)
    assert "did not come back within 2 s" in closed.reason


def test_who_does_not_greet_in_time_is_given_up():
    server = new_peer(hello("ps", 0), False)
    (closed,) = tick_until(server, 0.0, 6.0)
    assert "did not greet" in closed.reason


def test_what_was_heard_after_a_sleep_is_no_credit_for_later(pair):
    tick_until(pair.client, 0.0, 3.0)
    pair.client.received([encode(Beat(False))[0]], 600.0)  # read before the timer rang
    assert pair.client.tick(600.0) == []
    (closed,) = tick_until(pair.client, 600.0, 610.0)
    assert closed.reason == "it was silent for 5.5 s"


def test_a_process_that_slept_gives_who_broke_off_time_to_return(pair):
    tick_until(pair.server, 0.0, 3.0)
    pair.server.disconnected("", 3.0)
    assert pair.server.tick(600.0) == []  # the return may be there, and be read next
    (closed,) = tick_until(pair.server, 600.0, 610.0)
    assert "did not come back within 2 s" in closed.reason


def test_a_peer_is_heard_until_it_is_late_or_its_connection_breaks(pair):
    assert pair.server.is_heard
    assert tick_until(pair.server, 0.0, 1.5) == []
    assert pair.server.is_heard
    pair.server.tick(2.0)  # no two beats of a second each are missed for nothing
    assert not pair.server.is_heard
    pair.server.received([encode(Beat(False))[0]], 2.0)
    assert pair.server.is_heard
    pair.server.disconnected("", 2.0)
    assert not pair.server.is_heard


def test_a_process_that_runs_late_takes_longer_to_judge_its_peer(pair):
    """Of its own time counts no more than it had between two looks, if these had been
    in time."""
    orders = tick_until(pair.client, 0.0, 10.0, step=1.0)  # each half a second late
    assert orders == []
    (closed,) = tick_until(pair.client, 10.0, 14.0, step=1.0)
    assert "silent" in closed.reason


@pytest.fixture
def neighbour():
    """A client on the machine of its server, the process 43, and its connection."""
    carrier = Carrier()
    client = new_peer(hello("worker", 1, pid=43), True)
    server = new_peer(hello("ps", 0), False, carrier=carrier)
    (greeted,) = flow(client, server)
    server.accept(greeted.hello, 0.0)
    return server, carrier


def test_a_process_of_this_machine_that_runs_has_longer(neighbour):
    server, carrier = neighbour
    carrier.holder = 43
    assert tick_until(server, 0.0, 30.0) == []
    assert carrier.asked == 5, "once in the timeout of five seconds"
    (closed,) = tick_until(server, 30.0, 40.0)
    assert closed.reason == "it was silent for 30.5 s"


def test_a_process_of_this_machine_that_stops_has_not(neighbour):
    server, carrier = neighbour
    carrier.holder = 43
    assert tick_until(server, 0.0, 10.0) == []
    carrier.holder = None
    (closed,) = tick_until(server, 10.0, 20.0)
    assert closed.reason == "it was silent for 10.5 s"


def test_a_process_elsewhere_has_not():
    carrier = Carrier()
    carrier.holder = 43
    client = new_peer(hello("worker", 1, host="another", pid=43), True)
    server = new_peer(hello("ps", 0), False, carrier=carrier)
    (greeted,) = flow(client, server)
    server.accept(greeted.hello, 0.0)
    (closed,) = tick_until(server, 0.0, 10.0)
    assert closed.reason == "it was silent for 5.5 s"


TALKER = """
import socket, sys
line = socket.socket(getattr(socket, sys.argv[1]))
where = sys.argv[2]
line.connect(where if len(sys.argv) == 3 else (where, int(sys.argv[3])))
sys.stdin.read()
"""


@pytest.fixture(params=["AF_INET", "AF_INET6", "AF_UNIX"])
def listener(request, tmp_path):
    kind = getattr(socket, request.param)
    with socket.socket(kind) as listener:
        where = {"AF_INET": ("127.0.0.1", 0), "AF_INET6": ("::1", 0)}
        listener.bind(where.get(request.param, str(tmp_path / "s")))
        listener.listen()
        yield listener


def connected(family, *where):
    command = [sys.executable, "-c", TALKER, family.name, *map(str, where)]
    return subprocess.Popen(command, stdin=subprocess.PIPE)


def test_who_has_the_other_end_of_a_connection_is_known(listener):
    name = listener.getsockname()
    where = name if isinstance(name, str) else name[:2]
    arguments = [where] if isinstance(where, str) else where
    with connected(listener.family, *arguments) as process:
        line, _ = listener.accept()
        carrier = ZeroMQSockets().accepted(line.fileno())
        assert carrier.is_held_by(process.pid)
        assert not carrier.is_held_by(os.getppid())
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        assert not carrier.is_held_by(process.pid)
        process.kill()
    assert not carrier.is_held_by(process.pid)
    line.close()


def test_who_is_behind_a_relay_has_not_the_other_end():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with Relay(f"127.0.0.1:{port}") as relay:
            where = relay.address.split(":")
            with connected(socket.AF_INET, *where) as process:
                line, _ = listener.accept()
                carrier = ZeroMQSockets().accepted(line.fileno())
                assert not carrier.is_held_by(process.pid)
                process.kill()
                line.close()


class OnlyDrained:
    """The pump of a loop that comes to its timers alone: nobody looks what is there."""

    def __init__(self, socket, receive, header=0):
        self._socket, self._receive = socket, receive

    def send(self, frames, to=()):
        self._socket.send_multipart([*to, *map(bytes, frames)])
        return Sending.DONE

    def drain(self):
        while not self._socket.closed and self._socket.poll(0):
            self._receive(self._socket.recv_multipart(copy=False))

    def close(self, linger):
        self._socket.close(linger=0)


class Busy(ZeroMQSockets):
    pump = OnlyDrained


async def test_what_has_arrived_is_read_before_a_task_is_judged(net):
    _, address, _ = await net.serve()
    settings = Settings(timeouts=Timeouts(beat=0.1, liveness=1.0))
    me = own_hello("worker", 1, new_incarnation())
    link = Link(address, me, name="ps", settings=settings, sockets=Busy())
    link.start()
    await link.wait_open(soon())
    await link.close()


HANGING = """
import asyncio, ctypes, sys
from zstrat.config import Settings
from zstrat.transport import Endpoint, hello, new_incarnation

def hang(remote, message):
    ctypes.PyDLL(None).sleep(3)  # and no other thread of Python runs meanwhile

async def main():
    me = hello("ps", 0, new_incarnation())
    endpoint = Endpoint(me, hang, settings=Settings())
    print(await endpoint.bind("127.0.0.1:0"), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await endpoint.close()

asyncio.run(main())
"""


@pytest.fixture
def hanging():
    """The address of a task in another process, which hangs when it is asked."""
    command = [sys.executable, "-c", HANGING]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as process:
        yield process.stdout.readline().strip()
        process.stdin.close()


async def test_a_neighbour_that_is_silent_for_three_times_as_long_is_not_lost(hanging):
    settings = Settings(timeouts=Timeouts(beat=0.1, liveness=1.0))
    me = own_hello("worker", 1, new_incarnation())
    link = Link(hanging, me, name="ps", settings=settings)
    link.start()
    await link.wait_open(soon())
    assert await link.request(Inspect(), deadline=soon(60)) == Done()
    await link.close()
