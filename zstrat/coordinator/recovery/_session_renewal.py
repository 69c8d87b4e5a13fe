"""The numbers of one session, and how all tasks enter another one.

Parameter servers that begin anew enter a session with a number that nobody has used, in
which they are empty (`renew_servers`). When they are filled, the workers enter it, too
(`renew_workers`). Nothing is dispatched meanwhile (`suspend_dispatch`). The law of this
file: only this file changes the number of a session; what was sent for a number before
is refused from then on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, final

from zstrat.coordinator._rest import Cut, cut_of
from zstrat.wire import CloseSession

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from zstrat.coordinator._dispatch import Dispatcher
    from zstrat.coordinator._fences import Fences
    from zstrat.coordinator.connecting import StoreDirectory, TaskSession
    from zstrat.coordinator.replication import Replication
    from zstrat.errors import PSUnavailableError
    from zstrat.ps import PsClient


class RenewedCluster(Protocol):
    """All that knows the number of a session (`Cluster`)."""

    @property
    def ps(self) -> Sequence[TaskSession]:
        """By store."""
        ...

    @property
    def workers(self) -> Sequence[TaskSession]: ...

    @property
    def client(self) -> PsClient: ...

    @property
    def fences(self) -> Fences: ...

    @property
    def store_directory(self) -> StoreDirectory: ...

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
        self.farewells: list[CloseSession] = []
        """Close the sessions before, on a task that still serves one of them."""
        self._cluster, self._draw = cluster, draw

    @property
    def ended_steps(self) -> Cut:
        """The steps that have ended."""
        dispatcher = self._cluster.dispatcher
        return Cut() if dispatcher is None else cut_of(dispatcher.queue)

    # ---- what workers get meanwhile --------------------------------------------------

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

    # ---- another session -------------------------------------------------------------

    def renew_servers(self) -> None:
        """Has all parameter servers enter another session, in which they are empty.
        What is sent for this one is refused from then on."""
        cluster = self._cluster
        self.farewells.append(CloseSession(self.session, False))
        self.session = self._draw()
        cluster.client.enter(self.session)
        cluster.fences.enter(self.session)
        if (replication := cluster.replication) is not None:
            replication.renew(self.session, self.farewells)
            stores = range(len(cluster.ps))
            cluster.store_directory.begin_anew(map(replication.home_of, stores))
        for task in cluster.ps:
            task.renew(self.session, self.farewells)

    async def close_ended_steps(self) -> None:
        """Tells the servers which steps have ended.

        Raises:
            PSUnavailableError, DeadlineExceededError: One does not answer.
        """
        cut = self.ended_steps
        await self._cluster.fences.up_to(cut.end, cut.besides)

    def renew_workers(self) -> None:
        """Has the workers enter the session of the servers; what they work on runs
        again."""
        cluster = self._cluster
        self.worker_session = self.session
        if cluster.replication is not None:
            cluster.replication.start()
        if cluster.dispatcher is not None:
            cluster.dispatcher.enter(self.session)
        for task in cluster.workers:
            task.renew(self.session, self.farewells)
