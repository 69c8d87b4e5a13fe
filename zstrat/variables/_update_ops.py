"""What each update does to an array, in numpy: the meaning of `UpdateOp`, said once.

Used for variables of this process; a parameter server has its own, faster engine and is
tested against these words. The array given is never written to.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from zstrat.wire import UpdateOp

if TYPE_CHECKING:
    from collections.abc import Callable

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
