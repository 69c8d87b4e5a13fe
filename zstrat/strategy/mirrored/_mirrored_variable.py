"""A variable of which each replica has a copy, brought together when it is written.

Law of the file: what is said here is what TF asks of arguments; what an update does is
said where replicas are brought together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Self

from zstrat.collectives import ReduceOp
from zstrat.strategy._frames import in_real_replica_context
from zstrat.strategy.reduce._values import reduce_values
from zstrat.strategy.replica._per_replica import DistributedValues, Mirrored
from zstrat.strategy.replica._turns import ReplicaRendezvous, turn
from zstrat.variables import DeviceHome, Variable, VariableAggregation

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


class MirroredVariable(Variable):
    """A variable of the devices of a process. Made by a strategy."""

    __slots__ = ("_owner", "_team")
    _team: Team
    _owner: Creator

    @classmethod
    def made(
        cls, spec: VariableSpec, home: Home, team: Team, owner: Creator
    ) -> MirroredVariable:
        """A handle of a variable that exists already."""
        variable = object.__new__(cls)
        variable._spec, variable._home, variable._container = spec, home, None
        variable._team, variable._owner = team, owner
        return variable

    @property
    def owner(self) -> Creator:
        return self._owner

    def _duplicated(self, value: np.ndarray) -> AbstractVariable:
        return with_copies(self, super()._duplicated(value))

    def _dense(
        self, op: UpdateOp, value: Any, optimizer: OptimizerHandle | None = None
    ) -> Self:
        value = self._operand(value)
        if optimizer is None and isinstance(value, int | float | complex):
            self._require_distributed(value)
        return super()._dense(op, value, optimizer)

    def _operand(self, value: Any) -> Any:
        return of_all_copies(self._spec, value)

    def _require_distributed(self, value: complex) -> None:
        """Refuses a sum of what is the same number on several replicas.

        Raises:
            ValueError: It is.
        """
        team = self._team
        is_sum = self.aggregation is VariableAggregation.SUM
        if not is_sum or team.local == 1 or team.channel is not None:
            return
        if not in_real_replica_context():
            return
        if (mine := turn.get()) is None:
            reduce_values(ReduceOp.SUM, value, None, team.size)
            return

        def join(values: Sequence[Any]) -> Sequence[Any]:
            if all(other is values[0] for other in values):
                reduce_values(ReduceOp.SUM, values[0], None, team.size)
            return [None] * len(values)

        words = f"an update of {self._spec}"
        mine.meet(ReplicaRendezvous((self._spec.key, "number"), words, value, join))


def with_copies(variable: Variable, made: AbstractVariable) -> AbstractVariable:
    """A variable that was made like another one, with the values that the replicas of
    this process have of that one: they need not be equal."""
    old, new = variable.home, made.components[0].home
    if isinstance(old, DeviceHome) and isinstance(new, DeviceHome):
        new.take_copies_of(variable, old)
    return made


def of_all_copies(spec: VariableSpec, value: Any) -> Any:
    """An operand for every copy: a mirrored value is that of any replica.

    Raises:
        TypeError: It differs from replica to replica.
    """
    if isinstance(value, Mirrored):
        return value.values[0]
    if isinstance(value, DistributedValues):
        raise TypeError(
            f"{spec} is given a value per replica, and expects a mirrored value, the "
            "same for all copies: reduce it first (strategy.reduce), or update the "
            "variable in the replica function, which has its own part"
        )
    return value
