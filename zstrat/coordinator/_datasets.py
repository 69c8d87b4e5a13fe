"""Datasets of which every worker makes its own.

The dataset function is pickled once on the coordinator; each ``iter()`` is a fresh
pass: one iterator on every worker. The handle of an iterator is what scheduled
functions take; when the user has dropped it and no closure needs it, the workers forget
theirs. When its worker returns from a loss, an iterator begins at its place in the last
checkpoint that has it, or from the start.
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
from ._on_worker import DatasetOnWorker
from ._values import (
    Claim,
    NoArgument,
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
"""Seconds for the first worker to tell what the elements look like."""


@final
class PerWorkerDataset(NoArgument):
    """A dataset on every worker; ``iter()`` begins a pass through it.

    Args:
        kind: The values that say how it went on each worker: those of the coordinator
            that the user has called.
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
        self._spec: Any = None
        """Of an element, once a worker has told: that of every pass."""

    def __iter__(self) -> PerWorkerIterator:
        """A fresh pass on every worker. Returns before the iterators are built.

        Raises:
            RuntimeError: In a step function, which runs on one worker.
        """
        if recorder.get() is not None:
            raise RuntimeError(
                "iter() of a per-worker dataset inside a step function: call it "
                "outside and pass the iterator as an argument"
            )
        record = self._core.create_resource(
            "iterator", self._name, self._maker, kind=self._kind
        )
        return PerWorkerIterator(self, self._core, record)

    @property
    def element_spec(self) -> Any:
        """What an element looks like: a pytree of `jax.ShapeDtypeStruct`.

        Waits for a worker to tell; begins a pass for that if none is under way.
        """
        return iter(self).element_spec if self._spec is None else self._spec

    def __reduce__(self) -> Any:
        # An object that travels may hold it; among arguments it is refused before.
        return DatasetOnWorker, (self._name,)

    def refuse(self) -> NoReturn:
        raise TypeError(
            f"{self._name} itself cannot be an argument: pass iter(dataset), or "
            "dataset.build()"
        )

    def build(self) -> PerWorkerValues:
        """The datasets themselves, as an argument of scheduled functions."""
        record = self._core.create_resource(
            "value", self._name, self._maker, kind=self._kind
        )
        return _values(self._core, record)


@final
class PerWorkerIterator(PerWorker):
    """One iterator on every worker; what ``next()`` gives in a scheduled function."""

    def __init__(
        self, dataset: PerWorkerDataset, core: CoordinatorCore, record: Record
    ) -> None:
        self.resource = record.number
        self._dataset, self._core, self._record = dataset, core, record
        self.claim = Claim(core.drop_resource, record.number)
        self._standing: StandIn | None = None
        self.require_kept = core.require_kept

    @property
    def values(self) -> tuple[Any, ...]:
        """Whether and how it was built, per worker: a `RemoteValue` each; from an
        `AsyncClusterCoordinator` an `AsyncRemoteValue`."""
        return self._record.values

    @property
    def session(self) -> ClusterSession:
        """The cluster whose workers have it."""
        return self._core.session

    async def get_state_async(self) -> dict[str, Any]:
        """Where it is on each worker, of what JSON has, for `set_state_async`: behind
        what the steps have drawn that have ended. A worker that returns from a loss
        begins there from now on. That of a worker that is away is where it will begin.

        Raises:
            InvalidArgumentError: That of a worker cannot be told: its dataset is none
                of `zs.data`, or has no order.

        Cancellation: nothing has changed.
        """
        async with self.session.at_rest():
            state = await self.place_async()
        await self.begin_at_async(state)
        return state

    async def place_async(self) -> dict[str, Any]:
        """`get_state_async` while the session is at rest; a worker that returns begins
        where it would have begun."""
        asking = self._core.dispatcher.builder.states(self._record)
        found = await self.session.run_async(asking, f"asking where {self} is")
        return {"pipelines": [json.loads(state) if state else None for state in found]}

    async def begin_at_async(self, state: Mapping[str, Any]) -> None:
        """A worker that returns from a loss begins there from now on."""

        async def begin() -> None:
            self._record.begin_at(self.states_of(state))

        await self.session.run_async(begin(), f"noting where {self} begins")

    async def set_state_async(self, state: Mapping[str, Any]) -> None:
        """Begins anew on all workers, at the places that `get_state_async` gave, of
        this iterator or of one that was made alike. Closures that are scheduled later
        wait until it is there.

        Raises:
            InvalidArgumentError: They are those of other workers, or in other data;
                nothing changed. What a worker refuses that is away now is an error of
                the closures that use the iterator there.

        Cancellation: it may begin anew all the same.
        """
        await self.require_fit_async(state)
        going = self._core.dispatcher.builder.go_to(self._record, self.states_of(state))
        await self.session.run_async(going, f"building {self} anew")

    async def require_fit_async(self, state: Mapping[str, Any]) -> None:
        """Refuses places to which it cannot go, as far as workers are there to say so.

        Raises:
            InvalidArgumentError: As `set_state_async`.
        """
        why = self.misfit(state)
        if not why:
            builder, states = self._core.dispatcher.builder, self.states_of(state)
            asking = builder.require_fit(self._record, states)
            try:
                await self.session.run_async(asking, f"asking the workers of {self}")
            except InvalidArgumentError as error:
                why = str(error)
        if why:
            raise InvalidArgumentError(f"{self} cannot go on where it was saved: {why}")

    @staticmethod
    def states_of(state: Mapping[str, Any]) -> list[str]:
        """The places of all input pipelines, as workers take them; "": the
        beginning."""
        return ["" if each is None else json.dumps(each) for each in _places(state)]

    def misfit(self, state: Mapping[str, Any]) -> str:
        """Why it cannot go to these places; "" if it can, as far as that is known
        here."""
        count, found = self._record.pipelines.count, len(_places(state))
        if count == found:
            return ""
        return (
            f"it was saved with {found} input pipelines, and this one has {count}, as "
            "many as there were workers when it was made"
        )

    def __repr__(self) -> str:
        return f"<the iterator of {self._record.name}>"

    @property
    def element_spec(self) -> Any:
        """What an element looks like: a pytree of `jax.ShapeDtypeStruct`.

        Waits until one worker has built its iterator.

        Raises:
            ClosureInputError: It could not be built on any worker that is there.
            OutOfRangeError: It has no element on the first that says anything.
            DeadlineExceededError: No worker has built it in ten minutes.
        """
        while (spec := self._stand_in_spec()) is None:
            # None if who said so has gone away since: the others are waited for.
            error = self._record.failure
            if error is not None:
                raise error.with_traceback(None)
        return spec

    def wait_ready(self, timeout: float = FIRST_BUILD) -> None:
        """Waits until every worker that is there has built its iterator.

        Raises:
            ClosureInputError: A worker could not; the first one that says so.
            OutOfRangeError: It has no element there.
            DeadlineExceededError: ``timeout`` seconds were not enough.
        """
        record = self._record
        self._core.engine.wait_until(
            lambda: record.is_settled, timeout, f"building {record.name}"
        )
        for value in record.values:
            if value.is_ready and value.error is not None and not value.is_aborted:
                raise value.error.with_traceback(None)

    def __iter__(self) -> PerWorkerIterator:
        return self

    def __next__(self) -> Any:
        current = recorder.get()
        if current is not None and (made := self._held()) is not None:
            return current.draw(made)
        raise NotImplementedError(
            "next() of a per-worker iterator on the coordinator: its elements are on "
            "the workers; pass it to a scheduled function, and call next() there"
        )

    def get_next(self) -> Any:
        """As ``next()``: in a step alone."""
        return self.__next__()

    def _stand_in_spec(self) -> Any:
        dataset, record = self._dataset, self._record
        if dataset._spec is None and _wait_known(self._core, record):
            assert record.layout is not None
            dataset._spec = spec_of(record.layout)
        return dataset._spec

    def _stand_in(self) -> StandIn | None:
        if self._standing is None and (spec := self._stand_in_spec()) is not None:
            self._standing = StandIn(self, spec, self._record.name)
        return self._standing

    def _held(self) -> StandIn:
        """What a step draws from that did not get the iterator as an argument: an
        object holds it.

        Raises:
            ClosureInputError: It could not be built on any worker that is there.
            OutOfRangeError: It has no element on the first that says anything.
        """
        while (made := self._stand_in()) is None:
            _ = self.element_spec  # waits, or raises
        return made


