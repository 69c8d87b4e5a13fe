"""Sets the name of a process that `ps`, `top` and `pgrep` show."""

from __future__ import annotations

import contextlib
import os
from functools import partial
from pathlib import Path


def show_as(name: str, *arguments: str) -> None:
    """Makes `ps` and `top` show this command line in place of the real one, cut to the
    bytes that the real one has (proc(5): ``arg_start`` and ``arg_end``)."""
    command_line = "\0".join((name, *arguments)).encode()
    with contextlib.suppress(OSError):  # no /proc, or it is read-only
        Path("/proc/self/comm").write_text(name)
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        start, end = map(int, fields[45:47])
        with open("/proc/self/mem", "r+b", 0) as memory:
            memory.seek(start)
            memory.write(command_line[: end - start - 1].ljust(end - start, b"\0"))


def name_children(daemon: str) -> None:
    """Renames the processes that user code forks in this daemon, so that somebody who
    looks for the daemon, to kill it for instance, does not find them."""
    os.register_at_fork(after_in_child=partial(show_as, "zstrat-forked", "by", daemon))
