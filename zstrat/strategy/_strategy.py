"""A strategy: where variables live, where steps run, how results meet.

The methods are the same for all strategies; a subclass, which is final, says how many
replicas there are, on which devices, and who creates variables. Replica functions run
in one program over the local devices (`zstrat.program._replicas`).
"""

from __future__ import annotations

import abc
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NoReturn, final

import jax
import numpy as np

from zstrat.program import _replicas
from zstrat.program._collective import Team
from zstrat.variables import IndexedSlices, recorder

from . import _context
from ._across import gather_across, reduce_across
from ._context import ReplicaContext, Scope
from ._v1 import FirstVersion
from ._values import (
    PerReplica,
    ValueContext,
    gather_values,
    is_distributed,
    local_results,
    reduce_values,
    reduction,
    select_replica,
    split_rows,
    stack_parts,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from zstrat.collectives import ReduceOp
    from zstrat.variables import Creator

    from ._extended import StrategyExtended
    from ._options import RunOptions


class Strategy(FirstVersion):
    """Base of all strategies. Only subclasses are made."""

    is_default: bool = False

    @property
    @abc.abstractmethod
    def num_replicas_in_sync(self) -> int:
        """Over how many replicas gradients are summed before they leave a worker."""

    @property
    @abc.abstractmethod
    def extended(self) -> StrategyExtended: ...

    @property
    def cluster_resolver(self) -> Any:
        """The resolver that the strategy was made from, None if there is none."""
        return None

    @abc.abstractmethod
    def _creator(self) -> Creator | None:
        """Who creates variables in scope; None: they live in this process."""

    @abc.abstractmethod
    def _devices(self) -> Sequence[jax.Device]:
        """Devices of this process to run replicas on, one each; fewer is fine."""

    def _team(self) -> Team:
        """The replicas that compute together."""
        return Team(self.num_replicas_in_sync)

    def _used(self, method: str) -> None:
        """Told when a method of a step runs; a strategy may warn."""
        del method

    def scope(self) -> AbstractContextManager[Strategy]:
        """Makes the strategy current; variables created inside are its own.

        May be nested in itself.

        Raises (on entering):
            RuntimeError: Another strategy is current, or a replica function runs.
        """
        return Scope(self, self._creator())

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        options: RunOptions | None = None,
    ) -> Any:
        """Calls ``fn`` once per local replica, in a replica context.

        With one replica this is a call: it returns what ``fn`` returns. With several,
        ``fn`` is traced and all replicas run as one program: array results come back as
        `PerReplica`, anything else as it is. Of ``args`` and ``kwargs`` each replica
        gets its part of a PerReplica value, its share of the rows of arrays drawn from
        an iterator in this step, and everything else whole.

        Raises:
            ValueError: ``args`` is no list or tuple; a drawn batch does not split
                evenly; a variable whose aggregation is NONE is updated by several
                replicas.
            RuntimeError: Called inside a replica function, or in the scope of another
                strategy.
        """
        if not isinstance(args, list | tuple):
            raise ValueError(
                f"positional args must be a list or tuple, got {type(args).__name__}: "
                "write strategy.run(fn, args=(x,))"
            )
        _context.require_cross_replica(self, "run()")
        self._used("run")
        del options
        named = {} if kwargs is None else kwargs
        team = self._team()
        with self.scope():
            if team.local > 1:
                return self._run_replicas(fn, args, named, team)
            args, named = select_replica(0, (tuple(args), named))
            alone = _replicas.alone(team) if team.channel else nullcontext()
            with ReplicaContext(self, team.first), alone:
                return fn(*args, **named)

    def reduce(self, reduce_op: ReduceOp | str, value: Any, axis: Any = None) -> Any:
        """One value from the replicas' values, leaf by leaf of a pytree.

        ``axis`` None reduces across replicas alone; an integer (or several) also over
        that axis of each replica's value, a mean then counting every element once.

        Raises:
            RuntimeError: Called inside a replica function, or in the scope of another
                strategy.
            ValueError: An unknown operation, an axis outside the rank, or the sum of a
                value that is not distributed over several replicas.
            TypeError: ``axis`` is no integer.
        """
        _context.require_cross_replica(self, "reduce()")
        self._used("reduce")
        op, team = reduction(reduce_op), self._team()
        if team.channel is not None:
            return reduce_across(team, op, value, axis)
        return reduce_values(op, value, axis, self.num_replicas_in_sync)

    def gather(self, value: Any, axis: int) -> Any:
        """The replicas' values concatenated along ``axis``, leaf by leaf of a pytree.

        Raises:
            RuntimeError: Called inside a replica function, or in the scope of another
                strategy.
            NotImplementedError: The value is an IndexedSlices.
            ValueError: Scalars, or shapes that differ in another dimension.
        """
        _context.require_cross_replica(self, "gather()")
        team = self._team()
        if team.channel is not None:
            return gather_across(team, value, axis)
        return gather_values(value, axis, self.num_replicas_in_sync)

    def experimental_local_results(self, value: Any) -> tuple[Any, ...]:
        """One entry per local replica; ``(value,)`` for what is not distributed."""
        return local_results(value)

    def experimental_distribute_values_from_function(
        self, value_fn: Callable[[ValueContext], Any]
    ) -> PerReplica:
        """A `PerReplica` of what ``value_fn`` returns for each replica's context.

        Raises:
            RuntimeError: Called inside a replica function, or in the scope of another
                strategy.
        """
        _context.require_cross_replica(
            self, "experimental_distribute_values_from_function()"
        )
        team = self._team()
        numbers = range(team.first, team.first + team.local)
        return PerReplica(tuple(value_fn(ValueContext(i, team.size)) for i in numbers))

    def __copy__(self) -> NoReturn:
        raise RuntimeError(
            "a strategy cannot be copied: use the same object, or deepcopy"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Strategy:
        # A strategy stands for a set of devices or a cluster, which there is once.
        return self

    @final
    def _run_replicas(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any],
        kwargs: dict[str, Any],
        team: Team,
    ) -> Any:
        sorted_out = _Arguments((tuple(args), kwargs), team.local)

        def replica(shared: Sequence[Any], own: Sequence[Any]) -> Any:
            own_args, own_kwargs = sorted_out.of_replica(shared, own)
            with ReplicaContext(self, team.replica_id()):
                return fn(*own_args, **own_kwargs)

        result = _replicas.replicate(
            replica,
            sorted_out.shared,
            sorted_out.split,
            team=team,
            devices=self._devices(),
        )
        return jax.tree.map(_per_replica, result, is_leaf=_is_slices)


