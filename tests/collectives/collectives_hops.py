"""All ranks of a call in one process: hops travel in any order a test wants."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from zstrat.collectives import ALGORITHMS, ScheduleProgress, parts, reduction_of

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Sequence

    from zstrat.collectives import Schedule


def made_by(call: str, algorithm: str) -> Callable[..., Schedule]:
    """What makes the schedule of a rank, from rank and size, and the root if there is
    one."""
    return ALGORITHMS[call][algorithm].make


def all_made_by(call: str) -> list[Callable[..., Schedule]]:
    """The same of all algorithms of a call."""
    return [each.make for each in ALGORITHMS[call].values()]


def all_reduce_calls(
    schedule: Callable[..., Schedule],
    sources: Sequence[np.ndarray],
    results: Sequence[np.ndarray],
    op: str = "SUM",
    codecs: Sequence = (),
    **options: int,
) -> list[ScheduleProgress]:
    """The calls of all ranks, of which each gives one array and gets one."""
    size = len(sources)
    made = [schedule(rank, size) for rank in range(size)]
    blocks = len(made[0].blocks)
    return [
        ScheduleProgress(
            made[rank],
            parts(sources[rank], blocks),
            parts(results[rank], blocks),
            reduction=reduction_of(op, sources[0].dtype, size),
            codec=codecs[rank] if codecs else None,
            **options,
        )
        for rank in range(size)
    ]


def deliver(
    calls: Sequence[ScheduleProgress],
    order: random.Random | None = None,
    done: Callable[[int], None] = lambda rank: None,
) -> int:
    """Starts all ranks and carries their hops until nothing moves; how many they were.

    Per pair of ranks hops arrive in order, as on a connection; which pair is next is
    drawn from ``order``. A hop is read when it arrives: nobody may have changed its
    memory while it was on its way. ``done`` is told which rank is through, and may
    change the memory that the rank gave.
    """
    through: set[int] = set()
    lines: dict[tuple[int, int], deque] = {}
    starts = {rank: call.start() for rank, call in enumerate(calls)}
    hops = 0

    def post(sender: int, sends) -> None:
        for send in sends:
            assert send.data.dtype == np.uint8
            assert send.data.ndim == 1
            line = lines.setdefault((sender, send.peer), deque())
            line.append((send.place, send.data, send.data.tobytes()))

    def look(rank: int) -> None:
        if calls[rank].is_done and rank not in through:
            through.add(rank)
            done(rank)

    while starts or any(lines.values()):
        ready = [*starts, *(pair for pair, line in lines.items() if line)]
        chosen = order.choice(ready) if order else ready[0]
        if isinstance(chosen, int):
            send = next(starts[chosen], None)
            if send is None:
                del starts[chosen]
                look(chosen)
            else:
                post(chosen, [send])
            continue
        place, data, was = lines[chosen].popleft()
        assert data.tobytes() == was, "live memory was changed under way"
        received = np.frombuffer(was, np.uint8)  # read-only, as frames are
        hops += 1
        post(chosen[1], calls[chosen[1]].arrived(place, received))
        look(chosen[1])
    assert through == set(range(len(calls)))
    assert not any(call.waits for call in calls)
    return hops
