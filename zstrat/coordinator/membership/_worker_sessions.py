"""The sessions with the workers of a cluster, which come and go while it trains.

A worker that was let go keeps its place in the list, closed; a newcomer that takes its
place replaces it there. Law of the file: only this file changes the list of workers.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, Protocol, final

if TYPE_CHECKING:
    from zstrat.coordinator.connecting import TaskSession

GOODBYE_SECONDS: Final = 2.0
"""For a worker that is let go to hear that its session is over."""


class MakeWorkerSession(Protocol):
    """Makes our session on a worker; it is not started yet."""

    def __call__(self, task_number: int, place: int, address: str) -> TaskSession: ...


class WorkerDispatcher(Protocol):
    """What gives closures to workers (`Dispatcher`)."""

    def admit(self, task: TaskSession) -> None:
        """A worker may come: a new one, or another process in the place of one."""
        ...

    async def retire_worker(
        self, task: TaskSession, reason: str, patience: float
    ) -> None:
        """Gives a worker nothing any more, and waits until it has ended what it runs,
        or is lost, or ``patience`` seconds have passed."""
        ...

    def remove_worker(self, task: TaskSession, reason: str, *, for_good: bool) -> None:
        """A worker goes: the others get what it has. Unless ``for_good`` its place is
        kept, for a process at another address."""
        ...


@final
class WorkerSessions:
    """Our sessions on the workers of one cluster. On the loop."""

    def __init__(self, tasks: list[TaskSession], make: MakeWorkerSession) -> None:
        self.tasks: Final = tasks
        """By place; the sessions on workers that were let go are closed, and stay."""
        self.dispatcher: WorkerDispatcher | None = None
        """Told of newcomers, and of workers that go."""
        self._make = make
        self._is_closing = False

    def attach(self, dispatcher: WorkerDispatcher) -> None:
        """From now on this dispatcher gives closures to the workers."""
        self.dispatcher = dispatcher
        for task in self.tasks:
            if not task.is_closed:
                dispatcher.admit(task)

    def admit(self, place: int, task_number: int, address: str) -> TaskSession:
        """Begins to greet a worker, whose per-worker resources are built before its
        first closure."""
        task = self._make(task_number, place, address)
        self.tasks[place : place + 1] = [task]
        if self.dispatcher is not None:
            self.dispatcher.admit(task)
        if not self._is_closing:
            task.start()
        return task

    async def release(
        self, task: TaskSession, reason: str, patience: float | None
    ) -> None:
        """Lets a worker go: what it has runs to its end there, or on another worker
        after ``patience`` seconds. None: what it has runs on another worker at once,
        and its place is kept.

        Cancellation: nothing is given to it any more.
        """
        if task.is_closed:
            return
        if self.dispatcher is not None:
            if patience is not None:
                await self.dispatcher.retire_worker(task, reason, patience)
            # It is not lost: nothing that it ran is suspected of having killed it.
            task.lives_on = task.is_moved = True
            self.dispatcher.remove_worker(task, reason, for_good=patience is not None)
        if task.is_ready and patience is not None:
            answer = task.say_goodbye(GOODBYE_SECONDS)
            task.leave()  # before it ends: that is no loss
            await asyncio.wait([answer])
        await task.close()

    def stop_starting(self) -> None:
        """The session is being closed: a newcomer is not greeted any more."""
        self._is_closing = True
