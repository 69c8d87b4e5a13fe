"""Sockets between the members of a group that a blocking thread drives itself, without
the loop.

Passing a message from a thread to the loop and back costs two wake-ups more than the
message itself, so a thread that waits for bytes of a collective operation reads them
itself. Each member binds a ROUTER and has a DEALER to each other member; a message is a
header and raw bytes. There is no greeting, no flow control and no heartbeat: the
members also have links (`_link`), which identify them and report losses.

Law of the file: one thread at a time calls the methods, the one that holds
`DataConnections.held`; only `wake` is for any thread. A broken connection is never
reopened: its messages are lost.

*Threats.* Only members can connect. Each member draws a credential for this purpose,
and sends it to the other members over links: with keys in the cluster, the public half
of a new CURVE pair, which authenticates and encrypts; else a password of 32 random
bytes. libzmq asks the authenticator before it accepts a message. When all members are
connected, the port is shut: libzmq cannot unbind without ending the connections, so the
kernel drops packets of all other senders (`refuse_newcomers`).
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
"""Seconds that sent messages have to leave when connections are closed."""

IDLE: Final = 1.0
"""Seconds that one wait lasts at most. A signal that comes just before a wait does not
end the wait."""

_ROOM: Final = 64
"""Number of messages that may wait on each side of a connection."""

_LARGEST: Final = 2 * MiB
"""Bytes of a frame, at most: a chunk of a collective call, with room to spare."""

_COPIED: Final = 256 * 1024
"""Bytes of a buffer below which the sender copies it: to track a smaller buffer costs
more than the copy."""

_OWN_FILES: Final = 24
"""File descriptors that a context, its threads, the ROUTER and the pipe that wakes a
thread take together."""
_FILES: Final = 4
"""File descriptors that each other member takes: those of two connections and of their
sockets."""

_NOBLOCK: Final = int(zmq.NOBLOCK)
_MORE: Final = int(zmq.NOBLOCK | zmq.SNDMORE)
_IN, _OUT = int(zmq.POLLIN), int(zmq.POLLOUT)


class DataMessage(NamedTuple):
    """A received message: its sender, its header, and its bytes."""

    member: int
    header: bytes
    data: memoryview


class DataConnections:
    """The data connections of one member to all other members, bound at any free port
    of ``where``. Create, connect and shut them on a loop, which runs the authenticator
    meanwhile.

    Args:
        member: Index of this member.
        encrypted: Whether to use CURVE.

    Raises:
        OSError: No port of ``where`` can be bound.
    """

    MOST: ClassVar = 64
    """Most members that a group may have: each has a connection to every other one, and
    one back."""

    def __init__(
        self, member: int, where: Address, settings: Settings, *, encrypted: bool
    ) -> None:
        self._member, self._settings = member, settings
        self._secret = b""
        self.credential = z85.encode(secrets.token_bytes(32))
        """The 40 bytes by which the other members, and nobody else, recognize this
        member."""
        if encrypted:
            self.credential, self._secret = zmq.curve_keypair()
        self._known: dict[str, int] = {}
        """Index of each admitted member, by credential."""
        self._met: dict[bytes, int] = {}
        """Index of each member that has sent something, by routing id of its
        connection."""
        self._accepted: dict[int, Accepted] = {}
        """The connection by which each of those members sends, by index."""
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
        """Lock of the only thread that may use the connections at present."""
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
        """Returns the data connections of ``member`` in a group of so many ``members``,
        bound at the host of ``address``, which may be a name.

        Raises:
            OSError: As the constructor; or the process may not open that many files.
            PermissionDeniedError: As `check_exposure`.

        Cancellation: nothing is bound.
        """
        where = await bindable(parse(address), "a member")
        await check_exposure(where, "a member of a group", security, settings)
        _require_room(members)
        return cls(member, where, settings, encrypted=security is not None)

    @property
    def port(self) -> int:
        """The port that this member has bound."""
        return parse(bound_to(self._router)).port

    def admit(self, member: int, credential: bytes) -> None:
        """Lets another member connect to this one with its ``credential``."""
        self._known[credential.decode()] = member

    async def connect(self, member: int, address: str, credential: bytes) -> None:
        """Connects to another member, which must have admitted this one before.

        Raises:
            OSError: The name in ``address`` cannot be resolved.

        Cancellation: this member is not connected to the other one.
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
        """Refuses all further connections to the bound port.

        Raises:
            OSError: The system cannot refuse connections of a socket that listens.
        """
        self._authenticator.close()
        refuse_newcomers(self._listener)

    def send(self, member: int, header: bytes, data: memoryview) -> bool:
        """Sends a message to a member; returns False if there is no room for it now.
        ``data`` must not change until the message has arrived."""
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
        """Waits until a message arrives, one of the connections to the members ``full``
        may have room, or `wake` is called, but at most ``seconds`` and `IDLE`. Returns
        whether any of these happened."""
        polled = self._wanted
        if full:
            polled = [*polled, *[(self._outward[member], _OUT) for member in full]]
        seconds = min(max(seconds, 0.0), IDLE)
        ready = zmq_poll(polled, math.ceil(seconds * 1000))
        if any(each == self._woken for each, _ in ready):
            os.read(self._woken, 4096)
        return bool(ready)

    def ended(self, members: Iterable[int]) -> list[int]:
        """Returns those of ``members`` whose connection has ended. Messages that they
        sent before can still be received."""
        known = [each for each in members if each in self._accepted]
        return [
            each
            for each in known
            # Another inode, or none, has the number: libzmq has closed the connection.
            if accepted(self._accepted[each].descriptor) != self._accepted[each]
        ]

    def wake(self) -> None:
        """Ends the present `wait`, or the next one. From any thread."""
        with self._closing:  # or the number is some other file's by now
            if not self._is_closed:
                with suppress(BlockingIOError):  # it was woken so often already
                    os.write(self._waker, b"!")

    def settle(self) -> None:
        """Adds the bytes moved since the last call to the counts of the process."""
        count_direct(self._sent, self._got)
        self._sent = self._got = 0

    def close(self, linger: float = LINGER) -> None:
        """Ends all connections. Blocks until sent messages have left, at most
        ``linger`` seconds. Call it on the loop unless the connections were shut
        before."""
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
        """Returns the member that sent this first message of a connection; None if the
        credential does not belong to a member with that routing id."""
        member = self._known.get(str(frame.get("User-Id")))
        if member is None or routing != b"%d" % member:
            return None
        self._accepted[member] = accepted(int(frame.get("__fd")))
        self._met[routing] = member
        return member

    def _bind(self, where: Address) -> int:
        """Binds the ROUTER, and returns the descriptor of the listening socket."""
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
    """Checks that enough file descriptors are free for connections to ``members``:
    libzmq ends the process if it cannot open a descriptor.

    Raises:
        OSError: EMFILE; the error says how many descriptors the process has.
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
    """Closes all data connections at the end of a program that did not close its
    groups, and so delivers what was sent."""
    for connections in list(_open):
        if connections.held.acquire(blocking=False):  # else a thread is frozen in it
            connections.close()


def _forget() -> None:
    """Forgets all data connections after a fork: they belong to the parent."""
    for connections in list(_open):
        connections.forget()
    _open.clear()


os.register_at_fork(after_in_child=_forget)
atexit.register(_close_all)
