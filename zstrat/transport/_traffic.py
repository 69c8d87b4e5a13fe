"""How many bytes this process has sent and got, by the transport that they took."""

from __future__ import annotations

import threading
from typing import Final, final


@final
class TransportTraffic:
    """The bytes of one transport. Whoever moves bytes adds to them, on the loop."""

    __slots__ = ("got", "sent")

    def __init__(self) -> None:
        self.sent = self.got = 0


SOCKET: Final = TransportTraffic()
"""Through sockets of ZeroMQ, TCP and ipc alike: headers, and bodies in frames."""
_DIRECT: Final = TransportTraffic()
"""The same, by threads that drive sockets themselves."""
SHARED: Final = TransportTraffic()
"""Bodies in shared memory."""

_lock: Final = threading.Lock()


def count_direct(sent: int, got: int) -> None:
    """Adds what a thread has moved by sockets of its own; from any thread."""
    with _lock:
        _DIRECT.sent += sent
        _DIRECT.got += got


def transports() -> dict[str, dict[str, int]]:
    """``in`` and ``out`` of each transport, in bytes since the process began."""
    return {
        "socket": {"in": SOCKET.got + _DIRECT.got, "out": SOCKET.sent + _DIRECT.sent},
        "shm": {"in": SHARED.got, "out": SHARED.sent},
    }


def moved_bytes() -> tuple[int, int]:
    """Bytes that came in, and bytes that went out, by all transports together."""
    return (
        SOCKET.got + _DIRECT.got + SHARED.got,
        SOCKET.sent + _DIRECT.sent + SHARED.sent,
    )
