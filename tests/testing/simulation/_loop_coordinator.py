"""A coordinator without threads: the program is a coroutine on the loop of its cluster.

It does what `ClusterSession` and `CoordinatorCore` do for programs that block, whose
loop is on another thread, with the same cluster, queue, engine and dispatcher.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, final

from zstrat.coordinator.connecting import SessionOptions
from zstrat.coordinator.parts import (
    ClosureEngine,
    Cluster,
    Code,
    Dispatcher,
    Draw,
    LeaseBook,
    ParameterServers,
    PickledArguments,
    Queue,
    Record,
    Result,
    ScheduledCall,
)
from zstrat.data import Dataset, LeasedSource
from zstrat.program import bytes_of_inputs, cut_inputs, dump_code

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import numpy as np

    from zstrat.config import Settings
    from zstrat.coordinator import AsyncRemoteValue
    from zstrat.coordinator.parts import Cancelling, Kept
    from zstrat.transport import MakeTaskLink


@final
class LoopCoordinator:
    """One program's session with its tasks. Made and used on its loop.

    Args:
        session: Its number: the incarnation in the HELLO of its links.
        ps, workers: Addresses.
        replicas: Copies of what each parameter server holds: 0 or 1.
        stores_per_ps: Logical servers of each of them.
        draw: Draws a session number that nobody has used.
        name: Of the session, to resume what a program left under it.
    """

    def __init__(
        self,
        session: int,
        ps: Sequence[str],
        workers: Mapping[int, str],
        settings: Settings,
        make_link: MakeTaskLink,
        *,
        prefetch: int,
        replicas: int = 0,
        stores_per_ps: int = 1,
        draw: Callable[[], int],
        name: str = "",
    ) -> None:
        times = settings.timeouts
        self.cluster: Final = Cluster(
            session,
            ps,
            workers,
            times,
            make_link,
            SessionOptions(
                prefetch, replicas=replicas, stores_per_ps=stores_per_ps, name=name
            ),
            draw=draw,
        )
        self.servers: Final = ParameterServers(self.cluster, times.request)
        self._engine: ClosureEngine | None = None
        self._first_step = 1

    def coordinate(
        self, *, in_flight: int | None, max_attempts: int, wait: float
    ) -> None:
        """Starts to hand out closures. The cluster has to be open; may be called again
        after `shut_down`.

        Args:
            in_flight: Closures per worker; None: it follows the worker's speed.
            wait: Seconds without any worker until closures fail.
        """
        queue = Queue(max_attempts=max_attempts, first_step=self._first_step)
        self._engine = ClosureEngine(queue, self, self.cluster.rounds.rounds)
        self._dispatcher = Dispatcher(
            self._engine,
            self.cluster.session,
            self.cluster.fences,
            self.cluster.rounds,
            closures_in_flight=in_flight,
            prefetch=self.cluster.options.prefetch,
            staleness=None,
            worker_wait_timeout=wait,
        )
        self.cluster.attach(self._dispatcher)

    def shut_down(self) -> None:
        """Cancels all closures, as `CoordinatorCore.shutdown` does."""
        cause = "the coordinator was shut down"
        self.engine.close(cause)
        self._first_step = self.engine.queue.steps.next
        self._dispatcher.stop(cause)

    @property
    def engine(self) -> ClosureEngine:
        assert self._engine is not None, "call coordinate() first"
        return self._engine

    def iterate(self, name: str, maker: Code) -> int:
        """Builds an iterator on every worker; returns its resource number."""
        return self._add(name, maker)

    def _add(self, name: str, maker: Code, book: LeaseBook | None = None) -> int:
        members = self._dispatcher.members.members
        places = [member.place for member in members]
        record = Record(
            self.engine, places, name=name, purpose="iterator", maker=maker, book=book
        )
        self._dispatcher.builder.add_soon(record)
        self._dispatcher.turn_soon()
        return record.number

    def lease(self, size: int, batch: int) -> tuple[int, LeaseBook]:
        """Starts a pass of a leased dataset, of the numbers below ``size``."""
        book = LeaseBook("the examples", batch)
        if self.cluster.name:
            book.noted_as = number = next(self.cluster.renewal.leased_passes)
            book.inherited = self.cluster.renewal.done_leases.pop(number, ())
        maker = Code(dump_code(LeasedSource(Dataset.range(size), batch)))
        record = self._add("the examples", maker, book)
        self.engine.queue.leases.books[record] = book
        return record, book

    def call(
        self, name: str, code: Code, example: np.generic, leases: int = 0
    ) -> ScheduledCall:
        """A call of a function of one number, which each closure passes, and of a batch
        of a leased dataset."""
        arguments = PickledArguments(cut_inputs((example,), [0]), {})
        draws = [Draw(leases, 1)] if leases else ()
        return ScheduledCall(Result(name, None), code, arguments, (), draws=draws)

    async def schedule(
        self, call: ScheduledCall, number: np.generic
    ) -> AsyncRemoteValue:
        """Queues a closure. Raises the pending error, if any."""
        return await self.engine.put_async(call, bytes_of_inputs([number]), None)

    def wake(self) -> None:
        """See `LoopSide`."""
        self._dispatcher.turn_soon()

    def cancel_waiting(self, request: Cancelling | None = None) -> None:
        """See `LoopSide`."""
        asyncio.get_running_loop().call_soon(self._dispatcher.cancel_waiting, request)

    def fence(self, end: int, doubtful: list[int]) -> None:
        """See `LoopSide`."""
        loop = asyncio.get_running_loop()
        loop.call_soon(self._dispatcher.fence, end, doubtful)

    def fetch_kept(self, kept: Kept) -> list[np.ndarray]:
        """Refused: nothing may block on this loop."""
        raise RuntimeError(f"step {kept.step}: await its value on this loop")

    async def fetch_kept_async(self, kept: Kept) -> list[np.ndarray]:
        """See `LoopSide`."""
        return await self._dispatcher.fetch_kept(kept)
