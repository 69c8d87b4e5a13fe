"""Creates ZeroMQ contexts and sockets with zstrat's options, and reports events of
their connections.

An endpoint has its own context, and so its own I/O thread; all links of the process
share another one, which lives as long as the last of them. ZeroMQ's reports about the
connections of one socket come as events on the loop.

When the keys in the key folder change, a bound socket is bound again: libzmq gives a
listener the options that the socket has at its bind. That ends all connections,
including those with a removed key; other peers reconnect, and send unanswered requests
again. libzmq closes a listener on its own thread, and reports when the address is free.
"""

from __future__ import annotations

import asyncio
import enum
import itertools
import logging
import math
import os
import struct
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, final

import numpy as np
import zmq

from ._descriptors import Accepted, accepted, note_address
from ._pump import Pump

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from zstrat.config import Settings

    from ._address import Address
    from ._curve import Security
    from ._pump import Receive

_LOG: Final = logging.getLogger("zstrat.transport")

LINGER: Final = 0.2
"""Seconds that a goodbye has to leave before its socket is closed for good."""

_SOCKETS: Final = 8192
_LOCAL_BUFFER: Final = 4 * 2**20
"""Bytes of a unix socket's buffer, whose default of 200 KB halves the throughput. TCP
tunes its buffers itself."""

_HOUR: Final = 3600  # seconds

_TAUGHT: Final = 30 * 2**20  # glibc learns from blocks below 32 MiB

_lock = threading.Lock()
_shared: list[zmq.Context[zmq.Socket[bytes]]] = []
_users = 0


def new_context(threads: int = 1) -> zmq.Context[zmq.Socket[bytes]]:
    """Returns a context whose sockets share ``threads`` I/O threads."""
    # glibc keeps blocks up to the size of the largest that was ever freed, and asks the
    # kernel for others each time: then every chunk that arrives is zeroed, faulted in
    # and given back, at half the throughput. No page of this block is touched.
    np.empty(_TAUGHT, np.uint8)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=threads)
    context.max_sockets = _SOCKETS
    return context


def lease_context() -> zmq.Context[zmq.Socket[bytes]]:
    """Returns the context of the links; give it back with `return_context`."""
    global _users
    with _lock:
        if not _shared:
            _shared.append(new_context())
        _users += 1
        return _shared[0]


async def return_context() -> None:
    """Gives back the context of the links; ends it if no other link uses it.

    Cancellation: the context ends by itself all the same.
    """
    global _users
    with _lock:
        _users -= 1
        last = _shared.pop() if _users == 0 else None
    # Outside of the lock: it may take `LINGER`, and others want a context meanwhile.
    if last is not None:
        await end_context(last)


def _forget() -> None:
    """Forgets the context of the links after a fork: its thread runs in the parent."""
    global _lock, _users
    _lock, _users = threading.Lock(), 0
    # Kept, because what ends a context would wait for that thread.
    _of_parent.extend(_shared)
    _shared.clear()


_of_parent: Final[list[zmq.Context[zmq.Socket[bytes]]]] = []
os.register_at_fork(after_in_child=_forget)


