"""The rendezvous at rank 0, where the ranks of a group form a generation.

Rank 0 keeps the list of ranks, and decides without I/O. Every rank sends rank 0 a
request to join, and gets one answer: the members, once all ranks have asked, or an
error that names the missing ranks. Requests that come before rank 0 itself has created
the group wait. A rank that asks again replaces its earlier request; two processes that
ask for one rank get an error.

A process that starts asks for generation 0, "whatever is next"; a process that was in
generation g asks for g + 1. The generation that is formed is the highest one asked for.

`MembershipState` is the list of one group's ranks. `RendezvousService` keeps the lists
of all groups whose rank 0 is this task, and answers with futures on the loop.
"""

from __future__ import annotations

import secrets
from functools import partial
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
    from collections.abc import Callable, Iterable, Sequence

    from zstrat.collectives.schedules._choice import Choices
    from zstrat.transport import Remote
    from zstrat.wire import Message, PlainTree

Token = TypeVar("Token")
Outcome = GroupFormed | ZstratError

WAITING: Final = 4096
"""Most requests to join that may wait for one group: more ranks than any group has."""

MAX_WAIT_SECONDS: Final = 7 * 86400.0
"""Most seconds that a rank may wait for the other ranks."""

_NAMED: Final = 8
"""Most ranks that an error names; the error counts the others."""


class GroupSeat(NamedTuple):
    """The task of one rank, and the address where the task listens."""

    job: str
    number: int
    address: str

    @property
    def task(self) -> str:
        return f"/job:{self.job}/task:{self.number}"


def seat_of(member: MemberEntry) -> GroupSeat:
    """Returns the task and the address of a member.

    Raises:
        InvalidArgumentError: The name of the member's task is invalid.
    """
    job, found, index = member.task.removeprefix("/job:").partition("/task:")
    if not found or not index.isdecimal():
        raise InvalidArgumentError(
            f"member {member.task!r:.80}: expected /job:NAME/task:INDEX"
        )
    return GroupSeat(job, int(index), member.address)


def rank_at(rank: int, seat: GroupSeat) -> str:
    """Returns the name of a rank, for texts of errors."""
    return f"rank {rank} ({seat.task} at {seat.address})"


class _Applicant(NamedTuple):
    request: JoinGroup
    due: float


class MembershipState(Generic[Token]):
    """Decides when the ranks of one group that have asked to join form a generation.

    Returns answers as pairs of the token of a request and its outcome: the generation
    that all ranks have formed, or the error with which one rank is refused.

    Args:
        draw: Returns a new ticket.
    """

    def __init__(self, group: str, draw: Callable[[], int]) -> None:
        self._group, self._draw = group, draw
        self._seats: tuple[GroupSeat, ...] | None = None
        self._choices: dict[str, PlainTree] = {}
        self._waiting: dict[Token, _Applicant] = {}

    @property
    def is_idle(self) -> bool:
        """Whether no rank waits, and rank 0 has not asked."""
        return self._seats is None and not self._waiting

    @property
    def tokens(self) -> list[Token]:
        """Tokens of the requests that wait."""
        return list(self._waiting)

    @property
    def due(self) -> float:
        """Time when `tick` has to be called."""
        return min((each.due for each in self._waiting.values()), default=float("inf"))

    def open(
        self, seats: Sequence[GroupSeat], choices: dict[str, PlainTree] | None = None
    ) -> list[tuple[Token, Outcome]]:
        """Sets the seats (tasks and addresses of the ranks) that rank 0 expects, and
        refuses waiting requests that do not match. Rank 0 must ask to join afterwards.
        ``choices``: see `GroupFormed`."""
        self._seats, self._choices = tuple(seats), choices or {}
        # Until now nobody could tell whether these requests fit.
        refused: list[tuple[Token, Outcome]] = [
            (token, error)
            for token, each in self._waiting.items()
            if (error := self._objection(each.request)) is not None
        ]
        self._forget([token for token, _ in refused])
        return refused

    def ask(
        self, request: JoinGroup, token: Token, now: float
    ) -> list[tuple[Token, Outcome]]:
        """Adds a request to join; returns the answers to all ranks if it was the last
        one missing."""
        error = self._objection(request)
        if error is not None:
            return [(token, error)]
        # The earlier request of this process: its connection broke, or its caller gave
        # up. No other process has its rank (`_objection`).
        self._waiting = {
            token: each
            for token, each in self._waiting.items()
            if each.request.rank != request.rank
        }
        # Bounded: the value comes from another process.
        timeout = min(max(0.0, request.timeout), MAX_WAIT_SECONDS)
        self._waiting[token] = _Applicant(request, now + timeout)
        return self._settle()

    def leave(self, token: Token) -> None:
        """Removes the request with this token."""
        self._forget([token])

    def tick(self, now: float) -> list[tuple[Token, Outcome]]:
        """Refuses requests whose timeout has passed, with the names of missing ranks.
        If rank 0 is late, refuses all: without it no group is formed."""
        late = {t: each.request for t, each in self._waiting.items() if each.due <= now}
        if self._seats is not None and not all(x.rank for x in late.values()):
            late = {t: each.request for t, each in self._waiting.items()}
        refused: list[tuple[Token, Outcome]] = [
            (token, self._too_late(request)) for token, request in late.items()
        ]
        self._forget(late)
        return refused

    def _forget(self, tokens: Iterable[Token]) -> None:
        for token in tokens:
            gone = self._waiting.pop(token, None)
            if gone is not None and gone.request.rank == 0:
                # Only rank 0 knows the members; it opens the group again when it
                # returns.
                self._seats = None

    def _settle(self) -> list[tuple[Token, Outcome]]:
        seats = self._seats
        if seats is None or len(self._waiting) < len(seats):
            return []
        ranks = sorted(self._waiting.items(), key=lambda each: each[1].request.rank)
        # A restarted process asks for 0, the survivors know the last number.
        generation = max(each.request.generation for _, each in ranks)
        members = [each.request.member for _, each in ranks]
        answer = GroupFormed(self._draw(), generation, members, self._choices)
        # Rank 0 opens the next generation, with other members perhaps.
        self._seats, self._waiting = None, {}
        return [(token, answer) for token, _ in ranks]

    def _objection(self, request: JoinGroup) -> ZstratError | None:
        """Returns the error with which to refuse a request, or None."""
        if len(self._waiting) >= WAITING:
            return BusyError(
                f"{len(self._waiting)} ranks wait for group {self._group!r} already"
            )
        requests = (each.request for each in self._waiting.values())
        other = next((each for each in requests if each.rank == request.rank), None)
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
                f"{waited}rank 0 runs, but has not created the group: check that its "
                f"program calls Group(name={self._group!r}), and reform() as others do"
            )
        present = {each.request.rank for each in self._waiting.values()}
        missing = [
            rank_at(rank, seat)
            for rank, seat in enumerate(self._seats)
            if rank not in present
        ]
        return CollectiveTimeoutError(
            f"{waited}{listed(missing)} did not join, {len(present)} of "
            f"{len(self._seats)} ranks did: start the missing ranks, or wait longer "
            "(ZSTRAT_CONNECT_TIMEOUT=SECONDS, rendezvous_timeout= of a Group, timeout= "
            "of reform)"
        )


