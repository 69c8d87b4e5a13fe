"""Standard streams that a process was started without, as by ``2>&-`` in a shell.

The next file, socket or pipe that is opened gets the descriptor of such a stream. What
is written to standard error goes into it then, also by every process that is started;
and libuv aborts the process when it closes a handle with such a descriptor. So it is
given to ``/dev/null`` first.
"""

from __future__ import annotations

import os
import sys


def occupy_descriptors() -> None:
    """Opens ``/dev/null`` on those of the descriptors 0, 1 and 2 that are closed. To be
    called before anything is opened that stays open."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)


def complete() -> None:
    """Gives a program of ours the streams that Python did not find: what it prints goes
    nowhere. Programs of users keep ``sys.stdout`` and the others as they are."""
    occupy_descriptors()
    if sys.stdin is None:
        sys.stdin = open(0, closefd=False)  # noqa: SIM115
    if sys.stdout is None:
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
