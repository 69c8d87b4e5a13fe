"""`Cluster`: all tasks of a session, and what happens when one is lost. Runs on the
loop.

A parameter server has one life in a session: if it returns with another incarnation, or
was used by another coordinator, its values are gone. While one is lost the cluster has
an *outage*, and every call that schedules or joins raises the error of the outage. With
``on_ps_loss="restore"`` calls wait until the server is restored (`recovery/`), and with
``replicas=1`` its backup takes over (`replication/`, which also moves stores). Workers
(`membership/`) may change at any time. This file connects these parts and the
dispatcher.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final, TypeVar, final

from zstrat.errors import PSUnavailableError, ZstratError
from zstrat.ps import PsClient
from zstrat.transport import new_incarnation
from zstrat.wire import (
    JoinSession,
    Message,
    Printed,
    SessionOpened,
    Telemetry,
    WorkerReported,
)

from ._fences import Fences
from ._run_status import RunStatus
from ._session_pause import SessionPause
from .connecting import (
    ProbedTask,
    SessionOptions,
    StoreDirectory,
    TaskSession,
    all_joined,
    arrive,
    devices_of,
    objection_to,
)
from .membership import Membership
from .membership._turnover import Turnover
from .recovery import Recovery, SessionRenewal
from .replication import Replication, StoreMoves
from .rounds import RoundClosing

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from zstrat.config import Timeouts
    from zstrat.transport import MakeTaskLink
    from zstrat.wire import OpenSession

    from ._dispatch import Dispatcher
    from .profiling._timeline_run import TimelineRun

log = logging.getLogger("zstrat.coordinator")

T = TypeVar("T")

WORKERS_JOIN_SECONDS: Final = 1.0
"""Seconds that an opening session waits for connected workers to join, after all
servers have joined, so that those workers are counted. Joining takes milliseconds."""
CLOSE_SECONDS: Final = 2.0
"""Seconds for all tasks together to answer that they closed the session."""


@final
class Cluster:
    """The sessions with all tasks, and the client of the parameter servers.

    Args:
        session: The number of the session.
        ps: Addresses of the parameter servers, by task number.
        workers: Task number to address; numbers may be missing.
        options: How the program uses the cluster.
        writer: The incarnation in the HELLO of the links. Default: the session number.
        draw: Draws an unused session number.
    """

    def __init__(
        self,
        session: int,
        ps: Sequence[str],
        workers: Mapping[int, str],
        timeouts: Timeouts,
        make_link: MakeTaskLink,
        options: SessionOptions,
        *,
        writer: int | None = None,
        draw: Callable[[], int] = new_incarnation,
    ) -> None:
        self.options: Final = options
        self.name: Final = options.name
        self._ends_on_close = not options.is_shared and not options.name
        self.renewal: Final = SessionRenewal(self, session, draw)
        """Stores the number of the session, and moves all tasks to another session."""
        self.recovery: Recovery | None = None
        """Restores parameter servers that return empty, with ``on_ps_loss="restore"``;
        else None."""
        self.dispatcher: Dispatcher | None = None
        self.run_status: Final = RunStatus()
        """The last telemetry report of each task, and the output of the tasks."""
        self.timeline: TimelineRun | None = None
        """The time line that is being recorded; None if none is."""
        self._closing = False
        self._timeouts, self._make_link, self._home = timeouts, make_link, tuple(ps)
        self.workers: Final[list[TaskSession]] = []
        """Sessions on workers, by place (the worker's index in the session). Those of
        removed workers are closed, and stay in the list."""
        self.store_directory: Final = StoreDirectory(
            list(ps) * options.stores_per_ps, self.workers
        )
        self.membership: Final = Membership(workers)
        self.turnover: Final = Turnover(
            self.workers, self._worker_session, self.membership, timeouts
        )
        self.ps: Final[list[TaskSession]] = [
            self._server_session(session, store, at)
            for store, at in enumerate(self.store_directory.addresses)
        ]
        """Sessions on the servers of the stores, by number of the store."""
        self.workers.extend(
            self._worker_session(task_number, place, at)
            for place, (task_number, at) in enumerate(sorted(workers.items()))
        )
        # A set of identities, as each message of a task is checked against it.
        self._ps_ids = frozenset(map(id, self.ps))
        self._absent: dict[int, str] = {}
        """By number of the store: why a store is lost that no backup has taken over."""
        self._loss_at_open: asyncio.Future[None] | None = None
        """A future that ends when a store is lost while the session is opened."""
        self._devices: SessionOpened | None = None
        self.client: Final = PsClient(
            [task.link for task in self.ps],
            session,
            writer=session if writer is None else writer,
            request_timeout=timeouts.request,
        )
        for task, line in zip(self.ps, self.client.lines, strict=True):
            task.line = line
        self.replication: Replication | None = None
        """Keeps backups of stores, moves stores, and finds the stores that an earlier
        program left under the session's name. None if the options need none of
        these."""
        if options.replicas or options.stores_per_ps > 1 or options.name:
            self.ensure_replication()
        self.moves: Final = StoreMoves(self, ps, timeouts)
        """Adds and drains parameter servers, and moves stores."""
        self.fences: Final[Fences] = Fences(
            session, self.client, self.ps, self._absent, timeouts.request
        )
        self.rounds: Final[RoundClosing] = RoundClosing(self.client, timeouts.liveness)
        self.pause: Final = SessionPause(self.fences, self.rounds)

    def _server_session(self, session: int, store: int, address: str) -> TaskSession:
        """Returns the session on the server of a store, not started yet."""
        options, timeouts = self.options, self._timeouts
        opening: OpenSession | JoinSession
        opening = options.opening(session, store, self.membership.size, [], [])
        if options.joins:
            opening = JoinSession(session, [], [], timeouts.request)
        return TaskSession(
            "ps",
            store,
            store,
            address,
            opening,
            self._make_link,
            self,
            one_life=True,
            grace=timeouts.reconnect,
            turn=timeouts.request if options.joins else timeouts.turn,
            notice=timeouts.notice,
            moves=bool(options.replicas),
        )

    def _worker_session(
        self, task_number: int, place: int, address: str
    ) -> TaskSession:
        """Returns the session on a worker, not started yet."""
        renewal, stores, timeouts = self.renewal, self.store_directory, self._timeouts
        session, size = renewal.worker_session, self.membership.size
        task = TaskSession(
            "worker",
            task_number,
            place,
            address,
            self.options.opening(session, place, size, stores.addresses, stores.views),
            self._make_link,
            self,
            turn=timeouts.turn,
            notice=timeouts.notice,
            objection=lambda task, hello, opened: objection_to(
                task, hello, opened, self.workers, self._devices
            ),
        )
        # A worker that was away may still serve an earlier session of this program.
        if renewal.close_messages:
            task.renew(session, renewal.close_messages)
        return task

    @property
    def session(self) -> int:
        """The number of the session on the parameter servers."""
        return self.renewal.session

    def end_on_close(self) -> None:
        """Makes `close` end the session even if it has a name. Callable from any
        thread."""
        self._ends_on_close = not self.options.is_shared

    async def open(self) -> None:
        """Opens the session on all parameter servers and at least one worker; other
        workers may join later.

        Raises:
            PSUnavailableError: Only a part of the named session is left; it stays.
            DeadlineExceededError: Tasks did not answer within ``timeouts.connect``.
            BusyError: Another coordinator used the tasks for ``timeouts.turn``, or for
                ``timeouts.notice`` without a sign of life.
            VersionMismatchError, PermissionDeniedError: At once.
            ValueError: The workers differ in their number of devices.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._timeouts.connect + self._timeouts.turn
        if self.replication is not None and self.options.stores_per_ps > 1:
            # No process has these stores yet.
            for task in self.ps[len(self._home) :]:
                task.park()
            if not self.name:
                # With a name `adopt` creates them, if nothing is left that would be in
                # their place.
                await self.replication.create_stores(deadline)
        if self.name:  # it is not known yet which process serves which store
            await self.renewal.adopt(self.name, self.options.restart_partial, deadline)
        else:
            await arrive(self.ps, self.workers, deadline)
        await all_joined(
            self.workers, min(deadline, loop.time() + WORKERS_JOIN_SECONDS)
        )
        self.run_status.begin()
        # After connected workers have joined: steps are planned for their devices, and
        # later workers have to have as many.
        self._devices = devices_of(self.workers)
        await self._open_stores(deadline)

    async def _open_stores(self, deadline: float) -> None:
        """Waits until all stores are served and have their backups. If a store is lost
        before that, starts with empty stores in another session: nothing was created in
        this one.

        Raises:
            PSUnavailableError: What was left of a named session is lost, or another
                program shares the servers.
            ZstratError: As `arrive` and `Replication.open`.
        """
        loop = asyncio.get_running_loop()
        while True:
            self._loss_at_open = loss = loop.create_future()
            if self.replication is not None and self.outage_error is None:
                opening = loop.create_task(self.replication.open(deadline), name="open")
                try:
                    await asyncio.wait(
                        (opening, loss), return_when=asyncio.FIRST_COMPLETED
                    )
                    if not loss.done():
                        await opening
                finally:
                    opening.cancel()
                    await asyncio.gather(opening, return_exceptions=True)
            if (outage := self.outage_error) is None:
                if loss.done():
                    continue  # it is back already, but its backup was not waited for
                return
            if self.renewal.resumed or self.options.is_shared:
                raise outage
            # Without the rest of the error, which asks for another strategy.
            log.warning(
                "%s was lost before anything was created (%s): all tasks start again, "
                "empty",
                outage.task,
                outage.reason,
            )
            await self.renewal.start_empty(deadline)
            await all_joined(
                self.workers, min(deadline, loop.time() + WORKERS_JOIN_SECONDS)
            )

    async def close(self, exits: bool) -> None:
        """Closes the session on all tasks; with ``exits`` their processes drain and
        end."""
        if self._closing:
            return
        self._closing = True  # from now on a task that goes is not a loss
        self.turnover.stop_starting()
        # Before anything is stopped, as it asks all tasks for their spans.
        if self.timeline is not None:
            try:
                await self.timeline.close(CLOSE_SECONDS)
            except Exception:  # to the log, as all else has to be closed
                log.exception("ending the time line")
        self.run_status.end()
        if self.dispatcher is not None:
            self.dispatcher.stop("the session is closed")
        await self.turnover.stop()
        if self.recovery is not None:
            await self.recovery.stop()
        await self.fences.stop()
        await self.rounds.stop()
        if self.replication is not None:
            await self.replication.stop()
        await self._leave_tasks(exits)

    async def _leave_tasks(self, exits: bool) -> None:
        seconds = self._timeouts.drain if exits else CLOSE_SECONDS
        processes = () if self.replication is None else self.replication.processes
        # Workers first: they push while they drain.
        tasks = (*self.workers, *self.ps, *processes)
        answers = []
        for task in tasks:
            # All are left before the first await: what happens to a task after that is
            # not a loss.
            was_closed = task.is_closed  # or is being closed
            task.leave()
            if not was_closed and task.is_ready and (self._ends_on_close or exits):
                answers.append(task.close_session(seconds, exits=exits))
        if answers:
            await asyncio.wait(answers, timeout=seconds)
        await asyncio.gather(*(task.close() for task in tasks))

    def attach(self, dispatcher: Dispatcher) -> None:
        """Gives all workers to a dispatcher, and starts the dispatcher."""
        self.dispatcher = dispatcher
        self.rounds.attach(dispatcher.parts)
        self.turnover.attach(dispatcher)
        # Before it starts, so that it sends the session number that workers know.
        dispatcher.enter(self.renewal.worker_session)
        if self.recovery is not None and self.recovery.is_under_way:
            self.renewal.suspend_dispatch()
        dispatcher.start()
        self.pause.attach(dispatcher)
        # While a restore is under way calls wait, and raise no error.
        outage = None if dispatcher.queue.suspended else self.outage_error
        if outage is not None:
            self.renewal.report_outage(outage)

    def recover(self, timeout: float) -> None:
        """Enables restores of lost parameter servers that return within ``timeout``
        seconds."""
        assert not self.options.is_shared, "other programs use the servers, too"
        restore_timeout = timeout + self._timeouts.request
        self.recovery = Recovery(self, self.renewal, timeout, restore_timeout)
        if self._absent:
            # One was lost before restores were enabled.
            self.recovery.server_lost()

    def ensure_replication(self) -> Replication:
        """Returns the `Replication`, which watches processes and moves stores; the
        first call creates it."""
        if self.replication is None:
            self.replication = Replication(
                self,
                self.session,
                self._home,
                self._timeouts,
                self._make_link,
                self.options.replicas,
                self.options.stores_per_ps,
                self.name,
            )
            pairs = zip(self.replication.processes, self.ps, strict=False)
            for process, server in pairs:  # other stores have no process yet
                process.require_same_process(server)
        return self.replication

    @property
    def outage_error(self) -> PSUnavailableError | None:
        """The error that names a lost parameter server; None if none is lost."""
        if self.recovery is not None and (error := self.recovery.error) is not None:
            return error
        for store, reason in self._absent.items():
            task = self.ps[store]
            return PSUnavailableError(task.name, reason, task.gone)
        return None

    @property
    def restores(self) -> int:
        """Number of times that the parameter servers were restored."""
        return 0 if self.recovery is None else self.recovery.restores

    @property
    def outages(self) -> int:
        """Number of failovers and restores so far."""
        replication = self.replication
        return self.restores + (0 if replication is None else replication.takeovers)

    async def through(
        self, work: Callable[[], Awaitable[T]], *, again: bool = True
    ) -> T:
        """Carries out a request when no restore is under way; repeats the request if it
        failed because a server was lost.

        Args:
            again: The request may be carried out twice. If not, it is repeated only
                after a restore, which undoes it.

        Raises:
            PSUnavailableError: A server did not return, or could not be restored.
        """
        while True:
            if self.recovery is not None:
                await self.recovery.over()
            outages, restores = self.outages, self.restores
            try:
                return await work()
            except ZstratError as error:
                if not again and self.recovery is None:
                    raise
                # The error may be that of a lost server. Only waiting shows: what is to
                # come back is awaited, anything else is raised.
                settled = await self.settled(outages, error)
                if not settled or not (again or self.restores != restores):
                    raise

    async def settled(self, since: int, error: ZstratError) -> bool:
        """Waits until each store has a known server. Returns True if it had to wait, if
        `outages` is not ``since``, or if ``error`` says that the process which got the
        request does not serve the store now.

        Raises:
            PSUnavailableError: A server did not return, or could not be restored.
        """
        waited = False
        if self.recovery is not None:
            waited = await self.recovery.settled()
        if self.replication is not None:
            waited |= await self.replication.settled(error)
        return waited or self.outages != since

    @property
    def worker_devices(self) -> SessionOpened:
        """The devices that each worker had when the cluster was opened; steps are
        planned for these."""
        return self._devices or SessionOpened("cpu", 1)

    @property
    def worker_addresses(self) -> Mapping[int, str]:
        """Addresses of the workers, by task number."""
        return self.membership.addresses

    def backups(self) -> list[ProbedTask]:
        """Returns connections to the servers' backups that are complete."""
        return [] if self.replication is None else self.replication.backups()

    def task_ready(self, task: TaskSession) -> None:
        """Handles a task that has joined the session."""
        if id(task) not in self._ps_ids:
            if self.dispatcher is not None:
                self.dispatcher.worker_ready(task)
            return
        self._absent.pop(task.place, None)
        if self.recovery is not None:
            self.recovery.server_returned(is_last=not self._absent)
        # Only when the last one is back: the error names one of them until then.
        if self.dispatcher is not None and self.outage_error is None:
            self.dispatcher.engine.end_outage()
            self.dispatcher.turn_soon()

    def task_lost(self, task: TaskSession, reason: str) -> None:
        """Handles a task that is no longer in the session."""
        if self._closing:
            return
        replication, is_server = self.replication, id(task) in self._ps_ids
        detail = reason
        if is_server and replication is not None:
            detail = replication.status.reason_with_process(task.place, reason)
        self.run_status.task_lost(task.name, detail)
        if not is_server:
            if self.dispatcher is not None:
                self.dispatcher.worker_lost(task, reason)
            self.turnover.worker_lost()
            return
        if replication is None or not (
            self.options.replicas or replication.keeps(task.place)
        ):
            self.store_lost(task.place, detail)
        elif replication.is_started and task.place not in self._absent:
            replication.store_lost(task, reason)
        else:  # no backup can take over: requests that wait for one fail
            task.give_up(detail)
            self.store_lost(task.place, detail)

    def store_lost(self, store: int, reason: str) -> None:
        """Starts an outage: no process serves the store."""
        self._absent[store] = reason
        if self._loss_at_open is not None and not self._loss_at_open.done():
            self._loss_at_open.set_result(None)
        if self.recovery is not None:
            self.recovery.server_lost()
        elif (outage := self.outage_error) is not None:
            self.renewal.report_outage(outage)

    def message_received(self, task: TaskSession, message: Message) -> None:
        """Handles a notice of a task."""
        if isinstance(message, Telemetry):
            self.run_status.telemetry_received(task.name, message.values)
            return
        if isinstance(message, Printed):
            self.run_status.printed(task.name, message.texts)
        if isinstance(message, WorkerReported):
            if not self._closing:
                self.turnover.reported.report_received(task, message)
            return
        if id(task) in self._ps_ids:
            if self.replication is not None:
                self.replication.message_received(task, message)
            return
        if self.dispatcher is not None:
            self.dispatcher.message_received(task, message)
