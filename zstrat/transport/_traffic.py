"""How many bytes this process has sent and got, by the lane that they took."""

from __future__ import annotations

from typing import Final, final


@final
class LaneTraffic:
    """The bytes of one lane. Whoever moves bytes adds to them, on the loop."""

    __slots__ = ("got", "sent")

    def __init__(self) -> None:
        self.sent = self.got = 0


SOCKET: Final = LaneTraffic()
"""Through sockets of ZeroMQ, TCP and ipc alike: headers, and bodies in frames."""
SHARED: Final = LaneTraffic()
"""Bodies that lie in shared memory."""

_LANES: Final = {"socket": SOCKET, "shm": SHARED}


def lanes() -> dict[str, dict[str, int]]:
    """``in`` and ``out`` of each lane, in bytes since the process began."""
    return {name: {"in": lane.got, "out": lane.sent} for name, lane in _LANES.items()}


def moved_bytes() -> tuple[int, int]:
    """Bytes that came in, and bytes that went out, by all lanes together."""
    return (
        sum([lane.got for lane in _LANES.values()]),
        sum([lane.sent for lane in _LANES.values()]),
    )
