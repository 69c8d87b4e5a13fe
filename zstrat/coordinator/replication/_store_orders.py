"""Carries out the orders of `StorePlacement`, and reports their outcomes to it.

Orders to processes and copies are requests, one for a store at a time: the next order
for a store replaces the one before, whose answer nobody awaits then (the process may
carry it out all the same). The other orders move the request queues of the program, or
report a store without a server. On the loop thread.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING, Final, final

from zstrat.coordinator.connecting import ProbedTask, log_failure
from zstrat.errors import (
    ClosedError,
    DeadlineExceededError,
    InvalidArgumentError,
    PeerLostError,
)
from zstrat.transport import reached_as
from zstrat.wire import (
    AttachBackup,
    DetachBackup,
    DropStore,
    HostStore,
    Message,
    PromoteBackup,
    StoreHosted,
)

from ._orders import (
    Attach,
    Detach,
    Drop,
    Establish,
    Host,
    Lose,
    Promote,
    Serve,
    Swap,
)
from ._store_processes import CopiesStatus

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from zstrat.config import Timeouts
    from zstrat.coordinator.connecting import ClusterTasks
    from zstrat.transport import MakeTaskLink

    from ._orders import Asked, PlacementOrder
    from ._placement import StorePlacement
    from ._replicated_store import ReplicatedStore
    from ._store_processes import StoreProcesses

log = logging.getLogger("zstrat.coordinator")

ATTACH_SECONDS: Final = 86400.0
"""Seconds that a primary has to fill a backup: a bound that is not reached, as the
primary or the backup is lost before."""
RETRY_SECONDS: Final = 5.0
"""Seconds until a process that could not host a backup is asked again."""


@final
class StoreOrders:
    """Sends the orders of a `StorePlacement`, and reports their outcomes to it, in one
    session.

    Args:
        session: The number of the session; another one after `Replication.renew`.
        placement: Decides what follows from answers.
        known: The processes that have copies.
    """

    def __init__(
        self,
        cluster: ClusterTasks,
        session: int,
        placement: StorePlacement,
        known: StoreProcesses,
        timeouts: Timeouts,
        make_link: MakeTaskLink,
    ) -> None:
        self.session = session
        self.placement: Final = placement
        self.known: Final = known
        self.servers: Final = cluster.ps
        """The sessions on the servers of the stores, by number of the store."""
        self.status: Final = CopiesStatus(placement, self.servers, known.sessions)
        self._cluster, self._timeouts, self._make_link = cluster, timeouts, make_link
        self._asking: dict[int, asyncio.Task[None]] = {}
        """By store: the request that is under way."""
        self._ended: list[asyncio.Task[None]] = []
        self._losses_due: dict[int, asyncio.TimerHandle] = {}
        """By store: the timer after which it is reported that no process serves the
        store, unless one does by then."""
        self._retry_timer: asyncio.TimerHandle | None = None
        self._news = asyncio.Event()

    def carry_out(self, orders: Sequence[PlacementOrder]) -> None:
        """Carries out the orders that this program itself can, and sends the others to
        their processes."""
        for order in orders:
            match order:
                case Drop():
                    self._drop(order)
                case Serve():
                    self._serve(order)
                case Lose():
                    self._lose(order)
                case _:
                    self._ask(order)
        self.status.log_changes()
        # After all orders: who waits looks at the state that they have made.
        self._news.set()
        if self.placement.has_refused and self._retry_timer is None:
            loop = asyncio.get_running_loop()
            self._retry_timer = loop.call_later(RETRY_SECONDS, self._retry_refused)

    async def wait_until(self, is_so: Callable[[], bool]) -> None:
        """Waits until ``is_so()`` returns True. Calls it whenever orders were carried
        out or a loss was reported.

        Cancellation: nothing is lost.
        """
        while not is_so():
            self._news.clear()
            await self._news.wait()

    def send_home(self, store: ReplicatedStore) -> None:
        """Moves the session on the server of a store without any data to the home
        process, where the store begins again; `TaskSession.renew` enters the session
        there."""
        task, home = self.servers[store.number], self.known.sessions[store.home].address
        # Its home has it no longer, and not again before it was asked to create it:
        # until then there is no address.
        if not self.placement.is_own(store.number):
            task.park()
        elif task.address != home or task.is_parked:
            task.move(home, is_empty=True)

    def report_unserved(self, number: int, reason: str) -> None:
        """Reports the lost server of a store that no known copy serves, unless such a
        report is due already."""
        store = self.placement.stores[number]
        if store.is_reported_lost and number not in self._losses_due:
            words = self.status.reason_with_process(number, reason)
            self._report_loss(number, words)

    def stop(self) -> None:
        """Stops waiting for answers and reporting; processes may still carry out orders
        that were sent."""
        for asking in self._asking.values():
            asking.cancel()
        self._ended += self._asking.values()
        self._asking.clear()
        for store in list(self._losses_due):
            self._cancel_report(store)
        if self._retry_timer is not None:
            self._retry_timer.cancel()
            self._retry_timer = None

    async def wait_ended(self) -> None:
        """Waits after `stop` until no request is under way.

        Cancellation: the requests end all the same.
        """
        await asyncio.gather(*self._ended, return_exceptions=True)

    def _retry_refused(self) -> None:
        self._retry_timer = None
        self.carry_out(self.placement.retry_refused())

    def _drop(self, order: Drop) -> None:
        process = self.known.sessions[order.process]
        if process.is_ready:  # else it gets the order when it is back
            drop = DropStore(self.session, order.store, order.view)
            dropped = process.link.submit(drop)
            dropped.add_done_callback(partial(log_failure, "dropping a copy"))

    def _serve(self, order: Serve) -> None:
        self._cancel_report(order.store)
        address = order.primary.address
        self._cluster.store_directory.publish(order.store, order.view, address)
        task = self.servers[order.store]
        if task.address != address:
            task.move(address, life=order.primary.incarnation)

    def _lose(self, order: Lose) -> None:
        """Reports the loss of a store: at once if no copy is left, else when no process
        that may have a copy is expected back. The wait is that for a server without a
        copy: a connection may be cut for so long, and a process announces for how long
        it is away."""
        reason = self.status.reason_with_process(order.store, order.reason)
        if order.gone:
            self.send_home(self.placement.stores[order.store])
            self._report_loss(order.store, reason)
            return
        self._cancel_report(order.store)
        loop = asyncio.get_running_loop()
        # Any of them may have a copy, so the one that is away longest decides.
        until = [task.back_by for task in (*self.known.sessions, *self.servers)]
        until.append(loop.time() + self._timeouts.reconnect)
        self._losses_due[order.store] = loop.call_at(
            max(until), self._report_loss, order.store, reason
        )

    def _report_loss(self, store: int, reason: str) -> None:
        self._cancel_report(store)
        task = self.servers[store]
        if not task.is_ready:
            task.give_up(reason)
            self._cluster.store_lost(store, reason)
        self._news.set()

    def _cancel_report(self, store: int) -> None:
        due = self._losses_due.pop(store, None)
        if due is not None:
            due.cancel()

    def _ask(self, order: Asked) -> None:
        earlier = self._asking.pop(order.store, None)
        if earlier is not None:
            # Only the waiting ends; what was sent may be carried out. The newer view
            # makes that harmless.
            earlier.cancel()
            self._ended = [task for task in self._ended if not task.done()] + [earlier]
        self._asking[order.store] = asyncio.get_running_loop().create_task(
            self._asked(order), name=f"{type(order).__name__} of store {order.store}"
        )

    async def _asked(self, order: Asked) -> None:
        placement = self.placement
        follow: Callable[[], Sequence[PlacementOrder]]
        try:
            answer = await self._answer(order)
        except (PeerLostError, DeadlineExceededError, ClosedError) as error:
            # It is not known whether the order was carried out: `unanswered` decides.
            follow = partial(placement.unanswered, order, str(error))
        except Exception as error:  # to the log and the placement: also OSError
            log.warning("%s: %s: %s", self._what(order), type(error).__name__, error)
            # A copy that its primary never let count refuses in this way
            # (`PromoteBackup`).
            never = isinstance(error, InvalidArgumentError)
            follow = partial(placement.refused, order, str(error), never_counted=never)
        else:
            follow = partial(self._done, order, answer)
        # First: what follows may be another order for the same store.
        del self._asking[order.store]
        self.carry_out(follow())

    async def _answer(self, order: Asked) -> Message:
        """Sends the order to its process, when that is connected; returns the
        answer."""
        if isinstance(order, Promote):
            return await self._promote(order)
        loop, session, view = asyncio.get_running_loop(), self.session, order.view
        # Filling takes as long as there are data. A loss of either side replaces the
        # order before.
        deadline = loop.time() + ATTACH_SECONDS
        primary = task = self.servers[order.store]
        if not isinstance(order, Attach | Detach):
            task = self.known.sessions[order.process]
        if isinstance(order, Host):
            # The copy accepts changes from one process only, so the primary has to be
            # known.
            await primary.wait_ready(deadline)
        await task.wait_ready(deadline)
        if isinstance(order, Host | Establish):
            deadline = loop.time() + self._timeouts.request
        request: Message
        match order:
            case Host(store, beside=beside):
                assert primary.hello is not None, "it has entered the session"
                named = primary.hello.incarnation
                request = HostStore(session, store, view, primary=named, beside=beside)
            case Establish(store):
                request = HostStore(session, store, view, True)
            case Swap(store, backup=backup):
                named = backup.incarnation
                request = HostStore(session, store, view, primary=named, swaps=True)
            case Attach(backup=backup, beside=beside):
                at, number = backup.address, backup.incarnation
                request = AttachBackup(session, view, at, number, beside)
            case Detach():
                request = DetachBackup(session, view)
        return await task.link.submit(request, deadline=deadline)

    async def _promote(self, order: Promote) -> Message:
        """Promotes a backup over a separate link, as the program's requests move to its
        address only after that."""
        # In that time the session of its process notices if it is lost.
        deadline = asyncio.get_running_loop().time() + 2 * self._timeouts.liveness
        name, copy = self.servers[order.store].name, order.backup
        backup = ProbedTask(
            "ps", order.store, copy.address, self._make_link, name, copy.incarnation
        )
        backup.start()
        try:
            await backup.wait_ready(deadline)
            promote = PromoteBackup(self.session, order.view)
            if (partner := order.partner) is not None:
                at, number = partner.address, partner.incarnation
                promote = PromoteBackup(self.session, order.view, at, number)
            return await backup.link.submit(promote, deadline=deadline)
        finally:
            await backup.link.close()

    def _done(self, order: Asked, answer: Message) -> Sequence[PlacementOrder]:
        placement = self.placement
        match order:
            case Attach():
                return placement.attached(order)
            case Detach():
                return placement.detached(order)
            case Promote():
                self._log_promotion(order)
                return placement.promoted(order)
        assert isinstance(answer, StoreHosted), answer
        process = self.known.sessions[order.process]
        address = reached_as(answer.address, process.address)
        match order:
            case Establish():
                return placement.created(order, address, answer.incarnation)
            case Swap():
                return placement.swapped(order, address, answer.incarnation)
        orders = placement.hosted(order, address, answer.incarnation)
        if placement.stores[order.store].target == order.process:
            log.info(
                "the store of %s is copied to the process of %s, where it moves",
                self.servers[order.store].name,
                process.name,
            )
        return orders

    def _log_promotion(self, order: Promote) -> None:
        """Logs where a store is served from now on, and which process is lost."""
        store = self.placement.stores[order.store]
        name = self.servers[order.store].name
        here = self.known.sessions[order.backup.process].name
        if store.target == order.backup.process:
            log.info("the store of %s is in the process of %s now", name, here)
        elif store.is_primary_known:
            log.warning(
                "the process of %s is lost (%s): the store of %s, which it served, "
                "continues in the process of %s with all that was acknowledged",
                self.known.sessions[store.primary.process].name,
                store.reason,
                name,
                here,
            )
        else:
            words = "the store of %s continues with the copy in the process of %s (%s)"
            log.warning(words, name, here, store.reason)

    def _what(self, order: Asked) -> str:
        name = f"the store of {self.servers[order.store].name}"
        processes = self.known.sessions
        match order:
            case Host(_, _, number):
                return f"{processes[number].name} keeps no backup of {name}"
            case Swap(_, _, number):
                return f"{processes[number].name} does not hand over {name}"
            case Establish(_, _, number):
                return f"{processes[number].name} does not host {name}"
            case Attach():
                return f"{name}: its server does not fill its backup"
            case Detach():
                return f"{name}: its server does not continue without its backup"
            case Promote():
                return f"{name}: its backup does not take its server's place"
