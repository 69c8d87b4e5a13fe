"""A scope, and what a replica function knows about itself.

Both are entered: `_frames` keeps the stack.

A scope that is entered in a program that has imported Keras installs what has models
of Keras train as the strategy says. Nothing of Keras is imported here.
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

    May be entered again inside itself; creates variables where its strategy says.
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
    """The context of a replica function.

    Several replicas of a worker are one traced program, in which the id is a traced
    int32 and `all_reduce` a collective over the worker's devices; or they run
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
        """Number of replicas that compute together, in all processes; on parameter
        servers those of one worker."""
        return self._strategy.num_replicas_in_sync

    @property
    def replica_id_in_sync_group(self) -> int | jax.Array:
        """From 0 to ``num_replicas_in_sync - 1``: an int32 that is traced where several
        replicas are one program, and with implementation=XLA in a step, which is one of
        all processes; elsewhere an int."""
        return self._replica_id

    @property
    def devices(self) -> tuple[str, ...]:
        """TF's name of this replica's device. A function that asks for it runs
        sequentially, replica by replica: one program has them all.

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
        """Sums or averages a pytree over the replicas; each gets the result.

        Booleans are counted, and means of integers are floats, whatever the number of
        replicas. Differentiable: the gradient is the same reduction of the incoming
        gradients. `IndexedSlices` are concatenated, duplicates kept; a mean divides
        their values by the number of replicas. In a step all processes have equally
        many rows.

        ``options`` are `CommunicationOptions` of this call, for what goes between
        processes; options that are left out are those of the strategy. They must be the
        same in all processes. In a step the call is then a collective by itself. A
        strategy of one process waits for no others: there they change nothing. Neither
        do ``bytes_per_pack`` and ``implementation`` for `IndexedSlices`, and
        ``bytes_per_pack`` where XLA carries out what steps do.

        Cost: one collective over the devices of the process for all dense leaves, and
        one between the processes of the strategy, if there are several.

        Raises:
            ValueError: ``reduce_op`` is not a reduction; replicas that run sequentially
                bring different structures or shapes; in a step, processes bring
                different numbers of rows; ``options`` ask for an implementation that
                the strategy was not made for, or, in a step that XLA carries out, for a
                timeout.
            TypeError: ``options`` are not `CommunicationOptions`.
            InvalidArgumentError: Processes bring arrays of different shapes or dtypes.
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
        """Concatenates a pytree over the replicas along ``axis``, in replica order, for
        each of them.

        Replicas that are one program give arrays of the same shape. Their lengths along
        ``axis`` may differ where replicas run sequentially, and from process to process
        outside of a step. A compiled step has one shape for all processes: with
        implementation=XLA the processes have to see to it, else a difference is
        refused. Differentiable, if nothing differs: a replica's gradient is its part of
        the sum of the incoming gradients.

        Args:
            axis: An integer, or an integer array without dimensions. Negative: from the
                end.
            options: As of `all_reduce`. Their timeout is that of the call; the other
                ones change nothing here, where every process talks to every other.

        Raises:
            TypeError: ``axis`` is not an integer; ``options`` are not
                `CommunicationOptions`.
            NotImplementedError: A leaf is an `IndexedSlices`.
            ValueError: A leaf has rank 0 or no such axis; replicas that run
                sequentially bring different structures, or arrays that differ in
                another dimension; in a step, the processes give arrays of different
                lengths; ``options`` as in `all_reduce`.
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

        All replicas of this process come here first. Of ``args`` and ``kwargs`` it gets
        the values of all replicas, merged as those that ``run`` returns; each replica
        gets its part of what it returns. A replica function that does this runs
        sequentially, not as one program for all.

        Raises:
            RuntimeError: This is not the replica context that is current, the replicas
                make different numbers of calls, or one of several calls it in a
                function that jax transforms, which cannot wait for the others.
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
        """Whether this process has other replicas in the same program."""
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
