"""Which rows of a table are evicted, by a rule.

A rule looks at the rows of some buckets: a program that evicts a few buckets at a time
never holds a table up for long. What is evicted is logged as ids, so that a backup need
not decide it again.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from zstrat.errors import InvalidArgumentError
from zstrat.ids import BUCKETS
from zstrat.ps.engine._arithmetic import gather
from zstrat.wire import EvictionRule

from ._waiting import least

if TYPE_CHECKING:
    from zstrat.ps.engine._slots import HeldVariable

    from ._id_table import IdTable

_RULES: Final = {int(rule): rule for rule in EvictionRule}
_OF_USES: Final = frozenset(EvictionRule) - {EvictionRule.NORM, EvictionRule.WAITING}
_BLOCK: Final = 2**20
"""Elements of rows whose norms are computed at a time."""


class Eviction(NamedTuple):
    """A rule, its limit, and the buckets from ``first`` to before ``last`` in which it
    is applied."""

    rule: EvictionRule
    limit: float
    first: int
    last: int

    @classmethod
    def of(cls, operand: np.ndarray, table: IdTable, who: str) -> Eviction:
        """Returns what an update says: float64 [4].

        Raises:
            InvalidArgumentError: It is not an eviction, or the table does not note
                what its rule looks at.
        """
        if operand.dtype != np.float64 or operand.shape != (4,):
            raise InvalidArgumentError(
                f"{who} expects a rule, its limit, the first bucket and the end of the "
                f"last, float64 of shape (4,), got {operand.dtype.name} of shape "
                f"{operand.shape}"
            )
        number, limit, first, last = operand.tolist()
        rule = _RULES.get(number)
        is_limit = limit >= 0 or (rule is EvictionRule.AGE and math.isfinite(limit))
        if rule is None or not (0 <= first <= last <= BUCKETS and is_limit):
            raise InvalidArgumentError(
                f"{who} expects one of {sorted(_RULES)}, a limit that is not negative, "
                f"and buckets from 0 to {BUCKETS}, got {operand.tolist()}"
            )
        if rule in _OF_USES and table.uses is None:
            raise InvalidArgumentError(
                f"{who}: the table does not note when its rows are used, so that "
                f"{rule.name} is not known: create it with eviction="
            )
        return cls(rule, limit, int(first), int(last))

    def ids(self, held: HeldVariable, table: IdTable) -> np.ndarray:
        """Returns the ids that go."""
        if self.rule is EvictionRule.WAITING:
            if table.waiting is None:
                return np.empty(0, np.int64)
            return table.waiting.least(self.first, self.last, int(self.limit))
        ids, rows = table.index.items(self.first, self.last)
        if self.rule is EvictionRule.NORM:
            short = _norms(held.cell.look(), rows) < self.limit
            return ids.compress(short)
        assert table.uses is not None
        uses = table.uses.look()
        if self.rule is EvictionRule.UNUSED:
            ages: np.ndarray = table.now - uses[:, 0].take(rows).astype(np.int64)
            return ids.compress(ages >= self.limit)
        if self.rule is EvictionRule.AGE:
            last = uses[:, 0].take(rows).astype(np.int64)
            return ids.compress(last <= table.clock_at(self.limit))
        column = 0 if self.rule is EvictionRule.RECENT else 1
        gone = least(uses[:, column].take(rows), len(ids) - int(self.limit))
        return ids.take(gone)


def _norms(value: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Returns the Euclidean norm of each of some rows."""
    width = int(np.prod(value.shape[1:], dtype=np.int64))
    size, found = max(1, _BLOCK // width), [np.empty(0)]
    for start in range(0, len(rows), size):
        block = gather(value, rows[start : start + size]).reshape(-1, width)
        wide = np.complex128 if block.dtype.kind == "c" else np.float64
        found.append(np.linalg.norm(block.astype(wide), axis=1))
    return np.concatenate(found)
