"""Strikes: a server is killed just when it has told its second copy of a change.

For each kind of change there is one, and behind it all has to be what it was. Which
kinds there are is not known here: they are those of a scenario.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any, Final, final

from ._scenario import RESUMED

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine

    from ._cluster_changes import SessionContext
    from ._contract import Training
    from ._late_changes import LateChanges
    from ._loop_coordinator import LoopCoordinator

INTERVAL: Final = 0.25
"""Seconds between two looks whether all is well."""
CALM: Final = 20.0
"""Seconds in which all is well again when a server was killed."""


@final
class Strikes:
    """Those of one session.

    Args:
        look: Looks whether what was made late is what it has to be.
        save: Saves a checkpoint.
    """

    def __init__(
        self,
        context: SessionContext,
        coordinator: LoopCoordinator,
        training: Training,
        late: LateChanges,
        look: Callable[[], Coroutine[Any, Any, None]],
        save: Callable[[], Coroutine[Any, Any, None]],
    ) -> None:
        self._context, self._coordinator = context, coordinator
        self._training, self._late = training, late
        self._look, self._save = look, save

    def at_store(self, store: int) -> None:
        """Kills the process that serves the store, if nothing is lost by that."""
        replication = self._coordinator.cluster.replication
        if replication is not None:
            process = replication.placement.stores[store].primary.process
            self._context.strike(replication.processes[process].address)

    async def run(self) -> None:
        """Has the sender of each kind of change of the scenario killed once."""
        for kind in self._context.scenario.strikes:
            has_struck = partial(self._context.has_struck, kind)
            self._context.strike_at(kind)
            await self._everything(has_struck)
            if not has_struck():
                is_copied = kind.startswith("Copy") or kind == "HeldRounds"
                if not (is_copied or kind in RESUMED):
                    self._training.broken(f"no change of a store makes a {kind}")
                await self._calm()
                self.at_store(0)
            await self._calm()
            await self._look()
            await self._late.end_parts()
            if not has_struck():
                self._training.broken(f"nothing makes a {kind}")

    async def _everything(self, is_enough: Callable[[], bool]) -> None:
        """Changes stores in each way that there is, until that is enough."""
        await self._calm()
        await self._late.begin(3)
        await self._late.end_parts()
        for change in self._late.all:
            await change()
            if is_enough():
                return
        await self._save()
        await asyncio.sleep(2 * INTERVAL)

    async def _calm(self) -> None:
        """Waits until each store has two copies that are well."""
        replication = self._coordinator.cluster.replication
        assert replication is not None, "strikes are for second copies"
        await asyncio.sleep(INTERVAL)
        try:
            async with asyncio.timeout(CALM):
                await replication.wait_until(
                    lambda: not replication.placement.without_backup
                )
                while not self._context.is_calm():  # noqa: ASYNC110  # virtual time
                    await asyncio.sleep(INTERVAL)
        except TimeoutError:
            self._training.broken("a store has no second copy that is well")
