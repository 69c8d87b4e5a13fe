"""Moves messages between one plain ZeroMQ socket and the event loop.

Law of the file: no other code receives from a pumped socket or sends to it.
`zmq.asyncio` handles one message per turn of the loop; reading the socket's descriptor
and draining is three times as fast with a third of the latency.

The descriptor is edge-triggered and means "something changed", for both directions. So
every wake-up drains until no message is left, or schedules the rest for the next turn;
and since any call on the socket may swallow the change, a send also checks for messages
that have arrived.
"""

from __future__ import annotations

import asyncio
import enum
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, final

import zmq
from zmq.backend import zmq_poll

if TYPE_CHECKING:
    from zstrat.wire.connection import Frames, Peer


@final
class TransportTraffic:
    """Counts the bytes that one transport moves; its channels add to the counts, on the
    loop."""

    __slots__ = ("got", "sent")

    def __init__(self) -> None:
        self.sent = self.got = 0


SOCKET: Final = TransportTraffic()
"""Bytes through ZeroMQ sockets, TCP and ipc alike: headers, and bodies in frames."""
_DIRECT: Final = TransportTraffic()
"""Bytes through ZeroMQ sockets that threads drive themselves, without the loop."""
SHARED: Final = TransportTraffic()
"""Bytes of bodies in shared memory."""

_lock: Final = threading.Lock()


def count_direct(sent: int, got: int) -> None:
    """Adds the bytes that a thread has moved through sockets that it drives itself.
    From any thread."""
    with _lock:
        _DIRECT.sent += sent
        _DIRECT.got += got


def transports() -> dict[str, dict[str, int]]:
    """Returns the bytes that each transport has moved ``in`` and ``out`` since the
    process began."""
    return {
        "socket": {"in": SOCKET.got + _DIRECT.got, "out": SOCKET.sent + _DIRECT.sent},
        "shm": {"in": SHARED.got, "out": SHARED.sent},
    }


def moved_bytes() -> tuple[int, int]:
    """Returns the bytes that came in, and the bytes that went out, through all
    transports together."""
    return (
        SOCKET.got + _DIRECT.got + SHARED.got,
        SOCKET.sent + _DIRECT.sent + SHARED.sent,
    )


BUDGET: Final = 512
"""Most messages that a socket receives in one turn of the loop; 16 KiB of arrays count
as one message, and so do 32 bytes of a long header, whose items have to be created.
About 2 ms, after which timers and other sockets have their turn."""

# As plain ints: combining and passing zmq's enums costs as much as sending.
_NOBLOCK: Final = int(zmq.NOBLOCK)
_MORE: Final = int(zmq.NOBLOCK | zmq.SNDMORE)

_QUESTIONS: Final = 3
"""Number of messages of a drain after each of which it first asks libzmq whether there
is another one. Asking costs a third of the exception that reports an empty socket,
which a long drain pays only once."""

_UNIT: Final = 14  # 2**14 bytes
_HEADER_UNIT: Final = 5
_LONG_HEADER: Final = 4096  # shorter ones are made in less time than they are counted
_COPIED: Final = 128 * 1024  # tracking a smaller buffer costs more than its copy

Receive = Callable[[list[zmq.Frame]], None]


def parts_of(frames: list[zmq.Frame], at: int) -> list[bytes | memoryview]:
    """Returns the header and the raw frames of a message, in the form that `Peer`
    takes; ``at`` is the index of the header in ``frames``."""
    if len(frames) == at + 1:
        return [frames[at].bytes]
    return [frames[at].bytes, *[raw.buffer for raw in frames[at + 1 :]]]


class Sending(enum.Enum):
    """Outcome of sending a message: sent, no room for it now, or the peer is not
    connected."""

    DONE = enum.auto()
    BLOCKED = enum.auto()
    GONE = enum.auto()


_DONE: Final = Sending.DONE  # a look at a member of an enum costs as much as a call


