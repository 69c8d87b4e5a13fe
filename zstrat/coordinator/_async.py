"""The coordinator for programs that are asynchronous themselves."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Self, final

import jax

from zstrat.program import hide_frames

from ._control import CoordinatorCore, control_of
from ._datasets import PerWorkerDataset, make_dataset
from ._values import AsyncRemoteValue, RemoteValue

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from types import TracebackType

    from zstrat.wire import PlainTree

    from ._strategy import CoordinatedStrategy


@final
class AsyncClusterCoordinator:
    """As `ClusterCoordinator`, with coroutines where that blocks.

    It may be used on any event loop. Both coordinators of a strategy are two faces of
    the same queue. As an asynchronous context manager it joins at a normal exit.

    Args, Raises:
        As `ClusterCoordinator`.
    """

    def __init__(
        self,
        strategy: CoordinatedStrategy,
        *,
        max_queued: int | None = None,
        closures_in_flight: int | None = None,
        max_attempts: int | None = None,
        worker_wait_timeout: float | None = None,
    ) -> None:
        self._control: CoordinatorCore = control_of(
            strategy,
            {
                "max_queued": max_queued,
                "closures_in_flight": closures_in_flight,
                "max_attempts": max_attempts,
                "worker_wait_timeout": worker_wait_timeout,
            },
        )

    @property
    def strategy(self) -> CoordinatedStrategy:
        """The strategy that it schedules for."""
        return self._control.strategy

    @property
    def errors(self) -> list[Exception]:
        """All errors that came with the one that was raised last, the first first."""
        with self._control.engine.lock:
            return list(self._control.engine.queue.errors)

    async def schedule(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> AsyncRemoteValue:
        """Queues a call for the next free worker; see `ClusterCoordinator.schedule`.

        A function that was not traced before is traced on a thread.

        Cancellation: nothing is scheduled.
        """
        try:
            control = self._control
            call = control.calls.find(fn, args, kwargs)
            if call is None:
                call = await asyncio.to_thread(control.calls.make, fn, args, kwargs)
            return await control.engine.put_async(call)
        except Exception as error:  # to the caller
            hide_frames(error)
            raise

    async def join(self) -> None:
        """Waits until all that was scheduled before has ended.

        Cancellation: all goes on; join again.
        """
        try:
            await self._control.engine.join_async()
        except Exception as error:  # to the caller
            hide_frames(error)
            raise

    async def done(self) -> bool:
        """Whether nothing waits and nothing runs. Raises as `join` does.

        Cancellation: as `join`.
        """
        try:
            return await self._control.engine.done_async()
        except Exception as error:  # to the caller
            hide_frames(error)
            raise

    async def fetch(self, val: Any) -> Any:
        """The same nested structure with every `RemoteValue` in it fetched.

        Cancellation: loses nothing; fetch again.
        """
        try:
            leaves, treedef = jax.tree.flatten(val, is_leaf=_is_value)
            fetched = [await x if isinstance(x, RemoteValue) else x for x in leaves]
            return jax.tree.unflatten(treedef, fetched)
        except Exception as error:  # to the caller
            hide_frames(error)
            raise

    async def create_per_worker_dataset(
        self, dataset_fn: Callable[..., Iterable[Any]] | Iterable[Any]
    ) -> PerWorkerDataset:
        """See `ClusterCoordinator.create_per_worker_dataset`; pickles on a thread."""
        return await asyncio.to_thread(make_dataset, self._control, dataset_fn)

    def metrics(self) -> dict[str, PlainTree]:
        """See `ClusterCoordinator.metrics`."""
        return self._control.metrics()

    async def shutdown(self, cluster: bool = False) -> None:
        """See `ClusterCoordinator.shutdown`.

        Cancellation: it is shut down all the same.
        """
        await asyncio.to_thread(self._control.shutdown, cluster)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                await self.join()
        finally:
            await self.shutdown()


def _is_value(leaf: object) -> bool:
    return isinstance(leaf, RemoteValue)
