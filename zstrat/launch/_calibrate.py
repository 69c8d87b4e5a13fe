"""Measures the algorithms of collectives, among processes of this machine or among the
tasks of a cluster.

All calls go by messages: where memory is shared there is nothing to choose. What is
measured on one host holds for groups of one host that share none, what is measured on
several ones for what goes between hosts; each measurement says which. Every algorithm
is run by its name, so what the group would choose by itself does not matter.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from zstrat.collectives import Group, Measurement
from zstrat.config import MiB
from zstrat.errors import UnavailableError

from ._copies import Copies, run_copies
from ._timing import timings

if TYPE_CHECKING:
    from collections.abc import Callable

    from zstrat.cluster import ClusterResolver
    from zstrat.config import Settings

KiB: Final = 1024

SIZES: Final = (4 * KiB, 32 * KiB, 256 * KiB, MiB, 4 * MiB, 16 * MiB)
"""Bytes: from where only the number of hops counts to where only bytes do."""

_LONGEST: Final = 3600.0
"""Seconds that ranks may wait for others that measure without them. Whoever is lost
meanwhile is named at once, so this bounds nothing but the size of what is measured."""

_TAIL: Final = 20
"""Lines of output that an error quotes."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """What to measure: groups of 2, 4, 8, ... and of ``ranks`` processes, arrays of
    ``sizes`` bytes, over sockets of a kind ("ipc" or "tcp").

    Raises:
        ValueError: Fewer than 2 ranks, or no size, or one below 1.
    """

    ranks: int = 4
    sizes: tuple[int, ...] = SIZES
    sockets: str = "tcp"

    def __post_init__(self) -> None:
        if self.ranks < 2:
            raise ValueError(f"ranks={self.ranks}: expected 2 or more")
        if not self.sizes or min(self.sizes) < 1:
            raise ValueError(f"sizes={self.sizes}: expected bytes, each 1 or more")

    @property
    def groups(self) -> list[int]:
        """Numbers of ranks, ascending."""
        doubled = [2**n for n in range(1, self.ranks.bit_length())]
        return sorted({*doubled, self.ranks})


async def calibrate(
    plan: Calibration, begins: Callable[[int], None] = lambda ranks: None
) -> list[Measurement]:
    """Carries a plan out among processes of this machine, group by group; ``begins``
    hears how many ranks are next.

    Cancellation: ends all processes.

    Raises:
        UnavailableError: A process failed; says what it printed.
        OSError: They cannot be started.
    """
    found: list[Measurement] = []
    for ranks in plan.groups:
        begins(ranks)
        found += await _measured(plan, ranks)
    return found


def calibrate_tasks(
    whole: Group,
    plan: Calibration,
    resolver: ClusterResolver,
    settings: Settings,
    begins: Callable[[int], None] = lambda ranks: None,
) -> list[Measurement]:
    """Carries a plan out among the tasks of a cluster, the first of which measure
    first; blocks.

    Args:
        whole: A group of all tasks. All of them call this, with the same plan.
        resolver: What ``whole`` was made with.
        settings: Likewise.
        begins: Hears how many ranks are next.

    Returns:
        What this rank has taken part in: for rank 0 that is all.

    Raises:
        ValueError: The plan wants more ranks than there are.
        ZstratError: A rank was lost, or does not answer; see `Group`.
    """
    if plan.ranks > whole.size:
        raise ValueError(f"{plan.ranks} ranks: the cluster has {whole.size}")
    found: list[Measurement] = []
    for ranks in plan.groups:
        begins(ranks)
        if whole.rank < ranks:
            with Group(
                resolver,
                name=f"{whole.name} of {ranks}",
                tasks=whole.members[:ranks],
                transport=plan.sockets,
                settings=settings,
            ) as group:
                for timing in timings(group, sorted(plan.sizes)):
                    found += timing
        whole.barrier(timeout=_LONGEST)
    return found


async def _measured(plan: Calibration, ranks: int) -> list[Measurement]:
    sizes = ",".join(map(str, sorted(plan.sizes)))
    module = "zstrat.launch._timing"
    command = (sys.executable, "-P", "-m", module, sizes, plan.sockets)
    printed: list[str] = []
    code = await run_copies(Copies(command, ranks, plan.sockets), printed.append)
    if code:
        tail = "\n".join(printed[-_TAIL:])
        raise UnavailableError(
            f"the calibration with {ranks} ranks ended with exit code {code}:\n{tail}"
        )
    return [each for line in printed for each in _read(line)]


def _read(line: str) -> list[Measurement]:
    """What a line of rank 0 says; lines of others are no measurements."""
    name, _, text = line.partition(" | ")
    if name != "worker:0" or not text.startswith("["):
        return []
    return [Measurement(*each) for each in json.loads(text)]
