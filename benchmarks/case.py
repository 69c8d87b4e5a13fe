"""What a case is, and what most of them do: steps per second of a local cluster."""

from __future__ import annotations

import contextlib
import statistics
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@dataclass(frozen=True)
class Reading:
    value: float
    limit: float
    others: dict[str, float] = field(default_factory=dict)
    """What else reached what in this run; see `Case.others`."""


@dataclass(frozen=True)
class Case:
    name: str
    unit: str
    reach: float
    """The target: at least this, at most if ``lower``; of the limit if ``of_limit``."""
    limit: str
    """What the limit is, in words."""
    measure: Callable[[], Reading]
    lower: bool = False
    of_limit: bool = False
    others: dict[str, float] = field(default_factory=dict)
    """What to compare with besides, in words, and how many times as much is to be
    reached (0: any). What is not installed where the case runs does not count."""

    @property
    def target(self) -> str:
        sign = "<=" if self.lower else ">="
        if self.of_limit:
            return f"{sign} {self.reach:g} of the limit"
        return f"{sign} {self.reach:,g} {self.unit}"

    def is_reached(self, value: float, ratio: float, others: dict[str, float]) -> bool:
        got = ratio if self.of_limit else value
        enough = got <= self.reach if self.lower else got >= self.reach
        return enough and all(
            value >= times * others[name]
            for name, times in self.others.items()
            if name in others
        )


@contextlib.contextmanager
def cluster(
    num_ps: int,
    num_workers: int,
    transport: str | None = None,
    partitioner: Any = None,
    staleness: int | None = None,
) -> Iterator[tuple[Any, Any]]:
    """A local cluster on its default transport, with its strategy and coordinator."""
    import zstrat as zs

    with zs.LocalCluster(num_ps, num_workers, transport=transport) as local:
        strategy = zs.ParameterServerStrategy(
            local.resolver, variable_partitioner=partitioner, staleness=staleness
        )
        with strategy:
            yield strategy, zs.ClusterCoordinator(strategy)


def per_second(
    coordinator: Any, function: Any, count: int, args: tuple[Any, ...] = ()
) -> float:
    """Closures per second, after a fifth as many that warm everything up."""
    for _ in range(count // 5):
        coordinator.schedule(function, args=args)
    coordinator.join()
    began = time.perf_counter()
    for _ in range(count):
        coordinator.schedule(function, args=args)
    coordinator.join()
    return count / (time.perf_counter() - began)


def rate(amount: float, once: Callable[[], None], repeats: int) -> float:
    """Amount over the median duration, after a warm-up."""
    for _ in range(3):
        once()
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        once()
        times.append(time.perf_counter() - began)
    return amount / statistics.median(times)
