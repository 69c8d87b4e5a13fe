"""File descriptors of connections that libzmq has opened, and what Linux says about
them.

libzmq has no call that ends one connection of a socket, or says how much it has moved,
so the descriptor of the connection is borrowed as a socket. A descriptor may belong to
another connection by now, so the inode is compared before a connection is ended.

*The other end.* A silent peer on this machine is not cut off, as there is no network
and no relay between: it hangs, or gets no processor. `Accepted.is_held_by` finds out
whether its process still has the other end, on Linux alone.

*Forks.* A child that outlives its parent would keep the parent's port and connections:
the next process of the task could not bind, and peers would not notice that the parent
has ended. libzmq has no call that lists its descriptors, so they are recognized by the
addresses of our sockets, at either end. A descriptor is not closed, but replaced by one
of ``/dev/null``: code of the parent that still runs in the child may close it, and must
not close another file instead.
"""

from __future__ import annotations

import ctypes
import errno
import ipaddress
import os
import resource
import socket
import struct
import sys
import weakref
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from zstrat.wire.connection import Carried

from ._address import parse

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import zmq


class Accepted(NamedTuple):
    """A connection that libzmq has accepted or made: its file descriptor, and the inode
    of the socket."""

    descriptor: int
    inode: int

    def hang_up(self) -> None:
        """Ends the connection if it has not ended; unsent data is lost."""
        with suppress(OSError):
            if os.fstat(self.descriptor).st_ino == self.inode:
                with borrowed(self.descriptor) as line:
                    # Not closed, as it is libzmq's: the shutdown makes libzmq close it.
                    line.shutdown(socket.SHUT_RDWR)

    def carried(self) -> Carried:
        """Returns the bytes that the connection has moved; all 0 where Linux does not
        report them."""
        with suppress(OSError, struct.error), borrowed(self.descriptor) as line:
            size = _TCP_INFO.size
            info = line.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, size)
            mss, unacknowledged, delivered, received, unsent = _TCP_INFO.unpack(info)
            return Carried(received, delivered, unsent + unacknowledged * mss)
        return Carried()

    def is_held_by(self, pid: int) -> bool:
        """Returns whether process ``pid`` has the other end of the connection; see
        `zstrat.wire.connection.Carrier`."""
        with suppress(OSError), borrowed(self.descriptor) as line:
            return is_held_by(line, pid)
        return False

    @property
    def address(self) -> str:
        """Host at the other end; "" if the connection has ended."""
        with suppress(OSError), borrowed(self.descriptor) as line:
            name = line.getpeername()
            return str(name[0]) if name else ""
        return ""


def refuse_newcomers(listener: int) -> None:
    """Makes a listening socket refuse new connections; accepted ones continue.

    Raises:
        OSError: The system has no packet filter for sockets.
    """
    if sys.platform != "linux":
        raise OSError(
            errno.ENOTSUP, "only Linux can refuse new connections of a listening port"
        )
    # A BPF program of one instruction, "return 0": drops each packet.
    program = ctypes.create_string_buffer(struct.pack("HBBI", 6, 0, 0, 0))
    # struct sock_fprog: the number of instructions, and their address.
    count_and_place = struct.pack("HP", 1, ctypes.addressof(program))
    with borrowed(listener) as line:
        line.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, count_and_place)


_SO_ATTACH_FILTER: Final = 26

_TCP_INFO: Final = struct.Struct("=16xI4xI92xQQ8xI")
"""Fields of Linux's `tcp_info`: snd_mss, unacked (in segments), bytes_acked,
bytes_received, notsent_bytes."""


def accepted(descriptor: int) -> Accepted:
    """Returns the connection that has the file descriptor now."""
    with suppress(OSError):
        return Accepted(descriptor, os.fstat(descriptor).st_ino)
    return Accepted(descriptor, -1)


def allowed() -> int:
    """Returns how many file descriptors this process may have."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


@contextmanager
def borrowed(descriptor: int) -> Iterator[socket.socket]:
    """Lends libzmq's descriptor as a socket for the duration of the block."""
    line = socket.socket(fileno=descriptor)
    try:
        yield line
    finally:
        # Otherwise the garbage collector would close libzmq's descriptor.
        line.detach()


_CREDENTIALS: Final = struct.Struct("3i")  # pid, uid and gid of the other end

