"""All ranks of a call in one process: hops travel in any order a test wants."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from zstrat.collectives import ALGORITHMS, Act

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Sequence

    from zstrat.collectives import Schedule, ScheduleProgress


def made_by(call: str, algorithm: str) -> Callable[..., Schedule]:
    """What makes the schedule of a rank, from rank and size, and the root if there is
    one."""
    return ALGORITHMS[call][algorithm].make


def all_made_by(call: str) -> list[Callable[..., Schedule]]:
    """The same of all algorithms of a call."""
    return [each.make for each in ALGORITHMS[call].values()]


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


def contributions(schedules: Sequence[Schedule]) -> list[list[frozenset[int] | None]]:
    """Carries schedules out on sets of contributors, and checks their laws.

    Of each block is known in which order it was reduced, too: as pairs of pairs.
    Per rank and block: whose contributions it holds in the end (None: it did nothing).
    """
    size, blocks = len(schedules), len(schedules[0].blocks)
    have: list[list] = [[frozenset([r])] * blocks for r in range(size)]
    sums: list[list] = [[r] * blocks for r in range(size)]
    at = [[0] * blocks for _ in range(size)]
    finished: list[list] = [[None] * blocks for _ in range(size)]
    sent: dict[tuple[int, int], tuple] = {}
    received: set[tuple[int, int]] = set()
    places: set[tuple[int, int]] = set()
    moves = True
    while moves:
        moves = False
        for rank, schedule in enumerate(schedules):
            for b, actions in enumerate(schedule.blocks):
                while at[rank][b] < len(actions):
                    act, peer, place = actions[at[rank][b]]
                    if act is Act.SEND:
                        assert 0 <= place < schedule.places
                        assert peer != rank
                        assert (peer, place) not in places, "two hops, one place"
                        places.add((peer, place))
                        what = have[rank][b], sums[rank][b]
                        sent[peer, place] = (rank, b, what, finished[rank][b])
                    elif act is Act.FINISH:
                        assert finished[rank][b] is None
                        finished[rank][b] = rank
                    else:
                        if (rank, place) not in sent:
                            break
                        sender, block, (what, order), by = sent[rank, place]
                        assert (sender, block) == (peer, b)
                        assert (rank, place) not in received
                        received.add((rank, place))
                        if act in (Act.REDUCE, Act.REDUCE_FIRST):
                            assert by is None
                            assert finished[rank][b] is None
                            assert not have[rank][b] & what, "a contribution twice"
                            have[rank][b] |= what
                            pair = sums[rank][b], order
                            is_first = act is Act.REDUCE_FIRST
                            sums[rank][b] = pair[::-1] if is_first else pair
                        else:
                            mine = _sent_by(sent, rank, b)
                            assert mine <= received, "live memory still on its way"
                            have[rank][b], finished[rank][b] = what, by
                            sums[rank][b] = order
                    at[rank][b] += 1
                    moves = True
    for rank, schedule in enumerate(schedules):
        assert at[rank] == [len(actions) for actions in schedule.blocks], "stuck"
    assert received == set(sent), "a hop that nobody receives"
    for b in range(blocks):
        held = [(r, sums[r][b]) for r in range(size) if finished[r][b] is not None]
        for rank, order in held[1:]:
            first, expected = held[0]
            assert order == expected, (
                f"block {b} was finished twice, and not alike: rank {rank} has added "
                f"{order}, rank {first} {expected}"
            )
    return [
        [have[r][b] if finished[r][b] is not None else None for b in range(blocks)]
        for r in range(size)
    ]


def _sent_by(sent: dict, rank: int, block: int) -> set[tuple[int, int]]:
    return {
        (peer, place)
        for (peer, place), (sender, b, _, by) in sent.items()
        if sender == rank and b == block and by is None
    }
