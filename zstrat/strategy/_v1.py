"""The methods that only TF's first version of strategies has, for every strategy here.

Law of `FirstVersion`: it adds no behaviour. Each method is a present method under its
old name, or does nothing, and refuses arguments that would need more.

A `MultiStepContext` is the result of a loop over a step function. The step function
gets it as an argument, and may set outputs in the cross-replica context or in a replica
context.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, final

import jax

from zstrat.cluster import normalize_cluster_spec
from zstrat.collectives import ReduceOp
from zstrat.data import Dataset
from zstrat.errors import OutOfRangeError
from zstrat.program import drawn
from zstrat.variables import VariableAggregation

from ._frames import AbstractStrategy, current
from ._options import InputReplicationMode
from .reduce._values import reduction

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from contextlib import AbstractContextManager

    from zstrat.cluster import ClusterResolver, ClusterSpec
    from zstrat.data import InputContext

    from ._frames import AbstractReplicaContext
    from ._options import InputOptions


class FirstVersion(AbstractStrategy):
    """The methods of ``tf.compat.v1.distribute.Strategy`` that the second version of
    the class lacks."""

    def experimental_distribute_datasets_from_function(
        self,
        dataset_fn: Callable[[InputContext], Any],
        options: InputOptions | None = None,
    ) -> Any:
        """Calls `distribute_datasets_from_function`, which had this name before."""
        return self.distribute_datasets_from_function(dataset_fn, options)

    def colocate_vars_with(
        self, colocate_with_variable: Any
    ) -> AbstractContextManager[Any]:
        """Calls `extended.colocate_vars_with`."""
        context: AbstractContextManager[Any]
        context = self.extended.colocate_vars_with(colocate_with_variable)
        return context

    def make_dataset_iterator(self, dataset: Any) -> Iterator[Any]:
        """Returns an iterator of ``experimental_distribute_dataset(dataset)``."""
        return iter(self.experimental_distribute_dataset(dataset))

    def make_input_fn_iterator(
        self,
        input_fn: Callable[[InputContext], Any],
        replication_mode: InputReplicationMode | None = None,
    ) -> Iterator[Any]:
        """Returns an iterator of ``distribute_datasets_from_function(input_fn)``.
        `input_fn` may also return a function without arguments that returns the next
        element at each call, and raises StopIteration or `OutOfRangeError` at the end.

        Args:
            replication_mode: PER_WORKER, which is also the default.

        Raises:
            ValueError: ``replication_mode`` is another mode.
        """
        if replication_mode not in (None, InputReplicationMode.PER_WORKER):
            raise ValueError(
                "Input replication mode not supported: make_input_fn_iterator calls "
                f"input_fn once per worker, got {replication_mode}"
            )

        def elements(context: InputContext) -> Any:
            made = input_fn(context)
            return _calls(made) if callable(made) else made

        return iter(self.distribute_datasets_from_function(elements))

    def experimental_make_numpy_dataset(
        self, numpy_input: Any, session: object = None
    ) -> Dataset:
        """Returns ``zs.data.Dataset.from_tensor_slices(numpy_input)``: a pytree of
        arrays, row by row. ``session`` has no effect: there are no sessions, and the
        arrays stay in this process."""
        del session
        return Dataset.from_tensor_slices(numpy_input)

    def experimental_run(
        self, fn: Callable[..., Any], input_iterator: Iterator[Any] | None = None
    ) -> Any:
        """Calls ``run(fn, args=(input_iterator.get_next(),))``;
        ``next(input_iterator)`` for an iterator without that method.

        Raises:
            OutOfRangeError: The iterator of a dataset has ended.
            StopIteration: Another iterator has ended.
        """
        args = () if input_iterator is None else (drawn(input_iterator),)
        return self.run(fn, args=args)

    def unwrap(self, value: Any) -> list[Any]:
        """Returns `experimental_local_results` as a list."""
        return list(self.experimental_local_results(value))

    def group(self, value: Any, name: str | None = None) -> None:
        """Waits until all arrays in ``value`` have been computed. ``name`` has no
        effect: there is no graph with a node to name."""
        del name
        wait: Any = jax.block_until_ready  # untyped
        wait(self.unwrap(value))

    def configure(
        self,
        session_config: Any = None,
        cluster_spec: Any = None,
        task_type: str | None = None,
        task_id: int | None = None,
    ) -> None:
        """Does nothing: a strategy gets its cluster when it is made, and there are no
        sessions to configure.

        Raises:
            ValueError: The cluster has several tasks that train together, which this
                strategy does not know: each would train alone.
        """
        del session_config, task_id
        # An evaluator and a ps train nothing, so they cannot train alone by mistake.
        if not self.is_default and task_type not in ("evaluator", "ps"):
            _require_known(self.cluster_resolver, normalize_cluster_spec(cluster_spec))

    def update_config_proto(self, config_proto: Mapping[str, Any] | Any) -> Any:
        """Returns a copy of the configuration: there is no session that would read
        it."""
        return copy.deepcopy(config_proto)


def _require_known(resolver: ClusterResolver | None, spec: ClusterSpec) -> None:
    training = sum(spec.num_tasks(x) for x in ("chief", "worker") if x in spec.jobs)
    known = None if resolver is None else resolver.cluster_spec()
    if training > 1 and normalize_cluster_spec(known) != spec:
        raise ValueError(
            f"configure: the cluster has {training} tasks that train together, and "
            "this strategy was made for another one, or for one process: pass the "
            "cluster when you make the strategy, "
            "zs.MultiWorkerMirroredStrategy(resolver), or leave cluster_spec out to "
            "train in each process alone"
        )


def _calls(make: Callable[[], Any]) -> Iterator[Any]:
    """Yields the results of ``make()`` until it signals the end by an exception."""
    while True:
        try:
            element = make()
        except (StopIteration, OutOfRangeError):
            return
        yield element


_FIRST = VariableAggregation.ONLY_FIRST_REPLICA


@final
class MultiStepContext:
    """The context that each call of the function in
    ``experimental_run_steps_on_iterator`` gets, to set outputs.

    ``run_op`` is None: the steps have run when the loop returns.
    """

    run_op: None = None

    def __init__(
        self, strategy: AbstractStrategy, initial: dict[str, Any] | None = None
    ) -> None:
        self._strategy = strategy
        self._last_step_outputs: dict[str, Any] = dict(initial or {})
        self._non_tensor_outputs: dict[str, Any] = {}

    @property
    def last_step_outputs(self) -> dict[str, Any]:
        """The outputs of the last step by name, as `set_last_step_output` kept them:
        reduced, if it was called with a reduction. An output of a replica context that
        was not reduced is a value per replica."""
        return self._last_step_outputs

    @property
    def non_tensor_outputs(self) -> dict[str, Any]:
        """The outputs of the last `set_non_tensor_output` for each name."""
        return self._non_tensor_outputs

    def set_last_step_output(
        self,
        name: str,
        output: Any,
        reduce_op: ReduceOp | VariableAggregation | str | None = None,
        *,
        aggregation: VariableAggregation | None = None,
    ) -> None:
        """Keeps an output under a name; it replaces the output of the previous step.

        Args:
            reduce_op: "SUM" or "MEAN": the output is reduced over the replicas. Also a
                `VariableAggregation`, as in TF 1.12. It is optional in the
                cross-replica context: without it the output is kept unchanged.
            aggregation: TF 1.12's name of ``reduce_op``.

        Raises:
            AssertionError: Called in a replica context without a reduction.
            ValueError: ``reduce_op`` is not a reduction.
        """
        how = _reduction(aggregation if reduce_op is None else reduce_op)
        replica = _replica()
        if replica is None:
            self._keep(name, output, how)
            return
        if how is None:
            raise AssertionError(
                f"set_last_step_output({name!r}) in a replica context needs a "
                "reduction, 'SUM' or 'MEAN': there is one output in each replica"
            )
        replica.merge_call(lambda _, merged: self._keep(name, merged, how), (output,))

    def set_non_tensor_output(self, name: str, output: Any) -> None:
        """Keeps an output of any type under a name; in a replica context the output is
        the list of the values of all replicas."""
        replica = _replica()
        if replica is None:
            self._non_tensor_outputs[name] = output
            return

        def merge(strategy: AbstractStrategy, merged: Any) -> None:
            given = strategy.experimental_local_results(merged)
            self._non_tensor_outputs[name] = list(given)

        replica.merge_call(merge, (output,))

    def _keep(
        self, name: str, value: Any, how: ReduceOp | VariableAggregation | None
    ) -> None:
        if isinstance(how, ReduceOp):
            value = self._strategy.reduce(how, value, axis=None)
        elif how is _FIRST:
            value = self._strategy.experimental_local_results(value)[0]
        self._last_step_outputs[name] = value


def _replica() -> AbstractReplicaContext | None:
    frame = current()
    return None if frame is None else frame.replica


def _reduction(given: Any) -> ReduceOp | VariableAggregation | None:
    match given:
        case None | VariableAggregation.NONE:
            return None
        case VariableAggregation():
            is_first = given is _FIRST
            return given if is_first else ReduceOp.from_variable_aggregation(given)
    return reduction(given)
