"""The two faces of a coordinator: with blocking calls, as TensorFlow's, and awaited.

Both hold the same `CoordinatorCore`, which decides everything; a face waits for it in
its own way, and hides zstrat's frames from the errors that go to the user.
"""

from __future__ import annotations

import asyncio
import inspect
import sys
from functools import partial
from typing import TYPE_CHECKING, Any, Self, final

import jax

from zstrat.program import hide_frames
from zstrat.transport import on_own_thread

from ._core import CoordinatedStrategy, CoordinatorCore, core_of
from ._datasets import PerWorkerDataset, make_dataset, make_resources
from ._on_worker import coordinator_on_worker
from ._values import AsyncRemoteValue, PerWorkerValues, RemoteValue
from .profiling import MAX_BYTES, SECONDS, Profile

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from types import TracebackType
    from typing import SupportsIndex

    from zstrat.wire import PlainTree

    from ._pending_errors import CallSite


class CoordinatorFace:
    """What both coordinators of a strategy have, and what needs no waiting."""

    _core: CoordinatorCore

    @property
    def strategy(self) -> CoordinatedStrategy:
        """The strategy that it schedules for."""
        return self._core.strategy

    @property
    def errors(self) -> list[Exception]:
        """All errors that came with the one that was raised last, the first first."""
        return self._core.errors

    def metrics(self) -> dict[str, PlainTree]:
        """What the run does, as plain data: counters, gauges, and of the last ten
        seconds rates, phases of steps, staleness, the tasks and what holds them up. All
        of it is described in `docs/observing.md`. It is what the tasks have said last,
        which they do about once a second; only ``stores_without_backup`` is asked of
        the parameter servers now, which have a second to answer.

        ``steps_per_s`` is how many closures ended per second, on all workers together,
        in the last ten seconds, or since the first one ended if that is less, but at
        least in one second; 0 when none has ended for so long. ``fetches`` is how often
        a value was fetched (`fetch`, `get`, ``await``), each of a structure for itself.
        With ``on_ps_loss="restore"`` ``ps_restores`` is how often the parameter servers
        were filled from a checkpoint, and ``steps_lost`` how many steps had ended, well
        or with an error, and are not in the values any more. With ``replicas=1``
        ``failovers`` is how often a second copy took a parameter server's place, and
        ``stores_without_backup`` how many stores are not known to have two whole copies
        now: one of a server that does not answer counts, too. ``stores`` has a dict for
        each store: ``process`` (the task that serves it), ``address``, ``backup`` and
        ``state``; ``stores_moved`` says how often one was moved.
        """
        return self._core.metrics()

    def profile(
        self,
        path: str | os.PathLike[str],
        *,
        steps: SupportsIndex | None = None,
        seconds: float = SECONDS,
        max_bytes: SupportsIndex = MAX_BYTES,
        jax_profile: bool = False,
    ) -> Profile:
        """The time line of all tasks while a block runs; see `zstrat.profile`, which
        finds the coordinator by itself. For ``with``, and on an event loop for ``async
        with``."""
        return Profile(lambda: self._core, path, steps, seconds, max_bytes, jax_profile)

    def __reduce__(self) -> Any:
        return coordinator_on_worker, (self.strategy, type(self))

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:
        return self


