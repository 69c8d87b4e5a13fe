"""`Rounds`: an optimizer on parameter servers applies the gradients of several steps as
one update.

The method is that of Chen et al., "Revisiting Distributed Synchronous SGD" (2016),
TensorFlow's `SyncReplicasOptimizer`; but all servers merge the same set of
contributions.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from zstrat.wire import MergeRule

if TYPE_CHECKING:
    from collections.abc import Callable

_RULES: Final = {"mean": MergeRule.MEAN, "sum": MergeRule.SUM, "rda": MergeRule.RDA}


@dataclass(frozen=True, kw_only=True)
class Rounds:
    """Settings for merging the gradients of several steps into one update (a round).

    Each step contributes its gradients to a round of the optimizer, and each worker
    contributes to a round once. A round is closed, on all parameter servers with the
    same contributions, when all workers have contributed. With ``backup`` it is closed
    when all but ``backup`` of them have contributed. After that, the next step of each
    worker reads the new values.

    Args:
        workers: Number of contributions to a round. Default: the number of workers at
            that moment.
        backup: Number of contributions without which a round may close if they are
            late.
        grace: Seconds that a round waits for the last ``backup`` contributions.
        late: With ``backup``, the effect of a contribution to a round that is closed.
            "drop": none; it is counted in ``coordinator.metrics()``. "next": it counts
            for the open round, as it always does without ``backup``.
        merge: "mean": the weighted mean of the gradients; a gradient that a step does
            not have counts as zeros. "sum": their sum. "rda": the mean of their norms
            times the direction of the mean of their directions, separately for each
            variable (Douillard et al., 2026); rows of tables are averaged.
        weights: A function that is called on the worker with the result of a step, as
            numpy arrays, and returns the weight of the step. A step of weight 0 changes
            nothing. Default: weights of 1.

    Raises:
        ValueError: An argument is not valid.
    """

    workers: int | None = None
    backup: int = 0
    grace: float = 0.0
    late: str = "drop"
    merge: str = "mean"
    weights: Callable[[Any], Any] | None = None

    def __post_init__(self) -> None:
        for name in ("workers", "backup"):
            value = getattr(self, name)
            if value is None and name == "workers":
                continue
            try:
                count = operator.index(value)
            except TypeError:
                count = -1
            if count < (name == "workers"):
                raise ValueError(
                    f"Rounds({name}={value!r:.80}): expected a whole number"
                    f"{', 1 or more, or None' if name == 'workers' else ', 0 or more'}"
                )
            # An integer of numpy becomes one of Python.
            object.__setattr__(self, name, count)
        if self.workers is not None and self.backup >= self.workers:
            raise ValueError(
                f"Rounds(workers={self.workers}, backup={self.backup}): a round needs "
                "a contribution, so backup has to be less than workers"
            )
        if not isinstance(self.grace, int | float) or not 0 <= self.grace < 1e9:
            raise ValueError(
                f"Rounds(grace={self.grace!r:.80}): expected seconds, 0 or more"
            )
        if self.late not in ("drop", "next"):
            raise ValueError(
                f"Rounds(late={self.late!r:.80}): expected 'drop' or 'next'"
            )
        if self.merge not in [*_RULES]:
            raise ValueError(
                f"Rounds(merge={self.merge!r:.80}): expected 'mean', 'sum' or 'rda'"
            )
        if self.weights is not None and not callable(self.weights):
            raise ValueError(
                f"Rounds(weights={self.weights!r:.80}): expected a function of the "
                "result of a step, or None"
            )

    @property
    def drops_late(self) -> bool:
        """Whether a contribution to a round that is closed has no effect. Without
        backup workers only the step of a lost worker is late, and its examples were
        processed again by another step."""
        return self.backup > 0 and self.late == "drop"

    @property
    def rule(self) -> MergeRule:
        """The code with which parameter servers know the way of merging."""
        return _RULES[self.merge]
