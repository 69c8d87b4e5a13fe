"""``python -m benchmarks.slow_links``: what local steps save where links are slow.

A relay stands before the parameter server, and limits and counts what goes through it.
Steps that stand for those of other machines do not compute but sleep.
"""

from __future__ import annotations

import runpy
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .scale_model import Exchange

EXAMPLE = Path(__file__).parent.parent / "examples" / "diloco.py"
WORKERS = 2
SIZE = 128
"""Rows and columns of each of `LEAVES` variables, 256 KiB in all."""
LEAVES = 4
ROUND_TRIP = 0.05


class Checked(NamedTuple):
    """A measured share of the time that workers compute, and what it was measured
    with: see `scale_model.utilization`."""

    megabits: float
    round_trip: float
    compute: float
    nbytes: float
    how: Exchange
    measured: float


POINTS = (
    (20.0, Exchange(20)),
    (20.0, Exchange(80, 4, 18)),
    (100.0, Exchange(20)),
)
"""Megabits per second of the link of each worker."""


def checked_points(step: float = 0.02) -> list[Checked]:
    """Measures some points of the formula, with steps of so many seconds."""
    found = []
    for megabits, how in POINTS:
        with Run(megabits * WORKERS, ROUND_TRIP) as run:
            alone = run.alone(200, step, 20)
            made = run.train(3 * how.every, step, **asdict(how))
            share = alone / made["seconds"]
            nbytes = 4.0 * LEAVES * SIZE**2
            found.append(Checked(megabits, ROUND_TRIP, alone, nbytes, how, share))
    return found


def _slept(value: Any, seconds: float) -> Any:
    """Returns the value of a trace when the program has slept."""
    import jax

    def sleep(value: Any) -> Any:
        time.sleep(seconds)
        return value

    return jax.pure_callback(sleep, value, value, vmap_method="sequential")


class Run:
    """A cluster behind a relay; a context manager.

    Args:
        megabits: Per second, each way.
        round_trip: Seconds.
    """

    def __init__(self, megabits: float = 1e5, round_trip: float = 0.0) -> None:
        import zstrat as zs

        self._cluster = zs.LocalCluster(1, WORKERS, transport="tcp")
        jobs = self._cluster.spec.as_dict()
        sys.path.insert(0, str(EXAMPLE.parent))  # for what it imports
        slow_link = runpy.run_path(str(EXAMPLE), run_name="diloco")["SlowLink"]
        self.link = slow_link(jobs["ps"][0], megabits * 1e6, round_trip)
        spec = zs.ClusterSpec({**jobs, "ps": [self.link.address]})
        self.strategy = zs.ParameterServerStrategy(
            zs.cluster_resolver.SimpleClusterResolver(spec)
        )
        self.coordinator = zs.ClusterCoordinator(self.strategy)

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        self.strategy.close()
        self._cluster.close()

    def alone(self, steps: int, seconds: float, each: int) -> float:
        """Returns the seconds per step of workers that read and update nothing, with
        ``each`` steps in a closure."""
        import jax

        import zstrat as zs

        @zs.function
        def function(x: Any) -> Any:
            return jax.lax.scan(lambda x, _: (_slept(x, seconds), x), x, None, each)

        # An argument, as what depends on nothing runs once.
        return self._timed(function, steps, each, (np.float32(0),))["seconds"]

    def train(
        self, steps: int, seconds: float = 0.0, slowness: float = 1.0, **options: Any
    ) -> dict[str, Any]:
        """Makes ``steps`` on each worker, each of which sleeps, on the first worker for
        ``slowness`` times as long; without ``every`` they are asynchronous.

        Returns:
            Per step of a worker: bytes, seconds, and the coordinator's seconds of CPU.
        """
        import optax

        import zstrat as zs

        rng = np.random.default_rng(0)
        shapes = [rng.normal(size=(SIZE, SIZE)).astype("f") for _ in range(LEAVES)]
        every = options.get("every", 0)
        place = zs.coordinator.experimental_get_current_worker_index
        with self.strategy.scope():
            params = zs.create_variables(shapes)
            if every:
                rounds = zs.Rounds(workers=WORKERS)
                outer = optax.sgd(0.7, momentum=0.9, nesterov=True)
                optimizer: Any = zs.LocalOptimizer(
                    optax.sgd(1e-3), outer, rounds=rounds, **options
                )
            else:
                optimizer = zs.Optimizer(optax.sgd(1e-3), **options)

        def step() -> Any:
            values = [x.value() for x in params]
            total = sum(x[0, 0] for x in values)
            if seconds:
                is_slow = place() == 0
                total = _slept(total, seconds * slowness if is_slow else seconds)
            optimizer.apply_gradients([x + 0.0 * total for x in values], params)
            return total

        function = optimizer.window(step) if every else zs.function(step)
        each = every // options.get("fragments", 1) if every else 1
        return self._timed(function, steps, each)

    def _timed(
        self, function: Any, steps: int, each: int, args: Any = ()
    ) -> dict[str, Any]:
        def run() -> None:
            for _ in range(WORKERS * steps // each):
                self.coordinator.schedule(function, args=args)
            self.coordinator.join()

        run()
        began, cpu, nbytes = time.perf_counter(), time.process_time(), self.link.nbytes
        run()
        return {
            "bytes": (self.link.nbytes - nbytes) / steps / WORKERS,
            "seconds": (time.perf_counter() - began) / steps,
            "cpu": (time.process_time() - cpu) / steps / WORKERS,
        }


def main() -> None:
    every = 20
    with Run() as run:
        plain = run.train(200)
        print(f"asynchronous: {plain['bytes']:,.0f} bytes per step")
        for name, wire in (("float32", None), ("int4", "int4")):
            made = run.train(20 * every, every=every, wire=wire)
            ratio = made["bytes"] * every / plain["bytes"]
            print(f"every {every}, {name}: {ratio:.3f} / {every} of the bytes")
            if wire is None:
                cpu = made["cpu"] * every / plain["cpu"]
                print(f"  coordinator's CPU per step: {cpu:.2f} / {every}")
    step, each = 0.02, 10
    with Run(round_trip=ROUND_TRIP) as run:
        alone = run.alone(400, step, each)
        for overlap in (0, each - 1):
            made = run.train(400, step, every=4 * each, fragments=4, overlap=overlap)
            print(
                f"{1e3 * ROUND_TRIP:.0f} ms, 4 fragments, overlap {overlap}: "
                f"{alone / made['seconds']:.3f} of the steps without exchange"
            )
    with Run() as run:
        plain = run.train(200, step, every=every)["seconds"]
        for adapt in (False, True):
            made = run.train(200, step, 5.0, every=every, adapt=adapt)
            print(
                f"a worker 5 times slower, adapt={adapt}: rounds take "
                f"{made['seconds'] / plain:.2f} of their time without it"
            )


if __name__ == "__main__":
    main()