def _places(state: Mapping[str, Any]) -> list[Any]:
    match state:
        case {"pipelines": [*places]}:
            return places
    raise InvalidArgumentError(
        f"expected the saved state of the iterator of a per-worker dataset, got "
        f"{state!r:.200}"
    )


def make_dataset(
    core: CoordinatorCore, dataset_fn: object, kind: type[RemoteValue] = RemoteValue
) -> PerWorkerDataset:
    """See `ClusterCoordinator.create_per_worker_dataset`, and `PerWorkerDataset`.

    Raises:
        TypeError: It is neither a function nor an iterable, or takes other arguments.
        Exception: It cannot be pickled.
    """
    if isinstance(dataset_fn, Function):  # as TensorFlow's tutorial decorates it
        dataset_fn = dataset_fn.body
    if callable(dataset_fn):
        _require_takes_context(dataset_fn)
        own = (
            dataset_fn.__name__ if inspect.isfunction(dataset_fn) else repr(dataset_fn)
        )
        name = f"the dataset of {own}"
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
    """Has ``fn`` run once on every worker, and again on one that returns."""
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
    """The element that the layout describes, with `jax.ShapeDtypeStruct` as leaves."""
    leaf: Any = jax.ShapeDtypeStruct  # it has no types of its own
    leaves = [
        leaf(tuple(shape), jnp.dtype(dtype))
        for dtype, shape in zip(layout.dtypes, layout.shapes, strict=True)
    ]
    return rebuild(layout.structure, leaves)


def _values(core: CoordinatorCore, record: Record) -> PerWorkerValues:
    def stand_in() -> Any:
        if not _wait_known(core, record):
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
        lambda: record.values,
    )


def _wait_known(core: CoordinatorCore, record: Record) -> bool:
    """Waits until a worker has told the layout; False if all that are there failed."""
    if not record.is_known:
        core.engine.wait_until(
            lambda: record.is_known or record.failure is not None,
            FIRST_BUILD,
            f"building {record.name} on the first worker",
        )
    return record.is_known


def _require_takes_context(dataset_fn: Callable[..., Any]) -> None:
    """Refuses functions that the worker could not call.

    Raises:
        TypeError: It needs more than an `InputContext`.
    """
    try:
        parameters = inspect.signature(dataset_fn).parameters.values()
    except (TypeError, ValueError):  # built in, without a signature: called plainly
        return
    open_ = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [
        p.name for p in parameters if p.default is p.empty and p.kind not in open_
    ]
    if len(needed) > 1:
        raise TypeError(
            "a dataset function takes no argument, or one InputContext; "
            f"{dataset_fn!r} needs {', '.join(needed)}: bind the others before"
        )
