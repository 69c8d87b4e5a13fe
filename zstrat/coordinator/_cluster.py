"""All tasks of a session, on the loop thread: who is there, and what follows if not.

A parameter server has one life in a session: what it held is gone when it returns with
another incarnation, or from another coordinator. While one is not there the cluster is
*broken*, and says so through the dispatcher to whoever schedules or joins; or, if the
user wishes, all wait for its recovery (`recovery/`), or its copy takes its place
(`replication/`). Workers come and go (`membership/`), and so do stores (`moving/`):
this file joins these parts, and tells the dispatcher what they decide.
"""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from typing import TYPE_CHECKING, Final, final

from zstrat.errors import (
    BusyError,
    PSUnavailableError,
    ZstratError,
)
from zstrat.ps import PsClient
from zstrat.transport import new_incarnation
from zstrat.wire import (
    CloseSession,
    Hello,
    JoinSession,
    Message,
    MoveServer,
    OpenSession,
    Printed,
    SessionOpened,
    Telemetry,
    WorkerReported,
)

from ._fences import Fences
from ._rest import Cut, Rest, cut_of
from ._seen import SeenRun
from .connecting import (
    MakeTaskLink,
    TaskSession,
    adopted,
    all_joined,
    arrive,
    devices_of,
    objection_to,
)
from .membership import Membership, Turnover
from .moving import StoreMoves
from .recovery import Recovery
from .replication import BackupTask, Replication

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from zstrat.config import Timeouts

    from ._dispatch import Dispatcher
    from .profiling._timeline_run import TimelineRun

log = logging.getLogger("zstrat.coordinator")

SETTLING: Final = 1.0
"""Seconds that connecting waits for workers that are about to join, so that they are
counted. Opening a session takes milliseconds."""
CLOSING: Final = "closing the session"
MOVING: Final = "telling a worker where a parameter server is"
LEAVING: Final = 2.0
"""Seconds for all tasks together to hear that the session is over."""


