"""ZeroMQ over a network that loses connections: sockets for `Link` and `Endpoint`.

What libzmq and TCP promise holds here, and nothing more: a connection delivers what was
sent in order, a prefix of it if it breaks; connections do not know of each other's
order; who connects tries again and again; a process that is killed hangs up, one that
is frozen still accepts connections and reads nothing, and of a path that is cut nobody
is told.

A host is a process here: paths lead from one name to another.
"""

from __future__ import annotations

import errno
import itertools
import zlib
from collections import deque
from typing import TYPE_CHECKING, Any, Final, final

from zstrat.transport import Event, EventKind, Sending, Sockets
from zstrat.wire.connection import Carried

from ._paths import Way

if TYPE_CHECKING:
    from collections.abc import Callable

    from zstrat.config import Settings

    from ._paths import Weather
    from ._world import VirtualLoop, World

FIRST_RETRY: Final = 0.02
LONGEST_RETRY: Final = 1.0
"""Seconds between two attempts of a socket to connect, as libzmq is told to make."""

_FREE_PORT: Final = 20000
"""From here on nobody has an address of his own."""


@final
class VirtualFrame:
    """A frame that has arrived; ``descriptor`` is that of its connection."""

    __slots__ = ("bytes", "descriptor")

    def __init__(self, content: bytes, descriptor: int) -> None:
        self.bytes, self.descriptor = content, descriptor

    def __len__(self) -> int:
        return len(self.bytes)

    @property
    def buffer(self) -> memoryview:
        return memoryview(self.bytes)

    def get(self, name: str) -> int:
        """Only its descriptor is known."""
        assert name == "__fd", name
        return self.descriptor


@final
class Line:
    """One connection, as both of its ends know it; stands for what is accepted."""

    def __init__(
        self, descriptor: int, dealer: VirtualSocket, router: VirtualSocket
    ) -> None:
        self.descriptor, self.dealer, self.router = descriptor, dealer, router
        self.routing = b"\0" + descriptor.to_bytes(4, "big")
        network = dealer.network
        self.out = network.way(dealer.host, router.host, router.loop, descriptor)
        self.back = network.way(router.host, dealer.host, dealer.loop, descriptor)
        self.is_over = False
        self._is_told = {dealer: False, router: False}

    @property
    def address(self) -> str:
        """The host at the other end."""
        return self.dealer.host

    def carried(self) -> Carried:
        """Bytes are not counted here."""
        return Carried()

    def is_held_by(self, pid: int) -> bool:
        """Each process is a machine of its own here."""
        del pid
        return False

    def hang_up(self) -> None:
        """The accepting side ends it."""
        self.end(self.router)

    def way_from(self, side: VirtualSocket) -> Way:
        return self.out if side is self.dealer else self.back

    def way_to(self, side: VirtualSocket) -> Way:
        return self.back if side is self.dealer else self.out

    def end(self, side: VirtualSocket) -> None:
        """One side closes: the other hears of it behind what was sent."""
        if self.is_over:
            return
        self.is_over = True
        other = self.router if side is self.dealer else self.dealer
        self.way_to(side).cut()
        self.way_from(side).send(lambda: self._broke(other))
        self._broke_soon(side)

    def reset(self) -> None:
        """The line breaks on its way: of what is under way some is lost, at both
        ends."""
        if self.is_over:
            return
        self.is_over = True
        for side in (self.dealer, self.router):
            way = self.way_to(side)
            world = side.loop.world
            after = self.dealer.network.weather.delay(way.source, way.target)
            side.loop.arrive(world.now + after, self._broke, side)

    def _broke_soon(self, side: VirtualSocket) -> None:
        side.loop.arrive(side.loop.world.now, self._broke, side)

    def _broke(self, side: VirtualSocket) -> None:
        self.way_to(side).cut()
        if self._is_told[side]:
            return
        self._is_told[side] = True
        side.lost(self)
        if all(self._is_told.values()):
            self.out.forget()
            self.back.forget()


