"""How long the algorithms of collectives take in one group: what a rank of it does.

``python -m zstrat.launch._timing SIZES TRANSPORT`` is one rank. SIZES are bytes, with
commas between. Rank 0 prints a line of JSON for each algorithm and size: a list of
the fields of a `Measurement` for every time.
"""

from __future__ import annotations

import json
import sys
import time
from functools import partial
from typing import TYPE_CHECKING, Final, assert_never

import numpy as np

from zstrat.collectives import ALGORITHMS, CallKind, Group, Measurement
from zstrat.config import MiB

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


_WARM: Final = 2
"""Calls before the first that counts: lines open their windows, pages are touched."""

_FEW: Final = 4
_MANY: Final = 24
"""How often something large, or small, is measured."""


def timings(group: Group, sizes: Sequence[int]) -> Iterator[list[Measurement]]:
    """Every algorithm of every call that has several, on arrays of each of the sizes
    (bytes); each time after time. All ranks draw them, and get the same.

    Raises:
        ZstratError: A rank is lost; see `Group.all_reduce`.
    """
    for kind in CallKind:
        algorithms = ALGORITHMS[kind.value]
        if len(algorithms) == 1:
            continue
        for nbytes in sizes:
            for name in algorithms:
                what = (kind.value, name, group.size, nbytes, group.hosts == 1)
                seconds = timed(group, kind, name, nbytes)
                yield [Measurement(*what, each) for each in seconds]


def timed(group: Group, kind: CallKind, algorithm: str, nbytes: int) -> list[float]:
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
    group: Group, kind: CallKind, algorithm: str, nbytes: int
) -> Callable[[], object]:
    """The call on an array of so many bytes in all, as a table counts them."""
    count = max(nbytes // 4, 1)
    whole = np.ones(count, np.float32)
    match kind:
        case CallKind.ALL_REDUCE:
            return partial(group.all_reduce, whole, algorithm=algorithm)
        case CallKind.REDUCE_SCATTER:
            return partial(group.reduce_scatter, whole, algorithm=algorithm)
        case CallKind.BROADCAST:
            return partial(group.broadcast, whole, algorithm=algorithm)
        case CallKind.ALL_GATHER:
            mine = whole[: -(-count // group.size)]
            return partial(group.all_gather, mine, algorithm=algorithm)
        case CallKind.ALL_TO_ALL | CallKind.BARRIER:
            raise ValueError(f"{kind.value} has one algorithm: nothing to compare")
        case _:
            assert_never(kind)


def main() -> None:
    sizes, transport = [int(size) for size in sys.argv[1].split(",")], sys.argv[2]
    with Group(name="calibration", transport=transport) as group:
        for found in timings(group, sizes):
            if group.rank == 0:
                print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
