"""Parses and checks addresses before ZeroMQ gets them."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import os
import re
import socket
import stat
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple

_IPC_LONGEST: Final = 107  # sun_path of Linux, less the final zero

_HOST: Final = re.compile(r"[0-9A-Za-z._%:*-]{1,255}")
"""The characters of a host: a name, a number, or an interface. Some hosts come from
strangers, and are logged."""


class Address(NamedTuple):
    """An address to bind or to connect to, parsed. ``scheme`` is "tcp" or "ipc";
    ``port`` is 0 for ipc and for "any free port".

    ``is_ipv6``: a socket for the address is an IPv6 socket. A socket bound to all
    interfaces ("*") accepts IPv4, too, and is an IPv4 socket where the system has only
    that. A name is resolved to an IPv4 address, unless it is known to have none.
    """

    scheme: str
    host: str
    port: int
    is_ipv6: bool = False

    @property
    def endpoint(self) -> str:
        """The address in ZeroMQ's form: ``tcp://host:port`` or ``ipc://path``."""
        if self.scheme == "ipc":
            return f"ipc://{self.host}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"tcp://{host}:{self.port or '*'}"


def parse(text: str) -> Address:
    """Parses ``host:port``, ``tcp://host:port``, ``[v6]:port`` or ``ipc:///path``.

    Raises:
        ValueError: The text is not an address.
    """
    scheme, found, rest = text.partition("://")
    if not found:
        scheme, rest = "tcp", text
    if scheme == "ipc":
        return _parse_ipc(text, rest)
    # The last colon: an IPv6 address has others.
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
    """Checks that the text is an address with a port.

    Raises:
        ValueError: The text is not an address with a port.
    """
    address = parse(text)
    if address.scheme == "tcp" and not address.port:
        raise ValueError(f"address {text!r}: expected a port above 0")


def check_reachable(text: str) -> None:
    """Checks that other machines can use the address to reach a task.

    Raises:
        ValueError: As `check_address`; or the host means all interfaces, as "*" does.
    """
    check_address(text)
    if _is_any(parse(text).host):
        raise ValueError(
            f"address {text!r} stands for all interfaces: expected one by which other "
            "machines reach this task"
        )


def reached_as(bound: str, known: str) -> str:
    """Returns the address by which the caller reaches another endpoint of a process
    that it already reaches at ``known``.

    Args:
        bound: Address where the other endpoint listens, maybe on all interfaces.
        known: Address by which the caller reaches the process now.

    Raises:
        ValueError: ``bound`` or ``known`` is not an address.
    """
    listening, reached = parse(bound), parse(known)
    if (
        listening.scheme != "tcp"
        or reached.scheme != "tcp"
        or not _is_any(listening.host)
    ):
        return bound
    return reached._replace(port=listening.port).endpoint


def _is_any(host: str) -> bool:
    return host == "*" or (
        _is_number(host) and ipaddress.ip_address(host).is_unspecified
    )


def is_name(address: Address) -> bool:
    """Returns whether the host is a name that has to be resolved."""
    return not (
        address.scheme == "ipc" or address.host == "*" or _is_number(address.host)
    )


async def looked_up(address: Address) -> tuple[Address, bool]:
    """Resolves the host name of an address. Returns the address with `is_ipv6` set, and
    whether the name has both IPv4 and IPv6 addresses.

    Raises:
        OSError: The name cannot be resolved now; that may change.
    """
    loop = asyncio.get_running_loop()
    infos = await loop.getaddrinfo(address.host, None, type=socket.SOCK_STREAM)
    kinds = {each[0] for each in infos}
    return address._replace(is_ipv6=kinds == {socket.AF_INET6}), len(kinds) > 1


def unknown(host: str, error: OSError) -> str:
    """Describes a failed lookup of a host name, with the resolver's error."""
    return f"the name {host!r} cannot be resolved ({error.strerror})"


async def bindable(address: Address, task: str) -> Address:
    """Resolves an address to bind, whose host may be a number, an interface, or a name.

    Raises:
        OSError: EADDRNOTAVAIL: the name cannot be resolved now; that may change.
    """
    if not is_name(address):
        return address
    try:
        return (await looked_up(address))[0]
    except OSError as error:
        # libzmq binds the names of interfaces (eth0), too.
        if address.host in (name for _, name in socket.if_nameindex()):
            return address
        raise OSError(
            errno.EADDRNOTAVAIL,
            f"{task} cannot bind {address.host}:{address.port}: "
            f"{unknown(address.host, error)}: try again if it may not be in DNS yet, "
            "or bind '*' (--bind) if peers reach this machine by a name that it cannot "
            "resolve itself",
        ) from error


def _is_number(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


async def is_local(address: Address) -> bool:
    """Returns whether only this machine can reach a socket bound to the address. False
    if the host name cannot be resolved."""
    if address.scheme == "ipc":
        return True
    if address.host == "*":
        return False
    try:
        return ipaddress.ip_address(address.host).is_loopback
    except ValueError:  # a name
        loop = asyncio.get_running_loop()
        try:
            infos = await loop.getaddrinfo(address.host, None, type=socket.SOCK_STREAM)
        except OSError:
            return False
        # Every address of the name, as libzmq chooses which one it binds.
        return all(ipaddress.ip_address(each[4][0]).is_loopback for each in infos)


def check_directory(address: Address) -> None:
    """Checks that only this user may enter the directory of an ipc address: every user
    that can reach the file of the socket can send messages to the task.

    Raises:
        PermissionError: Other users may enter the directory.
        FileNotFoundError: The directory does not exist.
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
    """Checks that no process listens at an ipc address, and that its path is not
    another kind of file: a bind of libzmq would silently replace the other process's
    socket, or remove the file.

    Raises:
        OSError: A process listens at the address, or the path is not a socket.
    """
    with suppress(FileNotFoundError):
        if not stat.S_ISSOCK(os.stat(address.host).st_mode):
            raise FileExistsError(
                errno.EEXIST,
                f"cannot bind ipc://{address.host}: the path exists, and is not a "
                "socket: choose another path",
            )
    with socket.socket(
        socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK
    ) as knock:
        # EAGAIN: its backlog is full. A refusal means that the process which made the
        # file has ended.
        if knock.connect_ex(address.host) in (0, errno.EAGAIN):
            raise OSError(
                errno.EADDRINUSE,
                f"cannot bind ipc://{address.host}: another process listens there",
            )


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
