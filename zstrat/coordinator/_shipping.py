"""Sends closures that were granted to a worker, with the code and arguments they need.

Theory of operation. What a closure needs goes first, once per connection
(`WorkerChannel.ship`), then the closures themselves, in as few messages as can be.
A closure that cannot have what it needs ends with the reason; the others of the same
grant go all the same. The law of this file: each granted closure is on its way when
`ClosureShipping.ship` returns, or has ended, or is back in the queue.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Final, final

from zstrat.errors import BusyError, ClosedError, PeerLostError

from ._outcomes import SETBACK_SECONDS
from ._queue import Ended
from ._run_status import short

if TYPE_CHECKING:
    from collections.abc import Callable

    from ._engine import ClosureEngine
    from ._members import Grant, Members
    from ._queue import Closure, QueueLeft
    from ._worker_channel import WorkerChannel
    from .connecting import TaskSession

CLOSURES_PER_MESSAGE: Final = 2048
"""About 60 bytes each if all are of different functions."""
INPUTS_PER_MESSAGE: Final = 2**20
"""Bytes. A worker begins with the closures of a message when all of it is there."""


@final
class ClosureShipping:
    """Closures on their way to workers. On the loop.

    Args:
        turn_soon: Called when closures are back in the queue, or workers have room.
        worker_lost: Called when a worker is found to be lost.
    """

    def __init__(
        self,
        engine: ClosureEngine,
        members: Members,
        turn_soon: Callable[[], None],
        worker_lost: Callable[[TaskSession, str], None],
    ) -> None:
        self.messages = 0
        """How many were sent to workers."""
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
        """Sends closures of one grant to its worker.

        Args:
            low_water: All steps below it are over.
            left: What waits behind them.
            now: Loop time.
        """
        self._members.dispatched(channel.member, closures, now, alone=grant.alone)
        unsent = closures
        try:
            unsent = self._prepared(channel, closures)
            while unsent:
                count = _that_fit(unsent)
                self._send(channel, unsent[:count], low_water, left)
                unsent = unsent[count:]
        except BusyError:  # it does not read: somebody else may
            self._take_back(channel, unsent, now)
        except (PeerLostError, ClosedError) as error:
            # Its session tells the same, now or in this very iteration.
            self._worker_lost(channel.task, str(error))
        except Exception as error:  # goes to the closures, which would wait for ever
            self._end(channel, [Ended(closure, error) for closure in unsent])

    def _prepared(
        self, channel: WorkerChannel, closures: list[Closure]
    ) -> list[Closure]:
        """Ships what the closures need, and ends those that cannot have it; returns the
        others."""
        # Closures of one call need the same: it is looked at once, by identity.
        checked: dict[int, Exception | None] = {}
        good: list[Closure] = []
        bad: list[Ended] = []
        for closure in closures:
            call = closure.call
            if id(call) not in checked:
                checked[id(call)] = channel.ship(call)
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
                    again = self._queue.retry(
                        closure, now, SETBACK_SECONDS, begun=False
                    )
                    self._engine.settle(again)
        self._members.ended(channel.member, 0, now)
        self._turn_soon()

    def _end(self, channel: WorkerChannel, bad: list[Ended]) -> None:
        """Ends closures that did not get as far as their worker."""
        now = asyncio.get_running_loop().time()
        with self._engine.lock:
            for item in bad:
                del channel.member.in_flight[item.closure.step]
                self._queue.end(item.closure, item.error)
            self._engine.settle(bad)
            self._members.ended(channel.member, 0, now)
            self._engine.waiters.notify()
        self._turn_soon()


def _that_fit(closures: list[Closure]) -> int:
    """How many of them, the first ones, one message takes: one at least."""
    size = 0
    for count, closure in enumerate(closures[:CLOSURES_PER_MESSAGE]):
        size += len(closure.inputs)
        if count and size > INPUTS_PER_MESSAGE:
            return count
    return min(len(closures), CLOSURES_PER_MESSAGE)
