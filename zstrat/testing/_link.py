"""A connection and a clock for tests, without sockets and without waiting.

`FakeLink` replaces `zstrat.transport.Link`, on the side that sends requests;
`FakeRemote` replaces `zstrat.transport.Remote`, on the side of a service. Law: every
message passes through the codec, and arrives in a later turn of the loop than it was
sent. So tests see the same order and copies as with a network.

The clock is for code that takes one as an argument; a test advances it.
"""

from __future__ import annotations

import asyncio
import inspect
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from zstrat.config import Limits
from zstrat.errors import ClosedError, DeadlineExceededError, PeerLostError
from zstrat.transport import new_incarnation
from zstrat.wire import PROTOCOL, Hello, Job, decode, encode

if TYPE_CHECKING:
    from collections.abc import Callable

    from zstrat.wire import Message

    Reply = asyncio.Future[Message]
    Handler = Callable[[Message], Any]
    """Answers a message by returning a message, an awaitable of one, or None."""


@dataclass(eq=False)
class FakeTimer:
    """A call that a `FakeClock` makes at a certain time."""

    due: float
    callback: Callable[[], object]
    is_cancelled: bool = field(default=False, init=False)

    def cancel(self) -> None:
        """Cancels the call; does nothing if the clock has made it already."""
        self.is_cancelled = True


class FakeClock:
    """A clock whose seconds pass only in `advance`, with the timers of an event loop.

    Calling it returns the time, so that it replaces `time.time` and `time.monotonic` in
    arguments such as ``CheckpointManager(clock=)``. Its ``time``, ``call_at`` and
    ``call_later`` replace those of an event loop.

    Args:
        now: The initial time in seconds.
    """

    def __init__(self, now: float = 0.0) -> None:
        self._now = now
        self._timers: list[FakeTimer] = []

    def __call__(self) -> float:
        return self._now

    time = __call__

    @property
    def timers(self) -> tuple[FakeTimer, ...]:
        """The pending calls, in the order in which they are due."""
        waiting = [timer for timer in self._timers if not timer.is_cancelled]
        return tuple(sorted(waiting, key=lambda timer: timer.due))

    def call_at(
        self, when: float, callback: Callable[..., object], *args: Any
    ) -> FakeTimer:
        """Schedules ``callback(*args)`` for the `advance` that reaches the time
        ``when``, like the method of an event loop."""
        timer = FakeTimer(when, lambda: callback(*args))
        self._timers.append(timer)
        return timer

    def call_later(
        self, delay: float, callback: Callable[..., object], *args: Any
    ) -> FakeTimer:
        """Schedules a call like `call_at`, ``delay`` seconds from now."""
        return self.call_at(self._now + delay, callback, *args)

    def advance(self, seconds: float) -> None:
        """Advances the time, and makes the calls that become due, each at its time,
        including calls that these schedule.

        Raises:
            ValueError: ``seconds`` is negative.
            Exception: The error of a call; the clock stops at its time.
        """
        if seconds < 0:
            raise ValueError(f"seconds={seconds}: expected 0 or more")
        end = self._now + seconds
        # Looked up again after each: a call may schedule or cancel others.
        while self.timers and self.timers[0].due <= end:
            self._go_off(self.timers[0])
        self._now = end

    def advance_to_next(self) -> float:
        """Advances the time to the next timer; returns the seconds that passed.

        Raises:
            LookupError: There are no pending timers.
        """
        if not self.timers:
            raise LookupError("there are no pending timers")
        before, timer = self._now, self.timers[0]
        self._go_off(timer)
        return self._now - before

    def _go_off(self, timer: FakeTimer) -> None:
        # Removed before it is called: a call that raises is not made again.
        self._timers.remove(timer)
        self._now = max(self._now, timer.due)
        timer.callback()


_LIMITS: Final = Limits()


def through_the_codec(message: Message) -> Message:
    """Encodes and decodes a message. Returns it as its receiver would get it, with
    read-only copies of the arrays.

    Raises:
        TypeError, ValueError, ProtocolError: The message cannot be encoded or decoded.
    """
    # Bytes, as from a socket: a receiver that writes to an array fails here, too.
    header, arrays = encode(message)
    _, received = decode(header, [array.tobytes() for array in arrays], _LIMITS)
    return received


def _ignore(*_: object) -> None:
    pass


