"""Keeps a backup of each store, promotes the backup when the primary is lost, and moves
stores on purpose.

`StorePlacement` decides, and `StoreOrders` carries its decisions out. Each process has
its own session for as long as the program's lasts, whichever stores it serves. On the
loop thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, Final, final

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
    from collections.abc import Mapping, Sequence

    from zstrat.config import Timeouts
    from zstrat.coordinator.connecting import ClusterTasks
    from zstrat.transport import MakeTaskLink

    from ._orders import Successor

log = logging.getLogger("zstrat.coordinator")


@final
class Replication:
    """Keeps and moves the stores of one session. On the loop.

    Args:
        addresses: Addresses of the processes, in task order.
        replicas: Number of backups of each store. With 0 a store has one only while it
            moves.
        stores_per_ps: Number of stores of each process.
        name: The name of the session, or empty.
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
        self._is_stopped = False
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
        """The stores that another program has left under the name."""
        self.is_started = False
        self._is_renewed = False
        """Whether stores are being filled after `renew`, so that `start` has to
        follow."""

    @property
    def processes(self) -> list[TaskSession]:
        """The sessions on the processes, by index. Those of removed processes are
        closed, and stay in the list."""
        return self._known.sessions

    def start(self) -> None:
        """Starts to give each store a backup, when all stores are served by their home
        processes. Does nothing if called before since the last `renew`: some stores may
        have moved."""
        if self.is_started:
            return
        self.is_started, self._is_renewed = True, False
        self._orders.carry_out(self.placement.start())

    async def take_over(self, deadline: float) -> int | None:
        """Takes over the copies that another program has left under the name of the
        session. A pair (primary and backup) stays a pair: once both copies have been
        seen, either may be lost. Comes before `open`.

        Returns:
            The number from which keys are counted; None if nothing was left.

        Raises:
            PSUnavailableError: A store has no complete copy.
            ZstratError: As `arrive`.
        """
        await arrive(self.processes, (), deadline)
        successors = await self.orphans.find(deadline)
        if successors:
            await self.orphans.serve(successors, deadline)
            return self.orphans.origin
        await self.orphans.keep_origin(self._orders.session, deadline)
        await self.create_stores(deadline)
        return None

    def keep_origin(self, origin: int) -> None:
        """Sets the number from which keys are counted, also for processes added
        later."""
        self._known.keep_origin(origin)

    async def create_stores(self, deadline: float) -> None:
        """Waits for all processes, and makes them create the stores that they do not
        have by themselves. Comes before `open`.

        Raises:
            UnavailableError: A process refuses; says why.
            ZstratError: As `arrive`.
        """
        await arrive(self.processes, (), deadline)
        self._orders.carry_out(self.placement.create_stores())
        # They have addresses when they are created; until then nothing can be served
        # there.
        try:
            async with asyncio.timeout_at(deadline):
                await self.wait_until(lambda: not self.placement.is_creating)
        except TimeoutError:
            raise DeadlineExceededError(
                "stores_per_ps: not all parameter servers created their stores in "
                "time; look at their logs"
            ) from None
        for store in self.placement.stores:
            if store.phase is CopyPhase.EMPTY:
                raise UnavailableError(
                    f"{self.processes[store.home].name} did not create store "
                    f"{store.number} (stores_per_ps): {store.reason}; look at its log"
                )

    async def open(self, deadline: float) -> None:
        """Waits for all processes, and until each store has its copies. Does not start
        while stores are being filled after `renew`.

        Raises:
            DeadlineExceededError: A store has no backup at ``deadline`` (loop time).
            BusyError, VersionMismatchError, PermissionDeniedError: A process refuses.

        Cancellation: `open` may be called again.
        """
        await self.wait_processes(deadline)
        # The restore starts it when the stores are filled: copies of empty ones are of
        # no use.
        if self._is_renewed:
            return
        self.start()
        await self.wait_whole(deadline)

    async def wait_processes(self, deadline: float) -> None:
        """Waits until all processes are in the session.

        Raises:
            DeadlineExceededError: A process is not there at ``deadline`` (loop time).
            BusyError, VersionMismatchError, PermissionDeniedError: A process refuses.

        Cancellation: nothing is lost.
        """
        present = [process for process in self.processes if not process.is_closed]
        for process in present:
            process.start()
        for process in present:
            await process.wait_ready(deadline)

    async def wait_whole(self, deadline: float) -> None:
        """Waits until each store has a backup, if stores get backups.

        Raises:
            DeadlineExceededError: A store has none at ``deadline`` (loop time).

        Cancellation: nothing is lost.
        """
        if not self.replicas:
            return
        try:
            async with asyncio.timeout_at(deadline):
                await self.wait_until(lambda: not self.placement.without_backup)
        except TimeoutError:
            raise DeadlineExceededError(
                f"replicas=1: not all parameter servers have a backup in time: "
                f"{self.status.words()}; look at the logs of the parameter servers"
            ) from None

    def enter(self, number: int, address: str) -> TaskSession:
        """Starts to connect to another process, which has no store yet."""
        session = self._known.add(number, self.placement.enter(address), address)
        session.start()
        return session

    async def dismiss(self, process: TaskSession, timeout: float) -> None:
        """Removes a process that has no copy of any store. Its daemon stays, for other
        programs.

        Cancellation: the process is removed without waiting for its answer.
        """
        # A session that is left reports no loss, so the placement is notified here.
        self.placement.set_leaving(process.place, True)
        self.process_lost(process, "it was removed")
        self.placement.remove_process(process.place)
        await self._known.leave(process, timeout)

    def cordon(self, index: int, is_leaving: bool) -> None:
        """Cordons (or uncordons) the process for new copies."""
        self.placement.set_leaving(index, is_leaving)
        if not is_leaving:
            self._orders.carry_out(self.placement.retry_refused())

    async def move(self, store: int, target: int) -> None:
        """Moves the store to the process ``target``. Returns when that process serves
        the store, or when it is clear that the store stays where it is.

        Cancellation: the store stays, unless the target is already asked to serve it.
        """
        place = self.placement.stores[store]
        self._orders.carry_out(self.placement.move(store, target))
        # Without a deadline: a copy takes as long as there are data, and its loss ends
        # the move.
        try:
            await self.wait_until(
                lambda: place.target is None or place.is_reported_lost
            )
        finally:
            # Does nothing if the move has ended, or can no longer be cancelled.
            self._orders.carry_out(
                self.placement.cancel_move(store, "the move was cancelled")
            )

    def evict(self, store: int) -> None:
        """Starts to move the backup of the store to another process."""
        self._orders.carry_out(self.placement.evict(store))

    def keeps(self, store: int) -> bool:
        """Returns whether a backup exists or is sought, so that this object decides
        what follows when the store is lost."""
        return self.is_started and self.placement.has_or_wants_backup(store)

    def renew(self, session: int, close_messages: Sequence[CloseSession]) -> None:
        """Begins again with empty stores at their home processes, in another session.
        Call `start` when the stores are filled."""
        self._orders.session = session
        # Answers to orders of the earlier session decide nothing from now on.
        self._stop()
        self._is_renewed = True
        self.placement.enter_session()
        for store in self.placement.stores:
            self._orders.send_home(store)
        self._known.renew(session, close_messages)
        self._orders.carry_out(self.placement.create_stores())

    def home_of(self, store: int) -> str:
        """Returns the address of the process with which the store begins in another
        session."""
        return self.processes[self.placement.stores[store].home].address

    async def stop(self) -> None:
        """Stops deciding. `Cluster` closes the sessions on the processes, with those on
        all other tasks.

        Cancellation: stopped all the same.
        """
        self._is_stopped = True
        self._stop()
        await self._orders.wait_ended()

    async def settled(self, error: ZstratError) -> bool:
        """Waits until each store has a known server. Returns True if it had to wait, or
        if ``error`` says that the process which got the request does not serve the
        store now."""
        if self._cluster.outage_error is not None:
            return False
        lines = self._cluster.client.lines
        waited = any(line.is_held or line.peer is None for line in lines)
        # A process that ends may have refused, although the link is open again by now.
        waited |= isinstance(error, NotPrimaryError | PSUnavailableError)
        if waited:
            # This request waits until the servers are known.
            with contextlib.suppress(ZstratError):
                await self._cluster.client.statistics()
        return waited

    def backups(self) -> list[ProbedTask]:
        """Returns a link to each complete backup, not started yet."""
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
        """Number of failovers and moves so far."""
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
            # Not in this call: the session that reports the loss is not done yet.
            asyncio.get_running_loop().call_soon(self._take_back, task)
        self.process_lost(task, reason)

    def message_received(self, task: TaskSession, message: Message) -> None:
        """Handles a notice of a process, or of a copy in it."""
        if isinstance(message, BackupLost) and message.session == self._orders.session:
            # Its task number is that of its own store, whatever its index.
            store = self.placement.stores[task.task_number]
            self._orders.carry_out(store.backup_lost(message.view, message.reason))
        elif isinstance(message, WorkerReported):
            self._cluster.message_received(task, message)
        elif isinstance(message, Telemetry):
            # About the store that is served at the address of the process, if any:
            # hosted copies have other addresses.
            for served in self._cluster.ps:
                if served.address == task.address:
                    self._cluster.message_received(served, message)

    def _take_back(self, task: TaskSession) -> None:
        # Also before `start`: it may have been started again while others are awaited.
        if not self._is_stopped:
            number, placement = task.place, self.placement
            # While orphaned stores are searched, no other process serves them.
            is_served = self.is_started and placement.is_own(number)
            view = placement.stores[number].view if is_served else None
            self._known.take_back(task, view)

    def store_lost(self, task: TaskSession, reason: str) -> None:
        """Notes that the server of the store does not answer, or no longer has its
        data."""
        orders = self.placement.primary_lost(task.place, task.address, reason)
        self._orders.carry_out(orders)
        self._orders.report_unserved(task.place, reason)

    def take_over_stores(
        self, left: Mapping[int, Successor], lives: Sequence[int]
    ) -> None:
        """Serves copies that another program has left, given by store, when processes
        had these ``lives``; then handles losses and restarts of processes since
        then."""
        for store, successor in left.items():
            copy = successor.chosen.copy
            if copy.is_primary:
                # The process there may be another one by now, which is empty.
                self._cluster.ps[store].move(copy.address, life=copy.incarnation)
        self.is_started = True
        self._orders.carry_out(self.placement.take_over_stores(left, lives))
        for process, life in zip(self.processes, lives, strict=True):
            if not process.is_ready:
                self.process_lost(process, "it was lost while it was taken over")
            elif self._known.lives[process.place] != life:
                self.task_ready(process)

    def process_lost(self, task: TaskSession, reason: str) -> None:
        """Notes that the process is lost."""
        self._orders.carry_out(self.placement.process_lost(task.place, reason))

    def _stop(self) -> None:
        """Stops deciding; processes may still carry out orders that were sent."""
        self.is_started = False
        self._orders.stop()
