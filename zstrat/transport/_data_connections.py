"""Sockets that a blocking thread drives itself, without the loop.

Passing a message from a thread to the loop and back costs two wake-ups more than the
message itself, so a thread that blocks for its bytes reads them itself. Each member
binds a ROUTER and has a DEALER to each of the others; a message is a header and raw
bytes. There is no greeting, no credit and no beat: the members also have links
(`_link`), which identify them and report losses.

The law of this file: one thread at a time, which holds `DataConnections.held`; only
`wake` is for any thread. A broken connection is never reopened: its messages are lost.

*Threats.* Only members can connect. Each draws a credential for this purpose, and sends
it to the others over links: with keys in the cluster, the public half of a new CURVE
pair, which authenticates and encrypts; else a password of 32 random bytes. libzmq asks
the authenticator before it accepts a message. When all are connected, the port is shut:
libzmq cannot unbind without ending the connections, so the kernel drops packets of all
others (`refuse_newcomers`).
"""

from __future__ import annotations

import atexit
import errno
import math
import os
import secrets
import threading
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple

import zmq

# Before `_close_all` is registered, so that it ends after it: then it frees the memory
# of messages that libzmq has not sent yet, whichever process reads it.
import zmq.utils.garbage
from zmq.backend import zmq_poll
from zmq.utils import z85

from zstrat.config import MiB

from ._address import bindable, is_name, looked_up, parse
from ._admission import check_exposure
from ._curve import DOMAIN, Authenticator
from ._descriptors import Accepted, accepted, allowed, refuse_newcomers
from ._pump import count_direct
from ._socket import EventKind, bound_to, event_of, new_context, new_socket

if TYPE_CHECKING:
    from collections.abc import Iterable

    from zstrat.config import Settings

    from ._address import Address
    from ._curve import Security

LINGER: Final = 5.0
"""Seconds that what was sent has to leave when connections are closed."""

IDLE: Final = 1.0
"""Seconds of the longest wait. A signal that comes just before it does not end it."""

_ROOM: Final = 64
"""Messages that wait on each side of a connection."""

_LARGEST: Final = 2 * MiB
"""Bytes of a frame, at most: a chunk of a call, with room."""

_COPIED: Final = 256 * 1024
"""Bytes below which what is sent is copied: to track a smaller buffer costs more."""

_OWN_FILES: Final = 24
"""Descriptors of a context, its threads, the ROUTER and what wakes a thread; and"""
_FILES: Final = 4
"""of each member: those of two connections and of their sockets."""

_NOBLOCK: Final = int(zmq.NOBLOCK)
_MORE: Final = int(zmq.NOBLOCK | zmq.SNDMORE)
_IN, _OUT = int(zmq.POLLIN), int(zmq.POLLOUT)


class DataMessage(NamedTuple):
    """A message: its sender, its header, and its bytes."""

    member: int
    header: bytes
    data: memoryview


