"""Where each store is served, as the workers know it.

The message that opens a worker's session names all addresses. When a store moves after
that, each worker that is connected is sent a `MoveServer`; one that is not gets the new
address when its session is opened the next time. Law of the file: only this file sends
workers the address of a store.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final, final

from zstrat.errors import BusyError
from zstrat.wire import MoveServer

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from zstrat.wire import Message

    from ._task_session import TaskSession

log = logging.getLogger("zstrat.coordinator")


@final
class StoreDirectory:
    """The addresses of all stores of one session. On the loop.

    Args:
        addresses: By store, as they are at first.
        workers: The sessions with the workers that the cluster has at any time.
    """

    def __init__(
        self, addresses: Iterable[str], workers: Sequence[TaskSession]
    ) -> None:
        # Messages that open a session hold these two lists themselves, and are encoded
        # when they are sent: they name the addresses of that moment.
        self.addresses: Final = list(addresses)
        self.views: Final = [1] * len(self.addresses)
        """By store: how often its copies have changed, which orders its addresses."""
        self._workers = workers
        self._telling: set[asyncio.Future[Message]] = set()
        """Answers that workers owe."""

    def publish(self, store: int, view: int, address: str) -> None:
        """The store is served at this address from now on: the workers are told."""
        before, self.addresses[store] = self.addresses[store], address
        self.views[store] = view
        if before == address:  # it goes on where it was, as without a backup
            return
        for worker in self._workers:
            if worker.link.is_open:  # else it is told when its session is opened
                self._tell(worker, MoveServer(worker.session, store, view, address))

    def reset_addresses(self, addresses: Iterable[str]) -> None:
        """The stores are filled again at these addresses, in another session, which the
        workers are to enter: they are told then."""
        self.addresses[:] = addresses

    async def wait_workers_told(self, timeout: float) -> None:
        """Waits until all workers that are there know where stores are, or for so many
        seconds.

        Cancellation: loses nothing.
        """
        if self._telling:
            await asyncio.wait(list(self._telling), timeout=timeout)

    def _tell(self, worker: TaskSession, moved: MoveServer) -> None:
        try:
            telling = worker.link.submit(moved)
        except BusyError:
            worker.reopen("it has too much to answer to hear where a server is")
            return
        self._telling.add(telling)
        telling.add_done_callback(self._answered)

    def _answered(self, telling: asyncio.Future[Message]) -> None:
        """A worker that was lost meanwhile is told when its session opens again."""
        self._telling.discard(telling)
        if not telling.cancelled() and (error := telling.exception()) is not None:
            log.info("telling a worker where a parameter server is: %s", error)
