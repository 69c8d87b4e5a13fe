"""The way to one parameter server, over connections that break and come back.

When a connection breaks nobody knows which requests were carried out. The server may be
back a moment later with all that it held, so a request waits here meanwhile, and is
sent again then, in the order of the calls. What changes something is named, or does
nothing the second time (`_repeated`); what is neither is not sent again.

Whoever owns the connection says how it stands (`hold`, `resume`, `lose`), because only
he knows whether the server that came back is the one that was there before. As long as
he has never said so, requests go straight to the link and end with its connection.

A server that has a second copy may go on elsewhere (`move`). What is under way then is
sent again there, as behind a connection that broke; so is what one was asked that is
not the server any more (`NotPrimaryError`).
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol, final

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
    AskParts,
    BindOptimizer,
    CreateOptimizer,
    CreateVariables,
    DeleteVariables,
    Exchange,
    Fence,
    InitializeVariables,
    Inspect,
    JoinSession,
    Pull,
    PullRows,
    Push,
    PushPart,
    Withdraw,
)

if TYPE_CHECKING:
    from zstrat.wire import Hello, Message

REQUEST_TIMEOUT: Final = 120.0
"""Seconds that a request without a deadline waits for the server to come back."""

LOSS_ERRORS: Final = (PeerLostError, NotPrimaryError, ClosedError)
"""Outcomes of a request that say nothing of it, but that it was asked there in vain. A
link is closed below a line that is not, when the server is elsewhere."""

REFUSED: Final = 0.5
"""Seconds until one is asked again that has said that it is not the server, unless one
hears where the server is before."""

MAX_WAITING_REQUESTS: Final = 16384
"""Requests that wait: as many as one peer may have open."""


class LineLink(Protocol):
    """What a line needs of `zstrat.transport.Link`."""

    @property
    def peer(self) -> Hello | None: ...
    def submit(
        self, message: Message, *, deadline: float | None = None
    ) -> asyncio.Future[Message]: ...


@dataclass(eq=False, slots=True)
class _Held:
    """A request that waits, and what gives it up at its deadline. ``sent``: before the
    connection broke, so it comes before those that were not."""

    message: Message
    deadline: float
    outcome: asyncio.Future[Message]
    sent: bool
    timer: asyncio.TimerHandle | None = None


@final
class ServerLine:
    """To the parameter server ``task``, over ``link``. On the loop of the link."""

    __slots__ = (
        "_flows",
        "_link",
        "_loss",
        "_not_sent",
        "_retry",
        "_sent_before",
        "_task",
        "_timeout",
        "_waits",
        "repeats",
    )  # fmt: skip

    def __init__(self, link: LineLink, task: str, request_timeout: float) -> None:
        self._link, self._task, self._timeout = link, task, request_timeout
        self.repeats = 0
        """How often a request was sent again, or had to wait to be sent at all."""
        self._sent_before: list[_Held] = []
        self._not_sent: list[_Held] = []
        self._flows = True
        """Requests go to the link."""
        self._waits = False
        """Those that fail with their connection wait for the next one."""
        self._loss: PSUnavailableError | None = None
        self._retry: asyncio.TimerHandle | None = None

    @property
    def peer(self) -> Hello | None:
        """HELLO of the server, while it is connected."""
        return self._link.peer

    @property
    def is_held(self) -> bool:
        """Whether requests wait here, or are refused, instead of going to the link."""
        return not self._flows

    def submit(
        self, message: Message, *, deadline: float | None = None
    ) -> asyncio.Future[Message]:
        """`LineLink.submit`, or later if the server is away."""
        if self._flows:
            reply = self._link.submit(message, deadline=deadline)
            if not reply.done():
                return reply
            # Nothing is connected. Whoever comes next must not overtake it.
            return self.again(message, deadline, reply, sent=False) or reply
        outcome: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        if self._loss is not None:
            outcome.set_exception(_copy(self._loss))
        else:
            self._keep(message, deadline, outcome, sent=False)
        return outcome

    def again(
        self,
        message: Message,
        deadline: float | None,
        lost: asyncio.Future[Message],
        *,
        sent: bool = True,
    ) -> asyncio.Future[Message] | None:
        """For a request whose outcome is ``lost``: another one that is worth waiting
        for, if there is one.

        Args:
            sent: It may have been carried out.
        """
        error = None if lost.cancelled() else lost.exception()
        if not isinstance(error, LOSS_ERRORS) or not (self._waits or self._loss):
            return None
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
            outcome.set_exception(self._in_vain())
        else:
            self._keep(repeated, deadline, outcome, sent=sent)
        return outcome

    # ---- told by the owner of the connection ---------------------------------------

    def hold(self) -> None:
        """There is a connection, but not known yet what the server still holds."""
        self._stop_retry()
        if self._waits:
            self._flows = False

    def resume(self) -> None:
        """The server is there, with all that it ever held of this session."""
        self._stop_retry()
        self._flows = self._waits = True
        self._loss = None
        for each in self._take():
            self._send(each)

    def lose(self, reason: str, *, gone: bool, own: bool = False) -> None:
        """The server does not come back, as far as one can tell.

        Args:
            gone: What it held is known to be lost.
            own: Updates of this very program are kept until their deadline all the
                same: if they were given up, nobody could say whether to repeat them.
        """
        self._stop_retry()
        self._flows = self._waits = False
        self._loss = PSUnavailableError(self._task, reason, gone)
        for each in self._take():
            if own and not gone and isinstance(each.message, Push):
                self._place(each).append(each)
            else:
                self._end(each, _copy(self._loss))

    def move(self, link: LineLink) -> None:
        """The server is at the far end of another link, with all that it held, or will
        be. What waits, and what ends with the link of before, is sent there when that
        is known (`resume`); so that one has to be closed before this one opens."""
        self._stop_retry()
        self._link, self._flows = link, False
        self._waits = self._loss is None

    def close(self, error: Exception) -> None:
        """Nobody waits any more; the error says why."""
        self._stop_retry()
        self._flows, self._waits, self._loss = True, False, None  # as the link says
        for each in self._take():
            self._end(each, type(error)(*error.args))

    # ---- private ---------------------------------------------------------------------

    def _in_vain(self) -> PeerLostError:
        """The outcome of what cannot be sent again."""
        words = "another process has its place, and may have carried the request out"
        return PeerLostError(self._task, words)

    def _pause(self) -> None:
        """Nothing is asked for a while of who says that it is not the server."""
        self._flows = False
        if self._retry is None:
            loop = asyncio.get_running_loop()
            self._retry = loop.call_later(REFUSED, self._ask_again)

    def _ask_again(self) -> None:
        self._retry = None
        if self._waits and self._link.peer is not None:
            self.resume()

    def _stop_retry(self) -> None:
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None

    def _keep(
        self,
        message: Message,
        deadline: float | None,
        outcome: asyncio.Future[Message],
        *,
        sent: bool,
    ) -> None:
        if len(self._sent_before) + len(self._not_sent) >= MAX_WAITING_REQUESTS:
            count = MAX_WAITING_REQUESTS
            words = f"{self._task} is away, and {count} requests wait for it already"
            outcome.set_exception(BusyError(words))
            return
        loop = asyncio.get_running_loop()
        until = loop.time() + self._timeout if deadline is None else deadline
        held = _Held(message, until, outcome, sent)
        if self._flows and self._link.peer is not None:  # the server is back already
            self._send(held)
            return
        held.timer = loop.call_at(until, self._late, held)
        self._place(held).append(held)

    def _place(self, held: _Held) -> list[_Held]:
        return self._sent_before if held.sent else self._not_sent

    def _take(self) -> list[_Held]:
        """All that wait, in the order of the calls."""
        held = self._sent_before + self._not_sent
        self._sent_before, self._not_sent = [], []
        return held

    def _send(self, held: _Held) -> None:
        if held.timer is not None:
            held.timer.cancel()
        if held.outcome.done():
            return
        try:
            reply = self._link.submit(held.message, deadline=held.deadline)
        except Exception as error:  # goes to the caller, as if the server had said it
            held.outcome.set_exception(error)
        else:
            reply.add_done_callback(partial(self._replied, held))

    def _replied(self, held: _Held, reply: asyncio.Future[Message]) -> None:
        outcome = held.outcome
        if outcome.done():
            return
        if reply.cancelled():
            outcome.cancel()
        elif (error := reply.exception()) is None:
            outcome.set_result(reply.result())
        elif isinstance(error, LOSS_ERRORS) and self._waits:
            if isinstance(error, NotPrimaryError):
                self._pause()
            repeated = _repeated(held.message)
            if repeated is None:
                outcome.set_exception(self._in_vain())
            else:
                self._keep(repeated, held.deadline, outcome, sent=True)
        else:
            lost = self._loss if isinstance(error, LOSS_ERRORS) else None
            outcome.set_exception(error if lost is None else _copy(lost))

    def _late(self, held: _Held) -> None:
        self._place(held).remove(held)
        kind = type(held.message).__name__
        words = (
            f"{self._task} did not come back before the deadline of a {kind}; it may "
            "have carried it out before it went away"
        )
        self._end(held, DeadlineExceededError(words))

    def _end(self, held: _Held, error: Exception) -> None:
        if held.timer is not None:
            held.timer.cancel()
        if not held.outcome.done():
            held.outcome.set_exception(error)


def _copy(error: PSUnavailableError) -> PSUnavailableError:
    """An exception that is raised twice collects tracebacks."""
    return PSUnavailableError(error.task, error.reason, error.lost)


def _repeated(message: Message) -> Message | None:
    """What to send if nobody knows whether the message was carried out; None: nothing
    would mean the same."""
    match message:
        case Push(step=step) | PushPart(step=step) | Exchange(step=step):
            return None if step == UNNAMED else message
        case DeleteVariables(session=session, keys=keys):
            return Withdraw(session, keys, [])  # some may be deleted already
        case Pull() | PullRows() | AskParts() | Inspect() | JoinSession():
            return message
        case Fence():
            return message  # to say twice which steps are over is as good as once
        case CreateVariables() | InitializeVariables() | CreateOptimizer():
            return message  # what is there stays as it is
        case Withdraw() | BindOptimizer():
            return message
        case _:
            return None
