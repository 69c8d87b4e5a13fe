"""Cases of checkpoints: one gigabyte on two parameter servers, beside ``dd``."""

from __future__ import annotations

import contextlib
import statistics
import tempfile
import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks import local
from benchmarks.case import Case, Reading, cluster

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROWS, WIDTH, IDS = 3_906_250, 64, 4096
SIZE = ROWS * WIDTH * 4
"""1e9 bytes."""
WARM = 200
"""Steps before anything is measured."""


@contextlib.contextmanager
def _gigabyte() -> Iterator[tuple[Any, Any, Any, Path]]:
    """A table of a gigabyte, and a checkpoint manager in a folder on this disk."""
    import zstrat as zs

    parts = Path("out").resolve()
    parts.mkdir(exist_ok=True)
    halves = zs.partitioners.FixedShardsPartitioner(2)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=parts)))
        cluster_of_two = cluster(2, 2, partitioner=halves)
        strategy, coordinator = stack.enter_context(cluster_of_two)
        with strategy.scope():
            start = zs.initializers.normal(0.01, seed=0)
            table = zs.Variable(
                start, shape=(ROWS, WIDTH), dtype="float32", name="table"
            )
        checkpoints = zs.CheckpointManager(zs.Checkpoint(table=table), folder, 1)
        yield coordinator, table, checkpoints, folder


def write_rate() -> Reading:
    with _gigabyte() as (_, _, checkpoints, folder):
        times = []
        for _ in range(4):
            began = time.perf_counter()
            checkpoints.save()
            times.append(time.perf_counter() - began)
        value = SIZE / statistics.median(times[1:])
        limit = local.write(folder, SIZE)
    return Reading(value / 1e9, limit / 1e9)


def restore_rate() -> Reading:
    with _gigabyte() as (_, _, checkpoints, folder):
        path = checkpoints.save()
        times = []
        for _ in range(4):
            local.forget(folder)
            began = time.perf_counter()
            checkpoints.checkpoint.restore(path)
            times.append(time.perf_counter() - began)
        value = SIZE / statistics.median(times[1:])
        limit = local.read(folder)
    return Reading(value / 1e9, limit / 1e9)


def pause() -> Reading:
    """Longest time without a finished step while a checkpoint is written.

    The limit is that of as long a time without one: what the scheduler of a machine
    with few cores does to steps anyway.
    """
    with _gigabyte() as (coordinator, table, checkpoints, _):
        with _steps(coordinator, table) as longest_while:
            longest_while(checkpoints.save)  # warm: files' pages, compiled programs
            began = time.perf_counter()
            value = longest_while(checkpoints.save)
            seconds = time.perf_counter() - began
            limit = longest_while(lambda: threading.Event().wait(seconds))
    return Reading(value * 1e3, limit * 1e3)


@contextlib.contextmanager
def _steps(
    coordinator: Any, table: Any
) -> Iterator[Callable[[Callable[[], object]], float]]:
    """Trains on a thread of its own; yields a function that measures the longest gap
    between two finished steps while another function runs."""
    finished: list[float] = []
    warm, stop = threading.Event(), threading.Event()

    def longest_while(work: Callable[[], object]) -> float:
        first = len(finished)
        work()
        times = [*finished[first - 1 :], time.perf_counter()]
        return float(np.diff(times).max())

    with ThreadPoolExecutor(1, "training") as threads:
        training = threads.submit(_train, coordinator, table, finished, warm, stop)
        try:
            warm.wait()
            if training.done():  # it failed; its error is raised below
                return
            yield longest_while
        finally:
            stop.set()
            training.result()


def _train(
    coordinator: Any,
    table: Any,
    finished: list[float],
    warm: threading.Event,
    stop: threading.Event,
) -> None:
    try:
        for _ in _endless_steps(coordinator, table, stop):
            finished.append(time.perf_counter())
            if len(finished) == WARM:
                warm.set()
    finally:
        warm.set()  # for who waits for it, if it failed


def _endless_steps(
    coordinator: Any, table: Any, stop: threading.Event
) -> Iterator[object]:
    """Steps with a few under way, one after the other as they finish."""
    import optax

    import zstrat as zs

    with coordinator.strategy.scope():
        optimizer = zs.Optimizer(optax.sgd(0.01))

    def loss_fn(table: Any, ids: Any) -> Any:
        rows = zs.embedding_lookup(table, ids)
        return 0.5 * (rows * rows).sum()

    @zs.function
    def step(iterator: Any) -> Any:
        loss, gradient = zs.value_and_grad(loss_fn)(table, next(iterator))
        optimizer.apply_gradients(gradient, table)
        return loss

    def dataset(context: Any) -> Iterator[np.ndarray]:
        rng = np.random.default_rng(context.input_pipeline_id)
        while True:
            yield rng.integers(0, ROWS, IDS, np.int32)

    iterator = iter(coordinator.create_per_worker_dataset(dataset))
    waiting = deque(coordinator.schedule(step, args=(iterator,)) for _ in range(8))
    while not stop.is_set():
        yield waiting.popleft().fetch()
        waiting.append(coordinator.schedule(step, args=(iterator,)))
    coordinator.join()


CASES = [
    Case(
        "checkpoint of 1 GB from 2 ps, rate of writing",
        "GB/s",
        0.7,
        "one file written in 4 MiB blocks, with fsync, as dd does",
        write_rate,
        of_limit=True,
    ),
    Case(
        "restore of 1 GB to 2 ps, rate of reading",
        "GB/s",
        0.7,
        "the same files read in 4 MiB blocks, none in the page cache",
        restore_rate,
        of_limit=True,
    ),
    Case(
        "longest pause of training while 1 GB is written",
        "ms",
        50,
        "the same for as long a time without a checkpoint",
        pause,
        lower=True,
    ),
]
