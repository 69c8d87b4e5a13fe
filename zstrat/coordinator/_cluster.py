"""All tasks of a session, on the loop thread: which are there, and what a loss means.

A parameter server has one life in a session: what it held is gone when it returns with
another incarnation, or from another coordinator. While one is away the cluster has an
*outage*, and the dispatcher raises its error from every call that schedules or joins;
or, if the user wishes, all wait until the server is filled again (`recovery/`), or its
copy takes its place (`replication/`). Workers come and go (`membership/`), and so do
stores (`moving/`): this file joins these parts, and tells the dispatcher what they
decide.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final, final

from zstrat.errors import PSUnavailableError, ZstratError
from zstrat.ps import PsClient
from zstrat.transport import new_incarnation
from zstrat.wire import (
    Hello,
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
    SessionMaker,
    SessionOptions,
    StoreDirectory,
    TaskSession,
    all_joined,
    arrive,
    devices_of,
    objection_to,
)
from .membership import Membership
from .membership._turnover import Turnover, WorkerSessions
from .recovery import Recovery, SessionRenewal
from .replication import Replication, StoreMoves

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from zstrat.config import Timeouts
    from zstrat.transport import MakeTaskLink

    from ._dispatch import Dispatcher
    from .profiling._timeline_run import TimelineRun

log = logging.getLogger("zstrat.coordinator")

WORKERS_JOIN_SECONDS: Final = 1.0
"""For workers that are connected when all else is there to enter the session, so that
they are counted. Opening a session takes milliseconds."""
GOODBYE_SECONDS: Final = 2.0
"""For all tasks together to hear that the session is over."""


@final
class Cluster:
    """The sessions with all tasks, and the client of the parameter servers.

    Args:
        session: The number of the session.
        ps: Addresses, by task number.
        workers: Task number to address; some numbers may be missing.
        options: How the program holds the cluster.
        writer: The incarnation in the HELLO of the links; None: the session's number.
        draw: Draws a number for the session anew, which nobody has used.
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
        """Knows the number of the session, and has all tasks enter another one."""
        self.recovery: Recovery | None = None
        """Fills parameter servers that come back empty, if that is wished."""
        self.dispatcher: Dispatcher | None = None
        self.run_status: Final = RunStatus()
        """What the tasks tell of themselves."""
        self.timeline: TimelineRun | None = None
        """The one that is taken now."""
        self._closing = False
        self._timeouts, self._make_link, self._home = timeouts, make_link, tuple(ps)
        self._make: Final = SessionMaker(options, timeouts, make_link, self)
        self.workers: Final[list[TaskSession]] = []
        """By place; the sessions on workers that were let go are closed, and stay."""
        self.store_directory: Final = StoreDirectory(
            list(ps) * options.stores_per_ps, self.workers
        )
        self.membership: Final = Membership(workers)
        self.worker_sessions: Final = WorkerSessions(self.workers, self._worker_session)
        self.turnover: Final = Turnover(
            self.worker_sessions, self.membership, timeouts.drain, timeouts.connect
        )
        self.ps: Final[list[TaskSession]] = [
            self._make.server(session, store, at, self.membership.size)
            for store, at in enumerate(self.store_directory.addresses)
        ]
        """By store."""
        self.workers.extend(
            self._worker_session(task_number, place, at)
            for place, (task_number, at) in enumerate(sorted(workers.items()))
        )
        # By identity, as a set: it is looked at for each message of a task.
        self._ps_ids = frozenset(map(id, self.ps))
        self._absent: dict[int, str] = {}
        """Stores that are not there, and no copy in their place: why."""
        self._devices: SessionOpened | None = None
        self.client: Final = PsClient(
            [task.link for task in self.ps],
            session,
            writer=session if writer is None else writer,
            request_timeout=timeouts.request,
        )
        for each, line in zip(self.ps, self.client.lines, strict=True):
            each.line = line
        self.replication: Replication | None = None
        """Keeps second copies of what the parameter servers hold, if that is wished, or
        while stores move; and finds what was left under a name."""
        if options.replicas or options.stores_per_ps > 1 or options.name:
            self.ensure_replication()
        self.moves: Final = StoreMoves(self, ps, timeouts)
        """Has stores move on purpose."""
        self.fences: Final[Fences] = Fences(
            session, self.client, self.ps, self._absent, timeouts.request
        )
        self.pause: Final = SessionPause(self.fences)

    def _worker_session(
        self, task_number: int, place: int, address: str
    ) -> TaskSession:
        renewal = self.renewal
        task = self._make.worker(
            renewal.worker_session,
            task_number,
            place,
            address,
            self.membership.size,
            self.store_directory,
            self._objection,
        )
        if renewal.close_messages:
            task.renew(renewal.worker_session, renewal.close_messages)
        return task

    @property
    def session(self) -> int:
        """The number that the parameter servers know the session by."""
        return self.renewal.session

    def end_on_close(self) -> None:
        """The session is over when it is closed, whatever its name. From any thread."""
        self._ends_on_close = not self.options.is_shared

    async def open(self) -> None:
        """Takes all parameter servers and one worker at least; the rest joins later.

        Raises:
            PSUnavailableError: Only a part is left of the session that has the name; it
                stays where it is.
            DeadlineExceededError: Some did not answer within ``timeouts.connect``.
            BusyError: They belong to another coordinator, for ``timeouts.turn``; or for
                ``timeouts.notice``, if that is not heard any more.
            VersionMismatchError, PermissionDeniedError: At once.
            ValueError: The workers that are there differ in their number of devices.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._timeouts.connect + self._timeouts.turn
        if self.replication is not None and self.options.stores_per_ps > 1:
            # No process has these by itself: where they will be is not known yet.
            for task in self.ps[len(self._home) :]:
                task.park()
            if not self.name:
                await self.replication.create_stores(deadline)
        if self.name:  # nobody knows yet which process serves which store
            await self.renewal.adopt(self.name, self.options.restart_partial, deadline)
        else:
            await arrive(self.ps, self.workers, deadline)
        await all_joined(
            self.workers, min(deadline, loop.time() + WORKERS_JOIN_SECONDS)
        )
        self.run_status.begin()
        self._devices = devices_of(self.workers)
        if self.replication is not None:
            await self.replication.open(deadline)

    async def close(self, leave: bool) -> None:
        """Leaves all tasks; with ``leave`` they drain and end as processes."""
        if self._closing:
            return
        self._closing = True  # from now on a task that goes is no loss: we leave it
        self.worker_sessions.stop_starting()
        # Before anything is stopped: it asks all tasks for what they have noted.
        if self.timeline is not None:
            try:
                await self.timeline.close(GOODBYE_SECONDS)
            except Exception:  # to the log: all else has to be closed
                log.exception("ending the time line")
        self.run_status.end()
        if self.dispatcher is not None:
            self.dispatcher.stop("the session is closed")
        await self.turnover.stop()
        if self.recovery is not None:
            await self.recovery.stop()
        await self.fences.stop()
        if self.replication is not None:
            await self.replication.stop()
        await self._leave_tasks(leave)

    async def _leave_tasks(self, exits: bool) -> None:
        seconds = self._timeouts.drain if exits else GOODBYE_SECONDS
        processes = () if self.replication is None else self.replication.processes
        # Workers first: they push while they drain.
        tasks = (*self.workers, *self.ps, *processes)
        answers = []
        for task in tasks:
            gone = task.is_closed  # or on its way: it was removed
            task.leave()
            if not gone and task.is_ready and (self._ends_on_close or exits):
                answers.append(task.say_goodbye(seconds, exits=exits))
        if answers:
            await asyncio.wait(answers, timeout=seconds)
        await asyncio.gather(*(task.close() for task in tasks))

    def attach(self, dispatcher: Dispatcher) -> None:
        """From now on the dispatcher is told about workers."""
        self.dispatcher = dispatcher
        self.worker_sessions.attach(dispatcher)
        # Before it starts: what it sends then has the number that workers know.
        dispatcher.enter(self.renewal.worker_session)
        if self.recovery is not None and self.recovery.is_under_way:
            self.renewal.suspend_dispatch()
        dispatcher.start()
        self.pause.attach(dispatcher)
        outage = None if dispatcher.queue.suspended else self.outage_error
        if outage is not None:
            self.renewal.report_outage(outage)

    def recover(self, timeout: float) -> None:
        """From now on parameter servers that come back empty are filled again, if they
        come back within ``timeout`` seconds."""
        assert not self.options.is_shared, "other programs hold the servers, too"
        filling = timeout + self._timeouts.request
        self.recovery = Recovery(self, self.renewal, timeout, filling)
        if self._absent:
            self.recovery.server_lost()

    def ensure_replication(self) -> Replication:
        """What watches processes and moves stores; it is made the first time."""
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
            for process, server in pairs:  # further stores have no process yet
                process.require_same_process(server)
        return self.replication

    @property
    def outage_error(self) -> PSUnavailableError | None:
        """Names the parameter server that is not there; None if all are."""
        if self.recovery is not None and (error := self.recovery.error) is not None:
            return error
        for store, reason in self._absent.items():
            task = self.ps[store]
            return PSUnavailableError(task.name, reason, task.gone)
        return None

    @property
    def failovers(self) -> int:
        """How often another copy took the place of a parameter server."""
        return 0 if self.replication is None else self.replication.takeovers

    @property
    def outages(self) -> int:
        """How often that was so, or the servers were filled again."""
        restores = 0 if self.recovery is None else self.recovery.restores
        return restores + self.failovers

    async def settled(self, since: int, error: ZstratError) -> bool:
        """Waits until each store has a known server. Returns True if it had to wait, if
        `outages` is not ``since``, or if the error says that the process which was
        asked does not serve the store now.

        Raises:
            PSUnavailableError: A server did not come back, or could not be filled.
        """
        waited, recovery = False, self.recovery
        if recovery is not None:
            waited = await recovery.settled(recovery.restores)
        if self.replication is not None:
            waited |= await self.replication.settled(self.failovers, error)
        return waited or self.outages != since

    @property
    def worker_devices(self) -> SessionOpened:
        """What the workers said of their devices when the cluster was opened: steps are
        planned for workers with as many."""
        return self._devices or SessionOpened("cpu", 1)

    @property
    def worker_addresses(self) -> Mapping[int, str]:
        """Task number to address."""
        return self.membership.addresses

    def backups(self) -> list[ProbedTask]:
        """A way to each second copy that has all, to ask it what it does."""
        return [] if self.replication is None else self.replication.backups()

    def task_ready(self, task: TaskSession) -> None:
        """The task is in our session."""
        if id(task) not in self._ps_ids:
            if self.dispatcher is not None:
                self.dispatcher.worker_ready(task)
            return
        self._absent.pop(task.place, None)
        if self.recovery is not None:
            self.recovery.server_returned()
            if not self._absent:
                self.recovery.all_returned()
        if self.dispatcher is not None and self.outage_error is None:
            self.dispatcher.engine.end_outage()
            self.dispatcher.turn_soon()

    def task_lost(self, task: TaskSession, reason: str) -> None:
        """The task is not in our session any more."""
        if self._closing:
            return
        replication, is_server = self.replication, id(task) in self._ps_ids
        words = reason
        if is_server and replication is not None:
            words = replication.status.reason_with_process(task.place, reason)
        self.run_status.task_lost(task.name, words)
        if not is_server:
            if self.dispatcher is not None:
                self.dispatcher.worker_lost(task, reason)
            self.turnover.worker_lost()
            return
        if replication is None or not (
            self.options.replicas or replication.keeps(task.place)
        ):
            self.store_lost(task.place, words)
        elif replication.is_started and task.place not in self._absent:
            replication.store_lost(task, reason)
        else:  # no copy can take its place now: requests end that wait for that
            task.give_up(words)
            self.store_lost(task.place, words)

    def store_lost(self, store: int, reason: str) -> None:
        """The parameter server is not there, and no other in its place."""
        self._absent[store] = reason
        if self.recovery is not None:
            self.recovery.server_lost()
        elif (outage := self.outage_error) is not None:
            self.renewal.report_outage(outage)

    def message_received(self, task: TaskSession, message: Message) -> None:
        """A task has sent a notice; or a process with copies a worker's report."""
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

    def _objection(
        self, task: TaskSession, hello: Hello, opened: SessionOpened | None
    ) -> ZstratError | None:
        return objection_to(task, hello, opened, self.workers, self._devices)
