"""What one process says and hears about groups, and how it makes its links for that.

It hears and says rendezvous, hops and questions. A node has no socket of its own to be
reached at: whoever owns the endpoint of the task (a daemon, or a program that is a
member of a group) hands it the messages in `GROUP_MESSAGES`. Everything but what says
otherwise belongs to the thread of the loop. Of a link it is known here as whom it is
made, by which transport, and with which keys.

Threats: only a task with the key of a worker or a coordinator may join. A ticket of 63
random bits and the incarnation of a member stand on all that belongs to a generation;
whatever has another one is refused and counted.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from contextlib import suppress
from dataclasses import replace
from functools import partial
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
from zstrat.wire import AbortCall, AskCall, GroupFormed, Hop, Job, JoinGroup, LeaveGroup

from ._generation import Generation
from ._mesh import link_to
from ._rendezvous import RendezvousService, rank_at

if TYPE_CHECKING:
    from collections.abc import Awaitable, Sequence

    from zstrat.collectives.schedules._choice import Choices
    from zstrat.config import Settings
    from zstrat.transport import Remote, Security
    from zstrat.wire import CallState, Hello, Message, PlainTree

    from ._mesh import MakeLink
    from ._rendezvous import GroupSeat


GROUP_MESSAGES: Final = frozenset({Hop, JoinGroup, AskCall, AbortCall, LeaveGroup})
"""What the owner of the endpoint hands to the node."""

_STRAYS: Final = 4096
"""Hops of generations of which the last word has not come yet: the first call of each
is a byte from every rank."""

_MEMBERS: Final = frozenset({Job.WORKER, Job.CHIEF})

_GRACE: Final = 1.0
"""Seconds that an answer of rank 0 may be late: it says more than our own error; that
lines may take when this task ends; and in which a rank that gives up opens them, or its
last word comes behind its next request."""


class GroupNode:
    """The groups of one task.

    Args:
        me: The HELLO of this task.
        security: Its keys, or None.
    """

    def __init__(
        self, me: Hello, settings: Settings, security: Security | None = None
    ) -> None:
        self.me, self.loop = me, asyncio.get_running_loop()
        self.settings, self.security = settings, security
        self._generations: dict[int, Generation] = {}
        self._rendezvous = RendezvousService(self.loop)
        self._strays: deque[tuple[int, Hop]] = deque()
        self._forming = 0
        self._counts: Counter[str] = Counter()

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
                self._begins_anew(remote, message)
                return self._rendezvous.asks(remote, message)
            case AskCall():
                return self._question(remote, message)
            case AbortCall() | LeaveGroup():
                self._notice(remote, message)
                return None
            case _:
                raise ProtocolError(f"{type(message).__name__} is not about a group")

    def lost(self, remote: Remote) -> None:
        """A task that was connected is not any more."""
        self._rendezvous.lost(remote)

    def _begins_anew(self, remote: Remote, message: JoinGroup) -> None:
        """Whoever wants to join is in no generation of the group any more; if it has
        not heard that it was, it has told nobody. If it has, that may come later."""
        for generation in list(self._generations.values()):
            rank = generation.rank_of(remote.hello)
            if generation.group == message.group and rank is not None:
                self.loop.call_later(_GRACE, generation.gone, rank, "it gave up")

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
        is_wanted = self._forming and remote.role in _MEMBERS
        if is_wanted and len(self._strays) < _STRAYS:
            self._strays.append((remote.hello.incarnation, hop))
        else:
            self._counts["stale hops"] += 1

    def statistics(self) -> dict[str, PlainTree]:
        """Counts since the start, and ``waited``: how many seconds collectives of the
        present groups have waited, by the rank for which; from any thread."""
        waited: dict[str, float] = {}
        for generation in tuple(self._generations.values()):
            for rank, seconds in generation.waited.items():
                waited[rank] = waited.get(rank, 0.0) + seconds
        return {
            "generations": len(self._generations),
            **self._counts,
            "waited": dict(waited),
        }

    async def join(
        self,
        request: JoinGroup,
        seats: Sequence[GroupSeat],
        transport: str,
        choices: Choices,
    ) -> Generation:
        """Forms a generation with all ranks, and opens the ways to them.

        Args:
            request: What this rank asks of rank 0; its timeout counts for all.
            seats: Where the ranks are.
            transport: How the bodies of links travel, as in ``ZSTRAT_TRANSPORT``.
            choices: The table of algorithms for all ranks, if this is rank 0.

        Raises:
            CollectiveTimeoutError: Not all came in time, or cannot be reached.
            InvalidArgumentError, AlreadyExistsError: The ranks do not agree on who
                they are; says how.
            PeerLostError: A rank went away meanwhile.

        Cancellation: this rank has not joined.
        """
        settings = replace(self.settings, transport=transport)
        make = partial(Link, me=self.me, settings=settings, security=self.security)
        deadline = self.loop.time() + request.timeout
        self._forming += 1
        is_given_up = False
        try:
            if request.rank == 0:
                answer = self._rendezvous.open(request, seats, choices)
                try:
                    await answer
                except asyncio.CancelledError:
                    if answer.cancelled():
                        raise
                    is_given_up = True  # the others have the answer, too
                formed = _formed(answer.result())
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
            await self._open(generation, deadline + _GRACE, is_given_up)
        except BaseException:  # to `form`; cancellation, too: the others hear of it
            await self.leave(generation, "it could not reach all ranks")
            raise
        return generation

    async def leave(
        self, generation: Generation, reason: str, timeout: float = _GRACE
    ) -> None:
        """Leaves a generation; see `Generation.close`. ``timeout`` in seconds."""
        try:
            await generation.close(reason, self.loop.time() + timeout)
        finally:
            self._generations.pop(generation.ticket, None)

    async def close(self, reason: str) -> None:
        """Leaves all generations. Cancellation: as `leave`."""
        everything = list(self._generations.values())
        await asyncio.gather(*(self.leave(each, reason) for each in everything))
        self._rendezvous.close()

    async def _open(
        self, generation: Generation, deadline: float, is_given_up: bool
    ) -> None:
        """Opens the ways to all ranks. ``is_given_up``: it has been cancelled before.

        Raises: as `Mesh.open`.

        Cancellation: is raised when they are open, or after a moment; what is not open
        does not tell the other end that this rank leaves.
        """
        if is_given_up:
            deadline = self.loop.time() + _GRACE
        opening = asyncio.ensure_future(generation.mesh.open(deadline))
        try:
            await asyncio.shield(opening)
        except asyncio.CancelledError:
            await asyncio.wait([opening], timeout=_GRACE)
            opening.cancel()
            raise
        if is_given_up:
            raise asyncio.CancelledError

    async def _join_there(
        self, request: JoinGroup, first: GroupSeat, make: MakeLink, deadline: float
    ) -> GroupFormed:
        link = link_to(first, make)
        link.start()
        try:
            while True:
                await link.wait_open(deadline)
                with suppress(PeerLostError):  # it may be started anew
                    late = deadline + _GRACE
                    return _formed(await link.request(request, deadline=late))
        except asyncio.CancelledError:
            if link.is_open:  # the answer may be on its way: see `_begins_anew`
                with suppress(BusyError):
                    link.submit(replace(request, timeout=0.0)).cancel()
            raise
        except DeadlineExceededError as error:
            if isinstance(error, CollectiveTimeoutError):
                raise
            raise CollectiveTimeoutError(
                f"group {request.group!r} was not formed within {request.timeout:g} "
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


def _formed(answer: Message) -> GroupFormed:
    if not isinstance(answer, GroupFormed):
        raise ProtocolError(f"rank 0 answered JoinGroup with {type(answer).__name__}")
    return answer
