"""`Training`: runs Keras' `fit`, `evaluate` and `predict` of one model by a strategy.

Keras runs its own loop over epochs and batches. Each batch starts a step (`start`),
which ends later; steps that have not ended are in a queue, in order. At the end of an
epoch, and when a callback asks for the model, all queued steps are awaited and Keras'
variables get the trained values (`leave_state`). Before the next step, values that were
assigned to Keras' variables since then are sent to the strategy (`enter_state`).

Law of the file: each step is taken from the queue once, and the increments of its
metrics are added at that moment, so each example counts once.
"""

from __future__ import annotations

import abc
import contextlib
import inspect
import itertools
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol

import jax
import keras
import numpy as np
from keras.callbacks import CallbackList

from zstrat.data import Dataset
from zstrat.variables import Optimizer, assign_leaves, leaves_of, values

from ._private import build
from ._sources import DatasetSource, Draw, Tokens
from ._steps import Batch, trace_step
from .callbacks import InOrder
from .optimizers import OptimizerState

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from ._sources import Source
    from ._steps import TracedStep

AHEAD: Final = 0.05
"""Seconds of work that are scheduled on each worker in advance."""


_MODES: Final = {"fit": "train", "evaluate": "test", "predict": "predict"}


class StepResult(Protocol):
    """The results of a step that may still run, such as a `zs.RemoteValue`."""

    @property
    def is_ready(self) -> bool: ...

    def fetch(self) -> Any: ...


@dataclass(eq=False)
class Pending:
    """The steps of one call of Keras' train, test or predict function. ``logs`` is None
    until all of them have ended."""

    mode: str
    steps: list[tuple[TracedStep, StepResult]]
    batches: tuple[int, int] | None = None
    logs: Any = None
    outputs: list[Any] = field(default_factory=list)

    @property
    def is_ready(self) -> bool:
        return all(result.is_ready for _, result in self.steps)


@dataclass(eq=False)
class Call:
    """A call of `fit`, `evaluate` or `predict`; a callback may make one within another.

    ``undelivered`` are steps for whose batches the callbacks have not been called yet.
    """

    callbacks: InOrder | None = None
    sources: Mapping[str, Source] = field(default_factory=dict)
    undelivered: deque[Pending] = field(default_factory=deque)
    is_delivering: bool = False

    @property
    def is_heard(self) -> bool:
        """Whether a callback of the user, or the progress bar, may read the logs of
        batches."""
        return self.callbacks is not None and not self.callbacks.is_empty


class Output:
    """One of the arrays that a model predicts for some batches. Conversion to a numpy
    array waits for their steps."""

    def __init__(
        self, pending: Pending, leaf: int, complete: Callable[[Pending], None]
    ) -> None:
        self._pending, self._leaf, self._complete = pending, leaf, complete

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        self._complete(self._pending)
        leaves = [
            jax.tree.leaves(output)[self._leaf] for output in self._pending.outputs
        ]
        array: np.ndarray = np.concatenate(leaves)
        return array if dtype is None else array.astype(dtype)


class MetricSums:
    """The state of a model's metrics while steps run: sums of increments, in
    float64."""

    def __init__(self, model: Any) -> None:
        self._model: Final = model
        self._variables: Sequence[Any] = ()
        self._sums: list[np.ndarray] = []
        self._results: Any = None

    def start(self) -> None:
        """Sets the sums to the present values of Keras' metric variables."""
        if self._results is None:
            self._variables = self._model.metrics_variables
            self._results = jax.jit(self._compute)
        self._sums = [
            # In float32 a sum of many small parts stops growing: 2**24 + 1 is 2**24.
            np.asarray(v.value, "float64" if "float" in v.dtype else v.dtype)
            for v in self._variables
        ]

    def add(self, parts: Sequence[np.ndarray]) -> None:
        """Adds the increments of one step to the sums."""
        pairs = zip(self._sums, parts, strict=True)
        self._sums = [total + part for total, part in pairs]

    def results(self) -> dict[str, Any]:
        """Computes the results of the metrics from the present sums."""
        found: dict[str, Any] = self._results(self._rounded())
        return found

    def assign(self) -> None:
        """Assigns the sums to Keras' metric variables."""
        for variable, total in zip(self._variables, self._rounded(), strict=True):
            variable.assign(total)

    def _rounded(self) -> list[np.ndarray]:
        pairs = zip(self._sums, self._variables, strict=True)
        return [total.astype(variable.dtype) for total, variable in pairs]

    def _compute(self, sums: Sequence[Any]) -> Any:
        pairs = list(zip(self._variables, sums, strict=True))
        with keras.StatelessScope(state_mapping=pairs):
            return self._model.get_metrics_result()


