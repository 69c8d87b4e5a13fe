"""Base of strategies, which decide where variables are stored, where steps run, and how
results are reduced.

The methods are the same for all strategies; a subclass, which is final, defines the
number of replicas, their devices, and the creator of variables. Replica functions run
in one program over the local devices (`zstrat.strategy.replica._regions`). A strategy
that holds a connection is a context manager that closes it.
"""

from __future__ import annotations

import abc
import logging
from contextlib import nullcontext
from contextvars import copy_context
from typing import TYPE_CHECKING, Any, Final, NoReturn, Self

from zstrat.data import InputContext
from zstrat.program import hide_frames
from zstrat.variables import StrategyCreator, Variable, is_staging, recorder

from ._context import ReplicaContext, Scope
from ._frames import leave_for, require_cross_replica
from ._options import RunOptions
from ._v1 import FirstVersion
from .input._inputs import ProcessInputs
from .mirrored._copies import by_copies, copies_of, reducible
from .reduce._across import gather_across, reduce_across
from .reduce._values import ValueContext, gather_values, reduce_values, reduction
from .replica._collective import Team
from .replica._fibers import NeedsSequential
from .replica._mapped import as_sole_replica, mesh_of
from .replica._one_program import (
    ReplicaCall,
    UnevenParts,
    as_one_program,
    require_known,
)
from .replica._per_replica import PerReplica, local_results, regroup, select_replica
from .replica._sequential import run_sequentially, uneven

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from contextlib import AbstractContextManager

    from zstrat.collectives import ReduceOp
    from zstrat.variables import Creator

    from ._extended import StrategyExtended
    from ._options import InputOptions
    from .input._distributed_dataset import DistributedDataset

_log: Final = logging.getLogger(__name__)


