"""Sends closures to workers, with the code and the arguments that they need.

A `WorkerChannel` knows what one worker has received. Code and arguments are sent once
per connection, before the first closure that needs them; a link keeps the order of
messages. `ClosureShipping` sends the closures that a worker was granted, in as few
messages as possible. A closure whose code or arguments cannot be sent fails with the
reason, and the others of the grant are sent without it.

Laws of this file: what is in the sets of a channel was sent on the present connection;
when `ClosureShipping.ship` returns, each closure was sent, has failed, or is back in
the queue.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, final

import numpy as np

from zstrat.errors import BusyError, ClosedError, PeerLostError, StaleSessionError
from zstrat.program import BESIDE
from zstrat.wire import (
    LEASE,
    AskClock,
    AskIteratorFit,
    AskIteratorState,
    Batch,
    Dispatch,
    DropArguments,
    DropResources,
    DropResults,
    Fetch,
    Fetched,
    IteratorState,
    Message,
    PutArguments,
    PutCode,
)

from ._queue import HANDBACK_DELAY, Ended
from ._run_status import short

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from ._calls import Code, PickledArguments, ScheduledCall
    from ._engine import ClosureEngine
    from ._members import Grant, Member, Members
    from ._queue import Closure, QueueLeft
    from ._values import Kept
    from .connecting import TaskSession

log = logging.getLogger("zstrat.coordinator")

ROUND_TRIPS: Final = 4
"""Number of round trips that are timed; the shortest counts, as the others waited
somewhere."""
CLOSURES_PER_MESSAGE: Final = 2048
"""The most closures in a message. Those of different functions take about 60 bytes
each."""
NUMBERS_PER_MESSAGE: Final = 16384
"""The most numbers of things to drop in a message; a number takes at most nine
bytes."""
INPUTS_PER_MESSAGE: Final = 2**20
"""The most bytes of array inputs in a message. A worker starts the closures of a
message when it has received all of it."""


@dataclass(slots=True, eq=False)
class WorkerChannel:
    """The connection to one worker, and a record of the code, arguments and resources
    that were sent on it."""

    session: int
    task: TaskSession
    member: Member
    codes: set[bytes] = field(default_factory=set)
    arguments: set[int] = field(default_factory=set)
    resources: set[int] = field(default_factory=set)
    failed: dict[int, Exception] = field(default_factory=dict)
    """The errors with which building resources failed, by number of the resource."""
    pending_drops: deque[Message] = field(default_factory=deque)
    """Messages that drop things, to be sent when the worker is no longer too busy."""

    def clear(self) -> None:
        """Forgets the record of what was sent, for a new connection."""
        for held in (self.codes, self.arguments, self.resources):
            held.clear()
        self.failed.clear()
        self.pending_drops.clear()

    def time_round_trip(
        self,
        report: Callable[[float], None],
        left: int = ROUND_TRIPS,
        shortest: float = math.inf,
    ) -> None:
        """Measures the round trip to the worker, and calls ``report`` with its seconds,
        unless the worker is lost first."""
        loop = asyncio.get_running_loop()
        began = loop.time()

        def answered(answer: asyncio.Future[Message]) -> None:
            if answer.cancelled() or answer.exception() is not None:
                return  # lost; the next connection is measured again
            shortest_so_far = min(shortest, loop.time() - began)
            # One after the other: several at once would wait for each other.
            if left > 1:
                self.time_round_trip(report, left - 1, shortest_so_far)
            else:
                report(shortest_so_far)

        with contextlib.suppress(PeerLostError, ClosedError, BusyError):
            asked = self.task.link.submit(AskClock(self.session))
            asked.add_done_callback(answered)

    def put_code(self, code: Code) -> None:
        """Sends code to the worker, unless it has the code already."""
        if code.digest in self.codes:
            return
        # A request, not a notice as arguments are: a worker may refuse code, and says
        # why.
        message = PutCode(self.session, code.digest, code.code)
        self.task.link.submit(message).add_done_callback(self._log_refusal)
        self.codes.add(code.digest)

    def put_arguments(self, arguments: PickledArguments | None) -> int:
        """Sends arguments to the worker, unless it has them already; returns their
        number, 0 if there are none."""
        if arguments is None:
            return 0
        number = arguments.number
        if number not in self.arguments:
            self.task.link.notify(
                PutArguments(self.session, number, arguments.code, arguments.arrays)
            )
            self.arguments.add(number)
        return number

    def send_call(self, call: ScheduledCall) -> Exception | None:
        """Sends the code and the arguments of a call. Returns the error with which its
        closures fail on this worker, or None.

        Raises:
            PeerLostError, ClosedError, BusyError: The worker receives nothing now.
        """
        for resource in call.resources:
            if resource in self.failed:
                return self.failed[resource]
        try:
            self.put_code(call.function)
            self.put_arguments(call.arguments)
        except (PeerLostError, ClosedError, BusyError):
            raise
        except Exception as error:  # to the closures: the message cannot be sent
            return error
        return None

    def dispatch(
        self, closures: Iterable[Closure], low_water: int, left: QueueLeft
    ) -> None:
        """Sends closures in one message, after `send_call` of their calls."""
        batches: list[Batch] = []
        inputs: list[bytes] = []
        beside: list[np.ndarray] = []
        call: ScheduledCall | None = None
        attempt = 0
        steps: list[int] = []
        for closure in closures:
            # Neighbours with one call and attempt share a header: most messages have a
            # single one.
            if closure.call is not call or closure.attempt != attempt:
                call, attempt, steps = closure.call, closure.attempt, []
                number = call.arguments.number if call.arguments else 0
                size = len(closure.inputs) + len(closure.leases)
                leases = len(closure.leases) // LEASE.size
                batches.append(
                    Batch(call.function.digest, number, attempt, steps, size, leases)
                )
            steps.append(closure.step)
            sent = closure.inputs + closure.leases
            if len(sent) >= BESIDE:
                beside.append(np.frombuffer(sent, np.uint8))
            elif sent:
                inputs.append(sent)
        self.task.link.notify(
            Dispatch(
                self.session,
                low_water,
                batches,
                b"".join(inputs),
                tuple(beside),
                left.waiting,
                left.full,
                left.metrics,
            )
        )

    def send_drops(
        self, arguments: Iterable[int], resources: Iterable[int], results: Iterable[int]
    ) -> None:
        """Makes the worker free arguments, resources and results that no closure and no
        value needs. Also sends earlier drops for which the worker was too busy.

        Raises:
            PeerLostError, ClosedError: The worker is not connected.
            BusyError: The worker does not read; a later call sends what is pending.
        """
        pending, session = self.pending_drops, self.session
        # Only what this connection has: after a reconnect the worker has nothing.
        for piece in _pieces(self.arguments.intersection(arguments)):
            self.arguments.difference_update(piece)
            pending.append(DropArguments(session, piece))
        for piece in _pieces(self.resources.intersection(resources)):
            self.resources.difference_update(piece)
            pending.append(DropResources(session, piece))
        for piece in _pieces(results):
            pending.append(DropResults(session, piece))
        while pending:
            # Removed after it was sent: if the worker is busy, it stays the first.
            self.task.link.notify(pending[0])
            pending.popleft()

    def keeps(self, kept: Kept) -> bool:
        """Returns whether the worker still has a result, because it has not reconnected
        since it kept that."""
        return self.task.is_ready and self.task.entry == kept.epoch

    async def fetch(self, step: int) -> list[np.ndarray]:
        """Fetches a result that the worker keeps.

        Raises:
            PeerLostError: The worker is lost, and the result with it.
            DeadlineExceededError: No bytes came for ``timeouts.request`` seconds.
        """
        answer = await self.task.link.submit(Fetch(self.session, step))
        assert isinstance(answer, Fetched), answer
        return list(answer.arrays)

    async def iterator_state(self, number: int, deadline: float) -> str | None:
        """Returns the position of an iterator in its data, as JSON: "" at the start,
        None if the worker is lost.

        Raises:
            InvalidArgumentError: The dataset has no position that can be saved.
            DeadlineExceededError: No answer until ``deadline`` (loop time).
        """
        request = AskIteratorState(self.session, number)
        answer = await self._request(request, deadline)
        if answer is None:
            return None
        assert isinstance(answer, IteratorState), answer
        return answer.state

    async def require_fit(self, number: int, state: str, deadline: float) -> None:
        """Checks that an iterator can continue at a position. A worker that is lost, or
        could not build the iterator, is not checked.

        Raises:
            InvalidArgumentError: The iterator cannot continue there; the message says
                why.
            DeadlineExceededError: See `iterator_state`.
        """
        await self._request(AskIteratorFit(self.session, number, state), deadline)

    async def _request(
        self, message: AskIteratorState | AskIteratorFit, deadline: float
    ) -> Message | None:
        try:
            return await self.task.link.submit(message, deadline=deadline)
        except PeerLostError:
            return None

    def _log_refusal(self, answer: asyncio.Future[Message]) -> None:
        """Logs that the worker could not load code. The closures that need it fail
        there with the reason."""
        if answer.cancelled() or (error := answer.exception()) is None:
            return
        log.warning("%s did not load code: %s", self.member.name, error)
        if isinstance(error, StaleSessionError):
            self.task.reopen("it is no longer in our session")


@final
class ClosureShipping:
    """Sends granted closures to their workers. On the loop thread.

    Args:
        turn_soon: Called when closures are back in the queue, or a worker has room.
        worker_lost: Called when sending shows that a worker is lost.
    """

    def __init__(
        self,
        engine: ClosureEngine,
        members: Members,
        turn_soon: Callable[[], None],
        worker_lost: Callable[[TaskSession, str], None],
    ) -> None:
        self.messages = 0
        """Number of `Dispatch` messages sent so far."""
        self._engine, self._queue, self._members = engine, engine.queue, members
        self._turn_soon, self._worker_lost = turn_soon, worker_lost

    def ship(
        self,
        channel: WorkerChannel,
        grant: Grant,
        closures: list[Closure],
        low_water: int,
        left: QueueLeft,
        now: float,
    ) -> None:
        """Sends the closures of one grant to its worker.

        Args:
            low_water: All steps below it have ended.
            left: The closures that still wait in the queue.
            now: Loop time.
        """
        # Before they are sent: if sending shows that the worker is lost, others get
        # what is in flight there, these included.
        self._members.dispatched(channel.member, closures, now, alone=grant.alone)
        unsent = closures
        try:
            unsent = self._send_calls(channel, closures)
            while unsent:
                count = _count_that_fit(unsent)
                self._send(channel, unsent[:count], low_water, left)
                unsent = unsent[count:]
        except BusyError:  # it does not read; another worker may
            self._take_back(channel, unsent, now)
        except (PeerLostError, ClosedError) as error:
            # Its session reports the same, now or in this iteration of the loop.
            self._worker_lost(channel.task, str(error))
        except Exception as error:  # to the closures, which would never end
            self._end(channel, [Ended(closure, error) for closure in unsent])

    def _send_calls(
        self, channel: WorkerChannel, closures: list[Closure]
    ) -> list[Closure]:
        """Sends the code and arguments that the closures need. Fails the closures for
        which that is impossible, and returns the others."""
        # Closures of one call need the same, so each call is checked once.
        checked: dict[int, Exception | None] = {}
        good: list[Closure] = []
        bad: list[Ended] = []
        for closure in closures:
            call = closure.call
            # By identity, which is safe while the closures hold their calls.
            if id(call) not in checked:
                checked[id(call)] = channel.send_call(call)
            error = checked[id(call)]
            if error is None:
                good.append(closure)
            else:
                bad.append(Ended(closure, error))
        if bad:
            self._end(channel, bad)
        return good

    def _send(
        self,
        channel: WorkerChannel,
        closures: list[Closure],
        low_water: int,
        left: QueueLeft,
    ) -> None:
        notes = self._engine.notes
        began = 0.0 if notes is None else time.monotonic()
        channel.dispatch(closures, low_water, left)
        self.messages += 1
        if notes is not None:
            name = short(channel.task.name)
            notes.dispatch(name, len(closures), began, time.monotonic())

    def _take_back(
        self, channel: WorkerChannel, unsent: list[Closure], now: float
    ) -> None:
        """Puts closures that were not sent back into the queue."""
        with self._engine.lock:
            for closure in unsent:
                if channel.member.in_flight.pop(closure.step, None) is not None:
                    # As those that it gives back, for the clock of bounded staleness.
                    channel.member.started -= 1
                    again = self._queue.retry(closure, now, HANDBACK_DELAY, begun=False)
                    self._engine.settle(again)
        self._members.ended(channel.member, 0, now)
        self._turn_soon()

    def _end(self, channel: WorkerChannel, bad: list[Ended]) -> None:
        """Ends closures that could not be sent to their worker with an error."""
        now = asyncio.get_running_loop().time()
        with self._engine.lock:
            for item in bad:
                del channel.member.in_flight[item.closure.step]
                self._queue.end(item.closure, item.error)
            self._engine.settle(bad)
            self._members.ended(channel.member, 0, now)
            self._engine.waiters.notify()
        self._turn_soon()


def _pieces(numbers: Iterable[int]) -> Iterator[list[int]]:
    """Yields the numbers in order, in lists that fit one message."""
    ordered = sorted(numbers)
    for at in range(0, len(ordered), NUMBERS_PER_MESSAGE):
        yield ordered[at : at + NUMBERS_PER_MESSAGE]


def _count_that_fit(closures: list[Closure]) -> int:
    """Returns how many of the first closures fit one message: at least one."""
    size = 0
    for count, closure in enumerate(closures[:CLOSURES_PER_MESSAGE]):
        size += len(closure.inputs)
        if count and size > INPUTS_PER_MESSAGE:
            return count
    return min(len(closures), CLOSURES_PER_MESSAGE)
