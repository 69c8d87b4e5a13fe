"""Handles of results and per-worker resources, which are on other processes.

A `RemoteValue` is one slotted object: the loop thread only stores bytes in it, and the
thread that fetches makes arrays of them. The law of this file: the state of a value
changes with the engine's lock held, and from NOT_READY at most once. Only values of
per-worker resources change again, as their worker is lost or returns.
"""

from __future__ import annotations

import abc
import asyncio
import enum
import math
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn, Protocol, final

import jax.numpy as jnp
import numpy as np

from zstrat.errors import CancelledError, ClosureAbortedError, DeadlineExceededError
from zstrat.program import Resource, StepIterator, hide_frames, rebuild
from zstrat.program.trace import joined
from zstrat.wire import LayoutMessage, dtype_named

from ._placeholders import DatasetOnWorker, Unfetched

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Generator, Iterable, Sequence

    from zstrat.transport import Bell


class RemoteValueStatus(enum.Enum):
    """The state of a value. NOT_READY: not settled; ABORTED: lost with its worker;
    READY: a result or an error."""

    NOT_READY = "NOT_READY"
    ABORTED = "ABORTED"
    READY = "READY"


_NOT_READY: Final = RemoteValueStatus.NOT_READY
_READY: Final = RemoteValueStatus.READY
_ABORTED: Final = RemoteValueStatus.ABORTED


class Kept(NamedTuple):
    """A result that stays on its worker until it is fetched."""

    worker: int
    epoch: int
    step: int
    layout: LayoutMessage | None


@dataclass(slots=True, eq=False)
class Inline:
    """A result in bytes, which came with the outcome of its closure."""

    layout: LayoutMessage | None
    data: bytes


class ClosureRun(NamedTuple):
    """One run of a step on a ``worker``; ``attempt`` counts the runs from 1."""

    step: int
    worker: str
    attempt: int


@dataclass(slots=True, eq=False)
class Result:
    """The name and the tree structure of a result, known before the result itself."""

    name: str
    treedef: Any


class ValueSource(Protocol):
    """The part of `ClosureEngine` that a remote value needs."""

    fetch_kept: Callable[[Kept], list[np.ndarray]]
    fetch_kept_async: Callable[[Kept], Awaitable[list[np.ndarray]]]
    wait_value: Callable[[RemoteValue, float | None], None]
    wait_value_async: Callable[[RemoteValue], Awaitable[None]]

    def fetched(self, error: Exception) -> None: ...

    def interrupted(self, interrupt: KeyboardInterrupt) -> None: ...


