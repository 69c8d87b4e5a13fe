"""What a daemon tells its service manager: systemd's notify protocol.

A datagram of ``KEY=value`` lines to the socket that ``NOTIFY_SOCKET`` names. Without
that variable every call is a no-op, so a daemon need not ask who started it.
"""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


class Notifier:
    """Sends states; never waits and never fails the daemon."""

    def __init__(self, env: Mapping[str, str]) -> None:
        path = env.get("NOTIFY_SOCKET", "")
        # "@" stands for the NUL byte of a name in the abstract namespace.
        self._address = "\0" + path[1:] if path.startswith("@") else path
        self._socket: socket.socket | None = None
        if self._address:
            kind = socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK
            self._socket = socket.socket(socket.AF_UNIX, kind)
        self.watchdog = _interval(env.get("WATCHDOG_USEC", ""))
        """Seconds between two pings (half of what the manager allows), 0 for none."""

    @property
    def is_heard(self) -> bool:
        return self._socket is not None

    def send(self, *states: str) -> None:
        """Sends lines such as ``READY=1`` in one datagram."""
        if self._socket is None:
            return
        try:
            self._socket.sendto("\n".join(states).encode(), self._address)
        except OSError:
            # The manager is gone or its queue is full. A lost STATUS costs nothing; a
            # lost READY or WATCHDOG makes the manager act, which is right.
            return

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def _interval(microseconds: str) -> float:
    return int(microseconds) / 2e6 if microseconds.isdecimal() else 0.0
