"""The two ends of a connection without sockets, for what is given its links.

`FakeLink` stands for `zstrat.transport.Link`, on the side that asks; `FakeRemote` for
what a service sees of the task that asked. Law of the file: nothing passes that the
codec would not carry, and nothing arrives before the turn of the loop after it was
sent; so a test of fakes sees the order and the copies that a network would give.
"""

from __future__ import annotations

import asyncio
import inspect
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
    """Answers a message with a message, with an awaitable of one, or not at all."""

_LIMITS: Final = Limits()


def through_the_codec(message: Message) -> Message:
    """The message as the other side gets it: its arrays are read-only copies.

    Raises:
        TypeError, ValueError, ProtocolError: It cannot be sent, or not be read.
    """
    header, arrays = encode(message)
    _, received = decode(header, [array.tobytes() for array in arrays], _LIMITS)
    return received


def _ignore(*_: object) -> None:
    pass


class FakeRemote:
    """A connected task as a service sees it; stands for `zstrat.transport.Remote`.

    Args:
        role: What its key says it may do.
        incarnation: Of its process; default: a random one.
        name: What errors call it; default: its job and index.
        pid: Of its process, on the host "here".
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
        """What it was sent, in order."""
        self.notified: Final = asyncio.Event()
        """Set with every notice; whoever waits for the next one clears it first."""
        self.refusals: list[Callable[[Message], Exception | None]] = []
        """The first of them is asked about each notice; its error is raised instead of
        taking the notice, and then it is done."""
        self.promised = 0
        self.is_heard = True
        """Its connection is whole, and it was heard just now."""
        self.heard = 0
        """Another value after each message that comes from it."""

    def notify(self, message: Message) -> None:
        """Keeps a notice.

        Raises:
            PeerLostError: It is not ``alive``.
            Exception: What the first of ``refusals`` returned.
        """
        if not self.alive:
            raise PeerLostError(self.name, "it is not connected")
        if self.refusals and (error := self.refusals[0](message)) is not None:
            del self.refusals[0]
            raise error
        self.notices.append(message)
        self.notified.set()

    def promise(self, nbytes: int) -> None:
        """Keeps the size of the answer that the service announced."""
        self.promised = nbytes

    def __repr__(self) -> str:
        return f"<FakeRemote {self.name}{'' if self.alive else ' lost'}>"


class FakeLink:
    """The way to a task that is a function of this process. All methods belong to the
    thread of the loop that calls `start`.

    Args:
        handler: Gets each message that arrives. What it returns, or what comes of an
            awaitable that it returns, answers a request; None leaves it open. What it
            raises is the outcome.
        name, address: What errors call the task, and where they say that it is.
        hello: What the task greets with in `start`; None: it is not there until
            `connect`.
        on_notice, on_open, on_lost: As of `zstrat.transport.Link`.
        on_change: Called when something has happened on the link, for tests that wait
            until it has.
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
        """HELLO of the task, while the link is open."""
        self.is_started = self.is_closed = False
        self.is_refused = False
        """As of a `Link`: the last attempt to connect has failed at once."""
        self.is_silent = False
        """It is open, and the task is not heard."""
        self.trouble = "no answer"
        """As of a `Link`: why it is not open."""
        self.sent: list[Message] = []
        """Requests and notices, as they were given."""
        self.held: list[tuple[Message, Reply | None]] | None = None
        """What waits between `hold` and `release`."""
        self.requests: dict[Reply, None] = {}
        """Those without an outcome, in the order in which they were given."""
        self._handler, self._hello = handler, hello
        self._on_notice, self._on_open, self._on_lost = on_notice, on_open, on_lost
        self._on_change = on_change
        self._connection = 0
        """Counts them: what was sent over one does not arrive over the next, though the
        task may greet with the same words."""
        self._waiters: list[asyncio.Future[Hello]] = []

    @property
    def is_open(self) -> bool:
        return self.peer is not None

    @property
    def is_heard(self) -> bool:
        return self.is_open and not self.is_silent

    def start(self) -> None:
        """Connects, if the task is there.

        Raises:
            ClosedError: It was started or closed before.
        """
        if self.is_started or self.is_closed:
            raise ClosedError(f"the link to {self.name} can be started once")
        self.is_started = True
        self._loop = asyncio.get_running_loop()
        if self._hello is not None:
            self.connect(self._hello)

    async def wait_open(self, deadline: float) -> Hello:
        """Waits until there is a peer, as a `Link` does. Cancellation: nothing is
        lost."""
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
        """Sends a request, as a `Link` does; no deadline passes by itself."""
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
        """`submit`, awaited. Cancellation: gives up the answer alone."""
        return await self.submit(message, deadline=deadline)

    def notify(self, message: Message) -> None:
        """Sends a message that nobody answers, as a `Link` does."""
        if self.is_closed:
            raise ClosedError(self.name)
        if self.peer is None:
            raise PeerLostError(self.name, "it is not connected")
        self.sent.append(message)
        self._carry(message, None)

    async def close(self, reason: str = "") -> None:
        """Closes the link, as that of a `Link`: open requests fail."""
        del reason
        self.is_closed, self.peer = True, None
        self._fail(ClosedError(self.name))

    def connect(self, hello: Hello | None = None) -> None:
        """The task is there, or back: it greets.

        Args:
            hello: With what; None: as the last time.

        Raises:
            ValueError: It has never greeted, so there is no last time.
        """
        hello = hello or self._hello
        if hello is None:
            raise ValueError(f"{self.name} was never there: give its hello")
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
        """The connection is lost, and nothing of it arrives any more.

        Args:
            left: The task has said goodbye.
            returns: Seconds in which it said that it will be back with all it held.
        """
        if self.peer is None:
            return
        self.peer, self.held = None, None
        error = PeerLostError(self.name, reason, left, returns)
        self._fail(error)
        self._on_lost(error)
        self._on_change()

    def hold(self) -> None:
        """From now on, what is sent does not arrive: it waits in ``held``."""
        self.held = [] if self.held is None else self.held

    def release(self) -> None:
        """What was held arrives, in order, before this returns."""
        held, self.held = self.held or [], None
        for message, future in held:
            self._deliver(message, future, self._connection)

    def say(self, message: Message) -> None:
        """The task sends a notice; lost if it is not connected."""
        if self.peer is not None:
            received = through_the_codec(message)
            self._loop.call_soon(self._hear, received, self._connection)

    def _carry(self, message: Message, future: Reply | None) -> None:
        received = through_the_codec(message)
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
            later = asyncio.ensure_future(answer)
            later.add_done_callback(lambda done: self._answer(_outcome(done), future))
        else:
            self._answer(answer, future)

    def _answer(self, answer: Any, future: Reply | None) -> None:
        if future is not None and not future.done() and answer is not None:
            if isinstance(answer, Exception):
                future.set_exception(answer)
            else:
                future.set_result(through_the_codec(answer))
        self._on_change()

    def _hear(self, message: Message, connection: int) -> None:
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
        return None  # the service gave the request up: nobody answers it
    return done.exception() or done.result()
