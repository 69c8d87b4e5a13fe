"""The case of leases: what a step of a leased dataset costs the program's loop beyond
one of a per-worker dataset.

In time of the processor, and in turn on one cluster: so it matters little what else the
machine does.
"""

from __future__ import annotations

import statistics
import threading
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.case import Case, Reading, cluster, per_second
from benchmarks.scale_costs import thread_seconds

COUNT: Final = 4000
"""Steps of a measurement."""
PAIRS: Final = 5
BATCH: Final = 4


def loop_cost() -> Reading:
    """Microseconds per step: the median of what leases add, and of a step without."""
    import zstrat as zs

    with cluster(1, 1) as (strategy, coordinator):

        @zs.function
        def step(iterator: Any) -> Any:
            return next(iterator)[0]

        # More than all steps read: no pass ends meanwhile.
        ids = np.arange(2 * BATCH * COUNT * PAIRS, dtype=np.int32)
        leased = iter(coordinator.create_leased_dataset(ids, batch=BATCH))
        own = iter(
            coordinator.create_per_worker_dataset(
                lambda context: zs.data.Dataset.from_tensor_slices(ids).batch(BATCH)
            )
        )
        portal = f"zstrat {strategy.session.session:x}"
        (loop,) = [t for t in threading.enumerate() if t.name == portal]
        task = Path(f"/proc/self/task/{loop.native_id}")

        def spent(iterator: Any) -> float:
            per_second(coordinator, step, COUNT // 10, (iterator,))  # warm
            before = thread_seconds(task)
            per_second(coordinator, step, COUNT, (iterator,))
            return 1e6 * (thread_seconds(task) - before) / (COUNT + COUNT // 5)

        pairs = [(spent(own), spent(leased)) for _ in range(PAIRS)]
    return Reading(
        statistics.median(more - less for less, more in pairs),
        statistics.median(less for less, _ in pairs),
    )


CASES: Final = [
    Case(
        "a step of a leased dataset, more of the program's loop",
        "us",
        1,
        "a step of a per-worker dataset",
        loop_cost,
        lower=True,
    )
]
