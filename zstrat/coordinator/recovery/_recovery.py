"""Fills parameter servers from the last checkpoint when one has come back empty.

A checkpoint has the values of all servers at one moment. So when one server has lost
its data, all of them enter *another session*, under another number: with empty ledgers,
the same keys, and the values of the checkpoint. They refuse what was sent for the
earlier session, from any process and however late; so a closure that runs again has its
effect once on top of the restored values, and the effect of one that had ended is lost.

    WHOLE ──a ps is lost──▶ WAITING ──all are back with their data──▶ WHOLE
                            │    ▲ └──one is empty──▶ FILLING ─▶ workers follow ─▶ WHOLE
                            │    └─────another loss──────┘
                            └── one not back in time, or no checkpoint ──▶ FAILED

Except in WHOLE, workers get no closures, and requests of the program wait. The law of
this file: each recovery ends, and so does each call that waits for it. On the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import (
    TYPE_CHECKING,
    Final,
    NamedTuple,
    Protocol,
    TypeVar,
    final,
)

from zstrat.errors import DataLossError, NotFoundError, PSUnavailableError, ZstratError

from ._inventory import Inventory

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from zstrat.coordinator._session_pause import SessionCut
    from zstrat.coordinator.connecting import ClusterTasks, TaskSession

    from ._inventory import RestorePoint
    from ._session_renewal import SessionRenewal

log = logging.getLogger("zstrat.coordinator")

T = TypeVar("T")

PS_WAIT: Final = 600.0
"""Seconds that a lost parameter server has to come back: a machine boots in less."""
FILL_ATTEMPTS: Final = 5
"""Number of attempts to fill the servers; more if servers are lost again meanwhile, and
come back within their timeout."""
REMEMBERED_CHECKPOINTS: Final = 4
"""Number of checkpoints that are remembered: more than one, as the newest may be
damaged or deleted."""


class _Remembered(NamedTuple):
    """A checkpoint, and the number of steps whose effects are in its values."""

    point: RestorePoint
    steps: int


@final
class Recovery:
    """Restores the parameter servers of one session after a loss.

    Args:
        renewal: Moves all tasks to another session.
        timeout: Seconds that a lost server has to come back.
        filling: Seconds that the servers have to create the variables.
    """

    def __init__(
        self,
        cluster: ClusterTasks,
        renewal: SessionRenewal,
        timeout: float,
        filling: float,
    ) -> None:
        self.return_timeout: Final = timeout
        self.inventory: Final = Inventory()
        self.restores = 0
        """Number of times that the servers were filled."""
        self.steps_lost = 0
        """Number of steps that had ended and whose effects are no longer in the
        values."""
        self.failure: PSUnavailableError | None = None
        self._cluster, self._renewal, self._filling = cluster, renewal, filling
        self._points: list[_Remembered] = []
        self._is_torn = False
        """Whether the servers are in a session that was not filled completely."""
        self._over, self._news = asyncio.Event(), asyncio.Event()
        self._over.set()
        self._task: asyncio.Task[None] | None = None

    @property
    def is_under_way(self) -> bool:
        return not self._over.is_set()

    @property
    def error(self) -> PSUnavailableError | None:
        """The error of calls that need the servers now; None if no recovery is under
        way and none has failed."""
        if self.is_under_way:
            return PSUnavailableError(
                self._lost_task.name, "the program waits for it, or is filling it"
            )
        return None if self.failure is None else _copy(self.failure)

    def server_lost(self) -> None:
        """Notes that a server is lost, which may come back with its data. Starts a
        recovery, unless one is under way or has failed."""
        self._news.set()
        # After a failure every call raises it, until all servers are back with their
        # data.
        if self._over.is_set() and self.failure is None:
            self._over.clear()
            self._renewal.suspend_dispatch()
            loop = asyncio.get_running_loop()
            self._task = loop.create_task(self._recover(), name="recovery")  # see stop

    def server_returned(self, *, is_last: bool) -> None:
        """Notes that a server is in the session again; ``is_last``: now all servers
        are, with their data."""
        self._news.set()
        # A session that is half filled has to be filled again, although all its servers
        # are there.
        if is_last and not self._is_torn:
            self.failure = None

    async def stop(self) -> None:
        """Cancels a recovery that is under way, as the session is being closed."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def remember(
        self, point: RestorePoint, cut: SessionCut, restores: int
    ) -> list[str]:
        """Remembers a checkpoint that was saved completely, or loaded.

        Args:
            cut: The steps whose effects are in the checkpoint.
            restores: The value of `restores` when the checkpoint's values were read.

        Returns:
            The names of what the checkpoint lacks to restore this session.
        """
        if restores != self.restores:
            return []  # its steps are those of an earlier session
        # A restore from it, or a second save, makes it the newest.
        known = [other for other in self._points if other.point.path != point.path]
        steps = count(cut) - self.steps_lost
        self._points = [*known[1 - REMEMBERED_CHECKPOINTS :], _Remembered(point, steps)]
        return self.inventory.missing_in(point)

    async def over(self) -> None:
        """Waits until the recovery that is under way ends.

        Raises:
            PSUnavailableError: The recovery failed.
        """
        await self._over.wait()
        if self.failure is not None:
            raise _copy(self.failure)

    async def settled(self) -> bool:
        """Waits until no recovery is under way, as `over`. Returns whether a server was
        away."""
        waited = self.is_under_way
        if not waited and not all(task.link.is_open for task in self._cluster.ps):
            waited = True
            # This request waits until it is known what has come back.
            with contextlib.suppress(ZstratError):
                await self._cluster.client.statistics()
        await self.over()
        return waited

    async def _recover(self) -> None:
        try:
            await self._bring_back()
        except PSUnavailableError as error:
            self._fail(error)
        except Exception as error:  # goes to each call that needs the servers
            log.exception("filling the parameter servers again")
            words = f"filling it failed: {type(error).__name__}: {error}"
            self._fail(PSUnavailableError(self._lost_task.name, words, lost=True))

    async def _bring_back(self) -> None:
        loop = asyncio.get_running_loop()
        failures, patient_until = 0, loop.time() + self.return_timeout
        while True:
            # Losses come one after the other: each turn looks at all servers again.
            await self._all_back()
            if not self._is_torn and all(task.is_ready for task in self._cluster.ps):
                self._end()  # they are back with their data
                return
            chosen = await self._chosen()
            try:
                await self._fill(chosen.point)
            except (ZstratError, OSError) as error:
                failures += 1
                log.warning(
                    "filling the parameter servers from %s failed: %s: %s",
                    chosen.point.path,
                    type(error).__name__,
                    error,
                )
                # Another loss may be bad luck, or the result of filling.
                lost = not all(task.is_ready for task in self._cluster.ps)
                may_be_luck = lost and loop.time() < patient_until
                if failures >= FILL_ATTEMPTS and not may_be_luck:
                    why = f"filling it failed {failures} times, the last time: {error}"
                    raise PSUnavailableError(
                        self._lost_task.name, why, lost=True
                    ) from error
                continue
            self._restored(chosen)
            return

    async def _all_back(self) -> None:
        """Waits until each server is back: in the session with its data, or connected
        and empty.

        Raises:
            PSUnavailableError: A server did not come back.
        """
        tasks = self._cluster.ps
        try:
            async with asyncio.timeout(self.return_timeout):
                while away := [task for task in tasks if not _is_back(task)]:
                    names = ", ".join(task.name for task in away)
                    log.warning(
                        "%s is away: the program waits up to %g s for it "
                        "(on_ps_loss='restore')",
                        names,
                        self.return_timeout,
                    )
                    # No await since the servers were looked at, so no news is lost.
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            away = [task for task in tasks if not _is_back(task)] or list(tasks)
            raise PSUnavailableError(
                away[0].name,
                "it did not come back within "
                f"ps_wait_timeout={self.return_timeout:g} s ({away[0].state})",
                away[0].gone,
            ) from None

    async def _chosen(self) -> _Remembered:
        """Returns the newest checkpoint that is complete and readable.

        Raises:
            PSUnavailableError: No checkpoint is complete and readable; says why.
        """
        reasons = []
        for each in reversed(self._points):
            path = each.point.path
            # Now, not when it was saved: variables may have been created since.
            if missing := self.inventory.missing_in(each.point):
                reasons.append(f"{path} lacks {', '.join(missing)}")
                continue
            try:
                await each.point.check()
            except (DataLossError, NotFoundError, OSError) as error:
                log.warning("checkpoint %s is skipped: %s", path, error)
                reasons.append(f"{path}: {error}")
                continue
            return each
        if not reasons:
            reasons = ["none was saved or restored by this program"]
        raise PSUnavailableError(
            self._lost_task.name,
            "it came back empty, and there is no checkpoint to fill it from "
            f"({'; '.join(reasons)}): with on_ps_loss='restore' save all variables and "
            "optimizers once they are created, and again from time to time "
            "(CheckpointManager.save, with checkpoint_interval_s= in each round)",
            lost=True,
        )

    async def _fill(self, point: RestorePoint) -> None:
        """Loads the checkpoint into all servers, in another session.

        Raises:
            ZstratError, OSError: Entering the session or loading failed.
        """
        cluster, loop = self._cluster, asyncio.get_running_loop()
        # Until all are filled: that all servers are there does not end the recovery.
        self._is_torn = True
        self._renewal.renew_servers()
        deadline = loop.time() + self.return_timeout
        await asyncio.gather(*(task.wait_ready(deadline) for task in cluster.ps))
        await self.inventory.create_again(cluster.client, self._filling)
        await point.fill(cluster.client)
        await self._renewal.close_ended_steps(point.rounds)
        await self._renewal.note_leases(point.places)
        for task in cluster.ps:
            # One that was filled first may be lost, and empty again, before the last
            # one is filled.
            if not task.is_ready:
                raise PSUnavailableError(task.name, "it was lost again")

    def _restored(self, chosen: _Remembered) -> None:
        """Ends the recovery. No await may be between the check that all servers are
        filled and this call."""
        lost = count(self._renewal.ended_steps) - self.steps_lost - chosen.steps
        # Newer checkpoints have steps that are lost now.
        self._points = self._points[: self._points.index(chosen) + 1]
        self.steps_lost += lost
        self.restores += 1
        self._is_torn = False
        # Only now: workers push to the servers as soon as they are in the session.
        self._renewal.renew_workers(chosen.point.places)
        log.warning(
            "a parameter server came back empty: all of them were filled from %s. %d "
            "steps that had ended after it are lost (including those that failed or "
            "were cancelled), and so is what the program itself assigned since then; "
            "unfinished steps run again, and the datasets of the workers restart, or "
            "continue where the checkpoint has their iterators; leased datasets that "
            "it lacks do not lease again what was lost",
            chosen.point.path,
            lost,
        )
        self._end()

    def _end(self) -> None:
        self._task = None
        self._over.set()
        self._renewal.suspend_dispatch(False)

    def _fail(self, error: PSUnavailableError) -> None:
        self.failure, self._task = error, None
        self._over.set()
        self._renewal.report_outage(error)
        self._renewal.suspend_dispatch(False)

    @property
    def _lost_task(self) -> TaskSession:
        """The first server that is not in the session, for messages."""
        tasks = self._cluster.ps
        return next((task for task in tasks if not task.is_ready), tasks[0])


