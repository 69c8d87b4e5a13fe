"""All tasks of a session: as the parts of `Cluster` see them (`ClusterTasks`), the
options with which it is opened on them (`SessionOptions`), and the addresses of stores,
which workers get (`StoreDirectory`).

The message that opens a worker's session has the addresses of all stores. When a store
moves later, each connected worker gets a `MoveServer`; the others get the new address
when their session is opened again. The law of this file: only it fills in the message
that opens a session, and only it sends workers the address of a store.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol, final

from zstrat.errors import BusyError
from zstrat.wire import MoveServer, OpenSession

from ._task_links import log_failure
from ._task_session import TaskSessionEvents

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from zstrat.errors import PSUnavailableError
    from zstrat.ps import PsClient
    from zstrat.wire import Message

    from ._task_session import TaskSession


@final
class StoreDirectory:
    """The addresses of all stores of one session. On the loop.

    Args:
        addresses: First address of each store.
        workers: The sessions on the workers, which come and go.
    """

    def __init__(
        self, addresses: Iterable[str], workers: Sequence[TaskSession]
    ) -> None:
        # Messages that open a session hold these two lists themselves, and are encoded
        # when they are sent: they name the addresses of that moment.
        self.addresses: Final = list(addresses)
        self.views: Final = [1] * len(self.addresses)
        """By number of the store: a view, a number that grows with each move, by which
        a worker knows the newer of two addresses."""
        self._workers = workers
        self._unanswered: set[asyncio.Future[Message]] = set()
        """Futures of the answers to messages that workers have not answered yet."""

    def publish(self, store: int, view: int, address: str) -> None:
        """Sends all workers the address at which a store is served from now on."""
        before, self.addresses[store] = self.addresses[store], address
        self.views[store] = view
        if before == address:  # it stays where it was, without its backup
            return
        for worker in self._workers:
            # Not only those in the session: a request that opens it may be on its way
            # with the old address.
            if worker.link.is_open:  # else it gets all addresses with its next session
                self._send(worker, MoveServer(worker.session, store, view, address))

    async def wait_workers_notified(self, timeout: float) -> None:
        """Waits until all connected workers have the addresses, at most ``timeout``
        seconds.

        Cancellation: loses nothing.
        """
        if self._unanswered:
            await asyncio.wait(list(self._unanswered), timeout=timeout)

    def _send(self, worker: TaskSession, moved: MoveServer) -> None:
        try:
            answer = worker.link.submit(moved)
        except BusyError:
            # The message that opens its session has all addresses.
            worker.reopen("too many requests wait for its answer to send an address")
            return
        self._unanswered.add(answer)
        answer.add_done_callback(self._answered)

    def _answered(self, answer: asyncio.Future[Message]) -> None:
        # A worker that was lost meanwhile gets the address with its next session.
        self._unanswered.discard(answer)
        log_failure("sending a worker the address of a store", answer)


class ClusterTasks(TaskSessionEvents, Protocol):
    """The part of `Cluster` that recovery, replication, moves of stores and time lines
    share."""

    @property
    def name(self) -> str:
        """The name under which another program may resume the session; or empty."""

    @property
    def session(self) -> int:
        """The number of the session on the parameter servers."""

    @property
    def ps(self) -> Sequence[TaskSession]:
        """The sessions on the servers of the stores, by number of the store."""

    @property
    def workers(self) -> Sequence[TaskSession]: ...

    @property
    def worker_addresses(self) -> Mapping[int, str]: ...

    @property
    def client(self) -> PsClient: ...

    @property
    def store_directory(self) -> StoreDirectory: ...

    @property
    def outage_error(self) -> PSUnavailableError | None:
        """The error that names a store without a server; None if all are served."""

    def store_lost(self, store: int, reason: str) -> None:
        """Notes that no process serves the store. `TaskSession.gone` says whether it is
        lost for good."""


@dataclass(frozen=True, slots=True)
class SessionOptions:
    """Options of a program's session on its cluster."""

    prefetch: int = 0
    """Number of optimizer steps whose variables workers fetch ahead."""
    listens: bool = False
    """Whether workers send the output of their steps to this program."""
    joins: bool = False
    """Whether another program holds the parameter servers, and creates the
    variables."""
    is_held_for_others: bool = False
    """Whether other programs join the session, and the variables stay when this one
    ends."""
    replicas: int = 0
    """Number of further copies of what each parameter server holds, in other servers: 0
    or 1."""
    stores_per_ps: int = 1
    """Number of stores of each parameter server at first. A store holds a part of the
    variables, and may move to another server."""
    name: str = ""
    """Name of the session, with which it resumes the stores that an earlier program
    left under the same name. It stays for a later program, unless it is ended
    (`Cluster.end_on_close`)."""
    restart_partial: bool = False
    """Whether to begin empty if only a part is left of the session to resume."""
    program: str = ""
    """Name of this program in the errors of other programs that want the cluster."""

    @property
    def is_shared(self) -> bool:
        """Whether other programs update the variables, too."""
        return self.joins or self.is_held_for_others

    def opening(
        self,
        session: int,
        place: int,
        workers: int,
        servers: list[str],
        views: list[int],
    ) -> OpenSession:
        """Returns the message that opens the session on a task.

        Args:
            session: Number of the session.
            place: Index of the worker in the session, or number of the store.
            workers: Number of places for workers, which later workers may fill.
            servers, views: Those of the `StoreDirectory`, as they are when the message
                is sent; [] for a server.
        """
        return OpenSession(
            session,
            place,
            workers,
            servers,
            self.prefetch,
            self.listens,
            views,
            self.name,
            replicas=self.replicas,
            is_shared=self.is_shared,
            program=self.program,
        )
