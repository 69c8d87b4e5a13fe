"""The paths between processes: how long messages take, and what does not get through.

A `Way` is one direction of one connection. It delivers in order, or nothing more.
"""

from __future__ import annotations

import math
from collections import deque
from typing import TYPE_CHECKING, final

if TYPE_CHECKING:
    from collections.abc import Callable

    from ._world import VirtualLoop, World


@final
class Weather:
    """How the paths between processes are. Seconds.

    Args:
        delay: The shortest time on the way; most take a little more, few much more.
    """

    def __init__(self, world: World, delay: float) -> None:
        self._world, self._delay = world, delay
        self._slow: dict[tuple[str, str], float] = {}
        self._blocked: dict[tuple[str, str], float] = {}
        self.ways: list[Way] = []

    def delay(self, source: str, target: str) -> float:
        """How long something takes that leaves now."""
        draw = self._world.random.random
        slow = self._slow.get((source, target), 1.0)
        rare = 20.0 if draw() < 0.02 else 1.0
        return self._delay * slow * rare * (1.0 - math.log(1.0 - draw()))

    def is_blocked(self, source: str, target: str) -> bool:
        return (source, target) in self._blocked

    def block(self, source: str, target: str) -> None:
        """Nothing gets through, and nobody is told."""
        self._blocked[source, target] = self._world.now

    def free(self, source: str, target: str) -> None:
        """What was sent meanwhile is sent again by TCP."""
        if self._blocked.pop((source, target), None) is None:
            return
        for way in self.ways:
            if (way.source, way.target) == (source, target):
                way.resend()

    def slow(self, source: str, target: str, factor: float) -> None:
        """All takes so many times as long from now on."""
        self._slow[source, target] = factor


@final
class Way:
    """One direction of a connection: what was sent arrives in order, at ``loop``.

    Args:
        line: The descriptor of the connection.
        note: Told what arrives.
    """

    def __init__(
        self,
        weather: Weather,
        source: str,
        target: str,
        loop: VirtualLoop,
        line: int,
        note: Callable[[Way, tuple[bytes, ...]], None],
    ) -> None:
        self._weather, self.source, self.target = weather, source, target
        self.loop, self.line, self._note = loop, line, note
        self._free_at = 0.0
        self._held: deque[tuple[Callable[[], None], tuple[bytes, ...]]] = deque()
        self.under_way = 0
        """Messages that have not arrived."""
        self.is_broken = False
        weather.ways.append(self)

    def send(self, arrives: Callable[[], None], frames: tuple[bytes, ...] = ()) -> None:
        """Something is sent; ``arrives`` is called when it is there."""
        if self.is_broken:
            return
        self.under_way += 1
        if self._held or self._weather.is_blocked(self.source, self.target):
            self._held.append((arrives, frames))
        else:
            self._launch(arrives, frames)

    def resend(self) -> None:
        """The path is free again."""
        held, self._held = self._held, deque()
        for arrives, frames in held:
            self._launch(arrives, frames)

    def cut(self) -> None:
        """What has not arrived is lost."""
        self.is_broken = True
        self._held.clear()

    def forget(self) -> None:
        """The connection is over: nothing more goes this way."""
        self.cut()
        if self in self._weather.ways:
            self._weather.ways.remove(self)

    def _launch(self, arrives: Callable[[], None], frames: tuple[bytes, ...]) -> None:
        world = self.loop.world
        delay = self._weather.delay(self.source, self.target)
        self._free_at = max(self._free_at, world.now + delay)
        self.loop.arrive(self._free_at, self._arrive, arrives, frames)

    def _arrive(self, arrives: Callable[[], None], frames: tuple[bytes, ...]) -> None:
        self.under_way -= 1
        if not self.is_broken:
            self._note(self, frames)
            arrives()