class RemoteValue(Unfetched):
    """The future result of a scheduled closure.

    ``value.fetch()`` blocks and returns numpy arrays, ``value.get()`` blocks and
    returns jax arrays. ``await value`` is ``fetch`` for coroutines, on any event loop.
    """

    __slots__ = (
        "__weakref__",
        "_bells",
        "_engine",
        "_error",
        "_expected",
        "_result",
        "_run",
        "state",
    )

    def __init__(self, engine: ValueSource, expected: Result) -> None:
        self._engine, self._expected = engine, expected
        self.state = _NOT_READY
        self._bells: list[Bell] | None = None
        self._error: Exception | None = None
        # Bytes with their layout, a result that its worker keeps, or, after the first
        # fetch, the arrays.
        self._result: Inline | Kept | _Opened | None = None
        self._run: tuple[int, str, int] | None = None

    @property
    def is_ready(self) -> bool:
        """Whether `fetch` returns or raises at once."""
        return self.state is not _NOT_READY

    @property
    def is_aborted(self) -> bool:
        """Whether the worker of the value is lost, so that `fetch` raises until the
        worker returns."""
        return self.state is _ABORTED

    @property
    def error(self) -> Exception | None:
        """The error of the closure, if it failed. Does not wait."""
        return self._error

    @property
    def run(self) -> ClosureRun | None:
        """The run that returned this result or error; None if the closure has not
        ended, or did not end on a worker.

        If ``run.attempt`` is above 1, workers were lost while they ran the step. Its
        updates were applied once, but some may be those of an earlier run with other
        data and other variable values, while the result is that of the last run.
        """
        return None if self._run is None else ClosureRun(*self._run)

    def fetch(self, timeout: float | None = None) -> Any:
        """Waits for the result, and returns it with numpy arrays as leaves, or numpy
        scalars for rank 0.

        Args:
            timeout: The most seconds to wait; None: no limit.

        Raises:
            CancelledError: The closure was cancelled, or its resource was aborted.
            ClosureAbortedError: A large result was lost with its worker.
            DeadlineExceededError: ``timeout`` has passed; the closure continues.
            PSUnavailableError, UnavailableError: The closure cannot run while a
                parameter server, or every worker, is lost; fetch again later.
            KeyboardInterrupt: Ctrl-C, which cancels waiting closures, as in
                `ClusterCoordinator.join`.
            Exception: The error of the step function, each time.
        """
        try:
            self._engine.wait_value(self, timeout)
            return self._numpy(self._settled(self._engine.fetch_kept))
        except KeyboardInterrupt as interrupt:
            self._engine.interrupted(interrupt)
            raise
        except Exception as error:  # to the caller
            hide_frames(error)
            raise

    def _advice(self) -> str:
        return (
            f"{self!r}, a result that was not fetched; call value.fetch(), or "
            "coordinator.fetch(values) for a tree"
        )

    def get(self, timeout: float | None = None) -> Any:
        """Waits for the result like `fetch`, and returns it with jax arrays as
        leaves."""
        return joined.mapped(_on_device, self.fetch(timeout))

    def __await__(self) -> Generator[Any, None, Any]:
        """Returns what `fetch` returns, awaited. Cancellation: loses nothing; await it
        again."""
        return self._fetch_async().__await__()

    async def _fetch_async(self) -> Any:
        try:
            await self._engine.wait_value_async(self)
            result = self._result
            # Here and not in `_settled`, which would block the caller's loop.
            if self.state is _READY and isinstance(result, Kept):
                self._result = _Opened(
                    await self._engine.fetch_kept_async(result), result.layout
                )
            return self._numpy(self._settled(self._engine.fetch_kept))
        except Exception as error:  # to the caller
            hide_frames(error)
            raise

    def __repr__(self) -> str:
        detail = f" error={self._error!r}" if self._error else ""
        if (run := self.run) is not None and run.attempt > 1:
            detail = f" of attempt {run.attempt} on {run.worker}{detail}"
        return f"<RemoteValue of {self._expected.name} {self.state.value}{detail}>"

    def _settle(self, result: Inline | Kept | None) -> None:
        """Settles the value with a result, or with None that of a resource, which stays
        on its worker."""
        # The result before the state: fetching threads read the state without the lock.
        self._error, self._result = None, result
        self._ready(_READY)

    def _settle_error(self, error: Exception) -> None:
        self._error = error
        self._ready(_READY)

    def _abort(self, error: ClosureAbortedError) -> None:
        self._error = error
        self._ready(_ABORTED)

    def _begin_again(self) -> None:
        self._error, self.state = None, _NOT_READY

    def _ready(self, state: RemoteValueStatus) -> None:
        self.state = state
        bells, self._bells = self._bells, None
        for bell in bells or ():
            bell.ring()

    def _listen(self, bell: Bell) -> None:
        if self._bells is None:
            self._bells = []
        self._bells.append(bell)

    def _unlisten(self, bell: Bell) -> None:
        if self._bells is not None and bell in self._bells:
            self._bells.remove(bell)

    def _settled(self, fetch_kept: Any) -> _Opened:
        """Returns the arrays of a settled value, or raises its error. Two threads may
        call this at once."""
        if self.state is _ABORTED:
            raise CancelledError(
                "The corresponding function is aborted. Please reschedule the function."
                f" ({self._error})"
            ) from self._error
        if self._error is not None:
            self._engine.fetched(self._error)
            # Else each raise would lengthen the traceback.
            raise self._error.with_traceback(None)
        result = self._result
        if isinstance(result, Inline):
            opened = _Opened(cut(result.layout, result.data), result.layout)
        elif isinstance(result, Kept):
            opened = _Opened(fetch_kept(result), result.layout)
        elif result is None:
            raise NotImplementedError(
                "the value of a per-worker resource stays on its worker; pass it to a "
                "scheduled function"
            )
        else:
            return result
        # Another thread may do the same: both arrays are equal, and either one may
        # stay.
        self._result = opened
        return opened

    def _numpy(self, opened: _Opened) -> Any:
        leaves = [leaf[()] if leaf.ndim == 0 else leaf for leaf in opened.leaves]
        plain = None if opened.layout is None else opened.layout.structure
        return rebuild(plain, leaves, self._expected.treedef)


@final
class AsyncRemoteValue(RemoteValue):
    """The `RemoteValue` of an `AsyncClusterCoordinator`: none of its methods blocks.

    ``await value`` and ``await value.fetch()`` return numpy arrays, ``await
    value.get()`` jax arrays. Blocking code uses ``ClusterCoordinator.fetch(value)``.
    """

    __slots__ = ()

    def _advice(self) -> str:
        return f"{self!r}, a result that was not awaited; use await value"

    async def fetch(self, timeout: float | None = None) -> Any:
        """Waits for the result like `RemoteValue.fetch`, without blocking; raises the
        same errors.

        Cancellation: loses nothing; await it again.
        """
        try:
            async with asyncio.timeout(timeout) as waiting:
                return await self
        except TimeoutError:
            if not waiting.expired():  # an error of the step
                raise
            late = f"fetch: {self!r} did not end within {timeout} s"
            raise DeadlineExceededError(late) from None

    async def get(self, timeout: float | None = None) -> Any:
        """Waits for the result like `fetch`, and returns it with jax arrays as
        leaves."""
        return joined.mapped(_on_device, await self.fetch(timeout))


