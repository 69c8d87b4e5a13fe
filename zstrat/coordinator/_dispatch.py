"""`Dispatcher`: hands closures out to workers and takes their outcomes, on the loop.

`Queue` and `Members` decide; this shell carries their decisions out. It runs on the
loop thread only, and takes the engine's lock once per turn and once per message, never
per closure. A *turn* fills each worker that has room, with one `Dispatch` message.
There is a turn after a burst of `schedule` calls, and at the end of a loop iteration
that brought outcomes, if there is something to do.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar, final

from zstrat.errors import (
    BusyError,
    ClosureAbortedError,
    PeerLostError,
    UnavailableError,
)
from zstrat.wire import (
    CancelSteps,
    Completions,
    DropResults,
    Message,
    Printed,
)

from ._members import Grant, Members
from ._outcomes import Outcomes
from ._queue import QueueLeft
from ._resources import Builder
from ._run_status import short
from ._shipping import ClosureShipping, WorkerChannel
from .rounds import CoordinatorParts

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy as np

    from zstrat.wire import PlainTree

    from ._engine import ClosureEngine
    from ._fences import Fences
    from ._queue import Closure
    from ._values import Kept
    from ._waiting import Cancelling
    from .connecting import TaskSession
    from .rounds import RoundClosing

log = logging.getLogger("zstrat.coordinator")

OBSERVED_EVERY: Final = 1.0
"""Seconds between two sends of the program's metrics to workers, from which observers
get them."""
OBSERVED_WORKERS: Final = 16
"""The most workers in the metrics that observers get: the ones for which rounds wait
most. Each worker reports the metrics, too, each second."""

T = TypeVar("T")


@final
class Dispatcher:
    """Moves closures between the queue and the workers, which `admit` adds. On the loop
    thread."""

    def __init__(
        self,
        engine: ClosureEngine,
        session: int,
        fences: Fences,
        rounds: RoundClosing,
        *,
        closures_in_flight: int | None,
        prefetch: int,
        staleness: int | None,
        worker_wait_timeout: float,
    ) -> None:
        self.engine, self.queue = engine, engine.queue
        self.members = Members(closures_in_flight, prefetch, staleness)
        engine.oldest = self.members.oldest
        self.channels: dict[int, WorkerChannel] = {}
        """Connections to the workers, by place (the worker's index in the session)."""
        self._retiring: dict[int, asyncio.Event] = {}
        """By place of a worker that is being removed: an event, set when the worker
        runs no closure."""
        self.retired: deque[int] = deque()
        """Numbers of arguments that no closure needs; any thread appends."""
        self.abandoned: deque[Kept] = deque()
        """Kept results whose values were dropped; any thread appends."""
        self.builder = Builder(engine, self.members, self.channels, self.turn_soon)
        self.outcomes = Outcomes(engine, self.members, self.abandoned)
        self.shipping = ClosureShipping(
            engine, self.members, self.turn_soon, self.worker_lost
        )
        self.fences, self.rounds = fences, rounds
        fences.mark_due = 0.0  # the first mark of this coordinator is sent at once
        self.turns, self._session = 0, session
        self._worker_wait_timeout = worker_wait_timeout
        self._turn_due: asyncio.Handle | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._no_worker_timer: asyncio.TimerHandle | None = None
        self._metrics_due = 0.0
        """Loop time from which on the next closures bring new metrics for observers to
        the workers."""
        self._stopped = self._called_back = False

    @property
    def parts(self) -> CoordinatorParts:
        """The parts of the coordinator that rounds of optimizers use."""
        return CoordinatorParts(
            self.engine, self.members, self.channels, self.turn_soon
        )

    def start(self) -> None:
        """Starts to hand closures out to the workers that have joined."""
        self.members.start(self._now())
        for channel in self.channels.values():
            if channel.task.is_ready:
                self.worker_ready(channel.task)

    def stop(self, cause: str) -> None:
        """Cancels all closures, and stops for good. ``cause`` is in their errors."""
        if self._stopped:
            return
        self._stopped = True
        for handle in (self._turn_due, self._timer, self._no_worker_timer):
            if handle is not None:
                handle.cancel()
        self.recall_unstarted()
        now = self._now()
        # Closed first: `Queue.retry` cancels then what it would queue again before.
        self.engine.close(cause)
        # Workers may still run closures, which must not change a variable from now on.
        self.fence(self.queue.steps.next, [])
        with self.engine.lock:
            for member in self.members.members:
                for closure in member.in_flight.values():
                    self.engine.settle(self.queue.retry(closure, now, begun=True))
                member.in_flight.clear()
            self.builder.stop(cause)
            self.engine.waiters.notify()
        self._send_drops()
        self.engine.waiters.echo.close()

    def cancel_waiting(self, request: Cancelling | None = None) -> None:
        """Cancels waiting closures, on request or because one has failed."""
        if self.engine.cancel_waiting(request):
            self.recall_unstarted()

    def recall_unstarted(self) -> None:
        """Asks the workers to give back the closures that they have not started."""
        for channel in self.channels.values():
            if channel.member.in_flight and channel.task.is_ready:
                self._notify(channel, CancelSteps(self._session))

    def hold(self) -> None:
        """From now on hands out only closures that may have started before, so that
        these end and no others begin."""
        with self.engine.lock:
            # First, as what workers give back from now on has to stay in the queue.
            self.queue.held = True
        self.recall_unstarted()
        self.turn_soon()

    def release(self) -> None:
        """Hands out all closures again, after `hold`."""
        with self.engine.lock:
            self.queue.held = False
        self.turn_soon()

    def suspend(self, suspended: bool) -> None:
        """Stops handing out closures, even those that may have started before; with
        False continues."""
        with self.engine.lock:
            self.queue.suspended = suspended
        # Else workers begin steps that only wait for the lost server.
        if suspended:
            self.recall_unstarted()
        self.turn_soon()

    def enter(self, session: int) -> None:
        """Sets the session number in all messages to workers, which join that
        session."""
        self._session = session
        for channel in self.channels.values():
            channel.session = session

    def fence(self, end: int, doubtful: list[int]) -> None:
        """Closes all steps below ``end`` on the parameter servers, and reports to the
        engine which of the ``doubtful`` steps were applied."""
        self.fences.raise_to(end, doubtful, partial(self.engine.fenced, end))

    async def fetch_kept(self, kept: Kept) -> list[np.ndarray]:
        """Fetches a result that its worker keeps.

        Raises:
            ClosureAbortedError: The worker is lost, or has reconnected since.
            DeadlineExceededError: No bytes came for ``timeouts.request`` seconds.
        """
        channel, lost = self.channels.get(kept.worker), None
        if channel is not None and channel.keeps(kept):
            try:
                return await channel.fetch(kept.step)
            except PeerLostError as error:
                lost = error
        name = "its worker" if channel is None else channel.member.name
        raise ClosureAbortedError(
            f"the result of step {kept.step} was too large to be sent when the step "
            f"ended, and was lost with {name}; schedule it again, and fetch large "
            "results soon, or return less"
        ) from lost

    def admit(self, task: TaskSession) -> None:
        """Adds a worker, or replaces a worker by another process. The worker need not
        have joined the session."""
        channel = self.channels.get(task.place)
        if channel is not None:
            channel.task = task
            return
        member = self.members.add(task.place, task.name)
        channel = WorkerChannel(self._session, task, member)
        self.channels[task.place] = channel
        with self.engine.lock:
            self.builder.add_worker(channel)

    async def retire_worker(
        self, task: TaskSession, reason: str, timeout: float
    ) -> None:
        """Gives a worker no more closures, and waits until the worker has ended those
        that it runs, or is lost, or ``timeout`` seconds have passed.

        Cancellation: the worker gets no more closures all the same.
        """
        channel = self.channels.get(task.place)
        if channel is None or channel.task is not task:
            return
        self.members.retire(task.place, reason, self._now())
        if self._stopped or not channel.member.in_flight:
            return
        if task.is_ready:  # it gives back what it has not started, for others
            self._notify(channel, CancelSteps(self._session))
        idle = self._retiring[task.place] = asyncio.Event()
        self.turn_soon()
        try:
            async with asyncio.timeout(timeout):
                await idle.wait()
        except TimeoutError:
            log.warning(
                "%s still runs %d closures after %s s; other workers run them",
                task.name,
                len(channel.member.in_flight),
                timeout,
            )
        finally:
            del self._retiring[task.place]

    def remove_worker(self, task: TaskSession, reason: str, *, for_good: bool) -> None:
        """Removes a worker; other workers run its closures. Unless ``for_good`` its
        place (the index in the session) stays, for a process at another address."""
        channel = self.channels.get(task.place)
        if channel is None or channel.task is not task:
            return
        # First, as `Members.remove` expects that nothing is in flight there.
        self.worker_lost(task, reason)
        if for_good:
            del self.channels[task.place]
            self.members.remove(task.place)
            with self.engine.lock:
                self.builder.remove_worker(channel)
                self.engine.waiters.notify()

    def worker_ready(self, task: TaskSession) -> None:
        """Builds the resources of a worker that has joined, and then gives it
        closures."""
        if self._stopped:
            return
        channel = self.channels[task.place]
        self.engine.no_worker_error = None
        epoch = task.entry
        self.members.connected(task.place, epoch)
        channel.clear()
        # Timed while nothing else is on the way: building resources takes the worker
        # long.
        channel.time_round_trip(partial(self.members.measured, task.place, epoch))
        # A worker that did not notice its loss may still have old closures.
        self._notify(channel, CancelSteps(self._session))
        self.builder.build_all(channel)

    def worker_lost(self, task: TaskSession, reason: str) -> None:
        """Gives the closures of a lost worker to other workers."""
        channel = self.channels.get(task.place)
        if channel is None or channel.task is not task:
            return  # it was removed
        now = self._now()
        orphans = self.members.lost(task.place, reason, now, counts=not task.is_moved)
        if self._stopped:
            return
        with self.engine.lock:
            for closure in orphans:
                # Only a lost process speaks against its closures. A broken connection,
                # or a worker that was removed, must not make suspects of them.
                if task.lives_on:  # so the closure did not kill it
                    ended = self.queue.retry(closure, now, begun=True)
                else:
                    ended = self.queue.lost(closure, channel.member.name, now)
                self.engine.settle(ended)
            self.builder.abort_worker(channel, reason)
            self.engine.waiters.notify()
        if orphans and not task.is_moved:
            log.warning(
                "%s had %d closures in flight; other workers run them",
                task.name,
                len(orphans),
            )
        self.turn_soon()

    def message_received(self, task: TaskSession, message: Message) -> None:
        """Handles a notice of a worker."""
        match message:
            case Completions(session=session) if session == self._session:
                # A worker sends each layout once per session, so they are kept with
                # the task: the next coordinator of the session needs them, too.
                layouts = {layout.layout: layout for layout in message.layouts}
                task.layouts.update(layouts)
                if not self._stopped:
                    channel, now = self.channels[task.place], self._now()
                    # Before `handle`, which takes ended closures out of `in_flight`.
                    # Of runs that count: others were given to another worker.
                    contributed = [
                        each
                        for each in message.contributions
                        if each.step in channel.member.in_flight
                    ]
                    more = self.outcomes.handle(channel, message, now)
                    if contributed:
                        self.rounds.contributed(task.place, contributed, now)
                    # With rounds: it may have nothing to do while others wait for it.
                    if more or self.rounds.rounds or self._has_messages_for(channel):
                        self.turn_soon()
            case Printed(session=session) if session == self._session:
                for text in message.texts:
                    self.engine.waiters.echo.put(short(task.name), *text)
            case _:
                log.warning("%s sent a %s", task.name, type(message).__name__)

    def turn_soon(self) -> None:
        """Schedules a turn at the end of this loop iteration. On the loop."""
        if self._turn_due is None and not self._stopped:
            # At the end of the iteration, so that a burst of calls and outcomes makes
            # one turn.
            self._turn_due = asyncio.get_running_loop().call_soon(self._turn)

    def turn(self) -> None:
        """Hands out closures now, unless a turn is already scheduled for this loop
        iteration."""
        if self._turn_due is None and not self._stopped:
            self._turn()

    def _turn(self) -> None:
        # First: whatever this turn brings about may ask for another one.
        self._turn_due = None
        self.turns += 1
        now, queue = self._now(), self.queue
        if self.rounds.rounds:
            self._call_back_waiting()
            self.rounds.look(now)
        with self.engine.lock:
            # All decisions are made under the lock; messages are sent after it, as
            # sending may find a worker lost, which takes the lock again.
            records = self.builder.take_new()
            # No closure is handed out before all workers build the new resources, which
            # it may need.
            runs = not records and self.engine.outage_error is None and queue.runs
            grants = []
            if runs:
                grants = self.members.grants(*queue.ready(now), queue.running)
            full, parked = queue.is_full, queue.parked
            work = [(grant, self._take_closures(grant, now)) for grant in grants]
            exhausted, queue.exhausted = queue.exhausted, []
            self.engine.settle(exhausted)
            # `grants` has counted closures that ended or were parked instead of being
            # sent.
            if exhausted or queue.parked > parked:  # workers have room for others
                self.turn_soon()
            metrics = self._metrics_for_observers(now) if work else None
            left = QueueLeft(queue.queued, full, metrics)
            # If nothing is left, the next `put` has to wake the loop.
            self.engine.must_wake = queue.waiting_fresh == 0
            low_water, due = queue.steps.low_water, queue.next_due()
            queue.leases.forget_applied()
            self.engine.waiters.notify()
        # A restore ends with a fence that has the mark
        # (`SessionRenewal.close_ended_steps`).
        if not queue.suspended:
            self.fences.send_mark(low_water, now)
        for record in records:
            self.builder.add(record)
            self.turn_soon()
        for grant, closures in _of_each_worker(work):
            channel = self.channels[grant.member.place]
            self.shipping.ship(channel, grant, closures, low_water, left, now)
        self._send_drops()
        for place, idle in self._retiring.items():
            if not self.channels[place].member.in_flight:
                idle.set()
        self._set_timer(due, now)
        self._set_no_worker_timer(now)

    def _call_back_waiting(self) -> None:
        """Recalls steps that wait for their round to be closed, if the round itself
        waits for others: for a step that has to run again, or for a worker that is idle
        because closures were given to other workers."""
        idle = (
            self.queue.queued == self.queue.parked
            and self.members.waits_for_idle_worker
        )
        needed = self.queue.runs_again or idle
        if needed and not self._called_back:
            self.recall_unstarted()
        # Not again at each turn: the request was sent, and its answers are on the way.
        self._called_back = needed

    def consistency(self, now: float, most: int | None = None) -> dict[str, PlainTree]:
        """Returns the metrics of rounds, with at most ``most`` workers each, and of
        bounded staleness. Callable from any thread."""
        there = len(self.members.sound)
        return {
            "rounds": self.rounds.rounds.metrics(there, now, most),
            "largest_lead": self.members.largest_lead,
        }

    def _metrics_for_observers(self, now: float) -> PlainTree:
        """Returns the metrics of the program that observers can get from workers alone,
        at most once a second; None in between, and if the program uses neither rounds
        nor bounded staleness nor leased datasets."""
        leases = self.queue.leases
        is_plain = not self.rounds.rounds and self.members.staleness is None
        if now < self._metrics_due or (is_plain and not leases.books):
            return None
        self._metrics_due = now + OBSERVED_EVERY
        # Several workers have some; the latest ones count.
        found = self.consistency(now, OBSERVED_WORKERS)
        return {"at": now, "leases": leases.metrics({}), **found}

    def _take_closures(self, grant: Grant, now: float) -> list[Closure]:
        if grant.alone:
            return [self.queue.take_suspect(now)]
        return self.queue.take(grant.count, now)

    def _send_drops(self) -> None:
        """Notifies workers of arguments, resources and results that are no longer
        needed."""
        arguments = _drain(self.retired)
        resources = self.builder.dropped()
        results = _drain(self.abandoned)
        has_new = bool(arguments or resources or results)
        for channel in list(self.channels.values()):
            member = channel.member
            if not (has_new or channel.pending_drops) or not channel.task.is_ready:
                continue
            own_results = [
                kept.step
                for kept in results
                if (kept.worker, kept.epoch) == (member.place, member.epoch)
            ]
            try:
                channel.send_drops(arguments, resources, own_results)
            except BusyError as error:  # they are sent with the next turns
                log.info("%s: %s", channel.task.name, error)
            except PeerLostError as error:
                self.worker_lost(channel.task, error.reason)

    def _notify(
        self, channel: WorkerChannel, message: CancelSteps | DropResults
    ) -> None:
        try:
            channel.task.link.notify(message)
        except (PeerLostError, BusyError) as error:
            # Its session reports the loss; a busy worker runs its closures.
            log.info("%s: %s", channel.task.name, error)

    def _has_messages_for(self, channel: WorkerChannel) -> bool:
        """Returns whether there is work for a turn although no closure waits, such as
        drops. All other work can wait for the next turn."""
        return bool(
            self.retired
            or self.abandoned
            or channel.pending_drops
            or self._retiring
            or self._no_worker_timer is not None
            or self.members.alone_since is not None
        )

    def _set_timer(self, due: float | None, now: float) -> None:
        """Schedules a turn for when a closure that came back may be handed out."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if due is not None and due > now:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_at(due, self.turn_soon)

    def _set_no_worker_timer(self, now: float) -> None:
        """Starts the timeout for a worker to join, if there is no worker and closures
        wait; else stops that timeout."""
        waits = self.members.alone_since is not None and self.engine.needs_worker
        if waits and self._no_worker_timer is None:
            loop = asyncio.get_running_loop()
            self._no_worker_timer = loop.call_at(
                now + self._worker_wait_timeout, self._no_worker_came
            )
            log.warning(
                "there is no worker; waiting for one: %s", self.members.absent()
            )
        elif not waits and self._no_worker_timer is not None:
            self._no_worker_timer.cancel()
            self._no_worker_timer = None

    def _no_worker_came(self) -> None:
        self._no_worker_timer = None
        if self.members.usable or not self.engine.needs_worker:
            return
        error = UnavailableError(
            f"there was no worker for {self._worker_wait_timeout:.0f} s "
            f"({self.members.absent()}): start one, add one with "
            "strategy.workers.add, or raise worker_wait_timeout="
        )
        self.engine.no_worker_error = error
        self.engine.fail(error)

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


def _drain(queue: deque[T]) -> list[T]:
    items: list[T] = []
    while queue:  # other threads append meanwhile
        items.append(queue.popleft())
    return items


def _of_each_worker(
    work: Sequence[tuple[Grant, list[Closure]]],
) -> Iterable[tuple[Grant, list[Closure]]]:
    """Joins the grants of each worker into one grant; with rounds a worker gets several
    in turn. So each worker is sent to once: sending may show that the worker is lost,
    and then it must get nothing more."""
    joined: dict[int, tuple[Grant, list[Closure]]] = {}
    for grant, closures in work:
        joined.setdefault(grant.member.place, (grant, []))[1].extend(closures)
    return joined.values()
