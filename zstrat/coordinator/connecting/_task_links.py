"""Links to the tasks of a cluster, and the requests that open our session on them.

Links may move to other addresses. `check_replicas` checks whether the servers can keep
copies for each other.

A program may know only some of the workers, but all parameter servers: a variable names
its server by the index among them.

A session is opened and closed on each task (`SessionRequest`). A task is asked again,
after growing pauses, while another coordinator that may be alive holds it, or while it
ends a step of an earlier session. Law: at most one request is under way, and only
the answer to the last one is reported. Each message has the time when it was sent, as a
task gets those of several connections in any order.
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

from zstrat.errors import BusyError, ClosedError, DeadlineExceededError, HeldError
from zstrat.transport import Link, Security, hello, key_names
from zstrat.wire import CloseSession, Job, JoinSession, OpenSession

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from zstrat.cluster import ClusterSpec
    from zstrat.config import Settings
    from zstrat.errors import PeerLostError
    from zstrat.transport import MakeTaskLink, TaskLink
    from zstrat.wire import Hello, Message


def addresses_of_ps(spec: ClusterSpec) -> list[str]:
    """Returns the addresses of all parameter servers, by index."""
    numbers = spec.task_indices("ps")
    if numbers != list(range(len(numbers))):
        raise ValueError(
            f"the cluster has ps with the indices {numbers}, expected all from 0 on "
            "without gaps: each program has to know all ps; only workers may be left "
            "out"
        )
    return [spec.task_address("ps", number) for number in numbers]


def addresses_of_workers(spec: ClusterSpec) -> dict[int, str]:
    """Returns the addresses of the known workers, by task number."""
    return {
        number: spec.task_address("worker", number)
        for number in spec.task_indices("worker")
    }


def check_replicas(
    replicas: int, ps: int, settings: Settings, stores_per_ps: int = 1
) -> None:
    """Checks that the cluster can have this number of replicas, and of stores per
    parameter server.

    Args:
        ps: Number of parameter servers.
        stores_per_ps: Stores of each of them.

    Raises:
        ValueError: The cluster cannot have them; says why.
    """
    if not replicas and stores_per_ps == 1:
        return
    if ps <= replicas:
        raise ValueError(
            f"replicas={replicas} needs at least {replicas + 1} ps, as another one "
            f"keeps the copy, and the cluster has {ps}: add one, or leave out replicas="
        )
    keys = settings.keys
    if keys is not None and any(name.startswith("ps-") for name in key_names(keys)):
        raise ValueError(
            f"replicas={replicas} and stores_per_ps={stores_per_ps} need keys per "
            f"role, as a ps hosts stores of others, and {keys} has a key for each "
            "task: make keys with `zstrat keygen`, without --per-task"
        )


def links_of(
    job: Job, index: int, incarnation: int, settings: Settings, *, looks: bool = False
) -> MakeTaskLink:
    """Returns a factory of ZeroMQ links, with the key of the job if there are keys.

    Args:
        looks: Whether the links are those of an observer.
    """
    keys = None if settings.keys is None else Security.load(settings.keys, job, index)
    me = hello(Job.OBSERVER if looks else job, index, incarnation)
    return partial(Link, me=me, settings=settings, security=keys)


T = TypeVar("T")


@final
class MovableLink:
    """The link to one task, which may move to another address. On the loop.

    A `Link` has one address for life, so each move makes another link. The earlier link
    is closed first: requests that end with it, and are sent again, come first at the
    new address. The law of this class: only the current link calls its owner.

    Args:
        name: The name of the task: "/job:ps/task:0".
        expect: The job and the task number that have to answer there.
        on_notice, on_open, on_lost: Called by the current link.
    """

    def __init__(
        self,
        make_link: MakeTaskLink,
        address: str,
        *,
        name: str,
        expect: tuple[str, int],
        on_notice: Callable[[Message], None],
        on_open: Callable[[Hello], None],
        on_lost: Callable[[PeerLostError], None],
    ) -> None:
        self._make_link, self._name, self._expect = make_link, name, expect
        self._on_notice, self._on_open, self._on_lost = on_notice, on_open, on_lost
        self._moves = 0
        self._is_closed = False
        self._moving: asyncio.Task[None] | None = None
        """The asyncio task that closes the earlier link, and starts the current one."""
        self._started: TaskLink | None = None
        """The link that was started last."""
        self._has_address = asyncio.Event()
        self._has_address.set()
        self.now: TaskLink = self._new_link(address)
        """The current link."""

    @property
    def is_parked(self) -> bool:
        """Whether no address is known to connect to, until the next `move`."""
        return not self._has_address.is_set()

    def start(self) -> None:
        """Starts to connect to the first address; does nothing after a move."""
        if not self._moves:
            self._start(self.now)

    def move(self, address: str) -> None:
        """Closes the current link, and connects to another address."""
        self._has_address.set()
        # First: callbacks of the new link have this number, and those of the earlier
        # one are ignored from now on.
        self._moves += 1
        before, self.now = self.now, self._new_link(address)
        going = self._replace(before, self._moving)
        loop = asyncio.get_running_loop()
        self._moving = loop.create_task(going, name=f"{self._name} moves")  # see close

    def park(self) -> None:
        """Starts no link until the next `move`, as no address is known."""
        self._has_address.clear()

    async def wait_open(self, deadline: float) -> None:
        """Waits until the current link is open; raises as `TaskLink.wait_open`.

        Cancellation: nothing is lost.
        """
        while True:
            await self._wait_address(deadline)
            if self._moving is not None:
                await asyncio.wait([self._moving])
            if self.is_parked:
                # It was parked while the earlier link was closed.
                continue
            link = self.now
            try:
                await link.wait_open(deadline)
            except ClosedError:
                # Else it was closed because it moved: wait for the link that took its
                # place.
                if link is self.now:
                    raise
            else:
                return

    def stop(self) -> None:
        """Starts no further link. Call `close` after this."""
        self._is_closed = True

    async def close(self) -> None:
        """Closes the link."""
        self.stop()
        if self._moving is not None:
            await self._moving
        await self.now.close()

    def _new_link(self, address: str) -> TaskLink:
        return self._make_link(
            address,
            name=self._name,
            expect=self._expect,
            on_notice=partial(self._call, self._moves, self._on_notice),
            on_open=partial(self._call, self._moves, self._on_open),
            on_lost=partial(self._call, self._moves, self._on_lost),
        )

    def _call(self, moves: int, callback: Callable[[T], None], event: T) -> None:
        """Calls the owner's ``callback``, unless the event is of an earlier link."""
        if moves == self._moves:
            callback(event)

    async def _replace(
        self, before: TaskLink, moving: asyncio.Task[None] | None
    ) -> None:
        link = self.now  # a later move has another one
        if moving is not None:
            await moving
        await before.close()
        # After the requests that end with it are sent again: they come first.
        asyncio.get_running_loop().call_soon(self._start, link)

    def _start(self, link: TaskLink) -> None:
        if link is self._started or self._is_closed or self.is_parked:
            return
        if link is self.now:
            self._started = link
            link.start()

    async def _wait_address(self, deadline: float) -> None:
        try:
            async with asyncio.timeout_at(deadline):
                await self._has_address.wait()
        except TimeoutError:
            raise DeadlineExceededError(
                f"{self._name}: no other process took its place in time"
            ) from None


