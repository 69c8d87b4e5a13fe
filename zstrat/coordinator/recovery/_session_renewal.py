"""`SessionRenewal`: the number of a session, and how its tasks enter another one.

A session has its own number even if it resumes the stores that another program has left
under a name (`adopt`); keys are counted from the number of the first session.

To start empty, parameter servers enter a session with an unused number
(`renew_servers`). When they are filled, the workers enter it, too (`renew_workers`).
Nothing is dispatched meanwhile (`suspend_dispatch`). Law: only `SessionRenewal` changes
the number of a session; tasks refuse what was sent for an earlier number.
"""

from __future__ import annotations

import itertools
import logging
from typing import TYPE_CHECKING, Protocol, final

from zstrat.coordinator._session_pause import SessionCut, cut_of
from zstrat.coordinator.connecting import ClusterTasks, arrive
from zstrat.data import Lease
from zstrat.errors import PSUnavailableError
from zstrat.wire import CloseSession

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from zstrat.coordinator._dispatch import Dispatcher
    from zstrat.coordinator._fences import Fences
    from zstrat.coordinator.replication import Replication
    from zstrat.coordinator.rounds import RestoredRounds, RoundClosing

log = logging.getLogger("zstrat.coordinator")


class RenewedCluster(ClusterTasks, Protocol):
    """The part of a `Cluster` that depends on the session number."""

    @property
    def fences(self) -> Fences: ...

    @property
    def rounds(self) -> RoundClosing: ...

    @property
    def replication(self) -> Replication | None: ...

    @property
    def dispatcher(self) -> Dispatcher | None: ...


