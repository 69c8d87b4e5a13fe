"""Ports for tasks that are told their addresses before they bind them.

A port that the kernel has chosen for us may be the source of somebody's connection a
moment later. So these are none that it chooses: they lie below its range.

Law of the file: whoever is given a port binds it soon; nothing here holds it.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import random
import socket
from pathlib import Path
from typing import Final

_LOWEST: Final = 10_240
"""Below are ports of services that are known by their numbers: 5432, 6379, 8080."""
_RANGE: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")
_USUAL: Final = 32_768
"""Where Linux begins to choose; 49,152 and more on other systems."""
_TRIES: Final = 1000
"""Draws for the ports of one call: of over 20,000 nearly all are free."""
_ANOTHER: Final = (errno.EADDRINUSE, errno.EACCES)
"""What is wrong with one port; another one may do."""
_IPV6_ALONE: Final = (socket.EAI_NODATA, socket.EAI_ADDRFAMILY)
"""The name is known, and has no address of IPv4."""


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Different TCP ports that nobody has now, in no order. Where the kernel leaves too
    few below its range, it chooses the others.

    Raises:
        OSError: There are not so many, or the host is not this one.
    """
    below = range(_LOWEST, _first_chosen())
    # The system's own randomness: programs that seed theirs alike would meet here.
    drawn = random.SystemRandom()
    found: set[int] = set()
    with contextlib.ExitStack() as held:
        for _ in range(_TRIES if below else 0):
            if len(found) == count:
                break
            try:
                found.add(_bound(held, host, drawn.choice(below)))
            except OSError as error:
                if error.errno not in _ANOTHER:
                    raise _refusal(error, host) from error
        while len(found) < count:  # the kernel's, which are better than none
            try:
                found.add(_bound(held, host, 0))
            except OSError as error:
                raise _refusal(error, host) from error
        return list(found)


def agreed_port(run: str, tasks: int) -> int:
    """The first of so many ports that all processes of a run derive from its name
    alike, below those that Linux chooses by itself. Two runs may meet, seldom: then the
    second cannot bind, and says so.

    Raises:
        ValueError: There are not so many ports.
    """
    room = _USUAL - _LOWEST - tasks
    if room < 1:
        raise ValueError(
            f"{tasks} tasks of one host: expected less than {room + tasks}"
        )
    digest = hashlib.blake2b(run.encode(), digest_size=8).digest()
    return _LOWEST + int.from_bytes(digest) % room


def _bound(held: contextlib.ExitStack, host: str, port: int) -> int:
    try:
        probe = _probe(socket.AF_INET6 if ":" in host else socket.AF_INET, host, port)
    except socket.gaierror as error:
        if error.errno not in _IPV6_ALONE:
            raise
        probe = _probe(socket.AF_INET6, host, port)
    held.enter_context(probe)
    given: int = probe.getsockname()[1]
    return given


def _probe(family: socket.AddressFamily, host: str, port: int) -> socket.socket:
    made = socket.socket(family)
    try:
        made.bind((host, port))
    except OSError:
        made.close()
        raise
    return made


def _refusal(error: OSError, host: str) -> OSError:
    """The error of a host on which no port can be had."""
    why = f"cannot bind a TCP port of {host!r}: {error.strerror}"
    if error.errno == errno.EADDRNOTAVAIL or isinstance(error, socket.gaierror):
        why += "; expected a name or an address of this machine"
    elif error.errno in _ANOTHER:
        why += "; no port is left"
    return OSError(error.errno, why)


def _first_chosen() -> int:
    """The first port that the kernel may choose."""
    try:
        return int(_RANGE.read_text().split()[0])
    except (OSError, ValueError, IndexError):  # no Linux, or a /proc that is hidden
        return _USUAL
