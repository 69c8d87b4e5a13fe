"""The identity of this process, as it sends it in its HELLO."""

from __future__ import annotations

import os
import platform
import secrets
import socket
import sys
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Final

from zstrat.wire import PROTOCOL, Hello

_PACKAGES: Final = ("zstrat", "jax", "numpy")
_LONGEST_NAME: Final = 80


def new_incarnation() -> int:
    """Returns a number that no other start of any task has: 63 random bits, never 0.
    The upper 31 are those of this process, see `zstrat.wire.Owner.is_of`."""
    return _process_bits(os.getpid()) | secrets.randbits(32) | 1


@cache
def _process_bits(pid: int) -> int:
    """Returns the random bits of this process; a child that it forks has others."""
    del pid
    return secrets.randbits(31) << 32


def hello(job: str, index: int, incarnation: int) -> Hello:
    """Returns the HELLO of this process. Imports nothing to learn the versions."""
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:  # a ps without jax, say
            continue
    return Hello(
        PROTOCOL, job, index, incarnation, socket.gethostname(), os.getpid(), versions
    )


def program_name() -> str:
    """Returns what runs in this process, for words to a person: "train.py"."""
    path = Path(sys.argv[0])
    name = path.parent.name if path.name == "__main__.py" else path.name
    name = f"python {name}" if name in ("-c", "-m") else name
    return name[:_LONGEST_NAME] if name.isprintable() else ""