class Training(abc.ABC):
    """Trains one model by a strategy (see the head of the file). Subclasses run the
    steps and store the values.

    Args:
        model: A compiled model, which may not be built yet.
    """

    workers = 1
    """Number of steps that run at the same time."""

    def __init__(self, model: Any, strategy: Any) -> None:
        self.model: Final = model
        self.strategy: Final = strategy
        self._metrics: Final = MetricSums(model)
        self._queue: Final[deque[Pending]] = deque()
        self._call = Call()
        self._steps: Final[dict[Any, tuple[TracedStep, Any]]] = {}
        self._is_moved = self._is_counted = False
        self._logs: dict[str, Any] = {}
        self._took = AHEAD / 2  # seconds between steps, until some have ended
        self.keras_variables: list[Any] = []
        self.variables: list[Any] = []
        """Variables of the strategy, in the order of ``keras_variables``."""
        self.tables: dict[int, Any] = {}
        """Embedding layers whose rows are looked up, by the numbers of their
        variables."""
        self.unread: frozenset[int] = frozenset()
        """Numbers of the variables whose values are stored on servers only, never in
        Keras' variables: tables of any id."""
        self.optimizer: Optimizer | None = None
        self._known: list[Any] = []
        self._slots: OptimizerState | None = None
        self._slots_known: list[Any] = []
        if model.run_eagerly:
            raise NotImplementedError(
                f"{model.name!r} is compiled with run_eagerly=True: a strategy "
                "compiles the steps. Leave it out; print in a step with jax.debug.print"
            )

    @abc.abstractmethod
    def prepare(
        self, mode: str, steps: Sequence[tuple[Batch, TracedStep]], *, draws: bool
    ) -> Any:
        """Makes from a traced step the object that `start` runs. If the step ``draws``
        its batch on a worker, ``steps`` are the traces for batches with different
        numbers of rows."""

    @abc.abstractmethod
    def start(self, prepared: Any, batch: Batch | Draw) -> StepResult:
        """Starts a step on a batch. Its results are those of `TracedStep` without
        gradients and state, which are applied when the step has ended."""

    @abc.abstractmethod
    def create(self, trained: Sequence[Any], others: Sequence[Any]) -> list[Any]:
        """Creates the variables of the strategy with these initial values: the
        trainable, then the other ones."""

    @abc.abstractmethod
    def wait(self) -> None:
        """Waits until all started steps have ended, including those on workers."""

    def on_servers(self) -> dict[str, Any] | None:
        """Returns the objects on parameter servers, for a `zs.Checkpoint`; None without
        servers."""
        return None

    def source_of(self, mode: str, data: Any, *, endless: bool) -> Source | None:
        """Returns a source of batches for data of types that Keras does not know; None
        for other data.

        Args:
            endless: Whether epochs continue where the last one ended
                (``steps_per_epoch``).
        """
        if isinstance(data, Dataset):
            return DatasetSource(data, endless=endless)
        return None

    def call(
        self, name: str, method: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        """Calls Keras' own `fit`, `evaluate` or `predict`, with data and callbacks
        replaced by those that follow the steps."""
        try:
            bound = inspect.signature(method).bind(self.model, *args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{name}() {error}") from None
        given = bound.arguments
        callbacks, outer = given.get("callbacks"), self._call
        if (
            isinstance(callbacks, CallbackList)
            and outer.callbacks in callbacks.callbacks
        ):
            return method(*bound.args, **bound.kwargs)  # of fit, for validation
        self._complete_up_to()  # of `fit`, one of whose callbacks calls this
        sources = self._read_sources(name, given)
        in_order = InOrder(self, callbacks, given.get("verbose", "auto"))
        # A progress bar of Keras' own would count steps that have only been scheduled.
        given.update(callbacks=[in_order], verbose=0)
        self._call = Call(in_order, sources)
        try:
            return method(*bound.args, **bound.kwargs)
        finally:
            self._queue.clear()
            self._call = outer

    def learning_rate(self) -> np.float32:
        """Returns the learning rate for the step that starts now."""
        return np.float32(0) if self._slots is None else self._slots.learning_rate()

    def enter_state(self, *, counts: bool) -> None:
        """Sends values assigned to Keras' variables to the strategy. Called before the
        first step, and before the next one after each `leave_state`.

        Args:
            counts: Whether the steps will add to metrics.
        """
        self._push_values()
        self._logs = {}
        if counts:
            self._metrics.start()

    def leave_state(self) -> None:
        """Waits for all steps, then assigns the trained values and metrics to Keras'
        variables."""
        self._complete_up_to()
        if self._is_counted:
            self._metrics.assign()
            self._is_counted = False
        if self._is_moved:
            self._pull_values()
            self._is_moved = False
        self.deliver_all()

    def restored(self) -> None:
        """Assigns to Keras' variables the values of the strategy's variables after
        something else changed those, such as a restore."""
        self._is_moved = True
        self.leave_state()

    def run(self, mode: str, iterator: Iterator[Any]) -> Any:
        """Schedules the next steps of an epoch. Returns the logs, which are filled in
        when the steps end, or the predictions of the model.

        Raises:
            StopIteration: The epoch is over.
        """
        iterator = self._call.sources.get(mode, iterator)
        # The first one raises where the epoch ends; an end among the others is found by
        # the next call.
        steps = [self._scheduled(mode, next(iterator))]
        further = itertools.islice(iterator, self.model.steps_per_execution - 1)
        steps.extend(self._scheduled(mode, data) for data in further)
        pending = Pending(mode, steps)
        self._is_moved |= mode == "train"
        self._is_counted |= mode != "predict"
        self._queue.append(pending)
        self._call.undelivered.append(pending)
        if mode != "predict":
            return self._logs
        structure = steps[0][0].returned
        outputs = [
            Output(pending, leaf, self._complete_up_to)
            for leaf in range(structure.num_leaves)
        ]
        return jax.tree.unflatten(structure, outputs)

    def scheduled(self, begin: int, end: int) -> None:
        self._call.undelivered[-1].batches = begin, end
        # Enough steps ahead to keep workers busy, and few for callbacks to be late for.
        limit = self.workers * int(np.clip(AHEAD / max(self._took, 1e-4), 2, 64))
        while self._queue and (self._queue[0].is_ready or len(self._queue) > limit):
            self._complete_first()
        self._deliver()

    def begin(self, mode: str) -> None:
        if mode in self._call.sources:
            self._call.sources[mode].begin()

    def deliver_all(self) -> None:
        self._complete_up_to()
        self._deliver()

    def _read_sources(self, name: str, given: dict[str, Any]) -> dict[str, Source]:
        """Replaces data of types that Keras does not know by `Tokens` in the arguments
        ``given``; returns sources of these data by mode."""
        modes = {"x": _MODES[name], "validation_data": "test"}
        sources = {}
        for argument, mode in modes.items():
            # Validation begins with the first batch each time.
            endless = mode == "train" and given.get("steps_per_epoch") is not None
            source = self.source_of(mode, given.get(argument), endless=endless)
            if source is not None:
                sources[mode] = source
                given[argument] = Tokens(source.count)
        if (first := sources.get(modes["x"])) is not None:
            if given.get("class_weight") is not None:  # Keras does not see the batches
                raise NotImplementedError(
                    "class_weight with a zs.data.Dataset or a leased dataset: give the "
                    "weights of examples as a third array, (x, y, weights)"
                )
            if name == "fit":
                given["shuffle"] = False  # Keras would warn: that is up to the data
            if name != "predict":
                build(self.model, first.example)
        return sources

    def _scheduled(self, mode: str, data: Any) -> tuple[TracedStep, StepResult]:
        """Starts a step on a batch. The step is traced once for all batches of the same
        structure, shapes and dtypes."""
        draw = data if isinstance(data, Draw) else None
        # A table of any id is looked up by all 64 bits, which jax would cut.
        whole = bool(self.unread)
        kinds = draw.specs if draw is not None else [data]
        batches = [Batch.of(each, whole=whole) for each in kinds]
        key = mode, draw is not None, *[batch.key for batch in batches]
        if key not in self._steps:
            if mode == "train":
                self._make_optimizer()
            steps = [trace_step(self.model, mode, x, self.tables) for x in batches]
            pairs = list(zip(batches, steps, strict=True))
            prepared = self.prepare(mode, pairs, draws=draw is not None)
            self._steps[key] = steps[0], prepared
        step, prepared = self._steps[key]
        return step, self.start(prepared, batches[0] if draw is None else draw)

    def _complete_up_to(self, pending: Pending | None = None) -> None:
        """Waits for the queued steps in order, until ``pending`` has ended; None: for
        all."""
        while pending in self._queue if pending is not None else self._queue:
            self._complete_first()

    def _complete_first(self) -> None:
        pending, began = self._queue[0], time.monotonic()
        returned: Any = None
        for step, result in pending.steps:
            try:
                results = result.fetch()
            except BaseException as error:  # to the caller
                self._give_up(error)
                raise
            sums, returned = step.seen(results)
            if pending.mode == "predict":
                pending.outputs.append(returned)
            else:
                self._metrics.add(sums)
        self._queue.popleft()
        # Follows changes within some eight steps, and forgives a single slow one.
        self._took += (time.monotonic() - began - self._took) / 8
        if pending.mode == "predict":
            pending.logs = {"outputs": returned}
        elif not self._queue or self._call.is_heard:
            # Otherwise nobody looks at logs before the last step of an epoch.
            pending.logs = _logs_of(returned, self._metrics.results())
            self._logs.update(pending.logs)

    def _give_up(self, error: BaseException) -> None:
        """Drops all steps after a failed one, and assigns to Keras' variables what the
        steps before it have trained. After Ctrl-C it waits for nothing and assigns
        nothing."""
        self._queue.clear()
        self._call.undelivered.clear()
        # Keras calls `leave_state` in its own handling of the error, which would raise
        # another one in place of it.
        is_moved, self._is_moved, self._is_counted = self._is_moved, False, False
        if isinstance(error, Exception):
            with contextlib.suppress(Exception):  # raises the same once more
                self.wait()
            with contextlib.suppress(Exception):  # a server may be lost
                if is_moved:
                    self._pull_values()

    def _deliver(self) -> None:
        """Calls the callbacks for batches whose steps have ended. If a callback asks
        for the model, which calls this method again, that inner call returns at once
        and the outer one delivers the rest."""
        call = self._call
        if call.is_delivering:
            return
        call.is_delivering = True
        try:
            while call.undelivered and call.undelivered[0] not in self._queue:
                pending = call.undelivered.popleft()
                if call.callbacks is not None and pending.batches is not None:
                    begin, end = pending.batches
                    call.callbacks.deliver(pending.mode, begin, end, pending.logs)
        except BaseException:  # to the caller; callbacks get no further batches
            call.undelivered.clear()
            raise
        finally:
            call.is_delivering = False

    def _push_values(self) -> None:
        """Sends the values that were assigned to Keras' variables to the strategy's."""
        trained = self.model.trainable_variables
        others = self.model.non_trainable_variables
        if list(map(id, [*trained, *others])) != list(map(id, self.keras_variables)):
            self._create(trained, others)
        for number, variable in enumerate(self.keras_variables):
            if number in self.unread:
                continue
            # By identity: an assignment makes another array, and comparing values would
            # cost as much as sending them.
            if variable.value is not self._known[number]:
                self._known[number] = variable.value
                self.variables[number].assign(np.asarray(variable.value))
        if self.optimizer is not None and self._slots is not None:
            now = [variable.value for variable in self._slots.variables]
            if any(a is not b for a, b in zip(now, self._slots_known, strict=True)):
                self._assign_slots()

    def _pull_values(self) -> None:
        """Assigns the trained values, and the optimizer's state, to Keras'
        variables."""
        self.wait()
        read = [n for n in range(len(self.variables)) if n not in self.unread]
        given = values([self.variables[number] for number in read])
        for number, value in zip(read, given, strict=True):
            self.keras_variables[number].assign(value)
            self._known[number] = self.keras_variables[number].value
        if self.optimizer is not None and self._slots is not None:
            for number, value in leaves_of(self.optimizer).items():
                self._slots.variables[number].assign(value)
            self._slots_known = [variable.value for variable in self._slots.variables]

    def _create(self, trained: Sequence[Any], others: Sequence[Any]) -> None:
        """Creates the strategy's variables; again after ``trainable`` of a layer has
        changed, as Keras then still evaluates the model without another `compile`."""
        self._steps.clear()  # traced steps take variables by their order
        self.optimizer = self._slots = None
        self.keras_variables = [*trained, *others]
        self._known = [variable.value for variable in self.keras_variables]
        arrays = list(map(np.asarray, self._known))
        self.variables = self.create(arrays[: len(trained)], arrays[len(trained) :])

    def _make_optimizer(self) -> None:
        if self.optimizer is not None:
            return
        slots = OptimizerState(self.model.optimizer)
        trained = self.model.trainable_variables
        shipped, name = slots.shipped(trained), self.model.optimizer.name
        params = self.variables[: len(trained)]
        with self.strategy.scope():
            self.optimizer = Optimizer(shipped, name, params=params)
        self._slots = slots
        self._slots_known = [variable.value for variable in slots.variables]
        if not slots.is_fresh():
            self._assign_slots()

    def _assign_slots(self) -> None:
        """Sends the optimizer state that is in Keras' variables to the strategy's
        optimizer."""
        assert self.optimizer is not None
        assert self._slots is not None
        self._slots_known = [variable.value for variable in self._slots.variables]
        arrays, rate = map(np.asarray, self._slots_known), self.learning_rate()
        assign_leaves(self.optimizer, arrays, learning_rate=rate)


def _logs_of(returned: Any, results: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the logs of a step, with its metrics replaced by those of all steps so
    far.

    Raises:
        NotImplementedError: The step did not return a dictionary.
    """
    if not isinstance(returned, dict):
        raise NotImplementedError(
            "train_step and test_step have to return a dictionary of logs; got "
            f"{type(returned).__name__}"
        )
    return {name: results.get(name, own) for name, own in returned.items()}
