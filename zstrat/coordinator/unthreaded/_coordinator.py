"""Cluster, queue, dispatcher and engine of one program, driven by its own loop.

`ClusterSession` and `CoordinatorCore` are the same for programs that block: there the
loop is on a thread of its own. Here the program is a coroutine on that very loop. What
is decided is decided by the same objects.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, final

from zstrat.coordinator._calls import Code, PickledArguments, ScheduledCall
from zstrat.coordinator._cluster import Cluster
from zstrat.coordinator._dispatch import Dispatcher
from zstrat.coordinator._engine import ClosureEngine
from zstrat.coordinator._queue import Queue
from zstrat.coordinator._resources import Record
from zstrat.coordinator._servers import ParameterServers
from zstrat.coordinator._values import Result
from zstrat.coordinator.connecting import SessionOptions
from zstrat.program import bytes_of_inputs, cut_inputs

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import numpy as np

    from zstrat.config import Settings
    from zstrat.coordinator._values import AsyncRemoteValue, Kept
    from zstrat.coordinator._waiting import Cancelling
    from zstrat.transport import MakeTaskLink


@final
class LoopCoordinator:
    """The hold of one program on its tasks. Made, and used, on its loop.

    Args:
        session: Its number: the incarnation in the HELLO of its links.
        ps, workers: Addresses.
        replicas: Copies of what each parameter server holds: 0 or 1.
        stores_per_ps: Logical servers of each of them.
        draw: Draws the number of a session anew.
        name: What the session is called, to go on with what was left under that name.
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
        """From now on there are closures. Called when ``cluster`` is open, and may be
        called again behind `shut_down`.

        Args:
            in_flight: Closures of one worker; None: as many as seems good.
            wait: Seconds without any worker until one gives up.
        """
        queue = Queue(max_attempts=max_attempts, first_step=self._first_step)
        self._engine = ClosureEngine(queue, self)
        self._dispatcher = Dispatcher(
            self._engine,
            self.cluster.session,
            (),  # they are told when it is attached
            self.cluster.fences,
            self.cluster.ps,
            closures_in_flight=in_flight,
            prefetch=self.cluster.options.prefetch,
            worker_wait_timeout=wait,
        )
        self.cluster.attach(self._dispatcher)

    def shut_down(self) -> None:
        """Cancels what waits and runs, as `CoordinatorCore.shutdown` does."""
        cause = "the coordinator was shut down"
        self.engine.close(cause)
        self._first_step = self.engine.queue.steps.next
        self._dispatcher.stop(cause)

    @property
    def engine(self) -> ClosureEngine:
        assert self._engine is not None, "coordinate comes first"
        return self._engine

    def iterate(self, name: str, maker: Code) -> int:
        """Has every worker iterate a dataset; returns the number of its iterators."""
        members = self._dispatcher.members.members
        places = [member.place for member in members]
        record = Record(self.engine, places, name=name, purpose="iterator", maker=maker)
        self._dispatcher.builder.add_soon(record)
        self._dispatcher.turn_soon()
        return record.number

    def call(self, name: str, code: Code, example: np.generic) -> ScheduledCall:
        """A call of a function with one number, which each closure brings."""
        arguments = PickledArguments(cut_inputs((example,), [0]), {})
        return ScheduledCall(Result(name, None), code, arguments, ())

    async def schedule(
        self, call: ScheduledCall, number: np.generic
    ) -> AsyncRemoteValue:
        """Queues a closure. Raises pending errors."""
        return await self.engine.put_async(call, bytes_of_inputs([number]), None)

    def wake(self) -> None:
        """As of `LoopSide`."""
        self._dispatcher.turn_soon()

    def cancel_waiting(self, wish: Cancelling | None = None) -> None:
        """As of `LoopSide`."""
        asyncio.get_running_loop().call_soon(self._dispatcher.cancel_waiting, wish)

    def fence(self, end: int, doubtful: list[int]) -> None:
        """As of `LoopSide`."""
        loop = asyncio.get_running_loop()
        loop.call_soon(self._dispatcher.fence, end, doubtful)

    def bring(self, kept: Kept) -> list[np.ndarray]:
        """Refused: nothing may block on this loop."""
        raise RuntimeError(f"step {kept.step}: await its value, on this loop")

    async def bring_async(self, kept: Kept) -> list[np.ndarray]:
        """As of `LoopSide`."""
        return await self._dispatcher.bring(kept)
