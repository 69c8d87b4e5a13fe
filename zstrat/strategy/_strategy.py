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

from zstrat.data import InputContext
from zstrat.program import _replicas
from zstrat.program._collective import Team
from zstrat.variables import AbstractVariable, IndexedSlices, recorder

from . import _context
from ._across import gather_across, reduce_across
from ._context import ReplicaContext, Scope
from ._inputs import Inputs
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
    from collections.abc import Callable, Iterable, Sequence
    from contextlib import AbstractContextManager

    from zstrat.collectives import ReduceOp
    from zstrat.variables import Creator

    from ._distributed_dataset import DistributedDataset
    from ._input_options import InputOptions


class Extended(abc.ABC):
    """The less common face of a strategy, as TF has it (``strategy.extended``)."""

    experimental_require_static_shapes = False

    @property
    @abc.abstractmethod
    def worker_devices(self) -> tuple[str, ...]:
        """TF's names of the devices that the replicas of one worker run on."""

    @property
    @abc.abstractmethod
    def parameter_devices(self) -> tuple[str, ...]:
        """TF's names of the places where variables are created."""

    @abc.abstractmethod
    def variable_created_in_scope(self, v: AbstractVariable) -> bool:
        """Whether ``v`` was created in the scope of this very strategy."""

    @abc.abstractmethod
    def colocate_vars_with(
        self, colocate_with_variable: AbstractVariable
    ) -> AbstractContextManager[None]:
        """Variables created inside go where that one is.

        Raises:
            ValueError: It was not created in this strategy's scope.
            RuntimeError: Entered outside of this strategy's scope.
        """

    def value_container(self, value: AbstractVariable) -> AbstractVariable:
        """The variable that ``value`` is a component of: itself."""
        return value


