"""Addresses as people write them, checked before ZeroMQ sees them."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import os
import re
import socket
import stat
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

_IPC_LONGEST: Final = 107  # sun_path of Linux, less the final zero

_HOST: Final = re.compile(r"[0-9A-Za-z._%:*-]{1,255}")
"""Names, numbers, and interfaces. Some are a stranger's word, and shown in logs."""


class Address(NamedTuple):
    """``scheme`` is "tcp" or "ipc"; ``port`` is 0 for ipc and for "any free port".

    ``is_ipv6``: a socket for it is one of IPv6. One that is bound to all interfaces
    ("*") takes IPv4, too, and is one of IPv4 where the system has nothing else. A name
    is looked up among the addresses of IPv4, unless it is known to have none.
    """

    scheme: str
    host: str
    port: int
    is_ipv6: bool = False

    @property
    def endpoint(self) -> str:
        """The address as ZeroMQ wants it."""
        if self.scheme == "ipc":
            return f"ipc://{self.host}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"tcp://{host}:{self.port or '*'}"


def parse(text: str) -> Address:
    """``host:port``, ``tcp://host:port``, ``[v6]:port`` or ``ipc:///path``.

    Raises:
        ValueError: It is none of these; says what was expected.
    """
    scheme, found, rest = text.partition("://")
    if not found:
        scheme, rest = "tcp", text
    if scheme == "ipc":
        return _parse_ipc(text, rest)
    host, colon, port = rest.rpartition(":")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if scheme != "tcp" or not colon or _HOST.fullmatch(host) is None:
        raise _wrong(text)
    number = (
        0 if port == "*" else int(port) if port.isascii() and port.isdigit() else -1
    )
    if not 0 <= number < 65536:
        raise _wrong(text)
    return Address("tcp", host, number, ":" in host or host == "*")


def check_address(text: str) -> None:
    """Whether a task may be reached at that.

    Raises:
        ValueError: It is no address, or one without a port.
    """
    address = parse(text)
    if address.scheme == "tcp" and not address.port:
        raise ValueError(f"address {text!r}: expected a port above 0")


def check_reachable(text: str) -> None:
    """Whether others may be told to reach a task at that.

    Raises:
        ValueError: As `check_address`; or it stands for all interfaces.
    """
    check_address(text)
    if _is_any(parse(text).host):
        raise ValueError(
            f"address {text!r}: expected the address at which others reach this task, "
            "and that one stands for all interfaces"
        )


def reached_as(bound: str, known: str) -> str:
    """How another endpoint of a process is reached.

    Args:
        bound: What that one listens at: a port of an interface, or of all of them.
        known: How the asker reaches the process.

    Raises:
        ValueError: One of them is no address.
    """
    there, here = parse(bound), parse(known)
    if there.scheme != "tcp" or here.scheme != "tcp" or not _is_any(there.host):
        return bound
    return here._replace(port=there.port).endpoint


def _is_any(host: str) -> bool:
    return host == "*" or (
        _is_number(host) and ipaddress.ip_address(host).is_unspecified
    )


def is_name(address: Address) -> bool:
    """Whether the host has to be looked up."""
    return not (
        address.scheme == "ipc" or address.host == "*" or _is_number(address.host)
    )


async def looked_up(address: Address) -> tuple[Address, bool]:
    """The address of a name, with what is known of it now: whether it has addresses of
    IPv6 alone. And whether it has addresses of both kinds.

    Raises:
        OSError: Nobody knows the name, so far.

    Cancellation: nothing has happened.
    """
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(address.host, None, type=socket.SOCK_STREAM)
    kinds = {each[0] for each in found}
    return address._replace(is_ipv6=kinds == {socket.AF_INET6}), len(kinds) > 1


def unknown(host: str, error: OSError) -> str:
    """The words for a name that cannot be looked up, with the resolver's error."""
    return f"nobody knows the name {host!r} ({error.strerror})"


