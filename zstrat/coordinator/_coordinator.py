"""The public coordinators: `ClusterCoordinator` blocks, `AsyncClusterCoordinator`
awaits.

The two coordinators of a strategy share one `CoordinatorCore`, which does the work.
Each waits for the core in its own way, and removes zstrat's frames from tracebacks that
the user sees.
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
from ._leased_datasets import (
    LeasedDataset,
    LeasedIterator,
    begin_evaluation,
    current_epoch,
    make_leased_dataset,
    summed,
)
from ._placeholders import coordinator_on_worker
from ._values import AsyncRemoteValue, PerWorkerValues, RemoteValue
from ._waiting import UserCall
from .profiling import MAX_BYTES, SECONDS, Profile

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from types import TracebackType
    from typing import SupportsIndex

    from zstrat.wire import PlainTree

    from ._steps import CallSite
    from .leases import OnError


class CoordinatorFace:
    """The methods and properties of both coordinators that do not wait."""

    _core: CoordinatorCore

    @property
    def strategy(self) -> CoordinatedStrategy:
        """The strategy of this coordinator."""
        return self._core.strategy

    @property
    def errors(self) -> list[Exception]:
        """All errors of the failure that was raised last, oldest first: that of the
        first closure that failed, and of those that failed after it."""
        return self._core.errors

    def metrics(self) -> dict[str, PlainTree]:
        """Returns counters and gauges of the run as plain data, as `docs/observing.md`
        lists them. Rates, phases of steps and staleness are of the last ten seconds.
        The tasks report about once a second; only ``stores_without_backup`` is asked of
        the parameter servers now, which have a second to answer.

        - ``steps_per_s``: closures that ended per second on all workers, over the last
          ten seconds, or since the first one if that is shorter (but at least one
          second). 0 if none ended.
        - ``fetches``: remote values fetched so far, each leaf of a tree counted.
        - ``ps_restores``, ``steps_lost`` (with ``on_ps_loss="restore"``): how often the
          parameter servers were restored from a checkpoint, and how many steps that had
          ended were lost by it.
        - ``failovers``, ``stores_without_backup`` (with ``replicas=1``): how often a
          backup took over from a parameter server, and how many stores are not known to
          have a complete backup now. Stores of a server that does not answer count.
        - ``rounds``: for each optimizer with `zstrat.Rounds`, by name: rounds that were
          ``closed`` and are closed ``per_s``, contributions that are ``waiting``, and
          by worker how many came ``late``, how many were ``dropped``, and in how many
          ``rounds`` and for how many ``seconds`` others ``waited_for`` the worker;
          ``recent``: the same of the last 64 rounds.
        - ``leases``: for each pass through a leased dataset, by name: the ``epoch`` of
          ``epochs``, its number of ``examples``, leases that are ``open`` or come back
          (``to_lease_again``), examples that are ``done`` and ``skipped`` of ``total``
          in all epochs, and how many leases each of the ``workers`` has.
        - ``largest_lead`` (with ``staleness=``): the most closures by which a worker
          was ahead of the slowest one; else None.
        - ``stores``: for each store the ``process`` that serves it, its ``address``,
          ``backup`` and ``state``; ``stores_moved``: how often a store was moved.
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
        """Records a time line of all tasks while a ``with`` or ``async with`` block
        runs. See `zstrat.profile`, which finds the coordinator by itself."""
        return Profile(lambda: self._core, path, steps, seconds, max_bytes, jax_profile)

    def __reduce__(self) -> Any:
        return coordinator_on_worker, (self.strategy, type(self))

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: object) -> Self:
        return self