_STOPPED: Final = frozenset("TtZX")
"""States of a process that does not run: stopped, traced, or dead, as /proc shows
them."""

_TABLES: Final = {socket.AF_INET: "tcp", socket.AF_INET6: "tcp6"}


def is_held_by(line: socket.socket, pid: int) -> bool:
    """Returns whether process ``pid`` has the other end of ``line``, and is not
    stopped.

    False if this user may not inspect that process. Reads the table of all connections
    of the machine, which takes milliseconds if there are thousands.
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
        credentials = line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
        return bool(_CREDENTIALS.unpack(credentials)[0] == pid)
    inode = _inode_of_other_end(line)
    folder = f"/proc/{pid}/fd"
    return inode is not None and any(
        _target(f"{folder}/{each}") == f"socket:[{inode}]"
        for each in os.listdir(folder)
    )


def _inode_of_other_end(line: socket.socket) -> str | None:
    ends = _written(line, line.getpeername()), _written(line, line.getsockname())
    # As the other end has it: its local address is our remote one.
    with open(f"/proc/net/{_TABLES[line.family]}", encoding="ascii") as table:
        for row in table:
            words = row.split()
            if (words[1], words[2]) == ends:
                return words[9]
    return None


def _written(line: socket.socket, address: tuple[str, int]) -> str:
    """Formats an address as the kernel's table of connections does, word by word."""
    raw = socket.inet_pton(line.family, address[0].partition("%")[0])
    words = [raw[at : at + 4] for at in range(0, len(raw), 4)]
    numbers = [int.from_bytes(word, sys.byteorder) for word in words]
    return "".join(f"{number:08X}" for number in numbers) + f":{address[1]:04X}"


def _target(path: str) -> str:
    with suppress(OSError):  # it was closed meanwhile
        return os.readlink(path)
    return ""


SocketName = tuple[str, int]
"""One end of a socket: a numeric host, "" for all interfaces, and a port; or a path and
0."""

_addresses: Final[weakref.WeakKeyDictionary[zmq.Socket[bytes], str]] = (
    weakref.WeakKeyDictionary()
)


def note_address(socket: zmq.Socket[bytes], endpoint: str) -> None:
    """Records the address where the socket is bound or connected, so that a forked
    child recognizes its descriptors."""
    _addresses[socket] = endpoint


def give_up(descriptors: Iterable[int]) -> None:
    """Replaces inherited descriptors, in a forked child, by ``/dev/null``."""
    nowhere = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for descriptor in descriptors:
        os.dup2(nowhere, descriptor, inheritable=False)
    os.close(nowhere)


def _give_up_sockets() -> None:
    """Replaces the descriptors of libzmq's sockets after a fork: libzmq's threads run
    in the parent alone."""
    own = {
        _name_in(endpoint)
        for socket, endpoint in list(_addresses.items())
        if not socket.closed
    }
    _addresses.clear()
    if own:
        # Linux and macOS have this folder.
        descriptors = [int(number) for number in os.listdir("/dev/fd")]
        give_up([each for each in descriptors if not own.isdisjoint(_names_of(each))])


def _name_in(endpoint: str) -> SocketName:
    address = parse(endpoint)
    return _plain(address.host), address.port


def _names_of(descriptor: int) -> set[SocketName]:
    """Returns the names of both ends of a stream socket; empty for other
    descriptors."""
    names: set[SocketName] = set()
    with suppress(OSError), borrowed(descriptor) as line:
        if line.type == socket.SOCK_STREAM:
            names = _names(line.getsockname())
            # A listener on all interfaces was noted without a host.
            anywhere = {("", port) for _, port in names if port}
            names |= anywhere
            names |= _names(line.getpeername())
    return names


def _names(name: Any) -> set[SocketName]:
    match name:
        case (str(host), int(port), *_):
            return {(_plain(host), port)}
        case str(path) if path:
            return {(path, 0)}
    return set()  # of another family, or without a name


def _plain(host: str) -> str:
    try:
        number = ipaddress.ip_address(host)
    except ValueError:  # a path, or a name
        return host
    if number.is_unspecified:
        return ""
    return str(getattr(number, "ipv4_mapped", None) or number)


os.register_at_fork(after_in_child=_give_up_sockets)
