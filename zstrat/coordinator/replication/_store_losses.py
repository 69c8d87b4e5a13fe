"""When a program hears that nobody serves a store: at once if what the store held is
gone, else when whoever has it had the time to be back. On the loop thread."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol, final

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from zstrat.coordinator.connecting import TaskSession


class LosingCluster(Protocol):
    """Who is told (`Cluster`)."""

    @property
    def ps(self) -> Sequence[TaskSession]:
        """The sessions with those that serve the stores, by number."""
        ...

    def store_lost(self, store: int, reason: str) -> None:
        """It is served nowhere; its task session says whether it is gone for good."""
        ...


@final
class StoreLosses:
    """Those of one session.

    Args:
        processes: All that may have a store.
        reconnect: Seconds that a connection that has broken has to come back.
        reported: Called behind each report.
    """

    def __init__(
        self,
        cluster: LosingCluster,
        processes: Sequence[TaskSession],
        reconnect: float,
        reported: Callable[[], None],
    ) -> None:
        self._cluster, self._processes = cluster, processes
        self._reconnect, self._reported = reconnect, reported
        self._due: dict[int, asyncio.TimerHandle] = {}

    def is_due(self, store: int) -> bool:
        """Whether a report of it is under way."""
        return store in self._due

    def report(self, store: int, reason: str) -> None:
        """Reports it now, unless whoever serves it is there."""
        self.cancel(store)
        task = self._cluster.ps[store]
        if not task.is_ready:
            task.give_up(reason)
            self._cluster.store_lost(store, reason)
        self._reported()

    def report_later(self, store: int, reason: str) -> None:
        """Reports it when who has it may not come back any more. As for a server
        without a copy: a line may be cut for so long, and a process says for how long
        it is away."""
        self.cancel(store)
        loop = asyncio.get_running_loop()
        until = [task.back_by for task in (*self._processes, *self._cluster.ps)]
        until.append(loop.time() + self._reconnect)
        self._due[store] = loop.call_at(max(until), self.report, store, reason)

    def cancel(self, store: int) -> None:
        """It is served again."""
        due = self._due.pop(store, None)
        if due is not None:
            due.cancel()

    def stop(self) -> None:
        """Reports nothing any more."""
        for store in list(self._due):
            self.cancel(store)
