"""What the parts of a cluster cost on this machine, in time of the processor.

Not in time on the clock: so it does not matter much what else the machine does. The
real program, parameter server and worker are measured as processes, over tcp; links and
endpoints by themselves, as many as a large cluster has; what grows with the number of
workers in the simulator (`tests/testing/simulation`), without sockets.
"""

from __future__ import annotations

import asyncio
import gc
import multiprocessing
import os
import sys
import threading
import time
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from .case import per_second
from .scale_model import Costs

LINKS: Final = 200
"""Connections that are measured together."""
BEAT: Final = 0.1
"""Seconds between their beats: shorter than real ones, so that there are many."""
AT_ONCE: Final = 4
"""Workers that keep a server and the program's loop busy: both do several things at a
time then, as where they are near their limit."""
ROUNDS: Final = 3
LARGE: Final = 4 * 2**20
"""Bytes of the variable that shows what a byte costs."""


def measured(count: int = 3000, workers: tuple[int, int] = (100, 1000)) -> Costs:
    """All of them. Takes a minute or two.

    Args:
        count: Steps of which a mean is made.
        workers: Sizes of the two simulated clusters that are compared.
    """
    empty = _stepped(1, AT_ONCE, 0, 4 * count)
    busy = _stepped(1, AT_ONCE, 1, count)
    large = _stepped(1, AT_ONCE, LARGE // 4, max(60, count // 20))
    # In turn, and the least: what else the machine does makes each one dearer.
    pairs = [[_stepped(n, 1, 1, count) for n in (1, 2)] for _ in range(ROUNDS)]
    one, two = [
        min(each, key=lambda spent: spent["worker:0"])
        for each in zip(*pairs, strict=True)
    ]
    beat, memory, files = _links()
    entry, entry_bytes = _ledger()
    call = max(0.0, two["worker:0"] - one["worker:0"])
    return Costs(
        step=busy["program"],
        packed=empty["program"],
        scan=scanned(*workers),
        submit=empty["user"],
        beat=beat,
        exchange=busy["ps:0"],
        byte=max(0.0, large["ps:0"] - busy["ps:0"]) / LARGE,
        own=max(0.0, one["worker:0"] - call),
        call=call,
        connection_bytes=memory,
        connection_files=files,
        entry=entry,
        entry_bytes=entry_bytes,
    )


def _stepped(servers: int, workers: int, numbers: int, count: int) -> dict[str, float]:
    """Seconds per step of the busiest thread of each process, and of the two threads of
    the program. A step adds to a variable of so many float32 on each server; 0: it does
    nothing."""
    import zstrat as zs

    with zs.LocalCluster(servers, workers, transport="tcp") as local:
        with zs.ParameterServerStrategy(local.resolver) as strategy:
            coordinator = zs.ClusterCoordinator(strategy)
            with strategy.scope():
                ones = np.ones(max(1, numbers), np.float32)
                variables = [zs.Variable(ones, name=f"v{n}") for n in range(servers)]

            @zs.function
            def step() -> Any:
                if not numbers:
                    return ones[0]
                for variable in variables:
                    variable.assign_add(variable.value() * np.float32(1e-6))
                return None

            per_second(coordinator, step, count // 5)  # compiled, and warm
            threads = _threads(local, f"zstrat {strategy.session.session:x}")
            before = {task: _spent(task) for each in threads.values() for task in each}
            for _ in range(count):
                coordinator.schedule(step)
            coordinator.join()
            return {
                name: max(_spent(task) - before[task] for task in each) / count
                for name, each in threads.items()
            }


def _threads(local: Any, portal: str) -> dict[str, list[Path]]:
    """Those of each daemon, and the two of this process that matter."""
    found = {
        name: list(Path(f"/proc/{local.pid(name)}/task").iterdir())
        for name in local.tasks
    }
    here = Path("/proc/self/task")
    (loop,) = [t for t in threading.enumerate() if t.name == portal]
    found["user"] = [here / str(threading.get_native_id())]
    found["program"] = [here / str(loop.native_id)]
    return found


def _spent(task: Path) -> float:
    """Seconds of the processor that a thread has had."""
    try:
        return int((task / "schedstat").read_text("ascii").split()[0]) * 1e-9
    except FileNotFoundError:  # it has ended
        return 0.0


def _links(count: int = LINKS, seconds: float = 4.0) -> tuple[float, float, float]:
    """Seconds per beat, bytes and descriptors of a connection, on the side that
    connects: of many, to one endpoint in another process."""
    spawning = multiprocessing.get_context("spawn")
    ours, theirs = spawning.Pipe()
    other = spawning.Process(target=_serve, args=(theirs,), daemon=True)
    other.start()
    try:
        return asyncio.run(_connected(ours.recv(), count, seconds))
    finally:
        ours.send(None)
        other.join()


def _serve(pipe: Any) -> None:
    from zstrat.transport import Endpoint, hello, new_incarnation
    from zstrat.wire import Done

    async def serve() -> None:
        me = hello("ps", 0, new_incarnation())
        endpoint = Endpoint(me, lambda remote, message: Done(), settings=_settings())
        pipe.send(await endpoint.bind("127.0.0.1:0"))
        await asyncio.to_thread(pipe.recv)
        await endpoint.close()

    asyncio.run(serve())


def _settings() -> Any:
    from zstrat.config import Settings, Timeouts

    return Settings(
        timeouts=replace(Timeouts(), beat=BEAT, liveness=30.0), transport="tcp"
    )


async def _connected(
    address: str, count: int, seconds: float
) -> tuple[float, float, float]:
    from zstrat.transport import Link, hello, new_incarnation

    loop = asyncio.get_running_loop()

    def link(index: int) -> Any:
        me = hello("worker", index, new_incarnation())
        return Link(address, me, name="/job:ps/task:0", settings=_settings())

    first = link(count)  # what all links share is not counted
    first.start()
    await first.wait_open(loop.time() + 60.0)
    gc.collect()
    memory, files = _resident(), len(os.listdir("/proc/self/fd"))
    links = [link(index) for index in range(count)]
    for each in links:
        each.start()
    for each in links:
        await each.wait_open(loop.time() + 60.0)
    memory, files = _resident() - memory, len(os.listdir("/proc/self/fd")) - files
    here = Path(f"/proc/self/task/{threading.get_native_id()}")
    began, since = _spent(here), loop.time()
    await asyncio.sleep(seconds)
    beats = count * (loop.time() - since) / BEAT
    spent = _spent(here) - began
    for each in [first, *links]:
        await each.close()
    return spent / beats, memory / count, files / count


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text("ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def _ledger(count: int = 200_000) -> tuple[float, float]:
    """Seconds and bytes of a push that is looked up, and noted."""
    from zstrat.ps import OptimizerEngine, Store

    store = Store(OptimizerEngine(lambda code: code), task="/job:ps/task:0", largest=1)
    ledger = store.ledger
    began = time.thread_time()
    for step in range(count):
        ledger.is_duplicate(step, 0)
        ledger.record(step, 0)
    seconds = (time.thread_time() - began) / count
    ledger.raise_to(count)
    tracemalloc.start()
    for step in range(count, count + count // 4):
        ledger.record(step, 0)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return seconds, held / (count // 4)


def scanned(few: int, many: int) -> float:
    """Seconds that each worker more adds to a step on the program's loop: to a turn, as
    each message comes alone there."""
    per_step = [
        (simulated(workers, 3 * workers) - simulated(workers, workers)) / (2 * workers)
        for workers in (few, many)
    ]
    return max(0.0, per_step[1] - per_step[0]) / (many - few)


def simulated(workers: int, steps: int) -> float:
    """Seconds of the program's loop in a simulated cluster that makes so many steps.

    Raises:
        AssertionError: It does not keep the contract.
    """
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "testing"))
    from simulation import Meter, Scenario, run_scenario

    scenario = Scenario(
        seed=1,
        workers=workers,
        servers=1,
        steps=steps,
        pace=0.0,
        by_rows=False,
        reads_ahead=False,
        prefetch=1,
        in_flight=2,
        capacity=5000,
        threaded=False,
        delay=5e-5,
        work=1e-3,
        chunk=2**20,
        restores=False,
        fails=frozenset(),
        faults=(),
        only_steps=True,
    )
    meter = Meter()
    verdict = run_scenario(scenario, meter=meter)
    assert verdict.failure is None, verdict.failure
    assert verdict.steps == steps, verdict
    return meter.seconds["chief0"]
