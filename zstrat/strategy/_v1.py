"""What TF's first version of strategies had besides: on every strategy here.

Law of the file: no behaviour of its own; each method is another one by its old name, or
changes nothing, and refuses what would need it to.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import jax

from zstrat.cluster import normalize_cluster_spec
from zstrat.data import Dataset
from zstrat.errors import OutOfRangeError
from zstrat.program import drawn

from ._abstract import AbstractStrategy
from .input._input_options import InputReplicationMode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from contextlib import AbstractContextManager

    from zstrat.cluster import ClusterResolver, ClusterSpec
    from zstrat.data import InputContext

    from ._extended import StrategyExtended
    from .input._input_options import InputOptions


class FirstVersion(AbstractStrategy):
    """The methods of ``tf.compat.v1.distribute.Strategy`` that the second version of
    the class has not."""

    def experimental_distribute_datasets_from_function(
        self,
        dataset_fn: Callable[[InputContext], Any],
        options: InputOptions | None = None,
    ) -> Any:
        """`distribute_datasets_from_function`, by the name that it had before."""
        return self.distribute_datasets_from_function(dataset_fn, options)

    def colocate_vars_with(
        self, colocate_with_variable: Any
    ) -> AbstractContextManager[Any]:
        """`extended.colocate_vars_with`."""
        extended: StrategyExtended = self.extended
        return extended.colocate_vars_with(colocate_with_variable)

    def make_dataset_iterator(self, dataset: Any) -> Iterator[Any]:
        """An iterator of ``experimental_distribute_dataset(dataset)``."""
        return iter(self.experimental_distribute_dataset(dataset))

    def make_input_fn_iterator(
        self,
        input_fn: Callable[[InputContext], Any],
        replication_mode: InputReplicationMode | None = None,
    ) -> Iterator[Any]:
        """An iterator of ``distribute_datasets_from_function(input_fn)``; `input_fn`
        may also return a function without arguments that makes the elements one by one,
        and raises StopIteration or `OutOfRangeError` where there are no more.

        Args:
            replication_mode: PER_WORKER, which is also the default.

        Raises:
            ValueError: It is another one.
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
        """``zs.data.Dataset.from_tensor_slices(numpy_input)``: a pytree of arrays, row
        by row. ``session`` changes nothing: there are none, and the arrays stay here.
        """
        del session
        return Dataset.from_tensor_slices(numpy_input)

    def experimental_run(
        self, fn: Callable[..., Any], input_iterator: Iterator[Any] | None = None
    ) -> Any:
        """``run(fn, args=(input_iterator.get_next(),))``, of an iterator that has no
        such method ``next(input_iterator)``.

        Raises:
            OutOfRangeError: The iterator of a dataset has no more elements.
            StopIteration: Another iterator has none.
        """
        args = () if input_iterator is None else (drawn(input_iterator),)
        return self.run(fn, args=args)

    def unwrap(self, value: Any) -> list[Any]:
        """`experimental_local_results`, as a list."""
        return list(self.experimental_local_results(value))

    def group(self, value: Any, name: str | None = None) -> None:
        """Waits until all that ``value`` consists of has been computed. ``name``
        changes nothing: there is no graph with a node that could have it."""
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
        """Changes nothing: a strategy is told its cluster when it is made, and there
        are no sessions to configure.

        Raises:
            ValueError: The cluster has several tasks that train together, of which this
                strategy was not told: each would train alone.
        """
        del session_config, task_id
        if not self.is_default and task_type not in ("evaluator", "ps"):
            _require_known(self.cluster_resolver, normalize_cluster_spec(cluster_spec))

    def update_config_proto(self, config_proto: Mapping[str, Any] | Any) -> Any:
        """A copy of the configuration: there is no session that would read it."""
        return copy.deepcopy(config_proto)


def _require_known(resolver: ClusterResolver | None, spec: ClusterSpec) -> None:
    training = sum(spec.num_tasks(x) for x in ("chief", "worker") if x in spec.jobs)
    known = None if resolver is None else resolver.cluster_spec()
    if training > 1 and normalize_cluster_spec(known) != spec:
        raise ValueError(
            f"configure: the cluster has {training} tasks that train together, and "
            "this strategy was made for another one, or for one process: tell it when "
            "it is made, zs.MultiWorkerMirroredStrategy(resolver), or leave "
            "cluster_spec out for a training in each process"
        )


def _calls(make: Callable[[], Any]) -> Iterator[Any]:
    """What the function makes, until it says that there is no more."""
    while True:
        try:
            element = make()
        except (StopIteration, OutOfRangeError):
            return
        yield element
