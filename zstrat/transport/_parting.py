"""The last words of an endpoint: said, and waited for until they were heard.

A socket that is closed with unread data resets its connection, and a goodbye may be
lost with it. So the peers hang up first.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING

from ._socket import LINGER

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ._remote import Connection


class Parting:
    """Waits for connections, by their descriptors, to be gone."""

    def __init__(self) -> None:
        self._left: set[int] = set()
        self._over = asyncio.Event()

    async def say(self, connections: Sequence[Connection], reason: str) -> None:
        """Says goodbye, and waits until the peers have hung up: at most `LINGER`.

        Cancellation: it was said.
        """
        self._left = {connection.accepted.descriptor for connection in connections}
        for connection in connections:
            connection.outlet.peer.leave(reason)
            connection.outlet.flush()
        if self._left:
            with suppress(TimeoutError):
                async with asyncio.timeout(LINGER):
                    await self._over.wait()

    def gone(self, descriptor: int) -> None:
        """A connection ended."""
        if descriptor in self._left:
            self._left.remove(descriptor)
            if not self._left:
                self._over.set()
