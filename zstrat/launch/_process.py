"""Facts about this process: the only door to psutil."""

from __future__ import annotations

import psutil


def resident_bytes() -> int:
    """Memory of this process that is in RAM, shared pages included."""
    return int(psutil.Process().memory_info().rss)


def cpu_seconds() -> float:
    """Processor time of this process since it began, all threads together."""
    times = psutil.Process().cpu_times()
    return float(times.user + times.system)
