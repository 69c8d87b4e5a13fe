"""The numbers of one session, and how all tasks enter another one.

A session has a number of its own even if it goes on with what another program has left
under a name (`adopt`); keys are counted from the number that the first of them had.

Parameter servers that begin anew enter a session with a number that nobody has used, in
which they are empty (`renew_servers`). When they are filled, the workers enter it, too
(`renew_workers`). Nothing is dispatched meanwhile (`suspend_dispatch`). The law of this
file: only this file changes the number of a session; what was sent for a number before
is refused from then on.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Protocol, final

from zstrat.coordinator._session_pause import SessionCut, cut_of
from zstrat.coordinator.connecting import ClusterTasks, all_joined, arrive
from zstrat.errors import PSUnavailableError
from zstrat.wire import CloseSession

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from zstrat.coordinator._dispatch import Dispatcher
    from zstrat.coordinator._fences import Fences
    from zstrat.coordinator.replication import Replication

log = logging.getLogger("zstrat.coordinator")


class RenewedCluster(ClusterTasks, Protocol):
    """All that knows the number of a session (`Cluster`)."""

    @property
    def fences(self) -> Fences: ...

    @property
    def replication(self) -> Replication | None: ...

    @property
    def dispatcher(self) -> Dispatcher | None: ...


@final
class SessionRenewal:
    """The numbers of one session. On the loop.

    Args:
        session: The first number.
        draw: Draws a number that nobody has used.
    """

    def __init__(
        self, cluster: RenewedCluster, session: int, draw: Callable[[], int]
    ) -> None:
        self.session = session
        """The number that the parameter servers know the session by."""
        self.worker_session = session
        """That of the workers, which enter another session after the servers."""
        self.origin = session
        """What keys are counted from: the first number that the session had."""
        self.resumed = False
        """The session goes on with what another program has left."""
        self.close_messages: list[CloseSession] = []
        """Close the sessions before, on a task that still serves one of them."""
        self._cluster, self._draw = cluster, draw

    @property
    def ended_steps(self) -> SessionCut:
        """The steps that have ended."""
        dispatcher = self._cluster.dispatcher
        return SessionCut() if dispatcher is None else cut_of(dispatcher.queue)

    def suspend_dispatch(self) -> None:
        """Nothing is handed out to workers any more."""
        if (dispatcher := self._cluster.dispatcher) is not None:
            dispatcher.suspend(True)

    def resume_dispatch(self) -> None:
        """Workers get closures again."""
        if (dispatcher := self._cluster.dispatcher) is not None:
            dispatcher.suspend(False)

    def report_outage(self, error: PSUnavailableError) -> None:
        """Has the error raised by every call that schedules or joins, until the servers
        are back."""
        if (dispatcher := self._cluster.dispatcher) is not None:
            dispatcher.engine.fail(error, lasting=True)

    async def adopt(self, name: str, restart_partial: bool, deadline: float) -> None:
        """Goes on with what another program has left under the name, if there is such.

        Args:
            restart_partial: If only a part is left, all tasks enter another session.
            deadline: Loop time.

        Raises:
            PSUnavailableError: Only a part is left.
            ZstratError: As of `arrive`.

        Cancellation: the tasks that were started go on.
        """
        cluster = self._cluster
        try:
            await self._go_on(name, deadline)
        except PSUnavailableError as error:
            if not restart_partial:
                raise
            log.warning("all begins anew, with nothing restored yet: %s", error)
            self.origin = 0  # that of the next session
            self._keep_origin()
            self.renew_servers()
            self.resumed, self.origin = False, self.session
            self.renew_workers({})
            await arrive(cluster.ps, cluster.workers, deadline)
            await all_joined(cluster.workers, deadline)

    async def _go_on(self, name: str, deadline: float) -> None:
        """With what is there, if anything is."""
        cluster, replication = self._cluster, self._cluster.replication
        assert replication is not None, "a session that has a name has one"
        found = await replication.take_over(deadline)
        if found is not None:
            self.resumed, self.origin = True, found
            log.info("goes on with what was left of the session %r", name)
        self._keep_origin()
        entered = arrive(cluster.ps, cluster.workers, deadline)
        if found is None:
            await entered
        else:
            await replication.orphans.unless_lost(entered)
            await replication.orphans.unless_lost(replication.open(deadline))

    def _keep_origin(self) -> None:
        for task in self._cluster.ps:
            task.keep_origin(self.origin)
        if (replication := self._cluster.replication) is not None:
            replication.keep_origin(self.origin)

    def renew_servers(self) -> None:
        """Has all parameter servers enter another session, in which they are empty.
        What is sent for this one is refused from then on."""
        cluster = self._cluster
        self.close_messages.append(CloseSession(self.session, False))
        self.session = self._draw()
        cluster.client.enter(self.session)
        cluster.fences.enter(self.session)
        # Before the workers: what they still tell of the session before is not taken.
        if (replication := cluster.replication) is not None:
            replication.renew(self.session, self.close_messages)
            stores = range(len(cluster.ps))
            cluster.store_directory.reset_addresses(map(replication.home_of, stores))
        for task in cluster.ps:
            task.renew(self.session, self.close_messages)

    async def close_ended_steps(self) -> None:
        """Tells the servers which steps have ended.

        Raises:
            PSUnavailableError, DeadlineExceededError: One does not answer.
        """
        cut = self.ended_steps
        await self._cluster.fences.up_to(cut.end, cut.besides)

    def renew_workers(self, places: Mapping[int, Sequence[str]]) -> None:
        """Has the workers enter the session of the servers; what they work on runs
        again, and their iterators begin at these places."""
        cluster = self._cluster
        self.worker_session = self.session
        if cluster.replication is not None:
            cluster.replication.start()
        # Before the workers: what they still report of the session before is not taken.
        if cluster.dispatcher is not None:
            cluster.dispatcher.enter(self.session)
            cluster.dispatcher.builder.begin_at(places)
        for task in cluster.workers:
            task.renew(self.session, self.close_messages)
