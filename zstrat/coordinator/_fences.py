"""Fences: close steps on all parameter servers, even if a lost worker still runs one.

A lost worker may be frozen, or cut off from the program only, and push later. After a
*fence* its pushes have no effect. To raise a fence, the servers finish the pushes that
they have, and answer which steps they applied.

A server remembers which closures have pushed. *Marks* tell it a step below which all
have ended, so that it can forget them. Only the program sends marks; a worker's are
ignored.

On the loop thread. The law of this file: each fence ends, with an answer of every
server or a reason.
"""

from __future__ import annotations

import asyncio
import contextlib
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
"""The most steps, or runs of steps, in one message: they easily fit a header."""
LOOK_AGAIN_SECONDS: Final = 1.0
"""Seconds between two checks whether a server that does not answer is lost for good."""
INTERVAL: Final = 0.25
"""Seconds between two marks (the step below which all have ended) to each server. At
most about ten thousand closures end in that time, a hundredth of what a server can
remember."""


@final
class Fences:
    """Raises the fences of one session, and sends its marks.

    Args:
        client: The client of the parameter servers.
        ps: The sessions with the parameter servers.
        absent: By store, why a server is lost for good.
        timeout: Seconds for a server to answer.
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
        self.mark_due = 0.0
        """Loop time from which on the next mark is sent."""

    def enter(self, session: int) -> None:
        """Makes later fences and marks belong to another session, in which nothing was
        pushed yet."""
        self._session = session

    def send_mark(self, low_water: int, now: float) -> None:
        """Sends ``low_water``, the step below which all have ended, to all servers,
        unless a mark was sent a moment ago. A lost mark does no harm, as the next one
        replaces it."""
        if now < self.mark_due:
            return
        self.mark_due = now + INTERVAL
        mark = RaiseMark(self._session, low_water)
        for task in self._ps:
            if task.is_ready:
                # Its session reports the loss of a server.
                with contextlib.suppress(PeerLostError, BusyError, ClosedError):
                    task.link.notify(mark)

    def raise_to(
        self,
        end: int,
        doubtful: Sequence[int],
        done: Callable[[Mapping[int, Effect]], object],
    ) -> None:
        """Starts to close all steps below ``end``.

        Args:
            doubtful: Steps that a lost worker may have pushed.
            done: Called when all servers have answered or are lost, with those of the
                doubtful steps that were, or may have been, applied, and what is known
                of each.
        """

        async def raise_fence() -> None:
            done(await self._ask(end, list(doubtful)))

        task = asyncio.get_running_loop().create_task(
            raise_fence(), name=f"fence {end}"
        )
        self._raising.add(task)  # cancelled by stop()
        task.add_done_callback(self._raising.discard)

    async def up_to(self, low_water: int, over: Iterable[StepRun]) -> None:
        """Closes all steps below ``low_water``, and the runs of steps ``over``, on all
        servers.

        Raises:
            PSUnavailableError: A server is lost.
            DeadlineExceededError: A server does not answer.

        Cancellation: some servers may have closed the steps.
        """
        runs = list(over)
        await asyncio.gather(
            *(self._one(task, low_water, runs, []) for task in self._ps)
        )

    async def stop(self) -> None:
        """Cancels the fences that are being raised."""
        for task in self._raising:
            task.cancel()
        await asyncio.gather(*self._raising, return_exceptions=True)

    async def _ask(self, end: int, asked: list[int]) -> dict[int, Effect]:
        """Closes all steps below ``end`` on every server. Returns those of the steps
        ``asked`` that were, or may have been, applied, and what is known of each."""
        # All are asked, also when one of them fails: each answer makes a step less
        # doubtful.
        outcomes = await asyncio.gather(
            *(self._one(task, end, [], asked) for task in self._ps),
            return_exceptions=True,
        )
        applied: dict[int, list[str]] = {step: [] for step in asked}
        silent: list[str] = []
        for task, outcome in zip(self._ps, outcomes, strict=True):
            if isinstance(outcome, BaseException):
                is_lost = isinstance(outcome, PSUnavailableError)  # reported before
                level = logging.INFO if is_lost else logging.WARNING
                log.log(level, "%s may still take pushes: %s", task.name, outcome)
                silent.append(task.name)
                continue
            for step in outcome:
                applied[step].append(task.name)
        return {
            step: Effect(self._describe(names, silent), is_certain=bool(names))
            for step, names in applied.items()
            if names or silent
        }

    def _describe(self, applied: Sequence[str], silent: Sequence[str]) -> str:
        """Describes what is known of a step's updates: applied on some servers, while
        the ``silent`` servers have not answered."""
        others = [
            task.name
            for task in self._ps
            if task.name not in applied and task.name not in silent
        ]
        parts = []
        if applied:
            parts.append(f"were applied on {', '.join(applied)}")
            if others:
                parts.append(f"were not applied on {', '.join(others)}")
        if silent:
            parts.append(
                f"may have been applied on {', '.join(silent)}, which cannot be asked"
            )
        return "; ".join(parts)

    async def _one(
        self, task: TaskSession, low_water: int, over: list[StepRun], asked: list[int]
    ) -> list[int]:
        """Closes steps on one server; returns which of the steps ``asked`` it
        applied."""
        # One deadline for all messages to this server, however often they are repeated.
        deadline = asyncio.get_running_loop().time() + self._timeout
        applied: list[int] = []
        # The first message closes all steps. The last one has the mark, as the server
        # then forgets the steps below it.
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
        """Sends a fence through the client, and returns the steps that the server
        applied. The client repeats the request after a broken connection, after a
        failover, or when a lost server returns: fences are idempotent. The fence stays
        in order with the updates of the program."""
        asked = [(task.place, fence)]
        while True:
            if task.place in self._absent:
                reason = self._absent[task.place]
                raise PSUnavailableError(task.name, reason, task.gone)
            try:
                (answer,) = await self._client.each(asked, Fenced, deadline=deadline)
            except PSUnavailableError:
                # The client fails at once while the server is lost: without a wait this
                # would spin.
                await self._returned(task, deadline)
                continue
            return answer.applied

    async def _returned(self, task: TaskSession, deadline: float) -> None:
        """Waits a moment for a lost server to return.

        Raises:
            DeadlineExceededError: The server did not return until the deadline.
        """
        now = asyncio.get_running_loop().time()
        try:
            await task.wait_ready(min(deadline, now + LOOK_AGAIN_SECONDS))
        except DeadlineExceededError:
            if now + LOOK_AGAIN_SECONDS >= deadline:
                raise
        except NotPrimaryError:
            pass  # the client waits until it is known which process serves
