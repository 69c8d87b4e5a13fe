"""The coordinator with blocking calls, as TensorFlow's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self, final

import jax

from zstrat.program import hide_frames

from ._control import CoordinatorCore, control_of
from ._datasets import PerWorkerDataset, make_dataset, make_resources
from ._values import PerWorkerValues, RemoteValue

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from types import TracebackType

    from zstrat.wire import PlainTree

    from ._strategy import CoordinatedStrategy


@final
class ClusterCoordinator:
    """Schedules functions on the workers of a strategy, and survives their loss.

    There is one per strategy: making it again returns the same. As a context manager it
    joins at a normal exit, and shuts down in any case.

    Args:
        strategy: A `ParameterServerStrategy`.
        max_queued: Closures that may wait for a worker; `schedule` blocks beyond.
        closures_in_flight: Closures that a worker holds at a time; left out, it follows
            the worker's speed: those it works on and about 20 ms of work. 1 to 16384.
        max_attempts: So many workers may be lost while they run one closure, before
            that closure is reported as the cause. 5 if left out.
        worker_wait_timeout: Seconds that work waits while there is no worker at all.
            600 if left out.

    Raises:
        ValueError: ``strategy`` is of another kind, or has a coordinator with other
            options.
    """

    _control: CoordinatorCore

    def __new__(
        cls,
        strategy: CoordinatedStrategy,
        *,
        max_queued: int | None = None,
        closures_in_flight: int | None = None,
        max_attempts: int | None = None,
        worker_wait_timeout: float | None = None,
    ) -> ClusterCoordinator:
        options = {
            "max_queued": max_queued,
            "closures_in_flight": closures_in_flight,
            "max_attempts": max_attempts,
            "worker_wait_timeout": worker_wait_timeout,
        }
        control = control_of(strategy, options)
        with control.session.lock:
            made = control.session.faces.get("blocking")
            if not isinstance(made, ClusterCoordinator):
                made = super().__new__(cls)
                made._control = control
                control.session.faces["blocking"] = made
            return made

    @property
    def strategy(self) -> CoordinatedStrategy:
        """The strategy that it schedules for."""
        return self._control.strategy

    @property
    def errors(self) -> list[Exception]:
        """All errors that came with the one that was raised last, the first first."""
        with self._control.engine.lock:
            return list(self._control.engine.queue.errors)

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
            Exception: An error of an earlier closure; this one is not scheduled then.
        """
        try:
            return self._control.engine.put(self._control.call(fn, args, kwargs))
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
        """
        try:
            self._control.engine.join(timeout)
        except Exception as error:  # to the caller
            hide_frames(error)
            raise

    def done(self) -> bool:
        """Whether nothing waits and nothing runs. Raises as `join` does."""
        try:
            return self._control.engine.done()
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
                returns an iterable of pytrees of arrays. Or such an iterable itself.
        """
        return make_dataset(self._control, dataset_fn)

    def metrics(self) -> dict[str, PlainTree]:
        """Counters and gauges: closures that wait and run, and the state of workers."""
        return self._control.metrics()

    def shutdown(self, cluster: bool = False) -> None:
        """Cancels what waits and runs, and lets the workers go. Idempotent.

        Variables can be read on, unless ``cluster``: then the session is closed, and
        workers and parameter servers end as processes.
        """
        self._control.shutdown(cluster)

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
        return make_resources(self._control, fn, args, kwargs)


def _is_value(leaf: object) -> bool:
    return isinstance(leaf, RemoteValue)


def _fetched(leaf: Any) -> Any:
    # Of the class: the value of an asynchronous program would be awaited.
    return RemoteValue.fetch(leaf) if isinstance(leaf, RemoteValue) else leaf
