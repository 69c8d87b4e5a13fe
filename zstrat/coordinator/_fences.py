"""Tells all parameter servers that steps are over, even if a worker still runs one.

A worker that was lost may be frozen, or cut off from us alone, and push when it wakes
up. Behind a *fence* what it pushes has no effect; before it is up, the servers finish
what was pushed and say which steps they have applied.

A server remembers which closures have pushed, and may forget those that are over for
ever; it is told how far they are, by *marks*. The holder of the session alone says so:
what a worker says of it is not believed.

On the loop thread. The law of this file: each fence ends, with an answer of every
server or a reason.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final, final

from zstrat.errors import (
    BusyError,
    ClosedError,
    DeadlineExceededError,
    NotPrimaryError,
    PeerLostError,
    PSUnavailableError,
)
from zstrat.wire import Fence, Fenced, RaiseMark, StepRun

from ._queue import Effect

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from zstrat.ps import PsClient

    from .connecting import TaskSession

log = logging.getLogger("zstrat.coordinator")

STEPS_PER_MESSAGE: Final = 4096
"""Steps, or runs of them, that one message names: they fit a header by far."""
LOOK_AGAIN_SECONDS: Final = 1.0
"""Seconds between two looks whether a server that does not answer is lost for good."""


@final
class Fences:
    """Raises the fences of one session.

    Args:
        client: Asks the parameter servers.
        ps: The sessions with them.
        absent: By store, why a server is lost for good.
        timeout: Seconds in which a server has to answer.
    """

    def __init__(
        self,
        session: int,
        client: PsClient,
        ps: Sequence[TaskSession],
        absent: Mapping[int, str],
        timeout: float,
    ) -> None:
        self._session, self._client = session, client
        self._ps, self._absent = ps, absent
        self._timeout = timeout
        self._raising: set[asyncio.Task[None]] = set()

    def enter(self, session: int) -> None:
        """The servers are in another session, in which nothing was pushed."""
        self._session = session

    def raise_to(
        self,
        end: int,
        doubtful: Sequence[int],
        told: Callable[[Mapping[int, Effect]], object],
    ) -> None:
        """All steps below ``end`` are over.

        Args:
            doubtful: Steps that a lost worker may have pushed.
            told: Called when all servers have answered or are lost, with what is known
                of those that were applied or may have been.
        """

        async def raising() -> None:
            told(await self._ask(end, [], doubtful))

        task = asyncio.get_running_loop().create_task(raising(), name=f"fence {end}")
        self._raising.add(task)  # cancelled by stop()
        task.add_done_callback(self._raising.discard)

    async def up_to(self, low_water: int, over: Iterable[StepRun]) -> None:
        """All steps below the mark, and these, are over.

        Raises:
            PSUnavailableError: A server is lost.
            DeadlineExceededError: A server does not answer.

        Cancellation: some servers may know.
        """
        runs = list(over)
        await asyncio.gather(
            *(self._one(task, low_water, runs, []) for task in self._ps)
        )

    async def stop(self) -> None:
        """Gives up those that are under way."""
        for task in self._raising:
            task.cancel()
        await asyncio.gather(*self._raising, return_exceptions=True)

    async def _ask(
        self, low_water: int, over: list[StepRun], doubtful: Sequence[int]
    ) -> dict[int, Effect]:
        asked = list(doubtful)
        outcomes = await asyncio.gather(
            *(self._one(task, low_water, over, asked) for task in self._ps),
            return_exceptions=True,
        )
        applied: dict[int, list[str]] = {step: [] for step in asked}
        silent: list[str] = []
        for task, outcome in zip(self._ps, outcomes, strict=True):
            if isinstance(outcome, BaseException):
                gone = isinstance(outcome, PSUnavailableError)  # which was told
                level = logging.INFO if gone else logging.WARNING
                log.log(level, "%s may still take pushes: %s", task.name, outcome)
                silent.append(task.name)
                continue
            for step in outcome:
                applied[step].append(task.name)
        return {
            step: Effect(self._words(names, silent), is_certain=bool(names))
            for step, names in applied.items()
            if names or silent
        }

    def _words(self, applied: Sequence[str], silent: Sequence[str]) -> str:
        """What is known of a step's updates."""
        others = [
            task.name
            for task in self._ps
            if task.name not in applied and task.name not in silent
        ]
        words = []
        if applied:
            words.append(f"were applied on {', '.join(applied)}")
            if others:
                words.append(f"were not applied on {', '.join(others)}")
        if silent:
            words.append(
                f"may have been applied on {', '.join(silent)}, which cannot be asked"
            )
        return "; ".join(words)

    async def _one(
        self, task: TaskSession, low_water: int, over: list[StepRun], asked: list[int]
    ) -> list[int]:
        """Which of the steps asked about a server has applied."""
        deadline = asyncio.get_running_loop().time() + self._timeout
        applied: list[int] = []
        # All are over with the first message, and then it is asked; the mark goes with
        # the last one, as the server forgets what is below.
        runs = [StepRun(0, low_water), *over]
        most = max(len(runs), len(asked))
        for at in range(0, most, STEPS_PER_MESSAGE):
            end = at + STEPS_PER_MESSAGE
            mark = low_water if end >= most else 0
            message = Fence(self._session, mark, runs[at:end], asked[at:end])
            applied += await self._answer(task, message, deadline)
        return applied

    async def _answer(
        self, task: TaskSession, fence: Fence, deadline: float
    ) -> list[int]:
        """Asks through the client, which asks again if the line was cut or another
        process serves the store, and again if the server was lost and is back: saying
        it twice is as good as once. It stays behind updates of the program that wait
        for the line."""
        asked = [(task.place, fence)]
        while True:
            if task.place in self._absent:
                raise PSUnavailableError(task.name, self._absent[task.place])
            try:
                (answer,) = await self._client.each(asked, Fenced, deadline=deadline)
            except PSUnavailableError:
                await self._returned(task, deadline)
                continue
            return answer.applied

    async def _returned(self, task: TaskSession, deadline: float) -> None:
        """Waits a moment for a server that was lost.

        Raises:
            DeadlineExceededError: It did not return in time.
        """
        now = asyncio.get_running_loop().time()
        try:
            await task.wait_ready(min(deadline, now + LOOK_AGAIN_SECONDS))
        except DeadlineExceededError:
            if now + LOOK_AGAIN_SECONDS >= deadline:
                raise
        except NotPrimaryError:
            pass  # the line has the question wait until it is known who serves


INTERVAL: Final = 0.25
"""Seconds between two marks to each server, while closures end. The quickest closures
are some ten thousand in that time, a hundredth of what a server can remember."""


@final
class Marking:
    """Raises the marks of one session on its servers. On the loop."""

    def __init__(self, session: int, tasks: Sequence[TaskSession]) -> None:
        self._session, self._tasks = session, tasks
        self._next_at = 0.0

    def enter(self, session: int) -> None:
        """As `Fences.enter`."""
        self._session = session

    def tell(self, low_water: int, now: float) -> None:
        """All closures below are over. A word that is lost is made good by the next."""
        if now < self._next_at:
            return
        self._next_at = now + INTERVAL
        mark = RaiseMark(self._session, low_water)
        for task in self._tasks:
            if not task.is_ready:
                continue
            try:
                task.link.notify(mark)
            except (PeerLostError, BusyError, ClosedError):  # its session tells of it
                continue
