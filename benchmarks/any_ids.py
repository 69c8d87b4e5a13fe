"""Cases of tables of any id: against a partitioned variable of the same rows, deltas,
rows that are on the disk, and their index."""

from __future__ import annotations

import ctypes
import os
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.case import Case, Reading, cluster
from zstrat.memory import Reserve
from zstrat.ps.tables import IdIndex

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROWS, WIDTH, IDS = 1_000_000, 64, 4096
MANY = 4_000_000
"""Rows of a table of a gigabyte."""
AT_ONCE = 20_000
"""Rows that are assigned at a time."""
TURNS, STEPS = 6, 300
"""The two kinds of tables take turns, so that both meet the same load."""


def _ids(context: Any) -> Iterator[np.ndarray]:
    rng = np.random.default_rng(context.input_pipeline_id)
    while True:
        yield rng.integers(0, ROWS, IDS)


def _fill(table: Any, rows: int = ROWS) -> None:
    rng = np.random.default_rng(0)
    for start in range(0, rows, AT_ONCE):
        values = rng.standard_normal((AT_ONCE, WIDTH), np.float32)
        table.assign(np.arange(start, start + AT_ONCE), values * np.float32(0.01))


def steps(*, trains: bool) -> Reading:
    """Steps per second that look up rows, and update them if it ``trains``."""
    import optax

    import zstrat as zs

    halves = zs.partitioners.FixedShardsPartitioner(2)
    with cluster(2, 1, partitioner=halves) as (strategy, coordinator):
        with strategy.scope():
            start = zs.initializers.normal(0.01, seed=0)
            dense = zs.Variable(start, shape=(ROWS, WIDTH), dtype="float32")
            hashed = zs.HashTable(WIDTH, name="hashed")
            optimizer = zs.Optimizer(optax.sgd(0.01))
        _fill(hashed)
        iterator = iter(coordinator.create_per_worker_dataset(_ids))

        def rate_of(table: Any) -> Callable[[int], float]:
            def half_squares(table: Any, ids: Any) -> Any:
                rows = zs.embedding_lookup(table, ids)
                return 0.5 * (rows * rows).sum()

            @zs.function
            def step(iterator: Any) -> Any:
                ids = next(iterator)
                if not trains:
                    return zs.embedding_lookup(table, ids).sum()
                loss, gradient = zs.value_and_grad(half_squares)(table, ids)
                optimizer.apply_gradients(gradient, table)
                return loss

            def rate(count: int) -> float:
                began = time.perf_counter()
                for _ in range(count):
                    coordinator.schedule(step, args=(iterator,))
                coordinator.join()
                return count / (time.perf_counter() - began)

            return rate

        ours, theirs = rate_of(hashed), rate_of(dense)
        pairs = [(ours(STEPS), theirs(STEPS)) for _ in range(TURNS)][1:]
    return Reading(*[statistics.median(rates) for rates in zip(*pairs, strict=True)])


