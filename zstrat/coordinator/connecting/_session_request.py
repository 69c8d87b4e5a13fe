"""The requests that open and close our session on one task.

A task is asked again, after growing pauses, while another coordinator that may be alive
holds it, or while it ends a step of an earlier session. The law of this file: at most
one request is under way, and only the answer to the last one is reported. Each message
has the time when it was sent, as a task gets those of several connections in any order.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar, final
from weakref import WeakKeyDictionary

from zstrat.errors import BusyError, HeldError
from zstrat.wire import CloseSession, JoinSession, OpenSession

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from zstrat.errors import DeadlineExceededError
    from zstrat.transport import TaskLink
    from zstrat.wire import Message

log = logging.getLogger("zstrat.coordinator")

FIRST_PAUSE_SECONDS: Final = 0.1
LONGEST_PAUSE_SECONDS: Final = 5.0

Sent = TypeVar("Sent", OpenSession, CloseSession)

MAX_EARLY_NOTICES: Final = 2048
"""Notices that are kept until the task has answered: those of all workers that may wait
there, and some more."""


@final
class SessionRequest:
    """The requests to one task. On the loop.

    Args:
        opening: What opens the session there.
        turn: Seconds to wait for a task that another coordinator holds; it is asked
            after that, too.
        notice: The same if that coordinator may be dead: as long as the task needs to
            notice it.
        on_answer: Called with each request that was answered and not stopped.
    """

    def __init__(
        self,
        opening: OpenSession | JoinSession,
        turn: float,
        notice: float,
        on_answer: Callable[[asyncio.Future[Message]], None],
    ) -> None:
        self._opening = self._reopening = opening
        # A task that was in the session has it still, or has lost it for good.
        if isinstance(opening, JoinSession):
            self._reopening = replace(opening, timeout=0.0)
        self._turn, self._notice, self._on_answer = turn, notice, on_answer
        self._close_messages: Sequence[CloseSession] = ()
        """Sent before the request that opens the session."""
        self._pause = FIRST_PAUSE_SECONDS
        self._held_since: float | None = None
        """Loop time since which the task answers that another coordinator holds it."""
        self.early: Final[deque[Message]] = deque(maxlen=MAX_EARLY_NOTICES)
        """Notices of the task before its answer to the last request."""
        self._sent: asyncio.Future[Message] | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def session(self) -> int:
        """The number of the session."""
        return self._opening.session

    @property
    def has_longest_pause(self) -> bool:
        """Whether the pauses have their longest length."""
        return self._pause >= LONGEST_PAUSE_SECONDS

    @property
    def is_under_way(self) -> bool:
        """Whether an answer of the task is awaited."""
        return self._sent is not None

    def keep_origin(self, origin: int) -> None:
        """Makes later requests open a session whose keys are counted from
        ``origin``."""
        assert isinstance(self._opening, OpenSession), self._opening
        self._opening = self._reopening = replace(self._opening, origin=origin)

    def enter(self, session: int, close_messages: Sequence[CloseSession]) -> None:
        """Makes later requests open another session.

        Args:
            close_messages: Close the sessions before.
        """
        self._opening = self._reopening = replace(self._opening, session=session)
        self._close_messages = close_messages
        self.restart_pauses()

    def restart_pauses(self) -> None:
        """Makes the next pause the shortest one."""
        self._pause = FIRST_PAUSE_SECONDS

    def send(self, link: TaskLink, *, resumes: bool) -> None:
        """Sends the request now.

        Args:
            resumes: The task is in the session as far as we know.
        """
        self.stop()
        self.early.clear()
        opening = self._reopening if resumes else self._opening
        if not resumes:
            for message in self._close_messages:
                link.submit(_sent_now(message)).add_done_callback(_ignore_outcome)
        if isinstance(opening, OpenSession):
            opening = _sent_now(opening)
        self._sent = link.submit(opening)
        self._sent.add_done_callback(self._answered)

    def repeat(
        self, send: Callable[[], None], refusal: BusyError | DeadlineExceededError
    ) -> bool:
        """Calls ``send`` after a pause.

        Args:
            refusal: The answer of the task: a `BusyError` if another coordinator holds
                it.

        Returns:
            Whether that coordinator has held it for a whole turn: so it is alive, and
            we no longer wait for its end.
        """
        loop = asyncio.get_running_loop()
        now = loop.time()
        self._timer = loop.call_later(self._pause, send)
        self._pause = min(2 * self._pause, LONGEST_PAUSE_SECONDS)
        if not isinstance(refusal, BusyError):
            self._held_since = None
            return False
        if self._held_since is None:
            self._held_since = now
        doubt = 0.0 if isinstance(refusal, HeldError) else self._notice
        return now - self._held_since >= max(self._turn, doubt)

    def opened(self) -> None:
        """Notes that the task is in the session. The messages that close earlier ones
        are not sent again: this session may have the number of one of them."""
        self._held_since = None
        self._close_messages = ()

    def stop(self) -> None:
        """Stops asking, and ignores the answer to what was asked."""
        sent, self._sent = self._sent, None
        if sent is not None:
            sent.cancel()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def withdraw(self, link: TaskLink) -> None:
        """Closes the session on a task that we refuse, without awaiting its answer."""
        closing = _sent_now(CloseSession(self.session, False))
        link.submit(closing).add_done_callback(_ignore_outcome)

    def close(
        self, link: TaskLink, timeout: float, *, exits: bool
    ) -> asyncio.Future[Message]:
        """Closes the session, and logs it if the task does not answer.

        Args:
            timeout: Seconds that the task has to answer.
            exits: The process of the task exits, too.
        """
        deadline = asyncio.get_running_loop().time() + timeout
        closing = _sent_now(CloseSession(self.session, exits))
        answer = link.submit(closing, deadline=deadline)
        # A task that was lost meanwhile has left the session anyway.
        answer.add_done_callback(partial(log_failure, "closing the session"))
        return answer

    def _answered(self, sent: asyncio.Future[Message]) -> None:
        if sent.cancelled():
            return
        sent.exception()  # else asyncio logs that it was never retrieved
        if sent is self._sent:
            self._sent = None
            self._on_answer(sent)


_last_sent: WeakKeyDictionary[asyncio.AbstractEventLoop, float] = WeakKeyDictionary()


def _sent_now(message: Sent) -> Sent:
    """Returns the message with the time of now, later than that of any message before:
    uvloop's clock has steps of a millisecond, in which a task may be let go and taken
    again."""
    loop = asyncio.get_running_loop()
    sent = max(loop.time(), math.nextafter(_last_sent.get(loop, 0.0), math.inf))
    _last_sent[loop] = sent
    return replace(message, sent=sent)


def _ignore_outcome(answer: asyncio.Future[Message]) -> None:
    """Ignores an error: the task may no longer serve that session."""
    if not answer.cancelled():
        answer.exception()


def log_failure(what: str, answer: asyncio.Future[Message]) -> None:
    """Logs the error of a request that nothing else handles, if it failed."""
    if not answer.cancelled() and (error := answer.exception()) is not None:
        log.info("%s: %s", what, error)
