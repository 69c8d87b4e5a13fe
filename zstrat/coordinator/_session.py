"""A program's hold on its cluster: one session, from connect to close.

The handle that the strategy owns; `connecting._session_opening` makes it. It lives on
the user's side; what runs on the loop (`Cluster`) does not know it, so that dropping
the strategy drops the session.
"""

from __future__ import annotations

import contextlib
import logging
import math
import threading
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar, cast, final

from zstrat.errors import BusyError, ClosedError, ForkedError, PSUnavailableError
from zstrat.program import hide_frames

from ._servers import ParameterServers

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Coroutine

    from zstrat.config import Settings
    from zstrat.errors import ZstratError
    from zstrat.ps import PsClient
    from zstrat.transport import Portal
    from zstrat.wire import PlainTree

    from ._cluster import Cluster
    from ._session_pause import SessionCut
    from .recovery import RestorePoint

log = logging.getLogger("zstrat.coordinator")

_CLOSED: Final = (
    "the strategy was closed: make a new one, and create anew what was in its scope"
)

T = TypeVar("T")


@final
class _ForkedLock:
    """A lock of the session in a forked process: what wants it would wait for the loop
    of the parent, and is refused instead."""

    def __enter__(self) -> NoReturn:
        raise ForkedError("a strategy that works with parameter servers")

    def __exit__(self, *_: object) -> None: ...


