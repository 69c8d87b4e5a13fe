"""`ClusterSession`: a program's session with its cluster, from connect to close.

A strategy owns one, which `connect_session` and its kin make. The `Cluster`, which runs
on the loop, has no reference to the `ClusterSession`: dropping the strategy closes the
session.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import threading
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar, cast, final

from zstrat.errors import (
    BusyError,
    ClosedError,
    ForkedError,
    NotFoundError,
    PeerLostError,
    PSUnavailableError,
    StaleSessionError,
)
from zstrat.wire import RestartWindows

from ._resources import BUILD_DEADLINE
from ._servers import ParameterServers
from ._waiting import UserCall

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine, Mapping

    from zstrat.config import Settings
    from zstrat.errors import ZstratError
    from zstrat.ps import PsClient
    from zstrat.transport import Portal
    from zstrat.wire import Message, PlainTree

    from ._cluster import Cluster
    from ._session_pause import SessionCut
    from .recovery import RestorePoint
    from .rounds import RestoredRounds

log = logging.getLogger("zstrat.coordinator")

_CLOSED: Final = (
    "the strategy was closed; make a new one, and its variables in its scope"
)

T = TypeVar("T")


@final
class _ForkedLock:
    """The lock of a session in a forked process, which has no loop: raises an error
    instead of waiting for the loop of the parent."""

    def __enter__(self) -> NoReturn:
        raise ForkedError("a strategy that works with parameter servers")

    def __exit__(self, *_: object) -> None: ...


@final
class ClusterSession:
    """A session with the tasks of a cluster.

    Requests to the parameter servers are coroutines of ``servers``, which run on the
    loop that owns the links: `run` blocks until one has ended, `run_async` awaits it.

    Raises, `run` and `run_async`:
        PSUnavailableError: A parameter server that the call needs is lost.
        ClosedError: The session is closed.
        DeadlineExceededError: There was no answer within ``timeouts.request``.
    """

    def __init__(self, cluster: Cluster, portal: Portal, settings: Settings) -> None:
        self.cluster, self.portal, self.settings = cluster, portal, settings
        self.lock = threading.Lock()
        self.servers = ParameterServers(cluster, settings.timeouts.request)
        self.core: Any = None
        """The `CoordinatorCore` of this session, if there is one. Guarded by `lock`."""
        self.staleness: int | None = None
        """The most steps by which a worker may be ahead of the slowest one; None: any
        number."""
        self.taken_over: str | None = None
        """Message that names the strategy of this program that took the cluster over;
        None if none did."""
        self.next_step = 1
        """Number of the next coordinator's first step: step numbers are unique in a
        session."""
        # However the portal is closed, the sessions on the tasks are closed before.
        portal.at_close(partial(cluster.close, False))
        # `retire` takes no lock and does not wait: a finalizer runs on any thread,
        # between any two lines.
        weakref.finalize(self, portal.retire).atexit = False

    def finish(self) -> None:
        """Blocks until all scheduled closures have ended.

        Raises: See `ClusterCoordinator.join`.
        """
        with self.lock:
            core = self.core
        if core is not None:
            core.engine.join(None)

    @property
    def session(self) -> int:
        """The number that all requests of this session carry."""
        return self.cluster.session

    @property
    def origin(self) -> int:
        """The number from which keys and optimizer numbers are counted: the number of
        the first session, if this one resumes that of another program."""
        return self.cluster.renewal.origin

    @property
    def resumed(self) -> bool:
        """Whether this session resumes that of another program."""
        return self.cluster.renewal.resumed

    @property
    def worker_count(self) -> int:
        """Number of workers of the cluster, including those that are lost."""
        return len(self.cluster.membership.addresses)

    @property
    def platform(self) -> str:
        """The platform of the workers' devices: "cpu", "gpu" or "tpu"."""
        return self.cluster.worker_devices.platform

    @property
    def devices(self) -> int:
        """Number of devices of each worker."""
        return self.cluster.worker_devices.devices

    @property
    def client(self) -> PsClient:
        """The client of the parameter servers, for coroutines that `run` runs.

        Raises:
            PSUnavailableError: A parameter server is lost, with its variables.
        """
        return self.servers.client

    def run(
        self, work: Coroutine[Any, Any, T], what: str, timeout: float | None = None
    ) -> T:
        """Runs a coroutine on the loop that owns the links; blocks until the coroutine
        has ended, and returns its result.

        Args:
            what: Names the work in errors.
            timeout: Seconds; None: no limit. Requests to tasks have deadlines of their
                own, which move while bytes arrive: only the loop knows whether a large
                value is still on its way.
        """
        # With restores a request may wait for a machine to boot, for as long as
        # `recover` says.
        if timeout is None or self.cluster.recovery is not None:
            timeout = math.inf
        with UserCall():
            return self.portal.run(work, timeout, what)

    async def run_async(self, work: Coroutine[Any, Any, T], what: str) -> T:
        """Runs a coroutine like `run`, awaited on any event loop.

        Cancellation: requests that were sent are carried out.
        """
        with UserCall():
            return await self.portal.run_async(work, what)

    @contextlib.asynccontextmanager
    async def at_rest(self) -> AsyncIterator[SessionCut | None]:
        """Pauses training between two steps: variables that are read inside are of one
        moment, with each step applied on all servers or on none. Usable from any event
        loop.

        Waits for the steps that run, while new steps and updates of the program wait.
        So training stands still for the slowest running step, and for the block.

        Yields:
            The steps that were applied. None if other programs share the servers: those
            programs are not paused, and each server is read at a moment of its own.

        Raises:
            UnavailableError: A step whose worker was lost needs another worker, and
                there was none in time.

        Cancellation: training continues.
        """
        if self.cluster.options.is_shared:
            yield None
            return
        pause, holder = self.cluster.pause, object()
        before = self.restores
        try:
            yield await self.run_async(pause.begin(holder), "waiting for steps to end")
            self.require_unrestored(before)
        finally:
            # Not awaited: training must continue even if this task is cancelled.
            self.portal.call_soon(pause.end, holder)

    def forget_rounds(self, optimizer: int) -> None:
        """Forgets the rounds of an optimizer that no longer has a handle, if it has
        rounds. Callable from any thread."""
        self.portal.call_soon(self.cluster.rounds.remove, optimizer)

    async def restart_rounds(self, restored: Mapping[int, RestoredRounds]) -> None:
        """Drops contributions that wait for rounds, as they would change values that
        were restored; the session has to be `at_rest`. Workers also drop what they keep
        for windows of local steps, and the parts of gradients that their formats have
        left out so far.

        Args:
            restored: By outer optimizer: the rounds from which its windows of local
                steps continue; they begin again without any local step.

        Raises:
            PSUnavailableError: A parameter server is lost.

        Cancellation: some of it may be dropped.
        """
        work = self.cluster.rounds.drop(restored)
        await self.run_async(work, "dropping what waits for rounds")
        orders = [(each.optimizer, each.number) for each in self.cluster.rounds.rounds]
        for fields in orders or [(0, 0)]:
            await asyncio.gather(
                *(self.ask_worker(n, RestartWindows, *fields) for n in self.workers)
            )

    def open_round(self, optimizer: int) -> int | None:
        """Returns the number of the optimizer's open round; None if the optimizer has
        no rounds here."""
        rounds = self.cluster.rounds.rounds.get(optimizer)
        return None if rounds is None else rounds.number

    @property
    def workers(self) -> list[int]:
        """The places (indices in the session) of the workers that are connected."""
        return [worker.place for worker in self.cluster.workers if worker.is_ready]

    async def ask_worker(
        self, worker: int, message: Callable[..., Message], *fields: Any
    ) -> Any:
        """Sends a message of this session to the worker at a place; returns the answer.
        Returns None if the worker is lost or has left, or if another process has taken
        its place that does not know what it is asked for.

        Raises:
            DeadlineExceededError: The worker did not answer in ten minutes.

        Cancellation: the worker may carry out the request.
        """

        async def ask() -> Message | None:
            deadline = asyncio.get_running_loop().time() + BUILD_DEADLINE
            # On the loop, where the number cannot change before it is sent.
            sent = message(self.cluster.renewal.worker_session, *fields)
            try:
                link = self.cluster.workers[worker].link
                return await link.submit(sent, deadline=deadline)
            except (PeerLostError, StaleSessionError, ClosedError, NotFoundError):
                return None

        return await self.run_async(ask(), "asking a worker for its windows")

    def recover(self, timeout: float) -> None:
        """Enables restores of lost parameter servers, when they return, from the last
        checkpoint that `remember` got.

        Args:
            timeout: Seconds for a lost server to return.
        """

        async def begin() -> None:
            self.cluster.recover(timeout)

        self.run(begin(), "enabling restores of parameter servers")

    @property
    def recovers(self) -> bool:
        """Whether `recover` was called."""
        return self.cluster.recovery is not None

    @property
    def restores(self) -> int:
        """Number of times that the parameter servers were restored."""
        return self.cluster.restores

    def require_unrestored(self, since: int) -> None:
        """Checks that there was no restore since `restores` was ``since``.

        Raises:
            PSUnavailableError: The servers were restored, so values have changed.
        """
        if self.restores != since:
            raise PSUnavailableError(
                self.cluster.ps[0].name,
                "the servers were restored from a checkpoint meanwhile",
            )

    @property
    def outages(self) -> int:
        """Number of failovers and restores so far."""
        return self.cluster.outages

    async def settled(self, since: int, error: ZstratError) -> bool:
        """Waits until every store has a known server. Returns whether work that failed
        with ``error``, and began when `outages` was ``since``, is worth a retry.

        Raises:
            PSUnavailableError: A server did not return, or could not be restored.
        """
        work = self.cluster.settled(since, error)
        return await self.run_async(work, "waiting for parameter servers")

    async def remember(
        self, point: RestorePoint, cut: SessionCut, restores: int
    ) -> list[str]:
        """Stores a complete checkpoint from which servers can be restored.

        Args:
            cut: The steps whose effects are in the checkpoint.
            restores: The value of `restores` when the checkpoint's values were read.

        Returns:
            Names of what servers need and the checkpoint does not have.
        """
        recovery = self.cluster.recovery
        if recovery is None:
            return []

        async def remember() -> list[str]:
            return recovery.remember(point, cut, restores)

        return await self.run_async(remember(), "noting a checkpoint")

    def close(self, exit: bool = False) -> None:  # noqa: A002
        """Ends the session, even if it has a name, and disconnects. Idempotent, and
        safe at the exit of the interpreter.

        Args:
            exit: Also drain and end the processes of workers and parameter servers.
        """
        if self.taken_over is None:
            # Not after a newer strategy took the cluster over: it may continue the
            # session of that name.
            self.cluster.end_on_close()
        if exit and not self.portal.is_closed:
            self.portal.at_close(partial(self.cluster.close, True))
        self.portal.close(self.taken_over or _CLOSED)

    def forget(self) -> None:
        """Refuses all further use of the cluster, in a forked process."""
        self.lock = cast("threading.Lock", _ForkedLock())
        if self.core is not None:
            self.core.engine.lock = self.lock

    def leave(self) -> None:
        """Disconnects. A session with a name stays for the next program."""
        self.portal.close(self.taken_over or _CLOSED)

    def give_way(self, made_at: str, newer: str) -> None:
        """Closes in favour of a newer session of this program.

        Args:
            made_at: The line that made the strategy of this session.
            newer: The line that makes the next strategy.

        Raises:
            BusyError: Closures or a checkpoint are unfinished; nothing changes.
        """
        reason = (
            f"the strategy made at {made_at} is closed: a newer one of this program, "
            f"made at {newer}, took its cluster over; use that one"
        )
        unfinished = self._close_core(reason)
        if unfinished is not None:
            raise BusyError(
                f"the strategy of this program made at {made_at} has the cluster, and "
                f"{unfinished}. Wait for coordinator.join() or coordinator.cancel(), "
                "or call strategy.close() on it, before you make another one"
            )
        self.taken_over = reason
        log.info("%s", reason)
        self.portal.close(reason)

    def readiness(self) -> str:
        """Returns why steps cannot run now; "" if they can."""
        outage = self.cluster.outage_error
        return "" if outage is None else str(outage)

    def statistics(self) -> dict[str, PlainTree]:
        """Returns the metrics of the coordinator, {} without one. Callable from any
        thread."""
        core = self.core
        return {} if core is None else {"coordinator": core.metrics()}

    async def _is_paused(self) -> bool:
        return self.cluster.pause.is_held and self.cluster.outage_error is None

    def _close_core(self, reason: str) -> str | None:
        """Closes the coordinator if no work is unfinished, else returns a description
        of that work."""
        # On the loop, as `at_rest` posts the end of a pause to it.
        with contextlib.suppress(ClosedError):
            if self.run(self._is_paused(), "checking for an unfinished checkpoint"):
                return "a checkpoint is being saved or restored"
        with self.lock:
            core = self.core
        if core is None:
            return None
        # Before the engine closes, which forgets it.
        pending = core.engine.queue.unraised
        unfinished: str | None = core.engine.give_way(reason)
        if unfinished is None and pending is not None:
            error = pending.error
            log.warning(
                "the error of %s was never raised, and no longer can be, as %s: %s: %s",
                pending.source or "the coordinator",
                reason,
                type(error).__name__,
                error,
            )
        return unfinished