class _Arguments:
    """Arguments of ``run``, sorted into what is split, shared and not an array."""

    def __init__(self, tree: Any, replicas: int) -> None:
        self.shared: list[Any] = []
        self.split: list[Any] = []
        self._plan: list[tuple[str, Any]] = []
        self._replicas = replicas
        tree = jax.tree.map(self._expand, tree, is_leaf=is_distributed)
        leaves, self._treedef = jax.tree.flatten(tree)
        for leaf in leaves:
            self._sort(leaf)

    def of_replica(self, shared: Sequence[Any], own: Sequence[Any]) -> Any:
        """The arguments, made of one replica's arrays."""
        sources = {"shared": iter(shared), "split": iter(own)}
        leaves = [
            leaf if kind == "whole" else next(sources[kind])
            for kind, leaf in self._plan
        ]
        return jax.tree.unflatten(self._treedef, leaves)

    def _expand(self, node: Any) -> Any:
        """A PerReplica of pytrees as a pytree of parts."""
        if not isinstance(node, PerReplica):
            return node
        if len(node.values) != self._replicas:
            raise ValueError(
                f"a PerReplica argument of strategy.run has {len(node.values)} values; "
                f"expected one for each of the {self._replicas} replicas"
            )
        return jax.tree.map(lambda *parts: _Parts(parts), *node.values)

    def _sort(self, leaf: Any) -> None:
        if isinstance(leaf, _Parts):
            self._plan.append(("split", None))
            self.split.append(stack_parts(leaf.parts))
        elif _is_batch(leaf):
            self._plan.append(("split", None))
            self.split.append(split_rows(leaf, self._replicas))
        elif isinstance(leaf, jax.Array | np.ndarray):
            self._plan.append(("shared", None))
            self.shared.append(leaf)
        else:
            self._plan.append(("whole", leaf))


class _Parts:
    """One leaf per replica; opaque to pytrees."""

    def __init__(self, parts: tuple[Any, ...]) -> None:
        self.parts = parts


def _is_batch(leaf: Any) -> bool:
    """Whether the array was drawn from an iterator, so that its rows are split."""
    if not isinstance(leaf, jax.Array) or leaf.ndim == 0:
        return False
    recording = recorder.get()
    return recording is not None and recording.drew(leaf)


def _is_slices(node: object) -> bool:
    return isinstance(node, IndexedSlices)


def _per_replica(node: Any) -> Any:
    """An array or an IndexedSlices as one value per replica, all else as it is."""
    found = [
        leaf for leaf in jax.tree.leaves(node) if isinstance(leaf, _replicas.Stacked)
    ]
    if not found:
        return node
    count = found[0].array.shape[0]
    return PerReplica(tuple(_of_replica(i, node) for i in range(count)))


def _of_replica(replica: int, node: Any) -> Any:
    return jax.tree.map(
        lambda leaf: (
            leaf.array[replica] if isinstance(leaf, _replicas.Stacked) else leaf
        ),
        node,
    )
