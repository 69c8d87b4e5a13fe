"""What a program does to its cluster while it trains: tasks come and go."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, final

from zstrat.errors import (
    DeadlineExceededError,
    InvalidArgumentError,
    PSUnavailableError,
    UnavailableError,
    ZstratError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ._contract import Training
    from ._loop_coordinator import LoopCoordinator
    from ._rounds_log import RoundsLog
    from ._scenario import Scenario
    from ._script import Scripts

PS_WAIT: Final = 20.0
"""Seconds that a session waits for a server."""


@final
@dataclass(frozen=True, slots=True)
class SessionContext:
    """What a session has of its program and of its run."""

    scenario: Scenario
    scripts: Scripts
    servers: Sequence[str]
    """Addresses of all that there are."""
    draw: Callable[[], float]
    """A number below 1."""
    new_number: Callable[[], int]
    """A number that no other start, session or snapshot has."""
    kill: Callable[[str, float], object]
    """Kills the server at an address, and starts it again so many seconds later."""
    strike: Callable[[str], object]
    """Kills the server at an address, if each store has two copies that are well."""
    strike_at: Callable[[str], object]
    """Kills the server that sends the next message of that kind to a second copy,
    unless one was killed for that."""
    has_struck: Callable[[str], bool]
    """Whether one was."""
    is_calm: Callable[[], bool]
    """Whether no server has trouble that somebody may not know of yet."""
    healed_at: Callable[[], float]
    """When no fault will be left, as far as is known."""
    rounds: RoundsLog
    """What the network has seen of rounds."""
    go_on: Callable[[Training, bool], int]
    """Told that the session is open, and whether it goes on with what another one has
    left; returns how many there were before it of its name."""


@final
class ClusterChanges:
    """One change of servers, and one of workers, at a time."""

    def __init__(
        self, context: SessionContext, coordinator: LoopCoordinator, training: Training
    ) -> None:
        self._context, self._scenario = context, context.scenario
        self._coordinator, self._training = coordinator, training
        self._moving: asyncio.Task[None] | None = None
        self._turning: asyncio.Task[None] | None = None

    @property
    def is_moving(self) -> bool:
        """Whether servers come or go."""
        return self._moving is not None and not self._moving.done()

    def move_soon(self, chance: float) -> None:
        """Now and then, one change at a time; the program may think better of it."""
        often = 0.8 if self._scenario.only_moves else 0.2
        if self._moving is not None and not self._moving.done():
            if chance > 0.98:
                self._moving.cancel()
        elif chance < often:
            loop = asyncio.get_running_loop()
            self._moving = loop.create_task(self._moved(), name="change of servers")

    async def _moved(self) -> None:
        moves, draw = self._coordinator.cluster.moves, self._context.draw
        present = list(moves.addresses.values())
        away = [each for each in self._context.servers if each not in present]
        try:
            if away and draw() < 0.6:
                await moves.add(away[int(draw() * len(away))], None, PS_WAIT)
            elif draw() < 0.2:
                await moves.rebalance(PS_WAIT)
            else:
                address = present[int(draw() * len(present))]
                await moves.vacate(address, 0.3 + 5.0 * draw())
                self._drained(address)
        except InvalidArgumentError as error:
            if "cannot be drained" not in str(error):
                raise
        except (DeadlineExceededError, UnavailableError, PSUnavailableError) as error:
            if isinstance(error, PSUnavailableError):
                self._require_unguarded(error)

    def _drained(self, address: str) -> None:
        """Nothing is left there that anybody could lose."""
        replication = self._coordinator.cluster.replication
        assert replication is not None
        for store in replication.placement.stores:
            for copy in filter(None, (store.primary, store.backup)):
                process = replication.processes[copy.process]
                if process.address == address and process.is_closed:
                    self._training.broken(f"store {store.number} is in a drained ps")
        if self._context.draw() < 0.5:
            self._context.kill(address, 2.0 * self._context.draw())

    def turn_over_soon(self, chance: float) -> None:
        """Now and then a worker is let go, and taken in again a moment later."""
        if self._turning is not None and not self._turning.done():
            return
        ready = [
            task.address
            for task in self._coordinator.cluster.workers
            if task.is_ready and not task.is_closed
        ]
        if chance < 0.1 and len(ready) == self._scenario.workers:
            address = ready[int(self._context.draw() * len(ready))]
            loop = asyncio.get_running_loop()
            self._turning = loop.create_task(self._turn_over(address), name="turnover")

    async def _turn_over(self, address: str) -> None:
        turnover, draw = self._coordinator.cluster.turnover, self._context.draw
        await turnover.remove(address, 2.0 * draw())
        await asyncio.sleep(draw())
        while True:
            try:
                await turnover.add(address, None, PS_WAIT)
            except ZstratError as error:  # it is away, or somebody has it still
                if isinstance(error, InvalidArgumentError):
                    raise
                await asyncio.sleep(draw())
            else:
                return

    async def end(self) -> None:
        """Waits for what is under way."""
        for task in (self._moving, self._turning):
            if task is None:
                continue
            await asyncio.wait([task])
            if not task.cancelled():
                task.result()

    def _require_unguarded(self, error: ZstratError) -> None:
        if self._scenario.is_guarded:
            self._training.broken(f"one server was lost, and there was {error!r}")
