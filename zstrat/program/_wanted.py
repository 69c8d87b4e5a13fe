"""What a step asks the parameter servers for, level by level, before it can run.

A step asks for all that it reads in one request. Where the rows that it looks up depend
on values that it read, it asks again, with the ids that only the first answer could
give: each such round is a *level*. A step without lookups has one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np

    from zstrat.variables import VariableSpec


class WantedRows(NamedTuple):
    """Rows of one variable: ``indices`` ``[n]`` of its own first axis, int64, growing
    strictly."""

    spec: VariableSpec
    indices: np.ndarray


class Wanted(NamedTuple):
    """One request: whole values and rows.

    The answer is one list: the values of ``reads`` in order, and behind them, for each
    of ``rows``, an array ``[n, ...]`` of the variable's dtype.
    """

    reads: tuple[VariableSpec, ...] = ()
    rows: tuple[WantedRows, ...] = ()
