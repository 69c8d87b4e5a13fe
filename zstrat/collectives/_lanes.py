"""Which way the bytes of a group go."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from ._futex import IS_AVAILABLE
from ._memory import SharedMemory

if TYPE_CHECKING:
    from ._engine import HostMemory

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
