"""The cases: each measures zstrat and its limit in one process and returns both.

A case returns ``Reading(value, limit)`` in the unit of its row; `__main__` runs it in
fresh processes and prints the table.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks import (
    any_ids,
    collectives,
    leases,
    many_variables,
    mesh,
    raw,
    rounds,
    saving,
    tables,
)
from benchmarks.case import Case, Reading, cluster, per_second, rate

if TYPE_CHECKING:
    from collections.abc import Iterator

MiB = 2**20
LAYERS = (784, 512, 512, 10)
MLP_SIZES = [4 * n for a, b in pairwise(LAYERS) for n in (a * b, b)]
BATCH = 256


def _trivial() -> Any:
    import jax.numpy as jnp

    import zstrat as zs

    @zs.function
    def trivial() -> Any:
        return jnp.float32(1.0)

    return trivial


def closures() -> Reading:
    with cluster(1, 2) as (_, coordinator):
        value = per_second(coordinator, _trivial(), 30_000)
    return Reading(value, raw.round_trips_per_second(2))


def scalar_reads() -> Reading:
    import zstrat as zs

    with cluster(1, 2) as (strategy, coordinator):
        with strategy.scope():
            scalar = zs.Variable(np.float32(3.0), name="scalar")

        @zs.function
        def read() -> Any:
            return scalar.value()

        value = per_second(coordinator, read, 10_000)
    return Reading(value, raw.round_trips_per_second(1))


_BETWEEN_THREADS = "the same hops between threads, with nothing in them"


def latency() -> Reading:
    with cluster(1, 2) as (_, coordinator):
        trivial = _trivial()
        times = []
        for _ in range(2000):
            began = time.perf_counter()
            coordinator.schedule(trivial).fetch()
            times.append(time.perf_counter() - began)
    hops = {_BETWEEN_THREADS: raw.round_trip_between_threads() * 1e6}
    return Reading(statistics.median(times[500:]) * 1e6, raw.round_trip() * 1e6, hops)


def pull_64mb(transport: str) -> Reading:
    import jax

    from benchmarks import direct

    size = 64 * MiB
    with direct.client(size // 4, transport) as client:

        async def once() -> None:
            jax.block_until_ready(jax.device_put(await client.pull()))

        value = size / client.seconds(once, 15)
    limit = raw.pull(size, 15) if transport == "tcp" else raw.memcpy(size, 15)
    return Reading(value / 1e9, limit / 1e9)


def pull_100_variables() -> Reading:
    """100 variables of 1 MB in one pull; the limit is one variable of 64 MB."""
    return Reading(_pulled(MiB // 4, 100) / 1e9, _pulled(16 * MiB, 1) / 1e9)


def _pulled(elements: int, count: int) -> float:
    """Bytes per second of pulls through shared memory into a compiled program, which
    takes them as a step's does."""
    import jax

    from benchmarks import direct

    program = jax.jit(lambda arrays: [array[0] for array in arrays])
    with direct.client(elements, "shm", count) as client:

        async def once() -> None:
            jax.block_until_ready(program(await client.pull()))

        return 4 * elements * count / client.seconds(once, 15)


def push_64mb(transport: str) -> Reading:
    from benchmarks import direct

    size = 64 * MiB
    with direct.client(size // 4, transport) as client:
        delta = np.ones(size // 4, np.float32)
        value = size / client.seconds(lambda: client.push(delta), 15)
    limit = raw.push(size, 15) if transport == "tcp" else raw.memcpy(size, 15)
    return Reading(value / 1e9, limit / 1e9)


def _mlp_parameters() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    arrays = []
    for a, b in pairwise(LAYERS):
        arrays.append((rng.standard_normal((a, b)) / a**0.5).astype(np.float32))
        arrays.append(np.zeros(b, np.float32))
    return arrays


def _mlp_loss(parameters: list[Any], x: Any, y: Any) -> Any:
    import jax
    import jax.numpy as jnp

    for i in range(0, len(parameters) - 2, 2):
        x = jax.nn.relu(x @ parameters[i] + parameters[i + 1])
    logits = x @ parameters[-2] + parameters[-1]
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), y[:, None], 1)
    return -jnp.mean(picked)


def _batch() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1)
    x = rng.standard_normal((BATCH, LAYERS[0])).astype(np.float32)
    return x, rng.integers(0, LAYERS[-1], BATCH).astype(np.int32)


