"""Cases of rounds and of bounded staleness.

What is measured is how workers wait for each other, so their steps do not compute but
sleep, each worker as its dataset says: as if each had a machine of its own.
"""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections import defaultdict
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from benchmarks import raw
from benchmarks.case import Case, Reading, cluster

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

STEP: Final = 0.02
"""Seconds of a step."""
WARM, LONG = 1.5, 5.0
"""Seconds before a measurement, and of one."""
MANY: Final = 5000
"""Steps, more than there is time for."""
CLOCK: Final = 2**30
"""Microseconds after which the clocks of steps, which are int32, begin again."""


def _sleep(_: Any, seconds: Any) -> np.ndarray:
    began = time.perf_counter()
    time.sleep(float(seconds))
    times = [int(1e6 * at) % CLOCK for at in (began, time.perf_counter())]
    return np.array([os.getpid(), *times], np.int32)


def _sleeping(strategy: Any, coordinator: Any, rounds: Any, seconds: Any) -> Any:
    """Schedules a step: it reads a variable that each update increments by 1, sleeps
    for the next of the ``seconds`` of its worker, and returns what it read, its
    process, and when it began and ended to sleep, in microseconds."""
    import jax
    import jax.numpy as jnp
    import optax

    import zstrat as zs

    with strategy.scope():
        count = zs.Variable(np.float32(0))
        optimizer = zs.Optimizer(optax.sgd(1.0), "sgd", rounds=rounds)

    @zs.function
    def step(iterator: Any) -> Any:
        read = count.value()
        shape = jax.ShapeDtypeStruct((3,), jnp.int32)
        slept = jax.pure_callback(_sleep, shape, read, next(iterator))
        optimizer.apply_gradients([(0.0 * slept[0] - 1, count)])
        return read, slept

    iterator = iter(
        coordinator.create_per_worker_dataset(
            lambda context: seconds(context.input_pipeline_id)
        )
    )
    return lambda: coordinator.schedule(step, args=(iterator,))


def _always(seconds: float, worker: int) -> Iterator[np.float32]:
    del worker
    return itertools.repeat(np.float32(seconds))


def _beyond(rounds: Any, workers: int = 2, count: int = 300) -> float:
    """Median of the microseconds between two steps: from when the last worker of a
    round has computed until all compute for the next one; without rounds those of a
    worker."""
    with cluster(1, workers) as (strategy, coordinator):
        schedule = _sleeping(strategy, coordinator, rounds, partial(_always, STEP / 4))
        values = [schedule() for _ in range(count * workers)]
        coordinator.join()
        times = defaultdict(list)
        for value in values:
            read, (process, began, ended) = value.fetch()
            times[int(read if rounds is not None else process)].append((began, ended))
    if rounds is not None:
        by_round = [zip(*times[number], strict=True) for number in sorted(times)]
        steps = [(max(began), max(ended)) for began, ended in by_round]
        pairs = [*pairwise(steps)]
    else:
        pairs = [pair for of_one in times.values() for pair in pairwise(of_one)]
    gaps = [int(after[0] - before[1]) % CLOCK for before, after in pairs]
    return statistics.median(gaps[len(gaps) // 5 :])


def overhead() -> Reading:
    import zstrat as zs

    others = {_ROUND_TRIP: raw.round_trip() * 1e6}
    return Reading(_beyond(zs.Rounds()), _beyond(None), others)


def _closed_per_second(workers: int, backup: int, seconds: Any) -> float:
    """Rounds per second; requires that metrics name the last worker where rounds wait
    for it."""
    import zstrat as zs

    with cluster(1, workers) as (strategy, coordinator):
        rounds = zs.Rounds(backup=backup)
        schedule = _sleeping(strategy, coordinator, rounds, seconds)
        for _ in range(MANY):
            schedule()

        def closed() -> int:
            found: int = coordinator.metrics()["rounds"]["sgd"]["closed"]
            return found

        rate = _rate(closed)
        metrics = coordinator.metrics()
        coordinator.cancel()
    if workers == 4 and not backup:
        waits = metrics["rounds"]["sgd"]["recent"]["waited_for"]
        all_rounds = sum(each["rounds"] for each in waits.values())
        assert waits["worker:3"]["rounds"] > 0.9 * all_rounds, waits
    return rate


def _rate(count: Callable[[], int]) -> float:
    time.sleep(WARM)
    before, began = count(), time.perf_counter()
    time.sleep(LONG)
    return (count() - before) / (time.perf_counter() - began)


def _one_is_slow(worker: int) -> Iterator[np.float32]:
    return _always(STEP * (10 if worker == 3 else 1), worker)


def backup() -> Reading:
    others = {_ALL: _closed_per_second(4, 0, _one_is_slow)}
    without = _closed_per_second(3, 0, _one_is_slow)
    return Reading(_closed_per_second(4, 1, _one_is_slow), without, others)


def _now_and_then(worker: int) -> Iterator[np.float32]:
    """One step of five takes three times as long. (Of steps between 1 and 3 times,
    equally likely, the longest of eight takes 1.4 times the mean: nothing could gain
    more.)"""
    rng = np.random.default_rng(worker)
    while True:
        yield np.float32(STEP * (3 if rng.random() < 0.2 else 1))


def _steps_per_second(staleness: int) -> float:
    with cluster(1, 8, staleness=staleness) as (strategy, coordinator):
        schedule = _sleeping(strategy, coordinator, None, _now_and_then)
        for _ in range(MANY):
            schedule()

        def completed() -> int:
            workers = coordinator.metrics()["workers"].values()
            return sum(worker["completed"] for worker in workers)

        rate = _rate(completed)
        lead = coordinator.metrics()["largest_lead"]
        coordinator.cancel()
    assert lead <= staleness, lead
    return rate


def staleness() -> Reading:
    return Reading(_steps_per_second(2), _steps_per_second(0))


_ROUND_TRIP = "raw round trip, p50"
_ALL = "the same without a backup"

CASES = [
    Case(
        "a round of 2 workers, beyond their compute",
        "us",
        2.5,
        "the same of a step without rounds",
        overhead,
        lower=True,
        of_limit=True,
        others={_ROUND_TRIP: 0},
    ),
    Case(
        "rounds of 4 workers, one 10 x slower, backup=1",
        "rounds/s",
        0.9,
        "rounds of the 3 others alone",
        backup,
        of_limit=True,
        others={_ALL: 0},
    ),
    Case(
        "8 workers, staleness=2, one step of five 3 x",
        "steps/s",
        1.5,
        "staleness=0",
        staleness,
        of_limit=True,
    ),
]