class Pump:
    """Moves messages between ``socket``, which the pump owns, and the loop. ``receive``
    gets each message whole, and must not raise. ``header`` is the index of the header
    among its frames."""

    def __init__(
        self, socket: zmq.Socket[bytes], receive: Receive, header: int = 0
    ) -> None:
        self._socket, self._receive, self._header = socket, receive, header
        # What the methods of zmq.Socket add to these serves sockets of other kinds.
        self._send: Callable[..., object] = super(zmq.Socket, socket).send
        self._recv = super(zmq.Socket, socket).recv
        self._self = [(socket, zmq.POLLIN)]
        self._loop = asyncio.get_running_loop()
        self._blocked: dict[Outlet, None] = {}
        self._scheduled = self._closed = False
        self._descriptor = int(socket.FD)
        self._loop.add_reader(self._descriptor, self._drain)
        self._look_again()

    def send(self, frames: Frames, to: Frames = ()) -> Sending:
        """Sends one message, whole or not at all, and never waits."""
        if self._closed:
            return Sending.GONE
        send = self._send
        # The send may swallow the news of a message that has arrived; see above.
        if not self._scheduled:
            self._look_again()
        try:
            # Only the first frame may be refused for want of room: libzmq takes the
            # rest of a message whose beginning it has taken.
            for frame in to:
                send(frame, _MORE)
            nbytes = 0
            if len(frames) > 1:
                for frame in frames[:-1]:
                    size = len(frame)
                    nbytes += size
                    send(frame, _MORE, size < _COPIED)
            last = frames[-1]
            size = len(last)
            send(last, _NOBLOCK, size < _COPIED)
            SOCKET.sent += nbytes + size
        except zmq.Again:
            return Sending.BLOCKED
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return Sending.GONE
        return _DONE

    def block(self, outlet: Outlet) -> None:
        """Remembers that the next message of the outlet did not fit; calls its
        `Outlet.flush` when the socket has room."""
        self._blocked[outlet] = None

    def drain(self) -> None:
        """Receives all messages that have arrived, at once."""
        self._drain()

    @property
    def is_closed(self) -> bool:
        return self._closed

    def close(self, linger: float) -> None:
        """Closes the socket; sent messages have ``linger`` seconds to leave."""
        if not self._closed:
            self._closed = True
            self._blocked.clear()
            self._loop.remove_reader(self._descriptor)
            # After the reader: the descriptor may be some other file's as soon as it is
            # closed.
            self._socket.close(linger=int(linger * 1000))

    def _look_again(self) -> None:
        self._scheduled = True
        self._loop.call_soon(self._look)

    def _look(self) -> None:
        if self._closed:
            return
        self._scheduled = False
        if self._blocked or zmq_poll(self._self, 0):
            self._drain()

    def _drain(self) -> None:
        recv, receive, left = self._recv, self._receive, BUDGET
        questions, at = _QUESTIONS, self._header
        # What is sent meanwhile needs no separate look: the last thing done here is
        # to find the socket empty.
        before, self._scheduled = self._scheduled, True
        try:
            while left > 0 and not self._closed:
                frame = recv(_NOBLOCK, False)
                message = [frame]
                size = nbytes = len(frame)
                while frame.more:
                    frame = recv(_NOBLOCK, False)
                    message.append(frame)
                    size = len(frame)
                    nbytes += size
                SOCKET.got += nbytes
                left -= 1 + (size >> _UNIT)
                if len(message) > at and len(message[at]) > _LONG_HEADER:
                    left -= len(message[at]) >> _HEADER_UNIT
                receive(message)
                if questions:
                    questions -= 1
                    if self._closed or not zmq_poll(self._self, 0):
                        break
        except zmq.Again:
            self._scheduled = before
        except BaseException:  # to the loop's handler: the rest must not wait for it
            self._look_again()
            raise
        else:
            if left > 0:
                self._scheduled = before
            else:
                self._look_again()
        # Any change of the socket may mean room; each one that still does not fit
        # registers again.
        if self._blocked:
            blocked, self._blocked = self._blocked, {}
            for outlet in blocked:
                outlet.flush()


class Outlet:
    """Sends the messages of one peer, in order, as far as the socket takes them.

    Args:
        on_flushed: Called after each flush, when there may be room for more messages.
        on_waited: Called with start and end (loop time) of each time span in which a
            message had to wait: for the peer to read, or for room in the shared memory.
    """

    __slots__ = (
        "_is_copying",
        "_loop",
        "_outbox",
        "_pump",
        "_since",
        "_stuck",
        "_to",
        "is_gone",
        "on_flushed",
        "on_waited",
        "peer",
    )

    def __init__(
        self,
        peer: Peer[Any],
        pump: Pump,
        to: Frames = (),
        on_flushed: Callable[[], None] | None = None,
        on_waited: Callable[[float, float], None] | None = None,
    ) -> None:
        self.peer, self._pump, self._to = peer, pump, to
        self.on_flushed, self.on_waited = on_flushed, on_waited
        self._since: float | None = None
        """Loop time since which a message waits; None: none does."""
        self._outbox = peer.outbox
        self._loop = asyncio.get_running_loop()
        self._stuck: Frames | None = None
        self.is_gone = self._is_copying = False

    def flush(self) -> None:
        """Sends all messages that may be sent now."""
        peer, now = self.peer, self._loop.time()
        # What did not fit goes first: the peer numbers messages in the order of
        # `transmit`.
        frames = self._stuck or peer.transmit(now)
        while frames is not None and not self.is_gone:
            sending = self._pump.send(frames, self._to)
            if sending is not _DONE:
                if sending is Sending.BLOCKED:
                    self._stuck = frames
                    self._pump.block(self)
                    if self._since is None:
                        self._since = now
                    return
                self.is_gone = True
            frames = peer.transmit(now) if self._outbox.is_ready else None
        self._stuck = None
        if self._outbox.is_copying and not self._is_copying:
            self._is_copying = True
            # A step of a large copy into shared memory per turn of the loop.
            self._loop.call_soon(self._copy)
        if self._since is not None or len(self._outbox):
            self._waited(now)
        if self.on_flushed is not None:
            self.on_flushed()

    def _waited(self, now: float) -> None:
        if len(self._outbox):
            if self._since is None:
                self._since = now
            return
        assert self._since is not None
        since, self._since = self._since, None
        if self.on_waited is not None:
            self.on_waited(since, now)

    def _copy(self) -> None:
        self._is_copying = False
        if not self.is_gone:
            self._outbox.copy()
            self.flush()