async def bindable(address: Address, task: str) -> Address:
    """The address, if its host is one that can be bound at all: a number, an interface,
    or a name that is known.

    Raises:
        OSError: EADDRNOTAVAIL: nobody knows the name, so far.

    Cancellation: nothing has happened.
    """
    if not is_name(address):
        return address
    try:
        return (await looked_up(address))[0]
    except OSError as error:
        if address.host in (name for _, name in socket.if_nameindex()):
            return address
        raise OSError(
            errno.EADDRNOTAVAIL,
            f"{task} cannot bind {address.host}:{address.port}: "
            f"{unknown(address.host, error)}: it may not be in DNS yet, then try "
            "again; or bind '*', with --bind, if peers reach this machine by a "
            "name that it does not know itself",
        ) from error


def _is_number(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


async def is_local(address: Address) -> bool:
    """Whether nothing outside this machine can reach a socket bound there. A name that
    nobody knows counts as reachable.

    Cancellation: nothing has happened.
    """
    if address.scheme == "ipc":
        return True
    if address.host == "*":
        return False
    try:
        return ipaddress.ip_address(address.host).is_loopback
    except ValueError:  # a name
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(address.host, None, type=socket.SOCK_STREAM)
        except OSError:
            return False
        return all(ipaddress.ip_address(each[4][0]).is_loopback for each in found)


def check_directory(address: Address) -> None:
    """Refuses an ipc address in a directory that other users may enter: whoever can
    reach the file of the socket can talk to the task.

    Raises:
        PermissionError: Others than its owner may enter the directory.
        FileNotFoundError: There is no such directory.
    """
    directory = Path(address.host).parent
    try:
        state = directory.stat()
    except FileNotFoundError:
        raise FileNotFoundError(
            f"ipc://{address.host}: the directory {directory} does not exist: "
            "create it with mode 0700"
        ) from None
    mode = stat.S_IMODE(state.st_mode)
    if state.st_uid != os.geteuid() or mode & 0o077:
        raise PermissionError(
            f"ipc://{address.host}: {directory} belongs to user {state.st_uid} and has "
            f"mode {mode:04o}: expected user {os.geteuid()} and 0700, because every "
            "user who can enter it could send commands to this task"
        )


def check_unused(address: Address) -> None:
    """Refuses an ipc address at which a process listens, or that is a file with
    somebody's data: libzmq would take it away from that process, or remove that file,
    without a word.

    Raises:
        OSError: A process listens there, or there is something else than a socket.
    """
    with suppress(FileNotFoundError):
        if not stat.S_ISSOCK(os.stat(address.host).st_mode):
            raise FileExistsError(
                errno.EEXIST,
                f"cannot bind ipc://{address.host}: that is no socket, and would be "
                "lost; bind a path where nothing is",
            )
    with socket.socket(
        socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK
    ) as knock:
        if knock.connect_ex(address.host) in (0, errno.EAGAIN):
            raise OSError(
                errno.EADDRINUSE,
                f"cannot bind ipc://{address.host}: another process listens there",
            )


@dataclass(frozen=True, slots=True)
class SocketFile:
    """What a bound ipc address is in the file system. libzmq leaves it there."""

    path: Path
    number: int

    def remove(self) -> None:
        """Removes it, unless another socket has taken the path meanwhile."""
        with suppress(OSError):
            if self.path.stat().st_ino == self.number:
                self.path.unlink()


def socket_file(address: Address) -> SocketFile | None:
    """The file of a socket that was just bound, None if it has none."""
    if address.scheme != "ipc":
        return None
    try:
        return SocketFile(Path(address.host), Path(address.host).stat().st_ino)
    except OSError:  # somebody cleans up behind us
        return None


def _parse_ipc(text: str, path: str) -> Address:
    is_shown = path.startswith("/") and path.isprintable()
    if not is_shown or len(os.fsencode(path)) > _IPC_LONGEST:
        raise ValueError(
            f"address {text!r:.300}: expected ipc:// and an absolute path of at most "
            f"{_IPC_LONGEST} bytes"
        )
    return Address("ipc", path, 0)


def _wrong(text: str) -> ValueError:
    return ValueError(
        f"address {text!r:.300}: expected host:port, tcp://host:port or ipc:///path, "
        "with a port from 0 (any free one) to 65535"
    )
