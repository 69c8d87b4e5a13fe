"""What the user holds of things that live or are made elsewhere.

A `RemoteValue` is one slotted object: the loop thread only puts bytes into it, and the
thread that fetches cuts them into arrays. The law of this file: the state of a value
changes with the engine's lock held, and from NOT_READY at most once, except for the
values of per-worker resources, which go away and return with their worker.
"""

from __future__ import annotations

import abc
import asyncio
import enum
import math
import weakref
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn, Protocol, final

import jax.numpy as jnp
import numpy as np

from zstrat.errors import CancelledError, ClosureAbortedError, DeadlineExceededError
from zstrat.program import Resource, StepIterator, hide_frames, rebuild
from zstrat.program.trace import joined
from zstrat.wire import LayoutMessage, dtype_named

from ._on_worker import Unfetched

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Generator, Iterable, Sequence

    from zstrat.transport import Bell


class RemoteValueStatus(enum.Enum):
    """NOT_READY; ABORTED: gone with its worker; READY: there, or failed."""

    NOT_READY = "NOT_READY"
    ABORTED = "ABORTED"
    READY = "READY"


_NOT_READY: Final = RemoteValueStatus.NOT_READY
_READY: Final = RemoteValueStatus.READY
_ABORTED: Final = RemoteValueStatus.ABORTED


class Kept:
    """A result that stays on its worker until it is fetched."""

    __slots__ = ("epoch", "layout", "step", "worker")

    def __init__(
        self, worker: int, epoch: int, step: int, layout: LayoutMessage | None
    ) -> None:
        self.worker, self.epoch, self.step, self.layout = worker, epoch, step, layout


class ClosureRun(NamedTuple):
    """One run of a step: the ``attempt``-th, on ``worker``."""

    step: int
    worker: str
    attempt: int


class Result:
    """What is known of a result before it is there."""

    __slots__ = ("name", "treedef")

    def __init__(self, name: str, treedef: Any) -> None:
        self.name, self.treedef = name, treedef


class ValueSource(Protocol):
    """The engine of a value, which brings results that were kept on their worker."""

    bring: Callable[[Kept], list[np.ndarray]]
    bring_async: Callable[[Kept], Awaitable[list[np.ndarray]]]
    wait_value: Callable[[RemoteValue, float | None], None]
    wait_value_async: Callable[[RemoteValue], Awaitable[None]]

    def fetched(self, error: Exception) -> None: ...

    def interrupted(self, interrupt: KeyboardInterrupt) -> None: ...