@final
class ClusterCoordinator(CoordinatorFace):
    """Schedules functions on the workers of a strategy, and survives lost workers.

    A strategy has one coordinator: the constructor returns an existing one. As a
    context manager the coordinator joins at a normal exit, and shuts down in any case.

    Args:
        strategy: A `ParameterServerStrategy`.
        max_queued: The most closures (scheduled calls) that wait for a worker.
            `schedule` blocks when there are more, or when their arguments take 1 GiB.
            Default: 262,144.
        closures_in_flight: Closures that a worker holds at a time, 1 to 16384. Default:
            follows the worker's speed: the closures that the worker runs, and as many
            as it runs in 20 ms, or in two round trips to it if that is longer.
        max_attempts: How many workers may be lost while they run a closure, before the
            closure fails as the likely cause. Default: 5.
        worker_wait_timeout: Seconds that closures wait while there is no worker at all.
            Default: 600.
        errors_once: For notebooks: an error that `fetch` raised is not raised again,
            and does not cancel waiting closures. Default: the next `schedule`, `join`
            or `done` raises it, too, as in TensorFlow.

    Raises:
        ValueError: ``strategy`` is of another kind, or already has a coordinator with
            other options.
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
        # Two threads that ask at once get the same object.
        with core.session.lock:
            coordinator: ClusterCoordinator | None = core.blocking
            if coordinator is None:
                coordinator = super().__new__(cls)
                coordinator._core = core
                core.blocking = coordinator
            return coordinator

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
        """Queues a call for the next free worker, and returns at once.

        Each per-worker value or iterator among the arguments is replaced by that of the
        worker that runs the call. A function is traced by its first call, so that
        mistakes in it are raised here. Blocks while the queue is full.

        Raises:
            TypeError: ``fn`` is not a `zstrat.function`.
            ValueError: A `RemoteValue` is among the arguments.
            KeyboardInterrupt: Ctrl-C, which cancels waiting closures, as in `join`.
            Exception: The error of an earlier closure, with a note that names it. This
                call is not scheduled then.
        """
        # Two look-ups, as each call pays for them; errors find the line (`line_of`).
        caller = sys._getframe(1)
        site = caller.f_code, caller.f_lasti
        del caller  # an error's traceback would keep it alive
        core = self._core
        try:
            call = core.calls.find(fn, args, kwargs)
            if call is None:
                call = core.calls.make(fn, args, kwargs)
            return core.engine.put(*call, site)
        except KeyboardInterrupt as interrupt:
            core.engine.interrupted(interrupt)
            raise
        except Exception as error:  # to the caller
            hide_frames(error)
            raise

    def join(self, timeout: float | None = None) -> None:
        """Blocks until all closures scheduled so far have ended.

        Raises:
            Exception: The first error of a closure, once, after all others have ended.
            PSUnavailableError: A parameter server is lost; names it.
            UnavailableError: There was no worker for ``worker_wait_timeout`` seconds.
            DeadlineExceededError: ``timeout`` seconds have passed; closures continue.
            KeyboardInterrupt: Ctrl-C, which cancels the closures that no worker has
                started, as `cancel` does. The next call waits for the others.
        """
        engine = self._core.engine
        with UserCall(engine.interrupted):
            engine.join(timeout)

    def cancel(self, timeout: float | None = None) -> int:
        """Cancels the closures that no worker has started, and blocks until the others
        have ended. Then the coordinator can be used as before.

        The values of cancelled closures raise `CancelledError`. Cancelled closures have
        no effect. A pending error stays pending.

        Returns:
            How many closures were cancelled.

        Raises:
            DeadlineExceededError: ``timeout`` seconds have passed. The waiting closures
                are cancelled, and the next call waits for those that run.
        """
        return self._core.engine.cancel(timeout)

    def done(self) -> bool:
        """Returns whether all closures have ended. Raises what `join` raises."""
        with UserCall():
            return self._core.engine.done()

    def fetch(self, val: Any) -> Any:
        """Fetches every `RemoteValue` in a nested structure, and returns the structure.

        Raises:
            Exception: See `RemoteValue.fetch`.
        """
        with UserCall():
            return jax.tree.map(_fetched, val, is_leaf=_is_value)

    def create_per_worker_dataset(
        self, dataset_fn: Callable[..., Iterable[Any]] | Iterable[Any]
    ) -> PerWorkerDataset:
        """Creates a dataset on every worker.

        Args:
            dataset_fn: Called on each worker, without arguments or with an
                `InputContext` that has the worker's index and the number of workers;
                returns an iterable of pytrees of arrays. A `zstrat.function` is called
                as the plain function. May also be such an iterable itself.
        """
        return make_dataset(self._core, dataset_fn)

    def create_leased_dataset(
        self,
        source: Any,
        batch: int | None = None,
        *,
        shuffle_seed: int | None = None,
        epochs: int | None = 1,
        drop_remainder: bool = False,
        on_error: OnError = "raise",
    ) -> LeasedDataset:
        """Creates one dataset for all workers, of which each example is applied exactly
        once in each epoch, whatever happens to workers and parameter servers.

        Args:
            source: Arrays (a tree of them, sliced by their first axes), anything with
                ``len`` and an index (a list, a dataset of grain or HuggingFace), or a
                `zs.data.Dataset` of arrays or files, perhaps with `map`, `take` or
                `skip`. Or a function that returns one of these, called on each worker,
                and never in this process. Or a `zs.data.Dataset.from_indexed`, which
                has the next four arguments.
            batch: Number of examples in a batch; the last one of an epoch may have
                fewer.
            shuffle_seed: Seed of the order of examples, which differs in each epoch;
                None: the order of the source. For files the order of the files is
                shuffled, and the rows within each file, but not the records of
                `from_files`.
            epochs: Number of epochs; None: without end.
            drop_remainder: Leave out the last examples of an epoch that do not fill a
                batch.
            on_error: "raise": the examples of a step that raised an error are read
                again by a later step; "skip": they are left out and counted, and only a
                fetch raises the error.

        Raises:
            TypeError, ValueError: The examples of the source cannot be read by number,
                and the error says what to pass instead; or an argument is wrong.
        """
        return make_leased_dataset(
            self._core,
            source,
            batch,
            on_error,
            shuffle_seed=shuffle_seed,
            epochs=epochs,
            drop_remainder=drop_remainder,
        )

    def schedule_epoch(
        self,
        fn: Callable[..., Any],
        iterator: LeasedIterator,
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[RemoteValue]:
        """Runs a step on all batches of the current epoch, and blocks until the epoch
        is over.

        Args:
            iterator: The iterator of a leased dataset.
            args: Arguments of the step; None: the iterator alone.

        Returns:
            The values of all steps. There are more values than batches if steps that
            had ended were lost with a parameter server, and ran again.

        Raises:
            TypeError: ``iterator`` is not of a leased dataset.
            OutOfRangeError: All epochs are over.
            ValueError: The step does not draw from the iterator, or draws a number of
                batches that does not divide those of the epoch.
            Exception: What `join` raises. Call `schedule_epoch` again for the rest of
                the epoch.
        """
        caller = sys._getframe(1)
        site = caller.f_code, caller.f_lasti
        del caller  # an error's traceback would keep it alive
        core, args = self._core, (iterator,) if args is None else args
        values: list[RemoteValue] = []
        with UserCall(core.engine.interrupted):
            epoch = current_epoch(iterator)
            call = core.calls.make(fn, args, kwargs)
            # Again, as batches of steps that were cancelled or lost come back to the
            # epoch.
            while steps := epoch.steps_of(call[0]):
                values += [core.engine.put(*call, site) for _ in range(steps)]
                core.engine.join(None)
            return values

    def evaluate(self, fn: Callable[..., Any], data: LeasedDataset) -> Any:
        """Returns the sum of ``fn(iterator)`` over one pass through all examples, each
        exactly once. ``fn`` returns a pytree of sums over its batch, such as the sum of
        losses and the number of examples; floats are summed in float64. Raises what
        `schedule_epoch` raises."""
        iterator = begin_evaluation(data)
        return summed(value.fetch() for value in self.schedule_epoch(fn, iterator))

    def shutdown(self, cluster: bool = False) -> None:
        """Cancels all closures, and stops using the workers. Idempotent.

        The strategy stays connected: variables can still be read, a new coordinator can
        be made, and no other program can use the cluster before ``strategy.close()``.

        Args:
            cluster: Also close the session, and end the processes of workers and
                parameter servers.
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
    """The `ClusterCoordinator` for coroutines, on any event loop.

    Both coordinators of a strategy use the same queue. As an asynchronous context
    manager it joins at a normal exit, and shuts down in any case.

    Args, Raises:
        See `ClusterCoordinator`.
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

        A new function is traced on another thread.

        Cancellation: the call is not scheduled.
        """
        awaiter = sys._getframe(1)
        site: CallSite | None = None
        if (
            awaiter.f_code.co_flags & inspect.CO_COROUTINE
        ):  # else a separate task runs it
            site = awaiter.f_code, awaiter.f_lasti
        del awaiter  # an error's traceback would keep it alive
        core = self._core
        try:
            call = core.calls.find(fn, args, kwargs)
            if call is None:
                # Tracing may take seconds, in which the caller's loop has to run.
                call = await asyncio.to_thread(core.calls.make, fn, args, kwargs)
            return await core.engine.put_async(*call, site)
        except Exception as error:  # to the caller
            hide_frames(error)
            raise

    async def join(self) -> None:
        """Waits until all closures scheduled so far have ended; see
        `ClusterCoordinator.join`.

        Cancellation: the closures continue; join again.
        """
        with UserCall():
            await self._core.engine.join_async()

    async def cancel(self) -> int:
        """Cancels the closures that no worker has started; see
        `ClusterCoordinator.cancel`.

        Cancellation: the waiting closures are cancelled all the same; the next call
        waits for those that run.
        """
        return await self._core.engine.cancel_async()

    async def done(self) -> bool:
        """Returns whether all closures have ended. Raises what `join` raises.

        Cancellation: see `join`.
        """
        with UserCall():
            return await self._core.engine.done_async()

    async def fetch(self, val: Any) -> Any:
        """Fetches every `RemoteValue` in a nested structure, and returns the structure.

        Cancellation: loses nothing; fetch again.
        """
        with UserCall():
            leaves, treedef = jax.tree.flatten(val, is_leaf=_is_value)
            fetched = [await x if isinstance(x, RemoteValue) else x for x in leaves]
            return jax.tree.unflatten(treedef, fetched)

    async def create_per_worker_dataset(
        self, dataset_fn: Callable[..., Iterable[Any]] | Iterable[Any]
    ) -> PerWorkerDataset:
        """Creates a dataset on every worker; see
        `ClusterCoordinator.create_per_worker_dataset`. Pickles the dataset on another
        thread. The ``values`` of its iterators, and of what `build` returns, are
        awaited."""
        return await asyncio.to_thread(
            make_dataset, self._core, dataset_fn, AsyncRemoteValue
        )

    async def create_leased_dataset(
        self,
        source: Any,
        batch: int | None = None,
        *,
        shuffle_seed: int | None = None,
        epochs: int | None = 1,
        drop_remainder: bool = False,
        on_error: OnError = "raise",
    ) -> LeasedDataset:
        """Creates one dataset for all workers; see
        `ClusterCoordinator.create_leased_dataset`. Pickles the source on another
        thread."""
        return await asyncio.to_thread(
            make_leased_dataset,
            self._core,
            source,
            batch,
            on_error,
            AsyncRemoteValue,
            shuffle_seed=shuffle_seed,
            epochs=epochs,
            drop_remainder=drop_remainder,
        )

    async def schedule_epoch(
        self,
        fn: Callable[..., Any],
        iterator: LeasedIterator,
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> list[AsyncRemoteValue]:
        """Runs a step on all batches of the current epoch; see
        `ClusterCoordinator.schedule_epoch`.

        Cancellation: steps that were scheduled continue.
        """
        core, args = self._core, (iterator,) if args is None else args
        values: list[AsyncRemoteValue] = []
        with UserCall():
            epoch = await asyncio.to_thread(current_epoch, iterator)
            call = await asyncio.to_thread(core.calls.make, fn, args, kwargs)
            while steps := epoch.steps_of(call[0]):
                values += [
                    await core.engine.put_async(*call, None) for _ in range(steps)
                ]
                await core.engine.join_async()
            return values

    async def evaluate(self, fn: Callable[..., Any], data: LeasedDataset) -> Any:
        """Returns the sum of ``fn(iterator)`` over all examples; see
        `ClusterCoordinator.evaluate`.

        Cancellation: steps that were scheduled continue.
        """
        values = await self.schedule_epoch(fn, begin_evaluation(data))
        return summed([await value for value in values])

    async def shutdown(self, cluster: bool = False) -> None:
        """Cancels all closures, and stops using the workers; see
        `ClusterCoordinator.shutdown`.

        Cancellation: the coordinator shuts down all the same.
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
    # Not leaf.fetch(): that of an AsyncRemoteValue has to be awaited.
    return RemoteValue.fetch(leaf) if isinstance(leaf, RemoteValue) else leaf
