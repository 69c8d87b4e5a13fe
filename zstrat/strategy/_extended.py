"""``strategy.extended``: the methods for algorithms that know of replicas.

The class has the methods of both versions of TF's class, and these do the same for all
strategies. A strategy passes its devices and variables to the constructor.

Law of the file: these methods are for the cross-replica context. A variable that is one
array for all replicas has one component, so an operation on all copies is done once. If
each replica has its own copy, each copy is a component.
"""

from __future__ import annotations

import functools
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import jax

from zstrat.program import drawn
from zstrat.variables import AbstractVariable, Variable, recorder

from ._frames import current, require_cross_replica, require_scope
from ._options import called_with
from ._v1 import MultiStepContext
from .mirrored._copies import agreed, components_of, container_of, reducible, updated
from .reduce._across import reduce_across
from .reduce._cross_device import CrossDeviceOps, ReductionToOneDevice, checked_pairs
from .reduce._on_devices import for_each
from .reduce._values import is_whole, reduce_values, reduction

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from zstrat.collectives import ReduceOp
    from zstrat.variables import VariableHandle

    from ._frames import AbstractStrategy

    Colocated = Callable[[AbstractVariable], AbstractContextManager[None]]
    Pairs = Sequence[tuple[Any, Any]]


class StrategyExtended:
    """The less common methods of a strategy, as TF has them.

    Args:
        workers, parameters: Names of `worker_devices` and `parameter_devices`.
        owns: Function that returns whether the strategy created a variable; None: the
            strategy creates no variables.
        colocated: Function that makes the context in which new variables are placed
            with a given one; None: all variables are in one place.
        ops: Object that reduces values of the local devices outside of steps.
        between_graph, initializes, saves: See `experimental_between_graph`,
            `experimental_should_init` and `should_checkpoint`.
    """

    experimental_require_static_shapes: bool = False
    """Whether a dataset ends before the first step in which a replica has no data. If
    not, that replica gets batches without rows."""

    def __init__(
        self,
        strategy: AbstractStrategy,
        workers: Sequence[str],
        parameters: Sequence[str],
        owns: Callable[[VariableHandle], bool] | None = None,
        *,
        colocated: Colocated | None = None,
        ops: CrossDeviceOps | None = None,
        between_graph: bool = False,
        initializes: bool = True,
        saves: bool = True,
    ) -> None:
        self._strategy = strategy
        self._workers, self._parameters = tuple(workers), tuple(parameters)
        self._owns = owns
        self._colocated = colocated
        self._ops = ops or ReductionToOneDevice()
        self._between_graph = between_graph
        self._initializes, self._saves = initializes, saves

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """TF's names of the devices on which the replicas of one worker run."""
        return self._workers

    @property
    def parameter_devices(self) -> tuple[str, ...]:
        """TF's names of the devices on which variables are created."""
        return self._parameters

    def variable_created_in_scope(self, v: AbstractVariable) -> bool:
        """Returns whether ``v`` was created in the scope of this strategy."""
        owns = self._owns
        return owns is not None and all(owns(part) for part in v.components)

    @property
    def experimental_between_graph(self) -> bool:
        """Whether each process runs a separate program."""
        return self._between_graph

    @property
    def experimental_should_init(self) -> bool:
        """Whether this process makes the initial values of variables."""
        return self._initializes

    @property
    def should_checkpoint(self) -> bool:
        """Whether this process saves checkpoints: the chief, or the first worker where
        there is no chief, and an evaluator, which trains with nobody."""
        return self._saves

    @property
    def should_save_summary(self) -> bool:
        """Whether this process writes metrics: the one that saves checkpoints."""
        return self._saves

    def colocate_vars_with(
        self, colocate_with_variable: AbstractVariable
    ) -> AbstractContextManager[None]:
        """Places variables that are created inside the context where the given variable
        is stored.

        Raises:
            ValueError: The given variable was not created in this strategy's scope.
            RuntimeError: Called outside of this strategy's scope.
        """
        require_scope(self._strategy, "colocate_vars_with()")
        if not isinstance(
            colocate_with_variable, AbstractVariable
        ) or not self.variable_created_in_scope(colocate_with_variable):
            raise ValueError(
                "`colocate_vars_with` must only be passed a variable created in this "
                f"tf.distribute.Strategy.scope(), not {colocate_with_variable!r}"
            )
        if self._colocated is None:
            return nullcontext()
        return self._colocated(colocate_with_variable)

    def value_container(self, value: Any) -> Any:
        """Returns the variable of which ``value`` is a copy or a component; ``value``
        itself if it is neither."""
        if not isinstance(value, Variable):
            return value
        whole = value.sharded_container
        return container_of(value) if whole is None else whole

    def read_var(self, v: Any) -> Any:
        """Reads a variable; if each replica has its own value, returns their aggregate.

        Raises:
            ValueError: ``v`` is not a variable.
        """
        return _variable(v, "read").value()

    def update(
        self,
        var: AbstractVariable,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        group: bool = True,
    ) -> Any:
        """Calls ``fn(component, *args, **kwargs)`` for each component of ``var``, in
        the update context: once for a variable that is one array for all replicas, and
        for each copy, in replica order, if replicas have separate copies.

        In a replica function this is a ``merge_call``: each replica must call it, with
        equal arguments.

        Args:
            args, kwargs: Arguments for ``fn``. Of a `Mirrored` value each component
                gets its own; other values are passed to all components.
            group: Whether the results of ``fn`` are merged: for one component the
                result itself, for several a value per replica, or the variable if
                ``fn`` returned its components. If not, each leaf of the result is a
                list with one entry per component.

        Raises:
            ValueError: ``var`` is not a variable; or an argument is a value per
                replica, or replicas pass different values: reduce them first; or a
                `Mirrored` value has neither one value nor one for each component.
            RuntimeError: Called in the scope of another strategy.
        """
        _variable(var, "update")
        named = dict(kwargs or {})
        frame = current()
        if (
            frame is not None
            and frame.replica is not None
            and frame.strategy is self._strategy
            and not frame.strategy.is_default
        ):

            def merge(_: AbstractStrategy, *merged: Any, **rest: Any) -> Any:
                given, more = agreed((merged, rest))
                return self.update(var, fn, given, more, group)

            return frame.replica.merge_call(merge, args, named)
        require_cross_replica(self._strategy, "update()")
        # In scope, as TF does: what is created in an update belongs to the strategy.
        with self._strategy.scope():
            own = [functools.partial(fn, each) for each in components_of(var)]
            return updated(self._strategy, own, args, named, group)

    def update_non_slot(
        self,
        colocate_with: Any,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        group: bool = True,
    ) -> Any:
        """Calls ``fn(*args, **kwargs)`` in the update context, for the state of an
        optimizer that belongs to no single variable.

        Args:
            colocate_with: A result of `non_slot_devices`; it has no effect, as values
                of this process are there already. args, kwargs, group: As in `update`.

        Raises:
            ValueError: An argument is a value per replica.
            RuntimeError: Called in a replica function, or in the scope of another
                strategy.
        """
        del colocate_with
        require_cross_replica(self._strategy, "update_non_slot()")
        with self._strategy.scope():
            return updated(self._strategy, [fn], args, dict(kwargs or {}), group)

    def non_slot_devices(self, var_list: Sequence[AbstractVariable]) -> Any:
        """Returns where state that belongs to all of these variables is stored: the
        device of the first variable by name.

        Raises:
            ValueError: The list is empty.
        """
        if not var_list:
            raise ValueError(
                "non_slot_devices() was given no variables: expected one or more; the "
                "state is stored where the first of them is"
            )
        return min(var_list, key=lambda variable: variable.name).components[0].device

    def reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value: Any,
        destinations: Any,
        options: object = None,
    ) -> Any:
        """Sums or averages the values of the replicas, and returns the result on the
        destination's devices. The result is `Mirrored` if these are several devices, or
        if the destination is a value per replica: then it has one value for each
        replica.

        Args:
            value: A pytree of values, distributed or not.
            destinations: Where to put the result: on the devices of a value per
                replica, of a variable, or of an array, or on the device of a TF name.
            options: `CommunicationOptions` of this call, as in
                `ReplicaContext.all_reduce`. A strategy of one process passes them to
                its `CrossDeviceOps`, which ignore them unless the user wrote the class.

        Raises:
            RuntimeError: Called in a replica function, or in the scope of another
                strategy.
            ValueError: An unknown operation or destination, or the sum of a value that
                is the same on several replicas; ``options`` as in
                `ReplicaContext.all_reduce`.
            TypeError: There are several processes, and ``options`` are not
                `CommunicationOptions`.
            AssertionError: ``destinations`` is a list or tuple.
        """
        return self.batch_reduce_to(reduce_op, [(value, destinations)], options)[0]

    def batch_reduce_to(
        self,
        reduce_op: ReduceOp | str,
        value_destination_pairs: Pairs,
        options: object = None,
    ) -> list[Any]:
        """Reduces several values at once, in order, as `reduce_to` does, and raises the
        same errors."""
        require_cross_replica(self._strategy, "reduce_to()")
        op = reduction(reduce_op)
        pairs = checked_pairs(value_destination_pairs)
        # All of them before any is reduced, and before another process is waited for.
        for _, destination in pairs:
            _require_one_place(destination)
        team = self._strategy._team()
        if team.channel is not None:
            # In one process they are for its own `CrossDeviceOps`.
            team = called_with(team, options, "reduce_to")
        values = [reducible(op, value) for value, _ in pairs]
        where = [destination for _, destination in pairs]
        if team.channel is not None:
            return _wanted(reduce_across(team, op, values, None), where)
        if recorder.get() is not None:
            # Part of a program, which places values by itself.
            return _wanted(reduce_values(op, values, None, team.size), where)
        given = [(x, pair[1]) for x, pair in zip(values, pairs, strict=True)]
        return self._ops.reduced(op, given, team.size, options)

    def broadcast_to(self, tensor: Any, destinations: Any) -> Any:
        """Copies a value to the devices of a destination; Python numbers are returned
        unchanged.

        Raises:
            RuntimeError: Called in a replica function, or in the scope of another
                strategy.
            AssertionError: ``destinations`` is None, a list or a tuple.
            ValueError: ``destinations`` is not a destination.
        """
        require_cross_replica(self._strategy, "broadcast_to()")
        _require_one_place(destinations)
        if isinstance(tensor, int | float):
            return tensor
        return self._ops.broadcast(tensor, destinations)

    def call_for_each_replica(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Runs a function on each replica, as ``strategy.run`` does.

        Raises:
            RuntimeError: Called in a replica function, or in the scope of another
                strategy.
        """
        require_cross_replica(self._strategy, "call_for_each_replica()")
        return self._strategy.run(fn, args, dict(kwargs or {}))

    def experimental_run_steps_on_iterator(
        self,
        fn: Callable[..., Any],
        iterator: Iterator[Any],
        iterations: int = 1,
        initial_loop_values: Mapping[str, Any] | None = None,
    ) -> MultiStepContext:
        """Calls ``fn(context, *inputs)`` for several elements of an iterator, one after
        the other.

        Args:
            fn: Function that is called with a `MultiStepContext` and the element; an
                element that is a tuple is passed as separate arguments.
            iterations: Number of elements.
            initial_loop_values: Values of ``last_step_outputs`` that no step has set.

        Returns:
            The `MultiStepContext`, with the outputs of the last step.

        Raises:
            OutOfRangeError: The iterator of a dataset has fewer elements.
            StopIteration: Another iterator has fewer elements.
            RuntimeError: Called in a replica function, or in the scope of another
                strategy.
        """
        require_cross_replica(self._strategy, "experimental_run_steps_on_iterator()")
        context = MultiStepContext(self._strategy, dict(initial_loop_values or {}))
        with self._strategy.scope():
            for _ in range(iterations):
                inputs = drawn(iterator)
                members = inputs if isinstance(inputs, tuple) else (inputs,)
                fn(context, *members)
        return context


def _wanted(results: Sequence[Any], destinations: Sequence[Any]) -> list[Any]:
    """Converts results to the form of their destinations, without moving them."""
    return [
        jax.tree.map(lambda x, where=where: for_each(x, where), one, is_leaf=is_whole)
        for one, where in zip(results, destinations, strict=True)
    ]


def _variable(var: Any, verb: str) -> AbstractVariable:
    if not isinstance(var, AbstractVariable):
        raise ValueError(f"You can not {verb} `var` {var!r}. It must be a Variable.")
    return var


def _require_one_place(destination: Any) -> None:
    # TF's assertions, which hold under python -O too.
    if destination is None or isinstance(destination, list | tuple):
        raise AssertionError(
            f"destinations {destination!r}: expected one distributed value, variable, "
            "array or name of a device; batch_reduce_to takes several values at once"
        )
