"""Per-worker datasets, which each worker creates for itself.

The dataset function is pickled once, in the program. Each ``iter()`` starts a new pass
with one iterator on every worker. Scheduled functions take a handle of all these
iterators; when the handle is dropped and no closure needs it, the workers drop their
iterators. When a lost worker returns, its iterator starts at its position in the last
checkpoint, or at the start.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NoReturn, final

import jax
import jax.numpy as jnp

from zstrat.errors import InvalidArgumentError
from zstrat.program import Function, rebuild
from zstrat.variables import recorder

from ._calls import Code, PickledArguments
from ._values import (
    Claim,
    DatasetHandle,
    PerWorker,
    PerWorkerValues,
    RemoteValue,
    StandIn,
)

if TYPE_CHECKING:
    from zstrat.wire import LayoutMessage

    from ._core import CoordinatorCore
    from ._resources import Record
    from ._session import ClusterSession

FIRST_BUILD: Final = 600.0
"""Seconds for the first worker to build an iterator, which gives the element spec."""


@final
class PerWorkerDataset(DatasetHandle):
    """A dataset on every worker; ``iter()`` starts a pass through it.

    Args:
        kind: The type of the values that hold the outcome on each worker, which depends
            on the coordinator that created the dataset.
    """

    def __init__(
        self,
        core: CoordinatorCore,
        maker: Code,
        name: str,
        kind: type[RemoteValue] = RemoteValue,
    ) -> None:
        self._core, self._maker, self._name = core, maker, name
        self._kind = kind

    def __iter__(self) -> PerWorkerIterator:
        """Starts a new pass on every worker. Returns before the iterators are built.

        Raises:
            RuntimeError: Called in a step function, which runs on one worker.
        """
        if recorder.get() is not None:
            raise RuntimeError(
                "iter() of a per-worker dataset is called in a step function; call it "
                "outside, and pass the iterator as an argument"
            )
        record = self._core.create_resource(
            "iterator", self._name, self._maker, kind=self._kind
        )
        return PerWorkerIterator(self, self._core, record)

    def refuse(self) -> NoReturn:
        raise TypeError(
            f"{self._name} cannot be an argument; pass iter(dataset), or "
            "dataset.build()"
        )

    def build(self) -> PerWorkerValues:
        """Builds the dataset on every worker. The result is an argument of scheduled
        functions, which get the whole dataset of their worker."""
        record = self._core.create_resource(
            "value", self._name, self._maker, kind=self._kind
        )
        return _values(self._core, record)


class PerWorkerIterator(PerWorker):
    """One iterator on every worker, for ``next()`` in scheduled functions."""

    def __init__(
        self, dataset: DatasetHandle, core: CoordinatorCore, record: Record
    ) -> None:
        self.resource = record.number
        self._dataset, self._core, self._record = dataset, core, record
        self.claim = Claim(core.drop_resource, record.number)
        self._placeholder: StandIn | None = None
        self.require_kept = core.require_kept

    @property
    def values(self) -> tuple[Any, ...]:
        """The outcome of building the iterator, per worker: a `RemoteValue`, or an
        `AsyncRemoteValue` of an `AsyncClusterCoordinator`."""
        return self._record.values

    @property
    def session(self) -> ClusterSession:
        """The session whose workers have the iterators."""
        return self._core.session

    async def get_state_async(self) -> dict[str, Any]:
        """Returns the iterator's position on each worker as JSON types, for
        `set_state_async`: the position after the elements of all steps that have ended.
        From now on an iterator starts at this position when its lost worker returns.
        For a worker that is lost now, this is the position at which its iterator will
        start.

        Raises:
            InvalidArgumentError: A dataset has no position that can be saved: it is not
                of `zs.data`, or has no order.

        Cancellation: changes nothing.
        """
        async with self.session.at_rest():
            state = await self.position_async()
        await self.start_at_async(state)
        return state

    async def position_async(self) -> dict[str, Any]:
        """Returns the state of `get_state_async` while the session is paused; unlike
        that method, does not make the iterators of lost workers start there."""
        asking = self._core.dispatcher.builder.states(self._record)
        states = await self.session.run_async(asking, f"reading the position of {self}")
        # As JSON types and not as text: the state is a part of the checkpoint's own
        # JSON.
        return {"pipelines": [json.loads(state) if state else None for state in states]}

    async def start_at_async(self, state: Mapping[str, Any]) -> None:
        """Makes the iterator start at the positions in ``state`` when its lost worker
        returns."""

        async def start_at() -> None:
            self._record.start_at(self.states_of(state))

        await self.session.run_async(start_at(), f"noting where {self} starts")

    async def set_state_async(self, state: Mapping[str, Any]) -> None:
        """Moves the iterators of all workers to positions that `get_state_async`
        returned, for this iterator or for one that was made in the same way. Closures
        that are scheduled later wait for the move.

        Raises:
            InvalidArgumentError: The positions are those of other workers, or of other
                data; nothing changes. If a worker that is lost now refuses its
                position, the closures that use the iterator there fail.

        Cancellation: the iterators may move all the same.
        """
        # Before anything moves: all workers accept the positions, or nothing changes.
        await self.require_fit_async(state)
        going = self._core.dispatcher.builder.go_to(self._record, self.states_of(state))
        await self.session.run_async(going, f"rebuilding {self}")

    async def require_fit_async(self, state: Mapping[str, Any]) -> None:
        """Checks with the connected workers that their iterators can continue at the
        positions in ``state``.

        Raises:
            InvalidArgumentError: See `set_state_async`.
        """
        why = self.misfit(state)
        if not why:
            builder, states = self._core.dispatcher.builder, self.states_of(state)
            asking = builder.require_fit(self._record, states)
            try:
                await self.session.run_async(asking, f"checking positions of {self}")
            except InvalidArgumentError as error:
                why = str(error)
        if why:
            raise InvalidArgumentError(
                f"{self} cannot continue at the saved position: {why}"
            )

    @staticmethod
    def states_of(state: Mapping[str, Any]) -> list[str]:
        """Returns the positions of all input pipelines (the shares of the dataset),
        each as JSON; "" is the start."""
        return ["" if each is None else json.dumps(each) for each in _positions(state)]

    def misfit(self, state: Mapping[str, Any]) -> str:
        """Returns why the number of positions in ``state`` is not that of the dataset's
        input pipelines; "" if it is."""
        count, saved = self._record.pipelines.count, len(_positions(state))
        if count == saved:
            return ""
        return (
            f"it was saved with {saved} input pipelines, and this one has {count}, one "
            "for each worker when it was made"
        )

    def __repr__(self) -> str:
        return f"<the iterator of {self._record.name}>"

    @property
    def element_spec(self) -> Any:
        """The structure of an element: a pytree of `jax.ShapeDtypeStruct`.

        Waits until one worker has built its iterator.

        Raises:
            ClosureInputError: No connected worker could build its iterator.
            OutOfRangeError: The dataset is empty.
            DeadlineExceededError: No worker has built its iterator in ten minutes.
        """
        while (spec := self._stand_in_spec()) is None:
            # None if that worker was lost since: wait for the others.
            error = self._record.failure
            if error is not None:
                raise error.with_traceback(None)
        return spec

    def wait_ready(self, timeout: float = FIRST_BUILD) -> None:
        """Waits until every connected worker has built its iterator.

        Raises:
            ClosureInputError: A worker could not build its iterator; the error of the
                first such worker.
            OutOfRangeError: The dataset is empty on a worker.
            DeadlineExceededError: Building took more than ``timeout`` seconds.
        """
        record = self._record
        self._core.engine.wait_until(
            lambda: record.is_settled, timeout, f"building {record.name}"
        )
        # Of a lost worker it is aborted, which counts as settled: it builds when it
        # returns.
        for value in record.values:
            if value.is_ready and value.error is not None and not value.is_aborted:
                raise value.error.with_traceback(None)

    def __iter__(self) -> PerWorkerIterator:
        return self

    def __next__(self) -> Any:
        current = recorder.get()
        # Inside of a trace only: the placeholder notes a draw, and no element is here.
        if current is not None and (iterator := self._wait_stand_in()) is not None:
            return current.draw(iterator)
        raise NotImplementedError(
            "next() of a per-worker iterator works only in a scheduled function, as "
            "its elements are on the workers; pass the iterator to one as an argument"
        )

    def get_next(self) -> Any:
        """Returns the next element, like ``next()``. Works only in a step function."""
        return self.__next__()

    def _stand_in_spec(self) -> Any:
        dataset, record = self._dataset, self._record
        if dataset._spec is None and wait_known(self._core, record):
            assert record.layout is not None
            # For all passes of the dataset, which have the same elements.
            dataset._spec = spec_of(record.layout)
        return dataset._spec

    def _stand_in(self) -> StandIn | None:
        if self._placeholder is None and (spec := self._stand_in_spec()) is not None:
            self._placeholder = StandIn(self, spec, self._record.name)
        return self._placeholder

    def _wait_stand_in(self) -> StandIn:
        """Returns the placeholder of the iterator for a trace, after the iterator is
        built. For a step that uses an iterator which an object holds, and which is not
        an argument.

        Raises:
            ClosureInputError, OutOfRangeError: See `element_spec`.
        """
        while (placeholder := self._stand_in()) is None:
            _ = self.element_spec  # waits, or raises
        return placeholder


def _positions(state: Mapping[str, Any]) -> list[Any]:
    match state:
        case {"pipelines": [*positions]}:
            return positions
    raise InvalidArgumentError(
        f"expected the saved state of the iterator of a per-worker dataset, got "
        f"{state!r:.200}"
    )


def make_dataset(
    core: CoordinatorCore, dataset_fn: object, kind: type[RemoteValue] = RemoteValue
) -> PerWorkerDataset:
    """Creates a dataset on every worker; see
    `ClusterCoordinator.create_per_worker_dataset`. For ``kind`` see `PerWorkerDataset`.

    Raises:
        TypeError: ``dataset_fn`` is neither a function nor an iterable, or takes other
            arguments.
        Exception: ``dataset_fn`` cannot be pickled.
    """
    if isinstance(dataset_fn, Function):  # decorated, as in TensorFlow's tutorial
        dataset_fn = dataset_fn.body
    if callable(dataset_fn):
        _require_takes_context(dataset_fn)
        function_name = (
            dataset_fn.__name__ if inspect.isfunction(dataset_fn) else repr(dataset_fn)
        )
        name = f"the dataset of {function_name}"
    elif isinstance(dataset_fn, Iterable):
        name = f"the dataset {type(dataset_fn).__name__}"
    else:
        raise TypeError(
            "create_per_worker_dataset takes a function that returns an iterable, or "
            f"an iterable; got {type(dataset_fn).__name__}"
        )
    return PerWorkerDataset(core, Code.of(dataset_fn), name, kind)


def make_resources(
    core: CoordinatorCore,
    fn: Callable[..., Any],
    args: Sequence[Any] | None,
    kwargs: Mapping[str, Any] | None,
) -> PerWorkerValues:
    """Runs ``fn`` once on every worker, and again on a worker that returns; gives
    handles of the results."""
    arguments = (
        PickledArguments(tuple(args or ()), kwargs or {}) if args or kwargs else None
    )
    if arguments is not None:
        arguments.retire_to(core.dispatcher.retired)
    record = core.create_resource(
        "value", f"the result of {fn!r}", Code.of(fn), arguments
    )
    return _values(core, record)


def spec_of(layout: LayoutMessage) -> Any:
    """Returns the structure that a layout describes, with `jax.ShapeDtypeStruct` as
    leaves."""
    leaf: Any = jax.ShapeDtypeStruct  # it has no type stubs
    leaves = [
        leaf(tuple(shape), jnp.dtype(dtype))
        for dtype, shape in zip(layout.dtypes, layout.shapes, strict=True)
    ]
    return rebuild(layout.structure, leaves)


def _values(core: CoordinatorCore, record: Record) -> PerWorkerValues:
    def stand_in() -> Any:
        if not wait_known(core, record):
            return None
        assert record.layout is not None
        return spec_of(record.layout)

    claim = Claim(core.drop_resource, record.number)
    return PerWorkerValues(
        record.values,
        record.number,
        claim,
        stand_in,
        core.require_kept,
        # Each time, as workers join and leave.
        lambda: record.values,
    )


def wait_known(core: CoordinatorCore, record: Record) -> bool:
    """Waits until a worker has built the record's resource; returns False if all
    failed."""
    if not record.is_known:
        core.engine.wait_until(
            # One worker is enough: the others have elements of the same kind.
            lambda: record.is_known or record.failure is not None,
            FIRST_BUILD,
            f"building {record.name} on the first worker",
        )
    return record.is_known


def _require_takes_context(dataset_fn: Callable[..., Any]) -> None:
    """Checks that workers can call a dataset function.

    Raises:
        TypeError: The function needs more arguments than an `InputContext`.
    """
    try:
        # Here, as on a worker the error would come only when the dataset is built.
        parameters = inspect.signature(dataset_fn).parameters.values()
    except (TypeError, ValueError):  # a builtin without a signature
        return
    open_ = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [
        p.name for p in parameters if p.default is p.empty and p.kind not in open_
    ]
    if len(needed) > 1:
        raise TypeError(
            "a dataset function takes no argument, or one InputContext; "
            f"{dataset_fn!r} needs {', '.join(needed)}: bind the others with "
            "functools.partial"
        )
