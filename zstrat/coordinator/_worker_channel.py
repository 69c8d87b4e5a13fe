"""What one worker holds of ours, and how more of it gets there.

Code and arguments are shipped once per connection, before the first closure that needs
them: the order of messages on a link does the rest. The law of this file: what is in
the sets of a channel was sent on the present connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np

from zstrat.errors import BusyError, ClosedError, PeerLostError, StaleSessionError
from zstrat.program import BESIDE
from zstrat.wire import (
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

log = logging.getLogger("zstrat.coordinator")

ROUND_TRIPS: Final = 4
"""Of which the shortest counts."""

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ._calls import Code, PickledArguments, ScheduledCall
    from ._members import Member
    from ._queue import Closure, QueueLeft
    from ._values import Kept
    from .connecting import TaskSession


@dataclass(slots=True, eq=False)
class WorkerChannel:
    """One worker, as the dispatcher sees it, and what was sent to it."""

    session: int
    task: TaskSession
    member: Member
    codes: set[bytes] = field(default_factory=set)
    arguments: set[int] = field(default_factory=set)
    resources: set[int] = field(default_factory=set)
    failed: dict[int, Exception] = field(default_factory=dict)
    """Resources that could not be built there, by number."""
    pending_drops: deque[Message] = field(default_factory=deque)
    """What the worker is to forget, and was too busy to hear."""

    def clear(self) -> None:
        """A new connection: nothing is there yet."""
        for held in (self.codes, self.arguments, self.resources):
            held.clear()
        self.failed.clear()
        self.pending_drops.clear()

    def time_round_trip(
        self,
        tell: Callable[[float], None],
        left: int = ROUND_TRIPS,
        shortest: float = math.inf,
    ) -> None:
        """Has ``tell`` called with the seconds to the worker and back, unless it is
        lost before. The shortest of some counts: the others wait somewhere."""
        loop = asyncio.get_running_loop()
        began = loop.time()

        def answered(answer: asyncio.Future[Message]) -> None:
            if answer.cancelled() or answer.exception() is not None:
                return  # it is lost: the next connection is timed anew
            found = min(shortest, loop.time() - began)
            if left > 1:
                self.time_round_trip(tell, left - 1, found)
            else:
                tell(found)

        with contextlib.suppress(PeerLostError, ClosedError, BusyError):
            asked = self.task.link.submit(AskClock(self.session))
            asked.add_done_callback(answered)

    def put_code(self, code: Code) -> None:
        """Ships the code, unless it is there."""
        if code.digest in self.codes:
            return
        message = PutCode(self.session, code.digest, code.code)
        self.task.link.submit(message).add_done_callback(self._log_refusal)
        self.codes.add(code.digest)

    def put_arguments(self, arguments: PickledArguments | None) -> int:
        """Ships the arguments, unless they are there; returns their number."""
        if arguments is None:
            return 0
        number = arguments.number
        if number not in self.arguments:
            self.task.link.notify(
                PutArguments(self.session, number, arguments.code, arguments.arrays)
            )
            self.arguments.add(number)
        return number

    def ship(self, call: ScheduledCall) -> Exception | None:
        """Ships what the call needs. Returns why its closures cannot run here, if so.

        Raises:
            PeerLostError, ClosedError, BusyError: The worker does not take anything.
        """
        for resource in call.resources:
            if resource in self.failed:
                return self.failed[resource]
        try:
            self.put_code(call.function)
            self.put_arguments(call.arguments)
        except (PeerLostError, ClosedError, BusyError):
            raise
        except Exception as error:  # goes to the closures: the message cannot be sent
            return error
        return None

    def dispatch(
        self, closures: Iterable[Closure], low_water: int, left: QueueLeft
    ) -> None:
        """Sends closures whose calls were shipped, all in one message."""
        batches: list[Batch] = []
        inputs: list[bytes] = []
        beside: list[np.ndarray] = []
        call: ScheduledCall | None = None
        attempt = 0
        steps: list[int] = []
        for closure in closures:
            if closure.call is not call or closure.attempt != attempt:
                call, attempt, steps = closure.call, closure.attempt, []
                number = call.arguments.number if call.arguments else 0
                size = len(closure.inputs)
                batches.append(
                    Batch(call.function.digest, number, attempt, steps, size)
                )
            steps.append(closure.step)
            if len(closure.inputs) >= BESIDE:
                beside.append(np.frombuffer(closure.inputs, np.uint8))
            elif closure.inputs:
                inputs.append(closure.inputs)
        given = b"".join(inputs), tuple(beside)
        self.task.link.notify(Dispatch(self.session, low_water, batches, *given, *left))

    def forget(
        self, arguments: Iterable[int], resources: Iterable[int], results: Iterable[int]
    ) -> None:
        """Tells the worker what nobody needs any more, and what it is still owed.

        Raises:
            PeerLostError, ClosedError: It is not there.
            BusyError: It does not read; call again some time, with nothing new.
        """
        pending_drops, session = self.pending_drops, self.session
        if gone := sorted(self.arguments.intersection(arguments)):
            self.arguments.difference_update(gone)
            pending_drops.append(DropArguments(session, gone))
        if gone := sorted(self.resources.intersection(resources)):
            self.resources.difference_update(gone)
            pending_drops.append(DropResources(session, gone))
        if gone := sorted(results):
            pending_drops.append(DropResults(session, gone))
        while pending_drops:
            # Taken out when it is sent: what the worker is too busy for stays, in its
            # order.
            self.task.link.notify(pending_drops[0])
            pending_drops.popleft()

    def keeps(self, kept: Kept) -> bool:
        """Whether a result is still there: the worker has not connected anew since."""
        return self.task.is_ready and self.member.epoch == kept.epoch

    async def fetch(self, step: int) -> list[np.ndarray]:
        """Fetches the result of a step that stayed on the worker.

        Raises:
            PeerLostError: The worker is lost, and the result with it.
            DeadlineExceededError: Nothing moved for ``timeouts.request`` seconds.
        """
        answer = await self.task.link.submit(Fetch(self.session, step))
        assert isinstance(answer, Fetched), answer
        return list(answer.arrays)

    async def iterator_state(self, number: int, deadline: float) -> str | None:
        """Where an iterator is in its data, as JSON; "" where it began, None if the
        worker is lost now.

        Raises:
            InvalidArgumentError: It cannot be told; says why.
            DeadlineExceededError: It did not answer until ``deadline`` (loop time).
        """
        answer = await self._asked(AskIteratorState(self.session, number), deadline)
        if answer is None:
            return None
        assert isinstance(answer, IteratorState), answer
        return answer.state

    async def require_fit(self, number: int, state: str, deadline: float) -> None:
        """Asks whether an iterator can go to a place. A worker that is lost does not
        say, nor one that could not build it.

        Raises:
            InvalidArgumentError: It cannot; says why.
            DeadlineExceededError: As `iterator_state`.
        """
        await self._asked(AskIteratorFit(self.session, number, state), deadline)

    async def _asked(
        self, ask: AskIteratorState | AskIteratorFit, deadline: float
    ) -> Message | None:
        try:
            return await self.task.link.submit(ask, deadline=deadline)
        except PeerLostError:
            return None

    def _log_refusal(self, answer: asyncio.Future[Message]) -> None:
        """Code that cannot be loaded fails each closure that needs it, with the reason
        that the worker gives there."""
        if answer.cancelled() or (error := answer.exception()) is None:
            return
        log.warning("%s did not take code: %s", self.member.name, error)
        if isinstance(error, StaleSessionError):
            self.task.reopen("it is not in our session any more")
