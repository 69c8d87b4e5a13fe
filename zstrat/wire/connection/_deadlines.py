"""Decides how long a connection waits for signs of life of its peer, and for outcomes
of requests.

A peer has ``handshake`` seconds to greet. Later it may be silent for ``liveness``
seconds, and absent for ``reconnect`` seconds if the network connection below is broken;
after that it counts as lost. Requests wait for their outcome, each until its deadline.

On a machine with too much to do, silence has other causes than death. So a process that
itself ran late does not count that time as silence of its peer. And a peer on the same
machine, of which the system reports that it runs and has the connection open, may be
silent for `STARVED` times as long: it waits for a processor, or hangs.

A message that is not whole yet is a sign of life, too: on a slow line a chunk takes
longer than ``liveness``. So before a silent peer is judged, the system is asked how
many bytes have come.

No clock and no timers: the owner says what time it is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Generic, NamedTuple, Protocol, TypeVar

if TYPE_CHECKING:
    from zstrat.config import Timeouts
    from zstrat.wire._messages import Message


class Carried(NamedTuple):
    """Counts of bytes of one connection, as the system reports them, across messages:
    bytes that have come from the peer, bytes that the peer's machine has acknowledged,
    and bytes that the system keeps because they are not acknowledged yet. All 0: not
    known."""

    received: int = 0
    delivered: int = 0
    queued: int = 0


class Carrier(Protocol):
    """What the system reports about a network connection."""

    def carried(self) -> Carried:
        """Returns the bytes that the connection has moved so far."""
        ...

    def is_held_by(self, pid: int) -> bool:
        """Returns whether process ``pid`` of this machine has the other end of the
        connection and is not stopped; False if that is not known."""
        ...


STARVED: Final = 6
"""How many times ``liveness`` a running process of this machine may be silent, which
makes 30 seconds. A process that runs but hangs is lost after that, too."""


class Liveness:
    """Decides whether a peer is alive, by the times of its messages.

    The owner writes ``sent_at`` and ``heard_at`` with each message, and ``neighbour``
    when the peer has greeted. All times are seconds of the clock that the owner reads.
    ``carrier`` is asked only while the peer is silent.
    """

    __slots__ = (
        "_carrier",
        "_received",
        "_spared_until",
        "_ticked_at",
        "_times",
        "broken_at",
        "heard_at",
        "neighbour",
        "sent_at",
    )

    def __init__(self, times: Timeouts, now: float, carrier: Carrier) -> None:
        self._times, self._carrier = times, carrier
        self.neighbour = 0
        """The process ID of the peer, if it may be on this machine."""
        self._spared_until = now
        self._received: int | None = None
        """Bytes that had come from the peer at the last tick, if the peer was silent
        then."""
        self.sent_at = self.heard_at = self._ticked_at = now
        self.broken_at: float | None = None
        """Time since which the network connection below is broken; None: it is not."""

    def tick(self, now: float) -> None:
        """Updates the time limits: extends them by the time that this process itself
        was late. Call it at `due` at the latest, after all arrived messages were
        read."""
        overslept = now - self.due
        self._ticked_at = now
        if overslept > 0:
            # This process was stopped or blocked, or had no processor: what the peer
            # said in the meantime, or its return, may still be on its way through this
            # machine, so the silence is ours. What was heard since is of now, and no
            # credit for later.
            self.heard_at = min(now, self.heard_at + overslept)
            if self.broken_at is not None:
                self.broken_at = min(now, self.broken_at + overslept)

    def look(self, now: float) -> None:
        """Counts bytes that came since the last look as a sign of life, if no whole
        message has come for a heartbeat. Call it at every tick, but only after the peer
        has greeted: a peer that has not greeted could keep its connection with a byte
        now and then."""
        # A system call per tick is too much for peers that speak anyway.
        if self.broken_at is not None or now - self.heard_at < self._times.beat:
            self._received = None
            return
        before, self._received = self._received, self._carrier.carried().received
        # Not at the first look: bytes may have come before the silence began.
        if before is not None and self._received > before:
            self.heard_at = now

    @property
    def due(self) -> float:
        return self._ticked_at + self._times.beat / 2

    def is_quiet(self, now: float) -> bool:
        """Returns whether it is time to send a heartbeat, because no other message was
        sent."""
        return now - self.sent_at >= self._times.beat

    @property
    def is_heard(self) -> bool:
        """Whether the peer lives, as far as is known: the network connection below is
        intact, and at the last `tick` fewer than two heartbeats were missing."""
        missed = self._ticked_at - self.heard_at
        return self.broken_at is None and missed < 2 * self._times.beat

    def is_lost(self, now: float, *, greeted: bool) -> bool:
        """Returns whether the peer has been silent, or absent, for longer than it may:
        see the top of this file. Call `tick` before, so that time in which this process
        itself was late does not count."""
        times = self._times
        if self.broken_at is not None:
            # However long the silence: nobody can be heard while the network is broken.
            return now - self.broken_at > times.reconnect
        silence = now - self.heard_at
        if not greeted:
            return silence > times.handshake
        return silence > times.liveness and not self._is_spared(silence, now)

    def _is_spared(self, silence: float, now: float) -> bool:
        """Returns whether the peer is a running process of this machine, so that it may
        be silent longer. The answer is reused for ``liveness`` seconds, as it takes a
        look at all connections of the machine."""
        if not self.neighbour or silence > STARVED * self._times.liveness:
            return False
        if now >= self._spared_until:
            if not self._carrier.is_held_by(self.neighbour):
                return False
            self._spared_until = now + self._times.liveness
        return True

    def loss(self, now: float, *, greeted: bool) -> str:
        """Returns why the peer is lost, as text."""
        if self.broken_at is not None:
            reconnect = self._times.reconnect
            return f"its connection broke and did not come back within {reconnect:g} s"
        silence = now - self.heard_at
        if not greeted:
            return f"it did not greet within {silence:.1f} s"
        return f"it was silent for {silence:.1f} s"


Token = TypeVar("Token")

SCAN: Final = 0.01
"""Fewest seconds between two looks at all deadlines, however close these lie."""


class Waiting(NamedTuple, Generic[Token]):
    """A request that has no outcome yet. ``deadline`` is a time of the owner's clock.
    If ``idle_timeout`` is above 0, progress puts the deadline off to so many seconds
    later; ``last`` is the number of the last request whose progress counts, 0 until it
    is known. ``message`` is kept only if the other side may ask for it `Again`."""

    token: Token
    deadline: float
    kind: type[Message]
    message: Message | None
    idle_timeout: float = 0.0
    last: int = 0


class Progress(NamedTuple):
    """The time when part of a body was last transferred, and the number of the body's
    request."""

    number: int = 0
    at: float = float("-inf")


class Requests(Generic[Token]):
    """The requests of one connection that have no outcome yet, by their numbers.

    ``due`` is a lower bound of all deadlines, which costs each request one comparison.
    To check all deadlines costs more, but happens only when the bound has passed.

    *Progress.* A large body takes as long as the network needs, so a request may wait
    for ``idle_timeout`` seconds after the last transfer of bytes that must come before
    its outcome. On the way out these are its own body, and messages sent before it. On
    the way back any answer may come before its own; but answers to requests that were
    sent after its first deadline do not count, so that a stream of later requests
    cannot keep open a request that the peer never answers.
    """

    __slots__ = ("_back", "_latest", "_out", "_waiting", "due")

    def __init__(self) -> None:
        self._waiting: dict[int, Waiting[Token]] = {}
        self._out, self._back, self._latest = Progress(), Progress(), 0
        self.due = float("inf")

    def __len__(self) -> int:
        return len(self._waiting)

    def add(
        self,
        number: int,
        token: Token,
        deadline: float,
        kind: type[Message],
        message: Message | None = None,
        idle_timeout: float = 0.0,
    ) -> None:
        """Adds a request of the class ``kind`` that was sent under ``number``."""
        self._waiting[number] = Waiting(token, deadline, kind, message, idle_timeout)
        self._latest = number
        if deadline < self.due:
            self.due = deadline

    def moved_out(self, number: int, now: float) -> None:
        """Notes that the peer has taken part of the body of the message with this
        number."""
        before, self._out = self._out, Progress(number, now)
        if number <= before.number:
            return
        # What stands between the two has left just now.
        # In the order of their numbers, as they were added.
        for each, waiting in self._waiting.items():
            if each >= number:
                return
            if each >= before.number and waiting.idle_timeout:
                deadline = max(waiting.deadline, now + waiting.idle_timeout)
                self._waiting[each] = waiting._replace(deadline=deadline)

    def moved_back(self, number: int, now: float) -> None:
        """Notes that part of the answer to the request with this number has come."""
        self._back = Progress(number, now)

    def take(self, number: int) -> Waiting[Token] | None:
        """Removes and returns the request with this number; None if no such request
        waits."""
        return self._waiting.pop(number, None)

    def take_late(self, now: float) -> list[Waiting[Token]]:
        """Removes and returns the requests whose deadline has passed without
        progress."""
        if now < self.due:
            return []
        taken = []
        for number, each in list(self._waiting.items()):
            if each.deadline > now:
                continue
            # Only now: to move every deadline with every chunk would cost more than the
            # chunk.
            renewed = self._put_off(number, each)
            if renewed.deadline > now:
                self._waiting[number] = renewed
            else:
                taken.append(self._waiting.pop(number))
        earliest = min((each.deadline for each in self._waiting.values()), default=None)
        # Bounded from below, or many deadlines that are close would have all requests
        # looked at for each of them.
        self.due = float("inf") if earliest is None else max(earliest, now + SCAN)
        return taken

    def take_all(self) -> list[Waiting[Token]]:
        """Removes and returns all requests, as none will be answered."""
        taken = list(self._waiting.values())
        self._waiting.clear()
        self.due = float("inf")
        return taken

    def _put_off(self, number: int, waiting: Waiting[Token]) -> Waiting[Token]:
        """Returns the request with its deadline put off by the progress since, if
        any."""
        if not waiting.idle_timeout:
            return waiting
        last, moved_at = waiting.last or self._latest, float("-inf")
        if self._out.number <= number:
            moved_at = self._out.at
        if self._back.number <= last:
            moved_at = max(moved_at, self._back.at)
        deadline = max(waiting.deadline, moved_at + waiting.idle_timeout)
        return waiting._replace(deadline=deadline, last=last)
