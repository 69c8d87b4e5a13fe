"""Asking engines, and tasks on them."""

import re
import time
from typing import TypeVar

T = TypeVar("T")


def eventually(what, seconds=120.0):
    """What it returns once it is true: an engine is asked, it does not tell."""
    end = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < end, f"not in {seconds:g} s: {what}"
        time.sleep(0.2)
    return found


def pid_of(log):
    """The process that a task was last, by its log."""
    return int(re.findall(r"ready at \S+ pid (\d+)", log)[-1])
