"""What one process says and hears about groups: rendezvous, hops, questions.

A node has no socket of its own to be reached at: whoever owns the endpoint of the task
(a daemon, or a program that is a member of a group) hands it the messages in
`GROUP_MESSAGES`. Everything but what says otherwise belongs to the thread of the loop.

Threats: only a task with the key of a worker or a coordinator may join. A ticket of 63
random bits and the incarnation of a member stand on all that belongs to a generation;
whatever has another one is refused and counted.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter, deque
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from zstrat.errors import (
    BusyError,
    CollectiveTimeoutError,
    DeadlineExceededError,
    PeerLostError,
    PermissionDeniedError,
    ProtocolError,
    StaleSessionError,
)
from zstrat.transport import Link
from zstrat.wire import (
    AbortCall,
    AskCall,
    GroupFormed,
    Hop,
    Job,
    JoinGroup,
    LeaveGroup,
)

from ._generation import Generation
from ._membership import Formed, Refused, Rendezvous, rank_at

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from zstrat.config import Settings
    from zstrat.transport import Remote, Security
    from zstrat.wire import CallState, Hello, Message

    from ._choice import Choices
    from ._membership import Seat

GROUP_MESSAGES: Final = frozenset({Hop, JoinGroup, AskCall, AbortCall, LeaveGroup})
"""What the owner of the endpoint hands to the node."""

GROUPS: Final = 1024
"""Names of groups for which somebody may wait at rank 0."""

_STRAYS: Final = 4096
"""Hops of generations of which the last word has not come yet: the first call of each
is a byte from every rank."""

_MEMBERS: Final = frozenset({Job.WORKER, Job.CHIEF})

_GRACE: Final = 1.0
"""Seconds that an answer of rank 0 may be late: it says more than our own error."""


class Node:
    """The groups of one task.

    Args:
        me: The HELLO of this task.
        security: Its keys, or None.
    """

    def __init__(
        self, me: Hello, settings: Settings, security: Security | None = None
    ) -> None:
        self.me, self.loop = me, asyncio.get_running_loop()
        self.settings, self._security = settings, security
        self._generations: dict[int, Generation] = {}
        self._rendezvous: dict[str, Rendezvous[asyncio.Future[Message]]] = {}
        self._asked: dict[asyncio.Future[Message], Remote] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._strays: deque[tuple[int, Hop]] = deque()
        self._forming = 0
        self._counts: Counter[str] = Counter()

    # ---- what arrives ----------------------------------------------------------------

    def handle(
        self, remote: Remote, message: Message
    ) -> Message | Awaitable[Message] | None:
        """One of `GROUP_MESSAGES`.

        Raises:
            PermissionDeniedError: The key of the caller is not one of a member.
            StaleSessionError: It asks about a generation that is not there (any more).
        """
        if type(message) is Hop:
            generation = self._generations.get(message.ticket)
            if generation is not None:
                generation.hop(remote.hello.incarnation, message)
            else:
                self._stray(remote, message)
            return None
        return self._other(remote, message)

    def _other(
        self, remote: Remote, message: Message
    ) -> Message | Awaitable[Message] | None:
        if remote.role not in _MEMBERS:
            raise PermissionDeniedError(
                f"{remote.name} has the role {remote.role}: only workers and "
                "coordinators may join groups"
            )
        match message:
            case JoinGroup():
                return self._asks(remote, message)
            case AskCall():
                return self._question(remote, message)
            case AbortCall() | LeaveGroup():
                self._notice(remote, message)
                return None
            case _:
                raise ProtocolError(f"{type(message).__name__} is not about a group")

    def lost(self, remote: Remote) -> None:
        """A task that was connected is not any more."""
        for future in [f for f, who in self._asked.items() if who is remote]:
            future.cancel()

    def _question(self, remote: Remote, message: AskCall) -> CallState:
        generation = self._generations.get(message.ticket)
        if generation is None or generation.rank_of(remote.hello) is None:
            self._counts["stale questions"] += 1
            raise StaleSessionError(
                f"{remote.name} asks about a generation that this task is not in"
            )
        return generation.state(message)

    def _notice(self, remote: Remote, message: AbortCall | LeaveGroup) -> None:
        generation = self._generations.get(message.ticket)
        rank = None if generation is None else generation.rank_of(remote.hello)
        if generation is None or rank is None:
            self._counts["stale notices"] += 1
        elif isinstance(message, AbortCall):
            generation.aborted(rank, message)
        else:
            generation.left(rank, message)

    def _stray(self, remote: Remote, hop: Hop) -> None:
        if self._forming and len(self._strays) < _STRAYS:
            self._strays.append((remote.hello.incarnation, hop))
        else:
            self._counts["stale hops"] += 1

    def statistics(self) -> dict[str, int]:
        """Counts since the start; from any thread."""
        return {"generations": len(self._generations), **self._counts}

    # ---- forming, at rank 0 ----------------------------------------------------------

    def _asks(self, remote: Remote, request: JoinGroup) -> asyncio.Future[Message]:
        if request.member.incarnation != remote.hello.incarnation:
            raise ProtocolError(f"{remote.name} wants to join as somebody else")
        future: asyncio.Future[Message] = self.loop.create_future()
        self._asked[future] = remote
        self._ask(request, future)
        return future

    def _ask(self, request: JoinGroup, future: asyncio.Future[Message]) -> None:
        rendezvous = self._rendezvous_of(request.group)
        future.add_done_callback(lambda done: self._answered(request.group, done))
        self._obey(rendezvous.ask(request, future, self.loop.time()))
        self._arm()

    def _rendezvous_of(self, group: str) -> Rendezvous[asyncio.Future[Message]]:
        found = self._rendezvous.get(group)
        if found is None:
            if len(self._rendezvous) >= GROUPS:
                raise BusyError(f"{GROUPS} groups wait to be formed at this task")
            found = Rendezvous(group, new_ticket)
            self._rendezvous[group] = found
        return found

    def _answered(self, group: str, future: asyncio.Future[Message]) -> None:
        self._asked.pop(future, None)
        rendezvous = self._rendezvous.get(group)
        if rendezvous is not None:
            rendezvous.leave(future)
            if rendezvous.is_idle:
                del self._rendezvous[group]

    def _obey(
        self,
        orders: Sequence[
            Formed[asyncio.Future[Message]] | Refused[asyncio.Future[Message]]
        ],
    ) -> None:
        for order in orders:
            if isinstance(order, Formed):
                for future in order.to:
                    if not future.done():
                        future.set_result(order.answer)
            elif not order.token.done():
                order.token.set_exception(order.error)

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due = min((each.due for each in self._rendezvous.values()), default=None)
        if due is not None and due != float("inf"):
            self._timer = self.loop.call_at(due, self._tick)

    def _tick(self) -> None:
        self._timer = None
        now = self.loop.time()
        for rendezvous in list(self._rendezvous.values()):
            self._obey(rendezvous.tick(now))
        self._arm()

    # ---- joining ---------------------------------------------------------------------

    async def join(
        self, request: JoinGroup, seats: Sequence[Seat], lane: str, choices: Choices
    ) -> Generation:
        """Forms a generation with all ranks, and opens the ways to them.

        Args:
            request: What this rank asks of rank 0; its patience counts for all.
            seats: Where the ranks are.
            lane: How the bodies of links travel, as in ``ZSTRAT_LANE``.
            choices: The table of algorithms for all ranks, if this is rank 0.

        Raises:
            CollectiveTimeoutError: Not all came in time, or cannot be reached.
            InvalidArgumentError, AlreadyExistsError: The ranks do not agree on who
                they are; says how.
            PeerLostError: A rank went away meanwhile.

        Cancellation: this rank has not joined.
        """
        make = _MakeLink(self.me, replace(self.settings, lane=lane), self._security)
        deadline = self.loop.time() + request.patience
        self._forming += 1
        try:
            if request.rank == 0:
                formed = await self._join_here(request, seats, choices)
            else:
                formed = await self._join_there(request, seats[0], make, deadline)
            generation = Generation(
                request.group, request.rank, formed, make, self._counts
            )
            self._generations[formed.ticket] = generation
        finally:
            self._forming -= 1
        try:
            for incarnation, hop in self._claim(formed.ticket):
                generation.hop(incarnation, hop)
            await generation.open(deadline + _GRACE)
        except BaseException:
            await self.leave(generation, "it could not reach all ranks")
            raise
        return generation

    async def leave(self, generation: Generation, reason: str) -> None:
        """Leaves a generation; see `Generation.close`."""
        try:
            await generation.close(reason, self.loop.time() + _GRACE)
        finally:
            self._generations.pop(generation.ticket, None)

    async def close(self, reason: str) -> None:
        """Leaves all generations. Cancellation: as `leave`."""
        everything = list(self._generations.values())
        await asyncio.gather(*(self.leave(each, reason) for each in everything))
        if self._timer is not None:
            self._timer.cancel()

    async def _join_here(
        self, request: JoinGroup, seats: Sequence[Seat], choices: Choices
    ) -> GroupFormed:
        rendezvous = self._rendezvous_of(request.group)
        self._obey(rendezvous.open(seats, choices.to_plain()))
        future: asyncio.Future[Message] = self.loop.create_future()
        self._ask(request, future)
        return _formed(await future)

    async def _join_there(
        self, request: JoinGroup, first: Seat, make: _MakeLink, deadline: float
    ) -> GroupFormed:
        link = make(first)
        link.start()
        try:
            while True:
                await link.wait_open(deadline)
                with suppress(PeerLostError):  # it may be started anew
                    late = deadline + _GRACE
                    return _formed(await link.request(request, deadline=late))
        except DeadlineExceededError as error:
            if isinstance(error, CollectiveTimeoutError):
                raise
            raise CollectiveTimeoutError(
                f"group {request.group!r} was not formed within {request.patience:g} "
                f"s: {rank_at(0, first)}: {error}"
            ) from error
        finally:
            await link.close("it has joined, or given up")

    def _claim(self, ticket: int) -> list[tuple[int, Hop]]:
        """Hops of a generation that came before the word that it was formed."""
        claimed = [each for each in self._strays if each[1].ticket == ticket]
        others = [each for each in self._strays if each[1].ticket != ticket]
        self._strays.clear()
        if self._forming:
            self._strays.extend(others)
        else:
            self._counts["stale hops"] += len(others)
        return claimed


class _MakeLink:
    """Makes links of this task; see `MakeLink`."""

    def __init__(
        self, me: Hello, settings: Settings, security: Security | None
    ) -> None:
        self._me, self._settings, self._security = me, settings, security

    def __call__(
        self,
        seat: Seat,
        *,
        on_open: Callable[[Hello], None] = lambda hello: None,
        on_lost: Callable[[PeerLostError], None] = lambda error: None,
        on_flushed: Callable[[], None] | None = None,
    ) -> Link:
        return Link(
            seat.address,
            self._me,
            name=seat.task,
            settings=self._settings,
            on_open=on_open,
            on_lost=on_lost,
            on_flushed=on_flushed,
            security=self._security,
            expect=(seat.job, seat.number),
        )


def new_ticket() -> int:
    """What no other generation of any group has: 63 random bits."""
    return secrets.randbits(63)


def _formed(answer: Message) -> GroupFormed:
    if not isinstance(answer, GroupFormed):
        raise ProtocolError(f"rank 0 answered JoinGroup with {type(answer).__name__}")
    return answer
