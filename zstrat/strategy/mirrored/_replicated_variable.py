"""Variables of which each replica has a copy: mirrored ones, and sums over all
replicas.

Updates of replicas are aggregated when a `MirroredVariable` is written; the copies of a
`SyncOnReadVariable` are aggregated when it is read. A replica function counts in the
latter (examples seen, sums of a metric) without communication; a read outside of
replica functions returns the sum, the mean, or the first of all values. With several
processes such a read is a collective: all processes must read. A checkpoint stores the
aggregate, so all processes must save.

Law of the file: it checks arguments as TF does; `zstrat.strategy.replica._collective`
decides how an update is aggregated.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NoReturn, Self, final

import jax.numpy as jnp
import numpy as np

from zstrat.collectives import ReduceOp
from zstrat.errors import CollectiveTimeoutError, PeerLostError
from zstrat.program.stages import CrossKind, first_of, sum_over
from zstrat.program.trace import device_storage
from zstrat.strategy._frames import in_real_replica_context
from zstrat.strategy.reduce._values import reduce_values
from zstrat.strategy.replica._fibers import ReplicaBarrier, current_fiber
from zstrat.strategy.replica._per_replica import DistributedValues, Mirrored
from zstrat.variables import (
    DeviceStorage,
    Variable,
    VariableAggregation,
    VariableUpdate,
    aggregated,
    mean_of_cut,
    recorder,
    refuse_read,
    shares_of,
    summed_for_mean,
)
from zstrat.wire import UpdateOp

from ._copies import copies_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from zstrat.strategy.replica._collective import Team
    from zstrat.variables import (
        AbstractVariable,
        Creator,
        OptimizerHandle,
        Storage,
        StorageUpdate,
        TraceRecorder,
        VariableSpec,
    )


class ReplicatedVariable(Variable):
    """A variable on the devices of one or several processes. Strategies create it."""

    __slots__ = ("_owner", "_team")
    _team: Team
    _owner: Creator

    @classmethod
    def made(
        cls, spec: VariableSpec, storage: Storage, team: Team, owner: Creator
    ) -> Self:
        """Makes a handle of a variable that exists already.

        Args:
            team: The replicas that use the variable.
            owner: The creator that makes copies of the variable (`Variable.owner`).
        """
        variable = object.__new__(cls)
        variable._spec, variable._storage, variable._container = spec, storage, None
        variable._team, variable._owner = team, owner
        return variable

    @property
    def owner(self) -> Creator:
        return self._owner

    @property
    def values(self) -> tuple[Variable, ...]:
        """The copies that this process has, in replica order, each as a variable: the
        result of ``strategy.experimental_local_results``."""
        return copies_of(self)

    def _duplicated(self, value: np.ndarray) -> AbstractVariable:
        """Creates a variable in which each replica has the value that it has of this
        one; these may differ."""
        made = super()._duplicated(value)
        old, new = self._storage, made.components[0].storage
        if isinstance(old, DeviceStorage) and isinstance(new, DeviceStorage):
            new.take_copies_of(self, old)
        return made

    def _operand(self, value: Any) -> Any:
        """Converts the argument of an update to the operand for every copy: of a
        `Mirrored` value it takes that of any replica.

        Raises:
            TypeError: The value differs from replica to replica.
        """
        # They are equal, so any of them will do.
        if isinstance(value, Mirrored):
            return value.values[0]
        if isinstance(value, DistributedValues):
            raise TypeError(
                f"{self._spec} is given a value per replica, and expects a mirrored "
                "value, the same for all copies: reduce it first (strategy.reduce), or "
                "update the variable in the replica function, which has its own part"
            )
        return value


@final
class MirroredVariable(ReplicatedVariable):
    """A variable whose copies are equal, because all of them get the same updates. With
    aggregation NONE each replica updates its own copy, and the copies may differ."""

    __slots__ = ()

    def _dense(self, op: UpdateOp, value: Any) -> Self:
        value = self._operand(value)
        if isinstance(value, int | float | complex):
            self._require_distributed(value)
        return super()._dense(op, value)

    def _require_distributed(self, value: complex) -> None:
        """Refuses to sum, over several replicas, a number that is the same on all of
        them.

        Raises:
            ValueError: The number is the same on several replicas.
        """
        team = self._team
        is_sum = self.aggregation is VariableAggregation.SUM
        if not is_sum or team.local == 1 or team.channel is not None:
            return  # as TF, which asks in one process alone
        if not in_real_replica_context():
            return
        if (fiber := current_fiber.get()) is None:
            # For its error: one number for all replicas cannot be meant as a sum.
            reduce_values(ReduceOp.SUM, value, None, team.size)
            return

        def join(values: Sequence[Any]) -> Sequence[Any]:
            # Numbers that replicas computed are different objects, even if equal.
            if all(other is values[0] for other in values):
                reduce_values(ReduceOp.SUM, values[0], None, team.size)
            return [None] * len(values)

        words = f"an update of {self._spec}"
        # The others have to say whether theirs is the same number.
        fiber.wait_at(ReplicaBarrier((self._spec.key, "number"), words, value, join))


_SUM = VariableAggregation.SUM
_WORDS = {UpdateOp.ADD: "assign_add", UpdateOp.SUB: "assign_sub"}


@final
class SyncOnReadVariable(ReplicatedVariable):
    """A variable whose synchronization is ON_READ: replicas' copies are aggregated by
    reads. Strategies create it."""

    __slots__ = ()

    def __deepcopy__(self, memo: dict[int, Any]) -> Variable:
        """Creates a variable in which each replica has the value that it has of this
        one. If there are several processes, all must copy the variable, at the same
        point of the program.

        Raises:
            RuntimeError: A step is being traced; or called in the scope of another
                strategy.
        """
        if recorder.get() is not None:
            # It reads the value, which raises while a step is traced.
            return super().__deepcopy__(memo)
        refuse_read(self._spec)
        made: Any = self._duplicated(self.local_value)
        return made  # type: ignore[no-any-return]  # of this class

    @property
    def is_aggregated_on_read(self) -> bool:
        return not self._is_of_this_replica

    @property
    def local_value(self) -> np.ndarray:
        """The value of this process: the aggregate of its replicas' copies."""
        return self._storage.read(self)

    def saved_value(self) -> np.ndarray:
        """Returns the value for a checkpoint: the aggregate of all replicas of all
        processes; with aggregation NONE the value of the first replica of this process.

        Cost: a collective, if there are several processes: all processes must call
        this.

        Raises:
            DataLossError: The value of this process is lost.
            PeerLostError, CollectiveTimeoutError: Another process did not take part; a
                note names the variable.
        """
        if self.aggregation is VariableAggregation.NONE:
            return self._storage.read(self)
        try:
            return self._read_now()
        except (PeerLostError, CollectiveTimeoutError) as error:
            error.add_note(
                f"{self._spec} has synchronization=ON_READ: to save it is to read it "
                "from all processes, so that all of them save, at the same place of "
                "the program; processes whose checkpoint is not needed save to "
                "another folder"
            )
            raise

    def _read_now(self) -> np.ndarray:
        # Within a replica, and where there is only one, no other process is asked.
        if self._is_of_this_replica:
            return self._storage.read(self)
        self._require_readable()
        channel = self._team.channel
        if channel is None:
            return self._storage.read(self)
        return np.asarray(
            self._of_all(
                lambda: self._storage.read(self),
                lambda: device_storage(self).copies(self),
                channel.carry_out,
            )
        )

    async def _read_now_async(self) -> np.ndarray:
        return self._read_now()

    def _traced_value(self, recording: TraceRecorder) -> Any:
        if self._is_of_this_replica:
            return recording.read(self)
        self._require_readable()

        def copies() -> Any:
            # With an axis of copies, which is what the sums of a mean take.
            if self._team.local == 1:
                return recording.read(self)[None]
            return recording.copies(self)

        def value() -> Any:
            if self._team.local == 1:
                return recording.read(self)
            return aggregated(copies(), self.aggregation)

        channel = self._team.channel
        if channel is None:
            return value()

        def across(kind: CrossKind, arrays: list[Any]) -> list[Any]:
            together = first_of if kind is CrossKind.FIRST else sum_over
            return together(channel, arrays)

        return self._of_all(value, copies, across)

    def _of_all(
        self,
        value: Callable[[], Any],
        copies: Callable[[], Any],
        across: Callable[[CrossKind, list[Any]], list[Any]],
    ) -> Any:
        """Combines the values of all processes in one collective.

        Args:
            value: Function that returns the aggregate of this process's replicas.
            copies: Function that returns the values of these replicas, ``[replicas,
                ...]``.
            across: Function that combines arrays of all processes.
        """
        is_mean = self.aggregation is VariableAggregation.MEAN
        if is_mean and self.dtype.kind in "iu":
            # Truncated once: means of the processes would be truncated already.
            sums = across(CrossKind.SUM, summed_for_mean(copies(), self._team.size))
            return mean_of_cut(sums, self._team.size)[0].astype(self.dtype)
        if self.aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
            return across(CrossKind.FIRST, [value()])[0]
        (whole,) = across(CrossKind.SUM, [value()])
        if is_mean:
            # Each process gives its mean, and all have as many replicas.
            processes = self._team.size // self._team.local
            return (whole / processes).astype(self.dtype)
        return whole

    def _record(
        self,
        recording: TraceRecorder,
        op: UpdateOp,
        value: Any,
        optimizer: OptimizerHandle | None = None,
    ) -> None:
        if not in_real_replica_context():
            # Outside of replicas the value is for the aggregate, so each copy gets its
            # share.
            value = self._for_each(op, jnp.asarray(value, self.dtype))
            if value.ndim > len(self.shape):
                recording.put_copies(self, value)
                return
        operand = jnp.asarray(value, self.dtype)
        recording.update(VariableUpdate(self, op, (operand,), optimizer))

    def _updates(
        self, op: UpdateOp, value: Any, optimizer: OptimizerHandle | None = None
    ) -> list[StorageUpdate]:
        if not in_real_replica_context():
            value = np.asarray(self._for_each(op, value), self.dtype)
        return [(self, op, (value,), optimizer)]

    def _target_of_rows(self, op: UpdateOp) -> NoReturn:
        raise NotImplementedError(
            f"{op.name.lower()} of {self._spec}: variables with "
            "synchronization=ON_READ have no updates of rows"
        )

    def _for_each(self, op: UpdateOp, value: Any) -> Any:
        """Returns the operand with which this process updates its value, from the
        operand ``value`` for the whole variable; for integers with several replicas in
        this process, one for each of their copies, ``[replicas, ...]``."""
        if self.aggregation is not _SUM or self._team.size == 1:
            return value
        if op is UpdateOp.ASSIGN:
            team = self._team
            if value.dtype.kind not in "iu":
                return value / team.size
            shares = shares_of(value, team.size)[team.first : team.first + team.local]
            return shares if team.local > 1 else shares[0]
        raise ValueError(
            f"SyncOnReadVariable does not support `{_WORDS.get(op, op.name.lower())}` "
            f"in cross-replica context when aggregation is set to SUM ({self._spec}): "
            "do it in the replica function"
        )

    @property
    def _is_of_this_replica(self) -> bool:
        """Whether a read returns the value of the replica that runs, not the
        aggregate."""
        return in_real_replica_context() or self._team.size == 1

    def _require_readable(self) -> None:
        if self.aggregation is VariableAggregation.NONE:
            raise ValueError(
                f"Could not convert from `VariableAggregation` NONE to one value: "
                f"{self._spec} has one in each replica. Read it in the replica "
                "function, or create it with an aggregation"
            )
