"""Who has come to a rendezvous: how a generation of a group is formed. No I/O.

Rank 0 keeps the list. Every rank asks it to form a generation, and gets one answer:
the members, once all have come; or an error that says who has not. Requests may come
before rank 0 itself has opened the list; they wait. A rank that asks again, or comes
again as another process, takes its own place; two processes on one place are told so.

A process that starts asks for generation 0, "whatever is next"; one that was in
generation g asks for g + 1. What is formed is the highest that anyone asks for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Generic, NamedTuple, TypeVar

from zstrat.errors import (
    AlreadyExistsError,
    BusyError,
    CollectiveTimeoutError,
    InvalidArgumentError,
    ZstratError,
)
from zstrat.wire import GroupFormed, JoinGroup, MemberEntry

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from zstrat.wire import PlainTree

Token = TypeVar("Token")

WAITING: Final = 4096
"""Requests that may wait for one group: more ranks than any group has."""

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
class _Guest(Generic[Token]):
    request: JoinGroup
    token: Token
    due: float


class Rendezvous(Generic[Token]):
    """The list of one group.

    Args:
        draw: A new ticket.
    """

    def __init__(self, group: str, draw: Callable[[], int]) -> None:
        self._group, self._draw = group, draw
        self._seats: tuple[GroupSeat, ...] | None = None
        self._choices: dict[str, PlainTree] = {}
        self._guests: list[_Guest[Token]] = []

    @property
    def is_idle(self) -> bool:
        """Nobody waits, and rank 0 does not wait for anybody."""
        return self._seats is None and not self._guests

    @property
    def due(self) -> float:
        """When `tick` has to be called."""
        return min((guest.due for guest in self._guests), default=float("inf"))

    def open(
        self, seats: Sequence[GroupSeat], choices: dict[str, PlainTree] | None = None
    ) -> list[Refused[Token]]:
        """Rank 0 knows now who is to come; it asks itself afterwards. ``choices``: what
        it has for all of them; see `GroupFormed`."""
        self._seats, self._choices = tuple(seats), choices or {}
        refused = []
        for guest in self._guests:
            error = self._objection(guest.request)
            if error is not None:
                refused.append(Refused(guest.token, error))
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
        self._guests = [
            guest
            for guest in self._guests
            if (guest.request.rank, guest.request.member.incarnation)
            != (rank, incarnation)
        ]
        self._guests.append(_Guest(request, token, now + request.patience))
        return self._settle()

    def leave(self, token: Token) -> None:
        """Who asked is gone."""
        self._forget({token})

    def tick(self, now: float) -> list[Refused[Token]]:
        """Tells those whose patience has ended who has not come; all of them, if it is
        that of rank 0, without which nothing is formed."""
        late = [guest for guest in self._guests if guest.due <= now]
        if self._seats is not None and any(not g.request.rank for g in late):
            late = self._guests
        refused = [
            Refused(guest.token, self._too_late(guest.request)) for guest in late
        ]
        self._forget({guest.token for guest in late})
        return refused

    def _forget(self, tokens: set[Token]) -> None:
        gone = [guest for guest in self._guests if guest.token in tokens]
        self._guests = [guest for guest in self._guests if guest.token not in tokens]
        if any(guest.request.rank == 0 for guest in gone):
            self._seats = None  # without rank 0 nobody knows who is to come

    def _settle(self) -> list[Formed[Token] | Refused[Token]]:
        seats, guests = (
            self._seats,
            {guest.request.rank: guest for guest in self._guests},
        )
        if seats is None or len(guests) < len(seats):
            return []
        generation = max(guest.request.generation for guest in self._guests)
        members = [guests[rank].request.member for rank in range(len(seats))]
        answer = GroupFormed(self._draw(), generation, members, self._choices)
        self._seats, self._guests = None, []
        return [Formed(answer, tuple(guests[r].token for r in range(len(seats))))]

    def _objection(self, request: JoinGroup) -> ZstratError | None:
        """Why a request cannot stand beside what is known, or None."""
        if len(self._guests) >= WAITING:
            return BusyError(
                f"{len(self._guests)} ranks wait for group {self._group!r} already"
            )
        other = next(
            (g.request for g in self._guests if g.request.rank == request.rank), None
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
        waited = f"group {self._group!r} was not formed within {request.patience:g} s: "
        if self._seats is None:
            return CollectiveTimeoutError(
                f"{waited}rank 0 runs, but has not made the group: does its program "
                f"call Group(name={self._group!r}), and reform() as the others do?"
            )
        here = {guest.request.rank for guest in self._guests}
        missing = [
            rank_at(rank, seat)
            for rank, seat in enumerate(self._seats)
            if rank not in here
        ]
        return CollectiveTimeoutError(
            f"{waited}{listed(missing)} did not come, {len(here)} of "
            f"{len(self._seats)} ranks did: start what is missing, or give the group "
            "more time"
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
