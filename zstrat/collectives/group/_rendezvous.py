"""A rendezvous: who has come, and how a generation of a group is formed of them.

Rank 0 keeps the list, and decides without I/O. Every rank asks it to form a generation,
and gets one answer: the members, once all have come; or an error that says who has not.
Requests may come before rank 0 itself has opened the list; they wait. A rank that asks
again, or comes again as another process, takes its own place; two processes on one
place get an error.

A process that starts asks for generation 0, "whatever is next"; one that was in
generation g asks for g + 1. What is formed is the highest that anyone asks for.

`MembershipState` is the list of one group. `RendezvousService` is the shell of these
lists, for all groups of which this task is rank 0. Whoever asks gets a future: it has
the answer once all have come or time is up. The service belongs to the thread of the
loop.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Generic, NamedTuple, TypeVar

from zstrat.errors import (
    AlreadyExistsError,
    BusyError,
    CollectiveTimeoutError,
    InvalidArgumentError,
    ProtocolError,
    ZstratError,
)
from zstrat.wire import GroupFormed, JoinGroup, MemberEntry

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Sequence

    from zstrat.collectives.schedules._choice import Choices
    from zstrat.transport import Remote
    from zstrat.wire import Message, PlainTree

Token = TypeVar("Token")

WAITING: Final = 4096
"""Requests that may wait for one group: more ranks than any group has."""

MAX_WAIT_SECONDS: Final = 7 * 86400.0
"""Seconds that a rank may wait."""

_NAMED: Final = 8
"""Ranks that an error names; of the others it says how many they are."""


class GroupSeat(NamedTuple):
    """One place in a group: a task, and where it listens."""

    job: str
    number: int
    address: str

    @property
    def task(self) -> str:
        return f"/job:{self.job}/task:{self.number}"


def seat_of(member: MemberEntry) -> GroupSeat:
    """Where a member sits.

    Raises:
        InvalidArgumentError: It has no name of a task.
    """
    job, found, index = member.task.removeprefix("/job:").partition("/task:")
    if not found or not index.isdecimal():
        raise InvalidArgumentError(
            f"member {member.task!r:.80}: expected /job:NAME/task:INDEX"
        )
    return GroupSeat(job, int(index), member.address)


def rank_at(rank: int, seat: GroupSeat) -> str:
    """What messages call a rank."""
    return f"rank {rank} ({seat.task} at {seat.address})"


@dataclass(frozen=True, slots=True)
class Formed(Generic[Token]):
    """All have come: the answer for all of them."""

    answer: GroupFormed
    to: tuple[Token, ...]


@dataclass(frozen=True, slots=True)
class Refused(Generic[Token]):
    token: Token
    error: ZstratError


@dataclass(slots=True)
class _Applicant(Generic[Token]):
    request: JoinGroup
    token: Token
    due: float


class MembershipState(Generic[Token]):
    """The list of one group.

    Args:
        draw: A new ticket.
    """

    def __init__(self, group: str, draw: Callable[[], int]) -> None:
        self._group, self._draw = group, draw
        self._seats: tuple[GroupSeat, ...] | None = None
        self._choices: dict[str, PlainTree] = {}
        self._applicants: list[_Applicant[Token]] = []

    @property
    def is_idle(self) -> bool:
        """Whether no rank waits, and rank 0 waits for none."""
        return self._seats is None and not self._applicants

    @property
    def tokens(self) -> list[Token]:
        """Of those that wait."""
        return [applicant.token for applicant in self._applicants]

    @property
    def due(self) -> float:
        """When `tick` has to be called."""
        return min(
            (applicant.due for applicant in self._applicants), default=float("inf")
        )

    def open(
        self, seats: Sequence[GroupSeat], choices: dict[str, PlainTree] | None = None
    ) -> list[Refused[Token]]:
        """Rank 0 knows now who is to come; it asks itself afterwards. ``choices``: what
        it has for all of them; see `GroupFormed`."""
        self._seats, self._choices = tuple(seats), choices or {}
        refused = []
        for applicant in self._applicants:
            error = self._objection(applicant.request)
            if error is not None:
                refused.append(Refused(applicant.token, error))
        self._forget({each.token for each in refused})
        return refused

    def ask(
        self, request: JoinGroup, token: Token, now: float
    ) -> list[Formed[Token] | Refused[Token]]:
        """A rank asks to be a member."""
        error = self._objection(request)
        if error is not None:
            return [Refused(token, error)]
        rank, incarnation = request.rank, request.member.incarnation
        self._applicants = [
            applicant
            for applicant in self._applicants
            if (applicant.request.rank, applicant.request.member.incarnation)
            != (rank, incarnation)
        ]
        # Whatever somebody says.
        timeout = min(max(0.0, request.timeout), MAX_WAIT_SECONDS)
        self._applicants.append(_Applicant(request, token, now + timeout))
        return self._settle()

    def leave(self, token: Token) -> None:
        """The process that asked with this token waits no more."""
        self._forget({token})

    def tick(self, now: float) -> list[Refused[Token]]:
        """Tells those whose timeout has ended who has not come; all of them, if it is
        that of rank 0, without which nothing is formed."""
        late = [applicant for applicant in self._applicants if applicant.due <= now]
        if self._seats is not None and any(not g.request.rank for g in late):
            late = self._applicants
        refused = [
            Refused(applicant.token, self._too_late(applicant.request))
            for applicant in late
        ]
        self._forget({applicant.token for applicant in late})
        return refused

    def _forget(self, tokens: set[Token]) -> None:
        gone = [
            applicant for applicant in self._applicants if applicant.token in tokens
        ]
        self._applicants = [
            applicant for applicant in self._applicants if applicant.token not in tokens
        ]
        if any(applicant.request.rank == 0 for applicant in gone):
            self._seats = None  # without rank 0 nobody knows who is to come

    def _settle(self) -> list[Formed[Token] | Refused[Token]]:
        seats, applicants = (
            self._seats,
            {applicant.request.rank: applicant for applicant in self._applicants},
        )
        if seats is None or len(applicants) < len(seats):
            return []
        generation = max(applicant.request.generation for applicant in self._applicants)
        members = [applicants[rank].request.member for rank in range(len(seats))]
        answer = GroupFormed(self._draw(), generation, members, self._choices)
        self._seats, self._applicants = None, []
        return [Formed(answer, tuple(applicants[r].token for r in range(len(seats))))]

    def _objection(self, request: JoinGroup) -> ZstratError | None:
        """Why a request cannot stand beside what is known, or None."""
        if len(self._applicants) >= WAITING:
            return BusyError(
                f"{len(self._applicants)} ranks wait for group {self._group!r} already"
            )
        other = next(
            (g.request for g in self._applicants if g.request.rank == request.rank),
            None,
        )
        if other is not None and other.member.incarnation != request.member.incarnation:
            return AlreadyExistsError(
                f"rank {request.rank} of group {self._group!r} is taken by "
                f"{_process(other.member)}, and {_process(request.member)} wants it, "
                "too: stop one of them, or give it another task index"
            )
        if self._seats is None:
            return None
        return _misfit(self._group, self._seats, request)

    def _too_late(self, request: JoinGroup) -> ZstratError:
        waited = f"group {self._group!r} was not formed within {request.timeout:g} s: "
        if self._seats is None:
            return CollectiveTimeoutError(
                f"{waited}rank 0 runs, but has not made the group: does its program "
                f"call Group(name={self._group!r}), and reform() as the others do?"
            )
        here = {applicant.request.rank for applicant in self._applicants}
        missing = [
            rank_at(rank, seat)
            for rank, seat in enumerate(self._seats)
            if rank not in here
        ]
        return CollectiveTimeoutError(
            f"{waited}{listed(missing)} did not come, {len(here)} of "
            f"{len(self._seats)} ranks did: start what is missing, or wait longer "
            "(ZSTRAT_CONNECT_TIMEOUT=SECONDS, rendezvous_timeout= of a Group, timeout= "
            "of reform)"
        )


def listed(names: Sequence[str]) -> str:
    """Names for a person, however many there are."""
    if len(names) > _NAMED:
        return f"{', '.join(names[:_NAMED])} and {len(names) - _NAMED} more"
    return ", ".join(names) or "nobody"


def _misfit(
    group: str, seats: tuple[GroupSeat, ...], request: JoinGroup
) -> ZstratError | None:
    who = f"rank {request.rank} ({request.member.task})"
    if request.size != len(seats):
        return InvalidArgumentError(
            f"{who} forms group {group!r} with {request.size} ranks, rank 0 "
            f"({seats[0].task}) with {len(seats)}: give all of them the same tasks"
        )
    if not 0 <= request.rank < len(seats):
        return InvalidArgumentError(
            f"{who} of group {group!r}: expected a rank below {len(seats)}"
        )
    expected = seats[request.rank].task
    if request.member.task != expected:
        return InvalidArgumentError(
            f"{who} of group {group!r}: rank 0 expects {expected} there: give all "
            "ranks the same tasks in the same order"
        )
    return None


def _process(member: MemberEntry) -> str:
    return f"{member.task} (host {member.host}, pid {member.pid})"


GROUPS: Final = 1024
"""Names of groups for which somebody may wait at rank 0."""


class RendezvousService:
    """Rendezvous by name of group, and one timer for all of them."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._groups: dict[str, MembershipState[asyncio.Future[Message]]] = {}
        self._asked: dict[asyncio.Future[Message], Remote] = {}
        self._timer: asyncio.TimerHandle | None = None

    def asks(self, remote: Remote, request: JoinGroup) -> asyncio.Future[Message]:
        """A task wants to be a member of a group whose rank 0 is here.

        Raises:
            ProtocolError: It does not say who it is.
            BusyError: Too many groups wait to be formed.
        """
        if request.member.incarnation != remote.hello.incarnation:
            raise ProtocolError(f"{remote.name} wants to join as somebody else")
        future: asyncio.Future[Message] = self._loop.create_future()
        self._asked[future] = remote
        self._ask(request, future)
        return future

    def open(
        self, request: JoinGroup, seats: Sequence[GroupSeat], choices: Choices
    ) -> asyncio.Future[Message]:
        """This task is rank 0 of a group, and knows who is to come; its answer."""
        rendezvous = self._rendezvous_of(request.group)
        self._obey(rendezvous.open(seats, choices.to_plain()))
        future: asyncio.Future[Message] = self._loop.create_future()
        self._ask(request, future)
        return future

    def lost(self, remote: Remote) -> None:
        """A task that is gone waits no more."""
        for future in [f for f, who in self._asked.items() if who is remote]:
            future.cancel()

    def close(self) -> None:
        """Stops the timer: no rank is told any more that time is up."""
        if self._timer is not None:
            self._timer.cancel()

    def _ask(self, request: JoinGroup, future: asyncio.Future[Message]) -> None:
        rendezvous = self._rendezvous_of(request.group)
        future.add_done_callback(lambda done: self._answered(request.group, done))
        for token in rendezvous.tokens:
            if token.done():  # cancelled just now: nobody is there to join
                rendezvous.leave(token)
        self._obey(rendezvous.ask(request, future, self._loop.time()))
        self._arm()

    def _rendezvous_of(self, group: str) -> MembershipState[asyncio.Future[Message]]:
        found = self._groups.get(group)
        if found is None:
            if len(self._groups) >= GROUPS:
                raise BusyError(f"{GROUPS} groups wait to be formed at this task")
            found = MembershipState(group, new_ticket)
            self._groups[group] = found
        return found

    def _answered(self, group: str, future: asyncio.Future[Message]) -> None:
        self._asked.pop(future, None)
        rendezvous = self._groups.get(group)
        if rendezvous is not None:
            rendezvous.leave(future)
            if rendezvous.is_idle:
                del self._groups[group]

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
        due = min((each.due for each in self._groups.values()), default=None)
        if due is not None and due != float("inf"):
            self._timer = self._loop.call_at(due, self._tick)

    def _tick(self) -> None:
        self._timer = None
        now = self._loop.time()
        for rendezvous in list(self._groups.values()):
            self._obey(rendezvous.tick(now))
        self._arm()


def new_ticket() -> int:
    """What no other generation of any group has: 63 random bits."""
    return secrets.randbits(63)
