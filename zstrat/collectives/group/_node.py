"""The node of a task: handles all messages about groups that reach the task, and
creates links to other ranks.

A node has no socket that others connect to. The owner of the task's endpoint (a daemon,
or a program that is a member of a group) passes it the messages in `GROUP_MESSAGES`.
Every method runs on the loop's thread unless its docstring says otherwise.

Threats: only a task with the key of a worker or a coordinator may join. Each message of
a generation has its ticket, 63 random bits, and comes from the incarnation of a member;
others are refused and counted.
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
    ProtocolError,
    StaleSessionError,
)
from zstrat.transport import Link
from zstrat.wire import (
    REQUESTS,
    AbortCall,
    AskCall,
    GroupFormed,
    Hop,
    JoinGroup,
    LeaveGroup,
    check_sender,
)

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
"""Classes of messages that the owner of the endpoint passes to the node."""

_STRAYS: Final = 4096
"""Most messages kept for generations whose `GroupFormed` has not come yet. In the first
call of a generation every rank sends a byte, and a rank that was cancelled sends a
notice."""

_GRACE: Final = 1.0
"""Seconds of grace: for an answer of rank 0 that comes after the timeout, and names the
cause better; for links when this task ends; and for a rank that gives up, whose last
notice may come after its next request."""

_GIVING_UP: Final = 5.0
"""Seconds in which a cancelled rank opens its links, to notify the other ranks that it
leaves."""


class GroupNode:
    """The groups and generations that one task is in.

    Args:
        me: The HELLO of this task.
        security: Keys of this task, or None.
    """

    def __init__(
        self, me: Hello, settings: Settings, security: Security | None = None
    ) -> None:
        self.me, self.loop = me, asyncio.get_running_loop()
        self._task = f"/job:{me.job}/task:{me.index}"
        self.settings, self.security = settings, security
        self._generations: dict[int, Generation] = {}
        self._rendezvous = RendezvousService(self.loop)
        self._strays: deque[tuple[Remote, Hop | AbortCall | LeaveGroup]] = deque()
        self._forming = 0
        self._counts: Counter[str] = Counter()

    def handle(
        self, remote: Remote, message: Message
    ) -> Message | Awaitable[Message] | None:
        """Handles a message of one of the classes `GROUP_MESSAGES`.

        Raises:
            PermissionDeniedError: The role of the sender cannot join groups.
            ProtocolError: The message is not about groups.
            StaleSessionError: The message is about a generation that this task is not
                in.
        """
        if type(message) is Hop:
            # No `check_sender` per hop: a member is known by ticket and incarnation.
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
        check_sender(self._task, remote.name, remote.role, message)
        match message:
            case JoinGroup():
                self._leave_earlier(remote, message)
                return self._rendezvous.join(remote, message)
            case AskCall():
                return self._question(remote, message)
            case AbortCall() | LeaveGroup():
                self._notice(remote, message)
                return None
            case _:
                raise ProtocolError(
                    f"{type(message).__name__} is not a message about groups"
                )

    def lost(self, remote: Remote) -> None:
        """Notes that a task is lost, and cancels its requests to join."""
        self._rendezvous.lost(remote)

    def _leave_earlier(self, remote: Remote, message: JoinGroup) -> None:
        """Ends earlier generations of the group in which the sender of a `JoinGroup`
        was a member. The sender may have sent no notice that it left, because it may
        not know that it was a member; or the notice is late."""
        for generation in list(self._generations.values()):
            rank = generation.rank_of(remote.hello)
            if generation.group == message.group and rank is not None:
                # Later: its own notice says why, and may arrive meanwhile.
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
        if generation is None:
            self._stray(remote, message)
        elif rank is None:
            self._counts["stale notices"] += 1
        elif isinstance(message, AbortCall):
            generation.aborted(rank, message)
        else:
            generation.left(rank, message)

    def _stray(self, remote: Remote, message: Hop | AbortCall | LeaveGroup) -> None:
        is_wanted = self._forming and remote.role in REQUESTS[Hop].senders
        if is_wanted and len(self._strays) < _STRAYS:
            self._strays.append((remote, message))
        else:
            self._counts[_stale(message)] += 1

    def statistics(self) -> dict[str, PlainTree]:
        """Returns counts since the start, and ``waited``: seconds that collectives of
        the present groups have waited, by the task waited for. From any thread."""
        waited: dict[str, float] = {}
        # A copy: the loop adds and removes generations meanwhile.
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
        """Forms a generation with all ranks, and opens links to them.

        Args:
            request: The request that is sent to rank 0; its timeout covers the whole
                join.
            seats: Tasks and addresses of the ranks, in their order.
            transport: How bodies of messages on the links travel, as in
                ``ZSTRAT_TRANSPORT``.
            choices: The table of algorithms for all ranks, if this is rank 0.

        Raises:
            CollectiveTimeoutError: A rank did not ask to join in time, or cannot be
                reached.
            InvalidArgumentError, AlreadyExistsError: The ranks disagree about the
                members; the error says how.
            PeerLostError: A rank was lost meanwhile.

        Cancellation: this rank has not joined.
        """
        settings = replace(self.settings, transport=transport)
        make = partial(Link, me=self.me, settings=settings, security=self.security)
        deadline = self.loop.time() + request.timeout
        # From now on messages of a generation that is not known here are kept.
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
                    # Raised once the others are notified, see `_open`.
                    is_given_up = True  # the others have got the answer, too
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
            # Others may have got the answer earlier, and have sent their first
            # messages.
            for remote, message in self._claim(formed.ticket):
                self.handle(remote, message)
            await self._open(generation, deadline + _GRACE, is_given_up)
        except BaseException:  # to `form`, with cancellation: the others are notified
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
        # All at once: each one may wait for ranks that are slow.
        everything = list(self._generations.values())
        await asyncio.gather(*(self.leave(each, reason) for each in everything))
        self._rendezvous.close()

    async def _open(
        self, generation: Generation, deadline: float, is_given_up: bool
    ) -> None:
        """Opens the links of a generation to all ranks. ``is_given_up``: the caller was
        cancelled before.

        Raises: as `Mesh.open`.

        Cancellation: is raised once the links are open, or after `_GIVING_UP` seconds,
        because only an open link can notify its rank that this rank leaves.
        """
        if is_given_up:
            deadline = self.loop.time() + _GIVING_UP
        opening = asyncio.ensure_future(generation.mesh.open(deadline))
        try:
            await asyncio.shield(opening)
        except asyncio.CancelledError:
            await asyncio.wait([opening], timeout=_GIVING_UP)
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
                with suppress(PeerLostError):  # rank 0 may be restarted
                    late = deadline + _GRACE
                    return _formed(await link.request(request, deadline=late))
        except asyncio.CancelledError:
            if link.is_open:  # the answer may be on its way: see `_leave_earlier`
                with suppress(BusyError):
                    # It replaces the request that waits at rank 0, and is refused there
                    # at once.
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

    def _claim(self, ticket: int) -> list[tuple[Remote, Hop | AbortCall | LeaveGroup]]:
        """Removes and returns the messages of the generation with this ticket that came
        before its `GroupFormed`."""
        claimed = [each for each in self._strays if each[1].ticket == ticket]
        others = [each for each in self._strays if each[1].ticket != ticket]
        self._strays.clear()
        if self._forming:
            self._strays.extend(others)
        else:
            self._counts.update(_stale(message) for _, message in others)
        return claimed


def _stale(message: Hop | AbortCall | LeaveGroup) -> str:
    return "stale hops" if type(message) is Hop else "stale notices"


def _formed(answer: Message) -> GroupFormed:
    if not isinstance(answer, GroupFormed):
        raise ProtocolError(f"rank 0 answered JoinGroup with {type(answer).__name__}")
    return answer
