"""Rules for which ids of a `zs.HashTable` get a row: ``zs.HashTable(..., admission=)``.

Most ids of a long tail occur once, and a row for each of them would waste memory. Until
an id is admitted, it reads as its initial value, and its gradients are dropped and
counted (``refused``). Each gradient counts once, as the parameter server's ledger of
applied updates recognizes repeated steps; look-ups do not count. `HashTable.assign` and
scatter updates create rows at once, without a rule.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

from zstrat.ids import BUCKETS


@dataclass(frozen=True, slots=True)
class Admission:
    """A rule of admission. Make one with `count`, `sketch` or `probability`.

    Args:
        gradients: Number of gradients with which an id gets its row: the last of them
            is the first that is applied.
        chance: The share of ids that are admitted at all.
        waiting: Number of ids without a row whose counts `HashTable.evict` keeps; None:
            all.
        sketch: Bytes of counters for each bucket of ids; 0: counts are exact.
    """

    gradients: int = 1
    chance: float = 1.0
    waiting: int | None = None
    sketch: int = 0


def count(n: int, *, waiting: int | None = None) -> Admission:
    """Admits an id with the n-th push that has a gradient of it. Counts are exact, and
    take 35 to 58 bytes for each id that has no row yet.

    Args:
        waiting: Approximate number of ids without a row whose counts `HashTable.evict`
            keeps: those with the largest counts. Default: all.

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
    """Admits an id with the n-th push that has a gradient of it, or earlier. Counts
    take ``bytes`` of memory, however many ids occur: a count-min sketch.

    Error: an id shares its four counters with others. At most about one id in 16 is
    counted too high, and so may get its row earlier. From about ``bytes / 6`` different
    ids without a row on, counts are halved from time to time, so that this share does
    not grow: old gradients count half, then less, and their ids get rows later. Below
    ``bytes / 12`` ids hardly any id is counted too high (127 of 87,381 with the least
    memory; one with four times as much). An id that was removed, or evicted, is not
    counted from zero.

    Pushes that are repeated count once, and the counts are the same on any number of
    servers, on their backups, and after a restart from a checkpoint.

    Args:
        n: 2 to 255.
        bytes: 1,048,576 to 2,147,483,648 of memory on all servers together, rounded
            down to a multiple of 16,384. Exact counts (`count`) take 35 to 58 bytes for
            each id.

    Raises:
        ValueError: ``n`` or ``bytes`` is outside of its range.
    """
    size = operator.index(bytes)
    if not (1 < operator.index(n) < 256 and 2**20 <= size <= 2**31):
        raise ValueError(
            "admission.sketch(n, bytes=): expected n from 2 to 255 and bytes from "
            f"{2**20} to {2**31}, got {n} and {bytes}"
        )
    return Admission(operator.index(n), sketch=size // (4 * BUCKETS) * 4)


def probability(p: float) -> Admission:
    """Admits a share ``p`` of all ids. Whether an id is admitted depends only on the
    id: the answer is the same on all servers and at all times. Nothing is counted.

    Raises:
        ValueError: ``p`` is not above 0 and at most 1.
    """
    if not 0 < p <= 1:
        raise ValueError(f"admission.probability(p): expected 0 < p <= 1, got {p}")
    return Admission(chance=float(p))