class Strategy(abc.ABC):
    """Base of all strategies. Only subclasses are made."""

    is_default: bool = False

    @property
    @abc.abstractmethod
    def num_replicas_in_sync(self) -> int:
        """Over how many replicas gradients are summed before they leave a worker."""

    @property
    @abc.abstractmethod
    def extended(self) -> Extended: ...

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

    def _inputs(self) -> Inputs:
        """Who draws from datasets in this process, and where elements go."""
        team = self._team()
        pipelines, this = team.size // team.local, team.first // team.local
        return Inputs(InputContext(pipelines, this, team.size), team.local)

    def _function_inputs(self) -> Inputs:
        """The same, as dataset functions are told."""
        return self._inputs()

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
        options: object = None,
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
            RuntimeError: Called inside a replica function.
        """
        if not isinstance(args, list | tuple):
            raise ValueError(
                f"positional args must be a list or tuple, got {type(args).__name__}: "
                "write strategy.run(fn, args=(x,))"
            )
        if _context.in_real_replica_context():
            _context.refuse_replica_context("run()")
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

    def reduce(self, reduce_op: ReduceOp | str, value: Any, axis: Any) -> Any:
        """One value from the replicas' values, leaf by leaf of a pytree.

        ``axis`` None reduces across replicas alone; an integer (or several) also over
        that axis of each replica's value, a mean then counting every element once.

        Raises:
            RuntimeError: Called inside a replica function.
            ValueError: An unknown operation, an axis outside the rank, or the sum of a
                value that is not distributed over several replicas.
            TypeError: ``axis`` is no integer.
        """
        if _context.in_real_replica_context():
            _context.refuse_replica_context("reduce()")
        self._used("reduce")
        op, team = reduction(reduce_op), self._team()
        if team.channel is not None:
            return reduce_across(team, op, value, axis)
        return reduce_values(op, value, axis, self.num_replicas_in_sync)

    def gather(self, value: Any, axis: int) -> Any:
        """The replicas' values concatenated along ``axis``, leaf by leaf of a pytree.

        Raises:
            RuntimeError: Called inside a replica function.
            NotImplementedError: The value is an IndexedSlices.
            ValueError: Scalars, or shapes that differ in another dimension.
        """
        if _context.in_real_replica_context():
            _context.refuse_replica_context("gather()")
        team = self._team()
        if team.channel is not None:
            return gather_across(team, value, axis)
        return gather_values(value, axis, self.num_replicas_in_sync)

    def experimental_local_results(self, value: Any) -> tuple[Any, ...]:
        """One entry per local replica; ``(value,)`` for what is not distributed."""
        return local_results(value)

    def experimental_distribute_dataset(
        self, dataset: Iterable[Any], options: InputOptions | None = None
    ) -> DistributedDataset:
        """Shares a dataset of global batches out among all replicas.

        ``dataset`` is a `zs.data.Dataset`, a dataset of grain or tf.data, arrays (a
        dict or a tuple of them), or any iterable of batches: pytrees of arrays that all
        have the rows of the batch as their first axis. Every worker gives the same.

        - *Rebatch.* Where the batch size is known, rows are dealt out in batches of the
          global size divided by the number of replicas, the first ones larger if that
          has a remainder. Otherwise each batch is cut by itself into equal pieces, the
          last of which may be shorter. With one replica nothing is cut.
        - *Shard*, if there are several workers, as the dataset's ``auto_shard_policy``
          says (`zs.data.AutoShardPolicy`; AUTO if it was not set).
        - *Prefetch.* A thread makes, and puts on the devices, the elements of the next
          step while this one runs; ``options`` may ask for more.

        The k-th piece of a worker goes to its replica ``k % replicas``. A step draws
        one element with one replica in this process, else a pytree of its structure
        with a `PerReplica` at each leaf. At the end of the data, replicas without any
        get batches of no rows as long as others have some, unless the strategy needs
        static shapes: use ``batch(size, drop_remainder=True)`` there.

        Where workers have different data (FILE, HINT, OFF), they agree on the end, so
        all of them begin passes, and draw, equally often.

        Raises:
            ValueError: The dataset is not batched; its policy does not fit (FILE with
                fewer files than workers); the replicas are not the same number in each
                worker. Some of it is found while iterating only.
            TypeError: ``dataset`` is no dataset, or distributed already.
            NotImplementedError: ``options`` asks for PER_REPLICA.
            RuntimeError: Called inside a replica function.
        """
        if _context.in_real_replica_context():
            _context.refuse_replica_context("experimental_distribute_dataset()")
        return self._inputs().of_dataset(dataset, options)

    def distribute_datasets_from_function(
        self,
        dataset_fn: Callable[[InputContext], Any],
        options: InputOptions | None = None,
    ) -> DistributedDataset:
        """The datasets that ``dataset_fn`` makes, one for each worker.

        It is called once in each worker, at once, with an `InputContext` that says
        which one that is, and returns what this worker's replicas draw, in batches of
        the size for one replica (``context.get_per_replica_batch_size``): each step
        takes one element for each of them. Nothing is batched or sharded. What it may
        return, and the end of the data: see `experimental_distribute_dataset`.

        Raises:
            TypeError: It is not callable, or returns no dataset.
            NotImplementedError: ``options`` asks for PER_REPLICA, which calls
                ``dataset_fn`` once for each replica, and this is no MirroredStrategy.
            RuntimeError: Called inside a replica function.
            Exception: Whatever ``dataset_fn`` raises.
        """
        if _context.in_real_replica_context():
            _context.refuse_replica_context("distribute_datasets_from_function()")
        return self._function_inputs().of_function(dataset_fn, options)

    def experimental_distribute_values_from_function(
        self, value_fn: Callable[[ValueContext], Any]
    ) -> PerReplica:
        """A `PerReplica` of what ``value_fn`` returns for each replica's context.

        Raises:
            RuntimeError: Called inside a replica function.
        """
        if _context.in_real_replica_context():
            _context.refuse_replica_context(
                "experimental_distribute_values_from_function()"
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
