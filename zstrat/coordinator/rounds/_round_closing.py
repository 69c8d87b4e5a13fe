"""`RoundClosing`: closes the rounds of all optimizers on the parameter servers. On the
loop.

`OptimizerRounds` decides; this shell sends its orders to all servers, one round of an
optimizer after the other, and watches the clock. Where an optimizer computes something
from all gradients (a global norm), a worker computes it first, from the merged
gradients. The law of this file: a round is closed with the members that were decided
first, however often the order has to be repeated.
"""

from __future__ import annotations

import asyncio
import logging
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, NamedTuple, final

from zstrat.errors import (
    ClosedError,
    PeerLostError,
    ProtocolError,
    StaleSessionError,
    UnavailableError,
    ZstratError,
)
from zstrat.wire import MergedOperands, MergeOperands

from ._optimizer_rounds import (
    FORMER,
    SessionRounds,
    first_free_step,
    inherited_rounds,
    sources_of,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import numpy as np

    from zstrat.coordinator._calls import Code
    from zstrat.coordinator._engine import ClosureEngine
    from zstrat.coordinator._members import Members
    from zstrat.coordinator._shipping import WorkerChannel
    from zstrat.ps import PsClient
    from zstrat.variables import Rounds
    from zstrat.wire import RoundOrder, StepContribution

    from ._optimizer_rounds import ClosingRound, OptimizerRounds, RestoredRounds

log = logging.getLogger("zstrat.coordinator")

PAUSE: Final = 0.05
"""Seconds after which an order to close a round that has failed is sent again."""


class CoordinatorParts(NamedTuple):
    """The parts of a coordinator that rounds use. ``channels`` are by place (index) of
    the worker."""

    engine: ClosureEngine
    members: Members
    channels: Mapping[int, WorkerChannel]
    turn_soon: Callable[[], None]


@final
class RoundClosing:
    """The rounds of one session.

    Args:
        client: The client of the parameter servers.
        timeout: Seconds that a round waits for workers that are not connected.
    """

    def __init__(self, client: PsClient, timeout: float) -> None:
        self._client, self._timeout = client, timeout
        self.rounds: Final = SessionRounds()
        self.first_step = 1
        """The first step number that this program may use."""
        self._codes: dict[int, Code] = {}
        """The pickled optimizer, as it was created on the servers, by number of the
        optimizer."""
        self._coordinator: CoordinatorParts | None = None
        self._closing: set[asyncio.Task[None]] = set()
        self._failed: list[tuple[OptimizerRounds, ClosingRound]] = []
        """Rounds whose order a lost server may not have received. They are closed again
        when all servers are back."""
        self._again_at = 0.0
        """Loop time before which failed rounds are not closed again."""
        self._error: UnavailableError | None = None
        """Why a round can never be closed, as servers may differ; None if all can."""
        self._news = asyncio.Event()
        """An event that the next call of `look` sets, and replaces by another."""
        self._timer: asyncio.TimerHandle | None = None
        self._is_held = False
        self._short_since: float | None = None
        """Time since which there are too few workers for a round; None while there are
        enough."""
        self._warned: set[int] = set()
        """Optimizers with smaller rounds than there are workers, for which a warning
        was logged."""

    async def inherit(self, deadline: float) -> None:
        """Takes over the rounds that the program before this one has left, when all
        servers are in this session.

        Raises:
            UnavailableError: A server has lost updates that others have applied.
            ZstratError: As `PsClient.close_round`.

        Cancellation: another program may take the rounds over.
        """
        held = await self._client.held_rounds(deadline)
        self.first_step = first_free_step(held)
        self.rounds.inherited = decided = inherited_rounds(held)
        for optimizer, each in decided.items():
            if (order := each.closed).number < 0:
                continue
            try:  # servers that have closed it do nothing
                await self._client.close_round(order, [], 0, each.arrays)
            except ZstratError as error:
                if error.retryable:
                    raise
                sources = sources_of((member.step, FORMER) for member in order.members)
                effect = "servers differ"
                raise _unclosed(order, optimizer, effect, error, sources) from error

    def add(self, optimizer: int, name: str, policy: Rounds, code: Code) -> None:
        """Adds the rounds of an optimizer that was created on the servers."""
        self.rounds.add(optimizer, name, policy)
        self._codes[optimizer] = code
        if self._coordinator is not None:
            self._coordinator.members.pace()

    def remove(self, optimizer: int) -> None:
        """Removes an optimizer that no longer has a handle, if it has rounds."""
        self.rounds.remove(optimizer)
        self._codes.pop(optimizer, None)

    def attach(self, coordinator: CoordinatorParts) -> None:
        """Sets the session's new coordinator, whose workers rounds use."""
        if self._coordinator is not None:
            for rounds in self.rounds:
                rounds.is_left_open = True
        self._coordinator = coordinator
        if self.rounds:
            coordinator.members.pace()

    def contributed(
        self, worker: int, contributions: Sequence[StepContribution], now: float
    ) -> None:
        """Adds the contributions of steps that have ended on a worker to their
        rounds."""
        for each in contributions:
            rounds = self.rounds.get(each.optimizer)
            if rounds is None:
                log.warning(
                    "step %d contributed to rounds of optimizer %d, which has none",
                    each.step,
                    each.optimizer,
                )
            else:
                rounds.contributed(worker, each, now)
        self.look(now)

    def look(self, now: float) -> None:
        """Closes the rounds that are due, and sets the timer for the next one."""
        coordinator = self._coordinator
        if coordinator is None or not self.rounds:
            return
        self._news.set()  # also while it is held: `hold` waits for what is being closed
        self._news = asyncio.Event()
        engine = coordinator.engine
        if self._error is not None:
            # The end of an outage does not end this, nor does a new coordinator.
            if engine.outage_error is None:
                engine.fail(self._error, lasting=True)
            return
        if self._is_held:
            return
        members, queue = coordinator.members, engine.queue
        # While a restore waits for a server there is no outage, and it is away.
        is_away = queue.suspended or engine.outage_error is not None
        next_due: list[float] = []
        if self._failed and not is_away:
            if now < self._again_at:
                next_due.append(self._again_at)
            else:
                failed, self._failed = self._failed, []
                for each in failed:
                    self._send(*each)
        there = [member.place for member in members.sound]
        for rounds in self.rounds:
            self._warn_of_small(rounds, len(there))
            below = self.rounds.flush_below
            is_awaited = queue.is_idle and rounds.is_open_below(below)
            due = rounds.due(len(there), now, is_awaited=is_awaited)
            if due is not None and due <= now:
                self._send(rounds, rounds.close())
            elif due is not None:
                next_due.append(due)
        next_due += self._check_workers(there, now)
        members.note_rounds(self.rounds.contributors)
        self._set_timer(min(next_due, default=None))

    async def hold(self) -> None:
        """Closes no further round until `release`; waits until no round is being
        closed.

        Raises:
            UnavailableError: A server that is away may not have closed a round, or
                never can.

        Cancellation: the rounds that are being closed close all the same.
        """
        # First, or a round that is due could begin to close while others are awaited.
        self._is_held = True
        await self.settle()
        if self._error is not None:
            raise self._error.with_traceback(None)
        if self._failed:
            rounds, closing = self._failed[0]
            raise UnavailableError(
                f"round {closing.order.number} of optimizer {rounds.name!r} is not "
                "closed on all parameter servers yet, as one is away"
            )

    async def settle(self) -> None:
        """Waits until no round is being closed.

        Cancellation: these rounds are closed all the same.
        """
        while self._closing:
            await asyncio.wait(self._closing)

    def release(self) -> None:
        """Ends `hold`: closes rounds again. Idempotent."""
        self._is_held = False
        self.look(asyncio.get_running_loop().time())

    async def drop(
        self, restored: Mapping[int, RestoredRounds] = MappingProxyType({})
    ) -> None:
        """Drops the contributions that wait for rounds, on all servers. Call it only
        between `hold` and `release`, as no round may be closed meanwhile.

        Args:
            restored: By optimizer: the rounds to continue from.

        Raises:
            ZstratError: As `PsClient.close_round`.

        Cancellation: the contributions to some of the optimizers may be dropped.
        """
        # Contributions of steps below this are dropped on the servers.
        over = self.first_step
        if self._coordinator is not None:
            over = self._coordinator.engine.queue.steps.next
        for order in self.rounds.orders_to_drop(restored):
            await self._client.close_round(order, (), over)
            self.rounds.dropped(order)

    def restart(self) -> None:
        """Begins again on empty servers, which therefore no longer differ."""
        if self._error is not None and self._coordinator is not None:
            engine = self._coordinator.engine
            if engine.outage_error is self._error:  # or else a server is lost
                engine.end_outage()
        self._failed, self._error = [], None
        # Their orders were for servers that have nothing now.
        for task in self._closing:
            task.cancel()
        self.rounds.restart()

    async def stop(self) -> None:
        """Stops closing rounds."""
        if self._timer is not None:
            self._timer.cancel()
        for task in self._closing:
            task.cancel()
        await asyncio.gather(*self._closing, return_exceptions=True)

    def _send(self, rounds: OptimizerRounds, closing: ClosingRound) -> None:
        """Starts to send the order to close a round."""
        task = asyncio.get_running_loop().create_task(
            self._close(rounds, closing), name=f"round {closing.order.number}"
        )
        self._closing.add(task)  # cancelled by stop()
        task.add_done_callback(self._ended)

    async def _close(self, rounds: OptimizerRounds, closing: ClosingRound) -> None:
        assert self._coordinator is not None
        queue, order = self._coordinator.engine.queue, closing.order
        loop = asyncio.get_running_loop()
        try:
            if closing.operands is None:
                # Once: a server that has closed the round has no gradients of it.
                closing.operands = await self._operands(order)
            # Servers drop contributions of steps below it that do not wait here
            # (`rounds.steps`), as no later round has them.
            over = queue.steps.low_water
            await self._client.close_round(order, rounds.steps, over, closing.operands)
        except Exception as error:  # goes to each call that needs the servers
            if isinstance(error, ZstratError) and error.retryable:
                log.warning("round %d of %r: %s", order.number, rounds.name, error)
                self._failed.append((rounds, closing))
                self._again_at = loop.time() + PAUSE
                return
            log.exception("closing round %d of %r", order.number, rounds.name)
            # No round is closed without a member that one server has lost: others have
            # applied it by then, as asking all of them before would be a round trip
            # more for each round.
            effect = "no server has applied it"
            if closing.operands is not None:
                effect = "servers may differ now"
            self._error = _unclosed(
                order, repr(rounds.name), effect, error, closing.sources
            )
        else:
            rounds.closed(loop.time())

    async def _operands(self, order: RoundOrder) -> Sequence[np.ndarray]:
        """Makes a worker compute the values that the optimizer needs from all merged
        gradients. Any worker can; waits for one if there is none, as closures do
        (`Dispatcher`)."""
        assert self._coordinator is not None
        code = self._codes[order.optimizer]
        while True:
            # Taken before workers are asked: one that joins meanwhile sets it.
            news = self._news
            for channel in list(self._coordinator.channels.values()):
                if not channel.task.is_ready:
                    continue
                asked = MergeOperands(channel.session, order, code.digest)
                try:
                    channel.put_code(code)
                    answer = await channel.task.link.submit(asked)
                except (PeerLostError, ClosedError, StaleSessionError):
                    continue  # this worker is lost, or leaves; others may be there
                if not isinstance(answer, MergedOperands):
                    raise ProtocolError(
                        f"{channel.task.name} answered MergeOperands with "
                        f"{type(answer).__name__}"
                    )
                return answer.arrays
            await news.wait()

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._closing.discard(task)
        if task.cancelled() or (coordinator := self._coordinator) is None:
            return
        with coordinator.engine.lock:
            # `join` may wait for this round.
            coordinator.engine.waiters.notify()
        self.look(asyncio.get_running_loop().time())
        coordinator.turn_soon()

    def _warn_of_small(self, rounds: OptimizerRounds, there: int) -> None:
        """Warns once if more workers contribute than a round waits for."""
        size = rounds.size(there)
        if size < there and rounds.optimizer not in self._warned:
            self._warned.add(rounds.optimizer)
            log.warning(
                "rounds of optimizer %r have %d contributions, and there are %d "
                "workers: those of the others come late (late=%r). Give it "
                "zs.Rounds(workers=%d, backup=%d), or workers=None",
                rounds.name,
                size,
                there,
                "drop" if rounds.policy.drops_late else "next",
                there,
                there - size,
            )

    def _check_workers(self, there: Sequence[int], now: float) -> list[float]:
        """Fails the run if there have been too few workers for a round for too long.
        Returns the loop time at which that will be so; [] if there are enough."""
        coordinator = self._coordinator
        assert coordinator is not None
        # Without any worker closures wait for one longer (`Dispatcher`).
        # Only with a contribution that waits: nobody waits for a round that is empty.
        short = [
            rounds
            for rounds in self.rounds
            if there and rounds.steps and len(there) < rounds.enough(len(there))
        ]
        if not short:
            self._short_since = None
            return []
        if self._short_since is None:
            self._short_since = now
            log.warning("%s", _words(short[0], there, coordinator.members))
        due = self._short_since + self._timeout
        if now < due:
            return [due]
        self._short_since = None
        words = _words(short[0], there, coordinator.members)
        coordinator.engine.fail(UnavailableError(words))
        return []

    def _set_timer(self, due: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if due is not None:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_at(due, lambda: self.look(loop.time()))


def _unclosed(
    order: RoundOrder, optimizer: object, effect: str, error: Exception, sources: str
) -> UnavailableError:
    """Returns the error for a round that can never be closed."""
    return UnavailableError(
        f"round {order.number} of optimizer {optimizer} could not be closed on all "
        f"parameter servers, so {effect}: {type(error).__name__}: {error}. Its members "
        f"are {sources}. Start the program again, without resume=, and restore a "
        "checkpoint"
    )


def _words(rounds: OptimizerRounds, there: Sequence[int], members: Members) -> str:
    """Describes a round for which there are too few workers."""
    absent = members.absent()
    return (
        f"optimizer {rounds.name!r}: round {rounds.number} needs "
        f"{rounds.enough(len(there))} contributions and has {len(rounds.steps)}, but "
        f"there are {len(there)} workers{f' ({absent})' if absent else ''}: start the "
        "others, or let zs.Rounds(workers=None) follow the workers that there are, or "
        "give it a backup="
    )
