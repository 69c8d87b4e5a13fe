"""The coordinator for programs that are asynchronous themselves."""

from __future__ import annotations

import asyncio
import inspect
import sys
from typing import TYPE_CHECKING, Any, Self, final

import jax

from ._core import CoordinatedStrategy, CoordinatorCore, core_of
from ._datasets import PerWorkerDataset, make_dataset
from ._on_worker import coordinator_on_worker
from ._values import RemoteValue

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from types import TracebackType

    from zstrat.wire import PlainTree

    from ._pending_errors import CallSite


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
        errors_once: bool | None = None,
    ) -> None:
        self._core: CoordinatorCore = core_of(
            strategy,
            {
                "max_queued": max_queued,
                "closures_in_flight": closures_in_flight,
                "max_attempts": max_attempts,
                "worker_wait_timeout": worker_wait_timeout,
                "errors_once": errors_once,
            },
        )

    @property
    def strategy(self) -> CoordinatedStrategy:
        """The strategy that it schedules for."""
        return self._core.strategy

    @property
    def errors(self) -> list[Exception]:
        """All errors that came with the one that was raised last, the first first."""
        return self._core.errors

    async def schedule(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> RemoteValue:
        """Queues a call for the next free worker; see `ClusterCoordinator.schedule`.

        A function that was not traced before is traced on a thread.

        Cancellation: nothing is scheduled.
        """
        awaiter = sys._getframe(1)
        site: CallSite | None = None
        if awaiter.f_code.co_flags & inspect.CO_COROUTINE:  # no task of its own runs it
            site = awaiter.f_code, awaiter.f_lasti
        del awaiter  # which an error's traceback would keep alive
        core = self._core
        call = core.calls.find(fn, args, kwargs)
        if call is None:
            call = await asyncio.to_thread(core.calls.make, fn, args, kwargs)
        return await core.engine.put_async(call, site)

    async def join(self) -> None:
        """Waits until all that was scheduled before has ended.

        Cancellation: all goes on; join again.
        """
        await self._core.engine.join_async()

    async def cancel(self) -> int:
        """See `ClusterCoordinator.cancel`.

        Cancellation: what waited is cancelled all the same; the next call waits for
        what runs.
        """
        return await self._core.engine.cancel_async()

    async def done(self) -> bool:
        """Whether nothing waits and nothing runs. Raises as `join` does.

        Cancellation: as `join`.
        """
        return await self._core.engine.done_async()

    async def fetch(self, val: Any) -> Any:
        """The same nested structure with every `RemoteValue` in it fetched.

        Cancellation: loses nothing; fetch again.
        """
        leaves, treedef = jax.tree.flatten(val, is_leaf=_is_value)
        fetched = [await x if isinstance(x, RemoteValue) else x for x in leaves]
        return jax.tree.unflatten(treedef, fetched)

    async def create_per_worker_dataset(
        self, dataset_fn: Callable[..., Iterable[Any]] | Iterable[Any]
    ) -> PerWorkerDataset:
        """See `ClusterCoordinator.create_per_worker_dataset`; pickles on a thread."""
        return await asyncio.to_thread(make_dataset, self._core, dataset_fn)

    def metrics(self) -> dict[str, PlainTree]:
        """See `ClusterCoordinator.metrics`."""
        return self._core.metrics()

    async def shutdown(self, cluster: bool = False) -> None:
        """See `ClusterCoordinator.shutdown`.

        Cancellation: it is shut down all the same.
        """
        await asyncio.to_thread(self._core.shutdown, cluster)

    def __reduce__(self) -> Any:
        return coordinator_on_worker, (self.strategy, AsyncClusterCoordinator)

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:
        return self

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
