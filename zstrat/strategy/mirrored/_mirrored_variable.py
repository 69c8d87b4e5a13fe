"""Variables of which each replica has a copy, and those of them that are mirrored.

Replicas of a `MirroredVariable` are brought together when it is written, those of a
`SyncOnReadVariable` when it is read (`_on_read`).

Law of the file: what is said here is what TF asks of arguments; what an update does is
said where replicas are brought together (`zstrat.strategy.replica._collective`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self, final

from zstrat.collectives import ReduceOp
from zstrat.strategy._frames import in_real_replica_context
from zstrat.strategy.reduce._values import reduce_values
from zstrat.strategy.replica._per_replica import DistributedValues, Mirrored
from zstrat.strategy.replica._turns import ReplicaRendezvous, turn
from zstrat.variables import DeviceHome, Variable, VariableAggregation

from ._copy_home import copies_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from zstrat.strategy.replica._collective import Team
    from zstrat.variables import (
        AbstractVariable,
        Creator,
        Home,
        OptimizerHandle,
        VariableSpec,
    )
    from zstrat.wire import UpdateOp


class ReplicatedVariable(Variable):
    """A variable of the devices of a process, or of several. Made by a strategy."""

    __slots__ = ("_owner", "_team")
    _team: Team
    _owner: Creator

    @classmethod
    def made(cls, spec: VariableSpec, home: Home, team: Team, owner: Creator) -> Self:
        """A handle of a variable that exists already.

        Args:
            team: The replicas that have it.
            owner: Makes copies of it (`Variable.owner`).
        """
        variable = object.__new__(cls)
        variable._spec, variable._home, variable._container = spec, home, None
        variable._team, variable._owner = team, owner
        return variable

    @property
    def owner(self) -> Creator:
        return self._owner

    @property
    def values(self) -> tuple[Variable, ...]:
        """The copies that this process has, in replica order, each a variable: what
        ``strategy.experimental_local_results`` gives."""
        return copies_of(self)

    def _duplicated(self, value: np.ndarray) -> AbstractVariable:
        """A new variable, whose replicas have the values that they have of this one:
        they need not be equal."""
        made = super()._duplicated(value)
        old, new = self._home, made.components[0].home
        if isinstance(old, DeviceHome) and isinstance(new, DeviceHome):
            new.take_copies_of(self, old)
        return made

    def _operand(self, value: Any) -> Any:
        """An operand for every copy: a mirrored value is that of any replica.

        Raises:
            TypeError: It differs from replica to replica.
        """
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
    the aggregation NONE each replica updates its own copy, and they differ then."""

    __slots__ = ()

    def _dense(
        self, op: UpdateOp, value: Any, optimizer: OptimizerHandle | None = None
    ) -> Self:
        value = self._operand(value)
        if optimizer is None and isinstance(value, int | float | complex):
            self._require_distributed(value)
        return super()._dense(op, value, optimizer)

    def _require_distributed(self, value: complex) -> None:
        """Refuses a sum of what is the same number on several replicas.

        Raises:
            ValueError: It is.
        """
        team = self._team
        is_sum = self.aggregation is VariableAggregation.SUM
        if not is_sum or team.local == 1 or team.channel is not None:
            return  # as TF, which asks in one process alone
        if not in_real_replica_context():
            return
        if (mine := turn.get()) is None:
            reduce_values(ReduceOp.SUM, value, None, team.size)
            return

        def join(values: Sequence[Any]) -> Sequence[Any]:
            # Numbers that replicas computed are objects of their own, even if equal.
            if all(other is values[0] for other in values):
                reduce_values(ReduceOp.SUM, values[0], None, team.size)
            return [None] * len(values)

        words = f"an update of {self._spec}"
        mine.meet(ReplicaRendezvous((self._spec.key, "number"), words, value, join))
