"""`RoundClosing`: closes the rounds of all optimizers on the parameter servers. On the
loop.

`OptimizerRounds` decides; this shell sends what it decides to all servers, one round of
an optimizer after the other, and watches the clock. Where an optimizer computes
something from all gradients (a global norm), a worker computes it first, from the
merged gradients. The law of this file: a round is closed with the members that were
decided first, however often that has to be repeated.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, final

from zstrat.errors import (
    NotFoundError,
    PeerLostError,
    ProtocolError,
    PSUnavailableError,
    StaleSessionError,
    UnavailableError,
)
from zstrat.ps import RoundMembers
from zstrat.wire import MergedOperands, MergeOperands

from ._rounds import OptimizerRounds

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from zstrat.ps import PsClient
    from zstrat.variables import Rounds
    from zstrat.wire import PlainTree, StepContribution

    from ._dispatch import Dispatcher
    from ._rounds import ClosingRound

log = logging.getLogger("zstrat.coordinator")


@final
class RoundClosing:
    """The rounds of one session.

    Args:
        client: Of the parameter servers.
        patience: Seconds that a round waits for workers that are not there.
    """

    def __init__(self, client: PsClient, patience: float) -> None:
        self._client, self._patience = client, patience
        self._rounds: dict[int, OptimizerRounds] = {}
        """By optimizer."""
        self._dispatcher: Dispatcher | None = None
        self._closing: set[asyncio.Task[None]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._short_since: float | None = None
        """Since when there are too few workers for a round."""
        self.flush_below = 0
        """Once no closure is left, rounds with contributions of steps below this are
        closed with what they have: a call waits for them. Any thread raises it."""

    @property
    def is_used(self) -> bool:
        """Whether an optimizer has rounds."""
        return bool(self._rounds)

    def add(self, optimizer: int, name: str, policy: Rounds) -> None:
        """Adds an optimizer that was created on the servers."""
        self._rounds[optimizer] = OptimizerRounds(optimizer, name, policy)
        if self._dispatcher is not None:
            self._dispatcher.members.pace()

    def attach(self, dispatcher: Dispatcher) -> None:
        """Uses the session's new dispatcher."""
        self._dispatcher = dispatcher
        if self._rounds:
            dispatcher.members.pace()

    def contributed(
        self, worker: int, contributions: Sequence[StepContribution], now: float
    ) -> None:
        """Takes contributions of steps that have ended on a worker."""
        for each in contributions:
            rounds = self._rounds.get(each.optimizer)
            if rounds is None:
                log.warning(
                    "step %d contributed to rounds of optimizer %d, which has none",
                    each.step,
                    each.optimizer,
                )
                continue
            rounds.contributed(worker, each, now)
        self.look(now)

    def is_open_below(self, step: int) -> bool:
        """Returns whether a contribution of a step below ``step`` waits, or a round is
        being closed. From any thread."""
        return bool(self._closing) or any(
            rounds.is_open_below(step) for rounds in tuple(self._rounds.values())
        )

    def look(self, now: float) -> None:
        """Closes the rounds that are due, and sets the timer for the next one."""
        dispatcher = self._dispatcher
        if dispatcher is None or not self._rounds:
            return
        there = [member.place for member in dispatcher.members.usable]
        next_due: list[float] = []
        for rounds in self._rounds.values():
            due = rounds.due(len(there), now)
            if dispatcher.queue.is_idle and rounds.is_open_below(self.flush_below):
                due = None if rounds.is_closing else now
            if due is None:
                continue
            if due <= now:
                self._begin(rounds)
            else:
                next_due.append(due)
        next_due += self._check_workers(there, now)
        optimizers = self._rounds.values()
        dispatcher.members.note_rounds(
            [at for at in there if any(each.has(at) for each in optimizers)]
        )
        self._set_timer(min(next_due, default=None))

    async def settle(self) -> None:
        """Waits until no round is being closed.

        Cancellation: they are closed all the same.
        """
        while self._closing:
            await asyncio.wait(self._closing)

    def restart(self) -> int:
        """Begins again on servers that were emptied; returns how many contributions are
        lost. Contributions come again with the steps that run again."""
        for task in self._closing:
            task.cancel()
        return sum([rounds.restart() for rounds in self._rounds.values()])

    async def stop(self) -> None:
        """Stops closing rounds."""
        if self._timer is not None:
            self._timer.cancel()
        for task in self._closing:
            task.cancel()
        await asyncio.gather(*self._closing, return_exceptions=True)

    def metrics(self, now: float) -> dict[str, PlainTree]:
        """Returns the numbers of all rounds, by name of the optimizer."""
        return {each.name: each.metrics(now) for each in self._rounds.values()}

    def _begin(self, rounds: OptimizerRounds) -> None:
        assert self._dispatcher is not None
        closing = rounds.close()
        over = self._dispatcher.queue.steps.low_water
        task = asyncio.get_running_loop().create_task(
            self._close(rounds, closing, over), name=f"round {closing.number}"
        )
        self._closing.add(task)  # cancelled by stop()
        task.add_done_callback(self._ended)

    async def _close(
        self, rounds: OptimizerRounds, closing: ClosingRound, over: int
    ) -> None:
        closed = RoundMembers(
            rounds.optimizer, closing.number, rounds.policy.rule, closing.members
        )
        operands: Sequence[np.ndarray] = ()
        if closing.coupled and closing.members:
            operands = await self._operands(closed)
        await self._client.close_round(closed, rounds.steps, over, operands)
        rounds.closed(asyncio.get_running_loop().time())

    async def _operands(self, closed: RoundMembers) -> Sequence[np.ndarray]:
        """Has a worker compute what the optimizer needs of all merged gradients.

        Raises:
            UnavailableError: No worker could.
        """
        assert self._dispatcher is not None
        tried: list[str] = []
        for channel in list(self._dispatcher.channels.values()):
            if not channel.task.is_ready:
                continue
            order = MergeOperands(
                channel.session,
                closed.optimizer,
                closed.number,
                int(closed.rule),
                list(closed.members),
            )
            try:
                answer = await channel.task.link.request(order)
            except (PeerLostError, NotFoundError, StaleSessionError) as error:
                tried.append(f"{channel.task.name}: {error}")
                continue
            if not isinstance(answer, MergedOperands):
                raise ProtocolError(
                    f"{channel.task.name} answered MergeOperands with "
                    f"{type(answer).__name__}"
                )
            return answer.arrays
        raise UnavailableError(
            f"round {closed.number}: no worker could compute what the optimizer needs "
            f"of all gradients ({'; '.join(tried) or 'none is connected'}): start one, "
            "or add one with strategy.workers.add"
        )

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._closing.discard(task)
        dispatcher = self._dispatcher
        if task.cancelled() or dispatcher is None:
            return
        error = task.exception()
        if isinstance(error, PSUnavailableError) and dispatcher.queue.suspended:
            return  # the servers are restored, and rounds begin again
        if error is not None:
            dispatcher.engine.fail(error)
        with dispatcher.engine.lock:
            dispatcher.engine.waiters.notify()
        self.look(asyncio.get_running_loop().time())
        dispatcher.turn_soon()

    def _check_workers(self, there: Sequence[int], now: float) -> list[float]:
        """Fails if there have been too few workers for a round for too long; returns
        when that will be."""
        dispatcher = self._dispatcher
        assert dispatcher is not None
        short = [
            rounds
            for rounds in self._rounds.values()
            if rounds.steps and len(there) < rounds.enough(len(there))
        ]
        if not short:
            self._short_since = None
            return []
        if self._short_since is None:
            self._short_since = now
            log.warning("%s", self._words(short[0], there))
        due = self._short_since + self._patience
        if now < due:
            return [due]
        self._short_since = None
        dispatcher.engine.fail(UnavailableError(self._words(short[0], there)))
        return []

    def _words(self, rounds: OptimizerRounds, there: Sequence[int]) -> str:
        members = self._dispatcher.members if self._dispatcher is not None else None
        absent = "" if members is None else members.absent()
        return (
            f"optimizer {rounds.name!r}: round {rounds.number} needs "
            f"{rounds.enough(len(there))} contributions and has {len(rounds.steps)}, "
            f"but there are {len(there)} workers"
            f"{f' ({absent})' if absent else ''}: start the others, or let "
            "zs.Rounds(workers=None) follow the workers that there are, or give it a "
            "backup="
        )

    def _set_timer(self, due: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if due is not None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_at(due, lambda: self.look(loop.time()))
