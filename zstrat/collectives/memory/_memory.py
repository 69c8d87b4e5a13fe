"""The shared memory of a rank, and which way the bytes of its group go.

The memory is there from before the group is formed until it is closed.
"""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Final

from ._engines import HostsEngine, OneHost, places_of
from ._futex import IS_AVAILABLE
from ._segment import CAPACITY, RankMemory, arena, segment_of
from ._shm_collectives import ShmCollectives

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zstrat.collectives._engine import Between, CollectiveEngine, HostMemory
    from zstrat.transport import Arena
    from zstrat.wire import MemberEntry


class SharedMemory:
    """Implements `zstrat.collectives._engine.HostMemory`."""

    def __init__(self) -> None:
        """Raises: OSError: the kernel gives no anonymous memory."""
        made = arena()
        self._arena: Arena | None = made
        self._descriptor, self._word = made.descriptor, made.word

    @property
    def descriptor(self) -> int:
        return self._descriptor

    @property
    def capacity(self) -> int:
        return CAPACITY

    @property
    def word(self) -> bytes:
        return self._word

    def attach(
        self, rank: int, members: Sequence[MemberEntry], between: Between
    ) -> CollectiveEngine:
        assert self._arena is not None, "it is closed"
        mine = self._arena.memory
        # Without memory to share a rank is a host of its own.
        places, leaders = places_of(
            [each.host if each.capacity else i for i, each in enumerate(members)]
        )
        me = places[rank]
        segments = [
            RankMemory(i, mine) if i == rank else segment_of(i, members[i])
            for i, place in enumerate(places)
            if place.host == me.host
        ]
        rooms = ShmCollectives(me.place, segments, len(os.sched_getaffinity(0)))
        if len(leaders) == 1:
            return OneHost(rooms, self.close)
        return HostsEngine(rooms, rank, places, leaders, between, self.close)

    def close(self) -> None:
        """Done by the engine's as well; the second time nothing happens."""
        if self._arena is not None:
            self._arena.close()
            self._arena = None  # whoever keeps a closed group keeps no memory


_LOG: Final = logging.getLogger("zstrat.collectives")


def host_memory(lane: str) -> HostMemory | None:
    """What this rank shares with ranks of its host, None where all goes by messages."""
    if lane not in ("auto", "shm") or not IS_AVAILABLE:
        return None
    try:
        return SharedMemory()
    except OSError as error:
        _LOG.info("calls of this rank go by socket, not by shared memory: %s", error)
        return None
