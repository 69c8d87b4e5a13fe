"""Answers libzmq's question whether a key may connect.

The authenticator sits on the loop of its endpoint, at an address that libzmq fixes per
context. Whatever goes wrong in it is a refusal, never an end: what it cannot decide it
denies, and should its socket be gone, `revive` opens another one; in between nobody is
admitted, because the sockets enforce their domain.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final

import zmq
from zmq.utils import z85

from ._curve import DOMAIN
from ._pump import Pump

_ADDRESS: Final = "inproc://zeromq.zap.01"
_LOG: Final = logging.getLogger("zstrat.transport")

Admits = Callable[[str], bool]


class Authenticator:
    """Admits the CURVE keys (Z85) that ``admits`` says yes to. Before the bind."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], admits: Admits) -> None:
        self._context, self._admits = context, admits
        self._pump: Pump | None = None
        self.refused = 0
        self.revive()

    def revive(self) -> None:
        """Makes sure that somebody answers."""
        if self._pump is not None and not self._pump.is_closed:
            return
        socket: zmq.Socket[bytes] = self._context.socket(zmq.REP)
        socket.linger = 0
        try:
            socket.bind(_ADDRESS)
        except zmq.ZMQError:  # the one before is not quite gone: at the next revival
            socket.close()
            return
        self._pump = Pump(socket, self._asked)

    def close(self) -> None:
        if self._pump is not None:
            self._pump.close(0)

    def _asked(self, frames: list[zmq.Frame]) -> None:
        assert self._pump is not None
        parts = [frame.bytes for frame in frames]
        request = parts[1] if len(parts) > 1 else b""
        key = self._admitted(parts)
        if key is None:
            self.refused += 1
            verdict = b"400", b"this key is not one of the cluster's", b""
        else:
            verdict = b"200", b"", key.encode()
        self._pump.send((b"1.0", request, *verdict, b""))

    def _admitted(self, parts: list[bytes]) -> str | None:
        match parts:
            case [b"1.0", _, domain, _, _, b"CURVE", raw] if domain == DOMAIN.encode():
                pass
            case _:
                return None
        try:
            key = z85.encode(raw).decode()
            return key if self._admits(key) else None
        except (
            Exception
        ):  # to the log and to the client as a refusal; the next one counts
            _LOG.exception("the check of a key failed: it is refused")
            return None
