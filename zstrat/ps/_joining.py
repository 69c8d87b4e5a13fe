"""Workers that wait at a parameter server: for a program, or for what the first worker
creates.

`Joining`: where every worker runs the whole program (between-graph training), one of
them opens the session and creates variables and optimizers; each of the others sends
one request that names the objects it waits for, and gets the answer when all of them
exist.

Variables and optimizers are numbered in the order of creation, so a program that
creates them in another order asks for the number of another object. It gets an error.

`WaitingWorkers`: a worker that no program knows can reach the server, but not the
program. So it reports itself to the server, which passes the report on to the program
whose session it serves, and the answer back. If no program is connected, the worker
waits for one. Only the program decides whether it takes a worker.

Both classes live on the event loop. Law: code that changes the session, or creates
something, calls `Joining.answer_ready` afterwards, and `WaitingWorkers.report_all` if
it opens a session.
"""

from __future__ import annotations

import abc
import asyncio
import itertools
from typing import TYPE_CHECKING, Final, Generic, NamedTuple, TypeVar, final

from zstrat.errors import (
    BusyError,
    DeadlineExceededError,
    InvalidArgumentError,
    StaleSessionError,
    ZstratError,
    from_wire,
)
from zstrat.transport import new_incarnation
from zstrat.wire import (
    AnswerReport,
    Awaited,
    AwaitedOptimizer,
    JoinSession,
    Message,
    ReportWorker,
    SessionOpened,
    WorkerReported,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from zstrat.wire import Owner, Ownership

    from .store._store import Store


MAX_WAITING_REPORTS: Final = 1024
"""The most reports of workers that may wait at a time; each comes from a process with a
worker's key."""
_MAX_WAIT_SECONDS: Final = 7 * 86400.0
"""Seconds that a worker may wait at most for a program."""


M = TypeVar("M", JoinSession, ReportWorker)


class _TimedRequest(NamedTuple, Generic[M]):
    """A request of a worker that waits, and the timer that ends its wait."""

    peer: object
    message: M
    answer: asyncio.Future[Message]
    timer: asyncio.TimerHandle


class _TimedRequests(abc.ABC, Generic[M]):
    """Requests of workers that wait, by numbers from ``first`` on, each until its
    timeout is over."""

    def __init__(self, first: int = 0) -> None:
        self._waiting: dict[int, _TimedRequest[M]] = {}
        self._numbers = itertools.count(first)

    def __len__(self) -> int:
        return len(self._waiting)

    def lost(self, peer: object) -> None:
        """Drops the waiting requests of a peer whose connection has ended."""
        gone = [n for n, waiting in self._waiting.items() if waiting.peer is peer]
        for number in gone:
            waiting = self._waiting.pop(number)
            waiting.timer.cancel()
            waiting.answer.cancel()

    def close(self, error: ZstratError) -> None:
        """Fails all waiting requests with the error, because the server shuts down."""
        for number in list(self._waiting):
            self._end(number, error)

    def _wait(self, peer: object, message: M) -> int:
        """Makes a request wait; returns its number."""
        loop, number = asyncio.get_running_loop(), next(self._numbers)
        # The timeout comes from a peer: not negative, and not for months.
        seconds = min(max(0.0, message.timeout), _MAX_WAIT_SECONDS)
        timer = loop.call_later(seconds, self._late, number)
        waiting = _TimedRequest(peer, message, loop.create_future(), timer)
        self._waiting[number] = waiting
        return number

    @abc.abstractmethod
    def _late(self, number: int) -> None:
        """Ends the wait of a request whose timeout is over."""

    def _end(self, number: int, outcome: Message | Exception) -> None:
        """Answers a request, unless it waits no longer."""
        waiting = self._waiting.pop(number, None)
        if waiting is None:
            return
        waiting.timer.cancel()
        if waiting.answer.done():
            return
        if isinstance(outcome, Exception):
            waiting.answer.set_exception(outcome)
        else:
            waiting.answer.set_result(outcome)


@final
class WaitingWorkers(_TimedRequests[ReportWorker]):
    """The workers that have reported themselves at one parameter server, and wait for a
    program to take them. ``task`` names the server in errors.

    Args:
        notify: Sends a notice to the program that has the session, if the program is
            connected.
    """

    def __init__(
        self, task: str, ownership: Ownership, notify: Callable[[Message], None]
    ) -> None:
        # Numbers begin at random, so an answer meant for the process before fits none.
        super().__init__(new_incarnation())
        self._task, self._ownership, self._notify = task, ownership, notify

    def ask(self, peer: object, message: ReportWorker) -> asyncio.Future[Message]:
        """Returns a future of the program's answer to a worker's report, or of
        DeadlineExceededError when the timeout of the worker is over.

        A peer that reports the same worker again did not get an answer, as its
        connection broke. The new report replaces the old one.

        Raises:
            BusyError: `MAX_WAITING_REPORTS` workers wait, or this peer has reported
                another worker, which is not answered yet.
        """
        # By connection and not by worker: a peer that is lost ends all that it has
        # asked.
        for number, waiting in list(self._waiting.items()):
            if waiting.peer is not peer:
                continue
            if _worker(waiting.message) != _worker(message):
                raise BusyError(
                    f"{self._task}: another worker has reported itself over this "
                    "connection, and is not answered yet: wait for the answer, or "
                    "open another connection"
                )
            self._end(number, BusyError(f"{self._task}: it was reported again"))
        # Counted after the old report of the same peer is gone.
        if len(self._waiting) >= MAX_WAITING_REPORTS:
            raise BusyError(
                f"{self._task}: {MAX_WAITING_REPORTS} workers have reported themselves "
                "and wait for the program, which is the limit: report again later, or "
                "at another parameter server"
            )
        number = self._wait(peer, message)
        self._pass_on(number)
        return self._waiting[number].answer

    def report_all(self) -> None:
        """Reports all waiting workers to the program. Called when a session is opened,
        as its program may not know them."""
        for number in self._waiting:
            self._pass_on(number)

    def answered(self, message: AnswerReport) -> None:
        """Passes the answer of the program to the worker that it is for."""
        error = message.error
        # It waits no longer if its timeout is over, or it is gone.
        self._end(message.report, message if error is None else from_wire(error))

    def _pass_on(self, number: int) -> None:
        session, message = self._ownership.session, self._waiting[number].message
        if session is not None:
            address, index = message.address, message.index
            timeout = message.timeout
            self._notify(WorkerReported(session, number, address, index, timeout))

    def _late(self, number: int) -> None:
        message, owner = self._waiting[number].message, self._ownership.owner
        words = "no program has opened a session here"
        if owner is not None and owner.alive:
            words = f"{owner} has not taken the worker"
        elif owner is not None:
            words = f"{owner}, which has opened a session here, is gone"
        within = f"within {message.timeout:g} s"
        self._end(number, DeadlineExceededError(f"{self._task}: {words} {within}"))


def _worker(message: ReportWorker) -> tuple[str, int]:
    return message.address, message.index


MAX_WAITING_REQUESTS: Final = 4096
"""The most requests to join that may wait at a time: a worker has one for some hundred
variables, and there are fewer workers."""
_NAMED: Final = 3
"""The most missing variables that an error names; it only counts the rest."""

_ORDER: Final = (
    "all programs of a cluster create the same variables and optimizers, in the same "
    "order"
)


@final
class Joining(_TimedRequests[JoinSession]):
    """Requests of workers to join the session of another program, waiting at the
    parameter server ``task`` until that program has created what they name."""

    def __init__(self, task: str, ownership: Ownership, store: Store) -> None:
        super().__init__()
        self._task, self._ownership, self._store = task, ownership, store

    def ask(
        self, peer: object, message: JoinSession
    ) -> Message | asyncio.Future[Message]:
        """Returns the answer to a request to join, or a future of it if something named
        in the request does not exist yet. The future fails with DeadlineExceededError
        when the timeout of the worker is over.

        Raises:
            StaleSessionError: Another session is open, and variables were asked for.
            InvalidArgumentError: One of the numbers belongs to something else, or the
                session cannot be joined.
            BusyError: `MAX_WAITING_REQUESTS` requests wait.
        """
        if (answer := self._answer(message)) is not None:
            return answer
        if len(self._waiting) >= MAX_WAITING_REQUESTS:
            raise BusyError(
                f"{self._task}: {MAX_WAITING_REQUESTS} workers wait for a session "
                "already"
            )
        return self._waiting[self._wait(peer, message)].answer

    def answer_ready(self) -> None:
        """Answers the waiting requests whose objects now all exist, or can no longer
        come into existence."""
        # A copy, as each one that is answered is removed.
        for number, waiting in list(self._waiting.items()):
            try:
                answer = self._answer(waiting.message)
            except ZstratError as error:  # to the worker
                self._end(number, error)
            else:
                if answer is not None:
                    self._end(number, answer)

    def _answer(self, message: JoinSession) -> Message | None:
        owner = self._ownership.owner
        # 0 asks for any session, as a program does before it has created anything.
        if owner is None or message.session not in (0, owner.session):
            if message.variables or message.optimizers:
                raise StaleSessionError(
                    f"{self._task} no longer serves session {message.session:#x}: "
                    "the program that created its variables has ended or was "
                    "restarted; connect to the cluster again"
                )
            return None
        # A program that ended left its session: the next one may be starting just now
        # (`_late`).
        if message.session == 0 and not owner.alive:
            return None
        self._require_shared(owner)
        wishes: list[Awaited | AwaitedOptimizer] = [
            *message.variables,
            *message.optimizers,
        ]
        # All are compared before any is missed: a wrong order is an error at once.
        for wish in wishes:
            self._compare(wish)
        if self._missing(message):
            return None
        return _opened(owner)

    def _missing(self, message: JoinSession) -> list[Awaited | AwaitedOptimizer]:
        store = self._store
        return [
            *(wish for wish in message.variables if wish.key not in store),
            *(w for w in message.optimizers if w.optimizer not in store.engine),
        ]

    def _compare(self, wish: Awaited | AwaitedOptimizer) -> None:
        """Compares an awaited variable or optimizer with what exists under its number.

        Raises:
            InvalidArgumentError: Something else exists under the number.
        """
        there = self._there(wish)
        if there is None or there == wish:
            return
        raise InvalidArgumentError(
            f"{self._task}: this program creates {_words(wish)} where the chief has "
            f"created {_words(there)}: {_ORDER}"
        )

    def _there(
        self, wish: Awaited | AwaitedOptimizer
    ) -> Awaited | AwaitedOptimizer | None:
        """Returns the variable or optimizer that was created under the number of an
        awaited one; None if there is none yet."""
        store = self._store
        if isinstance(wish, AwaitedOptimizer):
            if wish.optimizer not in store.engine:
                return None
            return wish._replace(name=store.engine.get(wish.optimizer).name)
        if wish.key not in store:
            return None
        (held,) = store.variables.find([wish.key])
        dtype, shape = held.cell.dtype.name, list(held.cell.shape)
        if held.table is not None:  # it has any number of rows, and each server others
            shape[:1] = wish.shape[:1]
        return Awaited(wish.key, held.entry.name, dtype, shape)

    def _late(self, number: int) -> None:
        """Answers a waiting request whose timeout is over: with an error, or with the
        session that an ended program has left.

        A worker waits for the session of a live program. If an ended program left its
        variables, the worker gets that program's session when the timeout is over, and
        not earlier: when a whole run is restarted, the chief may be the last process to
        connect.
        """
        message = self._waiting[number].message
        missing, owner = self._missing(message), self._ownership.owner
        # Nobody else has come: variables of a program that has ended are better than
        # none.
        if message.session == 0 and owner is not None:
            self._end(number, self._admitted(owner))
            return
        if not missing:
            what = "there is no session to join"
        else:
            names = ", ".join(map(_words, missing[:_NAMED]))
            more = len(missing) - _NAMED
            others = f" and {more} more" if more > 0 else ""
            gone = "" if owner is not None and owner.alive else ", which is gone,"
            what = f"the chief{gone} has not created {names}{others} yet"
        self._end(
            number,
            DeadlineExceededError(
                f"{self._task}: {what}, after {message.timeout:g} s. "
                f"Check why the chief is late; {_ORDER}, and timeouts.request is how "
                "long they wait for each other"
            ),
        )

    def _require_shared(self, owner: Owner) -> None:
        """Refuses to let a worker join a session whose program does not share its
        variables.

        Raises:
            InvalidArgumentError: The program that has opened the session assumes that
                no other program uses its variables: its checkpoints would not be
                consistent, and it would move or replace variables without notice.
        """
        if not owner.is_shared:
            raise InvalidArgumentError(
                f"{self._task}: its session belongs to {owner}, which does not share "
                "it: workers that are programs of their own (BetweenGraphStrategy) "
                "join a session that such a program has opened, its chief or worker 0. "
                "End that program first, or leave the workers to it"
            )

    def _admitted(self, owner: Owner) -> Message | ZstratError:
        try:
            self._require_shared(owner)
        except ZstratError as error:  # to the worker
            return error
        return _opened(owner)


def _opened(owner: Owner) -> SessionOpened:
    return SessionOpened("cpu", 1, resumed=True, session=owner.session)


def _words(wish: Awaited | AwaitedOptimizer) -> str:
    if isinstance(wish, AwaitedOptimizer):
        return f"optimizer {wish.name[:80]!r}"
    return f"variable {wish.name[:80]!r} ({wish.dtype:.20}{wish.shape[:32]})"
