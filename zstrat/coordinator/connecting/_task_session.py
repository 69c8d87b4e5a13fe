"""Our session on one task of the cluster.

A task session opens the session on one worker or parameter server each time its link
opens (`MovableLink`), and again while another coordinator holds the task or is not yet
known to be dead (`SessionRequest`). It runs on the loop thread without an asyncio task:
futures and timers call it back. `SessionPhase` has its drawing.

A task with *one life* (a parameter server) keeps our data while its connection is cut
and while we are away. So its loss is not reported while it may come back with all the
data: it is asked to resume the session.

The law of this file: `TaskSessionEvents.task_ready` and `TaskSessionEvents.task_lost`
alternate, except that a task that moves while it is in the session is ready again
without having been lost.
"""

from __future__ import annotations

import asyncio
import enum
import itertools
import logging
import math
from typing import TYPE_CHECKING, Final, Protocol

from zstrat.errors import (
    BusyError,
    ClosedError,
    DeadlineExceededError,
    PeerLostError,
    ZstratError,
)
from zstrat.wire import SessionOpened

from ._task_links import MovableLink, SessionRequest

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from zstrat.ps import ServerLine
    from zstrat.transport import MakeTaskLink, TaskLink
    from zstrat.wire import (
        CloseSession,
        Hello,
        JoinSession,
        LayoutMessage,
        Message,
        OpenSession,
    )

    Objection = Callable[
        ["TaskSession", Hello, SessionOpened | None], ZstratError | None
    ]
    """Returns why a task is refused, or None. Called when the task greets, and when the
    task has opened the session."""

log = logging.getLogger("zstrat.coordinator")

_ENTRIES: Final = itertools.count(1)


class SessionPhase(enum.Enum):
    """Whether a task is in our session, and what is known of our data there if not.

    AWAY ──opened──▶ JOINED ──link lost (one life)──▶ SILENT ──greets──▶ JOINED
     ▲ ▲               │                                │
     │ └─ link lost ───┴──── its time to return is over ┘
     │
     └──RECONNECTED, RENEWING: only while `TaskSessionEvents.task_lost` runs

    any ──another process greets, or another coordinator has taken it──▶ GONE
    any ──it says that it has nothing, or `move` to an empty one──▶ EMPTY
    GONE ──resumed after all──▶ JOINED
    GONE, EMPTY ──`renew`, or `move` to where our data is──▶ AWAY
    any ──`release`──▶ RELEASED ──`leave`──▶ CLOSED ◀──`leave`── any
    """

    AWAY = "not in the session; our data may still be there"
    JOINED = "in the session"
    SILENT = "in the session; its link is lost, and it has some time to return"
    RECONNECTED = "lost its link alone: it is the same process"
    RENEWING = "enters another session of ours"
    GONE = "our data is lost for certain"
    EMPTY = "our data is lost for certain; it is not asked again before `renew`"
    RELEASED = "a worker that we let go: no loss"
    CLOSED = "we have left it"


_LOST: Final = (SessionPhase.GONE, SessionPhase.EMPTY)
_LEFT: Final = (SessionPhase.RELEASED, SessionPhase.CLOSED)


class TaskSessionEvents(Protocol):
    """Methods that task sessions call, on the loop thread."""

    def task_ready(self, task: TaskSession) -> None:
        """Called when the task has entered our session."""

    def task_lost(self, task: TaskSession, reason: str) -> None:
        """Called when the task has left our session, or is lost."""

    def message_received(self, task: TaskSession, message: Message) -> None:
        """Called with each notice of a task that is in our session."""


def _take_all(*_: object) -> None:
    return None


