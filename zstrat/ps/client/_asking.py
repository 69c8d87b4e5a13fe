"""Calls of several messages, each to one parameter server, with one result.

A call sends all its messages at once; its future is done with the last answer or the
first error. Lives on the event loop that owns the links.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any, Generic, TypeVar, final

from zstrat.errors import PeerLostError, ProtocolError, PSUnavailableError

from ._line import ServerLine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from zstrat.transport import TaskLink
    from zstrat.wire import Message

M = TypeVar("M")
T = TypeVar("T")


class AskedServers:
    """All parameter servers of one session, each with its request queue (`ServerLine`).

    Args:
        links: One per parameter server, in task order, opened by the caller.
        session: The session that is open on all of them.
        request_timeout: Seconds that a request without a deadline waits for a server
            that is not connected.
    """

    def __init__(
        self, links: Sequence[TaskLink], session: int, request_timeout: float
    ) -> None:
        self.session = session
        self.lines = tuple(
            ServerLine(link, f"/job:ps/task:{ps}", request_timeout)
            for ps, link in enumerate(links)
        )
        """The request queues of all servers, in task order. The owner of the links
        reports the state of each connection to them, if requests are to outlive a
        connection."""

    @property
    def repeats(self) -> int:
        """Number of requests that were sent again."""
        return sum([line.repeats for line in self.lines])

    @property
    def count(self) -> int:
        """Number of servers."""
        return len(self.lines)

    async def each(
        self,
        messages: Sequence[tuple[int, Message]],
        want: type[M],
        *,
        deadline: float | None = None,
    ) -> list[M]:
        """Sends all messages, ``(ps, message)`` each, at once; returns their answers in
        order.

        Args:
            deadline: In loop time; None: the default of the link.

        Raises:
            PSUnavailableError: A parameter server is gone.
            ProtocolError: An answer is of another class than ``want``.
            Exception: The first error that a server answers with.

        Cancellation: the servers carry out the messages all the same.
        """
        answers: dict[int, M] = {}
        parts = [
            CallPart(ps, message, want, partial(answers.__setitem__, place))
            for place, (ps, message) in enumerate(messages)
        ]
        return await self._ask(
            parts, lambda: [answers[at] for at in range(len(parts))], deadline
        )

    def _ask(
        self,
        parts: Sequence[CallPart[Any]],
        result: Callable[[], T],
        deadline: float | None = None,
    ) -> asyncio.Future[T]:
        """Sends all parts of a call; returns a future that is done with the last answer
        or the first error."""
        call = ServerCall(len(parts), result)
        for part in parts:
            call.send(self.lines[part.ps], part, deadline)
        return call.outcome


@final
class ServerCall(Generic[T]):
    """A call of one message to each of several servers. Its ``outcome`` is what
    ``result`` returns when all messages are answered, or the first error."""

    __slots__ = ("_left", "_result", "outcome")

    def __init__(self, messages: int, result: Callable[[], T]) -> None:
        self.outcome: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._left, self._result = messages, result
        if not messages:
            self.outcome.set_result(result())

    def send(
        self, line: ServerLine, part: CallPart[Any], deadline: float | None
    ) -> None:
        """Sends one message of the call, unless another one has failed already."""
        if self.outcome.done():
            return
        try:
            reply = line.submit(part.message, deadline=deadline)
        except Exception as error:  # goes to the caller, as if the server had said it
            self.fail(error)
        else:
            reply.add_done_callback(partial(self._replied, line, part, deadline))

    def take(self, take: Callable[[M], object], answer: M, part: CallPart[Any]) -> None:
        """Passes the answer to one message to ``take``. The call fails if ``take``
        finds that the answer does not fit the question."""
        try:
            take(answer)
        except (ValueError, StopIteration) as error:
            # The reader of the answer knows the question, and finds what does not fit.
            self.fail(part.misunderstood(error))
        else:
            self._left -= 1
            if not self._left and not self.outcome.done():
                self.outcome.set_result(self._result())

    def fail(self, error: BaseException) -> None:
        """Ends the call with the error of one message, unless the call has ended."""
        if self.outcome.done():
            return
        # The caller has given up, or the loop ends: the server is not to blame.
        if isinstance(error, asyncio.CancelledError):
            self.outcome.cancel()
        else:
            self.outcome.set_exception(error)

    def _replied(
        self,
        line: ServerLine,
        part: CallPart[Any],
        deadline: float | None,
        reply: asyncio.Future[Message],
    ) -> None:
        try:
            answer = part.answer(reply)
        except BaseException as error:  # goes to the caller
            gave_up = self.outcome.done()  # no caller waits: it is not sent again
            later = None if gave_up else line.resubmit(part.message, deadline, reply)
            if later is None:
                self.fail(error)
            else:
                later.add_done_callback(partial(self._replied, line, part, deadline))
        else:
            self.take(part.take, answer, part)


@final
class CallPart(Generic[M]):
    """One message of a call, to the server ``ps``. ``take`` receives the answer, and
    raises ValueError or StopIteration if the answer is malformed."""

    __slots__ = ("_want", "message", "ps", "take")

    def __init__(
        self,
        ps: int,
        message: Message,
        want: type[M],
        take: Callable[[M], object],
    ) -> None:
        self.ps, self.message, self.take = ps, message, take
        self._want = want

    def answer(self, reply: asyncio.Future[Message]) -> M:
        """Returns the answer that a reply holds, if it is of the class that was asked
        for.

        Raises:
            PSUnavailableError: The server is gone.
            ProtocolError: The answer is of another class.
            BaseException: The error of the server; CancelledError if no answer will
                come.
        """
        try:
            answer = reply.result()
        except PeerLostError as error:
            raise PSUnavailableError(self._task, error.reason) from error
        if isinstance(answer, self._want):
            return answer
        raise self.misunderstood(ValueError(type(answer).__name__))

    def misunderstood(self, error: Exception) -> ProtocolError:
        """Returns the error for an answer that does not fit the question, for the
        reason in ``error``."""
        wrong = ProtocolError(
            f"{self._task} answered {type(self.message).__name__} with something else "
            f"than was asked for: {error}"
        )
        wrong.__cause__ = error
        return wrong

    @property
    def _task(self) -> str:
        return f"/job:ps/task:{self.ps}"


def by_server(pairs: Iterable[tuple[int, T]]) -> dict[int, list[T]]:
    """Groups ``(ps, item)`` pairs: returns the items of each server, in order."""
    found: dict[int, list[T]] = {}
    for ps, item in pairs:
        found.setdefault(ps, []).append(item)
    return found


def nothing(answer: object = None) -> None:
    """Returns None. The result of calls whose answers only say that they are done."""
