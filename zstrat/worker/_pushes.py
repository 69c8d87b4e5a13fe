"""What a step pushes, and what its worker contributes to rounds.

The gradients of an optimizer with rounds are a contribution: they wait on the servers,
where the coordinator closes the round. All other updates of a step are applied when
they arrive. What an optimizer computes from all gradients of a round, such as a global
norm, is computed by one worker from the merged gradients, before the round closes.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, final

from zstrat.errors import InvalidArgumentError
from zstrat.ps import PsUpdate
from zstrat.wire import MergeRule, StepContribution, UpdateOp

from ._closure import RoundPush

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import numpy as np

    from zstrat.optimizers import Binding
    from zstrat.program import Plan, StepResult
    from zstrat.variables import OptimizerHandle
    from zstrat.wire import MergeOperands

    from ._closure import Catalog, ClosureStep
    from ._resources import Resources
    from ._server_links import Lent, PushEncoding


@final
class StepPushes:
    """Makes the pushes of one session's steps. For the executor thread.

    Args:
        catalog: Knows which optimizers of a plan have rounds, or a format.
        encoding: Encodes gradients for the network.
    """

    def __init__(
        self, resources: Resources, catalog: Catalog, encoding: PushEncoding
    ) -> None:
        self._resources, self._catalog, self._encoding = resources, catalog, encoding
        self._bindings: Final[dict[tuple[bytes, bytes], Binding]] = {}
        """Of which operands were computed, by digest of the optimizer and tree."""

    def push_of(
        self, step: ClosureStep, result: StepResult
    ) -> tuple[list[PsUpdate] | RoundPush | None, Sequence[Lent]]:
        """Returns the push of a step that was computed, None if it changes nothing; and
        the residuals that the push has taken.

        Raises:
            ValueError: The user's weight of the step is not a weight.
            Exception: Whatever the user's function of weights raises.
        """
        updates = [
            PsUpdate(spec.ps, spec.key, op, optimizer, arrays)
            for spec, op, optimizer, arrays, _ in result.updates
        ]
        plan: Plan = step.work.plan
        needs = self._catalog.of(plan)
        rounds = needs.rounds
        read = {} if step.notes is None else step.notes.rounds or {}
        place = step.place
        # A window that read another round than it was made for contributes with weight
        # 0, as its fragment is not the one that is exchanged now.
        is_due = place is None or self._resources.residents.has_run(
            place, read.get(place.optimizer, place.round)
        )
        rules = {rule.id: rule for _, rule in plan.targets if rule is not None}
        coupled = {x.optimizer for x in updates if x.op == UpdateOp.OPERANDS}
        contributions = [
            StepContribution(
                step.number,
                step.task.context.attempt,
                optimizer,
                read.get(optimizer, -1),  # -1: it has read nothing
                _weight(rules[optimizer], step, result) if is_due else 0.0,
                optimizer in coupled,
            )
            for optimizer in rounds
        ]
        lent: Sequence[Lent] = ()
        if needs.wires and is_due:  # last: what fails must not take residuals away
            updates, lent = self._encoding.encoded(step.number, updates, needs.wires)
        if not rounds:
            return updates or None, lent
        apart = [update for update in updates if update.optimizer not in rounds]
        gradients = [
            update
            for update in updates
            # Operands of one step say nothing about the merged gradients.
            if update.optimizer in rounds and update.op != UpdateOp.OPERANDS
        ]
        return RoundPush(apart, gradients if is_due else [], contributions), lent

    def operands(
        self,
        asked: MergeOperands,
        trees: Iterable[bytes],
        merged: Mapping[int, tuple[np.ndarray, ...]],
    ) -> list[np.ndarray]:
        """Computes what an optimizer needs of all merged gradients of a round; see
        `PsClient.pull_merged`. No step of it has to have run here.

        Raises:
            InvalidArgumentError: The gradients are those of several trees.
            Exception: Whatever loading or tracing the transformation raises.
        """
        from zstrat.optimizers import Binding, checked  # which import optax

        name = str(asked.order.optimizer)
        for tree in trees:
            binding = self._bindings.get((asked.code, tree))
            if binding is None:
                transformation = checked(self._resources.code(asked.code))
                binding = Binding.decoded(name, transformation, tree)
                # Decoded and traced once for all rounds; only the merged values differ.
                self._bindings[asked.code, tree] = binding
            if merged.keys() <= {key for keys in binding.keys for key in keys}:
                return binding.operands(merged)
        raise InvalidArgumentError(
            f"the gradients of a round are of several trees of optimizer {name}, which "
            "looks at all gradients of one: give it all its variables at once, "
            "zs.Optimizer(transformation, params=params)"
        )


def _weight(rule: OptimizerHandle, step: ClosureStep, result: StepResult) -> float:
    """Returns the weight of a step's gradients in a round, by the user's function.

    Raises:
        ValueError: It is not a finite number, or negative.
    """
    assert rule.rounds is not None
    plan: Plan = step.work.plan
    if rule.rounds.weights is None:
        if step.place is None or rule.rounds.rule is MergeRule.SUM:
            return 1.0
        own: float = step.place.weight(step.work.examples)
        return own
    weight = float(rule.rounds.weights(plan.out_structure.unflatten(result.leaves)))
    if not 0 <= weight < math.inf:
        raise ValueError(
            f"optimizer {rule.name!r}: Rounds(weights=) returned {weight} for the "
            "result of a step; expected a finite number, 0 or more"
        )
    return weight