class FakeRemote:
    """A connected task as a service sees it; replaces `zstrat.transport.Remote`.

    Args:
        role: The role of the task's key.
        incarnation: The incarnation of the task's process; default: a random one.
        name: The task's name in errors; default: its job and index.
        pid: The id of the task's process, on the host "here".
    """

    def __init__(
        self,
        role: Job | str = Job.CHIEF,
        incarnation: int | None = None,
        *,
        index: int = 0,
        name: str = "",
        pid: int = 1,
    ) -> None:
        self.role = Job(role)
        self.name: Final = name or f"{role}:{index}"
        number = new_incarnation() if incarnation is None else incarnation
        self.hello: Final = Hello(PROTOCOL, str(role), index, number, "here", pid)
        self.alive = True
        self.notices: list[Message] = []
        """The notices that the task received, in order."""
        self.notified: Final = asyncio.Event()
        """Set with every notice that the task receives; clear it before waiting for the
        next one."""
        self.refusals: list[Callable[[Message], Exception | None]] = []
        """Functions that refuse notices. `notify` calls the first one with the notice;
        if it returns an error, `notify` raises the error and removes the function."""
        self.promised = 0
        self.is_heard = True
        """Whether the task is connected and has sent a message just now."""
        self.heard = 0
        """A value that changes with each message from the task."""

    def notify(self, message: Message) -> None:
        """Appends a notice to `notices`.

        Raises:
            PeerLostError: The task is not ``alive``.
            Exception: The error of the first of ``refusals``.
        """
        if not self.alive:
            raise PeerLostError(self.name, "it is not connected")
        # One refusal for one notice: a test says how often it fails.
        if self.refusals and (error := self.refusals[0](message)) is not None:
            del self.refusals[0]
            raise error
        self.notices.append(message)
        self.notified.set()

    def promise(self, nbytes: int) -> None:
        """Records the announced size of an answer as ``promised``."""
        self.promised = nbytes

    def __repr__(self) -> str:
        return f"<FakeRemote {self.name}{'' if self.alive else ' lost'}>"


