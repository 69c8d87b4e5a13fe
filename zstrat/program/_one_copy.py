"""One replica's copy of a variable, in a step and outside of the replicas: a row of all
copies, as the step has made them so far.

Law of the file: a step never asks the home of a copy. So a read finds what was written
before it in the same step, to the copy or to the variable.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zstrat.variables import CopyHome, reaching

from ._copies import apart_from_now, copies_of, keep_copies
from ._moves import moved
from ._narrow import marked

if TYPE_CHECKING:
    import jax

    from zstrat.variables import Recorder, Variable

    from ._writes import Recorded


def copy_home(variable: Variable) -> CopyHome | None:
    """Which copy of which variable this is; None: it is none."""
    home = variable.home
    return home if isinstance(home, CopyHome) else None


def row_of(recording: Recorder, copy: CopyHome) -> jax.Array:
    """The value of the copy."""
    row: jax.Array = copies_of(recording, copy.container)[copy.number]
    return row


def change(recording: Recorder, copy: CopyHome, update: Recorded) -> None:
    """Makes the next value of the copy alone; all are kept apart from now on.

    Raises:
        NotImplementedError: By an optimizer.
        RuntimeError: Under a transformation of jax.
    """
    if update.optimizer is not None:
        raise copy.not_optimized(update.variables[0])
    operands = update.operands
    if len(operands) > 1:
        operands = (marked(reaching(operands[0])), *operands[1:])
    apart_from_now(copy.container)
    copies = copies_of(recording, copy.container)
    value = moved(update.op, operands, copies[copy.number])
    keep_copies(recording, copy.container, copies.at[copy.number].set(value))
