"""TCP connections that libzmq has accepted: whose they are, and how they are ended.

libzmq has no call that ends one connection of a socket, so its descriptor is shut down
beneath it: libzmq then finds it closed, as if the peer had hung up. A descriptor may
belong to another connection by now, which the number of its inode tells.
"""

from __future__ import annotations

import os
import resource
import socket
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator


class Accepted(NamedTuple):
    """One connection, by its descriptor and the inode that this had."""

    descriptor: int
    inode: int

    def hang_up(self) -> None:
        """Ends the connection, unless it has ended; what was not sent yet is lost."""
        with suppress(OSError):
            if os.fstat(self.descriptor).st_ino == self.inode:
                with _borrowed(self.descriptor) as line:
                    line.shutdown(socket.SHUT_RDWR)

    @property
    def address(self) -> str:
        """The host at the other end; "" if that cannot be told any more."""
        with suppress(OSError), _borrowed(self.descriptor) as line:
            name = line.getpeername()
            return str(name[0]) if name else ""
        return ""


def accepted(descriptor: int) -> Accepted:
    """The connection that has the descriptor just now."""
    with suppress(OSError):
        return Accepted(descriptor, os.fstat(descriptor).st_ino)
    return Accepted(descriptor, -1)


def allowed() -> int:
    """Descriptors that this process may have."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


@contextmanager
def _borrowed(descriptor: int) -> Iterator[socket.socket]:
    """libzmq's descriptor as a socket, for as long as the block lasts."""
    line = socket.socket(fileno=descriptor)
    try:
        yield line
    finally:
        line.detach()