class RemoteValue(Unfetched):
    """The result, some time, of a scheduled closure.

    ``value.fetch()`` blocks and gives numpy arrays, ``value.get()`` blocks and gives
    jax arrays, ``await value`` is ``fetch`` for coroutines, on any event loop.
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
        # Bytes with their layout, a result that was kept away, or, once somebody has
        # looked, the arrays themselves.
        self._result: _Inline | Kept | _Opened | None = None
        self._run: tuple[int, str, int] | None = None

    @property
    def is_ready(self) -> bool:
        """Whether `fetch` returns or raises at once."""
        return self.state is not _NOT_READY

    @property
    def is_aborted(self) -> bool:
        """Whether its worker is gone, so that `fetch` raises until it returns."""
        return self.state is _ABORTED

    @property
    def error(self) -> Exception | None:
        """The error with which the closure ended, if it did; never waits."""
        return self._error

    @property
    def run(self) -> ClosureRun | None:
        """The run that this is the result, or the error, of; None if it has not ended,
        or was not ended by a worker.

        If ``run.attempt`` is above 1, workers were lost with the step before. Its
        effects happened once, but some may be those of an earlier run, which computed
        with other data and other values, where this result is of the last one.
        """
        return None if self._run is None else ClosureRun(*self._run)

    def fetch(self, timeout: float | None = None) -> Any:
        """The result with numpy arrays as leaves; those of rank 0 are numpy scalars.

        Args:
            timeout: Seconds to wait at most; None waits for as long as it takes.

        Raises:
            CancelledError: The closure was cancelled, or its resource was aborted.
            ClosureAbortedError: A large result went away with its worker.
            DeadlineExceededError: ``timeout`` has passed; the closure goes on.
            PSUnavailableError, UnavailableError: It has not run, and does not while a
                parameter server, or every worker, is away; fetch it again later.
            KeyboardInterrupt: Ctrl-C, which cancels what waits, as in
                `ClusterCoordinator.join`.
            Exception: What the step function raised, every time.
        """
        try:
            self._engine.wait_value(self, timeout)
            return self._numpy(self._settled(self._engine.bring))
        except KeyboardInterrupt as interrupt:
            self._engine.interrupted(interrupt)
            raise
        except Exception as error:  # to the caller
            hide_frames(error)
            raise

    def _advice(self) -> str:
        return (
            f"{self!r}, a result that was not fetched: write value.fetch(), or "
            "coordinator.fetch(values) for a tree of them"
        )

    def get(self, timeout: float | None = None) -> Any:
        """As `fetch`, with jax arrays as leaves."""
        return joined.mapped(_on_device, self.fetch(timeout))

    def __await__(self) -> Generator[Any, None, Any]:
        """As `fetch`. Cancellation: loses nothing; await it again."""
        return self._fetch_async().__await__()

    async def _fetch_async(self) -> Any:
        try:
            await self._engine.wait_value_async(self)
            result = self._result
            if self.state is _READY and isinstance(result, Kept):
                self._result = _Opened(
                    await self._engine.bring_async(result), result.layout
                )
            return self._numpy(self._settled(self._engine.bring))
        except Exception as error:  # to the caller
            hide_frames(error)
            raise

    def __repr__(self) -> str:
        words = f" error={self._error!r}" if self._error else ""
        if (run := self.run) is not None and run.attempt > 1:
            words = f" of attempt {run.attempt} on {run.worker}{words}"
        return f"<RemoteValue of {self._expected.name} {self.state.value}{words}>"

    def _settle(self, layout: LayoutMessage | None, data: bytes) -> None:
        self._result = _Inline(layout, data)
        self._ready(_READY)

    def _settle_kept(self, kept: Kept) -> None:
        self._result = kept
        self._ready(_READY)

    def _settle_error(self, error: Exception) -> None:
        self._error = error
        self._ready(_READY)

    def _settle_built(self) -> None:
        self._error, self._result = None, None
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

    def _settled(self, bring: Any) -> _Opened:
        """The arrays, or the error. Two threads may open it at once: no harm."""
        if self.state is _ABORTED:
            raise CancelledError(
                "The corresponding function is aborted. Please reschedule the function."
                f" ({self._error})"
            ) from self._error
        if self._error is not None:
            self._engine.fetched(self._error)
            # Without this each raise would lengthen the traceback of the one before.
            raise self._error.with_traceback(None)
        result = self._result
        if isinstance(result, _Inline):
            opened = _Opened(cut(result.layout, result.data), result.layout)
        elif isinstance(result, Kept):
            opened = _Opened(bring(result), result.layout)
        elif result is None:
            raise NotImplementedError(
                "the value of a per-worker resource stays on its worker: pass it to a "
                "scheduled function"
            )
        else:
            return result
        self._result = opened
        return opened

    def _numpy(self, opened: _Opened) -> Any:
        leaves = [leaf[()] if leaf.ndim == 0 else leaf for leaf in opened.leaves]
        plain = None if opened.layout is None else opened.layout.structure
        return rebuild(plain, leaves, self._expected.treedef)


class _Inline:
    __slots__ = ("data", "layout")

    def __init__(self, layout: LayoutMessage | None, data: bytes) -> None:
        self.layout, self.data = layout, data


@final
class AsyncRemoteValue(RemoteValue):
    """What `AsyncClusterCoordinator.schedule` gives, and ``values`` of its datasets and
    iterators are: nothing of it blocks the loop.

    ``await value`` and ``await value.fetch()`` give numpy arrays, ``await value.get()``
    jax arrays. A blocking program gets it from ``ClusterCoordinator.fetch(value)``.
    """

    __slots__ = ()

    def _advice(self) -> str:
        return f"{self!r}, a result that was not awaited: write await value"

    async def fetch(self, timeout: float | None = None) -> Any:
        """As `RemoteValue.fetch`, awaited; raises as that does.

        Cancellation: loses nothing; await it again.
        """
        try:
            async with asyncio.timeout(timeout) as waiting:
                return await self
        except TimeoutError:
            if not waiting.expired():  # it is the step's own
                raise
            late = f"fetch: {self!r} is not there after {timeout} s"
            raise DeadlineExceededError(late) from None

    async def get(self, timeout: float | None = None) -> Any:
        """As `fetch`, with jax arrays as leaves."""
        return joined.mapped(_on_device, await self.fetch(timeout))


class _Opened:
    __slots__ = ("layout", "leaves")

    def __init__(
        self, leaves: Sequence[np.ndarray], layout: LayoutMessage | None
    ) -> None:
        self.leaves, self.layout = leaves, layout


def cut(layout: LayoutMessage | None, data: bytes) -> list[np.ndarray]:
    """The leaves that ``data`` holds one after the other, as read-only arrays."""
    leaves, offset = [], 0
    for name, shape in zip(layout.dtypes, layout.shapes, strict=True) if layout else ():
        dtype, count = dtype_named(name), math.prod(shape)
        leaf = np.frombuffer(data, dtype, count, offset).reshape(shape)
        leaves.append(leaf)
        offset += leaf.nbytes
    return leaves


def _on_device(leaf: Any) -> Any:
    array = isinstance(leaf, np.ndarray | np.generic)
    return jnp.asarray(leaf) if array else leaf


class Claim:
    """Held by the handle of a resource and by closures that take it. When the last of
    them lets go, ``drop`` gets the number of the resource; it may take no lock."""

    __slots__ = ("__weakref__",)

    def __init__(self, drop: Callable[[int], object], number: int) -> None:
        weakref.finalize(self, drop, number).atexit = False


class PerWorker(Resource, abc.ABC):
    """A handle of one thing on every worker, that a scheduled function may take."""

    claim: Claim
    require_kept: Callable[[], None]
    """Raises `ClosedError` if its coordinator has lost the cluster to a newer one."""

    @abc.abstractmethod
    def _stand_in(self) -> object | None:
        """What stands for it in the trace; None if it was built nowhere."""


class StandIn(StepIterator):
    """The iterator of every worker, while a step is traced for its shapes."""

    is_resource = True

    def __init__(self, handle: PerWorker, spec: Any, name: str) -> None:
        super().__init__(None, spec, name=name)
        # A trace is kept, and must not keep alive what the user has dropped.
        self.handle: Final = weakref.ref(handle)


class NoArgument(abc.ABC):
    """A handle that no scheduled function can take."""

    @abc.abstractmethod
    def refuse(self) -> NoReturn:
        """
        Raises:
            TypeError: Says what it can take instead.
        """


@final
class PerWorkerValues(PerWorker):
    """One thing on every worker; a scheduled function gets the one of its own worker.

    Args:
        values: One `RemoteValue` per worker, in the order of the workers; from an
            `AsyncClusterCoordinator` an `AsyncRemoteValue`.
        living: Gives those of the workers that there are now; None: ``values`` stay.

    Raises:
        AssertionError: Something else is among them.
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
                    "PerWorkerValues is made of RemoteValues; got "
                    f"{type(value).__name__}"
                )
        self.resource = resource
        self.claim = claim or Claim(_nothing, resource)
        self.require_kept = require_kept or _always_kept
        self._describe = stand_in

    @property
    def values(self) -> tuple[RemoteValue, ...]:
        """Whether and how the thing was made on each worker that there is now."""
        return self._values if self._living is None else self._living()

    def _stand_in(self) -> object | None:
        if self._describe is None:
            raise ValueError(
                "these PerWorkerValues have no type: only those that the coordinator "
                "made (create_per_worker_dataset) can be arguments of a function"
            )
        return self._describe()


def _always_kept() -> None:
    """Values that no coordinator has made are nobody's."""


def _nothing(_: int) -> None:
    """What is dropped with values that the coordinator did not make."""