@final
class ClusterSession:
    """The tasks of a cluster, for as long as this program holds them.

    What is asked of the parameter servers is a coroutine of ``servers``. It is carried
    out on the loop that owns the links: `run` blocks until it has ended, `run_async` is
    awaited.

    Raises, `run` and `run_async`:
        PSUnavailableError: A parameter server that the call needs is gone.
        ClosedError: After `close`.
        DeadlineExceededError: There was no answer within ``timeouts.request``.
    """

    def __init__(self, cluster: Cluster, portal: Portal, settings: Settings) -> None:
        self.cluster, self.portal, self.settings = cluster, portal, settings
        self.lock = threading.Lock()
        self.servers = ParameterServers(cluster, settings.timeouts.request)
        self.coordinators: dict[str, Any] = {}
        """What was made for this session once: its coordinators. Guarded by `lock`."""
        self.taken_over: str | None = None
        """Says which other strategy of this program has the cluster now."""
        self.next_step = 1
        """Steps are unique in the session, whichever coordinator numbers them."""
        # Whichever way the portal ends, the tasks are left before.
        portal.at_close(partial(cluster.close, False))
        weakref.finalize(self, portal.retire).atexit = False

    def finish(self) -> None:
        """Blocks until all that was scheduled in this session has ended.

        Raises: As `ClusterCoordinator.join`.
        """
        with self.lock:
            core = self.coordinators.get("core")
        if core is not None:
            core.engine.join(None)

    @property
    def session(self) -> int:
        """The number that all requests of this session carry."""
        return self.cluster.session

    @property
    def origin(self) -> int:
        """The number that keys and optimizers' ids are counted from: that of the first
        session, if this one goes on with what another program has left."""
        return self.cluster.renewal.origin

    @property
    def resumed(self) -> bool:
        """Whether it goes on with what another program has left."""
        return self.cluster.renewal.resumed

    @property
    def worker_count(self) -> int:
        """Workers that the cluster has now, whether they are there or not."""
        return len(self.cluster.membership.addresses)

    @property
    def platform(self) -> str:
        """What the workers compute on: "cpu", "gpu" or "tpu"."""
        return self.cluster.worker_devices.platform

    @property
    def devices(self) -> int:
        """Local devices of one worker."""
        return self.cluster.worker_devices.devices

    @property
    def client(self) -> PsClient:
        """The client of the parameter servers, for coroutines that `run` carries out.

        Raises:
            PSUnavailableError: A parameter server is lost, and what it held.
        """
        return self.servers.client

    def run(
        self, work: Coroutine[Any, Any, T], what: str, timeout: float | None = None
    ) -> T:
        """Runs a coroutine on the loop that owns the links; blocks until it has ended.

        Args:
            what: Names it in errors.
            timeout: Seconds; None: no limit. What is asked of tasks has deadlines,
                which are put off while bodies move, and so has waiting for a task: only
                they know whether a large value is still on its way.
        """
        if timeout is None or self.cluster.recovery is not None:
            timeout = math.inf
        try:
            return self.portal.run(work, timeout, what)
        except Exception as error:  # to the caller
            hide_frames(error)
            raise

    async def run_async(self, work: Coroutine[Any, Any, T], what: str) -> T:
        """`run`, awaited on any event loop.

        Cancellation: gives up the outcome, while what was sent is carried out.
        """
        try:
            return await self.portal.run_async(work, what)
        except Exception as error:  # to the caller
            hide_frames(error)
            raise

    @contextlib.asynccontextmanager
    async def at_rest(self) -> AsyncIterator[SessionCut | None]:
        """Holds the session between two steps: what is read of its variables inside is
        of one moment, with each step on all servers or on none. From any event loop.

        Steps that run are waited for, new ones and updates of the program wait; so
        training stands still for the slowest step that runs, and for what is done here.

        Yields:
            Which steps have had their effect; None if other programs share the servers,
            which go on: each server has a moment of its own then.

        Raises:
            UnavailableError: A step whose worker was lost waits for another worker, and
                none came in time.

        Cancellation: all goes on.
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
            # Posted, not awaited: training goes on also where whoever held it is
            # cancelled.
            self.portal.call_soon(pause.end, holder)

    def recover(self, timeout: float) -> None:
        """From now on parameter servers that come back empty are filled from the last
        checkpoint that `remember` was told of.

        Args:
            timeout: Seconds that one has to come back.
        """

        async def begin() -> None:
            self.cluster.recover(timeout)

        self.run(begin(), "watching over the parameter servers")

    @property
    def recovers(self) -> bool:
        """Whether `recover` was called."""
        return self.cluster.recovery is not None

    @property
    def restores(self) -> int:
        """How often the parameter servers were filled again."""
        recovery = self.cluster.recovery
        return 0 if recovery is None else recovery.restores

    def require_unrestored(self, since: int) -> None:
        """
        Raises:
            PSUnavailableError: The servers have got other values since so many
                `restores`.
        """
        if self.restores != since:
            raise PSUnavailableError(
                self.cluster.ps[0].name, "the servers were filled again meanwhile"
            )

    @property
    def outages(self) -> int:
        """How often that was so, or another copy took a server's place."""
        return self.cluster.outages

    async def settled(self, since: int, error: ZstratError) -> bool:
        """Waits until no parameter server is awaited or filled; returns whether what
        failed with this error, ``since`` so many `outages`, may be tried again.

        Raises:
            PSUnavailableError: One did not come back, or could not be filled.
        """
        work = self.cluster.settled(since, error)
        return await self.run_async(work, "waiting for parameter servers")

    async def remember(
        self, point: RestorePoint, cut: SessionCut, restores: int
    ) -> list[str]:
        """The checkpoint is whole, or was restored.

        Args:
            cut: The steps that are in it.
            restores: As they were at the moment of the cut.

        Returns:
            What it lacks to fill servers from it, in words.
        """
        recovery = self.cluster.recovery
        if recovery is None:
            return []

        async def tell() -> list[str]:
            return recovery.remember(point, cut, restores)

        return await self.run_async(tell(), "noting a checkpoint")

    def close(self, exit: bool = False) -> None:  # noqa: A002
        """Ends the session, whatever its name, and leaves the cluster. Idempotent, and
        safe at the exit of the interpreter.

        Args:
            exit: Workers and parameter servers drain and end as processes.
        """
        if self.taken_over is None:
            self.cluster.end_on_close()
        if exit and not self.portal.is_closed:
            self.portal.at_close(partial(self.cluster.close, True))
        self.portal.close(self.taken_over or _CLOSED)

    def forget(self) -> None:
        """In a forked process: refuses from now on what needs the cluster."""
        self.lock = cast("threading.Lock", _ForkedLock())
        if (core := self.coordinators.get("core")) is not None:
            core.engine.lock = self.lock

    def leave(self) -> None:
        """Leaves the cluster. What has a name stays there for the next program."""
        self.portal.close(self.taken_over or _CLOSED)

    def give_way(self, made_at: str, newer: str) -> None:
        """Closes, for a newer session of this program.

        Args:
            made_at: The line that has made the strategy of this session.
            newer: The line that makes the next one.

        Raises:
            BusyError: Something is unfinished; all goes on.
        """
        words = (
            f"the strategy made at {made_at} is closed: a newer one of this program, "
            f"made at {newer}, has taken its cluster over; use that one"
        )
        unfinished = self._unfinished(words)
        if unfinished is not None:
            raise BusyError(
                f"the strategy made at {made_at} of this program has the cluster, and "
                f"{unfinished}: let coordinator.join() or coordinator.cancel() end, or "
                "call strategy.close() on it, before you make another one"
            )
        self.taken_over = words
        log.info("%s", words)
        self.portal.close(words)

    def readiness(self) -> str:
        """Why steps cannot be run now; "" if they can."""
        outage = self.cluster.outage_error
        return "" if outage is None else str(outage)

    def statistics(self) -> dict[str, PlainTree]:
        """What the session's coordinator counts, if there is one. From any thread."""
        core = self.coordinators.get("core")
        return {} if core is None else {"coordinator": core.metrics()}

    async def _is_paused(self) -> bool:
        return self.cluster.pause.is_held and self.cluster.outage_error is None

    def _unfinished(self, words: str) -> str | None:
        """What keeps the cluster, in words; else the coordinator, if there is one, is
        closed with the ``words``."""
        # The loop is asked, as `at_rest` only posts the end of a rest to it.
        with contextlib.suppress(ClosedError):
            if self.run(self._is_paused(), "looking whether a checkpoint is saved"):
                return "a checkpoint is saved or restored"
        with self.lock:
            core = self.coordinators.get("core")
        if core is None:
            return None
        unheard = core.engine.queue.unheard
        unfinished: str | None = core.engine.give_way(words)
        if unfinished is None and unheard is not None:
            error = unheard.error
            log.warning(
                "nobody has asked for the error of %s, and nobody can any more, as %s: "
                "%s: %s",
                unheard.source or "the coordinator",
                words,
                type(error).__name__,
                error,
            )
        return unfinished
