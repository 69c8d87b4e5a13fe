"""One connection to one peer, without I/O: frames, commands and time in, orders out.

Theory of operation. A connection is GREETING until both HELLOs are there, then OPEN,
then CLOSED for ever; the next connection is another `Peer`. The side that connected is
the initiator: it alone sends requests.

*Order.* Everything but greetings, beats, credits and goodbyes leaves through one queue,
so what is sent in order arrives in order: a message waits until the body before it has
left. Messages carry a number: ``2n + 1`` for the n-th of the initiator if it wants an
answer (the answer has the same number), ``2n`` if not; 0 stands on what is outside the
order. A gap means that a message was lost, and ends the connection.

*Bodies.* A body above ``limits.chunk`` is announced by its header and follows in chunks
(`_body`). Each message with more than `HEAVY` bytes of body costs the sender a credit;
credits return as such messages are taken. So neither side holds more than a window of
them, and a beat never waits behind more than that.

*Outcome.* A request ends exactly once: answered, failed by the other side, past its
deadline, or lost with the connection.

*Blame.* Nothing that arrives raises. What breaks the rules ends the connection with
`Closed`, which says why.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Generic, cast

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
from ._body import Allocate, Frame, allocate
from ._codec import Announced, decode_header
from ._greeting import Judge, described
from ._inbox import Inbox
from ._lane import PLACE, is_placeable
from ._messages import (
    Beat,
    Chunk,
    Credit,
    Failure,
    Goodbye,
    Hello,
    Mapped,
    Message,
    Offer,
    Placed,
    PlainTree,
    Released,
)
from ._orders import (
    Answered,
    Closed,
    Failed,
    Greeted,
    Noticed,
    Opened,
    Order,
    Requested,
    State,
    Token,
)
from ._outbox import HEAVY, Frames, Outbox
from ._requests import Requests

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from zstrat.config import Limits, Timeouts

    from ._lane import Lane

QUEUE: Final = 65536
"""Messages that wait to be sent: four times what a peer may have open, so only notices
to a peer that does not read can fill it."""


RELEASED: Final = 4
"""Bodies that may lie unread in the peer's memory before a message says so: a message
for each would cost more than it frees. What is left is said with the next tick."""


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
        lane: Lane | None = None,
    ) -> None:
        """The network is connected: the initiator's first message is its HELLO."""
        self.name = name
        self.hello: Hello | None = None
        self.state = State.GREETING
        self.late = 0
        """Answers that came after the deadline of their request."""
        self._me, self._initiator, self._judge = me, initiator, judge
        self._timeouts, self._limits = timeouts, limits
        self._lane, self._is_offered = lane, False
        self._outbox = Outbox(limits, lane)
        self._requests: Requests[Token] = Requests()
        self._serving: dict[int, bool] = {}  # number -> whether it had a heavy body
        self._bodies = 0  # of the requests that are being served
        self._taken = 0  # heavy messages since the last credit was given
        self._sent = self._received = 0
        self._inbox = Inbox(allocate, lane)
        self._sent_at = self._heard_at = self._ticked_at = now
        self._broken_at: float | None = None
        if initiator:
            self._outbox.say(me)

    # ---- what the other side, the network and time do -----------------------------

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
            self._outbox.say(Goodbye(f"you broke the protocol: {error}"))
            return self._close(f"it broke the protocol: {error}")

    def disconnected(self, reason: str, now: float) -> Sequence[Order[Token]]:
        """The network below is gone. An acceptor waits for the peer to come back."""
        if self._initiator:
            return self._close(reason, broken=True)
        if self._broken_at is None:
            self._broken_at = now
        return ()

    def tick(self, now: float) -> Sequence[Order[Token]]:
        """Time has passed. To be called at `due` at the latest."""
        if self.state is State.CLOSED:
            return ()
        overslept = now - self._ticked_at - 2 * self._timeouts.beat
        self._ticked_at = now
        if overslept > 0:
            # This process was stopped or blocked: what the peer said in the meantime
            # is still in the socket, so the silence is ours.
            self._heard_at += overslept
        if self._is_lost(now):
            return self._lose(now)
        if self.state is State.OPEN:
            quiet = now - self._sent_at >= self._timeouts.beat
            if quiet and not self._outbox.is_urgent:
                self._outbox.say(_BEAT)
            self._return_credit(1)
            if self._lane is not None:
                self._release(self._lane, 1)
        return [
            Failed(each.token, self._too_late(each.kind))
            for each in self._requests.take_late(now)
        ]

    @property
    def due(self) -> float:
        """When `tick` has to be called next."""
        return min(self._ticked_at + self._timeouts.beat / 2, self._requests.due)

    # ---- what this side wants -----------------------------------------------------

    def request(self, message: Message, token: Token, deadline: float) -> None:
        """Queues a request of the initiator; ``token`` comes back with its outcome.

        Raises:
            BusyError: Too many are open.
            TypeError, ValueError: The message cannot be sent.
        """
        if len(self._requests) >= self._limits.requests:
            raise BusyError(
                f"{self.name}: {len(self._requests)} requests are open, the most that "
                "may be: wait for some of them"
            )
        number = 2 * self._sent + 3
        self._outbox.put(message, number)
        self._sent += 1
        self._requests.add(number, token, deadline, type(message))

    def notify(self, message: Message) -> None:
        """Queues a notice.

        Raises:
            BusyError: The peer does not read, and `QUEUE` messages wait for it.
            TypeError, ValueError: The message cannot be sent.
        """
        if len(self._outbox) >= QUEUE:
            raise BusyError(f"{self.name} does not read: {QUEUE} messages wait for it")
        self._outbox.put(message, 2 * self._sent + 2)
        self._sent += 1

    def reply(self, number: int, message: Message) -> None:
        """Queues the outcome of a request; a second one for it is ignored."""
        heavy = self._serving.pop(number, None)
        if heavy is None or self.state is not State.OPEN:
            return
        try:
            self._outbox.put(message, number)
        except (TypeError, ValueError) as error:
            self._outbox.put(failure(error), number)
        if heavy:
            self._bodies -= 1
            self._return_credit(self._threshold)

    def accept(self, hello: Hello, now: float) -> None:
        """Answers `Greeted` with our HELLO: the connection is open."""
        self.state, self.hello, self._heard_at = State.OPEN, hello, now
        self.name = described(hello)
        self._outbox.say(self._me)

    def refuse(self, error: ZstratError) -> Sequence[Order[Token]]:
        """Answers `Greeted` with the reason; the connection is over."""
        self._outbox.say(failure(error))
        return self._close(str(error), refusal=error)

    def leave(self, reason: str) -> Sequence[Order[Token]]:
        """Says goodbye; the connection is over when `transmit` has given that out."""
        if self.state is State.OPEN:
            self._outbox.say(Goodbye(reason))
        return self._close(reason)

    def transmit(self, now: float) -> Frames | None:
        """The next message to send, or None until something changes."""
        if self._lane is not None and self.state is State.OPEN:
            self._tend(self._lane)
        frames = self._outbox.take()
        if frames is not None:
            self._sent_at = now
        return frames

    def _tend(self, lane: Lane) -> None:
        """Says which bodies were read, and offers a lane when there is a use for it."""
        self._release(lane, RELEASED)
        if self._outbox.wants_lane and not self._is_offered:
            self._is_offered = True
            assert self.hello is not None
            offer = lane.offer(self.hello)
            if offer is not None:
                self._outbox.say(offer)

    def _release(self, lane: Lane, at_least: int) -> None:
        unused = lane.take_unused(at_least)
        if unused:
            self._outbox.say(Released(unused))

    # ---- ordered messages ---------------------------------------------------------

    def _message(
        self, announced: Announced, frames: Sequence[Frame]
    ) -> Sequence[Order[Token]]:
        number, kind, specs, build = announced
        if self.state is not State.OPEN:
            raise ProtocolError(f"expected Hello, got {kind.__name__}")
        if self._inbox.is_busy:
            raise ProtocolError(f"{kind.__name__} inside the body of another message")
        if (kind in _SPECIAL or kind is Placed) and kind is not Failure:
            raise ProtocolError(f"{kind.__name__} {number}: it has no number")
        if not (self._initiator and number & 1):  # an answer has its request's number
            self._check_order(number >> 1)
        raws = frames[1:]
        if len(raws) > self._limits.frames:
            raise ProtocolError(
                f"{kind.__name__}: expected at most {self._limits.frames} frames, "
                f"got {len(raws)}"
            )
        if len(raws) == 1 and len(raws[0]) < PLACE and is_placeable(specs):
            return self._on_placed(announced, raws[0])
        if len(raws) != len(specs):
            if raws:
                raise ProtocolError(
                    f"{kind.__name__}: expected {len(specs)} frames, got {len(raws)}"
                )
            self._inbox.begin(announced)
            return self._completed()
        if not raws:
            return self._deliver(number, build(()), False)
        message = build(tuple(map(array_from, specs, raws)))
        heavy = sum(map(len, raws)) > HEAVY
        if heavy:
            self._taken += 1
        orders = self._deliver(number, message, heavy)
        self._return_credit(self._threshold)
        return orders

    def _check_order(self, place: int) -> None:
        if place != self._received + 1:
            raise ProtocolError(
                f"expected message {self._received + 1}, got {place}: some were lost"
            )
        self._received = place

    def _deliver(
        self, number: int, message: Message, heavy: bool
    ) -> Sequence[Order[Token]]:
        if not number & 1:
            return (Noticed(message),)
        if not self._initiator:
            return self._accept_request(number, message, heavy)
        waiting = self._requests.take(number)
        if waiting is None:
            self.late += 1
            return ()
        if type(message) is Failure:
            return (Failed(waiting.token, from_wire(message.error)),)
        return (Answered(waiting.token, message),)

    def _accept_request(
        self, number: int, message: Message, heavy: bool
    ) -> Sequence[Order[Token]]:
        if len(self._serving) >= self._limits.requests:
            busy = BusyError(f"{len(self._serving)} requests are open: wait for them")
            self._outbox.put(failure(busy), number)
            return ()
        self._serving[number] = heavy
        self._bodies += heavy
        return (Requested(number, message),)

    # ---- what is outside the order --------------------------------------------------

    def _on_chunk(
        self, header: Announced, frames: Sequence[Frame]
    ) -> Sequence[Order[Token]]:
        chunk = header.build(())
        assert isinstance(chunk, Chunk)
        try:
            self._inbox.take(chunk, frames[1:])
        except MemoryError as error:
            return self._close(str(error))
        return self._took_part()

    def _on_placed(self, announced: Announced, place: Frame) -> Sequence[Order[Token]]:
        placed = decode_header(place, self._limits).build(())
        if not isinstance(placed, Placed):
            raise ProtocolError(f"expected Placed, got {type(placed).__name__}")
        self._inbox.begin(announced)
        self._inbox.adopt(placed)
        return self._took_part()

    def _took_part(self) -> Sequence[Order[Token]]:
        self._taken += 1
        orders = self._completed()
        self._return_credit(self._threshold)
        return orders

    def _completed(self) -> Sequence[Order[Token]]:
        whole = self._inbox.whole()
        return () if whole is None else self._deliver(*whole, True)

    def _on_offer(
        self, announced: Announced, frames: Sequence[Frame]
    ) -> Sequence[Order[Token]]:
        offer = announced.build(())
        assert isinstance(offer, Offer)
        if self.hello is None:
            raise ProtocolError("expected Hello, got Offer")
        lane = self._lane
        yes = lane is not None and lane.accept(offer, self.hello)
        self._outbox.say(Mapped(yes))
        return ()

    def _on_mapped(
        self, announced: Announced, frames: Sequence[Frame]
    ) -> Sequence[Order[Token]]:
        mapped = announced.build(())
        assert isinstance(mapped, Mapped)
        if self._lane is None or not self._is_offered:
            raise ProtocolError("it mapped memory that it was not offered")
        self._lane.agreed(mapped.yes)
        return ()

    def _on_released(
        self, announced: Announced, frames: Sequence[Frame]
    ) -> Sequence[Order[Token]]:
        released = announced.build(())
        assert isinstance(released, Released)
        if self._lane is not None:
            self._lane.released(released.offsets)
        return self._if_greeted("Released")

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
            case Beat(wanted=True) if self.state is State.OPEN:
                if not self._outbox.is_urgent:
                    self._outbox.say(_BEAT)
        return self._if_greeted("Beat")

    def _on_credit(
        self, announced: Announced, frames: Sequence[Frame]
    ) -> Sequence[Order[Token]]:
        match announced.build(()):
            case Credit(chunks=chunks) if chunks > 0:
                self._outbox.credited(chunks)
        return self._if_greeted("Credit")

    def _if_greeted(self, got: str) -> Sequence[Order[Token]]:
        # Somebody whom we gave up long ago goes on talking: it has to hear about it.
        if self.state is State.GREETING:
            raise ProtocolError(f"expected Hello, got {got}")
        return ()

    def _on_goodbye(
        self, announced: Announced, frames: Sequence[Frame]
    ) -> Sequence[Order[Token]]:
        goodbye = announced.build(())
        assert isinstance(goodbye, Goodbye)
        return self._close(f"it left: {goodbye.reason:.500}", left=True)

    def _on_failure(
        self, announced: Announced, frames: Sequence[Frame]
    ) -> Sequence[Order[Token]]:
        refused = announced.build(())
        assert isinstance(refused, Failure)
        error = from_wire(refused.error)
        return self._close(f"it refused us: {error}", refusal=error)

    # ---- credit ---------------------------------------------------------------------

    @property
    def _threshold(self) -> int:
        # A credit costs a message: one for a third of the window keeps the sender busy.
        return max(1, self._limits.window // 3)

    def _return_credit(self, at_least: int) -> None:
        # A peer whose many large requests wait here for their outcome gets no credit
        # for more: a slow task slows its callers, it does not fill its memory.
        if self._taken >= at_least and self._bodies < self._limits.streams:
            self._outbox.say(Credit(0, self._taken))
            self._taken = 0

    # ---- the end --------------------------------------------------------------------

    def _is_lost(self, now: float) -> bool:
        times = self._timeouts
        if self._broken_at is not None:
            return now - self._broken_at > times.reconnect
        greeted = self.state is State.OPEN
        patience = times.patience if greeted else times.handshake
        return now - self._heard_at > patience

    def _lose(self, now: float) -> Sequence[Order[Token]]:
        if self._broken_at is not None:
            reconnect = self._timeouts.reconnect
            return self._close(
                f"its connection broke and did not come back within {reconnect:g} s"
            )
        silence = now - self._heard_at
        if self.state is State.GREETING:
            return self._close(f"it did not greet within {silence:.1f} s", broken=True)
        return self._close(f"it was silent for {silence:.1f} s")

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
    ) -> Sequence[Order[Token]]:
        if self.state is State.CLOSED:
            return ()
        self.state = State.CLOSED
        self._serving.clear()
        self._outbox.drop()
        self._inbox.drop()
        if self._lane is not None:
            self._lane.close()
        failed: list[Order[Token]] = [
            Failed(each.token, PeerLostError(self.name, reason, left))
            for each in self._requests.take_all()
        ]
        return [*failed, Closed(reason, refusal, broken, left)]


_BEAT: Final = Beat(wanted=False)


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
    Offer: Peer._on_offer,
    Mapped: Peer._on_mapped,
    Released: Peer._on_released,
}
