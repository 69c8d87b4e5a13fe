"""One connection to one peer, without I/O: frames, commands and time in, orders out.

Theory of operation. A connection is GREETING until both HELLOs are there, then OPEN,
then CLOSED for ever; the next connection is another `Peer`. The side that connected is
the initiator: it alone sends requests.

*Order.* Everything but beats, credits and goodbyes leaves through one queue, so what is
sent in order arrives in order: a message waits until the body before it has left.
Messages carry a number: ``2n + 1`` for the initiator's n-th message if it wants an
answer (the answer has the same number), ``2n`` if not; 0 stands on what is outside the
order. A gap in the numbers means that a message was lost, and ends the connection.

*Bodies.* A body above ``limits.chunk`` is announced by its header and follows in chunks
(`_body`). Each message with more than `HEAVY` bytes of body costs the sender a credit;
credits return as such messages are taken. So neither side holds more than a window of
them, and a beat never waits behind more than that.

*Outcome.* A request ends exactly once: answered, failed by the other side, past its
deadline, or lost with the connection.

*Blame.* Nothing that arrives raises. What breaks the rules ends the connection with
`Closed`, and says why.
"""

from __future__ import annotations

import enum
from collections import deque
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, TypeVar, cast

from zstrat.errors import (
    BusyError,
    DeadlineExceededError,
    PeerLostError,
    ProtocolError,
    ZstratError,
    from_wire,
    to_wire,
)

from ._arrays import array_from
from ._body import Allocate, Assembly, Frame, allocate, cut
from ._codec import Announced, decode_header, encode
from ._greeting import Judge, described
from ._messages import Beat, Chunk, Credit, Failure, Goodbye, Hello, Message, PlainTree

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from zstrat.config import Limits, Timeouts

HEAVY: Final = 64 * 1024
"""Bytes of body above which a message costs a credit. Part of the protocol: both sides
have to count alike. Lighter ones are bounded by number."""

QUEUE: Final = 65536
"""Messages that wait to be sent: four times what a peer may have open, so only notices
to a peer that does not read can fill it."""

_NO_CHUNK: Final = 0, memoryview(b"")

Token = TypeVar("Token")
Frames = tuple[Frame, ...]


class State(enum.Enum):
    GREETING = enum.auto()
    OPEN = enum.auto()
    CLOSED = enum.auto()


class Greeted(NamedTuple):
    """The other side said HELLO; say `Peer.accept` or `Peer.refuse`."""

    hello: Hello


class Opened(NamedTuple):
    """Our HELLO was answered."""

    hello: Hello


class Requested(NamedTuple):
    """Hand the message on and call `Peer.reply` with the number, once."""

    number: int
    message: Message


class Noticed(NamedTuple):
    message: Message


class Answered(NamedTuple, Generic[Token]):
    token: Token
    message: Message


class Failed(NamedTuple, Generic[Token]):
    token: Token
    error: Exception


class Closed(NamedTuple):
    """The connection is over. ``refusal`` is set if one side refused the other;
    ``broken`` if only the connection failed, so that the peer may come back."""

    reason: str
    refusal: Exception | None = None
    broken: bool = False


Order = (
    Greeted | Opened | Requested | Noticed | Answered[Token] | Failed[Token] | Closed
)


class _Outgoing(NamedTuple):
    frames: Frames
    heavy: bool
    body: Iterator[tuple[int, memoryview]] | None
    number: int


