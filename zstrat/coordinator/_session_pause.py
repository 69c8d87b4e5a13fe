"""`SessionPause`: pauses a session between two steps, for a checkpoint. On the loop.

A checkpoint is a *cut* of the session: each step is applied on all parameter servers or
on none, and so is each update of the program. To get there no closure starts; workers
give back those that they have not started; running ones end, and a step whose worker is
lost runs on another first, as it may be applied in part. Then updates of the program
that have started end, new ones wait, and a fence keeps out lost workers.

The law of this file: from the end of `begin` to the last `end`, only the holders change
variables of the session.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar, final

from zstrat.wire import StepRun

if TYPE_CHECKING:
    from collections.abc import Callable

    from ._dispatch import Dispatcher
    from ._fences import Fences
    from ._queue import Queue
    from .rounds import RoundClosing

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SessionCut:
    """The steps that have ended: all below ``end``, and the runs of steps ``besides``.
    Of these, ``waiting`` steps have contributed to a round that is not closed."""

    end: int = 1
    besides: tuple[StepRun, ...] = ()
    waiting: int = 0


def cut_of(queue: Queue) -> SessionCut:
    """Returns the steps that have ended."""
    steps = queue.steps
    return SessionCut(steps.low_water, tuple(StepRun(*run) for run in steps.above))


class Gate:
    """Holds back updates of the program while it is closed."""

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
        """Starts an update when the gate is open, and waits for its end.

        Cancellation: the update is not started, or continues.
        """
        # A loop, as another pause may have closed it before this task runs.
        while self.is_closed:
            await self._open.wait()
        update = start()
        self._inside += 1
        self._empty.clear()
        update.add_done_callback(self._left)
        return await asyncio.shield(update)

    async def close(self) -> None:
        """Stops new updates, and waits until those that have started have ended."""
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
    """Pauses one session, while any caller holds the pause."""

    def __init__(self, fences: Fences, rounds: RoundClosing) -> None:
        self.gate = Gate()
        self._fences, self._rounds = fences, rounds
        self._holders: set[object] = set()
        self._dispatcher: Dispatcher | None = None

    @property
    def is_held(self) -> bool:
        """Whether the session is paused, or about to be."""
        return bool(self._holders)

    def attach(self, dispatcher: Dispatcher) -> None:
        """Sets the dispatcher of the session, which a new coordinator has made."""
        self._dispatcher = dispatcher
        # A coordinator that is made during a pause must not start steps either.
        if self._holders:
            dispatcher.hold()

    async def begin(self, holder: object) -> SessionCut:
        """Waits until the session is paused; returns the steps that have ended. `end`
        has to follow in any case.

        Raises:
            PSUnavailableError: A parameter server is lost.
            UnavailableError: There is no worker for a step whose worker was lost; or a
                server that is away may lack a round that other servers have closed.
            DeadlineExceededError: A parameter server does not answer.

        Cancellation: like an error.
        """
        self._holders.add(holder)
        dispatcher = self._dispatcher
        if dispatcher is None:
            await self.gate.close()
            return SessionCut(self._rounds.first_step)
        dispatcher.hold()
        # First: a step that ends contributes to rounds, so these come to rest after the
        # steps.
        await dispatcher.engine.rest_async()
        await self._rounds.hold()
        await self.gate.close()
        # Nothing runs, so the cut does not change while the fence is raised.
        cut = replace(cut_of(dispatcher.queue), waiting=self._rounds.rounds.waiting)
        await self._fences.up_to(cut.end, cut.besides)
        return cut

    def end(self, holder: object) -> None:
        """Ends the pause of a holder. Idempotent."""
        self._holders.discard(holder)
        if self._holders:
            return
        self.gate.open()
        self._rounds.release()
        if self._dispatcher is not None:
            self._dispatcher.release()
