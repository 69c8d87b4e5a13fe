"""Models of many small variables: Adam on 32 x 32 each, one ps and one worker.

Beside plain jax, which has the whole step as one program. ``python -m
benchmarks.many_variables 100 300`` prints what each process spends, in time of the
processor: at the first step, and per variable and step from then on.
"""

from __future__ import annotations

import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from benchmarks.case import Case, Reading

if TYPE_CHECKING:
    from collections.abc import Callable

SIDE: Final = 32
BATCH: Final = 8
STEPS: Final = 6000
"""Variables that are moved in the measured steps, taken together."""


class Spent(NamedTuple):
    """``first``, ``step``: seconds; ``cpu``: for each process the same two in time of
    the processor."""

    first: float
    step: float
    cpu: dict[str, tuple[float, float]]


def _values(count: int) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [
        rng.standard_normal((SIDE, SIDE)).astype(np.float32) / SIDE**0.5
        for _ in range(count)
    ]


def _loss(weights: list[Any], x: Any) -> Any:
    import jax.numpy as jnp

    for weight in weights:
        x = jnp.tanh(x @ weight)
    return jnp.sum(x * x)


def _timed(
    once: Callable[[], object],
    several: Callable[[int], object],
    steps: int,
    cpu: Callable[[], dict[str, float]],
) -> Spent:
    """Measures the first step, and then some more, after a few that count for
    nothing."""
    before, began = cpu(), time.perf_counter()
    once()
    first, after = time.perf_counter() - began, cpu()
    several(max(2, steps // 5))
    start, began = cpu(), time.perf_counter()
    several(steps)
    step, end = (time.perf_counter() - began) / steps, cpu()
    return Spent(
        first,
        step,
        {
            name: (after[name] - before[name], (end[name] - start[name]) / steps)
            for name in before
        },
    )


def trained(count: int) -> Spent:
    """Steps of zstrat."""
    import optax

    import zstrat as zs

    with (
        zs.LocalCluster(1, 1) as local,
        zs.ParameterServerStrategy(local.resolver) as strategy,
    ):
        coordinator = zs.ClusterCoordinator(strategy)
        with strategy.scope():
            weights = [zs.Variable(array) for array in _values(count)]
            optimizer = zs.Optimizer(optax.adam(1e-3))
        x = np.ones((BATCH, SIDE), np.float32)

        @zs.function
        def step() -> Any:
            loss, gradients = zs.value_and_grad(_loss)(weights, x)
            optimizer.apply_gradients(gradients, weights)
            return loss

        def several(steps: int) -> None:
            for _ in range(steps):
                coordinator.schedule(step)
            coordinator.join()

        pids = {"program": "self"} | {task: local.pid(task) for task in local.tasks}
        return _timed(
            lambda: coordinator.schedule(step).fetch(),
            several,
            max(10, STEPS // count),
            lambda: {name: _processor(pid) for name, pid in pids.items()},
        )


def plain(count: int) -> Spent:
    """Steps of jax and optax in this process."""
    import jax
    import optax

    x = np.ones((BATCH, SIDE), np.float32)
    optimizer = optax.adam(1e-3)
    weights = [jax.device_put(array) for array in _values(count)]

    def move(weights: Any, state: Any) -> Any:
        loss, gradients = jax.value_and_grad(_loss)(weights, x)
        updates, state = optimizer.update(gradients, state, weights)
        return loss, optax.apply_updates(weights, updates), state

    step = jax.jit(move, donate_argnums=(0, 1))
    now: Any = None

    def several(steps: int) -> None:
        nonlocal now
        for _ in range(steps):
            _, *now = step(*now)
        jax.block_until_ready(now)

    def once() -> None:
        nonlocal now
        now = weights, optimizer.init(weights)
        several(1)

    return _timed(
        once, several, max(10, STEPS // count), lambda: {"jax": _processor("self")}
    )


def _processor(pid: object) -> float:
    """Seconds of the processor that all threads of a process have had."""
    spent = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            spent += int((task / "schedstat").read_text("ascii").split()[0])
        except FileNotFoundError:  # it has ended
            continue
    return spent * 1e-9


def steps_of(count: int) -> Reading:
    """Microseconds of a step for each variable."""
    ours, theirs = trained(count), plain(count)
    per_variable = 1e6 / count
    return Reading(ours.step * per_variable, theirs.step * per_variable)


def first_of(count: int) -> Reading:
    """Seconds of the first step."""
    return Reading(trained(count).first, plain(count).first)


CASES = [
    Case(
        "a step of 100 variables of 32 x 32, Adam, each",
        "us",
        2.0,
        "plain jax and optax, the whole step as one program",
        partial(steps_of, 100),
        lower=True,
        of_limit=True,
    ),
    Case(
        "a step of 300 variables of 32 x 32, Adam, each",
        "us",
        1.5,
        "plain jax and optax, the whole step as one program",
        partial(steps_of, 300),
        lower=True,
        of_limit=True,
    ),
    Case(
        "the first step of 100 variables of 32 x 32, Adam",
        "s",
        1.3,
        "plain jax and optax, the whole step as one program",
        partial(first_of, 100),
        lower=True,
        of_limit=True,
    ),
]


def _main(counts: list[int]) -> None:
    for count in counts:
        for who, spent in (("zstrat", trained(count)), ("jax", plain(count))):
            print(
                f"{count} variables, {who}: first step {spent.first:.2f} s, then "
                f"{1e6 * spent.step / count:.1f} us per variable and step"
            )
            for name, (first, step) in spent.cpu.items():
                print(
                    f"  CPU per variable, {name:9s} first {1e3 * first / count:6.2f} "
                    f"ms, step {1e6 * step / count:6.1f} us",
                    flush=True,
                )


if __name__ == "__main__":
    _main([int(count) for count in sys.argv[1:]] or [100, 300])