def count(cut: SessionCut) -> int:
    """Returns the number of steps whose effects are in the values at a cut (a moment
    between two steps)."""
    ended = cut.end - 1 + sum(run.end - run.first for run in cut.besides)
    return ended - cut.waiting


class SettledServers(Protocol):
    """The parameter servers of a session, of which some may be away."""

    @property
    def outages(self) -> int:
        """Number of restores, failovers and moves so far."""

    async def settled(self, since: int, error: ZstratError) -> bool:
        """Waits until each store has a known server. Returns True if it had to wait, if
        ``outages`` is not ``since``, or if ``error`` says that the process which got
        the request does not serve the store now."""


async def until_settled(
    servers: Sequence[SettledServers], work: Callable[[], Awaitable[T]]
) -> T:
    """Carries out work that may be done twice, such as a save. Repeats the work if it
    failed because a parameter server was lost that came back, was filled, or was
    replaced by another process.

    Raises:
        PSUnavailableError: A server did not come back, or could not be filled.
    """
    while True:
        since = [each.outages for each in servers]
        try:
            return await work()
        except ZstratError as error:
            pairs = zip(servers, since, strict=True)
            if not any([await each.settled(before, error) for each, before in pairs]):
                raise


def _is_back(task: TaskSession) -> bool:
    return task.is_ready or (task.gone and (task.link.is_open or task.is_parked))


def _copy(error: PSUnavailableError) -> PSUnavailableError:
    """Returns a copy of the error: an error that is raised twice collects
    tracebacks."""
    return PSUnavailableError(error.task, error.reason, error.lost)