class DataConnections:
    """The data connections of one member, bound at any free port of ``where``. Created,
    connected and shut on a loop, which runs the authenticator meanwhile.

    Args:
        member: Index of this member.
        encrypted: Whether to use CURVE.

    Raises:
        OSError: No port of ``where`` can be bound.
    """

    MOST: ClassVar = 64
    """Members: each has a connection to every other one, and one back."""

    def __init__(
        self, member: int, where: Address, settings: Settings, *, encrypted: bool
    ) -> None:
        self._member, self._settings = member, settings
        self._secret = b""
        self.credential = z85.encode(secrets.token_bytes(32))
        """The 40 bytes by which the other members, and nobody else, know this one."""
        if encrypted:
            self.credential, self._secret = zmq.curve_keypair()
        self._known: dict[str, int] = {}
        """Members by credential."""
        self._met: dict[bytes, int] = {}
        """Members that have sent something, by routing id;"""
        self._accepted: dict[int, Accepted] = {}
        """and what it came by."""
        # One sends while the other receives: where both encrypt, an all-reduce of 2 MB
        # by four ranks takes half the time.
        self._context = new_context(threads=2)
        self._authenticator = Authenticator(self._context, self._known.__contains__)
        self._outward: dict[int, zmq.Socket[bytes]] = {}
        self._router = self._socket(zmq.ROUTER, where)
        self._woken, self._waker = os.pipe()
        os.set_blocking(self._woken, False)
        os.set_blocking(self._waker, False)
        # Without pyzmq's wrapper, which costs as much as the call; see `Pump`.
        self._receive = super(zmq.Socket, self._router).recv
        self._wanted: list[tuple[Any, int]] = [(self._router, _IN), (self._woken, _IN)]
        self._sent = self._got = 0
        self.held = threading.Lock()
        """Held by the only thread that uses them at present."""
        self._closing = threading.Lock()
        self._is_closed = False
        try:
            self._listener = self._bind(where._replace(port=0))
        except zmq.ZMQError as error:
            self.close(0.0)
            raise OSError(error.errno, f"cannot bind a port of {where.host}") from error
        _open.add(self)

    @classmethod
    async def bound(
        cls,
        member: int,
        members: int,
        address: str,
        settings: Settings,
        security: Security | None,
    ) -> DataConnections:
        """Returns the data connections of a member to all others, so many ``members``,
        bound at the host of ``address``, which may be a name.

        Raises:
            OSError: As the constructor; or the process may not open as many files.
            PermissionDeniedError: As `check_exposure`.

        Cancellation: nothing is bound.
        """
        where = await bindable(parse(address), "a member")
        await check_exposure(where, "a member of a group", security, settings)
        _require_room(members)
        return cls(member, where, settings, encrypted=security is not None)

    @property
    def port(self) -> int:
        """The bound port."""
        return parse(bound_to(self._router)).port

    def admit(self, member: int, credential: bytes) -> None:
        """Lets another member connect to this one."""
        self._known[credential.decode()] = member

    async def connect(self, member: int, address: str, credential: bytes) -> None:
        """Connects to another member, which admits this one already.

        Raises:
            OSError: The name in ``address`` cannot be resolved.

        Cancellation: it is not connected.
        """
        where = parse(address)
        if is_name(where):
            where, _ = await looked_up(where)
        line = self._socket(zmq.DEALER, where)
        # Never again: the ranks of a generation that lost a connection form a new one.
        line.reconnect_ivl = -1
        line.routing_id = b"%d" % self._member
        if self._secret:
            line.curve_serverkey = credential
            line.curve_publickey, line.curve_secretkey = self.credential, self._secret
        else:
            line.plain_username, line.plain_password = b"member", self.credential
        line.connect(where.endpoint)
        self._outward[member] = line

    def shut(self) -> None:
        """Refuses further connections.

        Raises:
            OSError: The system does not support that.
        """
        self._authenticator.close()
        refuse_newcomers(self._listener)

    def send(self, member: int, header: bytes, data: memoryview) -> bool:
        """Sends a message; False: there is no room for it now. ``data`` has to stay as
        it is until it has arrived."""
        send = super(zmq.Socket, self._outward[member]).send
        try:
            send(header, _MORE)
            if len(data) < _COPIED:
                send(data, _NOBLOCK)
            else:
                send(data, _NOBLOCK, False)
        except zmq.Again:
            return False
        self._sent += len(data)
        return True

    def receive(self) -> DataMessage | None:
        """Returns a received message, or None. Drops malformed messages."""
        receive = self._receive
        while True:
            try:
                frames = [receive(_NOBLOCK, False)]
            except zmq.Again:
                return None
            while frames[-1].more:
                frames.append(receive(_NOBLOCK, False))
            routing = frames[0].bytes
            member = self._met.get(routing)
            if member is None:
                member = self._meet(routing, frames[-1])
            # Anything else is dropped: routing id, header and data are what members
            # send.
            if member is not None and len(frames) == 3:
                data = frames[2].buffer
                self._got += len(data)
                return DataMessage(member, frames[1].bytes, data)

    def wait(self, full: Iterable[int], seconds: float) -> bool:
        """Waits until something arrives, one of the ``full`` connections may have room,
        or `wake` is called; at most ``seconds`` and `IDLE`. Returns whether any of
        these happened."""
        polled = self._wanted
        if full:
            polled = [*polled, *[(self._outward[member], _OUT) for member in full]]
        seconds = min(max(seconds, 0.0), IDLE)
        ready = zmq_poll(polled, math.ceil(seconds * 1000))
        if any(each == self._woken for each, _ in ready):
            os.read(self._woken, 4096)
        return bool(ready)

    def ended(self, members: Iterable[int]) -> list[int]:
        """Returns those of ``members`` whose connection has ended. Messages that came
        before can still be received."""
        known = [each for each in members if each in self._accepted]
        return [
            each
            for each in known
            # Another inode, or none, has the number: libzmq has closed the connection.
            if accepted(self._accepted[each].descriptor) != self._accepted[each]
        ]

    def wake(self) -> None:
        """Ends a `wait`, the present or the next one; from any thread."""
        with self._closing:  # or the number is some other file's by now
            if not self._is_closed:
                with suppress(BlockingIOError):  # it was woken so often already
                    os.write(self._waker, b"!")

    def settle(self) -> None:
        """Adds what was moved to the counts of the process."""
        count_direct(self._sent, self._got)
        self._sent = self._got = 0

    def close(self, linger: float = LINGER) -> None:
        """Ends all connections. Blocks until what was sent has left, at most ``linger``
        seconds. To be called on the loop if they were not shut."""
        with self._closing:
            if self._is_closed:
                return
            self._is_closed = True
            os.close(self._woken)
            os.close(self._waker)
        self._authenticator.close()
        self.settle()
        # What this member sent lingers; nobody gets more from it, so the ROUTER need
        # not.
        for line in self._outward.values():
            line.close(linger=int(linger * 1000))
        self._router.close(linger=0)
        self._context.term()

    def forget(self) -> None:
        """Marks the connections as closed in a forked process."""
        self._closing, self._is_closed = threading.Lock(), True

    def _meet(self, routing: bytes, frame: zmq.Frame) -> int | None:
        """Returns the member whose first message this is; None if the credential is not
        that of the member."""
        member = self._known.get(str(frame.get("User-Id")))
        if member is None or routing != b"%d" % member:
            return None
        self._accepted[member] = accepted(int(frame.get("__fd")))
        self._met[routing] = member
        return member

    def _bind(self, where: Address) -> int:
        """Binds, and returns the descriptor of the listening socket."""
        router = self._router
        if self._secret:
            router.curve_server, router.curve_secretkey = True, self._secret
        else:
            router.plain_server = True
        router.zap_domain, router.zap_enforce_domain = DOMAIN.encode(), True
        # No option of libzmq gives the descriptor that listens; this event does.
        monitor = router.get_monitor_socket(int(EventKind.LISTENING.value))
        try:
            router.bind(where.endpoint)
            bound_to(router)
            return event_of(monitor.recv_multipart()).value
        finally:
            router.disable_monitor()
            monitor.close(linger=0)

    def _socket(self, kind: int, where: Address) -> zmq.Socket[bytes]:
        socket = new_socket(self._context, kind, where, self._settings)
        socket.sndhwm = socket.rcvhwm = _ROOM
        socket.maxmsgsize = _LARGEST
        return socket


def _require_room(members: int) -> None:
    """Checks that enough descriptors are free: libzmq ends a process in which it cannot
    open what it needs.

    Raises:
        OSError: EMFILE; says how many descriptors there are.
    """
    try:
        used = len(os.listdir("/proc/self/fd"))
    except OSError:  # not Linux
        return
    needed = _OWN_FILES + _FILES * members
    if used + needed > allowed():
        raise OSError(
            errno.EMFILE,
            f"{used} of {allowed()} descriptors are open, and separate connections "
            f"to {members} ranks take {needed}: raise `ulimit -n`",
        )


_open: Final[weakref.WeakSet[DataConnections]] = weakref.WeakSet()


def _close_all() -> None:
    """Delivers what was sent when a program ends without closing its groups."""
    for connections in list(_open):
        if connections.held.acquire(blocking=False):  # else a thread is frozen in it
            connections.close()


def _forget() -> None:
    """Forgets all connections after a fork: they are the parent's."""
    for connections in list(_open):
        connections.forget()
    _open.clear()


os.register_at_fork(after_in_child=_forget)
atexit.register(_close_all)