def difference(*, in_bytes: bool) -> Reading:
    """What a checkpoint of the 1 % of rows that have changed costs, in milliseconds or
    MB, beside one of all rows."""
    import optax

    import zstrat as zs

    with cluster(2, 1) as (strategy, _), _on_disk() as folder:
        with strategy.scope():
            table = zs.HashTable(WIDTH, name="table", follow_changes=True)
            optimizer = zs.Optimizer(optax.adagrad(0.1), params=table)
        _fill(table, MANY)
        checkpoint = zs.Checkpoint(table=table, optimizer=optimizer)
        # Nothing is deleted meanwhile.
        manager = zs.CheckpointManager(checkpoint, folder, None, full_every=2)
        costs: list[float] = []
        rng = np.random.default_rng(1)
        for _ in range(4):
            touched = rng.choice(MANY, MANY // 100, replace=False)
            table.assign(touched, rng.standard_normal((len(touched), WIDTH)))
            known = _files(folder)
            os.sync()
            began = time.perf_counter()
            manager.save()
            taken = time.perf_counter() - began
            new = _files(folder)
            written = sum(size for inode, size in new.items() if inode not in known)
            costs.append(written / 1e6 if in_bytes else taken * 1e3)
    return Reading(min(costs[1::2]), min(costs[0::2]))


def _on_disk() -> tempfile.TemporaryDirectory[str]:
    """Makes a folder on this disk."""
    Path("out").mkdir(exist_ok=True)
    return tempfile.TemporaryDirectory(dir="out")


def _files(folder: str) -> dict[int, int]:
    """Returns the bytes of each file, by inode: hard links are one."""
    found = [path.stat() for path in Path(folder).rglob("*") if path.is_file()]
    return {each.st_ino: each.st_size for each in found}


def cold_rows() -> Reading:
    """Microseconds for each of 4,096 random rows that a server has in a file and the
    machine not in memory, beside those that it has."""
    with _on_disk() as folder:
        reserve = Reserve(ROWS * WIDTH, np.dtype(np.float32), Path(folder))
        table = reserve.array.reshape(ROWS, WIDTH)
        table[...] = 1.0
        rng = np.random.default_rng(0)
        times: dict[bool, list[float]] = {True: [], False: []}
        for turn in range(10):
            is_cold = turn % 2 == 0
            if is_cold:
                _page_out(table)
            some = np.sort(rng.choice(ROWS, IDS, replace=False))
            if not is_cold:
                table.take(some, 0)
            began = time.perf_counter()
            table.take(some, 0)
            times[is_cold].append((time.perf_counter() - began) / IDS * 1e6)
    return Reading(*[statistics.median(times[each]) for each in (True, False)])


def index_growth() -> Reading:
    """Milliseconds of CPU time of all but 1 % of insertions of 4,096 ids each, beside
    half of them. Memory that the machine has not used before is dearest."""
    index, ids = IdIndex(), _distinct(MANY)
    costs: list[float] = []
    for start in range(0, MANY, IDS):
        some = ids[start : start + IDS]
        rows = np.arange(start, start + len(some))
        began = time.thread_time()
        index.insert(some, rows)
        costs.append((time.thread_time() - began) * 1e3)
    return Reading(*[float(np.quantile(costs, share)) for share in (0.99, 0.5)])


def index_lookups() -> Reading:
    """Nanoseconds of CPU time for each of 10,000 sorted distinct ids among 10 million,
    beside numpy's take of as many records."""
    index, ids = IdIndex(), _distinct(10_000_000)
    index.insert(ids, np.arange(len(ids)))
    records, rng = np.zeros((len(ids), 2), np.int64), np.random.default_rng(1)
    costs: dict[bool, list[float]] = {True: [], False: []}
    for turn in range(400):
        rows = np.sort(rng.choice(len(ids), 10_000, replace=False))
        some, is_ours = np.sort(ids[rows]), turn % 2 == 0
        began = time.thread_time()
        if is_ours:
            index.rows(some)
        else:
            records.take(rows, 0)
        costs[is_ours].append((time.thread_time() - began) * 1e9 / len(rows))
    return Reading(*[statistics.median(costs[each]) for each in (True, False)])


def _distinct(count: int) -> np.ndarray:
    """Returns ids in any order."""
    rng = np.random.default_rng(0)
    ids = np.unique(rng.integers(-(2**62), 2**62, count + 1000))[:count]
    return rng.permutation(ids)


def _page_out(array: np.ndarray) -> None:
    """Writes the pages of a mapped file to the disk and takes them from memory."""
    libc = ctypes.CDLL(None, use_errno=True)
    address = ctypes.c_void_p(array.ctypes.data)
    size = ctypes.c_size_t(array.nbytes)
    for call, flag in ((libc.msync, _MS_SYNC), (libc.madvise, _MADV_PAGEOUT)):
        if call(address, size, flag):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))


_MS_SYNC, _MADV_PAGEOUT = 4, 21  # as Linux numbers them

CASES = [
    Case(
        "lookups in a 1M x 64 table of any id, 4096 ids, 2 ps, 1 worker",
        "steps/s",
        0.7,
        "the same in a partitioned variable",
        partial(steps, trains=False),
        of_limit=True,
    ),
    Case(
        "row training of a 1M x 64 table of any id, SGD, 2 ps, 1 worker",
        "steps/s",
        0.6,
        "the same of a partitioned variable",
        partial(steps, trains=True),
        of_limit=True,
    ),
    Case(
        "checkpoint of 1 % of a gigabyte of rows of any id, time",
        "ms",
        0.1,
        "one of all of them",
        partial(difference, in_bytes=False),
        lower=True,
        of_limit=True,
    ),
    Case(
        "checkpoint of 1 % of a gigabyte of rows of any id, bytes",
        "MB",
        0.03,
        "one of all of them",
        partial(difference, in_bytes=True),
        lower=True,
        of_limit=True,
    ),
    Case(
        "lookup of a row of any id that is on the disk (--spill)",
        "us",
        1000,
        "rows that are in memory",
        cold_rows,
        lower=True,
    ),
    Case(
        "insertion of 4096 into an index of any id that grows to 4M, p99",
        "ms",
        5,
        "half of the insertions take less",
        index_growth,
        lower=True,
    ),
    Case(
        "lookup of one of 10k sorted ids in an index of any id, 10M",
        "ns",
        50,
        "numpy's take of as many records",
        index_lookups,
        lower=True,
    ),
]
