"""Carries out who comes and who goes, while training goes on. On the loop.

`Membership` decides; this shell tells the cluster, waits where somebody is to finish
first, counts and logs. One change of a worker at a time: the next one waits.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from typing import TYPE_CHECKING, Final, Protocol, final

from zstrat.errors import BusyError, ClosedError
from zstrat.transport import check_address, check_told

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
    from collections.abc import Callable, Mapping, Sequence

    from zstrat.coordinator.connecting import TaskSession

    from ._membership import Change

log = logging.getLogger("zstrat.coordinator")


REMOVED: Final = "it was removed from the cluster by the program"
GONE: Final = "it is lost, and the resolver names it no more"


class ChangingCluster(Protocol):
    """What becomes of the workers of a session (`Cluster`)."""

    @property
    def workers(self) -> Sequence[TaskSession]:
        """By index."""
        ...

    def admit(self, index: int, number: int, address: str) -> TaskSession:
        """Begins to greet a worker, whose per-worker resources are built before its
        first closure."""
        ...

    async def part(
        self, task: TaskSession, reason: str, patience: float | None
    ) -> None:
        """Lets a worker go: what it has runs to its end, or elsewhere after
        ``patience`` seconds. None: what it has runs elsewhere, and its place is kept.
        """
        ...


@final
class Turnover:
    """The workers of one session, as they come and go.

    Args:
        drain: Seconds that a worker which the resolver takes back has to finish.
        arrival: Seconds that one which reports itself has to come, at most.
    """

    def __init__(
        self,
        cluster: ChangingCluster,
        membership: Membership,
        drain: float,
        arrival: float,
    ) -> None:
        self.membership: Final = membership
        self.counts: Final = Counter[str]()
        self.reports: Final = AnsweredReports(self)
        self._cluster, self._drain, self._arrival = cluster, drain, arrival
        self._watch: ResolverWatch | None = None
        self._lock = asyncio.Lock()
        self._following: asyncio.Task[None] | None = None
        self._answer: Mapping[int, str] | None = None
        self._refused: dict[int, str] = {}
        self._leaving: set[int] = set()

    # ---- the program's word ----------------------------------------------------------

    async def add(self, address: str, number: int | None, patience: float) -> int:
        """Takes a worker in, and waits until it is in the session; returns its number.

        Raises:
            ValueError: The address is none.
            AlreadyExistsError, InvalidArgumentError: As `Membership.add`.
            DeadlineExceededError: It did not answer within ``patience`` seconds.
            BusyError: It belongs to another coordinator, or its index is that of one
                that leaves just now.
            VersionMismatchError, PermissionDeniedError: It will never take us.

        Cancellation: it is not taken in.
        """
        check_address(address)
        deadline = asyncio.get_running_loop().time() + patience
        async with self._lock:
            wanted = self.membership.add(address, number)
            task = self._admit(wanted)
        await self._take_in(wanted, task, deadline, "the program has added it")
        return wanted.number

    async def report(self, address: str, number: int, patience: float) -> int:
        """A worker has reported itself: takes it in, and waits until it is in the
        session; returns its number. One that asks for a number, by -1, is told it.

        Raises:
            PermissionDeniedError: The program has removed it.
            BusyError: It is let go just now.
            Others: As `add`.

        Cancellation: it is not taken in, unless it was there before.
        """
        check_told(address)
        deadline = asyncio.get_running_loop().time() + min(patience, self._arrival)
        async with self._lock:
            if number < 0:
                return self.membership.promise(address)
            wanted = self.membership.reported(address, number)
            if isinstance(wanted, int):
                task = self._cluster.workers[wanted]
            else:
                task = self._admit(wanted)
        try:
            if isinstance(wanted, int):
                await task.wait_ready(deadline)
            else:
                await self._take_in(wanted, task, deadline, "it has reported itself")
        except ClosedError:
            raise BusyError(
                f"worker {number} at {address} is let go just now: report again"
            ) from None
        return number

    async def remove(self, address: str, patience: float) -> None:
        """Lets a worker go, and waits until it has.

        Raises:
            NotFoundError: There is none of that address.

        Cancellation: it goes all the same; what it has runs elsewhere.
        """
        async with self._lock:
            gone = self.membership.remove(address)
            task = self._cluster.workers[gone.index]
        self.counts["removed"] += 1
        log.info("%s at %s leaves: %s", task.name, address, REMOVED)
        try:
            await self._part(task, REMOVED, patience)
        except asyncio.CancelledError:
            await self._part(task, REMOVED, 0.0)
            raise

    # ---- the resolver's word ---------------------------------------------------------

    def watch(self, ask: Callable[[], Mapping[int, str]], every: float) -> None:
        """From now on the resolver is asked again."""
        self._watch = ResolverWatch(ask, every, self._answered)
        self._watch.start()

    def lost(self) -> None:
        """A worker was lost: the resolver may know where it is now."""
        if self._watch is not None:
            self._watch.soon()

    async def stop(self) -> None:
        """Nobody comes or goes any more."""
        await self.reports.stop()
        if self._watch is not None:
            self._watch.stop()
        if self._following is not None:
            self._following.cancel()
            await asyncio.wait([self._following])

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

    # ---- private ---------------------------------------------------------------------

    def _answered(self, workers: Mapping[int, str]) -> None:
        self._answer = workers
        if self._following is None:
            loop = asyncio.get_running_loop()
            self._following = loop.create_task(self._follow(), name="resolver's answer")
            self._following.add_done_callback(self._followed)

    def _followed(self, following: asyncio.Task[None]) -> None:
        self._following = None
        if not following.cancelled() and (error := following.exception()) is not None:
            log.error("following the resolver's answer: %s", error, exc_info=error)

    async def _follow(self) -> None:
        while (answer := self._answer) is not None:
            self._answer = None
            async with self._lock:
                lost = {task.index for task in self._cluster.workers if task.is_lost}
                changes = self.membership.resolved(answer, lost)
                self._refused = {
                    number: words
                    for number, words in self._refused.items()
                    if number in answer
                }
                for change in changes:
                    await self._carry_out(change)

    async def _carry_out(self, change: Change) -> None:
        match change:
            case AdmitWorker(index, number, address):
                self._cluster.admit(index, number, address)
                self._came(change, "the resolver names it")
            case MoveWorker(index, number, address):
                before = self._cluster.workers[index]
                words = f"the resolver names it at {address} now"
                await self._cluster.part(before, words, None)
                self._cluster.admit(index, number, address)
                self.counts["moved"] += 1
                log.warning(
                    "%s moves from %s to %s", before.name, before.address, address
                )
            case ReleaseWorker(index):
                task = self._cluster.workers[index]
                self.counts["removed"] += 1
                log.warning("%s at %s is let go: %s", task.name, task.address, GONE)
                await self._part(task, GONE, self._drain)
            case RefuseWorker(number, words):
                if self._refused.get(number) != words:
                    log.warning("%s", words)
                self._refused[number] = words

    def _admit(self, wanted: AdmitWorker) -> TaskSession:
        if wanted.index in self._leaving:
            self.membership.withdraw(wanted.index)
            raise BusyError(
                f"worker {wanted.number} is leaving just now: add one in its place "
                "when remove() has returned"
            )
        return self._cluster.admit(wanted.index, wanted.number, wanted.address)

    async def _take_in(
        self, wanted: AdmitWorker, task: TaskSession, deadline: float, why: str
    ) -> None:
        """Waits until a worker that was admitted is in the session, or lets it go."""
        try:
            await task.wait_ready(deadline)
        except BaseException:  # to the caller, who has no such worker
            self.membership.withdraw(wanted.index)
            await self._part(task, "it did not come", 0.0)
            raise
        self._came(wanted, why)

    async def _part(self, task: TaskSession, reason: str, patience: float) -> None:
        self._leaving.add(task.index)
        try:
            await self._cluster.part(task, reason, patience)
        finally:
            self._leaving.discard(task.index)

    def _came(self, admitted: AdmitWorker, why: str) -> None:
        self.membership.came(admitted.index)
        self.counts["added"] += 1
        log.info("worker %d at %s: %s", admitted.number, admitted.address, why)