class Strategy(FirstVersion):
    """Base of all strategies; it has no instances of its own."""

    _is_pace_reported = False
    """Whether the warning was logged that replicas outside of a step are slow."""

    @property
    @abc.abstractmethod
    def extended(self) -> StrategyExtended:
        """The methods for algorithms that know of replicas: devices, reductions,
        updates."""

    @property
    def cluster_resolver(self) -> Any:
        """The resolver that the strategy was made from, or None."""
        return None

    @abc.abstractmethod
    def _creator(self) -> Creator | None:
        """Returns the creator of variables for the scope, which decides where they are
        stored; None: variables are stored in this process."""

    def _team(self) -> Team:
        """Returns the replicas that compute together."""
        return Team(self.num_replicas_in_sync)

    def _inputs(self) -> ProcessInputs:
        """Describes the replicas of this process as readers of distributed datasets."""
        team = self._team()
        # Each process has the same number of replicas.
        pipelines, this = team.size // team.local, team.first // team.local
        return ProcessInputs(InputContext(pipelines, this, team.size), team.local)

    def _function_inputs(self) -> ProcessInputs:
        """As `_inputs`, for datasets that functions make
        (`distribute_datasets_from_function`)."""
        return self._inputs()

    def _used(self, method: str) -> None:
        """Called by `run` and `reduce`, which belong inside a scheduled function (a
        step). A subclass may warn if they are used outside of one."""
        del method

    def scope(self) -> AbstractContextManager[Strategy]:
        """Makes the strategy current; variables that are created inside belong to it.

        A scope may be entered again inside itself.

        Raises (on entering):
            RuntimeError: Another strategy is current, or a replica function runs.
        """
        return Scope(self, self._own_creator())

    def _own_creator(self) -> Creator | None:
        """Returns the creator of variables for the scope, bound to this strategy."""
        own = self._creator()
        if isinstance(own, StrategyCreator):
            own.belong_to(self)
        return own

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        options: RunOptions | None = None,
    ) -> Any:
        """Calls ``fn`` once per local replica, in a replica context.

        Of ``args`` and ``kwargs`` each replica gets its part of a `PerReplica` value,
        its share of the rows of arrays drawn from an iterator in this step, and
        everything else whole. The results of the replicas are merged as in TF: arrays
        become a `PerReplica`, an object that all replicas return is returned itself,
        containers are merged member by member.

        All replicas run as one program if ``fn`` is a pure function of arrays: it is
        traced once. In a step (`zs.function`) the program is part of the step. Outside
        of a step the strategies of one process compile ``fn`` too, and cache the
        program by the code of ``fn`` and the values that it has captured. ``fn`` is
        compiled again if a global or captured name is bound to another object, whether
        ``fn`` uses it or a function or class of its module that ``fn`` calls by name. A
        change inside of an object or a container, or in another module, is not noticed,
        and side effects of Python (prints, lists that grow) happen only while ``fn`` is
        traced, as in ``tf.function``. Outside of a step Python numbers among the
        arguments stay numbers, and ``fn`` is compiled for each value: pass a number
        that changes from call to call (the number of the step, a learning rate) as an
        array, such as ``np.float32(rate)``. A `RetraceWarning` reports such numbers.
        Numbers in a `PerReplica` that differ between the replicas are arrays.

        Replicas run sequentially if ``fn`` is not such a function, that is, if

        - it calls ``merge_call``;
        - Python looks at a value in it: ``if``, ``int``, ``float``, ``numpy``, an index
          or a shape of what is computed, or the number of the replica;
        - it creates variables;
        - it returns random keys, or something that is not an array, number, text or
          variable;
        - the replicas get arrays of different shapes;
        - it is a ``zs.function(eager=True)``, or is called in one.

        Tracing finds this out, so side effects of Python up to that point happen once
        more. In a step each replica is then traced separately. Outside of a step, if a
        strategy of several processes or of parameter servers has one replica here,
        ``fn`` is called like any function; several replicas compute one operation at a
        time, which is slow and is logged. Context variables that sequential replicas
        set do not reach the caller.

        ``options`` have no effect: those of TF are for its compiler, and jax compiles
        for each shape that occurs.

        Raises:
            TypeError: ``options`` are not `RunOptions`.
            ValueError: ``args`` is not a list or tuple; a drawn batch does not split
                evenly; a variable of parameter servers whose aggregation is NONE is
                updated by several replicas.
            RuntimeError: Called inside a replica function, or in the scope of another
                strategy.
        """
        if not isinstance(args, list | tuple):
            raise ValueError(
                f"positional args must be a list or tuple, got {type(args).__name__}: "
                "write strategy.run(fn, args=(x,))"
            )
        require_cross_replica(self, "run()")
        self._used("run")
        if not (options is None or isinstance(options, RunOptions)):
            raise TypeError(
                "options of strategy.run must be zs.RunOptions or None, got "
                f"{type(options).__name__} {options!r:.80}: arguments of the function "
                "go into args and kwargs"
            )
        named = {} if kwargs is None else kwargs
        try:
            return self._run_in_scope(fn, args, named)
        except Exception as error:  # to the caller
            hide_frames(error)
            raise

    def reduce(self, reduce_op: ReduceOp | str, value: Any, axis: Any = None) -> Any:
        """Reduces the values of the replicas to one, leaf by leaf of a pytree.

        With ``axis`` None, reduces only across replicas; with an integer (or several),
        also over that axis of each replica's value, and a mean then counts every
        element once.

        Raises:
            RuntimeError: Called inside a replica function, or in the scope of another
                strategy.
            ValueError: An unknown operation, an axis outside the rank, or SUM of a
                value that is not distributed, over several replicas.
            TypeError: ``axis`` is not an integer.
        """
        require_cross_replica(self, "reduce()")
        self._used("reduce")
        op, team = reduction(reduce_op), self._team()
        value = reducible(op, value)
        if team.channel is not None:
            return reduce_across(team, op, value, axis)
        return reduce_values(op, value, axis, self.num_replicas_in_sync)

    def gather(self, value: Any, axis: Any) -> Any:
        """Concatenates the values of the replicas along ``axis``, leaf by leaf of a
        pytree.

        ``axis`` is an integer, or an integer array without dimensions. The axis
        determines the shape of the result, so it cannot be a number that a step gets as
        an argument: bind it, ``zs.function(functools.partial(fn, axis=0))``.

        Raises:
            TypeError: ``axis`` is not an integer.
            RuntimeError: Called inside a replica function, or in the scope of another
                strategy.
            NotImplementedError: The value is an IndexedSlices.
            ValueError: The values are scalars, or their shapes differ in another
                dimension.
        """
        require_cross_replica(self, "gather()")
        team, value = self._team(), by_copies(value)
        if team.channel is not None:
            return gather_across(team, value, axis)
        return gather_values(value, axis, self.num_replicas_in_sync)

    def experimental_local_results(self, value: Any) -> tuple[Any, ...]:
        """Returns one entry per local replica, ``(value,)`` for a value that is not
        distributed. For a variable on several devices the entries are its copies, each
        a variable."""
        if isinstance(value, Variable):
            return copies_of(value)
        return local_results(by_copies(value, lambda v: PerReplica(copies_of(v))))

    def experimental_distribute_dataset(
        self, dataset: Iterable[Any], options: InputOptions | None = None
    ) -> DistributedDataset:
        """Distributes a dataset of global batches over all replicas.

        ``dataset`` is a `zs.data.Dataset`, a dataset of grain or tf.data, arrays (a
        dict or a tuple of them), or any iterable of batches: pytrees of arrays that all
        have the rows of the batch as their first axis. Every worker must pass the same
        dataset.

        - *Rebatch.* Under the policy DATA (and AUTO where no files are read, also with
          one worker) each batch is divided into equal pieces, the last of which may be
          shorter. Under other policies rows are distributed in batches of the global
          size divided by the number of replicas, the first ones larger if there is a
          remainder; if the global size is unknown (after `map` and `rebatch`), as under
          DATA. With one replica batches are not divided.
        - *Shard*, if there are several workers, as the dataset's ``auto_shard_policy``
          says (`zs.data.AutoShardPolicy`; default AUTO).
        - *Prefetch.* A thread makes the elements of the next step, and puts them on the
          devices, while this step runs; ``options`` may set a larger number.

        The k-th piece of a worker goes to its replica ``k % replicas``. A step draws
        one element if this process has one replica, otherwise a pytree of the element's
        structure with a `PerReplica` at each leaf. At the end of the data, replicas
        without data get batches without rows as long as others have data. A strategy
        that needs static shapes (TPU) skips such a step, but runs a shorter one in
        which all replicas have rows: use ``batch(size, drop_remainder=True)`` there.
        (If data follow such a step, that strategy raises an error.)

        Several workers agree on the end of the data in the first draw of each pass, or
        in every draw. So under any policy all workers must begin the same number of
        passes, and if they have different data (FILE, HINT, OFF), make the same number
        of draws.

        Raises:
            ValueError: The dataset is not batched, or sparse; its policy does not fit
                (FILE with fewer files than workers); the workers have different numbers
                of replicas. Some of these errors are raised only while iterating.
            TypeError: ``dataset`` is not a dataset, is distributed already, or (while
                iterating) contains objects that are not data.
            NotImplementedError: ``options`` asks for PER_REPLICA.
            RuntimeError: Called inside a replica function, or in the scope of another
                strategy.
        """
        require_cross_replica(self, "experimental_distribute_dataset()")
        return self._inputs().of_dataset(dataset, options)

    def distribute_datasets_from_function(
        self,
        dataset_fn: Callable[[InputContext], Any],
        options: InputOptions | None = None,
    ) -> DistributedDataset:
        """Calls ``dataset_fn`` in each worker and distributes the datasets that it
        makes.

        ``dataset_fn`` is called once in each worker, immediately, with an
        `InputContext` that has the index of the worker. It returns the dataset for this
        worker's replicas, in batches of the size for one replica
        (``context.get_per_replica_batch_size``): each step takes one element for each
        replica. The dataset is neither rebatched nor sharded. For the kinds of datasets
        and the end of the data see `experimental_distribute_dataset`; but in one
        process, if all elements are known to have the same shape (drop_remainder; after
        a ``map``, if all had it so far), a step with too few elements ends the data, as
        in TF. All workers must begin the same number of passes, and make the same
        number of draws.

        Raises:
            TypeError: ``dataset_fn`` is not callable, does not return a dataset, or
                (while iterating) returns a dataset with objects that are not data.
            ValueError: While iterating: an element is sparse, which TPUStrategy cannot
                put on devices in advance.
            NotImplementedError: ``options`` asks for PER_REPLICA, which calls
                ``dataset_fn`` once for each replica, and this is not a
                MirroredStrategy.
            RuntimeError: Called inside a replica function, or in the scope of another
                strategy.
            Exception: Whatever ``dataset_fn`` raises.
        """
        require_cross_replica(self, "distribute_datasets_from_function()")
        return self._function_inputs().of_function(dataset_fn, options)

    def experimental_distribute_values_from_function(
        self, value_fn: Callable[[ValueContext], Any]
    ) -> Any:
        """Returns a `PerReplica` of the values that ``value_fn`` returns for the
        context of each replica; if they are containers, returns the container with a
        `PerReplica` for each member.

        Raises:
            RuntimeError: Called inside a replica function, or in the scope of another
                strategy.
        """
        require_cross_replica(self, "experimental_distribute_values_from_function()")
        team = self._team()
        numbers = range(team.first, team.first + team.local)
        values = [value_fn(ValueContext(i, team.size)) for i in numbers]
        return regroup(values, always_wrap=True)

    def __copy__(self) -> NoReturn:
        raise RuntimeError(
            "a strategy cannot be copied: use the same object, or deepcopy"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Strategy:
        # A strategy stands for a set of devices or a cluster, of which there is one.
        return self

    def _run_in_scope(
        self, fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        # Not in a separate context: a generator that `fn` draws from may keep a token
        # of the caller's, as numpy.errstate does.
        before = copy_context()
        try:
            try:
                with self.scope():
                    return self._run_replicas(fn, args, kwargs)
            except BaseException:
                leave_for(before)
                raise
        except BaseException:
            # Ctrl-C may strike on the way out, too, and in the first handler, and must
            # not leave the caller in this scope.
            leave_for(before)
            raise

    def _run_replicas(
        self, fn: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        """Runs the replicas of this process and merges their results."""
        team = self._team()
        if team.local > 1:
            devices = self._devices()
            call = ReplicaCall(self, team, fn, args, kwargs)
            try:
                # In a step the step itself refuses text; outside of one only this check
                # does.
                if recorder.get() is None and not is_staging():
                    require_known((args, kwargs))
                    self._report_pace(fn)
                return as_one_program(call, mesh_of(devices, team.local))
            except NeedsSequential:  # raised by the trace: nothing was computed yet
                return regroup(run_sequentially(call, devices))
            except UnevenParts:
                return uneven(call, devices)
        # One replica is a plain call: there are no others to bring together.
        args, kwargs = select_replica(0, (tuple(args), kwargs))
        sole = as_sole_replica(team) if team.channel else nullcontext()
        with ReplicaContext(self, team.replica_id()), sole:
            return fn(*args, **kwargs)

    def _report_pace(self, fn: Callable[..., Any]) -> None:
        if self._is_pace_reported:
            return
        self._is_pace_reported = True
        _log.warning(
            "%s.run of %s outside of a step: its replicas compute one operation at a "
            "time, which is compiled again in each call. Call run in a zs.function",
            type(self).__name__,
            getattr(fn, "__name__", "a function"),
        )


class Closing(abc.ABC):
    """A strategy that is closed at the end of a ``with`` block."""

    @abc.abstractmethod
    def close(self) -> None:
        """Closes the strategy; further calls do nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
