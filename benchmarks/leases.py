"""The case of leases: what they add to the cost of a step in the program's loop.

In time of the processor, in turn with steps that draw from no leased dataset, on the
queue alone: what a step costs there besides follows the number of steps in a message,
and so whatever else the machine does.
"""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING, Any, Final

from benchmarks.case import Case, Reading
from zstrat.coordinator.parts import Closure, Draw, LeaseBook, Queue

if TYPE_CHECKING:
    from collections.abc import Sequence

BURST: Final = 20
"""Steps that are handed out at a time: 20 ms of steps of 1 ms."""
COUNT: Final = 2000
PAIRS: Final = 51
RESOURCE: Final = 1
"""The number of the iterator."""


def loop_cost() -> Reading:
    """Microseconds per step: the median of what leases add, and of a step without."""
    queue = Queue()
    book = LeaseBook("numbers", 64, epochs=None)
    assert not book.built(2**40)
    draws = [Draw(RESOURCE, 1)]
    _spent(queue, draws, {RESOURCE: book})  # warm
    pairs = [
        (_spent(queue, (), {}), _spent(queue, draws, {RESOURCE: book}))
        for _ in range(PAIRS)
    ]
    return Reading(
        statistics.median(more - less for less, more in pairs),
        statistics.median(less for less, _ in pairs),
    )


def _spent(queue: Queue, draws: Sequence[Draw], books: dict[int, LeaseBook]) -> float:
    nobody: Any = None
    queue.leases.books = books
    began = time.thread_time()
    for _ in range(COUNT // BURST):
        for _ in range(BURST):
            queue.put(Closure(nobody, nobody, draws=draws))
        for closure in queue.take(BURST, 0.0):
            queue.end(closure)
    return 1e6 * (time.thread_time() - began) / COUNT


CASES: Final = [
    Case(
        "what leases add to a step in the program's loop",
        "us",
        1,
        "a step without, in the queue",
        loop_cost,
        lower=True,
    )
]