@final
class Cluster:
    """The sessions with all tasks, and the client of the parameter servers.

    Args:
        ps: Addresses; a place in it is a task index.
        workers: Task index to address; some indices may be missing.
        writer: The incarnation in the HELLO of the links; None: the session's number.
        joins: Another program holds the parameter servers, and creates what is there.
        ends: Whether the session ends with this hold on it.
        draw: Draws the number of a session anew, which nobody has used.
        listens: Whether workers are to say what their steps print.
        replicas: Copies of what each parameter server holds, in other ones: 0 or 1.
        stores_per_ps: Logical servers of each parameter server, which may move.
        name: What the session is called. It goes on with what a program before has left
            under that name, and is itself left there by whoever does not `end` it.
        begins_anew: If only a part of that is there.
    """

    def __init__(
        self,
        session: int,
        ps: Sequence[str],
        workers: Mapping[int, str],
        timeouts: Timeouts,
        make_link: MakeTaskLink,
        prefetch: int = 0,
        *,
        writer: int | None = None,
        joins: bool = False,
        ends: bool = True,
        listens: bool = False,
        replicas: int = 0,
        stores_per_ps: int = 1,
        draw: Callable[[], int] = new_incarnation,
        name: str = "",
        begins_anew: bool = False,
    ) -> None:
        self._draw: Final = draw
        self.joins: Final = joins
        self.is_shared: Final = joins or not ends
        """Whether other programs update the variables, too."""
        self._ends = not self.is_shared and not name
        """Whether the session ends with this hold on it."""
        self.name: Final = name
        self._begins_anew = begins_anew
        self.resumed = False
        """It goes on with what another program has left."""
        self.origin = session
        """What keys are counted from: the first number that the session had."""
        self.session, self._timeouts = session, timeouts
        self._worker_session = session
        """That of the workers, which follow the servers to a session anew."""
        self._past: list[CloseSession] = []
        """What a task is told of the sessions before."""
        self.recovery: Recovery | None = None
        """Fills parameter servers that come back empty, if that is wished."""
        self.prefetch: Final = prefetch
        self.dispatcher: Dispatcher | None = None
        self.seen: Final = SeenRun()
        """What the tasks tell of themselves."""
        self.timeline: TimelineRun | None = None
        """The one that is taken now."""
        self._closing = False
        # Messages that open a session have these lists, so they say what is so then.
        self._home, self._stores_per_ps = tuple(ps), stores_per_ps
        self._addresses = list(ps) * stores_per_ps
        self._views = [1] * len(self._addresses)
        self._replicas = replicas
        self._make_link, self._listens = make_link, listens
        self.membership = Membership(workers)
        self.turnover = Turnover(
            self, self.membership, timeouts.drain, timeouts.connect
        )
        self.ps = [
            self._task("ps", index, index, at)
            for index, at in enumerate(self._addresses)
        ]
        """By store."""
        self.workers = [
            self._task("worker", number, index, at)
            for index, (number, at) in enumerate(sorted(workers.items()))
        ]
        """By index; those that were removed are closed, and stay."""
        self._ps_ids = frozenset(map(id, self.ps))
        self._absent: dict[int, str] = {}
        self._fixed: SessionOpened | None = None
        links = [task.link for task in self.ps]
        self.client = PsClient(
            links,
            session,
            writer=session if writer is None else writer,
            request_timeout=timeouts.request,
        )
        for each, line in zip(self.ps, self.client.lines, strict=True):
            each.line = line
        self.replication: Replication | None = None
        """Keeps second copies of what the parameter servers hold, if that is wished, or
        while stores move."""
        if replicas or stores_per_ps > 1:
            self.place_stores()
        self.moves: Final = StoreMoves(self, ps, timeouts)
        """Has stores move on purpose."""
        self._telling: set[asyncio.Future[Message]] = set()
        """Answers of workers that were told where a server is."""
        self.fences = Fences(session, self.ps, self._absent, timeouts.request)
        self.rest = Rest(self.fences)

    def _task(self, job: str, number: int, index: int, address: str) -> TaskSession:
        timeouts = self._timeouts
        opening: OpenSession | JoinSession
        if self.joins:
            opening = JoinSession(self.session, [], [], timeouts.request)
        else:
            opening = OpenSession(
                self._worker_session,
                index,
                self.membership.size,
                self._addresses if job == "worker" else [],
                self.prefetch,
                self._listens,
                self._views if job == "worker" else [],
                self.name,
                replicas=self._replicas,
                is_shared=self.is_shared,
            )
        return TaskSession(
            job,
            number,
            index,
            address,
            opening,
            self._make_link,
            self,
            one_life=job == "ps",
            grace=timeouts.reconnect,
            turn=timeouts.request if self.joins else timeouts.turn,
            moves=bool(self._replicas) and job == "ps",
            **({} if job == "ps" else {"objection": self._objection}),
        )

    # ---- life ------------------------------------------------------------------------

    def session_of(self, task: TaskSession) -> int:
        """The number that the task knows the session by."""
        return self._worker_session if task in self.workers else self.session

    def backups(self) -> list[BackupTask]:
        """A way to each second copy that has all, for who asks them."""
        return [] if self.replication is None else self.replication.backups()

    def end(self) -> None:
        """The session is over when it is closed, whatever its name. From any thread."""
        self._ends = not self.is_shared

    async def open(self) -> None:
        """Takes all parameter servers and one worker at least; the rest joins later.

        Raises:
            PSUnavailableError: Only a part is left of the session that has the name; it
                stays where it is.
            DeadlineExceededError: Some did not answer within ``timeouts.connect``.
            BusyError: They belong to another coordinator, for ``timeouts.turn``.
            VersionMismatchError, PermissionDeniedError: At once.
            ValueError: The workers that are there differ in their number of devices.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._timeouts.connect
        if self.replication is not None and self._stores_per_ps > 1:
            for task in self.ps[len(self._home) :]:
                task.park()
            await self.replication.create_stores(deadline)
        if self.replication is None or not self.name:
            await arrive(self.ps, self.workers, deadline)
        if self.name:
            await self._adopt(deadline)
        await all_joined(self.workers, min(deadline, loop.time() + SETTLING))
        self.seen.begin()
        self._fixed = devices_of(self.workers)
        if self.replication is not None:
            await self.replication.open(deadline)

    async def close(self, leave: bool) -> None:
        """Leaves all tasks; with ``leave`` they drain and end as processes."""
        if self._closing:
            return
        self._closing = True
        if self.timeline is not None:
            try:
                await self.timeline.close(LEAVING)
            except Exception:  # to the log: all else has to be closed
                log.exception("ending the time line")
        self.seen.end()
        if self.dispatcher is not None:
            self.dispatcher.stop("the session is closed")
        await self.turnover.stop()
        if self.recovery is not None:
            await self.recovery.stop()
        await self.fences.stop()
        if self.replication is not None:
            await self.replication.stop()
        loop = asyncio.get_running_loop()
        patience = self._timeouts.drain if leave else LEAVING
        processes = () if self.replication is None else self.replication.processes
        # Workers first: they push while they drain.
        tasks = (*self.workers, *self.ps, *processes)
        answers = []
        for task in tasks:
            gone = task.is_closed  # or on its way: it was removed
            task.leave()
            if not gone and task.is_ready and (self._ends or leave):
                goodbye = CloseSession(self.session_of(task), leave)
                answers.append(
                    task.link.submit(goodbye, deadline=loop.time() + patience)
                )
                answers[-1].add_done_callback(partial(_heed, CLOSING))
        if answers:
            await asyncio.wait(answers, timeout=patience)
        await asyncio.gather(*(task.close() for task in tasks))

    @property
    def broken(self) -> PSUnavailableError | None:
        """The parameter server that is not there, as the error that says so."""
        if self.recovery is not None and (error := self.recovery.error) is not None:
            return error
        for index, reason in self._absent.items():
            task = self.ps[index]
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

    async def settled(self, since: int) -> bool:
        """Waits while it is not known who serves what; returns whether that was so now,
        or since so many `outages`.

        Raises:
            PSUnavailableError: A server did not come back, or could not be filled.
        """
        waited, recovery = False, self.recovery
        if recovery is not None:
            waited = await recovery.settled(recovery.restores)
        if self.replication is not None:
            waited |= await self.replication.settled(self.failovers)
        return waited or self.outages != since

    @property
    def opened(self) -> SessionOpened:
        """What the workers said about their devices when the cluster was opened."""
        return self._fixed or SessionOpened("cpu", 1)

    # ---- told by the task sessions ---------------------------------------------------

    def ready(self, task: TaskSession) -> None:
        if id(task) not in self._ps_ids:
            if self.dispatcher is not None:
                self.dispatcher.ready(task)
            return
        self._absent.pop(task.index, None)
        if self.recovery is not None:
            self.recovery.returned()
            if not self._absent:
                self.recovery.mended()
        if self.dispatcher is not None and self.broken is None:
            self.dispatcher.engine.mend()
            self.dispatcher.turn_soon()

    def lost(self, task: TaskSession, reason: str) -> None:
        if self._closing:
            return
        self.seen.lost(task.name, reason)
        if id(task) not in self._ps_ids:
            if self.dispatcher is not None:
                self.dispatcher.lost(task, reason)
            self.turnover.lost()
            return
        replication = self.replication
        if replication is None or not (self._replicas or replication.keeps(task.index)):
            self.store_lost(task.index, reason)
        elif replication.is_started and task.index not in self._absent:
            replication.store_lost(task, reason)
        else:
            task.give_up(reason)
            self.store_lost(task.index, reason)

    def store_lost(self, store: int, reason: str) -> None:
        """The parameter server is not there, and no other in its place."""
        self._absent[store] = reason
        if self.recovery is not None:
            self.recovery.lost()
        elif self.dispatcher is not None and (broken := self.broken) is not None:
            self.dispatcher.engine.fail(broken, lasting=True)

    def store_moved(self, store: int, view: int, address: str) -> None:
        """The parameter server is there from now on: the workers are told."""
        before, self._addresses[store] = self._addresses[store], address
        self._views[store] = view
        if before == address:
            return
        moved = MoveServer(self._worker_session, store, view, address)
        for task in self.workers:
            if not task.link.is_open:
                continue  # it hears it when its session is opened
            try:
                telling = task.link.submit(moved)
            except BusyError:
                task.reopen("it has too much to answer to hear where a server is")
                continue
            self._telling.add(telling)
            telling.add_done_callback(self._telling.discard)
            telling.add_done_callback(partial(_heed, MOVING))

    async def told(self, timeout: float) -> None:
        """Waits until all workers that are there know where stores are, or for so many
        seconds.

        Cancellation: loses nothing.
        """
        if self._telling:
            await asyncio.wait(list(self._telling), timeout=timeout)

    def place_stores(self) -> Replication:
        """Who watches processes and moves stores; it is made the first time."""
        if self.replication is None:
            self.replication = Replication(
                self,
                self.session,
                self._home,
                self._timeouts,
                self._make_link,
                self._replicas,
                self._stores_per_ps,
                self.name,
            )
        return self.replication

    @property
    def worker_addresses(self) -> Mapping[int, str]:
        """Number to address."""
        return self.membership.addresses

    def heard(self, task: TaskSession, message: Message) -> None:
        if isinstance(message, Telemetry):
            self.seen.heard(task.name, message.values)
            return
        if isinstance(message, Printed):
            self.seen.printed(task.name, message.texts)
        if isinstance(message, WorkerReported):
            self.worker_reported(task, message)
            return
        if id(task) in self._ps_ids:
            if self.replication is not None:
                self.replication.heard(task, message)
            return
        if self.dispatcher is not None:
            self.dispatcher.heard(task, message)

    def _objection(
        self, task: TaskSession, hello: Hello, opened: SessionOpened | None
    ) -> ZstratError | None:
        return objection_to(task, hello, opened, self.workers, self._fixed)

    # ---- workers that come and go ----------------------------------------------------

    def worker_reported(self, task: TaskSession, message: WorkerReported) -> None:
        """A worker has reported itself at the process of a parameter server."""
        if not self._closing:
            self.turnover.reports.heard(task, message)

    def admit(self, index: int, number: int, address: str) -> TaskSession:
        """Begins to greet a worker, whose per-worker resources are built before its
        first closure."""
        task = self._task("worker", number, index, address)
        if self._past:
            task.renew(self._worker_session, self._past)
        self.workers[index : index + 1] = [task]
        if self.dispatcher is not None:
            self.dispatcher.admit(task)
        if not self._closing:
            task.start()
        return task

    async def part(
        self, task: TaskSession, reason: str, patience: float | None
    ) -> None:
        """Lets a worker go: what it has runs to its end, or elsewhere after
        ``patience`` seconds. None: what it has runs elsewhere, and its place is kept.

        Cancellation: nothing is given to it any more.
        """
        if task.is_closed:
            return
        if self.dispatcher is not None:
            if patience is not None:
                await self.dispatcher.finish(task, reason, patience)
            task.lives_on = task.is_moved = True  # its closures have not killed it
            self.dispatcher.part(task, reason, for_good=patience is not None)
        if task.is_ready and patience is not None:
            goodbye = CloseSession(self._worker_session, False)
            deadline = asyncio.get_running_loop().time() + LEAVING
            answer = task.link.submit(goodbye, deadline=deadline)
            answer.add_done_callback(partial(_heed, CLOSING))
            task.leave()
            await asyncio.wait([answer])
        await task.close()

    def attach(self, dispatcher: Dispatcher) -> None:
        """From now on the dispatcher is told about workers."""
        self.dispatcher = dispatcher
        for task in self.workers:
            if not task.is_closed:
                dispatcher.admit(task)
        dispatcher.enter(self._worker_session)
        if self.recovery is not None and self.recovery.is_under_way:
            self.suspend()
        dispatcher.start()
        self.rest.attach(dispatcher)
        if dispatcher.queue.suspended:
            return
        if (broken := self.broken) is not None:
            dispatcher.engine.fail(broken, lasting=True)

    # ---- parameter servers that are filled again -------------------------------------

    def recover(self, patience: float) -> None:
        """From now on parameter servers that come back empty are filled again, if they
        come back within ``patience`` seconds."""
        assert not self.is_shared, "what other programs hold is not ours to replace"
        filling = patience + self._timeouts.request
        self.recovery = Recovery(self, patience, filling)
        if self._absent:
            self.recovery.lost()

    @property
    def cut(self) -> Cut:
        """The steps that have ended."""
        return Cut() if self.dispatcher is None else cut_of(self.dispatcher.queue)

    def suspend(self) -> None:
        """Nothing is handed out to workers any more."""
        if self.dispatcher is not None:
            self.dispatcher.suspend(True)

    def resume(self) -> None:
        """All goes on."""
        if self.dispatcher is not None:
            self.dispatcher.suspend(False)

    def fail(self, error: PSUnavailableError) -> None:
        """Whoever schedules or joins is told."""
        if self.dispatcher is not None:
            self.dispatcher.engine.fail(error, lasting=True)
        self.resume()

    def begin_anew(self) -> None:
        """Has all parameter servers enter another session, in which they are empty.
        What is sent for this one is refused from then on."""
        self._past.append(CloseSession(self.session, False))
        self.session = self._draw()
        self.client.enter(self.session)
        self.fences.enter(self.session)
        if self.replication is not None:
            self.replication.renew(self.session, self._past)
            self._addresses[:] = map(self.replication.home_of, range(len(self.ps)))
        for task in self.ps:
            task.renew(self.session, self._past)

    async def close_ended(self) -> None:
        """Tells the servers which steps have ended.

        Raises:
            PSUnavailableError, DeadlineExceededError: One does not answer.
        """
        cut = self.cut
        await self.fences.up_to(cut.end, cut.besides)

    def follow(self) -> None:
        """Has the workers enter the session of the servers; what they work on runs
        again."""
        self._worker_session = self.session
        if self.replication is not None:
            self.replication.start()
        if self.dispatcher is not None:
            self.dispatcher.enter(self.session)
        for task in self.workers:
            task.renew(self.session, self._past)

    # ---- private ---------------------------------------------------------------------

    async def _adopt(self, deadline: float) -> None:
        """Goes on with what is there under the name, or begins anew."""
        try:
            await self._go_on(deadline)
        except PSUnavailableError as error:
            if not self._begins_anew:
                raise
            log.warning("all begins anew, with nothing restored yet: %s", error)
            processes = () if self.replication is None else self.replication.processes
            for task in (*self.ps, *processes):
                task.keep_origin(0)
            self.begin_anew()
            self.resumed, self.origin = False, self.session
            self.follow()
            await arrive(self.ps, self.workers, deadline)
            await all_joined(self.workers, deadline)

    async def _go_on(self, deadline: float) -> None:
        """With what is there, if anything is."""
        replication = self.replication
        if replication is None:
            found = adopted(self.name, self.session, self.ps)
        else:
            found = await replication.take_over(deadline)
        if found is not None:
            self.resumed, self.origin = True, found
            log.info("goes on with what was left of the session %r", self.name)
        for task in self.ps:
            task.keep_origin(self.origin)
        entered = arrive(self.ps, self.workers, deadline)
        if replication is None or found is None:
            await entered
        else:
            await replication.unless_lost(entered)
            await replication.unless_lost(replication.open(deadline))


def _heed(doing: str, answer: asyncio.Future[Message]) -> None:
    """Whoever is lost meanwhile hears it, if need be, when its session opens again."""
    if not answer.cancelled() and (error := answer.exception()) is not None:
        log.info("%s: %s", doing, error)
