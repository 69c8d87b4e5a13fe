"""Keeps a second copy of each store, continues with it when the first is lost, and
moves stores on purpose.

`StorePlacement` decides, and `StoreOrders` carries out. Each process has a session of
its own for as long as the program's lasts, whichever stores it serves. On the loop
thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, Final, TypeVar, final

from zstrat.coordinator.connecting import ProbedTask, TaskSession, arrive
from zstrat.errors import (
    DeadlineExceededError,
    NotPrimaryError,
    PSUnavailableError,
    UnavailableError,
    ZstratError,
)
from zstrat.wire import (
    BackupLost,
    CloseSession,
    Message,
    OpenSession,
    Telemetry,
    WorkerReported,
)

from ._orders import CopyPhase
from ._orphaned_stores import OrphanedStores
from ._placement import StorePlacement
from ._store_orders import StoreOrders
from ._store_processes import StoreProcesses

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from zstrat.config import Timeouts
    from zstrat.coordinator.connecting import ClusterTasks
    from zstrat.transport import MakeTaskLink

    from ._successors import Successor

log = logging.getLogger("zstrat.coordinator")

T = TypeVar("T")


@final
class Replication:
    """Keeps and moves the stores of one session. On the loop.

    Args:
        addresses: Of the processes, in task order, each with a store at first.
        replicas: Second copies that each store is to have: 0, then there are some only
            while stores move.
        stores_per_ps: Stores of each process.
        name: What the session is called.
    """

    def __init__(
        self,
        cluster: ClusterTasks,
        session: int,
        addresses: Sequence[str],
        timeouts: Timeouts,
        make_link: MakeTaskLink,
        replicas: int = 1,
        stores_per_ps: int = 1,
        name: str = "",
    ) -> None:
        self.placement: Final = StorePlacement(addresses, replicas, stores_per_ps)
        self.replicas: Final = replicas
        self._cluster, self._make_link = cluster, make_link
        self._takes_over = False
        opening = OpenSession(session, 0, 0, [], name=name, replicas=replicas)
        self._known: Final = StoreProcesses(self, opening, timeouts, make_link)
        for number, address in enumerate(addresses):
            self._known.add(number, number, address)
        self._orders: Final = StoreOrders(
            cluster, session, self.placement, self._known, timeouts, make_link
        )
        self.status: Final = self._orders.status
        self.wait_until: Final = self._orders.wait_until
        self.orphans: Final = OrphanedStores(
            self._orders, name, timeouts, self.take_over_stores
        )
        """What another program has left under the name."""
        self.is_started = False
        self._is_renewed = False
        """Stores are being filled: `start` follows."""

    @property
    def processes(self) -> list[TaskSession]:
        """The sessions with the processes, by index; those of processes that were let
        go are closed, and stay."""
        return self._known.sessions

    def start(self) -> None:
        """All stores are served where they belong: each is to get a second copy. Does
        nothing if that was said since the last `renew`: some may have moved."""
        if self.is_started:
            return
        self.is_started, self._is_renewed = True, False
        self._orders.carry_out(self.placement.start())

    async def take_over(self, deadline: float) -> int | None:
        """Goes on with the copies that another program has left under the name of the
        session. Two that are a pair stay one: when both have said so, either may be
        lost. Comes before `open`.

        Returns:
            What keys are counted from; None if nothing is there.

        Raises:
            PSUnavailableError: Of a store no copy is left that has all.
            ZstratError: As of `arrive`.
        """
        self._takes_over = True
        await arrive(self.processes, (), deadline)
        successors = await self.orphans.find(deadline)
        if successors:
            await self.orphans.go_on(successors, deadline)
            return self.orphans.origin
        await self.orphans.keep_origin(self._orders.session, deadline)
        self._takes_over = False
        await self.create_stores(deadline)
        return None

    def keep_origin(self, origin: int) -> None:
        """What keys are counted from, for all processes, also those that come later."""
        self._known.keep_origin(origin)

    async def create_stores(self, deadline: float) -> None:
        """Takes all processes, and has them make the stores that they do not have by
        themselves. Comes before `open`.

        Raises:
            UnavailableError: A process does not; says why.
            ZstratError: As of `arrive`.
        """
        await arrive(self.processes, (), deadline)
        self._orders.carry_out(self.placement.create_stores())
        try:
            async with asyncio.timeout_at(deadline):
                await self.wait_until(lambda: not self.placement.is_creating)
        except TimeoutError:
            raise DeadlineExceededError(
                "stores_per_ps: not each parameter server has made its stores in time; "
                "look at their logs"
            ) from None
        for store in self.placement.stores:
            if store.phase is CopyPhase.EMPTY:
                raise UnavailableError(
                    f"{self.processes[store.home].name} serves no other store than its "
                    f"own: {store.reason}"
                )

    async def open(self, deadline: float) -> None:
        """Takes all processes, and waits until each store has the copies that it is to
        have. It is not started if stores began anew meanwhile (`renew`), and are not
        filled yet.

        Raises:
            DeadlineExceededError: One has none at ``deadline`` (loop time).
            BusyError, VersionMismatchError, PermissionDeniedError: As a process says.

        Cancellation: it may be called again.
        """
        self._known.start()
        await self._known.wait_ready(deadline)
        if self._is_renewed:
            return
        self.start()
        await self.wait_whole(deadline)

    async def wait_whole(self, deadline: float) -> None:
        """Waits until each store has a second copy, if it is to have one.

        Raises:
            DeadlineExceededError: One has none at ``deadline`` (loop time).

        Cancellation: nothing is lost.
        """
        if not self.replicas:
            return
        try:
            async with asyncio.timeout_at(deadline):
                await self.wait_until(lambda: not self.placement.without_backup)
        except TimeoutError:
            raise DeadlineExceededError(
                f"replicas=1, but not each parameter server has a backup in time: "
                f"{self.status.words()}; look at the logs of the parameter servers"
            ) from None

    def enter(self, number: int, address: str) -> TaskSession:
        """Begins to greet another process, which has no store yet."""
        index = self.placement.enter(address)
        return self._known.enter(number, index, address)

    async def dismiss(self, process: TaskSession, timeout: float) -> None:
        """Leaves a process that has nothing of any store. Its daemon serves whoever
        comes next.

        Cancellation: it is left all the same, and does not say whether it heard so.
        """
        self.placement.set_leaving(process.place, True)
        self.process_lost(process, "it was let go")
        self.placement.abandon(process.place)
        await self._known.leave(process, timeout)

    def spare(self, index: int, is_leaving: bool) -> None:
        """The process gets no copies any more, or may get some again."""
        self.placement.set_leaving(index, is_leaving)
        if not is_leaving:
            self._orders.carry_out(self.placement.forgive())

    async def move(self, store: int, target: int) -> None:
        """Has another process serve the store, and waits until it does; returns when it
        does, or it is clear that the store stays where it is.

        Cancellation: it stays there, if that was not said already.
        """
        place = self.placement.stores[store]
        self._orders.carry_out(self.placement.move(store, target))
        try:
            await self.wait_until(
                lambda: place.target is None or place.is_reported_lost
            )
        finally:
            self._orders.carry_out(
                self.placement.cancel_move(store, "it is not to move any more")
            )

    def evict(self, store: int) -> None:
        """Has the backup of the store be in another process than now."""
        self._orders.carry_out(self.placement.evict(store))

    def keeps(self, store: int) -> bool:
        """Whether it decides what becomes of the store if that is lost."""
        return self.is_started and self.placement.has_or_wants_backup(store)

    def renew(self, session: int, close_messages: Sequence[CloseSession]) -> None:
        """All stores begin anew where they belong, in another session; `start` follows
        when they are filled."""
        self._orders.session = session
        self._stop()
        self._is_renewed = True
        self.placement.enter_session()
        for store in self.placement.stores:
            self._orders.send_home(store)
        self._known.renew(session, close_messages)
        self._orders.carry_out(self.placement.create_stores())

    def home_of(self, store: int) -> str:
        """The address where it begins anew, or of the process that hosts it there."""
        return self._known.addresses[self.placement.stores[store].home]

    async def stop(self) -> None:
        """Decides nothing any more. The processes are left by whoever leaves all tasks.

        Cancellation: as without.
        """
        self._stop()
        await self._orders.wait_ended()

    async def through(
        self, work: Callable[[], Awaitable[T]], *, again: bool = True
    ) -> T:
        """Carries a request out, and once more if it failed because another copy took a
        server's place.

        Args:
            again: It may be made twice.
        """
        while True:
            before = self.takeovers
            try:
                return await work()
            except ZstratError as error:
                if not again or not await self.settled(before, error):
                    raise

    async def settled(self, since: int, error: ZstratError) -> bool:
        """Waits until each store has a known server. Returns True if it had to wait, if
        `takeovers` is not ``since``, or if the error says that the process which was
        asked does not serve the store now."""
        if self._cluster.outage_error is not None:
            return False
        lines = self._cluster.client.lines
        waited = any(line.is_held or line.peer is None for line in lines)
        # A process that ends may have answered before, and be asked again since then.
        waited |= isinstance(error, NotPrimaryError | PSUnavailableError)
        if waited:
            # The lines have them wait until that is known.
            with contextlib.suppress(ZstratError):
                await self._cluster.client.statistics()
        return waited or self.takeovers != since

    def backups(self) -> list[ProbedTask]:
        """A way to each backup that has all, not used yet."""
        return [
            ProbedTask(
                "ps",
                store.number,
                copy.address,
                self._make_link,
                f"{self._cluster.ps[store.number].name} backup",
                copy.incarnation,
            )
            for store in self.placement.stores
            if store.is_paired and (copy := store.backup) is not None
        ]

    @property
    def takeovers(self) -> int:
        """How often a backup became primary, whyever."""
        return self.placement.failovers + self.placement.moves

    def task_ready(self, task: TaskSession) -> None:
        self._orders.carry_out(
            self.placement.joined(task.place, self._known.lives[task.place])
        )

    def task_lost(self, task: TaskSession, reason: str) -> None:
        if task.is_moved:
            return
        if task.gone:
            self._known.lives[task.place] += 1
            # Not in this call: the session that tells of the loss is still at it.
            asyncio.get_running_loop().call_soon(self._take_back, task)
        self.process_lost(task, reason)

    def message_received(self, task: TaskSession, message: Message) -> None:
        """A notice from the process of a store's primary, or from its copy."""
        if isinstance(message, BackupLost) and message.session == self._orders.session:
            # A process has its own store's number, whatever its place among processes.
            store = self.placement.stores[task.task_number]
            self._orders.carry_out(store.backup_lost(message.view, message.reason))
        elif isinstance(message, WorkerReported):
            self._cluster.message_received(task, message)
        elif isinstance(message, Telemetry):
            # Of the store that is served at the address of the process, if there is
            # one: copies have addresses of their own.
            for served in self._cluster.ps:
                if served.address == task.address:
                    self._cluster.message_received(served, message)

    def _take_back(self, task: TaskSession) -> None:
        if self.is_started or self._takes_over:
            number, placement = task.place, self.placement
            # Of one whose stores are still looked for, nobody serves them elsewhere.
            is_served = self.is_started and placement.is_own(number)
            view = placement.stores[number].view if is_served else None
            self._known.take_back(task, view)

    def store_lost(self, task: TaskSession, reason: str) -> None:
        """The server of the store does not answer, or does not have what it had."""
        orders = self.placement.primary_lost(task.place, task.address, reason)
        self._orders.carry_out(orders)
        self._orders.report_unserved(task.place, reason)

    def take_over_stores(
        self, left: Mapping[int, Successor], lives: Sequence[int]
    ) -> None:
        """Another program has left these copies, when processes had these lives. What
        has become of processes since then is told here, too."""
        for store, successor in left.items():
            copy = successor.chosen.copy
            if copy.is_primary:
                # Who is there by now may be another, with nothing.
                self._cluster.ps[store].move(copy.address, life=copy.incarnation)
        self.is_started, self._takes_over = True, False
        self._orders.carry_out(self.placement.take_over_stores(left, lives))
        for process, life in zip(self.processes, lives, strict=True):
            if not process.is_ready:
                self.process_lost(process, "it was lost while it was taken over")
            elif self._known.lives[process.place] != life:
                self.task_ready(process)

    def process_lost(self, task: TaskSession, reason: str) -> None:
        """The process is away."""
        self._orders.carry_out(self.placement.process_lost(task.place, reason))

    def _stop(self) -> None:
        """Stops deciding; what was asked may be carried out."""
        self.is_started = False
        self._orders.stop()
