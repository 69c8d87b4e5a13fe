"""One rank of a calibration: ``python -m zstrat.launch._timing SIZES LANE``.

All ranks run every algorithm of every call that has several, on arrays of each of the
sizes (bytes, with commas between). Rank 0 prints a line of JSON for each: call,
algorithm, bytes, and how many seconds the slowest rank took, time after time.
"""

from __future__ import annotations

import json
import sys
import time
from functools import partial
from typing import TYPE_CHECKING, Final, assert_never

import numpy as np

from zstrat.collectives import ALGORITHMS, Group, Kind
from zstrat.config import MiB

if TYPE_CHECKING:
    from collections.abc import Callable

_WARM: Final = 2
"""Calls before the first that counts: lines open their windows, pages are touched."""

_FEW: Final = 4
_MANY: Final = 24
"""How often something large, or small, is measured."""


def main() -> None:
    sizes, lane = [int(size) for size in sys.argv[1].split(",")], sys.argv[2]
    with Group(name="calibration", lane=lane) as group:
        for kind in Kind:
            algorithms = ALGORITHMS[kind.value]
            if len(algorithms) == 1:
                continue
            for nbytes in sizes:
                for algorithm in algorithms:
                    seconds = timed(group, kind, algorithm, nbytes)
                    if group.rank == 0:
                        line = [kind.value, algorithm, nbytes, seconds]
                        print(json.dumps(line), flush=True)


def timed(group: Group, kind: Kind, algorithm: str, nbytes: int) -> list[float]:
    """Seconds from when all ranks are there until the last one has its result."""
    once = _operation(group, kind, algorithm, nbytes)
    for _ in range(_WARM):
        once()
    seconds = np.empty(min(max(8 * MiB // max(nbytes, 1), _FEW), _MANY))
    for at in range(seconds.size):
        group.barrier()
        began = time.perf_counter()
        once()
        seconds[at] = time.perf_counter() - began
    slowest: list[float] = group.all_reduce(seconds, "max").tolist()
    return slowest


def _operation(
    group: Group, kind: Kind, algorithm: str, nbytes: int
) -> Callable[[], object]:
    """The call on an array of so many bytes in all, as a table counts them."""
    count = max(nbytes // 4, 1)
    whole = np.ones(count, np.float32)
    match kind:
        case Kind.ALL_REDUCE:
            return partial(group.all_reduce, whole, algorithm=algorithm)
        case Kind.REDUCE_SCATTER:
            return partial(group.reduce_scatter, whole, algorithm=algorithm)
        case Kind.BROADCAST:
            return partial(group.broadcast, whole, algorithm=algorithm)
        case Kind.ALL_GATHER:
            mine = whole[: -(-count // group.size)]
            return partial(group.all_gather, mine, algorithm=algorithm)
        case Kind.ALL_TO_ALL | Kind.BARRIER:
            raise ValueError(f"{kind.value} has one algorithm: nothing to compare")
        case _:
            assert_never(kind)


if __name__ == "__main__":
    main()
