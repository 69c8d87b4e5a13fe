"""The leased dataset of a session: each example is counted where a step has read it.

What the coordinator counts as done is on every server once, what it does not is on
none, and a step that runs again reads the same examples. So it is in checkpoints, after
restores, and for a program that goes on with what another one has left.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any, Final, final

import numpy as np

from zstrat.variables import VariableSpec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from zstrat.coordinator.parts import LeaseBook

    from ._contract import Scheduled, Training
    from ._loop_coordinator import LoopCoordinator

BATCH: Final = 2


@final
class LeasedCounts:
    """The counters of a session, one variable on each server.

    Args:
        size: Of the dataset, more than all steps read.
    """

    def __init__(
        self, coordinator: LoopCoordinator, training: Training, size: int
    ) -> None:
        self._coordinator, self._training, self.size = coordinator, training, size
        self.specs = tuple(
            [
                VariableSpec(600 + ps, f"leased{ps}", (size,), "int64", ps)
                for ps in range(training.servers)
            ]
        )
        self._resource = 0
        self._book: LeaseBook

    def start(self) -> int:
        """Starts the pass; returns the number of its iterators."""
        self._resource, self._book = self._coordinator.lease(self.size, BATCH)
        return self._resource

    def places(self) -> Mapping[int, Sequence[str]]:
        """What a checkpoint has of it, while all rests."""
        return {self._resource: [json.dumps(self._book.state())]}

    def check(self, counts: Sequence[np.ndarray], state: str | None = None) -> None:
        """Compares what is on the servers with what is done, in a saved state or now.
        All steps so far are over, or rest."""
        training = self._training
        fates = {p: step.fate for p, step in training.steps.items()}
        fates |= dict.fromkeys(training.doubtful, "perhaps")
        fates = training.past.steps | fates
        open_to = self._open_in(json.loads(state) if state else self._book.state())
        unsure = {
            number
            for place, numbers in training.leased.items()
            if fates.get(place) not in ("done", "never")
            for number in numbers
        }
        unsure = unsure.union(*map(_left_out, training.steps.values()))
        for server, each in enumerate(counts):
            if each.max() > 1:
                twice = np.flatnonzero(each > 1)
                training.broken(f"examples {twice} were applied twice on ps{server}")
            applied = set(np.flatnonzero(each).tolist())
            if again := applied & open_to:
                training.broken(f"examples {again} are on ps{server}, and to be leased")
            lost = set(range(self.size)) - open_to - applied - unsure
            if lost:
                training.broken(f"examples {lost} are done, and not on ps{server}")

    def _open_in(self, state: Any) -> set[int]:
        """What is not done."""
        open_to = set(range(state["next"] if state["examples"] else 0, self.size))
        for _, start, size in state["open"]:
            open_to |= set(range(start, start + size))
        return open_to


def _left_out(step: Scheduled) -> set[int]:
    """The examples that the error of a step says are left out, as they may have been
    applied: it need not have run."""
    error = step.value.error if step.value.is_ready else None
    notes = [n for n in getattr(error, "__notes__", ()) if "may have been applied" in n]
    ranges = re.findall(r"examples (\d+) to (\d+)", " ".join(notes))
    return {number for first, end in ranges for number in range(int(first), int(end))}
