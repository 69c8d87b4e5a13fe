"""Hostile peers, as context managers: they speak ZeroMQ's protocol by themselves, or
stand between an honest socket and a task, and obey no rule that is not forced on them.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from dataclasses import dataclass, field

import zmq

from zstrat.config import Limits
from zstrat.transport import Security
from zstrat.wire import PROTOCOL, Hello, decode, encode

_MORE, _LONG, _COMMAND = 1, 2, 4
_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)
_INCARNATIONS = iter(range(1, 2**40))


def frame(body, flags=0):
    """One frame of ZMTP 3."""
    if len(body) < 256:
        return bytes([flags, len(body)]) + body
    return bytes([flags | _LONG]) + struct.pack(">Q", len(body)) + body


def framed(message, number=0):
    """A message of ours as it is encoded on the wire."""
    header, raws = encode(message, number)
    parts = [header, *(raw.tobytes() for raw in raws)]
    return b"".join([frame(part, _MORE) for part in parts[:-1]] + [frame(parts[-1])])


def _property(name, value):
    return bytes([len(name)]) + name + struct.pack(">I", len(value)) + value


READY = frame(
    b"\x05READY" + _property(b"Socket-Type", b"DEALER") + _property(b"Identity", b""),
    _COMMAND,
)


def claim(job, index=0, **changes):
    """What a peer says that it is; each time another incarnation."""
    fields = {
        "protocol": PROTOCOL,
        "job": job,
        "index": index,
        "incarnation": next(_INCARNATIONS),
        "host": "elsewhere",
        "pid": 1,
        "versions": {},
    }
    return Hello(**{**fields, **changes})


def dial(address):
    """A TCP connection that says nothing."""
    host, port = address.rsplit(":", 1)
    line = socket.create_connection((host, int(port)), timeout=30)
    line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return line


def reset(line):
    """Ends a connection as a machine does that knows nothing of it."""
    with contextlib.suppress(OSError):
        line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    line.close()


@dataclass
class Raw:
    """A peer without keys: bytes in, frames out."""

    line: socket.socket
    sent: int = 0
    _received: bytearray = field(default_factory=bytearray)

    def send(self, data):
        self.line.sendall(data)

    def force(self, data, patience=0.2):
        """Sends what the other side takes of it before it makes us wait so long."""
        self.line.settimeout(patience)
        with contextlib.suppress(OSError):
            self.line.sendall(data)
        self.line.settimeout(30)

    def ask(self, message):
        """The bytes of a request, with the next number."""
        self.sent += 1
        return framed(message, 2 * self.sent + 1)

    def hear(self):
        """The frames of the next message.

        Raises:
            ConnectionError: The other side has hung up.
        """
        frames = []
        while True:
            flags = self._take(1)[0]
            size = self._take(8 if flags & _LONG else 1)
            body = self._take(int.from_bytes(size, "big"))
            if flags & _COMMAND:
                continue
            frames.append(body)
            if not flags & _MORE:
                return frames

    def answer(self):
        """The next message that is no beat and the like."""
        while True:
            header, *raws = self.hear()
            number, message = decode(header, raws, Limits())
            if number or isinstance(message, Hello):
                return message

    def hung_up(self):
        """Waits until the other side has ended the connection."""
        with contextlib.suppress(ConnectionError):
            while True:
                self._take(1)

    def reset(self):
        reset(self.line)

    def _take(self, count):
        while len(self._received) < count:
            data = self.line.recv(65536)
            if not data:
                raise ConnectionError("hung up")
            self._received += data
        taken = bytes(self._received[:count])
        del self._received[:count]
        return taken


@contextlib.contextmanager
def raw(address, hello=None):
    """A peer that has shaken hands, and, if it says ``hello``, greeted."""
    with dial(address) as line:
        peer = Raw(line)
        peer.send(_GREETING)
        peer._take(64)
        peer.send(READY)
        if hello is not None:
            peer.send(frame(encode(hello)[0]))
        yield peer


class Cut:
    """A relay to ``address`` that can be made deaf, and cut, on threads of its own."""

    def __init__(self, address):
        self._address = address
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._server.getsockname()[1]}"
        self.deaf = threading.Event()
        """From now on nothing is read from the task."""
        self._lines = []
        self._threads = [threading.Thread(target=self._accept)]
        self._threads[0].start()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                here, _ = self._server.accept()
                there = dial(self._address)
                there.settimeout(None)
                self._lines += [here, there]
                self._start(self._up, here, there)
                self._start(self._down, here, there)

    def _start(self, copy, *lines):
        self._threads.append(threading.Thread(target=copy, args=lines))
        self._threads[-1].start()

    def _up(self, here, there):
        with contextlib.suppress(OSError):
            while data := here.recv(65536):
                there.sendall(data)

    def _down(self, here, there):
        with contextlib.suppress(OSError):
            while not self.deaf.is_set() and (data := there.recv(65536)):
                here.sendall(data)

    def reset(self):
        """All connections end as if the machine at this end had forgotten them."""
        lines, self._lines = self._lines, []
        for here, there in zip(lines[::2], lines[1::2], strict=True):
            for line in (there, here):
                with contextlib.suppress(OSError):
                    line.setsockopt(
                        socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
                    )
                # A thread that reads keeps the connection, whoever closes it.
                with contextlib.suppress(OSError):
                    line.shutdown(socket.SHUT_RD)
                line.close()

    def close(self):
        self.deaf.set()
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self.reset()
        for thread in self._threads:
            thread.join(10)


@dataclass
class Keyed:
    """A peer that has a key, behind a relay; a client of ZeroMQ with its rules off."""

    socket: zmq.Socket[bytes]
    relay: Cut
    sent: int = 0

    def tell(self, message, number=0):
        header, raws = encode(message, number)
        self.socket.send_multipart([header, *raws])

    def ask(self, message):
        self.sent += 1
        self.tell(message, 2 * self.sent + 1)

    def hear(self, patience=30):
        assert self.socket.poll(int(1000 * patience)), "nothing came"
        return self.socket.recv_multipart()

    def reset(self):
        self.relay.reset()


@contextlib.contextmanager
def keyed(address, folder, job, server, hello=None):
    """A peer with the key of ``job``, that has greeted a task of ``server``."""
    relay, context = Cut(address), zmq.Context()
    client = context.socket(zmq.DEALER)
    client.linger, client.sndhwm, client.rcvhwm = 0, 0, 0
    try:
        Security.load(folder, job).arm_client(client, server, 0)
        client.connect(f"tcp://{relay.address}")
        peer = Keyed(client, relay)
        peer.tell(hello or claim(job))
        peer.hear()
        yield peer
    finally:
        client.close()
        relay.close()
        context.term()