log = logging.getLogger("zstrat.coordinator")

FIRST_PAUSE_SECONDS: Final = 0.1
LONGEST_PAUSE_SECONDS: Final = 5.0

Sent = TypeVar("Sent", OpenSession, CloseSession)

MAX_EARLY_NOTICES: Final = 2048
"""The most notices that are kept until the task has answered: those of all workers that
may wait there, and some more."""


@final
class SessionRequest:
    """Opens and closes our session on one task, by requests. On the loop.

    Args:
        opening: The message that opens the session on the task.
        turn: Seconds to wait for a task that another coordinator holds; the task is
            asked after that, too.
        notice: Seconds to wait if that coordinator may be dead: as long as the task
            needs to notice that.
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
        """Messages that close earlier sessions, sent before the request that opens this
        one."""
        self._pause = FIRST_PAUSE_SECONDS
        self._held_since: float | None = None
        """Loop time since which the task answers that another coordinator holds it."""
        self.early: Final[deque[Message]] = deque(maxlen=MAX_EARLY_NOTICES)
        """Notices that the task sent before its answer to the last request."""
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
        """Sets in later requests the number from which keys of the session are
        counted."""
        assert isinstance(self._opening, OpenSession), self._opening
        self._opening = self._reopening = replace(self._opening, origin=origin)

    def enter(self, session: int, close_messages: Sequence[CloseSession]) -> None:
        """Makes later requests open another session.

        Args:
            close_messages: Messages that close the sessions before it.
        """
        self._opening = self._reopening = replace(self._opening, session=session)
        self._close_messages = close_messages
        self.restart_pauses()

    def restart_pauses(self) -> None:
        """Makes the next pause the shortest one."""
        self._pause = FIRST_PAUSE_SECONDS

    def send(self, link: TaskLink, *, resumes: bool) -> None:
        """Sends the request that opens the session now.

        Args:
            resumes: The task is in the session as far as we know.
        """
        self.stop()
        # They came before this request, for a session that may be another one.
        self.early.clear()
        opening = self._reopening if resumes else self._opening
        if not resumes:
            # Before it, on the same link: the task ends the earlier session first.
            for message in self._close_messages:
                link.submit(_sent_now(message)).add_done_callback(_ignore_outcome)
        if isinstance(opening, OpenSession):
            opening = _sent_now(opening)
        self._sent = link.submit(opening)
        self._sent.add_done_callback(self._answered)

    def repeat(
        self, send: Callable[[], None], refusal: BusyError | DeadlineExceededError
    ) -> bool:
        """Calls ``send`` after a pause, each time a longer one.

        Args:
            refusal: The answer of the task: a `BusyError` if another coordinator holds
                it.

        Returns:
            Whether that coordinator has held the task for a whole turn: so it is alive,
                and we no longer wait for its end.
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
        # Only a `HeldError` says that the other coordinator is alive; without it the
        # task may not have noticed its death yet.
        doubt = 0.0 if isinstance(refusal, HeldError) else self._notice
        return now - self._held_since >= max(self._turn, doubt)

    def opened(self) -> None:
        """Notes that the task is in the session. Messages that close earlier sessions
        are not sent again: this session may have the number of one of them."""
        self._held_since = None
        self._close_messages = ()

    def stop(self) -> None:
        """Stops asking, and ignores the answer to the request that was sent."""
        sent, self._sent = self._sent, None
        if sent is not None:
            sent.cancel()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def withdraw(self, link: TaskLink) -> None:
        """Closes the session on a task that we refuse, without waiting for the
        answer."""
        closing = _sent_now(CloseSession(self.session, False))
        link.submit(closing).add_done_callback(_ignore_outcome)

    def close(
        self, link: TaskLink, timeout: float, *, exits: bool
    ) -> asyncio.Future[Message]:
        """Closes the session on the task; logs a message if the task does not answer.
        Returns the future of the answer.

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
    """Stamps a message with the present time, later than the stamp of any message
    before. Uvloop's clock has steps of a millisecond, in which a task may be released
    and taken again."""
    loop = asyncio.get_running_loop()
    sent = max(loop.time(), math.nextafter(_last_sent.get(loop, 0.0), math.inf))
    _last_sent[loop] = sent
    return replace(message, sent=sent)


def _ignore_outcome(answer: asyncio.Future[Message]) -> None:
    """Ignores the error of an answer: the task may no longer serve that session."""
    if not answer.cancelled():
        answer.exception()


def log_failure(what: str, answer: asyncio.Future[Message]) -> None:
    """Logs the error of a request that nothing else handles, if it failed."""
    if not answer.cancelled() and (error := answer.exception()) is not None:
        log.info("%s: %s", what, error)
