"""Whether a process of this machine has the other end of a connection.

A silent peer that does is not cut off: nothing stands between the two, no other machine
and no relay. So it hangs, or has no processor. Linux alone tells that; elsewhere nobody
is known to have anything.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
from contextlib import suppress
from pathlib import Path
from typing import Final

_CREDENTIALS: Final = struct.Struct("3i")  # pid, uid and gid of the other end

_STOPPED: Final = frozenset("TtZX")
"""States of a process that does nothing: stopped, traced, or dead."""

_TABLES: Final = {socket.AF_INET: "tcp", socket.AF_INET6: "tcp6"}


def is_held_by(line: socket.socket, pid: int) -> bool:
    """Whether the process ``pid`` has the other end of ``line``, and is not stopped.

    False if this user may not look at that process. Takes a look at all connections of
    the machine: milliseconds if these are thousands.
    """
    with suppress(OSError, ValueError, struct.error):
        return not _is_stopped(pid) and _has_other_end(line, pid)
    return False


def _is_stopped(pid: int) -> bool:
    # The name of the process, in parentheses, may contain anything.
    about = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace")
    return about.rpartition(")")[2].split()[0] in _STOPPED


def _has_other_end(line: socket.socket, pid: int) -> bool:
    if line.family is socket.AF_UNIX:
        size = _CREDENTIALS.size
        found = line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
        return bool(_CREDENTIALS.unpack(found)[0] == pid)
    inode = _inode_of_other_end(line)
    folder = f"/proc/{pid}/fd"
    return inode is not None and any(
        _target(f"{folder}/{each}") == f"socket:[{inode}]"
        for each in os.listdir(folder)
    )


def _inode_of_other_end(line: socket.socket) -> str | None:
    ends = _written(line, line.getpeername()), _written(line, line.getsockname())
    with open(f"/proc/net/{_TABLES[line.family]}", encoding="ascii") as table:
        for row in table:
            words = row.split()
            if (words[1], words[2]) == ends:
                return words[9]
    return None


def _written(line: socket.socket, address: tuple[str, int]) -> str:
    """An address as the tables of the kernel have it, word by word."""
    raw = socket.inet_pton(line.family, address[0].partition("%")[0])
    words = [raw[at : at + 4] for at in range(0, len(raw), 4)]
    numbers = [int.from_bytes(word, sys.byteorder) for word in words]
    return "".join(f"{number:08X}" for number in numbers) + f":{address[1]:04X}"


def _target(path: str) -> str:
    with suppress(OSError):  # it was closed meanwhile
        return os.readlink(path)
    return ""
