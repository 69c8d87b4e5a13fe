"""Which ids of a `zs.HashTable` get a row: ``zs.HashTable(..., admission=)``.

Most ids of a long tail come once, and a row for each of them is memory for nothing.
Until an id is admitted, it reads as its first value, and its gradients are dropped and
counted (``refused``). Each gradient counts once, by the ledger of the parameter server:
neither look-ups nor steps that run again count. `HashTable.assign` and scatter updates
create any row at once.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Admission:
    """A rule of admission. Make one with `count` or `probability`.

    Args:
        gradients: An id gets its row with so many gradients: the last of them is the
            first that is applied.
        chance: The share of ids that are admitted at all.
        waiting: How many ids without a row `HashTable.evict` leaves; None: all.
    """

    gradients: int = 1
    chance: float = 1.0
    waiting: int | None = None


def count(n: int, *, waiting: int | None = None) -> Admission:
    """Admits an id with the n-th push that has a gradient of it. Counts are exact, and
    take 35 to 58 bytes for each id that waits.

    Args:
        waiting: Ids whose counts `HashTable.evict` leaves, about: those with the
            largest. Default: all.

    Raises:
        ValueError: ``n`` or ``waiting`` is not positive.
    """
    numbers = operator.index(n), None if waiting is None else operator.index(waiting)
    if any(number is not None and number <= 0 for number in numbers):
        raise ValueError(
            f"admission.count: expected positive numbers, got {n} and waiting={waiting}"
        )
    return Admission(numbers[0], 1.0, numbers[1])


def probability(p: float) -> Admission:
    """Admits a share ``p`` of all ids. Whether an id is among them follows from the id
    alone: it is the same on all servers, and at all times. Nothing is counted.

    Raises:
        ValueError: ``p`` is not above 0 and at most 1.
    """
    if not 0 < p <= 1:
        raise ValueError(f"admission.probability(p): expected 0 < p <= 1, got {p}")
    return Admission(chance=float(p))