@dataclass(slots=True, eq=False)
class _Opened:
    leaves: Sequence[np.ndarray]
    layout: LayoutMessage | None


def cut(layout: LayoutMessage | None, data: bytes) -> list[np.ndarray]:
    """Splits ``data`` into the leaves of a layout, as read-only arrays."""
    leaves, offset = [], 0
    for name, shape in zip(layout.dtypes, layout.shapes, strict=True) if layout else ():
        dtype, count = dtype_named(name), math.prod(shape)
        # A view of bytes, which no user can change: values are shared by all who fetch.
        leaf = np.frombuffer(data, dtype, count, offset).reshape(shape)
        leaves.append(leaf)
        offset += leaf.nbytes
    return leaves


def _on_device(leaf: Any) -> Any:
    array = isinstance(leaf, np.ndarray | np.generic)
    return jnp.asarray(leaf) if array else leaf


class Claim:
    """Keeps a resource alive. The handle of the resource, and closures that use it,
    hold one shared claim; when that is collected, ``drop`` is called with the number of
    the resource. ``drop`` must not take a lock."""

    __slots__ = ("__weakref__",)

    def __init__(self, drop: Callable[[int], object], number: int) -> None:
        # At exit the session ends, and everything with it.
        weakref.finalize(self, drop, number).atexit = False


class PerWorker(Resource, abc.ABC):
    """A handle of a resource on every worker, as an argument of scheduled functions."""

    claim: Claim
    require_kept: Callable[[], None]
    """Raises `ClosedError` if a newer strategy took the cluster over."""
    is_leased = False
    """Whether elements of the resource are leased to steps as these are handed out."""

    @abc.abstractmethod
    def _stand_in(self) -> object | None:
        """Returns the placeholder of the resource for a trace; None if no worker could
        build the resource."""


class StandIn(StepIterator):
    """The placeholder of an iterator while a step function is traced."""

    is_resource = True

    def __init__(self, handle: PerWorker, spec: Any, name: str) -> None:
        super().__init__(None, spec, name=name)
        # Traces are cached, and must not keep alive what the user dropped.
        self.handle: Final = weakref.ref(handle)


class DatasetHandle(abc.ABC):
    """A dataset on the workers. Its iterators are arguments of scheduled functions, not
    the dataset itself."""

    _name: str
    _spec: Any = None
    """The structure of an element, once a worker has built an iterator."""

    @abc.abstractmethod
    def __iter__(self) -> Any: ...

    @property
    def element_spec(self) -> Any:
        """The structure of an element (a whole batch, if elements are batches): a
        pytree of `jax.ShapeDtypeStruct`.

        Waits until a worker has built an iterator; starts a pass for that if needed.
        """
        return iter(self).element_spec if self._spec is None else self._spec

    def __reduce__(self) -> Any:
        # An object that is pickled may hold it; as an argument it is refused before.
        return DatasetOnWorker, (self._name,)

    @abc.abstractmethod
    def refuse(self) -> NoReturn:
        """Raises the error for use of the dataset as an argument.

        Raises:
            TypeError: Says what to pass instead.
        """


@final
class PerWorkerValues(PerWorker):
    """A value on every worker; a scheduled function gets that of the worker that runs
    it.

    Args:
        values: One `RemoteValue` per worker, in the order of the workers; from an
            `AsyncClusterCoordinator` an `AsyncRemoteValue`.
        living: Returns the values of the present workers; None: ``values`` never
            change.

    Raises:
        AssertionError: A value is not a `RemoteValue`.
    """

    def __init__(
        self,
        values: Iterable[RemoteValue],
        resource: int = 0,
        claim: Claim | None = None,
        stand_in: Callable[[], object | None] | None = None,
        require_kept: Callable[[], None] | None = None,
        living: Callable[[], tuple[RemoteValue, ...]] | None = None,
    ) -> None:
        self._values, self._living = tuple(values), living
        for value in self._values:
            if not isinstance(value, RemoteValue):
                raise AssertionError(
                    f"PerWorkerValues takes RemoteValues; got {type(value).__name__}"
                )
        self.resource = resource
        self.claim = claim or Claim(lambda number: None, resource)
        self.require_kept = require_kept or (lambda: None)
        self._describe = stand_in

    @property
    def values(self) -> tuple[RemoteValue, ...]:
        """The outcome of building the value, for each present worker."""
        return self._values if self._living is None else self._living()

    def _stand_in(self) -> object | None:
        if self._describe is None:
            raise ValueError(
                "only PerWorkerValues that the coordinator made can be arguments of a "
                "function (see create_per_worker_dataset)"
            )
        return self._describe()
