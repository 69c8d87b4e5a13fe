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

from zstrat.ids import BUCKETS


@dataclass(frozen=True, slots=True)
class Admission:
    """A rule of admission. Make one with `count`, `sketch` or `probability`.

    Args:
        gradients: An id gets its row with so many gradients: the last of them is the
            first that is applied.
        chance: The share of ids that are admitted at all.
        waiting: How many ids without a row `HashTable.evict` leaves; None: all.
        sketch: Bytes of counters for each bucket of ids; 0: counts are exact.
    """

    gradients: int = 1
    chance: float = 1.0
    waiting: int | None = None
    sketch: int = 0


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


def sketch(n: int, *, bytes: int) -> Admission:  # noqa: A002  # as it is called
    """Admits an id with its n-th push that has a gradient of it, or earlier, counting
    in ``bytes`` of memory, however many ids come: a count-min sketch.

    Error: an id shares its four counters with others. About one id of 16 at most is
    counted too high, so that it may have its row earlier. From ``bytes / 6`` different
    ids without a row on, about, counts are halved now and then, so that this share
    stays as it is: what came long ago counts half, then less, and has its row later.
    Before ``bytes / 12`` ids that happens to hardly any (127 of 87,381 with the least
    memory; to one with four times as much). An id that was removed, or evicted, is not
    counted from zero.

    Pushes that are tried again count once, and the counts are the same on any number of
    servers, on their backups, and after a restart from a checkpoint.

    Args:
        n: 2 to 255.
        bytes: 1,048,576 to 2,147,483,648 of memory on all servers together, rounded
            down to a multiple of 16,384. Exact counts (`count`) take 35 to 58 for an
            id.

    Raises:
        ValueError: ``n`` or ``bytes`` is outside.
    """
    size = operator.index(bytes)
    if not (1 < operator.index(n) < 256 and 2**20 <= size <= 2**31):
        raise ValueError(
            "admission.sketch(n, bytes=): expected n from 2 to 255 and bytes from "
            f"{2**20} to {2**31}, got {n} and {bytes}"
        )
    return Admission(operator.index(n), sketch=size // (4 * BUCKETS) * 4)


def probability(p: float) -> Admission:
    """Admits a share ``p`` of all ids. Whether an id is among them follows from the id
    alone: it is the same on all servers, and at all times. Nothing is counted.

    Raises:
        ValueError: ``p`` is not above 0 and at most 1.
    """
    if not 0 < p <= 1:
        raise ValueError(f"admission.probability(p): expected 0 < p <= 1, got {p}")
    return Admission(chance=float(p))
