"""How much memory this machine has left, as the kernel estimates it."""

from __future__ import annotations

from pathlib import Path
from typing import Final

_FACTS: Final = Path("/proc/meminfo")


def available_bytes() -> int | None:
    """What may still be taken without swapping; None where nobody can tell."""
    try:
        for line in _FACTS.read_text("ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return None
