"""All tasks of a session, on the loop thread: who is there, and what follows if not.

A parameter server has one life in a session: what it held is gone when it returns with
another incarnation, or from another coordinator. While one is not there the cluster is
*broken*, and says so through the dispatcher to whoever schedules or joins; or, if the
user wishes, all wait for its recovery (`recovery/`). Workers come and go: the
dispatcher's business alone.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Final, final

from zstrat.errors import BusyError, PSUnavailableError
from zstrat.ps import PsClient
from zstrat.transport import new_incarnation
from zstrat.wire import (
    CloseSession,
    JoinSession,
    Message,
    MoveServer,
    OpenSession,
    SessionOpened,
)

from ._fences import Fences
from ._rest import Cut, Rest, cut_of
from .connecting import MakeTaskLink, TaskSession, arrive
from .recovery import Recovery
from .replication import Replication

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from zstrat.config import Timeouts

    from ._dispatch import Dispatcher

log = logging.getLogger("zstrat.coordinator")

SETTLING: Final = 1.0
"""Seconds that connecting waits for workers that are about to join, so that they are
counted. Opening a session takes milliseconds."""
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
        listens: Whether workers are to say what their steps print.
        replicas: Copies of what each parameter server holds, in other ones: 0 or 1.
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
    ) -> None:
        self.joins: Final = joins
        self._ends: Final = ends and not joins
        self.is_shared: Final = not self._ends
        """Whether other programs update the variables, too."""
        self.session, self._timeouts = session, timeouts
        self._worker_session = session
        """That of the workers, which follow the servers to a session anew."""
        self._past: list[CloseSession] = []
        """What a task is told of the sessions before."""
        self.recovery: Recovery | None = None
        """Fills parameter servers that come back empty, if that is wished."""
        self.prefetch: Final = prefetch
        self.dispatcher: Dispatcher | None = None
        self._closing = False
        count = len(workers)
        # Messages that open a session have these lists, so they say what is so then.
        self._addresses = addresses = list(ps)
        self._views = views = [1] * len(ps) if replicas else []

        def session_with(
            job: str, number: int, index: int, address: str
        ) -> TaskSession:
            known = addresses if job == "worker" else []
            opening: OpenSession | JoinSession
            if joins:
                opening = JoinSession(session, [], [], timeouts.request)
            else:
                opening = OpenSession(
                    session, index, count, known, prefetch, listens, views
                )
            return TaskSession(
                job,
                number,
                index,
                address,
                opening,
                make_link,
                self,
                one_life=job == "ps",
                grace=timeouts.reconnect,
                turn=timeouts.request if joins else timeouts.turn,
                moves=bool(replicas) and job == "ps",
            )

        self.ps = [session_with("ps", index, index, at) for index, at in enumerate(ps)]
        self.workers = [
            session_with("worker", number, index, at)
            for index, (number, at) in enumerate(sorted(workers.items()))
        ]
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
        """Keeps second copies of what the parameter servers hold, if that is wished."""
        if replicas:
            home = tuple(ps)
            self.replication = Replication(self, session, home, timeouts, make_link)
        self.fences = Fences(session, self.ps, self._absent, timeouts.request)
        self.rest = Rest(self.fences)

    # ---- life ------------------------------------------------------------------------

    async def open(self) -> None:
        """Takes all parameter servers and one worker at least; the rest joins later.

        Raises:
            DeadlineExceededError: Some did not answer within ``timeouts.connect``.
            BusyError: They belong to another coordinator, for ``timeouts.turn``.
            VersionMismatchError, PermissionDeniedError: At once.
            ValueError: The workers that are there differ in their number of devices.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._timeouts.connect
        await arrive(self.ps, self.workers, deadline)
        await self._joining_workers(min(deadline, loop.time() + SETTLING))
        self._fixed = _alike(self.workers)
        if self.replication is not None:
            await self.replication.open(deadline)

    async def close(self, leave: bool) -> None:
        """Leaves all tasks; with ``leave`` they drain and end as processes."""
        if self._closing:
            return
        self._closing = True
        if self.dispatcher is not None:
            self.dispatcher.stop("the session is closed")
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
            task.leave()
            if task.is_ready and (self._ends or leave):
                is_worker = task in self.workers
                number = self._worker_session if is_worker else self.session
                goodbye = CloseSession(number, leave)
                answers.append(
                    task.link.submit(goodbye, deadline=loop.time() + patience)
                )
                answers[-1].add_done_callback(_heed)
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
        return 0 if self.replication is None else self.replication.failovers

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
            self._compare(task)
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
        if id(task) not in self._ps_ids:
            if self.dispatcher is not None:
                self.dispatcher.lost(task, reason)
            return
        replication = self.replication
        if replication is None:
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
                task.link.submit(moved).add_done_callback(_heed_move)
            except BusyError:
                task.reopen("it has too much to answer to hear where a server is")

    def heard(self, task: TaskSession, message: Message) -> None:
        if id(task) in self._ps_ids:
            if self.replication is not None:
                self.replication.heard(task, message)
            return
        if self.dispatcher is not None:
            self.dispatcher.heard(task, message)

    def attach(self, dispatcher: Dispatcher) -> None:
        """From now on the dispatcher is told about workers."""
        self.dispatcher = dispatcher
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
        self.session = new_incarnation()
        self.client.enter(self.session)
        self.fences.enter(self.session)
        if self.replication is not None:
            self.replication.renew(self.session, self._past)
            self._addresses[:] = self.replication.addresses
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

    async def _joining_workers(self, deadline: float) -> None:
        """Waits for those that are connected already; others are not waited for."""
        joining = [
            task.wait_ready(deadline)
            for task in self.workers
            if task.link.is_open and not task.is_ready and task.refusal is None
        ]
        # Who does not come in time joins later, and is compared then.
        await asyncio.gather(*joining, return_exceptions=True)

    def _compare(self, task: TaskSession) -> None:
        if self._fixed is None or task.opened is None:
            return
        planned, has = self._fixed.devices, task.opened.devices
        if planned != has:
            log.warning(
                "%s at %s joins with %d devices, but steps are planned for workers "
                "with %d (num_replicas_in_sync): start it with as many as the others",
                task.name,
                task.address,
                has,
                planned,
            )


def _alike(workers: Sequence[TaskSession]) -> SessionOpened | None:
    """What all workers that are there say about their devices.

    Raises:
        ValueError: They differ; TF's words.
    """
    there = {task.name: task.opened for task in workers if task.opened is not None}
    if len({opened.devices for opened in there.values()}) > 1:
        each = ", ".join(f"{name} has {o.devices}" for name, o in there.items())
        raise ValueError(
            f"Mismatched number of devices per worker: {each}. All of them compute the "
            "same number of replicas: start the workers with equally many devices"
        )
    return next(iter(there.values()), None)


def _heed_move(answer: asyncio.Future[Message]) -> None:
    """A worker that is lost meanwhile hears it when its session is opened again."""
    if not answer.cancelled() and (error := answer.exception()) is not None:
        log.info("telling a worker where a parameter server is: %s", error)


def _heed(answer: asyncio.Future[Message]) -> None:
    if not answer.cancelled() and (error := answer.exception()) is not None:
        log.info("closing the session: %s", error)