@final
class SessionRenewal:
    """The number of one session, and the change to another one. On the loop.

    Args:
        session: The first number.
        draw: Draws an unused number.
    """

    def __init__(
        self, cluster: RenewedCluster, session: int, draw: Callable[[], int]
    ) -> None:
        self.session = session
        """The number of the session on the parameter servers."""
        self.worker_session = session
        """The number of the session on the workers, which enter another session after
        the servers."""
        self.origin = session
        """The number from which keys are counted: the first number of the session."""
        self.resumed = False
        """Whether the session resumes the stores that another program has left."""
        self.done_leases: dict[int, list[Lease]] = {}
        """The ranges that the resumed session had done of leased datasets, by number of
        the pass, from 1."""
        self.leased_passes = itertools.count(1)
        self.close_messages: list[CloseSession] = []
        """Messages that close earlier sessions, for a task that still serves one of
        them."""
        self._cluster, self._draw = cluster, draw

    @property
    def ended_steps(self) -> SessionCut:
        """The steps that have ended."""
        dispatcher = self._cluster.dispatcher
        if dispatcher is None:
            return SessionCut(self._cluster.rounds.first_step)
        return cut_of(dispatcher.queue)

    def suspend_dispatch(self, suspended: bool = True) -> None:
        """Stops giving closures to workers; with False gives them closures again."""
        if (dispatcher := self._cluster.dispatcher) is not None:
            dispatcher.suspend(suspended)

    def report_outage(self, error: PSUnavailableError) -> None:
        """Makes every call that schedules or joins raise the error, until the servers
        are back."""
        if (dispatcher := self._cluster.dispatcher) is not None:
            dispatcher.engine.fail(error, lasting=True)

    async def adopt(self, name: str, restart_partial: bool, deadline: float) -> None:
        """Resumes the stores that another program has left under the name, if any are
        left.

        Args:
            restart_partial: If only a part is left, start empty, in another session.
            deadline: Loop time.

        Raises:
            PSUnavailableError: Only a part is left.
            ZstratError: As `arrive`.

        Cancellation: the tasks stay started.
        """
        try:
            await self._resume(name, deadline)
        except PSUnavailableError as error:
            if not restart_partial:
                raise
            log.warning("the session starts empty, with nothing restored: %s", error)
            await self.start_empty(deadline)

    async def start_empty(self, deadline: float) -> None:
        """Enters another session with all parameter servers and at least one worker, in
        which nothing has been created.

        Args:
            deadline: Loop time.

        Raises:
            ZstratError: As `arrive`.

        Cancellation: the tasks stay started.
        """
        cluster = self._cluster
        self.origin = 0  # that of the next session
        self._keep_origin()
        self.renew_servers()
        self.resumed, self.origin = False, self.session
        # In the sessions that restores enter, keys are counted from this one, too.
        self._keep_origin()
        # The lives of processes with which stores begin are known when all are there.
        if cluster.replication is not None:
            await cluster.replication.wait_processes(deadline)
        self.renew_workers({})
        await arrive(cluster.ps, cluster.workers, deadline)

    async def _resume(self, name: str, deadline: float) -> None:
        cluster, replication = self._cluster, self._cluster.replication
        assert replication is not None, "a session that has a name has one"
        origin = await replication.take_over(deadline)
        if origin is not None:
            self.resumed, self.origin = True, origin
            log.info("resumes what was left of the session %r", name)
        self._keep_origin()
        entered = arrive(cluster.ps, cluster.workers, deadline)
        if origin is None:
            await entered
        else:
            await replication.orphans.unless_lost(entered)
            await replication.orphans.unless_lost(self._inherit_rounds(deadline))
            await replication.orphans.unless_lost(self._inherit_leases(deadline))
            await replication.orphans.unless_lost(replication.open(deadline))

    async def _inherit_rounds(self, deadline: float) -> None:
        rounds = self._cluster.rounds
        await rounds.inherit(deadline)
        if rounds.first_step > 1:  # which may be more than a ledger can remember
            await self._cluster.fences.up_to(rounds.first_step, ())

    async def _inherit_leases(self, deadline: float) -> None:
        self.done_leases.clear()
        for number, *lease in await self._cluster.client.applied_leases(deadline):
            self.done_leases.setdefault(number, []).append(Lease(*lease))

    def _keep_origin(self) -> None:
        for task in self._cluster.ps:
            task.keep_origin(self.origin)
        if (replication := self._cluster.replication) is not None:
            replication.keep_origin(self.origin)

    def renew_servers(self) -> None:
        """Moves all parameter servers to another session, in which they are empty. From
        then on they refuse messages of the present session."""
        cluster = self._cluster
        self.close_messages.append(CloseSession(self.session, False))
        self.session = self._draw()
        cluster.rounds.restart()
        cluster.client.enter(self.session)
        cluster.fences.enter(self.session)
        # Before the sessions of the stores: it moves these to where `renew` enters.
        if (replication := cluster.replication) is not None:
            replication.renew(self.session, self.close_messages)
            # Workers get them when the session opens.
            stores = range(len(cluster.ps))
            cluster.store_directory.addresses[:] = map(replication.home_of, stores)
        for task in cluster.ps:
            task.renew(self.session, self.close_messages)

    async def close_ended_steps(self, rounds: Mapping[int, RestoredRounds]) -> None:
        """Sends the servers the steps that have ended, and the ``rounds`` from which
        optimizers continue.

        Raises:
            PSUnavailableError, DeadlineExceededError: A server does not answer.
        """
        cut = self.ended_steps
        # Their ledgers begin at the first step again: without a low water they could
        # not reach to the steps that run now.
        await self._cluster.fences.up_to(cut.end, cut.besides)
        await self._cluster.rounds.drop(rounds)

    async def note_leases(self, states: Mapping[int, Sequence[str]]) -> None:
        """Stores on the servers which ranges of leased datasets are done, for a program
        that resumes the session: according to ``states``, by number of the iterator, or
        else the ranges that are done now.

        Raises:
            PSUnavailableError, DeadlineExceededError: A server does not answer.
        """
        dispatcher = self._cluster.dispatcher
        if self._cluster.name and dispatcher is not None:
            with dispatcher.engine.lock:
                # The books change with the lock held, on any thread.
                packed = dispatcher.queue.leases.packed_done(states)
            await self._cluster.client.note_leases(packed)

    def renew_workers(self, places: Mapping[int, Sequence[str]]) -> None:
        """Moves the workers to the session of the servers. Their unfinished closures
        run again.

        Args:
            places: Positions at which their iterators begin, by number of the iterator.
        """
        cluster = self._cluster
        self.worker_session = self.session
        if cluster.replication is not None:
            cluster.replication.start()
        # Before the workers: their reports of the earlier session are ignored.
        if cluster.dispatcher is not None:
            cluster.dispatcher.enter(self.session)
            cluster.dispatcher.builder.start_at(places)
        for task in cluster.workers:
            task.renew(self.session, self.close_messages)
