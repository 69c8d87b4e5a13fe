"""All tasks of a session, as the parts of `Cluster` see them (`ClusterTasks`), and the
addresses of stores, which workers get (`StoreDirectory`).

The message that opens a worker's session has all addresses. When a store moves later,
each connected worker gets a `MoveServer`; the others get the new address when their
session is opened again. The law of this file: only this file sends workers the address
of a store.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, Protocol, final

from zstrat.errors import BusyError
from zstrat.wire import MoveServer

from ._session_request import log_failure
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
        addresses: By store, at the beginning.
        workers: The sessions on the workers, which come and go.
    """

    def __init__(
        self, addresses: Iterable[str], workers: Sequence[TaskSession]
    ) -> None:
        # Messages that open a session hold these two lists themselves, and are encoded
        # when they are sent: they name the addresses of that moment.
        self.addresses: Final = list(addresses)
        self.views: Final = [1] * len(self.addresses)
        """By store: its view, by which a worker knows the newer of two addresses."""
        self._workers = workers
        self._unanswered: set[asyncio.Future[Message]] = set()
        """Messages to workers that they have not answered yet."""

    def publish(self, store: int, view: int, address: str) -> None:
        """Sends all workers the address where a store is served from now on."""
        before, self.addresses[store] = self.addresses[store], address
        self.views[store] = view
        if before == address:  # it stays where it was, without its backup
            return
        for worker in self._workers:
            if worker.link.is_open:  # else it gets all addresses with its next session
                self._send(worker, MoveServer(worker.session, store, view, address))

    def reset_addresses(self, addresses: Iterable[str]) -> None:
        """Sets the addresses for another session, with which workers get them."""
        self.addresses[:] = addresses

    async def wait_workers_notified(self, timeout: float) -> None:
        """Waits until all connected workers know the addresses, at most ``timeout``
        seconds.

        Cancellation: loses nothing.
        """
        if self._unanswered:
            await asyncio.wait(list(self._unanswered), timeout=timeout)

    def _send(self, worker: TaskSession, moved: MoveServer) -> None:
        try:
            answer = worker.link.submit(moved)
        except BusyError:
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
        ...

    @property
    def session(self) -> int:
        """The number of the session on the parameter servers."""
        ...

    @property
    def ps(self) -> Sequence[TaskSession]:
        """The sessions on the servers of the stores, by number of the store."""
        ...

    @property
    def workers(self) -> Sequence[TaskSession]: ...

    @property
    def worker_addresses(self) -> Mapping[int, str]: ...

    @property
    def client(self) -> PsClient: ...

    @property
    def store_directory(self) -> StoreDirectory: ...

    @property
    def failovers(self) -> int:
        """Number of times that a backup became the primary of a store."""
        ...

    @property
    def outage_error(self) -> PSUnavailableError | None:
        """The error that names a store without a server; None if all are served."""
        ...

    def store_lost(self, store: int, reason: str) -> None:
        """Notes that no process serves the store. `TaskSession.gone` says whether it is
        lost for good."""
        ...
