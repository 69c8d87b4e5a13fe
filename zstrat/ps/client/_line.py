"""The queue of requests to one parameter server, which outlives a broken connection.

When a connection breaks, it is unknown which requests under way were carried out. The
server may reconnect a moment later with all that it held. The senders of those requests
pass them to this queue (`resubmit`), which keeps them until the server is back, and
then sends them again, in the order of the calls. A request is sent again only if the
server recognizes it by its step, or if carrying it out twice has the effect of once
(`_repeated`). Any other request ends with its connection.

The owner of the connection reports its state to this queue (`hold`, `resume`, `lose`),
because only the owner knows whether the server that came back still has the state of
before. Until the owner first calls `resume`, `lose` or `move`, requests go straight to
the link and end with its connection.

A server that has a backup may continue in another process (`move`). Requests under
way are then sent again to that process, as after a connection that broke. So are
requests that a process refused because it is not the primary (`NotPrimaryError`).
"""

from __future__ import annotations

import asyncio
import enum
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Final, final

from zstrat.errors import (
    BusyError,
    ClosedError,
    DeadlineExceededError,
    NotPrimaryError,
    PeerLostError,
    PSUnavailableError,
)
from zstrat.ps.store._ledger import UNNAMED
from zstrat.wire import (
    REQUESTS,
    DeleteVariables,
    Exchange,
    Push,
    PushPart,
    Repeat,
)

if TYPE_CHECKING:
    from zstrat.transport import TaskLink
    from zstrat.wire import Hello, Message

REQUEST_TIMEOUT: Final = 120.0
"""Seconds that a request without a deadline waits for the server to come back, by
default."""

LOSS_ERRORS: Final = (PeerLostError, NotPrimaryError, ClosedError)
"""Errors that leave open whether a request was carried out, or say that it reached the
wrong process. `ClosedError` is one of them: when the server moves to another process,
its link is closed, while the queue of requests to it stays open."""

NOT_PRIMARY_PAUSE: Final = 0.5
"""Seconds until a process that answered `NotPrimaryError` is asked again, unless the
owner of the connection says before then where the server is."""

MAX_WAITING_REQUESTS: Final = 16384
"""The most requests that may wait at a time: as many as one peer may have under way."""


class LineState(enum.Enum):
    """The state of the connection to the server, set by the owner of the connection,
    which decides what happens to requests."""

    UNMANAGED = "nothing was reported: they go to the link, and end with its connection"
    OPEN = "they go to the link, and are sent again over the next connection"
    HELD = "they wait until it is known where the server is, and what it holds"
    LOST = "they are refused"


_FLOWING: Final = (LineState.UNMANAGED, LineState.OPEN)
_KEEPING: Final = (LineState.OPEN, LineState.HELD)
"""States in which a request waits for the next connection if its connection breaks."""


@dataclass(eq=False, slots=True)
class _RequestInLine:
    """A request that waits for the connection, and the timer that gives it up at
    ``until``.

    A request with ``sent`` was sent before the connection broke, so it is sent again
    before the requests that were not. ``deadline`` is passed to `TaskLink.submit` when
    the request is sent.
    """

    message: Message
    deadline: float | None
    until: float
    outcome: asyncio.Future[Message]
    sent: bool
    timer: asyncio.TimerHandle | None = None


