"""Between two steps: holds the whole session at rest, as for a checkpoint.

A checkpoint is a *cut* of the session: each step is on all parameter servers or on
none, and so is each update that the program makes by itself. To get there nothing new
begins; what the workers have not begun comes back; what runs is waited for, and a step
whose worker is lost runs elsewhere first, as it may be there by half. Then the updates
of the program that are under way end, new ones wait, and a fence keeps zombies out.

The law of this file: from the end of `begin` to the last `end` no variable of the
session changes, except by its holder. On the loop thread.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar, final

from zstrat.wire import StepRun

if TYPE_CHECKING:
    from collections.abc import Callable

    from ._dispatch import Dispatcher
    from ._fences import Fences
    from ._queue import Queue

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SessionCut:
    """Which steps have had their effect: all below ``end``, and ``besides`` those of
    these runs; no other."""

    end: int = 1
    besides: tuple[StepRun, ...] = ()


def cut_of(queue: Queue) -> SessionCut:
    """The steps that have ended."""
    steps = queue.steps
    return SessionCut(steps.low_water, tuple(StepRun(*run) for run in steps.above))


class Gate:
    """Lets updates of the program pass, unless it is closed."""

    def __init__(self) -> None:
        self._open = asyncio.Event()
        self._open.set()
        self._empty = asyncio.Event()
        self._empty.set()
        self._inside = 0

    @property
    def is_closed(self) -> bool:
        return not self._open.is_set()

    async def through(self, start: Callable[[], asyncio.Future[T]]) -> T:
        """Starts an update when the gate is open; it is inside until it has ended.

        Cancellation: it is not started, or goes on, inside.
        """
        while self.is_closed:
            await self._open.wait()
        update = start()
        self._inside += 1
        self._empty.clear()
        update.add_done_callback(self._left)
        return await asyncio.shield(update)

    async def close(self) -> None:
        """Lets no update in, and waits until none is inside."""
        self._open.clear()
        await self._empty.wait()

    def open(self) -> None:
        self._open.set()

    def _left(self, _: object) -> None:
        self._inside -= 1
        if not self._inside:
            self._empty.set()


@final
class SessionPause:
    """Holds one session at rest. It knows the dispatcher of the moment."""

    def __init__(self, fences: Fences) -> None:
        self.gate = Gate()
        self._fences = fences
        self._holders: set[object] = set()
        self._dispatcher: Dispatcher | None = None

    @property
    def is_held(self) -> bool:
        """Whether the session is to be at rest."""
        return bool(self._holders)

    def attach(self, dispatcher: Dispatcher) -> None:
        """From now on this one hands steps out."""
        self._dispatcher = dispatcher
        if self._holders:
            dispatcher.hold()

    async def begin(self, holder: object) -> SessionCut:
        """Waits until all is at rest. `end` has to follow, whatever comes of it.

        Raises:
            PSUnavailableError: A parameter server is lost.
            UnavailableError: There is no worker that could end a step whose worker was
                lost.
            DeadlineExceededError: A parameter server does not answer.

        Cancellation: as an error.
        """
        self._holders.add(holder)
        dispatcher = self._dispatcher
        if dispatcher is None:
            await self.gate.close()
            return SessionCut()
        dispatcher.hold()
        await dispatcher.engine.rest_async()
        await self.gate.close()
        cut = cut_of(dispatcher.queue)
        await self._fences.up_to(cut.end, cut.besides)
        return cut

    def end(self, holder: object) -> None:
        """The holder has what it wanted. Ending twice is no error."""
        self._holders.discard(holder)
        if self._holders:
            return
        self.gate.open()
        if self._dispatcher is not None:
            self._dispatcher.release()
