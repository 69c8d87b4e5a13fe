"""Our session on one task of the cluster, and who is still awaited while we connect.

A task session holds the link to one worker or parameter server and opens the session on
it each time the link (re)opens: again with a growing pause while another coordinator
that is still alive holds the task, and while a previous coordinator's death is not yet
noticed. It runs on the loop thread and has no task of its own: futures and timers call
it back.

A task with one life (a parameter server) keeps what is ours over a cut line and over
our own absence. So nobody is told of its loss while it may come back with all of it: it
is asked whether the session goes on, in silence.

The law of this file: `TaskSessionEvents.ready` and `TaskSessionEvents.lost` alternate.
"""

from __future__ import annotations

import asyncio
import logging
import math
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol, TypeVar

from zstrat.errors import (
    BusyError,
    ClosedError,
    DeadlineExceededError,
    PeerLostError,
    ZstratError,
)
from zstrat.wire import (
    CloseSession,
    Hello,
    JoinSession,
    LayoutMessage,
    Message,
    OpenSession,
    SessionOpened,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from zstrat.ps import ServerLine

    from ._task_links import MakeTaskLink, TaskLink

log = logging.getLogger("zstrat.coordinator")

T = TypeVar("T")

FIRST_PAUSE: Final = 0.1
LONGEST_PAUSE: Final = 5.0


class TaskSessionEvents(Protocol):
    """Who is told what happens to a task session, on the loop thread."""

    def ready(self, task: TaskSession) -> None:
        """The task is in our session."""
        ...

    def lost(self, task: TaskSession, reason: str) -> None:
        """It is not, any more."""
        ...

    def heard(self, task: TaskSession, message: Message) -> None:
        """A notice of a task that is in our session."""
        ...


class Objection(Protocol):
    """Says why a task is not taken, if so: when it greets, and again when it has opened
    the session."""

    def __call__(
        self, task: TaskSession, hello: Hello, opened: SessionOpened | None, /
    ) -> ZstratError | None: ...


def _take_all(*_: object) -> None:
    return None


class TaskSession:
    """The way to one task.

    Args:
        task: Its task index.
        index: Its place among the tasks of the job that this program knows, from 0;
            another number than ``task`` if the cluster leaves indices out.
        opening: What opens the session on it.
        one_life: A task that returns with another incarnation, or from another
            coordinator, has lost what makes it ours (a parameter server its variables),
            and is not taken back.
        grace: Seconds that a task with one life has to return after its link lost it.
        turn: Seconds after which `wait_ready` gives up while another coordinator has
            the task; it is asked further on.
        moves: What it held may be elsewhere: who waits does so to `move` or `give_up`.
        objection: Why a task that greets, or has opened the session, is not taken.
    """

    def __init__(
        self,
        job: str,
        task: int,
        index: int,
        address: str,
        opening: OpenSession | JoinSession,
        make_link: MakeTaskLink,
        events: TaskSessionEvents,
        *,
        one_life: bool = False,
        grace: float = 0.0,
        turn: float = math.inf,
        moves: bool = False,
        objection: Objection = _take_all,
    ) -> None:
        self.index, self.address = index, address
        self.name = f"/job:{job}/task:{task}"
        self.hello: Hello | None = None
        self.opened: SessionOpened | None = None
        """The answer of the task while it is in our session."""
        self.layouts: dict[int, LayoutMessage] = {}
        """Of results, by number: the task tells each once after it has entered, to
        whichever coordinator of the session is there."""
        self.refusal: ZstratError | None = None
        """Why the session was not opened at the last attempt."""
        self.line: ServerLine | None = None
        """Where requests wait while the task is away."""
        self.gone = False
        """What the task held of ours is lost for certain."""
        self.lives_on = False
        """It was lost to its connection alone: the process is the same."""
        self.is_parked = False
        """Nobody is asked, up to `move`."""
        self.is_moved = False
        """It leaves because it enters another session of ours: `renew`."""
        self.back_by = 0.0
        """Until when (loop time) it is to be back with all it held, as it has said."""
        self._opening, self._events, self._one_life = opening, events, one_life
        self._moves = moves
        self._moving: asyncio.Task[None] | None = None
        """Closes the link of before, and opens the next one."""
        # Who was in the session need not wait for it: it is there, or gone for good.
        self._reopening = opening
        if isinstance(opening, JoinSession):
            self._reopening = replace(opening, patience=0.0)
        self._farewells: Sequence[Message] = ()
        """What the task is told before it is asked in."""
        self._grace, self._turn, self._object = grace, turn, objection
        self._held_since: float | None = None
        self._absence: asyncio.TimerHandle | None = None
        self._life: int | None = None
        """The incarnation that has something of ours."""
        self._emptied = False
        self._pause, self._warned = FIRST_PAUSE, ""
        self._missed: int | None = None
        """The level at which its loss was logged: that of its return, too."""
        self._timer: asyncio.TimerHandle | None = None
        self._asked: asyncio.Future[Message] | None = None
        self._entered: asyncio.Event = asyncio.Event()
        self._closed = False
        self._make_link, self._expect, self._place = make_link, (job, task), 0
        self.link = self._new_link()
        self._begun: TaskLink | None = None
        """The link that was started last."""
        self._placed = asyncio.Event()
        self._placed.set()

    @property
    def is_ready(self) -> bool:
        """Whether the task is in our session now."""
        return self.opened is not None

    @property
    def is_closed(self) -> bool:
        """Whether we have left it, for good."""
        return self._closed

    @property
    def is_lost(self) -> bool:
        """Whether nobody answers there now."""
        return not self.is_ready and not self.link.is_open

    @property
    def state(self) -> str:
        """Words for how far it got."""
        if self.is_ready:
            return "in the session"
        if self.refusal is not None:
            return f"{type(self.refusal).__name__}: {self.refusal}"
        if self.link.is_open:
            return "connected, opens no session yet"
        return self.link.trouble

    def start(self) -> None:
        if self._place == 1:  # else it was moved, and starts by itself
            self._start(self.link)

    async def wait_ready(self, deadline: float) -> SessionOpened:
        """Waits until the task is in our session.

        Raises:
            DeadlineExceededError: It did not answer before ``deadline`` (loop time).
            BusyError: It answered, but belongs to another coordinator.
            VersionMismatchError, PermissionDeniedError: It will never take us.
        """
        await self._connected(deadline)
        try:
            async with asyncio.timeout_at(deadline):
                await self._entered.wait()
        except TimeoutError:
            raise self.refusal or DeadlineExceededError(
                f"{self.name} at {self.address} is connected, but did not open a "
                "session in time: a step of an earlier one may run there without end; "
                "look at its log, and start it again"
            ) from None
        if self.opened is None:
            raise self.refusal or PeerLostError(self.name, "lost while it was opened")
        return self.opened

    def reopen(self, reason: str) -> None:
        """The task says that it is not ours: enter again."""
        if self.is_ready:
            self._leave(reason)
            self._ask()

    def renew(self, session: int, farewells: Sequence[Message]) -> None:
        """Enters another session of ours, in which the task has nothing yet, whatever
        it had, and whichever process it is.

        Args:
            farewells: Close the sessions before.
        """
        if self._closed:
            return
        self._stop_asking()
        self._stop_absence()
        if self.is_ready:
            self.gone, self.lives_on = self._one_life, not self._one_life
            self.is_moved = True
            self._leave("it enters another session of the program", logging.INFO)
            if self._moves:
                self.give_up("it enters another session of the program")
        self.gone = self.lives_on = self.is_moved = self._emptied = False
        self._life, self.refusal, self._pause = None, None, FIRST_PAUSE
        self._opening = self._reopening = replace(self._opening, session=session)
        self._farewells = farewells
        if self.link.is_open:
            self._ask()

    def move(self, address: str, *, is_empty: bool = False, life: int = 0) -> None:
        """Goes on at another address, where all is that the task held, in the memory of
        the incarnation ``life``, if that is known; ``is_empty``: where nothing is, and
        which is entered behind `renew`."""
        if self._closed:
            return
        self.is_parked = False
        self._placed.set()
        self._stop_asking()
        self._stop_absence()
        self.opened, self.refusal, self._life = None, None, life or None
        self._entered.clear()
        self._pause, self.address = FIRST_PAUSE, address
        self.gone = self._emptied = is_empty
        before, self.link = self.link, self._new_link()
        if self.line is not None:
            self.line.move(self.link)
        going = self._go_on(before, self._moving)
        loop = asyncio.get_running_loop()
        self._moving = loop.create_task(going, name=f"{self.name} moves")  # see close

    def park(self) -> None:
        """What it held is gone, and nobody knows yet where it will be: who asks it
        waits for `move`."""
        self.move(self.address, is_empty=True)
        self.is_parked = True
        self._placed.clear()

    def give_up(self, reason: str) -> None:
        """Whoever waits for a task that ``moves`` is told that it is lost."""
        if self.line is not None:
            self.line.lose(reason, gone=self.gone, own=not self.gone)

    def keep_origin(self, origin: int) -> None:
        """From now on it is opened as a session whose keys are counted from there."""
        opening = self._opening
        assert isinstance(opening, OpenSession), opening
        self._opening = self._reopening = replace(opening, origin=origin)

    def leave(self) -> None:
        """We go: nothing is told any more."""
        self._closed = True
        self._stop_asking()
        self._stop_absence()

    async def close(self) -> None:
        """Closes the link."""
        self.leave()
        if self.line is not None:
            self.line.close(ClosedError(f"the link to {self.name} was closed"))
        if self._moving is not None:
            await self._moving
        await self.link.close()

    def _new_link(self) -> TaskLink:
        self._place += 1
        return self._make_link(
            self.address,
            name=self.name,
            expect=self._expect,
            on_notice=partial(self._told, self._place, self._heard),
            on_open=partial(self._told, self._place, self._greeted),
            on_lost=partial(self._told, self._place, self._lost),
        )

    def _told(self, place: int, told: Callable[[T], None], what: T) -> None:
        """What the link to an earlier address has to say is of nobody's interest."""
        if place == self._place:
            told(what)

    async def _go_on(self, before: TaskLink, moving: asyncio.Task[None] | None) -> None:
        link = self.link  # a later move has another one
        if moving is not None:
            await moving
        await before.close()
        # Behind what the end of its requests sets going: they come first at the next.
        asyncio.get_running_loop().call_soon(self._start, link)

    def _start(self, link: TaskLink) -> None:
        if link is self._begun or self._closed or self.is_parked:
            return
        if link is self.link:
            self._begun = link
            link.start()

    async def _connected(self, deadline: float) -> None:
        """Waits until the link of then is open; raises as `TaskLink.wait_open`."""
        while True:
            await self._is_placed(deadline)
            if self._moving is not None:
                await asyncio.wait([self._moving])
            if self.is_parked:
                continue
            link = self.link
            try:
                await link.wait_open(deadline)
            except ClosedError:
                if link is self.link:
                    raise
            else:
                return

    async def _is_placed(self, deadline: float) -> None:
        try:
            async with asyncio.timeout_at(deadline):
                await self._placed.wait()
        except TimeoutError:
            words = f"{self.name}: no process has taken its place in time"
            raise DeadlineExceededError(words) from None

    # ---- told by the link ------------------------------------------------------------

    def _greeted(self, hello: Hello) -> None:
        if self._closed:
            return
        self._stop_absence()
        before, self.hello = self.hello, hello
        if self.line is not None:
            self.line.hold()
        if not self._one_life:
            if self.is_ready:
                same = before is not None and before.incarnation == hello.incarnation
                self.lives_on = same
                self._leave("it connected anew")
                self.lives_on = False
        elif self._life not in (None, hello.incarnation):
            self.gone = True
            self._leave("it was started again, and what it held is gone")
            return
        elif self._emptied:
            if self._moves:
                self._events.lost(self, "what it held is gone")
            return
        self._pause = FIRST_PAUSE
        if (objection := self._object(self, hello, None)) is not None:
            self._decline(objection)
            return
        self._ask()

    def _lost(self, error: PeerLostError) -> None:
        if self._closed:
            return
        self._stop_asking()
        self.back_by = asyncio.get_running_loop().time() + error.returns
        level = logging.INFO if error.left else logging.WARNING
        if not self._one_life or not self.is_ready or self._moves:
            self._leave(error.reason, level)
        elif self._absence is None:
            # A goodbye too: to a program that was stopped for long, an intact task says
            # that it does not know it any more.
            loop, grace = asyncio.get_running_loop(), self._grace
            if error.returns > grace:
                grace = error.returns
                words = "%s at %s is to be back within %g s, with all it held: %s"
                log.warning(words, self.name, self.address, grace, error.reason)
            self._absence = loop.call_later(grace, self._leave, error.reason, level)

    def _heard(self, message: Message) -> None:
        if self.is_ready and not self._closed:
            self._events.heard(self, message)

    # ---- entering the session --------------------------------------------------------

    def _ask(self) -> None:
        self._stop_asking()
        opening = self._reopening if self.is_ready else self._opening
        if not self.is_ready:
            for farewell in self._farewells:
                self.link.submit(farewell).add_done_callback(_unheeded)
        self._asked = self.link.submit(opening)
        self._asked.add_done_callback(self._answered)

    def _answered(self, asked: asyncio.Future[Message]) -> None:
        if asked.cancelled():
            return
        error = asked.exception()
        if asked is not self._asked:
            return
        self._asked = None
        if error is None:
            self._enter(asked.result())
            return
        if isinstance(error, PeerLostError):
            self.refusal = error  # the link opens again, and we are greeted anew
            return
        if self.is_ready:
            # Who has taken it over has it emptied.
            self.gone = self._one_life and isinstance(error, BusyError)
            self._leave(str(error))
        if isinstance(error, BusyError | DeadlineExceededError):
            self._refused(error)
            loop = asyncio.get_running_loop()
            self._held(isinstance(error, BusyError), loop.time())
            self._timer = loop.call_later(self._pause, self._ask)
            self._pause = min(2 * self._pause, LONGEST_PAUSE)
        else:
            words = f"{type(error).__name__}: {error}"
            self._refused(
                error if isinstance(error, ZstratError) else ZstratError(words)
            )
            self._entered.set()

    def _held(self, by_another: bool, now: float) -> None:
        """Whoever waits need wait no longer, once it is clear that the other lives."""
        if not by_another:
            self._held_since = None
        elif self._held_since is None:
            self._held_since = now
        elif now - self._held_since >= self._turn:
            self._entered.set()

    def _enter(self, answer: Message) -> None:
        assert isinstance(answer, SessionOpened), answer
        assert self.hello is not None
        if self._one_life and self._life is not None and not answer.resumed:
            self._emptied = self.gone = True
            self._leave("it served another coordinator, and what it held is gone")
            return
        if (objection := self._object(self, self.hello, answer)) is not None:
            goodbye = CloseSession(self._opening.session, False)
            self.link.submit(goodbye).add_done_callback(_unheeded)
            self._decline(objection)
            return
        resumed, self.opened, self.refusal = self.is_ready, answer, None
        self._held_since = None
        self._warned = ""
        self.gone = False
        if self.line is not None:
            self.line.resume()
        if resumed:
            log.info("%s at %s is back, with all it held", self.name, self.address)
            return
        self.layouts = {}
        self._life = self.hello.incarnation
        self._entered.set()
        where = "in the session" if self._missed is None else "back"
        level, self._missed = self._missed or logging.INFO, None
        log.log(level, "%s at %s is %s", self.name, self.address, where)
        self._events.ready(self)

    def _decline(self, error: ZstratError) -> None:
        """It is not taken, as it is now: asked again when it greets anew."""
        self._refused(error)
        self._entered.set()

    def _refused(self, error: ZstratError) -> None:
        # A coordinator that has died holds its tasks until its silence is noticed,
        # which is before our pauses have grown: so each task is no alarm of its own.
        lasts = not isinstance(error, BusyError) or self._pause >= LONGEST_PAUSE
        if lasts and self._warned != str(error):
            log.warning("%s at %s does not join: %s", self.name, self.address, error)
            self._warned = str(error)
        self.refusal = error

    def _leave(self, reason: str, level: int = logging.WARNING) -> None:
        level = logging.INFO if self._moves else level  # its owner says what follows
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
            self.line.lose(reason, gone=self.gone, own=not self.link.is_refused)
        self._events.lost(self, reason)

    def _stop_absence(self) -> None:
        if self._absence is not None:
            self._absence.cancel()
            self._absence = None

    def _stop_asking(self) -> None:
        asked, self._asked = self._asked, None
        if asked is not None:
            asked.cancel()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _unheeded(answer: asyncio.Future[Message]) -> None:
    """A task that serves no such session any more says so."""
    if not answer.cancelled():
        answer.exception()
