"""What comes out of a step: arrays for the caller and arrays for the variables."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np

    from zstrat.variables import VariableSpec
    from zstrat.wire._messages import UpdateOp

    from ._structure import ResultLayout


class StepUpdate(NamedTuple):
    """What a step wants done to a variable. ``optimizer`` is 0 for none; ``arrays`` are
    the operands that `UpdateOp` names, in the dtype and shapes of the plan."""

    spec: VariableSpec
    op: UpdateOp
    optimizer: int
    arrays: tuple[np.ndarray, ...]


class StepResult(NamedTuple):
    """``leaves`` are the arrays of the result, as ``layout`` says: ready, read-only."""

    leaves: list[np.ndarray]
    layout: ResultLayout
    updates: list[StepUpdate]
