"""The API of TF 1.12 for a strategy of zstrat, and for datasets on the devices of one
program.

Laws of the file: an old method calls a new one of the zstrat strategy (the engine),
with the arguments and errors of TF 1.12; nothing is computed here. The elements of a
step do not change, though their source may reuse one buffer for the next ones.
"""

from __future__ import annotations

import itertools
import weakref
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, final

import jax

from zstrat.collectives import ReduceOp
from zstrat.data import ending, is_steady, require_data
from zstrat.program import StepIterator, function, kept, require_untraced
from zstrat.strategy import MultiStepContext, PerReplica, regroup, require_cross_replica
from zstrat.strategy.reduce import checked_pairs, is_whole, places, put
from zstrat.variables import VariableAggregation

if TYPE_CHECKING:
    from collections.abc import (
        Callable,
        Generator,
        Iterable,
        Iterator,
        Mapping,
        Sequence,
    )
    from contextlib import AbstractContextManager

    from zstrat.strategy import Strategy
    from zstrat.variables import AbstractVariable


@final
class PerDeviceDataset:
    """A dataset from which each step takes one element for each tower, in the order of
    the towers. If the last step has too few elements, they are dropped (TF 1.12's
    rule). Each iterator is a new pass over the data."""

    def __init__(self, dataset_fn: Callable[[], Iterable[Any]], towers: int) -> None:
        self._dataset_fn = dataset_fn
        self._towers = towers

    def __iter__(self) -> PerDeviceIterator:
        require_untraced("a distributed dataset")
        elements = self._elements()
        made = PerDeviceIterator(elements, name="a distributed dataset", steady=True)
        # At the end of the program at the latest: a pass that the interpreter ends
        # while it shuts down would fail on modules that are gone.
        weakref.finalize(made, elements.close)
        return made

    def make_one_shot_iterator(self) -> PerDeviceIterator:
        """Returns ``iter(self)``, under its old name."""
        return iter(self)

    def make_initializable_iterator(self) -> PerDeviceIterator:
        """Returns ``iter(self)``: there is nothing to initialize."""
        return iter(self)

    def _elements(self) -> Generator[Any, None, None]:
        with ending(_steady(self._dataset_fn())) as elements:
            if self._towers == 1:
                yield from elements
                return
            # The elements of a step are there together, so they have to be kept while
            # the next ones are made: hence `_steady`.
            while True:
                several = tuple(itertools.islice(elements, self._towers))
                if len(several) < self._towers:
                    return
                yield regroup(several, always_wrap=True)


@final
class PerDeviceIterator(StepIterator):
    """The iterator of a `PerDeviceDataset`: returns one element for each tower, to a
    step or to a loop in Python."""

    def initialize(self) -> list[Any]:
        """Does nothing: an iterator is ready when it is made."""
        return []


def _steady(source: Iterable[Any]) -> Generator[Any, None, None]:
    """Yields elements of a source; copies them if the source reuses its buffers, so
    that they do not change when it makes the next ones.

    Raises (while iterating):
        TypeError: An element contains an object that is not data.
    """
    # A source may fill one buffer again and again; copies only where it does.
    stays = is_steady(source)
    with ending(iter(source)) as elements:
        for element in elements:
            require_data(element)
            yield element if stays else jax.tree.map(kept, element)


