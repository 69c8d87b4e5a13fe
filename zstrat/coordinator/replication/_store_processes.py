"""The sessions on the processes that hold stores and copies, by index; and a
description of these stores, for the log, for errors and for metrics (`CopiesStatus`).

A process keeps its index as long as the program's session lasts: the session on a
removed process is closed, and stays in the list. Each process has a *life*, a number
that grows when the process loses its data. On the loop thread.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Final, final

from zstrat.coordinator.connecting import TaskSession, objection_to
from zstrat.errors import ZstratError
from zstrat.wire import Inspect

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from zstrat.config import Timeouts
    from zstrat.coordinator.connecting import TaskSessionEvents
    from zstrat.transport import MakeTaskLink
    from zstrat.wire import CloseSession, OpenSession, PlainTree

    from ._placement import StorePlacement
    from ._replicated_store import ReplicatedStore


log = logging.getLogger("zstrat.coordinator")


@final
class StoreProcesses:
    """The sessions on all processes of one program.

    Args:
        events: Called by the sessions.
        opening: The message that opens the program's session on each process, except
            for the index.
    """

    def __init__(
        self,
        events: TaskSessionEvents,
        opening: OpenSession,
        timeouts: Timeouts,
        make_link: MakeTaskLink,
    ) -> None:
        self._events, self._opening = events, opening
        self._timeouts, self._make_link = timeouts, make_link
        self._session = opening.session
        self.sessions: Final[list[TaskSession]] = []
        self.lives: Final[list[int]] = []
        self._served_elsewhere: Final[list[list[int]]] = []
        """By index of the process, as in `OpenSession`: the view since which another
        process serves the store that this process has by itself; empty if none does."""

    def add(self, number: int, index: int, address: str) -> TaskSession:
        """Adds a process with the next index. Its session is not started yet.

        Args:
            number: Task number of the process.
        """
        # The message holds this list itself, and is encoded when it is sent.
        views: list[int] = []
        opening = replace(
            self._opening, session=self._session, index=index, views=views
        )
        session = TaskSession(
            "ps",
            number,
            index,
            address,
            opening,
            self._make_link,
            self._events,
            # No ``grace``: `Replication` decides when a store without a process counts
            # as lost.
            one_life=True,
            turn=self._timeouts.turn,
            notice=self._timeouts.notice,
            moves=True,
            objection=lambda task, hello, _: objection_to(
                task, hello, None, self.sessions, None
            ),
        )
        self.sessions.append(session)
        self.lives.append(0)
        self._served_elsewhere.append(views)
        return session

    def keep_origin(self, origin: int) -> None:
        """Sets the number from which keys are counted, also for processes added later:
        copies with different numbers are taken for parts of different sessions."""
        self._opening = replace(self._opening, origin=origin)
        for session in self.sessions:
            session.keep_origin(origin)

    def take_back(self, process: TaskSession, view: int | None) -> None:
        """Lets a process that has lost its data enter the session again, for new
        copies.

        Args:
            view: The view since which another process serves the store that this one
                has by itself; None: no other process does. The view is in the message
                that opens the session: without it the process would answer for a moment
                that the store has no variables.
        """
        self._served_elsewhere[process.place][:] = [] if view is None else [view]
        process.renew(self._session, ())

    def renew(self, session: int, close_messages: Sequence[CloseSession]) -> None:
        """Moves all processes to another session, where each begins with the store that
        it has by itself."""
        self._session = session
        for views in self._served_elsewhere:
            views.clear()
        for process in self.sessions:
            process.renew(session, close_messages)

    async def leave(self, process: TaskSession, timeout: float) -> None:
        """Closes the session on a process, and waits for its answer.

        Cancellation: the session is closed without waiting for the answer.
        """
        # Before `leave`, which ends that.
        was_ready = process.is_ready
        process.leave()
        try:
            if was_ready:
                await asyncio.wait([process.close_session(timeout)])
        finally:
            await process.close()


@final
class CopiesStatus:
    """Describes all stores of a session, for messages and metrics.

    Args:
        servers: The sessions on the servers of the stores, by store.
        processes: The sessions on the processes, by index.
    """

    def __init__(
        self,
        placement: StorePlacement,
        servers: Sequence[TaskSession],
        processes: Sequence[TaskSession],
    ) -> None:
        self._placement, self._replicas = placement, placement.replicas
        self._servers, self._processes = servers, processes
        # At the start each store gets its first backup: no news, so INFO.
        bare = len(placement.stores) * placement.replicas
        self._bare = dict.fromkeys(range(bare), logging.INFO)
        """Stores without a backup, each with the log level for the message when it gets
        one."""

    def log_changes(self) -> None:
        """Logs which stores got or lost a backup since the last call."""
        if self._replicas:
            for store in self._placement.stores:
                self._log_change(store)

    def reason_with_process(self, number: int, reason: str) -> str:
        """Returns the reason of a lost store. Adds the name of the process that served
        the store, if that is not the one named after it."""
        store = self._placement.stores[number]
        process = self._processes[store.primary.process].name
        if not store.is_primary_known or process == self._servers[number].name:
            return reason
        return f"its store was in the process of {process}: {reason}"

    def words(self) -> str:
        """Describes the state of each store without a backup, for messages."""
        return "; ".join(
            f"the store of {self._servers[store.number].name}: {store.phase.value}"
            f"{f' ({store.reason})' if store.reason else ''}"
            for store in self._placement.stores
            if not store.is_paired
        )

    def statistics(self) -> dict[str, PlainTree]:
        """Returns the numbers of moves and failovers, the number of stores that are not
        known to have a backup, and the process of each store. Callable from any
        thread."""
        placement = self._placement
        counts: dict[str, PlainTree] = {"stores_moved": placement.moves}
        if self._replicas:
            counts["failovers"] = placement.failovers
            # A process that was killed a moment ago still counts as having its copies:
            # only a link that is alive says that they are there.
            alive = {n for n, each in enumerate(self._processes) if each.is_heard}
            counts["stores_without_backup"] = self._not_known_whole(alive)
        return {**counts, "stores": [self._entry(store) for store in placement.stores]}

    async def ask_without_backup(self, timeout: float) -> int:
        """Asks all processes whether they live, and returns the number of stores
        without two living copies: a process that was killed a moment ago may not be
        missed yet.

        Args:
            timeout: Seconds that a process has to answer.

        Cancellation: nothing has changed.
        """
        deadline = asyncio.get_running_loop().time() + timeout
        answers = await asyncio.gather(
            *(_answers(process, deadline) for process in self._processes)
        )
        return self._not_known_whole({n for n, live in enumerate(answers) if live})

    def _not_known_whole(self, live: Collection[int]) -> int:
        """Returns the number of stores that are not known to have two complete copies.

        Args:
            live: The indices of the processes that are known to live. A process that
                was added since they were asked is not among them, and may have a copy
                already.
        """
        return sum(
            not store.is_paired
            or not all(copy.process in live for copy in store.copies)
            for store in self._placement.stores
        )

    def _is_unknown(self, store: ReplicatedStore) -> bool:
        """Returns whether the store has two complete copies, and the process of one of
        them does not answer."""
        alive = all(self._processes[copy.process].is_heard for copy in store.copies)
        return store.is_paired and not alive

    def _log_change(self, store: ReplicatedStore) -> None:
        name, bare = self._servers[store.number].name, self._bare
        if store.is_paired and store.number in bare:
            level = bare.pop(store.number)
            assert store.backup is not None, store
            at = self._processes[store.backup.process].name
            words = "the store of %s has a backup, in the process of %s"
            log.log(level, words, name, at)
        elif not store.is_paired and store.number not in bare:
            bare[store.number] = logging.WARNING
            log.warning(
                "the store of %s has no backup until another process has taken what it "
                "holds (%s)",
                name,
                store.reason,
            )

    def _entry(self, store: ReplicatedStore) -> PlainTree:
        backup = store.backup
        return {
            "store": store.number,
            "process": self._processes[store.primary.process].name,
            "address": store.primary.address,
            "backup": "" if backup is None else self._processes[backup.process].name,
            "state": "unknown" if self._is_unknown(store) else store.phase.value,
        }


async def _answers(process: TaskSession, deadline: float) -> bool:
    """Returns whether a process answers before a deadline (loop time)."""
    if not process.is_heard:
        return False
    try:
        async with asyncio.timeout_at(deadline):
            await process.link.submit(Inspect(), deadline=deadline)
    except (ZstratError, TimeoutError):
        return False
    return process.is_heard
