"""One connection to one peer, without I/O: takes frames, commands and the time, and
returns orders.

Theory of operation. A connection is GREETING until both sides have sent HELLO, then
OPEN, and in the end CLOSED; the next connection is another `Peer`. The side that
connected is the initiator: it alone sends requests.

*Early messages.* A message that comes before the greeting was meant for an earlier
connection: libzmq reconnects by itself, and sends what it still had, before the peer
notices that its connection broke. Such a message is dropped, and does not shorten the
time that the peer has to greet.

*Order.* All messages but greetings, heartbeats, credits and goodbyes leave through one
queue, so they arrive in the order in which they were sent: a message waits until the
body before it has left. Messages carry a number: ``2n + 1`` for the n-th of the
initiator if it wants an answer (the answer has the same number), ``2n`` if not; a
message outside the order has the number 0. A gap means that a message was lost, and
ends the connection.

*Bodies.* A body above ``limits.chunk`` is announced by its header and follows in chunks
(`_body`). Each message with more than `HEAVY` bytes of body costs the sender a credit;
credits return as the receiver takes such messages. So neither side holds more than a
window (the number of credits) of them, and a heartbeat never waits for more than that.

*Unread.* When more than ``limits.unread`` bytes of answers wait for a peer that sends
requests, its messages are held back undecoded until it has read some answers. A peer
that nevertheless sends more and more, or reads nothing at all, is cut off.

*Outcome.* A request ends exactly once: answered, failed by the other side, past its
deadline, or lost with the connection.

*Blame.* No arriving message makes a method raise. A message that breaks the rules ends
the connection with `Closed`, which says why.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Generic, cast

from zstrat.config import environment
from zstrat.errors import (
    BusyError,
    DeadlineExceededError,
    PeerLostError,
    ProtocolError,
    ZstratError,
    from_wire,
    to_wire,
)
from zstrat.wire._codec import Announced, decode_header
from zstrat.wire._link_messages import (
    Again,
    Beat,
    Chunk,
    Credit,
    Goodbye,
    Hello,
    Mapped,
    Offer,
    Placed,
    Released,
)
from zstrat.wire._task_messages import Failure

from ._deadlines import Carrier, Liveness, Requests
from ._greeting import MismatchOf, described, quoted
from ._inbox import Arrived, Backlog, Inbox
from ._memory_offers import MemoryOffers
from ._orders import (
    Answered,
    Closed,
    Failed,
    Greeted,
    Noticed,
    Opened,
    Order,
    OrderState,
    Requested,
    Token,
)
from ._outbox import Frames, Outbox

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zstrat.config import Limits, Timeouts
    from zstrat.wire._messages import Message
    from zstrat.wire._schema import PlainTree

    from ._body import Absorb, Allocate, Frame
    from ._channel import SharedMemoryChannel
    from ._deadlines import Waiting

LONGEST_RETURN: Final = 86400.0
"""Most seconds that a peer which said goodbye may announce until its return."""

QUEUE: Final = 65536
"""Most messages that may wait to be sent: four times as many as a peer may have open
requests. So only a peer that does not read reaches this, by the notices for it or by
requesting more than it may."""

_OPEN: Final = OrderState.OPEN  # a look at a member of an enum costs as much as a call
_CLOSED: Final = OrderState.CLOSED


class Peer(Generic[Token]):
    """The state of one connection. Do not use it after it returned `Closed`.

    ``Token`` is the type of the value that the caller gives with a request and gets
    back with its outcome.
    """

    def __init__(
        self,
        name: str,
        me: Hello,
        *,
        initiator: bool,
        mismatch: MismatchOf,
        timeouts: Timeouts,
        limits: Limits,
        now: float,
        allocate: Allocate,
        carrier: Carrier,
        channel: SharedMemoryChannel | None = None,
        absorb: Absorb | None = None,
    ) -> None:
        """Starts the protocol on a new network connection: the initiator queues its
        HELLO."""
        self.name = name
        self.hello: Hello | None = None
        self.state = OrderState.GREETING
        self.late = 0
        """Number of answers that came after the deadline of their request."""
        self.heard = 0
        """Number of messages that came, without those that were `early`."""
        self.early = 0
        """Number of messages that came before the greeting, and were dropped."""
        self._me, self._initiator, self._mismatch = me, initiator, mismatch
        self._limits = self.incoming = limits
        """``incoming`` limits the headers of the other side: a peer that is not trusted
        yet, or has little to send, may get lower limits."""
        # A credit costs a message: one for a third of the window keeps a sender busy.
        self._threshold = max(1, limits.window // 3)
        self.outbox = Outbox(limits, channel)
        """The messages to send; `transmit` alone takes from it."""
        self._inbox = Inbox(
            allocate, channel, limits, initiator=initiator, absorb=absorb
        )
        self._memory_offers = MemoryOffers(channel, self.outbox)
        self._requests: Requests[Token] = Requests()
        self._serving: dict[int, bool] = {}  # number -> whether it had a heavy body
        self._promised: dict[int, int] = {}
        self._bodies = 0  # of the requests that are being served
        self._sent = 0
        self.unread = 0
        """Bytes that the peer had not read when the connection ended."""
        self._most_unread = float("inf") if initiator else limits.unread
        silence = 2 * timeouts.liveness
        self._backlog = Backlog(self._most_unread, silence, now, carrier)
        self.held = self._backlog.messages
        """Messages of the peer that are held back; call `resume` when the peer
        `may_resume`."""
        self._life = Liveness(timeouts, now, carrier)
        if initiator:
            self.outbox.say(me)

    def received(self, frames: Sequence[Frame], now: float) -> Sequence[Order[Token]]:
        """Handles one message: its header and its raw frames, which the message may
        keep as arrays."""
        if self.state is _CLOSED:
            return ()
        try:
            announced = decode_header(frames[0], self.incoming)
            kind = announced.message_kind
            is_special = not announced.request and kind in _SPECIAL
            if self.state is not _OPEN and not (is_special and kind in _BEFORE_OPEN):
                self.early += 1
                return ()
            life = self._life
            # A message proves that the network is back.
            life.heard_at, life.broken_at = now, None
            self.heard += 1
            # Even of a peer that is held back: its credits say that it reads again.
            if is_special:
                return self._special(announced, frames)
            # Behind what is held already: order is part of the protocol.
            if self.held or self.outbox.nbytes > self._most_unread:
                self._backlog.keep(frames)
                return ()
            return self._message(announced, frames)
        except ProtocolError as error:
            return self._blame(error)

    @property
    def may_resume(self) -> bool:
        """Whether messages are held back, and the peer has read enough answers for them
        to be handled."""
        return bool(self.held) and self.outbox.nbytes <= self._most_unread

    def resume(self) -> Sequence[Order[Token]]:
        """Handles the oldest message that was held back, as `received` would have. Call
        it only if `may_resume`."""
        frames = self._backlog.take()
        try:
            announced = decode_header(frames[0], self.incoming)
            # Checked again, although it was checked when it came: only the bytes were
            # kept, as they take less memory.
            if announced.message_kind is Chunk:
                return self._outside(announced.build(()), frames[1:])
            return self._message(announced, frames)
        except ProtocolError as error:
            return self._blame(error)

    def disconnected(self, reason: str, now: float) -> Sequence[Order[Token]]:
        """Notes that the network connection is gone. If the peer is the initiator,
        waits for it to reconnect."""
        if self._initiator:
            return self._close(reason, broken=True)
        # The first report counts: later ones give the peer no more time.
        if self._life.broken_at is None:
            self._life.broken_at = now
        return ()

    def tick(self, now: float) -> Sequence[Order[Token]]:
        """Checks whether the peer is lost and which requests are late, and queues
        messages that are due, such as heartbeats. Call it at `due` at the latest."""
        if self.state is OrderState.CLOSED:
            return ()
        life, greeted = self._life, self.state is OrderState.OPEN
        life.tick(now)
        if greeted:
            life.look(now)
        if life.is_lost(now, greeted=greeted):
            broken = not greeted and life.broken_at is None
            words = life.loss(now, greeted=greeted)
            if self.early:
                words += (
                    f", and sent {self.early} other messages: it continues a "
                    "connection that was given up here, or is not a task"
                )
            return self._close(words, broken=broken)
        if greeted and not self._initiator and self._backlog.is_deaf(self.outbox, now):
            return self._close("it reads nothing of what waits for it")
        if greeted:
            # What is urgent leaves before a beat could, and says as much.
            if life.is_quiet(now) and not self.outbox.is_urgent:
                self.outbox.say(_BEAT)
            # The rest of a burst, which stayed below the threshold.
            self._return_credit(1)
            self._memory_offers.release()
        return [
            Failed(each.token, self._too_late(each.kind))
            for each in self._requests.take_late(now)
        ]

    @property
    def due(self) -> float:
        """Time at which `tick` has to be called next."""
        return min(self._life.due, self._requests.due)

    @property
    def is_broken(self) -> bool:
        """Whether the network connection below is gone, and the peer may reconnect."""
        return self._life.broken_at is not None

    @property
    def is_heard(self) -> bool:
        """Whether the connection is open, and the peer has sent a message within the
        last two heartbeats."""
        return self.state is _OPEN and self._life.is_heard

    def request(
        self, message: Message, token: Token, deadline: float, idle_timeout: float = 0.0
    ) -> None:
        """Queues a request of the initiator. ``token`` comes back with the outcome.

        Args:
            idle_timeout: Seconds that the request may wait after the last progress,
                even beyond its deadline (see `Requests`); 0: progress does not put the
                deadline off.

        Raises:
            BusyError: Too many requests are open.
            TypeError, ValueError: The message cannot be sent.
        """
        if len(self._requests) >= self._limits.requests:
            raise BusyError(
                f"{self.name}: {len(self._requests)} requests are open, the most that "
                "may be: wait for some of them"
            )
        self._request(message, token, deadline, idle_timeout)

    def notify(self, message: Message) -> None:
        """Queues a notice, a message without an answer.

        Raises:
            BusyError: The peer does not read, and `QUEUE` messages wait for it.
            TypeError, ValueError: The message cannot be sent.
        """
        if len(self.outbox) >= QUEUE:
            raise BusyError(f"{self.name} does not read: {QUEUE} messages wait for it")
        self.outbox.put(message, 2 * self._sent + 2)
        self._sent += 1

    def promise(self, number: int, nbytes: int) -> None:
        """Counts the outcome of request ``number``, which will have ``nbytes`` bytes,
        as waiting to be sent from now on. So a peer that requests much with short
        messages is held back before the answers take memory."""
        if number in self._serving and number not in self._promised:
            self._promised[number] = nbytes
            self.outbox.nbytes += nbytes

    def reply(self, number: int, message: Message) -> None:
        """Queues the outcome of request ``number``; ignores a second outcome of the
        same request."""
        # None: answered before, or the connection has ended meanwhile.
        heavy = self._serving.pop(number, None)
        if heavy is None or self.state is not _OPEN:
            return
        # The real size counts from here on.
        if self._promised:
            self.outbox.nbytes -= self._promised.pop(number, 0)
        try:
            self.outbox.put(message, number)
        except (TypeError, ValueError) as error:
            # An outcome that cannot be sent is still an outcome: the caller must not
            # wait.
            self.outbox.put(failure(error), number)
        if heavy:
            self._bodies -= 1
            self._return_credit(self._threshold)

    def accept(self, hello: Hello, now: float) -> None:
        """Answers `Greeted` with the HELLO of this side, which opens the connection."""
        self.state, self.hello, self._life.heard_at = OrderState.OPEN, hello, now
        self.name = described(hello)
        self.outbox.say(self._me)

    def refuse(self, error: ZstratError) -> Sequence[Order[Token]]:
        """Answers `Greeted` with the error that says why the peer is refused; the
        connection is over."""
        self.outbox.say(failure(error))
        return self._close(str(error), refusal=error)

    def leave(self, reason: str, returns: float = 0.0) -> Sequence[Order[Token]]:
        """Queues a `Goodbye`; the connection is over once `transmit` has returned
        it."""
        if self.state is OrderState.OPEN:
            self.outbox.say(Goodbye(reason, returns))
        return self._close(reason)

    def transmit(self, now: float) -> Frames | None:
        """Returns the frames of the next message to send, or None if no message may
        leave now."""
        outbox, offers = self.outbox, self._memory_offers
        if self.state is _OPEN:
            # Offered with the first body that could use it: most connections never have
            # one.
            if outbox.wants_channel and self.hello is not None:
                offers.offer(self.hello)
            # Beside a message that leaves anyway: the peer reuses the memory for its
            # next body while it is in the cache.
            if offers.unread:
                offers.release_many()
        frames = outbox.take()
        if frames is not None:
            self._life.sent_at = now
        return frames

    def _message(
        self, announced: Announced, frames: Sequence[Frame]
    ) -> Sequence[Order[Token]]:
        kind = announced.message_kind
        if kind in _UNORDERED:
            raise ProtocolError(
                f"{kind.__name__} {announced.request}: it has no number"
            )
        arrived = self._inbox.take(announced, frames)
        if arrived is None:
            return ()
        orders = self._deliver(arrived)
        if self._inbox.taken:
            self._return_credit(self._threshold)
        return orders

    def _deliver(self, arrived: Arrived) -> Sequence[Order[Token]]:
        number, message = arrived.number, arrived.message
        if not number & 1:
            return (Noticed(message),)
        if not self._initiator:
            return self._accept_request(arrived)
        waiting = self._requests.take(number)
        if waiting is None:
            self.late += 1
            return ()
        # Answers behind this one had to wait for it.
        if arrived.is_heavy:
            self._requests.moved_back(number, self._life.heard_at)
        if type(message) is Failure:
            return (Failed(waiting.token, from_wire(message.error)),)
        if type(message) is Again:
            return self._repeat(number, waiting)
        return (Answered(waiting.token, message),)

    def _request(
        self, message: Message, token: Token, deadline: float, idle_timeout: float
    ) -> None:
        number = 2 * self._sent + 3
        in_chunks = self.outbox.put(message, number)
        self._sent += 1
        # Only a body in chunks may meet a sink, which may ask for it again.
        kept = message if in_chunks else None
        self._requests.add(number, token, deadline, type(message), kept, idle_timeout)

    def _repeat(self, number: int, waiting: Waiting[Token]) -> Sequence[Order[Token]]:
        if waiting.message is None:
            kind = waiting.kind.__name__
            # It ends with the connection, as the others do.
            self._requests.add(number, waiting.token, waiting.deadline, waiting.kind)
            raise ProtocolError(f"Again to {kind}, which was not sent in chunks")
        message, idle_timeout = waiting.message, waiting.idle_timeout
        self._request(message, waiting.token, waiting.deadline, idle_timeout)
        return ()

    def _accept_request(self, arrived: Arrived) -> Sequence[Order[Token]]:
        number, message, heavy, sink = arrived
        # An honest initiator knows the limit, and fails such a request itself.
        if len(self._serving) >= self._limits.requests:
            if len(self.outbox) >= QUEUE:
                raise ProtocolError(
                    "it sends more requests, and does not read that we are busy"
                )
            busy = BusyError(f"{len(self._serving)} requests are open: wait for them")
            self.outbox.put(failure(busy), number)
            return ()
        self._serving[number] = heavy
        self._bodies += heavy
        return (Requested(number, message, sink),)

    def _special(
        self, announced: Announced, frames: Sequence[Frame]
    ) -> Sequence[Order[Token]]:
        kind = announced.message_kind
        if announced.outside:
            raise ProtocolError(f"{kind.__name__}: its bytes have to be in the header")
        if kind is Chunk and self.held:  # it stays after the header of its body
            self._backlog.keep(frames)
            return ()
        return self._outside(announced.build(()), frames[1:])

    def _outside(
        self, message: Message, raws: Sequence[Frame]
    ) -> Sequence[Order[Token]]:
        match message:
            case Chunk():
                return self._on_chunk(message, raws)
            case Credit(chunks=chunks):
                if number := self.outbox.credited(chunks):
                    self._requests.moved_out(number, self._life.heard_at)
            case Beat(wanted=wanted):
                if wanted and not self.outbox.is_urgent:
                    self.outbox.say(_BEAT)
            case Released():
                self._memory_offers.on_released(message)
            case Hello():
                return self._on_hello(message)
            case Offer():
                self._memory_offers.on_offer(message, self.hello)
            case Mapped():
                self._memory_offers.on_mapped(message)
            case Goodbye(reason=reason, returns=returns):
                words = f"it left: {quoted(reason, 500)}"
                returns = returns if 0 < returns <= LONGEST_RETURN else 0.0
                return self._close(words, left=True, returns=returns)
            case Failure(error=plain):
                error = from_wire(plain)
                return self._close(f"it refused us: {error}", refusal=error)
        return ()

    def _on_chunk(self, chunk: Chunk, raws: Sequence[Frame]) -> Sequence[Order[Token]]:
        try:
            arrived = self._inbox.take_chunk(chunk, raws)
        except MemoryError as error:
            # Not the peer's fault, but the body cannot be taken: the connection ends,
            # not this process.
            return self._close(str(error))
        if self._initiator:
            self._requests.moved_back(chunk.stream, self._life.heard_at)
        orders = () if arrived is None else self._deliver(arrived)
        self._return_credit(self._threshold)
        return orders

    def _on_hello(self, hello: Hello) -> Sequence[Order[Token]]:
        if self.state is not OrderState.GREETING or self.hello is not None:
            raise ProtocolError("Hello on a connection that is open")
        error = self._mismatch(hello)
        if error is not None:
            return self.refuse(error)
        self.hello = hello
        # Not for two ends in one process: it runs, whatever the loop of the other end
        # does.
        if hello.host == self._me.host and hello.pid != self._me.pid:
            self._life.neighbour = hello.pid
        if not self._initiator:
            return (Greeted(hello),)
        self.state = OrderState.OPEN
        return (Opened(hello),)

    def _return_credit(self, at_least: int) -> None:
        # A peer whose many large requests wait here for their outcome gets no credit
        # for more: a slow task slows its callers, it does not fill its memory.
        if self.held:
            return
        if self._inbox.taken >= at_least and self._bodies < self._limits.streams:
            self.outbox.say(Credit(0, self._inbox.taken))
            self._inbox.taken = 0

    def _blame(self, error: ProtocolError) -> Sequence[Order[Token]]:
        self.outbox.say(Goodbye(f"you broke the protocol: {error}"))
        return self._close(f"it broke the protocol: {error}")

    def _too_late(self, kind: type[Message]) -> DeadlineExceededError:
        return DeadlineExceededError(
            f"{self.name} did not answer {kind.__name__} before its deadline; "
            "it may still carry it out"
        )

    def _close(
        self,
        reason: str,
        refusal: Exception | None = None,
        broken: bool = False,
        left: bool = False,
        returns: float = 0.0,
    ) -> Sequence[Order[Token]]:
        if self.state is OrderState.CLOSED:
            return ()
        self.state = _CLOSED
        self._serving.clear()
        self._promised.clear()
        self._backlog.drop()
        self.unread = self.outbox.nbytes
        # What is urgent stays: the goodbye, or the reason of a refusal.
        self.outbox.drop()
        self._inbox.drop()
        self._memory_offers.close()
        failed: list[Order[Token]] = [
            Failed(each.token, PeerLostError(self.name, reason, left, returns))
            for each in self._requests.take_all()
        ]
        return [*failed, Closed(reason, refusal, broken, left, returns)]


_BEAT: Final = Beat(wanted=False)


def failure(error: BaseException) -> Failure:
    """Returns the error as the outcome of a request."""
    full = environment().get("ZSTRAT_TRACEBACK") == "full"
    return Failure(cast("PlainTree", to_wire(error, full=full)))


_SPECIAL: Final = frozenset(
    {Hello, Beat, Chunk, Credit, Goodbye, Failure, Offer, Mapped, Released}
)
"""Classes of messages that are outside the order if their number is 0; a `Failure` with
another number is the outcome of a request."""

_BEFORE_OPEN: Final = frozenset({Hello, Goodbye, Failure})
"""Classes of messages that may come before both sides have greeted."""

_UNORDERED: Final = (_SPECIAL | {Placed}) - {Failure}
