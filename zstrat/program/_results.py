"""What comes out of a step: arrays for the caller and arrays for the variables."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import jax
    import numpy as np

    from zstrat.variables import GradientCall, VariableSpec
    from zstrat.wire import UpdateOp

    from .trace._structure import ResultLayout


class StepUpdate(NamedTuple):
    """What a step wants done to a variable. ``optimizer`` is 0 for none; ``arrays`` are
    the operands that `UpdateOp` names, in the dtype and shapes of the plan."""

    spec: VariableSpec
    op: UpdateOp
    optimizer: int
    arrays: tuple[np.ndarray, ...]
    call: GradientCall | None = None
    """Of gradients of a tree of variables of this process; ``arrays`` are its own."""


class StepResult(NamedTuple):
    """``leaves`` are the arrays of the result, as ``layout`` says: ready, read-only."""

    leaves: list[np.ndarray]
    layout: ResultLayout
    updates: list[StepUpdate]


class Computed(NamedTuple):
    """A step that computes: its results, and all other arrays that it makes.
    ``updates`` waits for these and makes of them what the step wants done."""

    results: list[jax.Array]
    operands: Sequence[Sequence[jax.Array]]
    updates: Callable[[], list[StepUpdate]]

    def to_host(self) -> None:
        """Starts all transfers from an accelerator before the first is waited for."""
        found = [array for arrays in (self.results, *self.operands) for array in arrays]
        # To ask an array of the CPU for it takes longer than to look at its memory, and
        # one program leaves all that it computes on devices of one kind.
        if len(found) < 2 or next(iter(found[0].devices())).platform == "cpu":
            return
        for array in found:
            array.copy_to_host_async()
