"""What a worker's process consists of: devices, memory, compilations."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final, final

import jax

_COMPILED: Final = "/jax/core/compile/backend_compile_duration"


def devices() -> tuple[str, int]:
    """Platform and number of the local devices. Starts jax's backend, which can take
    seconds: not for the loop."""
    found = jax.local_devices()
    return found[0].platform, len(found)


def resident_bytes() -> int:
    """Memory of this process; 0 where the system does not say."""
    try:
        pages = int(Path("/proc/self/statm").read_text("ascii").split()[1])
    except OSError:  # not Linux
        return 0
    return pages * os.sysconf("SC_PAGESIZE")


@final
class Compilations:
    """Counts what XLA compiles in this process, from its making to its `close`."""

    def __init__(self) -> None:
        self.count = 0
        self.seconds = 0.0
        jax.monitoring.register_event_duration_secs_listener(self._heard)

    def close(self) -> None:
        """Stops counting."""
        jax.monitoring.unregister_event_duration_listener(self._heard)

    def _heard(self, event: str, duration_secs: float, **details: str | int) -> None:
        del details
        if event == _COMPILED:
            self.count += 1
            self.seconds += duration_secs
