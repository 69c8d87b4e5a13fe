"""The optimizers of a session that have rounds, and what has to be there in the end."""

from __future__ import annotations

from typing import TYPE_CHECKING, final

import numpy as np

from ._checkpoints import late_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from ._checkpoints import SavedTensor
    from ._cluster_changes import SessionContext
    from ._contract import Training
    from ._loop_coordinator import LoopCoordinator
    from ._rounds_log import RoundsAt


@final
class TrainingRounds:
    """The rounds of one session."""

    def __init__(
        self, context: SessionContext, coordinator: LoopCoordinator, training: Training
    ) -> None:
        self._log, self._drawn = context.rounds, context.scenario.rounds
        self._coordinator, self._training = coordinator, training
        stores = training.servers
        self.specs = tuple([s for each in self._drawn for s in each.specs(stores)])

    async def create(self) -> None:
        """Makes the optimizers, whose variables are there."""
        servers, stores = self._coordinator.servers, self._training.servers
        for each in self._drawn:
            number, name = each.number, f"rounds {each.is_coupled}"
            await servers.create_optimizer(number, name, each.code, each.policy)
            await servers.bind_optimizer(number, each.tree(stores))

    def moment_of(
        self, session: int, tensors: Sequence[SavedTensor]
    ) -> RoundsAt | None:
        """Between which rounds a checkpoint is."""
        if not self._drawn:
            return None
        found = late_of(tensors, [spec.key for spec in self.specs])
        moment = self._log.moment_of(session, found)
        if moment is None:
            self._training.broken(f"a checkpoint is between no two rounds: {found}")
        return moment

    async def check(self) -> None:
        """All steps have ended, and were joined: what they have contributed is in one
        round each, or was dropped, and the servers have all rounds."""
        if not self._drawn:
            return
        training, cluster = self._training, self._coordinator.cluster
        fills = training.fills
        values = await self._coordinator.servers.read(self.specs)
        if training.fills != fills or training.is_filling:
            return
        log, found = self._log.session(cluster.session), iter(values)
        for each in self._drawn:
            rounds = log.optimizers[each.number]
            for key, held in rounds.worlds[-1].items():
                value = next(found)
                if not np.allclose(value, held.value, 1e-3, 1e-3):
                    training.broken(
                        f"variable {key} is {value} after {len(rounds.orders)} rounds, "
                        f"and not {held.value}"
                    )
            if not training.fills:
                self._check_members(each.number, rounds.member_of.keys())

    def _check_members(self, optimizer: int, members: Iterable[int]) -> None:
        training = self._training
        fates = {step.number: step.fate for step in training.steps.values()}
        done = {number for number, fate in fates.items() if fate == "done"}
        counted = set(members)
        if strange := counted - done:
            training.broken(
                f"a round of optimizer {optimizer} has steps that are not done: "
                f"{ {number: fates.get(number) for number in strange} }"
            )
        rounds = self._coordinator.cluster.rounds.rounds.get(optimizer)
        assert rounds is not None, optimizer
        dropped = rounds.statistics.dropped.total()
        if len(done - counted) != dropped:
            training.broken(
                f"steps {sorted(done - counted)} are in no round of optimizer "
                f"{optimizer}, and {dropped} were dropped"
            )