async def end_context(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    """Ends ``context``: waits until its closed sockets are gone, at most `LINGER`
    seconds.

    The loop runs meanwhile, except at the end of the program, when Python starts no new
    thread.

    Cancellation: the context ends by itself all the same.
    """
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()

    def term() -> None:
        context.term()
        with suppress(RuntimeError):  # the loop is gone: nobody waits
            loop.call_soon_threadsafe(ended.set)

    # On a thread: `term` blocks until the last socket has sent what it may.
    thread = threading.Thread(target=term, name="zstrat-zmq-term", daemon=True)
    try:
        thread.start()
    # Nothing else runs by then, so it may block.
    except RuntimeError:  # Python >= 3.12 starts none when a program ends
        context.term()
        return
    await ended.wait()
    thread.join()


def new_socket(
    context: zmq.Context[zmq.Socket[bytes]],
    kind: int,
    address: Address,
    settings: Settings,
) -> zmq.Socket[bytes]:
    """Returns a new ROUTER or DEALER with zstrat's options, not yet bound or
    connected."""
    socket: zmq.Socket[bytes] = context.socket(kind)
    try:
        _set_options(socket, kind, address, settings)
    except BaseException:  # to the caller, who could never end the context
        socket.close(linger=0)
        raise
    if kind != zmq.ROUTER:
        note_address(socket, address.endpoint)
    return socket


def _set_options(
    socket: zmq.Socket[bytes], kind: int, address: Address, settings: Settings
) -> None:
    times, limits = settings.timeouts, settings.limits
    # The default has no limit, and the end of the context would wait. Who closes a
    # socket says how long a goodbye may take.
    socket.linger = 0
    socket.maxmsgsize = max(limits.frame, limits.chunk, limits.header)
    # Messages, not bytes: those with large bodies are bounded by credits before.
    socket.sndhwm = socket.rcvhwm = 500
    socket.handshake_ivl = int(times.handshake * 1000)
    # ZeroMQ's own heartbeats stay off. When a peer has reset its connection while more
    # than `rcvhwm` of its messages wait, their timer finds a failed engine, and libzmq
    # 4.3.5 aborts the process. Our heartbeats show that a peer is gone, and `hang_up`
    # ends its connection; below them TCP finds machines that have vanished.
    timeout = math.ceil(times.liveness)
    socket.tcp_keepalive = 1
    # The peer must not be given up before we would give it up. The kernel takes no more
    # than a few hours, and libzmq aborts when it refuses.
    socket.tcp_keepalive_idle = min(timeout + 2, _HOUR)
    socket.tcp_keepalive_intvl, socket.tcp_keepalive_cnt = 2, 3
    socket.setsockopt(zmq.TCP_MAXRT, 1000 * min(timeout + 10, _HOUR))
    socket.ipv6 = address.is_ipv6
    if address.scheme == "ipc":
        socket.sndbuf = socket.rcvbuf = _LOCAL_BUFFER
    if kind == zmq.ROUTER:
        # Otherwise messages to a peer that is gone vanish without an error.
        socket.router_mandatory = 1
        socket.backlog = 1024
    else:
        # Not `immediate`: with it libzmq throws away what is unread when the peer
        # closes, the last answers among it. A link sends only after the handshake.
        socket.immediate = 0
        socket.reconnect_ivl, socket.reconnect_ivl_max = 20, 1000


def bound_to(socket: zmq.Socket[bytes]) -> str:
    """Returns the address that a socket got by its bind."""
    name = socket.get(zmq.LAST_ENDPOINT)
    assert isinstance(name, bytes)
    endpoint = name.rstrip(b"\0").decode()
    note_address(socket, endpoint)
    return endpoint


class _BindState(enum.Enum):
    """States of a bound socket::

    FREE -- bind --> BOUND -- unbind --> LEAVING -- libzmq has closed it --> FREE
    """

    BOUND = enum.auto()
    LEAVING = enum.auto()
    FREE = enum.auto()


@final
class BoundSocket:
    """Binds ``socket`` to an address, and again when its keys have changed.

    Args:
        task: Name of the task in the log.

    Raises:
        ZMQError: The address cannot be bound (constructor only).
    """

    def __init__(
        self, socket: Any, where: Address, security: Security | None, task: str
    ) -> None:
        self._socket, self._where, self._security = socket, where, security
        self._task = task
        self._endpoint = where.endpoint
        self._keys = None if security is None else security.keys
        if security is not None:
            security.arm_server(socket)
        self._state = _BindState.FREE
        self._bind()

    def tick(self) -> None:
        """Binds again if the keys of the task have changed. Call it at every tick."""
        if self._state is _BindState.FREE:
            self.freed()
        elif self._state is _BindState.LEAVING:
            self._state = _BindState.FREE  # not reported so far: the next tick binds
        elif self._state is _BindState.BOUND and self._must_renew():
            assert self._security is not None
            _LOG.info("%s binds again: its keys have changed", self._task)
            self._security.arm_server(self._socket)
            # The bound port, where port 0 was asked for.
            self._endpoint = self._socket.get(zmq.LAST_ENDPOINT).rstrip(b"\0").decode()
            self._state = _BindState.LEAVING
            with suppress(zmq.ZMQError):  # it is no longer bound
                self._socket.unbind(self._endpoint)

    def freed(self) -> None:
        """Binds again after libzmq has closed the old listener. If another process has
        taken the address, logs that, and tries again at the next tick."""
        if self._state is _BindState.BOUND:
            return
        self._state = _BindState.FREE
        try:
            self._bind()
        except zmq.ZMQError as error:
            _LOG.error(
                "%s cannot bind %s again: %s; it will keep trying",
                self._task,
                self._endpoint,
                error.strerror,
            )

    def remove_file(self) -> None:
        """Removes the file of an ipc address, which libzmq leaves, unless another
        socket has taken the path. Call it while the socket is bound."""
        if self._inode is not None:
            with suppress(OSError):
                path = Path(self._where.host)
                if path.stat().st_ino == self._inode:
                    path.unlink()

    def _bind(self) -> None:
        self._socket.bind(self._endpoint)
        self._state = _BindState.BOUND
        self._inode: int | None = None
        """Inode of the file of a bound ipc address."""
        if self._where.scheme == "ipc":
            with suppress(OSError):  # the file may be removed at any time
                self._inode = Path(self._where.host).stat().st_ino

    def _must_renew(self) -> bool:
        """Returns whether the task's own key has changed, or another key was
        removed."""
        if self._security is None or self._keys is None:
            return False
        self._security.refresh()
        before, self._keys = self._keys, self._security.keys
        has_lost = not before.owners.keys() <= self._keys.owners.keys()
        return has_lost or before.secret != self._keys.secret


_NUMBERS: Final = itertools.count()
_HEAD: Final = struct.Struct("=HI")


class EventKind(enum.Enum):
    """Kinds of events of a socket's connections, as libzmq's monitor reports them."""

    LISTENING = zmq.EVENT_LISTENING
    ACCEPTED = zmq.EVENT_ACCEPTED
    CONNECTED = zmq.EVENT_CONNECTED
    READY = zmq.EVENT_HANDSHAKE_SUCCEEDED
    BROKEN = zmq.EVENT_DISCONNECTED
    UNBOUND = zmq.EVENT_CLOSED
    RETRIED = zmq.EVENT_CONNECT_RETRIED
    FAILED = zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    MISMATCHED = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    UNAUTHORISED = zmq.EVENT_HANDSHAKE_FAILED_AUTH


class Event(NamedTuple):
    """An event of a connection. ``value`` is the file descriptor of the connection for
    ACCEPTED, CONNECTED and BROKEN, that of the listener for LISTENING, else a detail:
    for FAILED the last error number, which is EPIPE or ECONNRESET if the other side has
    ended the connection."""

    kind: EventKind
    value: int


def event_of(parts: Sequence[bytes]) -> Event:
    """Returns the event in a message of libzmq's monitor."""
    number, value = _HEAD.unpack(parts[0])
    return Event(EventKind(zmq.Event(number)), value)


class Monitor:
    """Calls ``happened`` with each event of ``socket``. Close it before the socket."""

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        kinds: tuple[EventKind, ...],
        happened: Callable[[Event], None],
    ) -> None:
        self._socket, self._happened = socket, happened
        address = f"inproc://zstrat.monitor.{next(_NUMBERS)}"
        events = 0
        for each in kinds:
            events |= int(each.value)
        socket.monitor(address, events)
        listener = socket.context.socket(zmq.PAIR)
        # Unbounded: at a bound the I/O thread of ZeroMQ itself would wait for our loop.
        listener.rcvhwm = 0
        listener.connect(address)
        self._pump = Pump(listener, self._received)

    def drain(self) -> None:
        """Handles all events that have come so far, at once."""
        self._pump.drain()

    def close(self) -> None:
        self._socket.monitor(None, 0)
        self._pump.close(0)

    def _received(self, frames: list[zmq.Frame]) -> None:
        self._happened(event_of([frame.bytes for frame in frames]))


