"""Notifies the service manager of a daemon's state: systemd's notify protocol.

A notification is a datagram of ``KEY=value`` lines to the socket that ``NOTIFY_SOCKET``
names. Without that variable every call is a no-op.
"""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


class Notifier:
    """Sends states to the service manager; never blocks and never raises."""

    def __init__(self, env: Mapping[str, str]) -> None:
        path = env.get("NOTIFY_SOCKET", "")
        # "@" stands for the NUL byte of a name in the abstract namespace.
        self._address = "\0" + path[1:] if path.startswith("@") else path
        self._socket: socket.socket | None = None
        if self._address:
            kind = socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
            self._socket = socket.socket(socket.AF_UNIX, kind)
        self.watchdog = _interval(env.get("WATCHDOG_USEC", ""))
        """Seconds between two pings, half of the manager's limit; 0: no watchdog."""

    @property
    def is_connected(self) -> bool:
        return self._socket is not None

    def send(self, *states: str) -> None:
        """Sends lines such as ``READY=1`` in one datagram."""
        if self._socket is None:
            return
        try:
            self._socket.sendto("\n".join(states).encode(), self._address)
        except OSError:
            # The manager has ended or its queue is full. A lost STATUS is harmless; a
            # lost READY or WATCHDOG makes the manager restart us, which is right.
            return

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def _interval(microseconds: str) -> float:
    return int(microseconds) / 2e6 if microseconds.isdecimal() else 0.0
