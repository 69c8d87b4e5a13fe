"""Adds and removes the workers of a session while it trains. On the loop.

`Membership` decides, and `Turnover` carries its decisions out: opens and closes the
sessions on workers, waits for workers that have to finish first, counts, and logs. The
closed session of a removed worker stays in the list, until a new worker gets its index.

Laws of this file: workers change one at a time, and the next change waits; only this
file changes the list of workers.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from functools import partial
from typing import TYPE_CHECKING, Final, final

from zstrat.coordinator.connecting import log_failure
from zstrat.errors import BusyError, ClosedError
from zstrat.transport import check_address, check_reachable

from ._discovery import ReportedWorkers, ResolverWatch
from ._membership import (
    AdmitWorker,
    Membership,
    MoveWorker,
    RefuseWorker,
    ReleaseWorker,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from zstrat.config import Timeouts
    from zstrat.coordinator._dispatch import Dispatcher
    from zstrat.coordinator.connecting import TaskSession

    from ._membership import Change


log = logging.getLogger("zstrat.coordinator")


REMOVED: Final = "the program removed it from the cluster"
GONE: Final = "it is lost, and the resolver no longer names it"


CLOSE_SECONDS: Final = 2.0
"""Seconds for a removed worker to answer that it closed its session."""


@final
class Turnover:
    """Adds and removes the workers of one session.

    Args:
        tasks: The sessions, by index of the worker; those of removed workers are
            closed, and stay.
        make: Makes a session from task number, index and address, without starting it.
    """

    def __init__(
        self,
        tasks: list[TaskSession],
        make: Callable[[int, int, str], TaskSession],
        membership: Membership,
        timeouts: Timeouts,
    ) -> None:
        self.membership: Final = membership
        self._tasks, self._make, self._timeouts = tasks, make, timeouts
        self._dispatcher: Dispatcher | None = None
        """The dispatcher, to which workers that join are given; None without a
        coordinator."""
        self._is_closing = False
        self.counts: Final = Counter[str]()
        self.reported: Final = ReportedWorkers(self.join_reported)
        self._watch: ResolverWatch | None = None
        self._lock = asyncio.Lock()
        self._applying: asyncio.Task[None] | None = None
        self._removals: set[asyncio.Task[None]] = set()
        self._answer: Mapping[int, str] | None = None
        self._refused: dict[int, str] = {}
        self._leaving: dict[int, asyncio.Event] = {}
        """By index of a worker that is leaving: an event, set when the worker has
        left."""

    def attach(self, dispatcher: Dispatcher) -> None:
        """Gives all workers, and from now on those that join, to a dispatcher."""
        self._dispatcher = dispatcher
        for task in self._tasks:
            if not task.is_closed:
                dispatcher.admit(task)

    def stop_starting(self) -> None:
        """Starts no more sessions on workers, as the program's session is being
        closed."""
        self._is_closing = True

    async def add(self, address: str, task_number: int | None, timeout: float) -> int:
        """Adds a worker, and waits until the worker has joined; returns its number.

        Raises:
            ValueError: The address is malformed.
            AlreadyExistsError, InvalidArgumentError: See `Membership.add`.
            DeadlineExceededError: The worker did not answer within ``timeout`` seconds.
            BusyError: The worker belongs to another coordinator, or the worker that had
                its index has not left within ``timeout`` seconds.
            VersionMismatchError, PermissionDeniedError: The worker refuses this
                program.

        Cancellation: the worker is not added.
        """
        check_address(address)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        while True:
            async with self._lock:
                wanted = self.membership.add(address, task_number)
                # The place is its former worker's until that has left: both sessions
                # would have it.
                left = self._leaving.get(wanted.place)
                if left is None or loop.time() >= deadline:
                    task = self._admit(wanted)
                    break
                self.membership.withdraw(wanted.place)
            with contextlib.suppress(TimeoutError):
                # Without the lock, so that other changes go first. The worker is added
                # again after it.
                async with asyncio.timeout_at(deadline):
                    await left.wait()
        await self._wait_joined(wanted, task, deadline, "the program added it")
        return wanted.task_number

    async def join_reported(
        self, address: str, task_number: int, timeout: float
    ) -> int:
        """Adds a worker that reported itself, and waits until the worker has joined;
        returns its number. For the number -1 only chooses a number, with which the
        worker reports itself next.

        Raises:
            PermissionDeniedError: The program removed the worker.
            BusyError: The worker is being removed.
            Others: See `add`.

        Cancellation: the worker is not added, unless it had joined before.
        """
        check_reachable(address)
        timeout = min(timeout, self._timeouts.connect)
        deadline = asyncio.get_running_loop().time() + timeout
        async with self._lock:
            # No session is begun: the daemon reports again, with the number.
            if task_number < 0:
                return self.membership.promise(address)
            wanted = self.membership.reported(address, task_number)
            if isinstance(wanted, int):
                # It is present already: it had joined, or an earlier report of it is
                # being answered.
                task = self._tasks[wanted]
            else:
                task = self._admit(wanted)
        try:
            if isinstance(wanted, int):
                await task.wait_ready(deadline)
            else:
                await self._wait_joined(wanted, task, deadline, "it reported itself")
        except ClosedError:
            raise BusyError(
                f"worker {task_number} at {address} is being removed; report again"
            ) from None
        return task_number

    async def remove(self, address: str, timeout: float) -> None:
        """Removes a worker, and waits until the worker has left.

        Raises:
            NotFoundError: No worker has that address.

        Cancellation: the worker leaves all the same; others run its closures.
        """
        async with self._lock:
            released = self.membership.remove(address)
            task = self._tasks[released.place]
        self.counts["removed"] += 1
        # Outside of the lock: it may run closures for minutes, and others join
        # meanwhile.
        log.info("%s at %s leaves: %s", task.name, address, REMOVED)
        try:
            await self._release(task, REMOVED, timeout)
        except asyncio.CancelledError:
            # It is no longer a member, so others run its closures.
            await self._release(task, REMOVED, 0.0)
            raise

    def remove_soon(self, address: str) -> None:
        """Starts to remove the worker at the address, if there is one."""
        if address in self.membership.addresses.values():
            work = self.remove(address, 0.0)
            removal = asyncio.get_running_loop().create_task(work, name="removal")
            self._removals.add(removal)
            removal.add_done_callback(self._removals.discard)
            # It may be removed meanwhile.
            removal.add_done_callback(partial(log_failure, "removing a worker"))

    def watch(self, ask: Callable[[], Mapping[int, str]], every: float) -> None:
        """Starts to call ``ask``, the resolver, every ``every`` seconds."""
        self._watch = ResolverWatch(ask, every, self._answered)
        self._watch.start()

    def worker_lost(self) -> None:
        """Asks the resolver for the present address of a lost worker."""
        if self._watch is not None:
            self._watch.soon()

    async def stop(self) -> None:
        """Stops adding and removing workers."""
        # First, as it adds workers.
        await self.reported.stop()
        if self._watch is not None:
            self._watch.stop()
        under_way = [*self._removals]
        if self._applying is not None:
            under_way.append(self._applying)
        for task in under_way:
            task.cancel()
        if under_way:
            await asyncio.wait(under_way)

    @property
    def metrics(self) -> dict[str, int]:
        """Numbers of workers added, moved and removed, and of questions to the
        resolver."""
        metrics = {
            f"workers_{word}": self.counts[word]
            for word in ("added", "moved", "removed")
        }
        watch = self._watch
        metrics["resolver_questions"] = 0 if watch is None else watch.questions
        metrics["resolver_errors"] = 0 if watch is None else watch.errors
        return metrics

    def _answered(self, workers: Mapping[int, str]) -> None:
        # Kept even if one is being applied, which looks for a newer one at its end.
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
            log.error("applying the resolver's answer: %s", error, exc_info=error)

    async def _apply_answers(self) -> None:
        # Only the newest: older ones are outdated.
        while (answer := self._answer) is not None:
            self._answer = None
            async with self._lock:
                # With the lock, and without an await before the decision: who is lost
                # has to be true when it is applied.
                lost = {task.place for task in self._tasks if task.is_lost}
                changes = self.membership.resolved(answer, lost)
                # Forgotten if it is no longer named: it is logged again when it
                # returns.
                self._refused = {
                    task_number: reason
                    for task_number, reason in self._refused.items()
                    if task_number in answer
                }
                for change in changes:
                    await self._apply(change)

    async def _apply(self, change: Change) -> None:
        match change:
            case AdmitWorker(place, task_number, address):
                self._start(place, task_number, address)
                self._joined(change, "the resolver names it")
            case MoveWorker(place, task_number, address):
                old = self._tasks[place]
                reason = f"the resolver names it at {address} now"
                # None: its place stays, with its resources, for the process at the new
                # address.
                await self._end(old, reason, None)
                self._start(place, task_number, address)
                self.counts["moved"] += 1
                log.warning("%s moves from %s to %s", old.name, old.address, address)
            case ReleaseWorker(place):
                task = self._tasks[place]
                self.counts["removed"] += 1
                log.warning("%s at %s is removed: %s", task.name, task.address, GONE)
                await self._release(task, GONE, self._timeouts.drain)
            case RefuseWorker(task_number, reason):
                # A resolver repeats itself; log what it says once.
                if self._refused.get(task_number) != reason:
                    log.warning("%s", reason)
                self._refused[task_number] = reason

    def _admit(self, wanted: AdmitWorker) -> TaskSession:
        # `Membership` knows nothing of sessions: for it the removed worker has left.
        if wanted.place in self._leaving:
            self.membership.withdraw(wanted.place)
            raise BusyError(
                f"worker {wanted.task_number} is being removed; add another in its "
                "place after remove() has returned"
            )
        return self._start(wanted.place, wanted.task_number, wanted.address)

    def _start(self, place: int, task_number: int, address: str) -> TaskSession:
        """Starts a session on a worker. Its per-worker resources are built before its
        first closure."""
        task = self._make(task_number, place, address)
        self._tasks[place : place + 1] = [task]
        if self._dispatcher is not None:
            self._dispatcher.admit(task)
        # While the session is closed it may be listed, but must not connect: nobody
        # would close its link.
        if not self._is_closing:
            task.start()
        return task

    async def _wait_joined(
        self, wanted: AdmitWorker, task: TaskSession, deadline: float, why: str
    ) -> None:
        """Waits until a new worker has joined; removes the worker if it does not join
        in time."""
        try:
            await task.wait_ready(deadline)
        except BaseException:  # to the caller
            self.membership.withdraw(wanted.place)
            await self._release(task, "it did not join", 0.0)
            raise
        self._joined(wanted, why)

    async def _release(self, task: TaskSession, reason: str, timeout: float) -> None:
        left = self._leaving[task.place] = asyncio.Event()
        try:
            await self._end(task, reason, timeout)
        finally:
            # Also after an error: who waits for the place must not wait longer.
            self._leaving.pop(task.place, None)
            left.set()

    async def _end(self, task: TaskSession, reason: str, timeout: float | None) -> None:
        """Ends the session on a worker.

        Args:
            timeout: Seconds for the closures that the worker runs; other workers run
                those that are left then. None: other workers run them at once, and the
                index of the worker stays, for a process at another address.

        Cancellation: the worker gets no more closures.
        """
        if task.is_closed:
            return
        if self._dispatcher is not None:
            if timeout is not None:
                # Before `remove_worker`, which gives its closures to others: those that
                # it runs are to end there.
                await self._dispatcher.retire_worker(task, reason, timeout)
            # It is not lost, so none of its closures is suspected of having killed it.
            task.release()
            self._dispatcher.remove_worker(task, reason, for_good=timeout is not None)
        if task.is_ready and timeout is not None:
            answer = task.close_session(CLOSE_SECONDS)
            task.leave()  # before it closes, which would count as a loss
            await asyncio.wait([answer])
        await task.close()

    def _joined(self, admitted: AdmitWorker, why: str) -> None:
        self.membership.joined(admitted.place)
        self.counts["added"] += 1
        log.info("worker %d at %s: %s", admitted.task_number, admitted.address, why)