class TaskSession:
    """Our session on one task.

    Args:
        task_number: The number with which the daemon was started (``--index``).
        place: Index of the task, from 0, among those tasks of its job that this program
            knows; not ``task_number`` if the cluster leaves numbers out.
        opening: The message that opens the session.
        one_life: A task that was restarted, or comes back from another coordinator, has
            lost our data (a parameter server its variables), and is refused.
        grace: Seconds that a task with one life has to return after its link is lost.
        turn: Seconds after which `wait_ready` gives up while another coordinator has
            the task; the task is asked after that, too.
        notice: Seconds after which `wait_ready` gives up if that coordinator may be
            dead: as long as the task needs to notice that.
        moves: Our data may be in another process: requests wait until `move` or
            `give_up` is called.
        objection: Returns why the task is refused, or None.
    """

    def __init__(
        self,
        job: str,
        task_number: int,
        place: int,
        address: str,
        opening: OpenSession | JoinSession,
        make_link: MakeTaskLink,
        events: TaskSessionEvents,
        *,
        one_life: bool = False,
        grace: float = 0.0,
        turn: float = math.inf,
        notice: float = 0.0,
        moves: bool = False,
        objection: Objection = _take_all,
    ) -> None:
        self.place, self.address, self.task_number = place, address, task_number
        self.name = f"/job:{job}/task:{task_number}"
        self.hello: Hello | None = None
        self.opened: SessionOpened | None = None
        """The answer of the task while it is in our session."""
        self.entry = 0
        """Number of the task's last entry into a session; no other entry has the same.
        What a worker keeps from earlier entries is gone."""
        self.layouts: dict[int, LayoutMessage] = {}
        """Layouts of results, by number. After each entry the task sends each layout
        once, to the coordinator of the session at that time, so they are kept here for
        later ones."""
        self.refusal: ZstratError | None = None
        """Why the last attempt to open the session failed."""
        self.line: ServerLine | None = None
        """The queue in which requests wait while the task is away."""
        self.phase = SessionPhase.AWAY
        """The phase of the session, which only this class changes."""
        self.back_by = 0.0
        """Loop time until which the task has announced to be back, with all our
        data."""
        self._request = SessionRequest(opening, turn, notice, self._answered)
        self._events, self._one_life, self._moves = events, one_life, moves
        self._grace, self._objection = grace, objection
        self._absence: asyncio.TimerHandle | None = None
        self._life: int | None = None
        """The incarnation of the task that has our data; None if unknown."""
        self._warned = ""
        self._missed: int | None = None
        """The log level at which the loss of the task was logged, to log its return at
        the same level."""
        self._entered: asyncio.Event = asyncio.Event()
        self._link = MovableLink(
            make_link,
            address,
            name=self.name,
            expect=(job, task_number),
            on_notice=self._received,
            on_open=self._greeted,
            on_lost=self._lost,
        )

    @property
    def link(self) -> TaskLink:
        """The link to the present address of the task."""
        return self._link.now

    @property
    def session(self) -> int:
        """The number of our session on the task."""
        return self._request.session

    @property
    def is_ready(self) -> bool:
        """Whether the task is in our session now."""
        return self.opened is not None

    @property
    def is_heard(self) -> bool:
        """Whether the task is in our session and its link is alive. A task whose link
        is lost may still be back in time, and is not known to live."""
        return self.is_ready and self.link.is_heard

    @property
    def gone(self) -> bool:
        """Whether our data on the task is lost for certain."""
        is_emptied = self.phase is SessionPhase.RENEWING and self._one_life
        return is_emptied or self.phase in _LOST

    @property
    def lives_on(self) -> bool:
        """Whether the process of a worker that is being reported as lost still runs."""
        is_kept = self.phase is SessionPhase.RENEWING and not self._one_life
        return is_kept or self.phase in (SessionPhase.RECONNECTED, *_LEFT)

    @property
    def is_moved(self) -> bool:
        """Whether the task is lost only because we move it to another session, or leave
        it."""
        return self.phase in (SessionPhase.RENEWING, *_LEFT)

    @property
    def is_closed(self) -> bool:
        """Whether we have left the task for good."""
        return self.phase is SessionPhase.CLOSED

    @property
    def is_lost(self) -> bool:
        """Whether no process answers at the address of the task now."""
        return not self.is_ready and not self.link.is_open

    @property
    def is_parked(self) -> bool:
        """Whether the address of the task is unknown, until the next `move`."""
        return self._link.is_parked

    @property
    def state(self) -> str:
        """The progress of connecting to the task, for messages."""
        if self.is_ready:
            return "in the session"
        if self.refusal is not None:
            return f"{type(self.refusal).__name__}: {self.refusal}"
        if self.link.is_open:
            return "connected, has not opened the session yet"
        return self.link.trouble

    def start(self) -> None:
        """Begins to connect to the task."""
        self._link.start()

    async def wait_ready(self, deadline: float) -> SessionOpened:
        """Waits until the task is in our session; returns its answer.

        Raises:
            DeadlineExceededError: The task did not answer before ``deadline`` (loop
                time).
            BusyError: The task answered, but belongs to another coordinator.
            VersionMismatchError, PermissionDeniedError: The task will never accept us.
        """
        await self._link.wait_open(deadline)
        try:
            async with asyncio.timeout_at(deadline):
                await self._entered.wait()
        except TimeoutError:
            raise self._late() from None
        if self.opened is None:
            raise self.refusal or PeerLostError(self.name, "lost while it was opened")
        return self.opened

    def _late(self) -> ZstratError:
        """Returns the error of a task that is not in our session in time."""
        if isinstance(self.refusal, PeerLostError):
            return DeadlineExceededError(
                f"{self.name} at {self.address} was lost while it connected "
                f"({self.refusal.reason}), and did not come back in time; look at its "
                "log, and start it again"
            )
        return self.refusal or DeadlineExceededError(
            f"{self.name} at {self.address} is connected, but did not open a "
            "session in time: a step of an earlier session may still run there; look "
            "at its log, and start it again"
        )

    def reopen(self, reason: str) -> None:
        """Opens the session on the task again, after the task answered that it is not
        in the session."""
        if self.is_ready:
            self._leave(reason)
            self._ask()

    def renew(self, session: int, close_messages: Sequence[CloseSession]) -> None:
        """Enters another session of this program, in which any process begins empty.

        Args:
            close_messages: Messages that close the sessions before it.
        """
        if self.is_closed:
            return
        self._request.stop()
        self._stop_absence()
        if self.is_ready:
            why = "it enters another session of the program"
            self._leave(why, logging.INFO, SessionPhase.RENEWING)
            if self._moves:
                self.give_up(why)
        self._set_phase(SessionPhase.AWAY)
        # Any process may answer: in the session that it enters none has anything.
        self._life, self.refusal = None, None
        self._request.enter(session, close_messages)
        if self.link.is_open:
            self._ask()

    def move(self, address: str, *, is_empty: bool = False, life: int = 0) -> None:
        """Connects to another address, where our data is now.

        Args:
            is_empty: Our data is not there: the task is entered after `renew`.
            life: The incarnation that has our data; 0: unknown.
        """
        if self.is_closed:
            return
        self._request.stop()
        self._stop_absence()
        # Without `_leave`: a move is not reported as a loss.
        self.opened, self.refusal, self._life = None, None, life or None
        self._entered.clear()
        self._request.restart_pauses()
        self.address = address
        self._set_phase(SessionPhase.EMPTY if is_empty else SessionPhase.AWAY)
        self._link.move(address)
        if self.line is not None:
            # After the link: requests that end with the earlier one are sent again over
            # this one.
            self.line.move(self.link)

    def park(self) -> None:
        """Marks our data as lost while the next address is unknown: requests wait for
        `move`."""
        self.move(self.address, is_empty=True)
        self._link.park()

    def give_up(self, reason: str) -> None:
        """Fails the requests that wait for `move`, with a ``reason``."""
        if self.line is not None:
            self.line.lose(reason, gone=self.gone, keep_pushes=not self.gone)

    def require_same_process(self, other: TaskSession) -> None:
        """Expects the incarnation that ``other``, our session on the same task, has
        met: a process that was started since then is empty."""
        self._life = other._life

    def keep_origin(self, origin: int) -> None:
        """Sets in later requests the number from which keys of the session are
        counted."""
        self._request.keep_origin(origin)

    def close_session(
        self, timeout: float, *, exits: bool = False
    ) -> asyncio.Future[Message]:
        """Closes our session on the task; logs a message if the task does not answer.
        Returns the future of the answer.

        Args:
            timeout: Seconds that the task has to answer.
            exits: The process of the task exits, too.
        """
        return self._request.close(self.link, timeout, exits=exits)

    def release(self) -> None:
        """Marks a worker as released, so that its end is not a loss."""
        self._set_phase(SessionPhase.RELEASED)

    def leave(self) -> None:
        """Leaves the task: nothing is reported to `TaskSessionEvents` from now on."""
        self._set_phase(SessionPhase.CLOSED)
        self._link.stop()
        self._request.stop()
        self._stop_absence()

    async def close(self) -> None:
        """Closes the link to the task."""
        self.leave()
        if self.line is not None:
            self.line.close(ClosedError(f"the link to {self.name} was closed"))
        await self._link.close()

    def _greeted(self, hello: Hello) -> None:
        if self.is_closed:
            return
        self._stop_absence()
        before, self.hello = self.hello, hello
        if self.line is not None:
            self.line.hold()  # requests wait until it has resumed the session
        if not self._one_life:
            if self.is_ready:
                same = before is not None and before.incarnation == hello.incarnation
                phase = SessionPhase.RECONNECTED if same else SessionPhase.AWAY
                self._leave("it connected again", phase=phase)
                if self.phase is SessionPhase.RECONNECTED:
                    self._set_phase(SessionPhase.AWAY)
        elif self._life not in (None, hello.incarnation):
            is_empty = self.phase is SessionPhase.EMPTY
            self._leave(
                "it was started again, and what it held is gone",
                phase=None if is_empty else SessionPhase.GONE,
            )
            return
        elif self.phase is SessionPhase.EMPTY:
            if self._moves:
                self._events.task_lost(self, "what it held is gone")
            return
        self._request.restart_pauses()
        if (objection := self._objection(self, hello, None)) is not None:
            self._decline(objection)
            return
        self._ask()

    def _lost(self, error: PeerLostError) -> None:
        if self.is_closed:
            return
        self._request.stop()
        self.back_by = asyncio.get_running_loop().time() + error.returns
        # A task that said goodbye was stopped on purpose.
        level = logging.INFO if error.left else logging.WARNING
        if not self._one_life or not self.is_ready or self._moves:
            self._leave(error.reason, level)
        elif self._absence is None:
            # After a close message, too: an intact task closes the link of a program
            # that was suspended for long.
            loop, grace = asyncio.get_running_loop(), self._grace
            if error.returns > grace:
                grace = error.returns
                words = "%s at %s is to be back within %g s, with its data: %s"
                log.warning(words, self.name, self.address, grace, error.reason)
            self._absence = loop.call_later(grace, self._leave, error.reason, level)
            self._set_phase(SessionPhase.SILENT)

    def _received(self, message: Message) -> None:
        if self.is_closed:
            return
        if self.is_ready:
            self._events.message_received(self, message)
        elif self._one_life and self._request.is_under_way:
            # A backup is lost, say, or a worker waits: reported when it has entered.
            self._request.early.append(message)

    def _ask(self) -> None:
        self._request.send(self.link, resumes=self.is_ready)

    def _answered(self, asked: asyncio.Future[Message]) -> None:
        error = asked.exception()
        if error is None:
            self._enter(asked.result())
            return
        if isinstance(error, PeerLostError):
            self.refusal = error  # the link opens again, and the task greets again
            return
        if self.is_ready:
            # A coordinator that takes a server over empties it.
            is_taken = self._one_life and isinstance(error, BusyError)
            phase = SessionPhase.GONE if is_taken else SessionPhase.AWAY
            self._leave(str(error), phase=phase)
        # Asked again after a pause: a coordinator may end, and so may the step of an
        # earlier session that the task waits for. Any other refusal is for good.
        if isinstance(error, BusyError | DeadlineExceededError):
            self._refused(error)
            if self._request.repeat(self._ask, error):
                self._entered.set()  # that coordinator lives: stop waiting for its end
        else:
            words = f"{type(error).__name__}: {error}"
            self._refused(
                error if isinstance(error, ZstratError) else ZstratError(words)
            )
            self._entered.set()

    def _enter(self, answer: Message) -> None:
        assert isinstance(answer, SessionOpened), answer
        assert self.hello is not None
        if self._one_life and self._life is not None and not answer.resumed:
            why = "it served another coordinator, and what it held is gone"
            self._leave(why, phase=SessionPhase.EMPTY)
            return
        if (objection := self._objection(self, self.hello, answer)) is not None:
            self._request.withdraw(self.link)
            self._decline(objection)
            return
        resumed, self.opened, self.refusal = self.is_ready, answer, None
        self._request.opened()
        self._warned = ""
        self._set_phase(SessionPhase.JOINED)
        if self.line is not None:
            self.line.resume()
        if resumed:
            # Its absence was not reported, so its return is not, either.
            log.info("%s at %s is back with its data", self.name, self.address)
            return
        self.entry = next(_ENTRIES)
        self.layouts = {}  # it sends them again after each entry
        self._life = self.hello.incarnation
        self._entered.set()
        where = "in the session" if self._missed is None else "back"
        level, self._missed = self._missed or logging.INFO, None
        log.log(level, "%s at %s is %s", self.name, self.address, where)
        self._events.task_ready(self)
        early = self._request.early
        # A handler may end the session, and then the rest is of no use.
        while early and self.is_ready:
            self._received(early.popleft())

    def _decline(self, error: ZstratError) -> None:
        """Refuses the task with an error. The task is asked again when it greets
        again."""
        self._refused(error)
        self._entered.set()

    def _refused(self, error: ZstratError) -> None:
        # A dead coordinator holds its tasks until they notice its silence, which is
        # before our pauses have grown: so do not warn for each of them.
        lasts = not isinstance(error, BusyError) or self._request.has_longest_pause
        if lasts and self._warned != str(error):
            log.warning("%s at %s does not join: %s", self.name, self.address, error)
            self._warned = str(error)
        self.refusal = error

    def _leave(
        self,
        reason: str,
        level: int = logging.WARNING,
        phase: SessionPhase | None = None,
    ) -> None:
        """Reports that the task is not in our session.

        Args:
            phase: What is known of our data on the task; None: nothing new.
        """
        if phase is None and self.phase in (SessionPhase.JOINED, SessionPhase.SILENT):
            phase = SessionPhase.AWAY
        if phase is not None:
            self._set_phase(phase)
        level = logging.INFO if self._moves else level  # its owner logs what follows
        if self.opened is not None:
            words = "lost" if self.gone or not self._one_life else "no contact with"
            log.log(level, "%s %s at %s: %s", words, self.name, self.address, reason)
            self._missed = level
        self._stop_absence()
        self.opened = None
        self._entered.clear()
        if self.line is not None and self._moves:
            self.line.hold()
        elif self.line is not None:
            self.line.lose(reason, gone=self.gone, keep_pushes=not self.link.is_refused)
        # Last, when all of this is consistent: the handler may look at it, or renew it.
        self._events.task_lost(self, reason)

    def _stop_absence(self) -> None:
        if self._absence is not None:
            self._absence.cancel()
            self._absence = None
        if self.phase is SessionPhase.SILENT:
            self.phase = SessionPhase.JOINED

    def _set_phase(self, phase: SessionPhase) -> None:
        if self.phase is not SessionPhase.CLOSED:
            self.phase = phase

    def validate(self) -> None:
        """Checks that the phase agrees with the rest of the state. Tests call it."""
        phase, where = self.phase, (self.name, self.phase)
        is_silent = phase is SessionPhase.SILENT
        assert (self._absence is not None) == is_silent, where
        if phase not in _LEFT:
            assert self.is_ready == (is_silent or phase is SessionPhase.JOINED), where
        assert self._entered.is_set() or not self.is_ready, where
        # A worker has no data to lose; a server is never lost by a broken link alone.
        if is_silent or phase in _LOST:
            assert self._one_life, where
        if phase in (SessionPhase.RECONNECTED, SessionPhase.RELEASED):
            assert not self._one_life, where
