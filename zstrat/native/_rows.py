"""Copies and updates rows of tables in compiled loops, where the extension was built.

The extension (``_loops.c``) is optional: without it, rows are copied by numpy and
updated by XLA, which takes more of a parameter server's time and gives the same numbers
but for the last bits. It is built with the package if there is a C compiler; ``zstrat
doctor`` says whether it is there.
"""

from __future__ import annotations

import contextlib
import enum
import importlib
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

_loops: Any = None
with contextlib.suppress(ImportError):
    _loops = importlib.import_module("._loops", __package__)

IS_BUILT: Final = _loops is not None
"""Whether the extension is there."""

MOST_REGISTERS: Final = 48
MOST_TABLES: Final = 16
"""How many registers and tables a `LoopProgram` may have."""


class RowOperation(enum.IntEnum):
    """An operation of a `LoopProgram`, in the order of the extension. Truth is 1 or
    0."""

    NEG = 0
    ABS = 1
    SIGN = 2
    SQRT = 3
    RSQRT = 4
    ADD = 5
    SUB = 6
    MUL = 7
    DIV = 8
    MAX = 9
    MIN = 10
    EQ = 11
    NE = 12
    LT = 13
    LE = 14
    GT = 15
    GE = 16
    AND = 17
    OR = 18
    NOT = 19
    SELECT = 20


class LoopProgram(NamedTuple):
    """Operations on float32, element by element, that update rows of several tables.

    Registers are numbered: first one for each table, then the gradient, the constants,
    and the result of each operation. Each row of ``code`` ``[n, 5]``, int32, has an
    operation, the register of its result, and three operands, of which the first ones
    count. ``results`` ``[tables]``, int32, are the registers with the new rows.
    """

    code: np.ndarray
    results: np.ndarray

    def update(
        self,
        constants: np.ndarray,
        tables: Sequence[np.ndarray],
        indices: np.ndarray,
        gradients: np.ndarray,
    ) -> None:
        """Updates rows of the tables in place. Needs the extension.

        Args:
            constants: ``[c]``, float32.
            tables: ``[n, ...]``, float32, or views of opaque rows; C order.
            indices: ``[m]`` of intp, each once.
            gradients: ``[m, ...]``, float32; C order.

        Raises:
            IndexError: An index is outside of a table; nothing has changed.
        """
        assert _loops is not None
        _loops.update(
            self.code, self.results, constants, tuple(tables), indices, gradients
        )


def take_rows(table: np.ndarray, indices: np.ndarray, out: np.ndarray) -> None:
    """Copies rows of a table to ``out``.

    Args:
        table: ``[n]`` of opaque rows, and ``out`` ``[m]``.
        indices: ``[m]`` of intp, in range.
    """
    if _loops is not None:
        _loops.take(table, indices, out)
    else:
        # Clipped, as numpy would buffer ``out`` to be able to refuse.
        table.take(indices, out=out, mode="clip")


def put_rows(table: np.ndarray, indices: np.ndarray, rows: np.ndarray) -> None:
    """Copies ``rows`` to a table.

    Args:
        table: ``[n]`` of opaque rows, and ``rows`` ``[m]``.
        indices: ``[m]`` of intp, in range, each once.
    """
    if _loops is not None:
        _loops.put(table, indices, rows)
    # A subscript copies elements of up to 16 bytes in a loop made for their size, and
    # of others by a call for each: `put` takes three quarters of that.
    elif table.dtype.itemsize > 16:
        table.put(indices, rows, mode="clip")
    else:
        table[indices] = rows