class DistributionStrategy:
    """A strategy of zstrat under the name and with the methods that it had in TF 1.12.

    ``engine``: the strategy of zstrat that does the work.
    """

    def __init__(self, engine: Strategy) -> None:
        self.engine = engine
        # So that a tower finds the object that the program has made, with its subclass.
        _faces[id(engine)] = self

    @property
    def between_graph(self) -> bool:
        """Whether each worker runs a separate program."""
        return self.engine.extended.experimental_between_graph

    @property
    def is_single_tower(self) -> bool:
        """Whether ``call_for_each_tower(fn)`` calls ``fn`` once."""
        return self.num_towers == 1

    @property
    def num_towers(self) -> int:
        """Number of towers of this program."""
        return self.engine.num_replicas_in_sync

    @property
    def worker_devices(self) -> list[str]:
        """TF's names of the towers' devices."""
        return list(self.engine.extended.worker_devices)

    @property
    def parameter_devices(self) -> list[str]:
        """TF's names of the devices on which variables are stored."""
        return list(self.engine.extended.parameter_devices)

    @property
    def worker_device_index(self) -> Any:
        """A value per tower with the number of each tower's device, to be passed to
        `call_for_each_tower`; the integer 0 if there is one tower."""
        return 0 if self.is_single_tower else PerReplica(tuple(range(self.num_towers)))

    @property
    def should_init(self) -> bool:
        """Whether this program makes the initial values of variables."""
        return self.engine.extended.experimental_should_init

    @property
    def should_checkpoint(self) -> bool:
        """Whether this program saves checkpoints."""
        return self.engine.extended.should_checkpoint

    @property
    def should_save_summary(self) -> bool:
        """Whether this program writes metrics."""
        return self.engine.extended.should_save_summary

    @contextmanager
    def scope(self) -> Iterator[DistributionStrategy]:
        """Returns a context manager that makes the strategy current, in its cross-tower
        context.

        Raises (on entering):
            RuntimeError: Another strategy is current, or a tower runs.
        """
        with self.engine.scope():
            yield self

    def call_for_each_tower(
        self, fn: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Runs ``fn`` once per tower; each tower gets its part of the values per tower
        among the arguments.

        Args:
            kwargs: ``run_concurrently=False`` runs the towers one after the other,
                operation by operation; otherwise they may be one compiled program.

        Returns:
            The results of the towers, merged; an object that all towers return is
            returned itself.

        Raises:
            RuntimeError: Called in a tower; or towers make different numbers of
                ``merge_call``.
        """
        # TensorFlow's own keywords are mixed with those of `fn`.
        named = dict(kwargs)
        if not named.pop("run_concurrently", True):
            fn = function(fn, eager=True)
        return self.engine.extended.call_for_each_replica(fn, args, named)

    def run_steps_on_dataset(
        self,
        fn: Callable[..., Any],
        iterator: Iterator[Any],
        iterations: int = 1,
        initial_loop_values: Mapping[str, Any] | None = None,
    ) -> MultiStepContext:
        """Calls ``fn(context, *inputs)`` for ``iterations`` elements of the iterator,
        one after the other; see
        `zstrat.StrategyExtended.experimental_run_steps_on_iterator`.

        Raises:
            OutOfRangeError: The dataset has fewer elements.
            RuntimeError: Called in a tower.
        """
        return self.engine.extended.experimental_run_steps_on_iterator(
            fn, iterator, iterations, initial_loop_values
        )

    def distribute_dataset(
        self, dataset_fn: Callable[[], Iterable[Any]]
    ) -> PerDeviceDataset:
        """Distributes the dataset that ``dataset_fn`` returns over the towers: each
        step takes one element for each tower."""
        return PerDeviceDataset(dataset_fn, self.num_towers)

    def initialize(self) -> None:
        """Does nothing: no work precedes the first step."""

    def finalize(self) -> None:
        """Does nothing: no work follows the last step."""

    def colocate_vars_with(
        self, colocate_with_variable: AbstractVariable
    ) -> AbstractContextManager[None]:
        """Places variables that are created inside the context where the given variable
        is stored.

        Raises:
            ValueError: The given variable was not created in this strategy's scope.
            RuntimeError: Called outside of this strategy's scope.
        """
        return self.engine.extended.colocate_vars_with(colocate_with_variable)

    def read_var(self, var: Any) -> Any:
        """Returns the variable unchanged, as there is one copy."""
        return var

    def value_container(self, val: Any) -> Any:
        """Returns the value unchanged, as values are not components of another
        object."""
        return val

    def update(
        self, var: AbstractVariable, fn: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Runs ``fn(var, *args, **kwargs)`` on the devices of the variable, for each of
        its components.

        Args:
            args, kwargs: Arguments for ``fn``. Of a mirrored value each component gets
                its own.
            kwargs: ``grouped=False``: each leaf of the result is a list with an entry
                per component.

        Raises:
            ValueError: ``var`` is not a variable, or an argument has one value per
                tower.
            RuntimeError: Called in a tower.
        """
        named = dict(kwargs)
        grouped = bool(named.pop("grouped", True))
        # The engine's own `update` makes a merge_call of one that a tower asks for.
        require_cross_replica(self.engine, "update()")
        self._require_operands((args, named))
        return self.engine.extended.update(var, fn, args, named, grouped)

    def non_slot_devices(self, var_list: Sequence[AbstractVariable]) -> Any:
        """Returns where state that belongs to all of these variables is stored: the
        device of the first variable by name.

        Raises:
            ValueError: The list is empty.
        """
        return self.engine.extended.non_slot_devices(var_list)

    def update_non_slot(
        self, colocate_with: Any, fn: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Runs ``fn(*args, **kwargs)`` on a device that `non_slot_devices` returned;
        see `update`.

        Raises:
            ValueError: An argument has one value per tower.
            RuntimeError: Called in a tower.
        """
        named = dict(kwargs)
        grouped = bool(named.pop("grouped", True))
        self._require_operands((args, named))
        return self.engine.extended.update_non_slot(
            colocate_with, fn, args, named, grouped
        )

    def broadcast(self, tensor: Any, destinations: Any = None) -> Any:
        """Copies a value to other devices; by default to those of all towers.

        Raises:
            ValueError: ``destinations`` is not a destination.
            RuntimeError: Called in a tower.
        """
        where = self.worker_devices if destinations is None else destinations
        extended = self.engine.extended
        if not isinstance(where, list | tuple):
            return extended.broadcast_to(tensor, where)
        # The engine takes one destination: the value goes to the first device, and from
        # there to the others. A number of Python has no copy on a device.
        first = extended.broadcast_to(tensor, first_place(where))
        if isinstance(tensor, int | float):
            return first
        several = dict.fromkeys(d for name in where for d in places(name))
        return put(first, list(several))

    def reduce(
        self, aggregation: VariableAggregation, value: Any, destinations: Any
    ) -> Any:
        """Reduces the values of the towers to one.

        Args:
            aggregation: SUM, MEAN or ONLY_FIRST_TOWER.
            destinations: Where to put the result: on the devices of a variable or a
                value per tower, or on those of a TF name or a list of TF names.

        Raises:
            AssertionError: ``aggregation`` is another one.
            ValueError: A destination is on another worker; or a value that is the same
                in several towers is to be summed.
            RuntimeError: Called in a tower.
        """
        return self.batch_reduce(aggregation, [(value, destinations)])[0]

    def batch_reduce(
        self,
        aggregation: VariableAggregation,
        value_destination_pairs: Sequence[tuple[Any, Any]],
    ) -> list[Any]:
        """Reduces several values as `reduce` does; returns the results in order.

        Raises:
            ValueError: The argument is not a list of pairs; also what `reduce` raises.
        """
        require_aggregation(aggregation)
        pairs = checked_pairs(value_destination_pairs)
        for _, destinations in pairs:
            self._require_here(destinations)
        if aggregation is FIRST:
            return [
                self.broadcast(self.unwrap(value)[0], destinations)
                for value, destinations in pairs
            ]
        op = ReduceOp.from_variable_aggregation(aggregation)
        first = [(v, first_place(d)) for v, d in pairs]
        reduced = self.engine.extended.batch_reduce_to(op, first)
        return [
            self.broadcast(value, destinations)
            if isinstance(destinations, list | tuple)
            else value
            for value, (_, destinations) in zip(reduced, pairs, strict=True)
        ]

    def unwrap(self, value: Any) -> list[Any]:
        """Returns a list of the values of the towers; ``[value]`` if the value is not
        per tower."""
        return self.engine.unwrap(value)

    def group(self, value: Any, name: str | None = None) -> None:
        """Waits until all arrays in ``value`` have been computed; ``name`` has no
        effect."""
        self.engine.group(value, name)

    def configure(
        self,
        session_config: Any = None,
        cluster_spec: Any = None,
        task_type: str | None = None,
        task_id: int | None = None,
    ) -> None:
        """Does nothing: a strategy of one machine has no cluster.

        Raises:
            ValueError: The cluster has several tasks that train together: each would
                train alone.
        """
        self.engine.configure(session_config, cluster_spec, task_type, task_id)

    def _require_here(self, destinations: Any) -> None:
        """Refuses a destination on another worker. A strategy of one machine has none,
        so this does nothing here."""

    def _require_operands(self, arguments: Any) -> None:
        """Refuses arguments that an update cannot take: values per tower.

        Raises:
            ValueError: An argument has one value per tower.
        """
        for leaf in jax.tree.leaves(arguments, is_leaf=is_whole):
            if isinstance(leaf, PerReplica):
                raise ValueError(
                    f"You cannot update variable with a PerDevice object {leaf!r}: "
                    "specify a single value or a Mirrored one, what reduce() returns"
                )

    def __repr__(self) -> str:
        return f"<{type(self).__name__} over {self.engine!r}>"


_faces: weakref.WeakValueDictionary[int, DistributionStrategy] = (
    weakref.WeakValueDictionary()
)
"""The `DistributionStrategy` of each engine, by the id of the engine, which it keeps
alive."""


def face_of(engine: Strategy) -> DistributionStrategy:
    """Returns the `DistributionStrategy` of this engine; makes one if there is none."""
    found = _faces.get(id(engine))
    # An engine that is gone may have had the same id.
    is_its = found is not None and found.engine is engine
    return found if is_its and found is not None else DistributionStrategy(engine)


FIRST: Final = VariableAggregation.ONLY_FIRST_TOWER


def require_aggregation(aggregation: Any) -> None:
    """Refuses an aggregation that 1.12 does not have.

    Raises:
        AssertionError: ``aggregation`` is another one.
    """
    if aggregation not in (
        VariableAggregation.SUM,
        VariableAggregation.MEAN,
        FIRST,
    ):
        raise AssertionError(
            f"aggregation {aggregation!r}: expected VariableAggregation.SUM, MEAN or "
            "ONLY_FIRST_TOWER"
        )


def first_place(destinations: Any) -> Any:
    """Returns the first of the destinations of a value, on which the value is reduced.

    Raises:
        ValueError: There is no destination.
    """
    if isinstance(destinations, list | tuple):
        if not destinations:
            raise ValueError("destinations can not be empty: name a device")
        return destinations[0]
    return destinations