@final
class ClusterCoordinator(CoordinatorFace):
    """Schedules functions on the workers of a strategy, and survives their loss.

    There is one per strategy: making it again returns the same. As a context manager it
    joins at a normal exit, and shuts down in any case.

    Args:
        strategy: A `ParameterServerStrategy`.
        max_queued: Closures that may wait for a worker; `schedule` blocks beyond, and
            while their arguments take 1 GiB. 262,144 if left out.
        closures_in_flight: Closures that a worker holds at a time; left out, it follows
            the worker's speed: those it works on and about 20 ms of work, or two round
            trips to it if that is more. 1 to 16384.
        max_attempts: So many workers may be lost while they run one closure, before
            that closure is reported as the cause. 5 if left out.
        worker_wait_timeout: Seconds that work waits while there is no worker at all.
            600 if left out.
        errors_once: An error that `fetch` has raised is not raised by another call, and
            what waits is not cancelled for it: for notebooks. Left out: the next
            `schedule`, `join` or `done` raises it, too, as in TensorFlow.

    Raises:
        ValueError: ``strategy`` is of another kind, or has a coordinator with other
            options.
        ClosedError: The strategy is closed.
    """

    def __new__(
        cls,
        strategy: CoordinatedStrategy,
        *,
        max_queued: int | None = None,
        closures_in_flight: int | None = None,
        max_attempts: int | None = None,
        worker_wait_timeout: float | None = None,
        errors_once: bool | None = None,
    ) -> ClusterCoordinator:
        options = {
            "max_queued": max_queued,
            "closures_in_flight": closures_in_flight,
            "max_attempts": max_attempts,
            "worker_wait_timeout": worker_wait_timeout,
            "errors_once": errors_once,
        }
        core = core_of(strategy, options)
        with core.session.lock:
            made = core.session.coordinators.get("blocking")
            if not isinstance(made, ClusterCoordinator):
                made = super().__new__(cls)
                made._core = core
                core.session.coordinators["blocking"] = made
            return made

    def __repr__(self) -> str:
        queue = self._core.engine.queue
        counts = f"{queue.running} closures run, {queue.queued} wait"
        return f"<zstrat.ClusterCoordinator: {counts}>"

    def schedule(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> RemoteValue:
        """Queues a call for the next free worker and returns at once.

        Per-worker values and iterators among the arguments are replaced by those of the
        worker that runs it. The function is traced now, if it was not before, so that
        mistakes in it are raised here. Blocks while the queue is full.

        Raises:
            TypeError: ``fn`` is no `zstrat.function`.
            ValueError: A `RemoteValue` is among the arguments.
            KeyboardInterrupt: Ctrl-C, which cancels what waits, as in `join`.
            Exception: An error of an earlier closure, with a note that says which; this
                one is not scheduled then.
        """
        caller = sys._getframe(1)
        site = caller.f_code, caller.f_lasti
        del caller  # which an error's traceback would keep alive
        core = self._core
        try:
            found = core.calls.find(fn, args, kwargs)
            if found is None:
                found = core.calls.make(fn, args, kwargs)
            return core.engine.put(*found, site)
        except KeyboardInterrupt as interrupt:
            core.engine.interrupted(interrupt)
            raise
        except Exception as error:  # to the caller
            hide_frames(error)
            raise

    def join(self, timeout: float | None = None) -> None:
        """Blocks until all that was scheduled before has ended.

        Raises:
            Exception: The first error of a closure, once, when nothing runs any more.
            PSUnavailableError: A parameter server is gone; names it.
            UnavailableError: No worker was there for ``worker_wait_timeout`` seconds.
            DeadlineExceededError: ``timeout`` seconds have passed; all goes on.
            KeyboardInterrupt: Ctrl-C, which cancels what waits and what the workers
                have not begun, as `cancel` does. It does not wait for what they have
                begun: the next call does.
        """
        engine = self._core.engine
        try:
            engine.join(timeout)
        except KeyboardInterrupt as interrupt:
            engine.interrupted(interrupt)
            raise
        except Exception as error:  # to the caller
            hide_frames(error)
            raise

    def cancel(self, timeout: float | None = None) -> int:
        """Cancels what waits, and what the workers have not begun; then blocks until
        nothing runs any more. Afterwards the coordinator can be used as before.

        The values of what was cancelled raise `CancelledError`; it has had no effect,
        and never will. An error that is still to be raised stays to be raised.

        Returns:
            How many closures were cancelled.

        Raises:
            DeadlineExceededError: ``timeout`` seconds have passed; what waited is
                cancelled, and the next call waits for what runs.
        """
        return self._core.engine.cancel(timeout)

    def done(self) -> bool:
        """Whether nothing waits and nothing runs. Raises as `join` does."""
        try:
            return self._core.engine.done()
        except Exception as error:  # to the caller
            hide_frames(error)
            raise

    def fetch(self, val: Any) -> Any:
        """The same nested structure with every `RemoteValue` in it fetched.

        Raises:
            Exception: As `RemoteValue.fetch`.
        """
        try:
            return jax.tree.map(_fetched, val, is_leaf=_is_value)
        except Exception as error:  # to the caller
            hide_frames(error)
            raise

    def create_per_worker_dataset(
        self, dataset_fn: Callable[..., Iterable[Any]] | Iterable[Any]
    ) -> PerWorkerDataset:
        """A dataset of which each worker makes its own.

        Args:
            dataset_fn: Called on each worker, without arguments or with an
                `InputContext` that has the worker's index and the number of workers;
                returns an iterable of pytrees of arrays. It may be a `zstrat.function`,
                which is called as the plain function. Or such an iterable itself.
        """
        return make_dataset(self._core, dataset_fn)

    def shutdown(self, cluster: bool = False) -> None:
        """Cancels what waits and runs, and lets the workers go. Idempotent.

        The connection of the strategy stays open, unless ``cluster``: variables can be
        read on, another coordinator of the strategy can be made, and no other program
        can use the cluster before ``strategy.close()``. With ``cluster`` the session is
        closed, and workers and parameter servers end as processes.
        """
        self._core.shutdown(cluster)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                self.join()
        finally:
            self.shutdown()

    def _create_per_worker_resources(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> PerWorkerValues:
        return make_resources(self._core, fn, args, kwargs)


@final
class AsyncClusterCoordinator(CoordinatorFace):
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
        awaiter = sys._getframe(1)
        site: CallSite | None = None
        if awaiter.f_code.co_flags & inspect.CO_COROUTINE:  # no task of its own runs it
            site = awaiter.f_code, awaiter.f_lasti
        del awaiter  # which an error's traceback would keep alive
        core = self._core
        try:
            found = core.calls.find(fn, args, kwargs)
            if found is None:
                found = await asyncio.to_thread(core.calls.make, fn, args, kwargs)
            return await core.engine.put_async(*found, site)
        except Exception as error:  # to the caller
            hide_frames(error)
            raise

    async def join(self) -> None:
        """Waits until all that was scheduled before has ended.

        Cancellation: all goes on; join again.
        """
        try:
            await self._core.engine.join_async()
        except Exception as error:  # to the caller
            hide_frames(error)
            raise

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
        try:
            return await self._core.engine.done_async()
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
        """See `ClusterCoordinator.create_per_worker_dataset`; pickles on a thread. The
        ``values`` of its iterators, and of what `build` gives, are awaited."""
        return await asyncio.to_thread(
            make_dataset, self._core, dataset_fn, AsyncRemoteValue
        )

    async def shutdown(self, cluster: bool = False) -> None:
        """See `ClusterCoordinator.shutdown`.

        Cancellation: it is shut down all the same.
        """
        await on_own_thread(partial(self._core.shutdown, cluster))

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


def _fetched(leaf: Any) -> Any:
    # Of the class: the value of an asynchronous program would be awaited.
    return RemoteValue.fetch(leaf) if isinstance(leaf, RemoteValue) else leaf
