"""Workers of a session that come and go while it trains. On the loop.

`Membership` decides; here it is carried out. `WorkerSessions` opens and closes the
sessions on workers: one that was let go keeps its place in the list, closed, and a
newcomer that takes its place replaces it there. `Turnover` waits for workers that are
to finish first, counts and logs. Laws of the file: one change of a worker at a time,
the next one waits; only this file changes the list of workers.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from typing import TYPE_CHECKING, Final, final

from zstrat.errors import BusyError, ClosedError
from zstrat.transport import check_address, check_reachable

from ._membership import (
    AdmitWorker,
    Membership,
    MoveWorker,
    RefuseWorker,
    ReleaseWorker,
)
from ._reports import AnsweredReports
from ._resolver_watch import ResolverWatch

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from zstrat.coordinator._dispatch import Dispatcher
    from zstrat.coordinator.connecting import TaskSession

    from ._membership import Change


log = logging.getLogger("zstrat.coordinator")


REMOVED: Final = "it was removed from the cluster by the program"
GONE: Final = "it is lost, and the resolver names it no more"


GOODBYE_SECONDS: Final = 2.0
"""For a worker that is let go to hear that its session is over."""


@final
class WorkerSessions:
    """Our sessions on the workers of one cluster. On the loop.

    Args:
        make: Makes one by task number, place and address; it is not started yet.
    """

    def __init__(
        self, tasks: list[TaskSession], make: Callable[[int, int, str], TaskSession]
    ) -> None:
        self.tasks: Final = tasks
        """By place; the sessions on workers that were let go are closed, and stay."""
        self.dispatcher: Dispatcher | None = None
        """Told of newcomers, and of workers that go."""
        self._make = make
        self._is_closing = False

    def attach(self, dispatcher: Dispatcher) -> None:
        """From now on this dispatcher gives closures to the workers."""
        self.dispatcher = dispatcher
        for task in self.tasks:
            if not task.is_closed:
                dispatcher.admit(task)

    def admit(self, place: int, task_number: int, address: str) -> TaskSession:
        """Begins to greet a worker, whose per-worker resources are built before its
        first closure."""
        task = self._make(task_number, place, address)
        self.tasks[place : place + 1] = [task]
        if self.dispatcher is not None:
            self.dispatcher.admit(task)
        if not self._is_closing:
            task.start()
        return task

    async def release(
        self, task: TaskSession, reason: str, timeout: float | None
    ) -> None:
        """Lets a worker go: what it has runs to its end there, or on another worker
        after ``timeout`` seconds. None: what it has runs on another worker at once,
        and its place is kept.

        Cancellation: nothing is given to it any more.
        """
        if task.is_closed:
            return
        if self.dispatcher is not None:
            if timeout is not None:
                await self.dispatcher.retire_worker(task, reason, timeout)
            # It is not lost: nothing that it ran is suspected of having killed it.
            task.lives_on = task.is_moved = True
            self.dispatcher.remove_worker(task, reason, for_good=timeout is not None)
        if task.is_ready and timeout is not None:
            answer = task.say_goodbye(GOODBYE_SECONDS)
            task.leave()  # before it ends: that is no loss
            await asyncio.wait([answer])
        await task.close()

    def stop_starting(self) -> None:
        """The session is being closed: a newcomer is not greeted any more."""
        self._is_closing = True


@final
class Turnover:
    """The workers of one session, as they come and go.

    Args:
        drain: Seconds that a worker which the resolver takes back has to finish.
        arrival: Seconds that one which reports itself has to come, at most.
    """

    def __init__(
        self,
        sessions: WorkerSessions,
        membership: Membership,
        drain: float,
        arrival: float,
    ) -> None:
        self.membership: Final = membership
        self.counts: Final = Counter[str]()
        self.reports: Final = AnsweredReports(self.report)
        self._sessions, self._drain, self._arrival = sessions, drain, arrival
        self._watch: ResolverWatch | None = None
        self._lock = asyncio.Lock()
        self._applying: asyncio.Task[None] | None = None
        self._expelling: set[asyncio.Task[None]] = set()
        self._answer: Mapping[int, str] | None = None
        self._refused: dict[int, str] = {}
        self._leaving: dict[int, asyncio.Event] = {}
        """By place; set when whoever leaves it has gone."""

    async def add(self, address: str, task_number: int | None, timeout: float) -> int:
        """Takes a worker in, and waits until it is in the session; returns its number.

        Raises:
            ValueError: The address is none.
            AlreadyExistsError, InvalidArgumentError: As `Membership.add`.
            DeadlineExceededError: It did not answer within ``timeout`` seconds.
            BusyError: It belongs to another coordinator, or its place is that of one
                that has not left within ``timeout`` seconds.
            VersionMismatchError, PermissionDeniedError: It will never take us.

        Cancellation: it is not taken in.
        """
        check_address(address)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        while True:
            async with self._lock:
                wanted = self.membership.add(address, task_number)
                gone = self._leaving.get(wanted.place)
                if gone is None or loop.time() >= deadline:
                    task = self._admit(wanted)
                    break
                self.membership.withdraw(wanted.place)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(deadline):
                    await gone.wait()
        await self._take_in(wanted, task, deadline, "the program has added it")
        return wanted.task_number

    async def report(self, address: str, task_number: int, timeout: float) -> int:
        """A worker has reported itself: takes it in, and waits until it is in the
        session; returns its number. One that asks for a number, by -1, is told it.

        Raises:
            PermissionDeniedError: The program has removed it.
            BusyError: It is let go just now.
            Others: As `add`.

        Cancellation: it is not taken in, unless it was there before.
        """
        check_reachable(address)
        deadline = asyncio.get_running_loop().time() + min(timeout, self._arrival)
        async with self._lock:
            if task_number < 0:
                return self.membership.promise(address)
            wanted = self.membership.reported(address, task_number)
            if isinstance(wanted, int):
                task = self._sessions.tasks[wanted]
            else:
                task = self._admit(wanted)
        try:
            if isinstance(wanted, int):
                await task.wait_ready(deadline)
            else:
                await self._take_in(wanted, task, deadline, "it has reported itself")
        except ClosedError:
            raise BusyError(
                f"worker {task_number} at {address} is let go just now: report again"
            ) from None
        return task_number

    async def remove(self, address: str, timeout: float) -> None:
        """Lets a worker go, and waits until it has.

        Raises:
            NotFoundError: There is none of that address.

        Cancellation: it goes all the same; what it has runs elsewhere.
        """
        async with self._lock:
            gone = self.membership.remove(address)
            task = self._sessions.tasks[gone.place]
        self.counts["removed"] += 1
        log.info("%s at %s leaves: %s", task.name, address, REMOVED)
        try:
            await self._release(task, REMOVED, timeout)
        except asyncio.CancelledError:
            # The membership has it no more: others run what it has.
            await self._release(task, REMOVED, 0.0)
            raise

    def expel(self, address: str) -> None:
        """Lets a worker go, if there is one of that address; waits for nothing."""
        if address in self.membership.addresses.values():
            work = self.remove(address, 0.0)
            expelling = asyncio.get_running_loop().create_task(work, name="expelling")
            self._expelling.add(expelling)
            expelling.add_done_callback(self._expelled)

    def _expelled(self, expelling: asyncio.Task[None]) -> None:
        self._expelling.discard(expelling)
        if not expelling.cancelled() and (error := expelling.exception()) is not None:
            log.info("%s", error)  # somebody else has removed it meanwhile

    def watch(self, ask: Callable[[], Mapping[int, str]], every: float) -> None:
        """From now on the resolver is asked again."""
        self._watch = ResolverWatch(ask, every, self._answered)
        self._watch.start()

    def worker_lost(self) -> None:
        """A worker was lost: the resolver may know where it is now."""
        if self._watch is not None:
            self._watch.soon()

    async def stop(self) -> None:
        """Takes no worker in any more, and lets none go."""
        await self.reports.stop()
        if self._watch is not None:
            self._watch.stop()
        under_way = [*self._expelling]
        if self._applying is not None:
            under_way.append(self._applying)
        for task in under_way:
            task.cancel()
        if under_way:
            await asyncio.wait(under_way)

    @property
    def metrics(self) -> dict[str, int]:
        """How many came and went, and how often the resolver was asked."""
        told = {
            f"workers_{word}": self.counts[word]
            for word in ("added", "moved", "removed")
        }
        watch = self._watch
        told["resolver_questions"] = 0 if watch is None else watch.questions
        told["resolver_errors"] = 0 if watch is None else watch.errors
        return told

    def _answered(self, workers: Mapping[int, str]) -> None:
        self._answer = workers
        if self._applying is None:
            loop = asyncio.get_running_loop()
            self._applying = loop.create_task(
                self._apply_answers(), name="resolver's answer"
            )
            self._applying.add_done_callback(self._applied)

    def _applied(self, applying: asyncio.Task[None]) -> None:
        self._applying = None
        if not applying.cancelled() and (error := applying.exception()) is not None:
            log.error("following the resolver's answer: %s", error, exc_info=error)

    async def _apply_answers(self) -> None:
        # Only the newest: it has replaced those that came while others were followed.
        while (answer := self._answer) is not None:
            self._answer = None
            async with self._lock:
                lost = {task.place for task in self._sessions.tasks if task.is_lost}
                changes = self.membership.resolved(answer, lost)
                self._refused = {
                    task_number: words
                    for task_number, words in self._refused.items()
                    if task_number in answer
                }
                for change in changes:
                    await self._carry_out(change)

    async def _carry_out(self, change: Change) -> None:
        match change:
            case AdmitWorker(place, task_number, address):
                self._sessions.admit(place, task_number, address)
                self._came(change, "the resolver names it")
            case MoveWorker(place, task_number, address):
                before = self._sessions.tasks[place]
                words = f"the resolver names it at {address} now"
                await self._sessions.release(before, words, None)
                self._sessions.admit(place, task_number, address)
                self.counts["moved"] += 1
                log.warning(
                    "%s moves from %s to %s", before.name, before.address, address
                )
            case ReleaseWorker(place):
                task = self._sessions.tasks[place]
                self.counts["removed"] += 1
                log.warning("%s at %s is let go: %s", task.name, task.address, GONE)
                await self._release(task, GONE, self._drain)
            case RefuseWorker(task_number, words):
                # A resolver says the same again and again: it is logged once.
                if self._refused.get(task_number) != words:
                    log.warning("%s", words)
                self._refused[task_number] = words

    def _admit(self, wanted: AdmitWorker) -> TaskSession:
        if wanted.place in self._leaving:
            self.membership.withdraw(wanted.place)
            raise BusyError(
                f"worker {wanted.task_number} is leaving just now: add one in its "
                "place when remove() has returned"
            )
        return self._sessions.admit(wanted.place, wanted.task_number, wanted.address)

    async def _take_in(
        self, wanted: AdmitWorker, task: TaskSession, deadline: float, why: str
    ) -> None:
        """Waits until a worker that was admitted is in the session, or lets it go."""
        try:
            await task.wait_ready(deadline)
        except BaseException:  # to the caller, who has no such worker
            self.membership.withdraw(wanted.place)
            await self._release(task, "it did not come", 0.0)
            raise
        self._came(wanted, why)

    async def _release(self, task: TaskSession, reason: str, timeout: float) -> None:
        gone = self._leaving[task.place] = asyncio.Event()
        try:
            await self._sessions.release(task, reason, timeout)
        finally:
            self._leaving.pop(task.place, None)
            gone.set()

    def _came(self, admitted: AdmitWorker, why: str) -> None:
        self.membership.came(admitted.place)
        self.counts["added"] += 1
        log.info("worker %d at %s: %s", admitted.task_number, admitted.address, why)