@final
class VirtualSocket:
    """A DEALER or ROUTER of one process."""

    def __init__(
        self, network: Network, host: str, loop: VirtualLoop, handshake: float
    ) -> None:
        self.network, self.host, self.loop = network, host, loop
        self.handshake = handshake
        """Seconds that the other side has to shake hands."""
        self.address = ""
        self.lines: dict[bytes, Line] = {}
        self.watch: VirtualMonitor | None = None
        self.pump: VirtualPump | None = None
        self.is_closed = False
        self._pause = FIRST_RETRY
        self._unsent: deque[tuple[bytes, ...]] = deque()
        self._is_dealer = False

    def bind(self, endpoint: str) -> None:
        self.address = self.network.listen(self, endpoint)

    def connect(self, endpoint: str) -> None:
        self.address, self._is_dealer = endpoint, True
        self._try()

    def close(self, linger: float = 0.0) -> None:
        del linger  # what was sent is under way already
        self.is_closed = True
        if self.network.listeners.get(self.address) is self:
            del self.network.listeners[self.address]
        for line in list(self.lines.values()):
            line.end(self)
        self.lines.clear()

    def send(self, frames: tuple[bytes, ...], to: tuple[bytes, ...]) -> bool | None:
        """True: it is sent. False: not now. None: nobody is there."""
        if to:
            line = self.lines.get(to[0])
            if line is None:
                return None
        elif not self.lines:
            if len(self._unsent) >= self.network.capacity:
                return False
            self._unsent.append(frames)  # libzmq keeps it for the next connection
            return True
        else:
            line = next(iter(self.lines.values()))
        way = line.way_from(self)
        if way.under_way >= self.network.capacity:
            return False
        self._send(line, frames)
        return True

    def joined(self, line: Line) -> None:
        """Called when both ends have shaken hands."""
        if self.is_closed:
            line.end(self)
            return
        self.lines[line.routing] = line
        self._pause = FIRST_RETRY
        self.tell(EventKind.READY, line.descriptor)
        while self._unsent and not self.is_closed and self.lines:
            self._send(line, self._unsent.popleft())

    def lost(self, line: Line) -> None:
        """Called when a connection is over."""
        self.lines.pop(line.routing, None)
        if self.is_closed:
            return
        self.tell(EventKind.BROKEN, line.descriptor)
        if self._is_dealer and not self.is_closed:
            self._try_later()

    def tell(self, kind: EventKind, value: int) -> None:
        if self.watch is not None:
            self.watch.tell(kind, value)

    def arrived(
        self, line: Line, frames: tuple[bytes, ...], sender: VirtualSocket
    ) -> None:
        """A message; its sender has room for another one."""
        if not self.is_closed and self.pump is not None:
            whole = (line.routing, *frames) if self is line.router else frames
            self.pump.take([VirtualFrame(part, line.descriptor) for part in whole])
        if sender.pump is not None and sender.pump.is_blocked:
            world = sender.loop.world
            sender.loop.arrive(world.now, sender.pump.unblock)

    def _send(self, line: Line, frames: tuple[bytes, ...]) -> None:
        other = line.router if self is line.dealer else line.dealer
        line.way_from(self).send(lambda: other.arrived(line, frames, self), frames)

    def _try(self) -> None:
        if not self.is_closed:
            self.network.connect(self)

    def refused(self) -> None:
        """Called when nothing listens at the address."""
        if not self.is_closed:
            self.tell(EventKind.RETRIED, 0)
            self._try_later()

    def _try_later(self) -> None:
        pause, self._pause = self._pause, min(2 * self._pause, LONGEST_RETRY)
        self.loop.arrive(self.loop.world.now + pause, self._try)


@final
class VirtualPump:
    """Stands for the `Pump` of a socket."""

    def __init__(
        self, socket: VirtualSocket, receive: Callable[[list[Any]], None]
    ) -> None:
        self._socket, self._receive = socket, receive
        self._blocked: dict[Any, None] = {}
        socket.pump = self

    def send(self, frames: tuple[Any, ...], to: tuple[bytes, ...] = ()) -> Any:
        if self._socket.is_closed:
            return Sending.GONE
        copies = tuple([bytes(frame) for frame in frames])
        sent = self._socket.send(copies, to)
        if sent is None:
            return Sending.GONE
        return Sending.DONE if sent else Sending.BLOCKED

    def block(self, outlet: Any) -> None:
        self._blocked[outlet] = None

    @property
    def is_blocked(self) -> bool:
        return bool(self._blocked)

    def unblock(self) -> None:
        """There may be room."""
        blocked, self._blocked = self._blocked, {}
        for outlet in blocked:
            outlet.flush()

    def take(self, frames: list[VirtualFrame]) -> None:
        self._receive(frames)

    @property
    def is_closed(self) -> bool:
        return self._socket.is_closed

    def drain(self) -> None:
        """What has arrived was taken when it did."""

    def close(self, linger: float) -> None:
        self._blocked.clear()
        self._socket.close(linger)


@final
class VirtualMonitor:
    """Stands for the `Monitor` of a socket."""

    def __init__(
        self,
        socket: VirtualSocket,
        kinds: tuple[EventKind, ...],
        happened: Callable[[Event], None],
    ) -> None:
        self._socket, self._happened = socket, happened
        self._watched = frozenset(kinds)
        socket.watch = self

    def tell(self, kind: EventKind, value: int) -> None:
        if kind in self._watched:
            self._happened(Event(kind, value))

    def drain(self) -> None:
        """What has happened was told when it did."""

    def close(self) -> None:
        self._socket.watch = None