@final
class ServerLine:
    """The queue of requests to the parameter server ``task``, over ``link``. Lives on
    the event loop of the link."""

    __slots__ = (
        "_link",
        "_loss",
        "_not_sent",
        "_retry",
        "_sent_before",
        "_state",
        "_task",
        "_timeout",
        "repeats",
    )  # fmt: skip

    def __init__(self, link: TaskLink, task: str, request_timeout: float) -> None:
        self._link, self._task, self._timeout = link, task, request_timeout
        self.repeats = 0
        """How often a request was sent again, or had to wait for the connection before
        it was sent."""
        self._sent_before: list[_RequestInLine] = []
        self._not_sent: list[_RequestInLine] = []
        self._state = LineState.UNMANAGED
        self._loss: PSUnavailableError | None = None
        """Why requests are refused, while the state is `LineState.LOST`."""
        self._retry: asyncio.TimerHandle | None = None

    @property
    def peer(self) -> Hello | None:
        """HELLO of the server, while it is connected."""
        return self._link.peer

    @property
    def shares_memory(self) -> bool:
        """Whether large bodies go through memory that both processes share."""
        return self._link.shares_memory

    @property
    def is_held(self) -> bool:
        """Whether requests wait in this queue, or are refused, instead of going to the
        link."""
        return self._state not in _FLOWING

    def submit(
        self, message: Message, *, deadline: float | None = None
    ) -> asyncio.Future[Message]:
        """Sends a request as `TaskLink.submit` does, or later if the server is not
        connected. If the outcome is one of `LOSS_ERRORS`, the caller passes the request
        to `resubmit`: requests that are sent at once are not kept here, which saves a
        callback for each."""
        if self._state in _FLOWING:
            reply = self._link.submit(message, deadline=deadline)
            if not reply.done():
                return reply
            # Nothing is connected. The request waits, so that no later one overtakes.
            return self.resubmit(message, deadline, reply, sent=False) or reply
        outcome: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        if self._loss is not None:
            outcome.set_exception(_copy(self._loss))
        else:
            self._keep(self._in_line(message, deadline, outcome, sent=False))
        return outcome

    def resubmit(
        self,
        message: Message,
        deadline: float | None,
        lost: asyncio.Future[Message],
        *,
        sent: bool = True,
    ) -> asyncio.Future[Message] | None:
        """Sends a request again that ended with ``lost``, if repeating it is safe.

        Returns:
            The outcome to wait for instead; None: ``lost`` is final.

        Args:
            sent: Whether the server may have carried the request out.
        """
        error = None if lost.cancelled() else lost.exception()
        if not isinstance(error, LOSS_ERRORS) or self._state is LineState.UNMANAGED:
            return None
        # What was not sent cannot have been carried out, so it is sent as it is.
        repeated = _repeated(message) if sent else message
        if isinstance(error, NotPrimaryError):
            self._pause()
        elif repeated is None and isinstance(error, PeerLostError):
            return None
        self.repeats += 1
        outcome: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        if self._loss is not None:
            outcome.set_exception(_copy(self._loss))
        elif repeated is None:
            outcome.set_exception(self._not_repeatable())
        else:
            self._keep(self._in_line(repeated, deadline, outcome, sent=sent))
        return outcome

    def hold(self) -> None:
        """Starts to keep requests: the server is connected, but it is not known yet
        whether it still has the state of before."""
        self._stop_retry()
        # Otherwise nothing is kept: the owner has said nothing yet, or the line is
        # lost.
        if self._state is LineState.OPEN:
            self._state = LineState.HELD

    def resume(self) -> None:
        """Sends the waiting requests, because the server is connected with all that it
        ever held of this session."""
        self._stop_retry()
        # First: what is sent now has to be kept if this connection breaks, too.
        self._state, self._loss = LineState.OPEN, None
        for each in self._take_all():
            self._send(each)

    def lose(self, reason: str, *, gone: bool, keep_pushes: bool = False) -> None:
        """Refuses requests until `resume`, as the server is not expected to come back.

        Args:
            gone: The state of the server is known to be lost.
            keep_pushes: Pushes wait until their deadline all the same. For the pushes
                of the program itself, which could not know whether to repeat a push
                that was given up.
        """
        self._stop_retry()
        self._state = LineState.LOST
        self._loss = PSUnavailableError(self._task, reason, gone)
        for each in self._take_all():
            if keep_pushes and not gone and isinstance(each.message, Push):
                self._place(each).append(each)
            else:
                self._end(each, _copy(self._loss))

    def move(self, link: TaskLink) -> None:
        """Sends requests over another link from now on: at its far end the server is,
        or will be, with all that it held. Close the old link after this, and call
        `resume` when it is known where the server is; requests that wait, or ended with
        the old link, are then sent over the new one."""
        self._stop_retry()
        self._link = link
        # It stays lost until `resume`: the owner has said so.
        if self._state is not LineState.LOST:
            self._state = LineState.HELD

    def close(self, error: Exception) -> None:
        """Fails all waiting requests with the error, and refuses further ones."""
        self._stop_retry()
        # Requests go to the link from now on, which says what is wrong.
        self._state, self._loss = LineState.UNMANAGED, None
        for each in self._take_all():
            self._end(each, type(error)(*error.args))

    def _not_repeatable(self) -> PeerLostError:
        """Returns the error of a request that cannot be repeated safely."""
        words = "another process has its place, and may have carried the request out"
        return PeerLostError(self._task, words)

    def _pause(self) -> None:
        """Holds requests for `NOT_PRIMARY_PAUSE`, because the process at the other end
        is not the primary now."""
        if self._state is LineState.OPEN:
            self._state = LineState.HELD
        # One timer for all: the first refusal asks again for everything that waits.
        if self._retry is None:
            loop = asyncio.get_running_loop()
            self._retry = loop.call_later(NOT_PRIMARY_PAUSE, self._ask_again)

    def _ask_again(self) -> None:
        self._retry = None
        # Without a connection the owner calls `resume` when there is one.
        if self._state in _KEEPING and self._link.peer is not None:
            self.resume()

    def _stop_retry(self) -> None:
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None

    def _in_line(
        self,
        message: Message,
        deadline: float | None,
        outcome: asyncio.Future[Message],
        *,
        sent: bool,
    ) -> _RequestInLine:
        until = deadline
        if until is None:
            until = asyncio.get_running_loop().time() + self._timeout
        return _RequestInLine(message, deadline, until, outcome, sent)

    def _keep(self, held: _RequestInLine) -> None:
        if len(self._sent_before) + len(self._not_sent) >= MAX_WAITING_REQUESTS:
            count = MAX_WAITING_REQUESTS
            words = f"{self._task} is away, and {count} requests wait for it already"
            held.outcome.set_exception(BusyError(words))
            return
        # The server may be back already.
        if self._state in _FLOWING and self._link.peer is not None:
            self._send(held)
            return
        loop = asyncio.get_running_loop()
        held.timer = loop.call_at(held.until, self._late, held)
        self._place(held).append(held)

    def _place(self, held: _RequestInLine) -> list[_RequestInLine]:
        return self._sent_before if held.sent else self._not_sent

    def _take_all(self) -> list[_RequestInLine]:
        """Removes and returns all waiting requests, in the order of the calls."""
        # Each list is in the order of the calls, and what was sent is older than what
        # was not.
        held = self._sent_before + self._not_sent
        self._sent_before, self._not_sent = [], []
        return held

    def _send(self, held: _RequestInLine) -> None:
        if held.timer is not None:
            held.timer.cancel()
        # Its caller has given up while it waited.
        if held.outcome.done():
            return
        try:
            reply = self._link.submit(held.message, deadline=held.deadline)
        except Exception as error:  # goes to the caller, as if the server had said it
            held.outcome.set_exception(error)
        else:
            reply.add_done_callback(partial(self._replied, held))

    def _replied(self, held: _RequestInLine, reply: asyncio.Future[Message]) -> None:
        outcome = held.outcome
        if outcome.done():
            return
        if reply.cancelled():
            outcome.cancel()
        elif (error := reply.exception()) is None:
            outcome.set_result(reply.result())
        elif isinstance(error, LOSS_ERRORS) and self._state in _KEEPING:
            if isinstance(error, NotPrimaryError):
                self._pause()
            repeated = _repeated(held.message)
            if repeated is None:
                outcome.set_exception(self._not_repeatable())
            elif held.until <= asyncio.get_running_loop().time():
                self._end(held, self._too_late(held))
            else:
                held.message, held.sent = repeated, True
                self._keep(held)
        else:
            # If the line was lost meanwhile, that is the better reason.
            lost = self._loss if isinstance(error, LOSS_ERRORS) else None
            outcome.set_exception(error if lost is None else _copy(lost))

    def _late(self, held: _RequestInLine) -> None:
        self._place(held).remove(held)
        self._end(held, self._too_late(held))

    def _too_late(self, held: _RequestInLine) -> DeadlineExceededError:
        kind = type(held.message).__name__
        return DeadlineExceededError(
            f"{self._task} did not come back before the deadline of a {kind}; it may "
            "have carried it out before it went away"
        )

    def _end(self, held: _RequestInLine, error: Exception) -> None:
        if held.timer is not None:
            held.timer.cancel()
        if not held.outcome.done():
            held.outcome.set_exception(error)


def _copy(error: PSUnavailableError) -> PSUnavailableError:
    """Returns a new error like ``error``, one for each request: an error raised twice
    would collect tracebacks."""
    return PSUnavailableError(error.task, error.reason, error.lost)


def _repeated(message: Message) -> Message | None:
    """Returns the message to send in place of ``message`` if the server may have
    carried it out already.

    None: no message has the effect of carrying ``message`` out once.
    """
    if isinstance(message, DeleteVariables):
        # The first try may have deleted some already.
        return replace(message, again=True)
    match REQUESTS[type(message)].repeat:
        case Repeat.NEVER:
            return None
        case Repeat.SAFE:
            return message
        case Repeat.BY_STEP:
            assert isinstance(message, Push | PushPart | Exchange)
            # Without a name the server cannot know that it is the same update.
            return None if message.step == UNNAMED else message