class Peer(Generic[Token]):
    """State of one connection. Not to be used after it said `Closed`.

    ``Token`` is what the caller wants back with the outcome of a request.
    """

    def __init__(
        self,
        name: str,
        me: Hello,
        *,
        initiator: bool,
        judge: Judge,
        timeouts: Timeouts,
        limits: Limits,
        now: float,
        allocate: Allocate = allocate,
    ) -> None:
        """The network is connected: the initiator's first message is its HELLO."""
        self.name = name
        self.hello: Hello | None = None
        self.state = State.GREETING
        self.late = 0
        """Answers that came after the deadline of their request."""
        self._me, self._initiator, self._judge = me, initiator, judge
        self._timeouts, self._limits, self._allocate = timeouts, limits, allocate
        self._urgent: deque[Frames] = deque()
        self._queue: deque[_Outgoing] = deque()
        self._body: Iterator[tuple[int, memoryview]] | None = None
        self._number, self._next_chunk = 0, _NO_CHUNK
        self._credit, self._taken = limits.window, 0
        self._sent, self._received = 0, 0
        self._incoming: tuple[Announced, Assembly] | None = None
        self._open: dict[int, tuple[Token, float, type[Message]]] = {}
        self._serving: dict[int, bool] = {}
        self._bodies = 0
        self._sent_at = self._heard_at = self._ticked_at = now
        self._broken_at: float | None = None
        self._next_deadline = float("inf")
        if initiator:
            self._say(me)

    # ---- what the other side and the network do ---------------------------------

    def received(self, frames: Sequence[Frame], now: float) -> Sequence[Order[Token]]:
        """One message: its header and its raw frames, which it may keep as arrays."""
        if self.state is State.CLOSED:
            return ()
        try:
            announced = decode_header(frames[0], self._limits)
            self._heard_at, self._broken_at = now, None
            special = _SPECIAL.get(announced.message_kind)
            if special is not None and not announced.request:
                return special(self, announced, frames)
            return self._message(announced, frames)
        except ProtocolError as error:
            self._say(Goodbye(f"you broke the protocol: {error}"))
            return self._close(f"it broke the protocol: {error}")

    def disconnected(self, reason: str, now: float) -> Sequence[Order[Token]]:
        """The network below is gone. An acceptor waits for the peer to come back."""
        if self.state is State.CLOSED:
            return ()
        if self._initiator:
            return self._close(reason, broken=True)
        if self._broken_at is None:
            self._broken_at = now
        return ()

    def tick(self, now: float) -> Sequence[Order[Token]]:
        """Time has passed. To be called at `due` at the latest."""
        if self.state is State.CLOSED:
            return ()
        beat = self._timeouts.beat
        overslept = now - self._ticked_at - 2 * beat
        self._ticked_at = now
        if overslept > 0:
            # This process was stopped or blocked: what the peer said in the meantime
            # is still in the socket, so its silence is ours.
            self._heard_at += overslept
        why = self._silence(now)
        if why is not None:
            return why
        if (
            self.state is State.OPEN
            and now - self._sent_at >= beat
            and not self._urgent
        ):
            self._say(Beat(False))
        if self._taken:
            self._return_credit(1)
        return self._expired(now) if now >= self._next_deadline else ()

    @property
    def due(self) -> float:
        """When `tick` has to be called next."""
        return min(self._ticked_at + self._timeouts.beat / 2, self._next_deadline)

    # ---- what this side wants ---------------------------------------------------

    def request(self, message: Message, token: Token, deadline: float) -> None:
        """Queues a request of the initiator; ``token`` comes back with its outcome.

        Raises:
            BusyError: Too many are open.
            TypeError, ValueError: The message cannot be sent.
        """
        if len(self._open) >= self._limits.requests:
            raise BusyError(
                f"{self.name} has {len(self._open)} open requests, the most allowed"
            )
        number = 2 * self._sent + 3
        self._put(message, number)
        self._sent += 1
        self._open[number] = token, deadline, type(message)
        if deadline < self._next_deadline:
            self._next_deadline = deadline

    def notify(self, message: Message) -> None:
        """Queues a notice.

        Raises:
            BusyError: The peer does not read, and `QUEUE` messages wait for it.
            TypeError, ValueError: The message cannot be sent.
        """
        if len(self._queue) >= QUEUE:
            raise BusyError(f"{self.name} does not read: {QUEUE} messages wait for it")
        self._put(message, 2 * self._sent + 2)
        self._sent += 1

    def reply(self, number: int, message: Message) -> None:
        """Queues the outcome of a request; a second one for it is ignored."""
        heavy = self._serving.pop(number, None)
        if heavy is None or self.state is not State.OPEN:
            return
        if heavy:
            self._bodies -= 1
        try:
            self._put(message, number)
        except (TypeError, ValueError) as error:
            self._put(failure(error), number)
        if heavy:
            self._return_credit(self._threshold)

    def accept(self, hello: Hello, now: float) -> None:
        """Answers `Greeted` with our HELLO: the connection is open."""
        self.state, self.hello, self._heard_at = State.OPEN, hello, now
        self.name = described(hello)
        self._say(self._me)

    def refuse(self, error: ZstratError) -> Sequence[Order[Token]]:
        """Answers `Greeted` with the reason; the connection is over."""
        self._say(failure(error))
        return self._close(str(error), refusal=error)

    def leave(self, reason: str) -> Sequence[Order[Token]]:
        """Says goodbye; the connection is over when `transmit` has given it out."""
        if self.state is State.OPEN:
            self._say(Goodbye(reason))
        return self._close(reason)

    def transmit(self, now: float) -> Frames | None:
        """The next message to send, or None until something changes."""
        if self._urgent:
            self._sent_at = now
            return self._urgent.popleft()
        if self.state is not State.OPEN:
            return None
        if self._body is not None:
            return self._chunk(now)
        if not self._queue:
            return None
        outgoing = self._queue[0]
        if outgoing.heavy:
            if not self._credit:
                return None
            self._credit -= 1
        self._queue.popleft()
        if outgoing.body is not None:
            self._number, self._body = outgoing.number, outgoing.body
            self._advance()
        self._sent_at = now
        return outgoing.frames

    @property
    def is_idle(self) -> bool:
        """Nothing waits to be sent."""
        return not (self._urgent or self._queue or self._body)

    @property
    def open_requests(self) -> int:
        return len(self._open)

    # ---- sending ----------------------------------------------------------------

    def _put(self, message: Message, number: int) -> None:
        header, raws = encode(message, number, self._limits.header)
        if not raws:
            self._queue.append(_Outgoing((header,), False, None, number))
            return
        total = sum([raw.nbytes for raw in raws])
        if total > self._limits.body:
            raise ValueError(
                f"{type(message).__name__}: {total} bytes of arrays, at most "
                f"{self._limits.body} may be sent: split the message"
            )
        if total <= self._limits.chunk and len(raws) <= self._limits.frames:
            frames: Frames = (header, *[raw.data for raw in raws])
            self._queue.append(_Outgoing(frames, total > HEAVY, None, number))
        else:
            body = cut(raws, self._limits.chunk)
            self._queue.append(_Outgoing((header,), False, body, number))

    def _chunk(self, now: float) -> Frames | None:
        if not self._credit:
            return None
        self._credit -= 1
        self._sent_at = now
        offset, chunk = self._next_chunk
        self._advance()
        return encode(Chunk(self._number, offset))[0], chunk

    def _advance(self) -> None:
        assert self._body is not None
        following = next(self._body, None)
        if following is None:
            self._body, self._next_chunk = None, _NO_CHUNK
        else:
            self._next_chunk = following

    def _say(self, message: Message) -> None:
        self._urgent.append((encode(message)[0],))

    def _return_credit(self, at_least: int) -> None:
        # A peer whose many large requests wait here for their outcome gets no credit
        # for more: a slow task slows its callers, it does not fill its memory.
        if self._taken >= at_least and self._bodies < self._limits.streams:
            self._say(Credit(0, self._taken))
            self._taken = 0

    # ---- receiving --------------------------------------------------------------

    def _message(
        self, announced: Announced, frames: Sequence[Frame]
    ) -> Sequence[Order[Token]]:
        """A message of the ordered kind."""
        if self.state is not State.OPEN:
            raise ProtocolError(
                f"expected Hello, got {announced.message_kind.__name__}"
            )
        if announced.message_kind in _SPECIAL and announced.message_kind is not Failure:
            raise ProtocolError(f"{announced.message_kind.__name__} has no number")
        if self._incoming is not None:
            raise ProtocolError(
                f"{announced.message_kind.__name__} inside the body of another message"
            )
        number, specs = announced.request, announced.specs
        if not (self._initiator and number & 1):
            if number >> 1 != self._received + 1:
                raise ProtocolError(
                    f"expected message {self._received + 1}, got {number >> 1}: "
                    "messages were lost"
                )
            self._received += 1
        got = len(frames) - 1
        if got != len(specs):
            if got:
                raise ProtocolError(
                    f"{announced.message_kind.__name__}: expected {len(specs)} frames, "
                    f"got {got}"
                )
            return self._begin(announced)
        if not got:
            return self._deliver(number, announced.build(()), False)
        raws = frames[1:]
        message = announced.build(tuple(map(array_from, specs, raws)))
        heavy = sum(map(len, raws)) > HEAVY
        if heavy:
            self._take()
        return self._deliver(number, message, heavy)

    def _begin(self, announced: Announced) -> Sequence[Order[Token]]:
        try:
            assembly = Assembly(announced.specs, self._allocate)
        except MemoryError:
            nbytes = sum(spec.nbytes for spec in announced.specs)
            return self._close(f"no memory for the {nbytes} bytes that it announced")
        self._incoming = announced, assembly
        return self._completed()

    def _on_chunk(
        self, chunk: Announced, frames: Sequence[Frame]
    ) -> Sequence[Order[Token]]:
        match chunk.build(()):
            case Chunk(stream, offset) if self._incoming is not None:
                announced, assembly = self._incoming
                if stream != announced.request or len(frames) != 2:
                    raise ProtocolError(
                        f"expected a chunk of body {announced.request} in one frame, "
                        f"got {len(frames) - 1} frames of {stream}"
                    )
                assembly.take(offset, frames[1])
                self._take()
                return self._completed()
        raise ProtocolError("a chunk of a body that was not announced")

    def _completed(self) -> Sequence[Order[Token]]:
        assert self._incoming is not None
        announced, assembly = self._incoming
        if not assembly.is_complete:
            return ()
        self._incoming = None
        message = announced.build(assembly.arrays())
        return self._deliver(announced.request, message, True)

    def _take(self) -> None:
        self._taken += 1
        self._return_credit(self._threshold)

    @property
    def _threshold(self) -> int:
        # A credit costs a message: one for a third of the window keeps the sender busy.
        return max(1, self._limits.window // 3)

    def _deliver(
        self, number: int, message: Message, heavy: bool
    ) -> Sequence[Order[Token]]:
        if not number & 1:
            return (Noticed(message),)
        if not self._initiator:
            if len(self._serving) >= self._limits.requests:
                busy = BusyError(
                    f"{len(self._serving)} requests are open: wait for them"
                )
                self._put(failure(busy), number)
                return ()
            self._serving[number] = heavy
            self._bodies += heavy
            return (Requested(number, message),)
        entry = self._open.pop(number, None)
        if entry is None:
            self.late += 1
            return ()
        if type(message) is Failure:
            return (Failed(entry[0], from_wire(message.error)),)
        return (Answered(entry[0], message),)

    def _on_hello(
        self, announced: Announced, frames: Sequence[Frame]
    ) -> Sequence[Order[Token]]:
        hello = announced.build(())
        assert isinstance(hello, Hello)
        if self.state is not State.GREETING or self.hello is not None:
            raise ProtocolError("Hello on a connection that is open")
        error = self._judge(hello)
        if error is not None:
            return self.refuse(error)
        self.hello = hello
        if not self._initiator:
            return (Greeted(hello),)
        self.state = State.OPEN
        return (Opened(hello),)

    def _on_beat(
        self, announced: Announced, frames: Sequence[Frame]
    ) -> Sequence[Order[Token]]:
        match announced.build(()):
            case Beat(wanted=True) if not self._urgent and self.state is State.OPEN:
                self._say(Beat(False))
        return ()

    def _on_credit(
        self, announced: Announced, frames: Sequence[Frame]
    ) -> Sequence[Order[Token]]:
        match announced.build(()):
            case Credit(chunks=chunks) if chunks > 0:
                self._credit = min(self._limits.window, self._credit + chunks)
        return ()

    def _on_goodbye(
        self, announced: Announced, frames: Sequence[Frame]
    ) -> Sequence[Order[Token]]:
        match announced.build(()):
            case Goodbye(reason):
                return self._close(f"it left: {reason:.500}")
        return ()

    def _on_failure(
        self, announced: Announced, frames: Sequence[Frame]
    ) -> Sequence[Order[Token]]:
        match announced.build(()):
            case Failure(error):
                refusal = from_wire(error)
                return self._close(f"it refused us: {refusal}", refusal=refusal)
        return ()

    # ---- the end ----------------------------------------------------------------

    def _silence(self, now: float) -> Sequence[Order[Token]] | None:
        times, silence = self._timeouts, now - self._heard_at
        if self._broken_at is not None and now - self._broken_at > times.reconnect:
            return self._close(
                f"its connection broke and did not come back in {times.reconnect:g} s"
            )
        if self.state is State.GREETING and silence > times.handshake:
            return self._close(f"it did not greet within {silence:.1f} s", broken=True)
        if silence > times.patience:
            return self._close(f"it was silent for {silence:.1f} s")
        return None

    def _expired(self, now: float) -> Sequence[Order[Token]]:
        # Looking at all is cheap because it is rare: deadlines hardly ever pass, and
        # `_next_deadline` is a lower bound that costs a request one comparison.
        late = [n for n, (_, deadline, _) in self._open.items() if deadline <= now]
        orders: list[Order[Token]] = []
        for number in late:
            token, _, kind = self._open.pop(number)
            orders.append(Failed(token, self._too_late(kind)))
        rest = (deadline for _, deadline, _ in self._open.values())
        self._next_deadline = max(min(rest, default=float("inf")), now + _SCAN)
        return orders

    def _too_late(self, kind: type[Message]) -> DeadlineExceededError:
        return DeadlineExceededError(
            f"{self.name} did not answer {kind.__name__} before its deadline; "
            "it may still carry it out"
        )

    def _close(
        self, reason: str, refusal: Exception | None = None, broken: bool = False
    ) -> Sequence[Order[Token]]:
        if self.state is State.CLOSED:
            return ()
        self.state = State.CLOSED
        orders: list[Order[Token]] = [
            Failed(token, PeerLostError(self.name, reason))
            for token, _, _ in self._open.values()
        ]
        for each in (self._open, self._serving, self._queue):
            each.clear()
        self._body = self._incoming = None
        orders.append(Closed(reason, refusal, broken))
        return orders


_SCAN: Final = 0.01
"""Seconds between two looks at all deadlines, at the least."""


def failure(error: BaseException) -> Failure:
    """The error as the outcome of a request."""
    return Failure(cast("PlainTree", to_wire(error)))


_SPECIAL: Final[dict[type[Message], Callable[..., Sequence[Order[Any]]]]] = {
    Hello: Peer._on_hello,
    Beat: Peer._on_beat,
    Chunk: Peer._on_chunk,
    Credit: Peer._on_credit,
    Goodbye: Peer._on_goodbye,
    Failure: Peer._on_failure,
}
