"""What each update does to an array: the meaning of `UpdateOp`, said once.

In numpy for variables of this process, in jax for a read that follows a write in one
step. A parameter server has its own, faster engine and is tested against these words.
The array given is never written to.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from zstrat.wire._messages import UpdateOp

if TYPE_CHECKING:
    from collections.abc import Callable

    import jax

_AT: Final[dict[UpdateOp, Callable[..., Any]]] = {
    UpdateOp.SCATTER_ADD: np.add.at,
    UpdateOp.SCATTER_SUB: np.subtract.at,
    UpdateOp.SCATTER_MUL: np.multiply.at,
    UpdateOp.SCATTER_DIV: np.divide.at,
    UpdateOp.SCATTER_MIN: np.minimum.at,
    UpdateOp.SCATTER_MAX: np.maximum.at,
}


def apply(
    op: UpdateOp, value: np.ndarray, operands: tuple[np.ndarray, ...]
) -> np.ndarray:
    """The array after a dense or a scatter update. Duplicate indices accumulate; of
    duplicates in SCATTER_UPDATE the last one wins.

    Raises:
        IndexError: An index is outside the first axis.
        TypeError: The update needs an optimizer.
    """
    match op:
        case UpdateOp.ASSIGN:
            return np.array(operands[0], value.dtype, order="C")
        case UpdateOp.ADD:
            return np.asarray(value + operands[0], value.dtype)
        case UpdateOp.SUB:
            return np.asarray(value - operands[0], value.dtype)
        case UpdateOp.SCATTER_UPDATE:
            changed = value.copy()
            changed[operands[0]] = operands[1]
            return changed
        case _ if op in _AT:
            changed = value.copy()
            _AT[op](changed, operands[0], operands[1])
            return changed
    raise TypeError(f"{op.name} needs an optimizer")


def apply_traced(
    op: UpdateOp, value: jax.Array, operands: tuple[jax.Array, ...]
) -> jax.Array:
    """`apply` for traced arrays; an index outside the first axis changes nothing.

    Raises:
        TypeError: The update needs an optimizer.
    """
    first = operands[0]
    rows = value.at[first] if len(operands) > 1 else None
    match op:
        case UpdateOp.ASSIGN:
            return first
        case UpdateOp.ADD:
            return value + first
        case UpdateOp.SUB:
            return value - first
        case UpdateOp.SCATTER_ADD if rows:
            return rows.add(operands[1])
        case UpdateOp.SCATTER_SUB if rows:
            return rows.add(-operands[1])
        case UpdateOp.SCATTER_MUL if rows:
            return rows.mul(operands[1])
        case UpdateOp.SCATTER_DIV if rows:
            return rows.mul(1 / operands[1])
        case UpdateOp.SCATTER_MIN if rows:
            return rows.min(operands[1])
        case UpdateOp.SCATTER_MAX if rows:
            return rows.max(operands[1])
        case UpdateOp.SCATTER_UPDATE if rows:
            return rows.set(operands[1])
    raise TypeError(f"{op.name} needs an optimizer")