def mlp_pull_push() -> Reading:
    import zstrat as zs

    with cluster(1, 1) as (strategy, coordinator):
        with strategy.scope():
            weights = [zs.Variable(array) for array in _mlp_parameters()]

        @zs.function
        def move() -> None:
            for weight in weights:
                weight.assign_sub(weight.value() * 1e-6)

        value = per_second(coordinator, move, 1000)
    return Reading(value, raw.pull_push_per_second(MLP_SIZES, 300))


def mlp_training() -> Reading:
    return Reading(_mlp_training(2), _local_gradients())


def mlp_rounds(workers: int) -> Reading:
    import zstrat as zs

    return Reading(_mlp_training(workers, zs.Rounds()), _mlp_training(workers))


def mlp_windows() -> Reading:
    return Reading(_mlp_training(2, every=20), _local_gradients())


def _mlp_training(workers: int, in_rounds: Any = None, every: int = 0) -> float:
    """Returns the steps per second; with ``every`` those of windows of so many."""
    import optax

    import zstrat as zs

    with cluster(1, workers) as (strategy, coordinator):
        with strategy.scope():
            weights = [zs.Variable(array) for array in _mlp_parameters()]
            if every:
                outer = optax.sgd(0.7, momentum=0.9, nesterov=True)
                optimizer: Any = zs.LocalOptimizer(optax.adam(1e-3), outer, every=every)
            else:
                optimizer = zs.Optimizer(optax.adam(1e-3), rounds=in_rounds)

        def dataset() -> Iterator[Any]:
            batch = _batch()
            while True:
                yield batch

        @zs.function
        def step(iterator: Any) -> Any:
            x, y = next(iterator)
            loss, grads = zs.value_and_grad(_mlp_loss)(weights, x, y)
            optimizer.apply_gradients(grads, weights)
            return loss

        iterator = iter(coordinator.create_per_worker_dataset(dataset))
        if every:
            window = optimizer.window(step)
            return every * per_second(coordinator, window, 1000 // every, (iterator,))
        return per_second(coordinator, step, 1000, (iterator,))


def _local_gradients() -> float:
    """The same gradient in this process on all cores, without any communication."""
    import jax

    gradient = jax.jit(jax.value_and_grad(_mlp_loss))
    parameters = [jax.device_put(array) for array in _mlp_parameters()]
    x, y = _batch()
    return rate(1, lambda: jax.block_until_ready(gradient(parameters, x, y)), 300)


_FIRST_RESULT = """
import time
began = time.perf_counter()
import zstrat as zs
with zs.LocalCluster(num_ps=1, num_workers=2) as local:
    strategy = zs.ParameterServerStrategy(local.resolver)
    coordinator = zs.ClusterCoordinator(strategy)
    @zs.function
    def one():
        import jax.numpy as jnp
        return jnp.float32(1.0)
    assert coordinator.schedule(one).fetch() == 1.0
    print(time.perf_counter() - began)
    strategy.close()
"""


def first_result() -> Reading:
    value = float(_python("-c", _FIRST_RESULT).splitlines()[-1])
    began = time.perf_counter()
    _python("-c", "import jax.numpy as jnp; jnp.zeros(1) + 1")
    return Reading(value, time.perf_counter() - began)


def _python(*arguments: str) -> str:
    return subprocess.run(
        [sys.executable, *arguments], check=True, capture_output=True, text=True
    ).stdout


def _idle_memory(job: str) -> float:
    """MB of an idle daemon that a coordinator is connected to."""
    import zstrat as zs

    with zs.LocalCluster(num_ps=1, num_workers=1) as local:
        with zs.ParameterServerStrategy(local.resolver) as strategy:
            coordinator = zs.ClusterCoordinator(strategy)
            coordinator.schedule(_trivial()).fetch()
            return _part_of_memory(local.pid(f"{job}:0"))


def _part_of_memory(pid: int) -> float:
    """MB of what is in RAM, of pages of several processes an equal part: daemons of one
    cluster are forked from one process, and have what they do not write in common."""
    with open(f"/proc/{pid}/smaps_rollup") as rollup:
        (kilobytes,) = [line.split()[1] for line in rollup if line.startswith("Pss:")]
    return int(kilobytes) * 1024 / 1e6


def _resident(pid: int) -> float:
    with open(f"/proc/{pid}/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def _import_memory(statement: str) -> float:
    code = f"{statement}\nimport os\nprint(open('/proc/self/statm').read().split()[1])"
    pages = int(_python("-c", code).splitlines()[-1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


_JAX = "import zmq, uvloop, jax.numpy as j; j.zeros(1) + 1"


def idle_ps() -> Reading:
    return Reading(_idle_memory("ps"), _import_memory("import zmq, numpy, uvloop"))


def idle_worker() -> Reading:
    return Reading(_idle_memory("worker"), _import_memory(_JAX))


def pulling_worker() -> Reading:
    """Resident MB of a worker that has pulled and pushed 64 MB, new each time. Shared
    memory counts as far as the worker has touched it."""
    import zstrat as zs

    with zs.LocalCluster(num_ps=1, num_workers=1) as local:
        with zs.ParameterServerStrategy(local.resolver) as strategy:
            coordinator = zs.ClusterCoordinator(strategy)
            with strategy.scope():
                large = zs.Variable(np.zeros(16 * MiB, np.float32), name="large")

            @zs.function
            def move() -> Any:
                value = large.value()
                large.assign_add(value + 1)
                return value[0]

            for _ in range(5):
                coordinator.schedule(move).fetch()
            value = _resident(local.pid("worker:0"))
    return Reading(value, _import_memory(_JAX))


CASES = [
    Case(
        "trivial closures, scheduled to joined",
        "/s",
        25_000,
        "raw round trips through 2 echo servers, windowed",
        closures,
    ),
    Case(
        "closures that read a scalar from a ps",
        "/s",
        8_000,
        "raw round trips through one server, windowed",
        scalar_reads,
    ),
    Case(
        "schedule + fetch of one trivial closure, p50",
        "us",
        400,
        "raw round trip, p50",
        latency,
        lower=True,
    ),
    Case(
        "pull of 64 MB into a JAX array, TCP",
        "GB/s",
        0.9,
        "raw pyzmq, 1 MiB messages, window 8",
        partial(pull_64mb, "tcp"),
        of_limit=True,
    ),
    Case(
        "push (assign_add) of 64 MB, TCP",
        "GB/s",
        0.8,
        "raw pyzmq, 1 MiB messages, window 8",
        partial(push_64mb, "tcp"),
        of_limit=True,
    ),
    Case(
        "pull of 64 MB into a JAX array, shared memory",
        "GB/s",
        0.5,
        "one memcpy of the same bytes",
        partial(pull_64mb, "shm"),
        of_limit=True,
    ),
    Case(
        "pull of 100 variables of 1 MB, shared memory",
        "GB/s",
        0.8,
        "one variable of 64 MB",
        pull_100_variables,
        of_limit=True,
    ),
    Case(
        "push (assign_add) of 64 MB, shared memory",
        "GB/s",
        0.4,
        "one memcpy of the same bytes",
        partial(push_64mb, "shm"),
        of_limit=True,
    ),
    Case(
        "pull + push of the MLP's weights, 1 worker",
        "steps/s",
        600,
        "raw pyzmq, the same bytes",
        mlp_pull_push,
    ),
    Case(
        "MLP training, batch 256, Adam on the ps, 2 workers",
        "steps/s",
        280,
        "the gradient alone, one process, all cores",
        mlp_training,
    ),
    Case(
        "MLP training, batch 256, windows of 20 steps, 2 workers",
        "steps/s",
        0.9,
        "the gradient alone, one process, all cores",
        mlp_windows,
        of_limit=True,
    ),
    *[
        Case(
            f"MLP training, batch 256, Adam, rounds of {workers} workers",
            "steps/s",
            0.8,
            f"the same {workers} workers without rounds",
            partial(mlp_rounds, workers),
            of_limit=True,
        )
        for workers in (2, 4)
    ],
    Case(
        "start to first result, 2 workers + 1 ps",
        "s",
        2.5,
        "python that imports jax and adds once",
        first_result,
        lower=True,
    ),
    Case(
        "memory of an idle ps",
        "MB",
        60,
        "python with zmq, numpy, uvloop",
        idle_ps,
        lower=True,
    ),
    Case(
        "memory of an idle worker",
        "MB",
        250,
        "python with zmq, uvloop, jax, one addition",
        idle_worker,
        lower=True,
    ),
    Case(
        "memory of a worker that pulls and pushes 64 MB",
        "MB",
        500,
        "python with zmq, uvloop, jax, one addition",
        pulling_worker,
        lower=True,
    ),
    *many_variables.CASES,
    *rounds.CASES,
    *leases.CASES,
    *tables.CASES,
    *any_ids.CASES,
    *saving.CASES,
    *collectives.CASES,
    *mesh.CASES,
]