class FakeLink:
    """A link to a task that is a function of this process. All methods belong to the
    thread of the loop that calls `start`.

    Args:
        handler: Called with each message that arrives. The message that it returns, or
            that an awaitable returns, answers a request; None leaves the request open.
            An error that it raises is the outcome of the request.
        name, address: The name and the address of the task in errors.
        hello: The handshake of the task in `start`; None: the task is unreachable until
            `connect`.
        on_notice, on_open, on_lost: See `zstrat.transport.Link`.
        on_change: Called after each event on the link, for tests that wait.
    """

    def __init__(
        self,
        handler: Handler,
        *,
        name: str,
        address: str = "nowhere:1",
        hello: Hello | None = None,
        on_notice: Callable[[Message], object] = _ignore,
        on_open: Callable[[Hello], object] = _ignore,
        on_lost: Callable[[PeerLostError], object] = _ignore,
        on_change: Callable[[], object] = _ignore,
    ) -> None:
        self.name, self.address = name, address
        self.peer: Hello | None = None
        """The handshake of the task while the link is open; None: it is not open."""
        self.is_started = self.is_closed = False
        self.is_refused = False
        """Whether the last attempt to connect failed at once, as in a `Link`."""
        self.is_silent = False
        """Whether the task sends nothing although the link is open."""
        self.trouble = "no answer"
        """The reason why the link is not open, as in a `Link`."""
        self.sent: list[Message] = []
        """All sent requests and notices, in order."""
        self.held: list[tuple[Message, Reply | None]] | None = None
        """Messages that are held back between `hold` and `release`."""
        self.requests: dict[Reply, None] = {}
        """Open requests, in order."""
        self._handler, self._hello = handler, hello
        self._on_notice, self._on_open, self._on_lost = on_notice, on_open, on_lost
        self._on_change = on_change
        self._connection = 0
        """Number of connections so far: messages of an earlier connection do not
        arrive, even if the handshake is the same."""
        self._waiters: list[asyncio.Future[Hello]] = []

    @property
    def is_open(self) -> bool:
        return self.peer is not None

    @property
    def shares_memory(self) -> bool:
        return False

    @property
    def is_heard(self) -> bool:
        return self.is_open and not self.is_silent

    def start(self) -> None:
        """Connects to the task, if there is a ``hello``.

        Raises:
            ClosedError: The link was started or closed before.
        """
        if self.is_started or self.is_closed:
            raise ClosedError(f"the link to {self.name} can be started once")
        self.is_started = True
        self._loop = asyncio.get_running_loop()
        if self._hello is not None:
            self.connect(self._hello)

    async def wait_open(self, deadline: float) -> Hello:
        """Waits until the link is open, like a `Link`. Cancellation: loses nothing."""
        if self.peer is not None:
            return self.peer
        waiter: asyncio.Future[Hello] = self._loop.create_future()
        self._waiters.append(waiter)
        try:
            async with asyncio.timeout_at(deadline):
                return await waiter
        except TimeoutError:
            raise DeadlineExceededError(
                f"{self.name} at {self.address} did not answer"
            ) from None

    def submit(self, message: Message, *, deadline: float | None = None) -> Reply:
        """Sends a request, like a `Link`, but ignores the deadline."""
        del deadline
        if self.is_closed:
            raise ClosedError(self.name)
        self.sent.append(message)
        future: Reply = self._loop.create_future()
        if self.peer is None:
            future.set_exception(PeerLostError(self.name, "it is not connected"))
            return future
        self.requests[future] = None
        future.add_done_callback(self._forget)
        self._carry(message, future)
        return future

    async def request(
        self, message: Message, *, deadline: float | None = None
    ) -> Message:
        """Sends a request as `submit` does, and awaits its answer. Cancellation: drops
        the answer."""
        return await self.submit(message, deadline=deadline)

    def notify(self, message: Message) -> None:
        """Sends a notice, a message without an answer, like a `Link`."""
        if self.is_closed:
            raise ClosedError(self.name)
        if self.peer is None:
            raise PeerLostError(self.name, "it is not connected")
        self.sent.append(message)
        self._carry(message, None)

    async def close(self, reason: str = "") -> None:
        """Closes the link, like a `Link`: open requests fail."""
        del reason
        self.is_closed, self.peer = True, None
        self._fail(ClosedError(self.name))

    def connect(self, hello: Hello | None = None) -> None:
        """Connects or reconnects the task.

        Args:
            hello: The task's handshake; None: the previous one.

        Raises:
            ValueError: There is no previous handshake.
        """
        hello = hello or self._hello
        if hello is None:
            raise ValueError(f"{self.name} was never connected: pass its hello")
        # A new number: what was sent on the connection before does not arrive.
        self.peer = self._hello = hello
        self._connection += 1
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(hello)
        self._on_open(hello)
        self._on_change()

    def cut(
        self,
        reason: str = "it was cut",
        *,
        left: bool = False,
        returns: float = 0.0,
    ) -> None:
        """Breaks the connection, and drops its messages in flight.

        Args:
            left: Whether the task closed the connection on purpose.
            returns: Seconds within which the task announced to return with its state.
        """
        if self.peer is None:
            return
        # Closed before anybody is notified: a callback may look, or connect again.
        self.peer, self.held = None, None
        error = PeerLostError(self.name, reason, left, returns)
        self._fail(error)
        self._on_lost(error)
        self._on_change()

    def hold(self) -> None:
        """Begins to hold sent messages back; they are in `held`."""
        self.held = [] if self.held is None else self.held

    def release(self) -> None:
        """Delivers the held messages, in order, before it returns."""
        held, self.held = self.held or [], None
        for message, future in held:
            self._deliver(message, future, self._connection)

    def say(self, message: Message) -> None:
        """Sends a notice from the task; drops it if the task is not connected."""
        if self.peer is not None:
            received = through_the_codec(message)
            self._loop.call_soon(self._receive, received, self._connection)

    def _carry(self, message: Message, future: Reply | None) -> None:
        # Encoded now: the sender may write to its arrays as soon as this returns.
        received = through_the_codec(message)
        # Later, as on a network: the sender has returned when the message arrives.
        if self.held is not None:
            self.held.append((received, future))
        else:
            self._loop.call_soon(self._deliver, received, future, self._connection)

    def _deliver(self, message: Message, future: Reply | None, connection: int) -> None:
        if not self._is_of_now(connection):
            return
        try:
            answer = self._handler(message)
        except Exception as error:  # the outcome of the request
            answer = error
        if inspect.isawaitable(answer):
            # Not awaited: as with a network, messages overtake a handler that waits.
            later = asyncio.ensure_future(answer)
            later.add_done_callback(lambda done: self._answer(_outcome(done), future))
        else:
            self._answer(answer, future)

    def _answer(self, answer: Any, future: Reply | None) -> None:
        # The requester may have cancelled, or lost the connection, meanwhile.
        if future is not None and not future.done() and answer is not None:
            if isinstance(answer, Exception):
                future.set_exception(answer)
            else:
                future.set_result(through_the_codec(answer))
        self._on_change()

    def _receive(self, message: Message, connection: int) -> None:
        if self._is_of_now(connection):
            self._on_notice(message)

    def _is_of_now(self, connection: int) -> bool:
        return self.peer is not None and connection == self._connection

    def _forget(self, future: Reply) -> None:
        self.requests.pop(future, None)

    def _fail(self, error: Exception) -> None:
        for future in list(self.requests):
            if not future.done():
                future.set_exception(error)


def _outcome(done: asyncio.Future[Any]) -> Any:
    if done.cancelled():
        return None  # the service cancelled the request, which stays unanswered
    return done.exception() or done.result()
