"""Replaces standard streams that are closed when a process starts, as by ``2>&-``.

The next file, socket or pipe that is opened would get the descriptor of such a stream.
Then everything written to standard error, also by child processes, would go into it;
and libuv aborts the process when it closes a handle with such a descriptor. So the
functions here first open such descriptors on ``/dev/null``.
"""

from __future__ import annotations

import os
import sys


def occupy_descriptors() -> None:
    """Opens ``/dev/null`` on each of the descriptors 0, 1 and 2 that is closed. Call
    this before anything else is opened."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        # As standard streams are: else children would start with closed ones.
        os.set_inheritable(descriptor, True)
    os.close(descriptor)


def complete() -> None:
    """Replaces those of `sys.stdin`, `sys.stdout` and `sys.stderr` that are None by
    streams on ``/dev/null``. For programs of zstrat only: programs of users may expect
    None."""
    occupy_descriptors()
    if sys.stdin is None:
        sys.stdin = open(0, closefd=False)  # noqa: SIM115
    if sys.stdout is None:
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
