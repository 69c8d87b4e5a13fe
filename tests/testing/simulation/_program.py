"""The program of a simulation.

It opens one session after the other until one has come to its end in peace.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, final

from zstrat.errors import (
    BusyError,
    DeadlineExceededError,
    PSUnavailableError,
    UnavailableError,
)

from ._contract import Training
from ._loop_coordinator import LoopCoordinator
from ._training_session import LIVES, TrainingSession

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ._cluster_changes import SessionContext
    from ._contract import Readers
    from ._process import Surroundings
    from ._scenario import Scenario


@final
class TrainingProgram:
    """All sessions of one run.

    Args:
        context: Makes what sessions have of the run, given what to call when one is
            open.
        over: Called when all is done that was to be done.
    """

    def __init__(
        self,
        around: Surroundings,
        scenario: Scenario,
        readers: Readers,
        addresses: tuple[Sequence[str], Sequence[str]],
        *,
        context: Callable[[Callable[[Training, bool], int]], SessionContext],
        over: Callable[[], object],
    ) -> None:
        self._around, self._scenario, self._readers = around, scenario, readers
        self._ps, self._workers = addresses
        self._over = over
        self._context = context(self._go_on)
        self.trainings: list[Training] = []
        self._coordinator: LoopCoordinator | None = None
        self._session: TrainingSession | None = None
        self._is_open = False
        self._left: list[str] | None = None
        """A program has the servers; else what was left of copies, as `copies` says."""
        self._holders: set[str] = set()
        """Servers that the last program had, and that were not killed since it was: if
        there are none, nobody is left who could tell the next one of it."""
        self._was_hurt = False
        """A server was killed, which may have held something."""
        self._hurts = 0
        """How often that was so."""
        self._chain: list[Training] = []
        """Those that go on with one another, of the present name."""
        self._names = 0

    async def main(self, loop: Any, link: Callable[[int], Any]) -> None:
        """What the process does."""
        while True:
            number = self._around.draw()
            coordinator = LoopCoordinator(
                number,
                self._ps,
                dict(enumerate(self._workers)),
                self._around.settings,
                link(number),
                prefetch=self._scenario.prefetch,
                replicas=self._scenario.replicas,
                stores_per_ps=self._scenario.stores_per_ps,
                draw=self._around.draw,
                name=self._name(),
            )
            self._coordinator = coordinator
            training = self._training()
            self._readers.training = training
            self._session = session = TrainingSession(
                self._context, coordinator, training
            )
            try:
                hurts = self._hurts
                await session.run()
                self._readers.check(training, runs_once=self._scenario.runs_once)
                if training.fills > self._hurts - hurts:
                    training.broken(f"filled {training.fills} times, lost less often")
            except (UnavailableError, DeadlineExceededError, BusyError) as error:
                if not (self._was_hurt or self._scenario.restores) and is_lost(error):
                    training.broken(f"no server was lost, and there was {error!r}")
                if self._scenario.restores and training.saved and is_lost(error):
                    training.broken(f"there is a checkpoint of all, and {error!r}")
                if "filling it failed: " in str(error):
                    training.broken(f"a defect in a restore: {error}")
                if self._scenario.is_guarded:
                    training.broken(f"one server was lost, and there was {error!r}")
                # It is lost: begin anew, as the documentation says.
                await coordinator.cluster.close(False)
                self._is_open, self._left = False, None
                if isinstance(error, PSUnavailableError):
                    self._chain.clear()
                await asyncio.sleep(self._around.world.random.random())
                continue
            await coordinator.cluster.close(False)
            self._over()
            return

    def _name(self) -> str:
        """What the next session is called: as the one before, to go on with that."""
        if not self._scenario.resumes:
            return ""
        if len(self._chain) == LIVES:
            self._chain.clear()
        self._names += not self._chain
        return f"run {self._names}"

    def _training(self) -> Training:
        training = Training(
            len(self.trainings) + 1,
            self._around.world,
            len(self._ps) * self._scenario.stores_per_ps,
            has_copies=bool(self._scenario.replicas) or self._scenario.moves,
        )
        self.trainings.append(training)
        if self._scenario.resumes:
            self._chain.append(training)
        return training

    def _go_on(self, training: Training, resumed: bool) -> int:
        """The session is open; returns how many there were before it of its name."""
        *before, _ = self._chain or [training]
        if resumed and not before:
            training.broken("it goes on with what no program has left")
        if not resumed and self._holders and any(each.has_created for each in before):
            training.broken("it goes on with nothing, and nobody was told of a loss")
        for each in before if resumed else ():
            training.go_on_with(each)
        self._is_open = True
        return len(before)

    def died(self) -> None:
        """The program was killed: what it knew of copies is so until a server dies."""
        if self._is_open and self._coordinator is not None:
            present = self._coordinator.cluster.moves.addresses.values()
            self._holders = {f"ps{self._ps.index(address)}" for address in present}
        self._left = None if self.is_changing else self.copies()
        self._is_open = False

    def hurt(self, server: str) -> None:
        """Called when a server was killed."""
        self._left, self._was_hurt = None, True
        self._hurts += 1
        self._holders.discard(server)

    @property
    def is_changing(self) -> bool:
        """Whether servers come or go."""
        return self._is_open and self._session is not None and self._session.is_changing

    @property
    def is_moving(self) -> bool:
        """Whether a store is on its way to another process."""
        coordinator = self._coordinator if self._is_open else None
        replication = None if coordinator is None else coordinator.cluster.replication
        stores = () if replication is None else replication.placement.stores
        return any(
            store.target is not None or store.third is not None for store in stores
        )

    def copies(self) -> list[str] | None:
        """The processes that have copies of stores, if each store has two, and there is
        something that nobody may lose."""
        if self._chain and not any(each.has_created for each in self._chain):
            return None
        if not self._is_open:
            return self._left
        coordinator = self._coordinator
        if coordinator is None:
            return None
        replication = coordinator.cluster.replication
        if replication is None or not replication.is_started:
            return None
        placement = replication.placement
        placement.validate()
        cluster = coordinator.cluster
        for task in (*cluster.ps, *cluster.workers, *replication.processes):
            task.validate()
        if placement.without_backup:
            return None
        found = set().union(*(store.copy_processes for store in placement.stores))
        at = {address: f"ps{index}" for index, address in enumerate(self._ps)}
        names = [at[process.address] for process in replication.processes]
        return [names[process] for process in sorted(found)]


def is_lost(error: Exception) -> bool:
    """Whether it says that what a server held is gone."""
    return isinstance(error, PSUnavailableError) and error.lost
