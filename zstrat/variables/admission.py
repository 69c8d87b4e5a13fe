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
    """

    gradients: int = 1
    chance: float = 1.0


def count(n: int) -> Admission:
    """Admits an id with the n-th push that has a gradient of it. What is counted until
    then is exact, and takes 24 to 47 bytes an id.

    Raises:
        ValueError: ``n`` is not from 1 to 255.
    """
    n = operator.index(n)
    if not 1 <= n <= 255:
        raise ValueError(f"admission.count(n): expected n from 1 to 255, got {n}")
    return Admission(gradients=n)


def probability(p: float) -> Admission:
    """Admits a share ``p`` of all ids. Whether an id is among them follows from the id
    alone: it is the same on all servers, and at all times. Nothing is counted.

    Raises:
        ValueError: ``p`` is not above 0 and at most 1.
    """
    if not 0 < p <= 1:
        raise ValueError(f"admission.probability(p): expected 0 < p <= 1, got {p}")
    return Admission(chance=float(p))
