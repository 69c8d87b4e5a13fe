"""The scope of a strategy, and the context of a replica function.

Both are contexts that code enters; `_frames` keeps the stack of entered contexts.

Entering a scope in a program that has imported Keras installs the hooks by which the
strategy trains Keras models. Nothing of Keras is imported here.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import jax
import numpy as np

from zstrat.collectives import ReduceOp
from zstrat.doors import install_integration
from zstrat.program import KerasWarning as KerasWarning
from zstrat.variables import creator

from ._frames import (
    AbstractReplicaContext,
    AbstractStrategy,
    Frame,
    current,
    entered,
    pop,
    push,
    refuse_mixing,
    refuse_replica_context,
)
from ._options import called_with
from .reduce._values import as_axis, reduce_values, reduction, require_gatherable
from .replica._barriers import gathering, merging, own, reducing
from .replica._columns import as_of_several, require_axes
from .replica._fibers import NeedsSequential, current_fiber
from .replica._mapped import merged

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from zstrat.variables import Aside, Creator

_Entered = TypeVar("_Entered", bound=AbstractStrategy)


class Scope(Generic[_Entered]):
    """The result of ``strategy.scope()``: a context manager that yields the strategy.

    A scope may be entered again inside itself. Variables that are created inside are
    stored where the strategy decides.
    """

    def __init__(self, strategy: _Entered, own: Creator | None) -> None:
        self._strategy = strategy
        self._creator = own
        self._entered: list[tuple[Frame, Aside]] = []

    def __enter__(self) -> _Entered:
        outer = current()
        if outer is not None and outer.strategy is not self._strategy:
            # In the replica context of the default strategy, where code is that has
            # entered nothing, any strategy may be entered.
            if outer.replica is None or not outer.strategy.is_default:
                refuse_mixing(self._strategy, outer.strategy)
        elif outer is not None and outer.replica is not None:
            refuse_replica_context("scope()")
        # A scope within an update context still knows its copy.
        frame = Frame(self._strategy, update=None if outer is None else outer.update)
        self._entered.append((frame, creator.put_aside()))
        push(frame)
        creator.set(self._creator)
        install_integration("keras", "Model")
        return self._strategy

    def __exit__(self, *exc: object) -> None:
        frame, before = self._entered[-1]
        # First: if it is not the innermost one, nothing here has changed yet.
        pop(frame)
        self._entered.pop()
        creator.put_back(before)
        if install_integration("keras", "Model"):
            words = (
                "keras was imported in strategy.scope(): models that were compiled in "
                "it train in this process alone. Import keras before the scope"
            )
            warnings.warn(words, KerasWarning, stacklevel=2)


class ReplicaContext(AbstractReplicaContext):
    """The context of a replica function: number of the replica, and collectives.

    The replicas of a worker are either one traced program, in which the replica id is a
    traced int32 and `all_reduce` a collective over the worker's devices; or they run
    sequentially, each with its id as an int, and wait for each other at barriers.
    """

    def __init__(self, strategy: AbstractStrategy, replica_id: int | jax.Array) -> None:
        self._strategy = strategy
        self._replica_id = replica_id
        self._entered: list[Frame] = []

    @property
    def strategy(self) -> AbstractStrategy:
        """The `Strategy` whose replica this is."""
        return self._strategy

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of replicas that compute together: in all processes, but with
        parameter servers only those of one worker."""
        return self._strategy.num_replicas_in_sync

    @property
    def replica_id_in_sync_group(self) -> int | jax.Array:
        """The number of this replica, from 0 to ``num_replicas_in_sync - 1``: a traced
        int32 where several replicas are one program, and in a step with
        implementation=XLA, which is one program of all processes; otherwise an int."""
        return self._replica_id

    @property
    def devices(self) -> tuple[str, ...]:
        """TF's name of this replica's device. A function that reads this runs
        sequentially, replica by replica, as one program has the devices of all
        replicas.

        Raises:
            RuntimeError: This is not the replica context that is current.
        """
        self._require_current()
        devices = self._strategy.extended.worker_devices
        # Numbers count the replicas of all processes, names the devices of this one.
        if isinstance(self._replica_id, int):
            return (devices[self._replica_id % len(devices)],)
        if (fiber := current_fiber.get()) is not None:
            return (devices[fiber.number],)
        if self._is_one_of_many:
            raise NeedsSequential("it asks for the device of its replica")
        return (devices[0],)

    def all_reduce(
        self, reduce_op: ReduceOp | str, value: Any, options: object = None
    ) -> Any:
        """Sums or averages a pytree over the replicas; each replica gets the result.

        Booleans are counted, and means of integers are floats, whatever the number of
        replicas. Differentiable: the gradient is the same reduction of the incoming
        gradients. `IndexedSlices` are concatenated, duplicates kept; a mean divides
        their values by the number of replicas. In a step all processes must have the
        same number of rows.

        ``options`` are `CommunicationOptions` for the communication of this call
        between processes; an option that is not set is that of the strategy. They must
        be the same in all processes. In a step, a call with options is a separate
        collective. For a strategy of one process, options have no effect.
        ``bytes_per_pack`` and ``implementation`` have no effect on `IndexedSlices`, nor
        ``bytes_per_pack`` in steps whose collectives XLA executes.

        Cost: one collective over the devices of the process for all dense leaves, and
        one between the processes of the strategy, if there are several.

        Raises:
            ValueError: ``reduce_op`` is not a reduction; replicas that run sequentially
                pass different structures or shapes; in a step, processes pass different
                numbers of rows; ``options`` ask for an implementation that the strategy
                was not made for, or, in a step whose collectives XLA executes, for a
                timeout.
            TypeError: ``options`` are not `CommunicationOptions`.
            InvalidArgumentError: Processes pass arrays of different shapes or dtypes.
            RuntimeError: This is not the replica context that is current; or, where
                replicas run sequentially, a function that jax transforms calls it.
        """
        self._require_current()
        op = reduction(reduce_op)
        team = called_with(self._strategy._team(), options, "all_reduce")
        if self.num_replicas_in_sync == 1:
            return reduce_values(op, jax.tree.map(as_of_several, value), None, 1)
        if (fiber := current_fiber.get()) is not None:
            return own(fiber.wait_at(reducing(team, op, value)))
        return team.all_reduce(value, mean=op is ReduceOp.MEAN)

    def all_gather(self, value: Any, axis: Any, options: object = None) -> Any:
        """Concatenates a pytree over the replicas along ``axis``, in replica order;
        each replica gets the result.

        Replicas that are one program must pass arrays of the same shape. The lengths
        along ``axis`` may differ if replicas run sequentially, and between processes
        outside of a step. A compiled step needs the same shape in all processes: a
        difference raises an error, except with implementation=XLA, where the program
        has to ensure this. Differentiable if all lengths are equal: the gradient of a
        replica is its part of the sum of the incoming gradients.

        Args:
            axis: An integer, or an integer array without dimensions. Negative: from the
                end.
            options: As in `all_reduce`. Only the timeout has an effect: in a gather
                every process exchanges with every other in any case.

        Raises:
            TypeError: ``axis`` is not an integer; ``options`` are not
                `CommunicationOptions`.
            NotImplementedError: A leaf is an `IndexedSlices`.
            ValueError: A leaf has rank 0 or no such axis; replicas that run
                sequentially pass different structures, or arrays that differ in another
                dimension; in a step, the processes pass arrays of different lengths;
                ``options`` as in `all_reduce`.
            InvalidArgumentError: Arrays of processes differ in another dimension, or in
                their dtype.
            RuntimeError: This is not the replica context that is current; or, where
                replicas run sequentially, a function that jax transforms calls it.
        """
        self._require_current()
        team = called_with(self._strategy._team(), options, "all_gather")
        require_gatherable(value)
        along = as_axis(axis, "all_gather")
        # Before it waits for the others, which would wait for this one, too.
        for leaf in jax.tree.leaves(value):
            require_axes((along,), np.shape(leaf))
        if self.num_replicas_in_sync == 1:
            return jax.tree.map(as_of_several, value)
        if (fiber := current_fiber.get()) is not None:
            return own(fiber.wait_at(gathering(team, value, along)))
        return team.all_gather(value, along)

    def merge_call(
        self,
        merge_fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Calls ``merge_fn(strategy, *args)`` once, in the cross-replica context.

        The call waits until all replicas of this process have made it. ``merge_fn``
        gets ``args`` and ``kwargs`` with the values of all replicas, merged as the
        results of ``run`` are; each replica gets its part of the result of
        ``merge_fn``. A replica function that makes such a call runs sequentially, not
        as one program for all replicas.

        Raises:
            RuntimeError: This is not the replica context that is current, the replicas
                make different numbers of calls, or one of several replicas makes the
                call in a function that jax transforms, which cannot wait for the other
                replicas.
        """
        self._require_current()
        named = kwargs or {}
        if (fiber := current_fiber.get()) is not None:
            return fiber.wait_at(merging(self._strategy, merge_fn, args, named))
        if self._is_one_of_many:
            raise NeedsSequential("it calls merge_call")
        with entered(Frame(self._strategy)), merged():
            return merge_fn(self._strategy, *args, **named)

    @property
    def _is_one_of_many(self) -> bool:
        """Whether the current process runs other replicas in the same program."""
        # Replicas that are one program have a traced number; alone, or sequentially, it
        # is an int.
        is_traced = not isinstance(self._replica_id, int)
        return is_traced and self._strategy._team().local > 1

    def _require_current(self) -> None:
        frame = current()
        if frame is None and self._strategy.is_default:
            return
        if frame is not None and frame.replica is self:
            return
        if frame is None or frame.replica is None:
            raise RuntimeError(
                "Need to be inside `call_for_each_replica()`: a replica context is "
                f"used in its own replica function, the body of {self._strategy!r}.run"
            )
        if frame.strategy is not self._strategy:
            refuse_mixing(self._strategy, frame.strategy)
        raise RuntimeError(
            "Mismatching ReplicaContext: this is the context of another replica "
            f"function of {self._strategy!r}; call get_replica_context()"
        )

    def __enter__(self) -> ReplicaContext:
        frame = Frame(self._strategy, self)
        push(frame)
        self._entered.append(frame)
        return self

    def __exit__(self, *exc: object) -> None:
        pop(self._entered[-1])
        self._entered.pop()