def listed(names: Sequence[str]) -> str:
    """Joins names for an error message; of many names only counts the rest."""
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
            f"({seats[0].task}) with {len(seats)}: give all ranks the same tasks"
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
"""Most groups that may wait to be formed at one task."""


class RendezvousService:
    """Answers the `JoinGroup` requests of all groups whose rank 0 is this task, with
    one timer."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._groups: dict[str, MembershipState[asyncio.Future[Message]]] = {}
        self._asked: dict[asyncio.Future[Message], Remote] = {}
        self._timer: asyncio.TimerHandle | None = None

    def join(self, remote: Remote, request: JoinGroup) -> asyncio.Future[Message]:
        """Adds the request of another task to join; returns the future of the answer.

        Raises:
            ProtocolError: The incarnation in the request is not that of the task.
            BusyError: Too many groups wait to be formed.
        """
        # Ranks know each other by it: whose hops are whose, and who is lost.
        if request.member.incarnation != remote.hello.incarnation:
            raise ProtocolError(
                f"{remote.name} asks to join with the incarnation of another process"
            )
        future: asyncio.Future[Message] = self._loop.create_future()
        self._asked[future] = remote
        self._ask(request, future)
        return future

    def open(
        self, request: JoinGroup, seats: Sequence[GroupSeat], choices: Choices
    ) -> asyncio.Future[Message]:
        """Opens a group whose rank 0 is this task, adds this task's own request, and
        returns the future of its answer."""
        rendezvous = self._rendezvous_of(request.group)
        self._answer(rendezvous.open(seats, choices.to_plain()))
        future: asyncio.Future[Message] = self._loop.create_future()
        self._ask(request, future)
        return future

    def lost(self, remote: Remote) -> None:
        """Cancels the requests of a lost task."""
        for future in [f for f, who in self._asked.items() if who is remote]:
            future.cancel()

    def close(self) -> None:
        """Stops the timer: waiting requests no longer time out."""
        if self._timer is not None:
            self._timer.cancel()

    def _ask(self, request: JoinGroup, future: asyncio.Future[Message]) -> None:
        rendezvous = self._rendezvous_of(request.group)
        # Also for a request that is refused or cancelled: nothing of it stays.
        future.add_done_callback(lambda done: self._answered(request.group, done))
        for token in rendezvous.tokens:
            if token.done():  # cancelled just now: its process has gone
                rendezvous.leave(token)
        self._answer(rendezvous.ask(request, future, self._loop.time()))
        self._arm()

    def _rendezvous_of(self, group: str) -> MembershipState[asyncio.Future[Message]]:
        rendezvous = self._groups.get(group)
        if rendezvous is None:
            if len(self._groups) >= GROUPS:
                raise BusyError(f"{GROUPS} groups wait to be formed at this task")
            rendezvous = MembershipState(group, partial(secrets.randbits, 63))
            self._groups[group] = rendezvous
        return rendezvous

    def _answered(self, group: str, future: asyncio.Future[Message]) -> None:
        self._asked.pop(future, None)
        rendezvous = self._groups.get(group)
        if rendezvous is not None:
            rendezvous.leave(future)
            # Nothing stays of groups that were formed, or that everybody has given up.
            if rendezvous.is_idle:
                del self._groups[group]

    def _answer(
        self, answers: Iterable[tuple[asyncio.Future[Message], Outcome]]
    ) -> None:
        for future, outcome in answers:
            if future.done():
                continue
            if isinstance(outcome, GroupFormed):
                future.set_result(outcome)
            else:
                future.set_exception(outcome)

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
            self._answer(rendezvous.tick(now))
        self._arm()
