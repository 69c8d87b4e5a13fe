"""Finds ports for tasks that are about to be launched.

Tasks get ports before they bind them (`free_ports`). The kernel may give a port that it
chose for us to an outgoing connection a moment later. So these ports are below the
range from which it chooses.

Law: nothing holds a returned port; the caller has to bind it soon.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import random
import socket
from pathlib import Path
from typing import Final

_LOWEST_PORT: Final = 10_240
"""The lowest port that is tried: well-known services use lower ones, such as 5432,
6379, 8080."""
_EPHEMERAL_RANGE: Final = Path("/proc/sys/net/ipv4/ip_local_port_range")
_USUAL_EPHEMERAL: Final = 32_768
"""The first port that Linux chooses by default; other systems begin at 49,152."""
_TRIES: Final = 1000
"""Number of random ports to try in one call; nearly all of over 20,000 are free."""
_PORT_ERRORS: Final = (errno.EADDRINUSE, errno.EACCES)
"""Error numbers of a port that cannot be bound, after which another port is tried."""
_IPV6_ONLY_ERRORS: Final = (socket.EAI_NODATA, socket.EAI_ADDRFAMILY)
"""Error numbers of name look-up for a host that has only IPv6 addresses."""


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Returns distinct free TCP ports, in no order, below the range of ephemeral ports.
    If that has too few, the kernel chooses the others.

    Raises:
        OSError: There are too few ports, or the host is not this machine.
    """
    below = range(_LOWEST_PORT, _first_ephemeral())
    # Randomness of the system: programs with the same seed would collide.
    drawn = random.SystemRandom()
    found: set[int] = set()
    # All are held until the last is found, so that none is found twice.
    with contextlib.ExitStack() as held:
        for _ in range(_TRIES if below else 0):
            if len(found) == count:
                break
            try:
                found.add(_bind_probe(held, host, drawn.choice(below)))
            except OSError as error:
                if error.errno not in _PORT_ERRORS:
                    raise _bind_error(error, host) from error
        while len(found) < count:  # a fallback: ports chosen by the kernel
            try:
                found.add(_bind_probe(held, host, 0))
            except OSError as error:
                raise _bind_error(error, host) from error
        return list(found)


def agreed_port(run: str, tasks: int) -> int:
    """Derives the first of ``tasks`` consecutive ports from the name of a run, so that
    all processes of the run get the same one. The ports are below Linux's range of
    ephemeral ports. In the rare case that two runs collide, the second one fails to
    bind.

    Raises:
        ValueError: There are too few ports.
    """
    # The ports of this machine are not asked for: all processes must get the same one,
    # and they may be on several machines.
    choices = _USUAL_EPHEMERAL - _LOWEST_PORT - tasks
    if choices < 1:
        raise ValueError(
            f"{tasks} tasks on one host: expected less than {choices + tasks}"
        )
    # Not `hash`, which differs from process to process.
    digest = hashlib.blake2b(run.encode(), digest_size=8).digest()
    return _LOWEST_PORT + int.from_bytes(digest) % choices


def _bind_probe(held: contextlib.ExitStack, host: str, port: int) -> int:
    # A name is tried with IPv4 first, as zmq does when a task binds it.
    try:
        probe = _bound_socket(
            socket.AF_INET6 if ":" in host else socket.AF_INET, host, port
        )
    except socket.gaierror as error:
        if error.errno not in _IPV6_ONLY_ERRORS:
            raise
        probe = _bound_socket(socket.AF_INET6, host, port)
    held.enter_context(probe)
    given: int = probe.getsockname()[1]
    return given


def _bound_socket(family: socket.AddressFamily, host: str, port: int) -> socket.socket:
    made = socket.socket(family)
    try:
        made.bind((host, port))
    except OSError:
        made.close()
        raise
    return made


def _bind_error(error: OSError, host: str) -> OSError:
    """Makes the error for a host on which no port can be bound."""
    why = f"cannot bind a TCP port of {host!r}: {error.strerror}"
    if error.errno == errno.EADDRNOTAVAIL or isinstance(error, socket.gaierror):
        why += "; expected a name or an address of this machine"
    elif error.errno in _PORT_ERRORS:
        why += "; all ports are in use"
    return OSError(error.errno, why)


def _first_ephemeral() -> int:
    """Returns the first port of the range from which the kernel chooses."""
    try:
        return int(_EPHEMERAL_RANGE.read_text().split()[0])
    except (OSError, ValueError, IndexError):  # not Linux, or /proc is hidden
        return _USUAL_EPHEMERAL
