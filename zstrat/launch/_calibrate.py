"""Measures the algorithms of collective calls (such as all-reduce), on processes of
this machine or on the tasks of a cluster.

All calls go by messages: in shared memory there is only one algorithm. Measurements on
one host apply to groups on one host without shared memory, those on several hosts to
the traffic between hosts; each measurement says which. Every algorithm is selected by
name, so that the choice of the group does not matter.

``python -m zstrat.launch._calibrate SIZES TRANSPORT`` is one rank of a measurement on
this machine. SIZES are bytes, separated by commas. Rank 0 prints a line of JSON for
each algorithm and size: a list of the fields of a `Measurement` for every repetition.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np

from zstrat.collectives import ALGORITHMS, CallKind, Group, Measurement
from zstrat.config import MiB
from zstrat.errors import UnavailableError

from ._copies import Copies, run_copies

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from zstrat.cluster import ClusterResolver
    from zstrat.config import Settings

KiB: Final = 1024

SIZES: Final = (4 * KiB, 32 * KiB, 256 * KiB, MiB, 4 * MiB, 16 * MiB)
"""Sizes of measured arrays in bytes: from sizes at which only the number of hops
matters to sizes at which only the bandwidth does."""

_LONGEST: Final = 3600.0
"""Seconds that ranks outside a group wait while that group is measured. A lost rank is
reported at once, so that this only bounds the duration of a measurement."""

_TAIL: Final = 20
"""Lines of output that an error quotes."""


_WARM: Final = 2
"""Number of calls before the first measured one, to open TCP windows and touch memory
pages."""

_FEW: Final = 4
_MANY: Final = 24
"""Number of repetitions for large arrays, and for small ones."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """The groups and arrays to measure: groups of 2, 4, 8, ... and of ``ranks``
    processes, arrays of ``sizes`` bytes, over "ipc" or "tcp" ``sockets``.

    Raises:
        ValueError: There are fewer than 2 ranks, or no size, or a size is below 1.
    """

    ranks: int = 4
    sizes: tuple[int, ...] = SIZES
    sockets: str = "tcp"

    def __post_init__(self) -> None:
        if self.ranks < 2:
            raise ValueError(f"ranks={self.ranks}: expected 2 or more")
        if not self.sizes or min(self.sizes) < 1:
            raise ValueError(f"sizes={self.sizes}: expected sizes of 1 byte or more")

    @property
    def groups(self) -> list[int]:
        """The numbers of ranks of the measured groups, ascending."""
        # Between two of them the choice changes at their geometric mean (`fitted`).
        doubled = [2**n for n in range(1, self.ranks.bit_length())]
        return sorted({*doubled, self.ranks})


async def calibrate(
    plan: Calibration, begins: Callable[[int], None] = lambda ranks: None
) -> list[Measurement]:
    """Measures the collective algorithms in groups of processes of this machine, group
    by group; ``begins`` is called with the number of ranks of the next group.

    Cancellation: ends all processes.

    Raises:
        UnavailableError: A process failed; quotes its output.
        OSError: A process cannot be started.
    """
    measurements: list[Measurement] = []
    for ranks in plan.groups:
        begins(ranks)
        measurements += await _measure(plan, ranks)
    return measurements


def calibrate_tasks(
    whole: Group,
    plan: Calibration,
    resolver: ClusterResolver,
    settings: Settings,
    begins: Callable[[int], None] = lambda ranks: None,
) -> list[Measurement]:
    """Measures the collective algorithms on the tasks of a cluster, in groups of its
    first 2, 4, 8, ... tasks; blocks.

    Args:
        whole: A group of all tasks. All of them call this, with the same plan.
        resolver: The resolver of ``whole``.
        settings: The settings of ``whole``.
        begins: Called with the number of ranks of the next group.

    Returns:
        The measurements in which this rank took part; rank 0 takes part in all.

    Raises:
        ValueError: The plan has more ranks than the cluster.
        ZstratError: A rank is lost or does not answer; see `Group`.
    """
    if plan.ranks > whole.size:
        raise ValueError(f"ranks={plan.ranks}: the cluster has only {whole.size}")
    measurements: list[Measurement] = []
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
                    measurements += timing
        # Ranks that do not measure wait here: idle, so that they disturb nobody, and
        # until the next group begins on all.
        whole.barrier(timeout=_LONGEST)
    return measurements


async def _measure(plan: Calibration, ranks: int) -> list[Measurement]:
    sizes = ",".join(map(str, sorted(plan.sizes)))
    module = "zstrat.launch._calibrate"
    # As new processes: ranks in threads of one would share its interpreter lock.
    command = (sys.executable, "-P", "-m", module, sizes, plan.sockets)
    printed: list[str] = []
    code = await run_copies(Copies(command, ranks, plan.sockets), printed.append)
    if code:
        tail = "\n".join(printed[-_TAIL:])
        raise UnavailableError(
            f"the calibration with {ranks} ranks ended with exit code {code}:\n{tail}"
        )
    return [measurement for line in printed for measurement in _parse(line)]


def _parse(line: str) -> list[Measurement]:
    """Parses a line of output of rank 0; returns [] for a line without measurements."""
    name, _, text = line.partition(" | ")
    if name != "worker:0" or not text.startswith("["):
        return []
    return [Measurement(*fields) for fields in json.loads(text)]


def timings(group: Group, sizes: Sequence[int]) -> Iterator[list[Measurement]]:
    """Measures every algorithm of every collective call that has several, on arrays of
    each size in bytes. All ranks iterate over this together, and get the same results.

    Raises:
        ZstratError: A rank is lost; see `Group.all_reduce`.
    """
    for kind in CallKind:
        # One algorithm: nothing to compare.
        algorithms = ALGORITHMS[kind.value]
        if len(algorithms) == 1:
            continue
        for nbytes in sizes:
            for name in algorithms:
                case = (kind.value, name, group.size, nbytes, group.hosts == 1)
                times = measure_call(group, kind, name, nbytes)
                yield [Measurement(*case, seconds) for seconds in times]


def measure_call(
    group: Group, kind: CallKind, algorithm: str, nbytes: int
) -> list[float]:
    """Measures one collective call several times: the seconds from the arrival of all
    ranks until the last one has its result."""
    call = _call(group, kind, algorithm, nbytes)
    for _ in range(_WARM):
        call()
    # About 8 MiB in all: times of small arrays vary more, large ones take long.
    seconds = np.empty(min(max(8 * MiB // max(nbytes, 1), _FEW), _MANY))
    for index in range(seconds.size):
        # So that nobody measures how long others are away.
        group.barrier()
        began = time.perf_counter()
        call()
        seconds[index] = time.perf_counter() - began
    # The slowest rank counts: a call is over when all have its result.
    slowest: list[float] = group.all_reduce(seconds, "max").tolist()
    return slowest


def _call(
    group: Group, kind: CallKind, algorithm: str, nbytes: int
) -> Callable[[], object]:
    """Binds the arguments of a collective call to an array of ``nbytes`` bytes; the
    result takes no argument. For an all-gather the array is the result, of which each
    rank has a part."""
    array = np.ones(max(nbytes // 4, 1), np.float32)
    if kind is CallKind.ALL_GATHER:
        # Rounded up: at least one element, also on more ranks than elements.
        array = array[: -(-array.size // group.size)]
    # Those with several algorithms.
    calls: dict[CallKind, Callable[..., object]] = {
        CallKind.ALL_REDUCE: group.all_reduce,
        CallKind.REDUCE_SCATTER: group.reduce_scatter,
        CallKind.BROADCAST: group.broadcast,
        CallKind.ALL_GATHER: group.all_gather,
    }
    return partial(calls[kind], array, algorithm=algorithm)


def main() -> None:
    sizes, transport = [int(size) for size in sys.argv[1].split(",")], sys.argv[2]
    with Group(name="calibration", transport=transport) as group:
        for measurements in timings(group, sizes):
            if group.rank == 0:
                print(json.dumps(measurements), flush=True)


if __name__ == "__main__":
    main()
