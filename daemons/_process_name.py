"""What a process is called where people look for it: in `ps`, in `top`, by `pgrep`."""

from __future__ import annotations

import contextlib
import os
from functools import partial
from pathlib import Path


def show_as(name: str, *arguments: str) -> None:
    """What `ps` and `top` show in place of the words that the process was started with:
    so many bytes as those had (proc(5): ``arg_start`` and ``arg_end``)."""
    words = "\0".join((name, *arguments)).encode()
    with contextlib.suppress(OSError):  # no /proc, or nobody may write there
        Path("/proc/self/comm").write_text(name)
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        start, end = map(int, fields[45:47])
        with open("/proc/self/mem", "r+b", 0) as memory:
            memory.seek(start)
            memory.write(words[: end - start - 1].ljust(end - start, b"\0"))


def name_children(daemon: str) -> None:
    """Gives processes that user code forks in this daemon a name of their own: who
    looks for the daemon, to end it, say, must not find them."""
    os.register_at_fork(after_in_child=partial(show_as, "zstrat-forked", "by", daemon))
