"""Sockets that a forked process inherits, and gives up.

A child that outlives its parent would keep the parent's port and connections: the next
process of the task could not bind, and peers would not learn that this one has ended.
libzmq has no call that says which descriptors are its own, so they are known by the
addresses of our sockets, at either end.

A descriptor is not closed, but becomes one of ``/dev/null``: code of the parent that
still runs in the child may close it, and must not find another file there.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from ._address import parse
from ._listener import borrowed

if TYPE_CHECKING:
    from collections.abc import Iterable

    import zmq

SocketName = tuple[str, int]
"""A numeric host, "" for all interfaces, and a port; or a path and 0."""

_addresses: Final[weakref.WeakKeyDictionary[zmq.Socket[bytes], str]] = (
    weakref.WeakKeyDictionary()
)


def note_address(socket: zmq.Socket[bytes], endpoint: str) -> None:
    """The socket is bound or connected there."""
    _addresses[socket] = endpoint


def give_up(descriptors: Iterable[int]) -> None:
    """Lets go of descriptors that are the parent's."""
    nowhere = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for descriptor in descriptors:
        os.dup2(nowhere, descriptor, inheritable=False)
    os.close(nowhere)


def _give_up_sockets() -> None:
    """After a fork: those of libzmq, whose threads are the parent's."""
    own = {
        _name_in(endpoint)
        for socket, endpoint in list(_addresses.items())
        if not socket.closed
    }
    _addresses.clear()
    if own:
        # Of Linux and of macOS.
        found = [int(number) for number in os.listdir("/dev/fd")]
        give_up([each for each in found if not own.isdisjoint(_names_of(each))])


def _name_in(endpoint: str) -> SocketName:
    address = parse(endpoint)
    return _plain(address.host), address.port


def _names_of(descriptor: int) -> set[SocketName]:
    """What a socket for streams is called at its ends; nothing, if it is no such."""
    found: set[SocketName] = set()
    with suppress(OSError), borrowed(descriptor) as line:
        if line.type == socket.SOCK_STREAM:
            found = _names(line.getsockname())
            here = {("", port) for _, port in found if port}
            found |= here
            found |= _names(line.getpeername())
    return found


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
