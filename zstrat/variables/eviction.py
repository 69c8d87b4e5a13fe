"""Rules for which rows of a `zs.HashTable` are dropped: ``zs.HashTable(...,
eviction=)``.

`HashTable.evict` applies the rule. An eviction is an update like others: ordered with
pushes of gradients, applied once, and repeated on the backup of a server. It drops rows
together with the optimizers' slots of these rows. A later gradient of such an id
creates its row again, with the initial value.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass

from zstrat.wire import EvictionRule


@dataclass(frozen=True, slots=True)
class Eviction:
    """A rule of eviction. Make one with `steps`, `age`, `norm` or `capacity`."""

    rule: EvictionRule
    limit: float

    @property
    def tracks(self) -> bool:
        """Whether servers have to record when rows had gradients, in 8 bytes a row."""
        return self.rule not in (EvictionRule.NORM, EvictionRule.WAITING)

    @property
    def is_share(self) -> bool:
        """Whether the limit is a number of rows of the whole table, of which each part
        gets its share."""
        return self.rule not in (
            EvictionRule.UNUSED, EvictionRule.AGE, EvictionRule.NORM
        )  # fmt: skip


def steps(n: int) -> Eviction:
    """Drops rows without a gradient in the last ``n`` pushes of an optimizer to the
    table. (Each step that applies gradients of the table is one push.)

    Raises:
        ValueError: ``n`` is not positive.
    """
    return Eviction(EvictionRule.UNUSED, _positive("steps", n))


def age(seconds: float) -> Eviction:
    """Drops rows without a gradient in the last ``seconds``.

    Time is measured by the program, at its calls of `HashTable.evict`: servers record
    which pushes precede each call, keep with each row its last push, and never read a
    clock. So a row is never dropped early; it is dropped by the first call that is
    ``seconds`` or more after the call that followed its last gradient. Call ``evict``
    several times in ``seconds``; calls closer than a 128th of it count as one. For a
    row that `assign` creates, time starts then. Times are saved in checkpoints, and
    time passes while no program runs.

    If the clock jumps ahead, rows are older by as much, and may be dropped early. If
    the clock is set back, rows that had gradients before count as used at the next
    call.

    Raises:
        ValueError: ``seconds`` is not positive and finite.
    """
    if not 0 < seconds < math.inf:
        raise ValueError(f"eviction.age: expected seconds above 0, got {seconds}")
    return Eviction(EvictionRule.AGE, float(seconds))


def norm(x: float) -> Eviction:
    """Drops rows whose Euclidean norm is less than ``x``: if initial values are zero,
    these rows have learned little.

    Raises:
        ValueError: ``x`` is not positive.
    """
    if not x > 0:
        raise ValueError(f"eviction.norm(x): expected x > 0, got {x}")
    return Eviction(EvictionRule.NORM, float(x))


def capacity(rows: int, by: str = "recency") -> Eviction:
    """Keeps about ``rows`` rows of the table.

    Args:
        by: ``"recency"`` keeps the rows that had a gradient most recently;
            ``"frequency"`` keeps the rows that had the most gradients.

    Raises:
        ValueError: ``rows`` is not positive, or ``by`` is another word.
    """
    rules = {"recency": EvictionRule.RECENT, "frequency": EvictionRule.FREQUENT}
    if by not in rules:
        raise ValueError(
            f"eviction.capacity(by=): expected 'recency' or 'frequency', got {by!r}"
        )
    return Eviction(rules[by], _positive("capacity", rows))


def _positive(name: str, n: int) -> float:
    number = operator.index(n)
    if number <= 0:
        raise ValueError(f"eviction.{name}: expected a positive number, got {number}")
    return float(number)