class Sockets(Protocol):
    """The calls that `Endpoint` and `Link` make to ZeroMQ; a simulation implements
    them, too. The types of contexts and sockets are up to the implementation; frames
    that `Pump` delivers are those of zmq."""

    def context(self) -> Any:
        """Returns a new context, for one endpoint alone."""
        ...

    async def end(self, context: Any) -> None:
        """Waits until the closed sockets of a context that `context` returned are
        gone."""
        ...

    def lease(self) -> Any:
        """Returns the context that all links share."""
        ...

    async def give_back(self) -> None:
        """Gives back the context that `lease` returned."""
        ...

    def socket(
        self, context: Any, kind: int, address: Address, settings: Settings
    ) -> Any:
        """Returns a new ROUTER, DEALER or STREAM, not yet bound or connected."""
        ...

    def bound_to(self, socket: Any) -> str:
        """Returns the address that a socket got by its bind."""
        ...

    def accepted(self, descriptor: int) -> Accepted:
        """Returns the connection that has the file descriptor now."""
        ...

    def monitor(
        self,
        socket: Any,
        kinds: tuple[EventKind, ...],
        happened: Callable[[Event], None],
    ) -> Monitor: ...

    def pump(self, socket: Any, receive: Receive, header: int = 0) -> Pump: ...


class ZeroMQSockets:
    """Creates the real sockets of libzmq, for all uses but simulations."""

    context = staticmethod(new_context)
    end = staticmethod(end_context)
    lease = staticmethod(lease_context)
    give_back = staticmethod(return_context)
    bound_to = staticmethod(bound_to)
    accepted = staticmethod(accepted)
    socket = staticmethod(new_socket)
    monitor = Monitor
    pump = Pump


ZEROMQ: Final = ZeroMQSockets()
