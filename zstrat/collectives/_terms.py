"""The words of collectives."""

from __future__ import annotations

import enum


class ReduceOp(enum.Enum):
    """How values of ranks, or of replicas, become one."""

    SUM = "SUM"
    MEAN = "MEAN"
    MIN = "MIN"
    MAX = "MAX"

    @classmethod
    def of(cls, op: ReduceOp | str) -> ReduceOp:
        """The member itself, or the one of that name in any case.

        Raises:
            ValueError: There is none; says which ones there are.
        """
        if isinstance(op, ReduceOp):
            return op
        try:
            return cls(str(op).upper())
        except ValueError:
            names = ", ".join(repr(member.value) for member in cls)
            raise ValueError(f"reduce_op {op!r}: expected one of {names}") from None

    @staticmethod
    def from_variable_aggregation(aggregation: enum.Enum) -> ReduceOp:
        """The member of the same name as a `zstrat.VariableAggregation`.

        Raises:
            ValueError: NONE and ONLY_FIRST_REPLICA are no reductions.
        """
        if aggregation.name in ("SUM", "MEAN"):
            return ReduceOp[aggregation.name]
        raise ValueError(
            f"Could not convert from `VariableAggregation` {aggregation.name} to a "
            "`ReduceOp`: SUM and MEAN are reductions"
        )