@final
class Network:
    """All sockets, and what connects them.

    Args:
        capacity: Messages that one connection holds, in one direction.
        note: Told of each message that arrives: which way, and its frames.
    """

    def __init__(
        self,
        world: World,
        weather: Weather,
        capacity: int,
        note: Callable[[Way, tuple[bytes, ...]], None],
    ) -> None:
        self._world, self.weather, self.capacity = world, weather, capacity
        self._note = note
        self.hosts: dict[str, str] = {}
        """Whose an address is, whether that process lives or not."""
        self.listeners: dict[str, VirtualSocket] = {}
        self.lines: dict[int, Line] = {}
        self._descriptors = itertools.count(100)
        self._ports = itertools.count(_FREE_PORT)

    def sockets(self, host: str, loop: VirtualLoop) -> VirtualSockets:
        """The sockets of one process."""
        return VirtualSockets(self, host, loop)

    def way(self, source: str, target: str, loop: VirtualLoop, line: int = 0) -> Way:
        return Way(self.weather, source, target, loop, line, self._note)

    def listen(self, socket: VirtualSocket, endpoint: str) -> str:
        """From now on connections are accepted there; port 0: where nobody is."""
        if endpoint.endswith(":*"):  # as libzmq writes port 0
            endpoint = f"{endpoint[:-1]}{next(self._ports)}"
            self.hosts[endpoint] = socket.host
        self.listeners[endpoint] = socket
        return endpoint

    def connect(self, dealer: VirtualSocket) -> None:
        """One attempt: a knock, and both shake hands."""
        knock = self.way(dealer.host, self.hosts[dealer.address], dealer.loop)

        def arrives() -> None:
            knock.forget()
            if dealer.is_closed:
                return
            router = self.listeners.get(dealer.address)
            if router is None:
                dealer.refused()
            else:
                self._accept(dealer, router)

        knock.send(arrives)

    def _accept(self, dealer: VirtualSocket, router: VirtualSocket) -> None:
        line = Line(next(self._descriptors), dealer, router)
        self.lines[line.descriptor] = line
        dealer.tell(EventKind.CONNECTED, line.descriptor)
        if line.is_over or dealer.is_closed:
            line.end(dealer)
            return
        too_late = self._world.now + dealer.handshake
        dealer.loop.arrive(too_late, self._too_late, line)

        def greets() -> None:
            if router.is_closed or line.is_over:
                line.end(router)
                return
            router.lines[line.routing] = line
            router.tell(EventKind.ACCEPTED, line.descriptor)
            line.back.send(lambda: dealer.joined(line))

        line.out.send(greets)

    def _too_late(self, line: Line) -> None:
        """The other side has not shaken hands."""
        dealer = line.dealer
        if line.is_over or line.routing in dealer.lines or dealer.is_closed:
            return
        dealer.tell(EventKind.FAILED, errno.EAGAIN)
        line.end(dealer)

    def lines_of(self, host: str, other: str | None = None) -> list[Line]:
        """Connections of a process, or between two."""
        return [
            line
            for line in self.lines.values()
            if not line.is_over
            and host in (ends := (line.dealer.host, line.router.host))
            and (other is None or other in ends)
        ]

    def vanish(self, loop: VirtualLoop, silently: bool) -> None:
        """A process is dead. Its host hangs up, or is dead, too."""
        for address, listener in list(self.listeners.items()):
            if listener.loop is loop:
                del self.listeners[address]
        for line in list(self.lines.values()):
            for side in (line.dealer, line.router):
                if side.loop is not loop or line.is_over:
                    continue
                if silently:
                    continue
                if self._world.random.random() < 0.5:
                    line.way_from(side).cut()  # what it had sent has not left yet
                    line.reset()
                else:
                    line.end(side)


@final
class VirtualSockets:
    """Stands for `zstrat.transport.Sockets` in one process."""

    def __init__(self, network: Network, host: str, loop: VirtualLoop) -> None:
        self._network, self._host, self._loop = network, host, loop

    def context(self) -> Any:
        return None

    async def end(self, context: Any) -> None:
        pass

    def lease(self) -> Any:
        return None

    async def give_back(self) -> None:
        pass

    def socket(self, context: Any, kind: int, address: Any, settings: Settings) -> Any:
        handshake = settings.timeouts.handshake
        return VirtualSocket(self._network, self._host, self._loop, handshake)

    def bound_to(self, socket: Any) -> str:
        return str(socket.address)

    def accepted(self, descriptor: int) -> Any:
        return self._network.lines[descriptor]

    def monitor(
        self,
        socket: Any,
        kinds: tuple[EventKind, ...],
        happened: Callable[[Event], None],
    ) -> Any:
        return VirtualMonitor(socket, kinds, happened)

    def pump(
        self, socket: Any, receive: Callable[[list[Any]], None], header: int = 0
    ) -> Any:
        return VirtualPump(socket, receive)


_: type[Sockets] = VirtualSockets


def digest_of(frames: tuple[bytes, ...]) -> int:
    """The digest of a message, for the trace of a run."""
    digest = 0
    for frame in frames:
        digest = zlib.crc32(frame, digest)
    return digest
