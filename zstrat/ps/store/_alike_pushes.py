"""Plans pushes that are like the one before, without checking each update again.

A worker sends whole gradients of the same variables at each step, each in an array of
its own, or those of a set of small variables concatenated in one. The first of these
pushes is checked; its result is valid until variables, bindings, or the shapes and
dtypes of the gradients change. So no Python code runs for each variable of a set.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from zstrat.ps.engine._slots import Gradients, SlotStep
from zstrat.wire import UpdateOp

from ._plans import PushPlan, ServerUpdate, UpdateRun, push_plan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zstrat.ps.engine._engine import OptimizerEngine, Registered
    from zstrat.wire import Push, Update

    from ._variables import HeldSet, HeldVariables

MANY: Final = 16
"""The fewest updates of a push that is worth remembering."""

_WHOLE: Final = (UpdateOp.OPTIMIZE, UpdateOp.OPTIMIZE_SET)

_OPERANDS: Final = int(UpdateOp.OPERANDS)


@dataclass(slots=True)
class AlikePushes:
    """Remembers the plan of the latest push of one store, for pushes like it."""

    _updates: Sequence[Update] = ()
    _kinds: list[tuple[object, ...]] = field(default_factory=list)
    _state: tuple[object, ...] = ()
    _optimizer: Registered | None = None
    _planned: Sequence[ServerUpdate] = ()
    _steps: list[SlotStep] = field(default_factory=list)
    _sets: Sequence[HeldSet | None] = ()
    """For each update the set of small variables that it belongs to, or None."""
    _work: int = 0

    def plan(
        self, push: Push, variables: HeldVariables, engine: OptimizerEngine
    ) -> PushPlan:
        """Returns the plan of a push. Raises as `push_plan`."""
        known = self._again(push, variables, engine)
        if known is not None:
            return known
        plan = push_plan(push, variables, engine)
        self._note(plan, variables, engine)
        return plan

    def _again(
        self, push: Push, variables: HeldVariables, engine: OptimizerEngine
    ) -> PushPlan | None:
        """Returns a plan from the remembered one, if the push is like the latest push;
        else None."""
        known = self._optimizer
        if (
            # Cheapest first: most servers get other pushes in between, which differ
            # here.
            known is None
            or push.updates != self._updates
            or self._state != _state_of(variables, engine, known)
            or _kinds_of(push) != self._kinds
        ):
            return None
        sets = _sets_of(push, variables)
        if sets != self._sets:
            return None
        first, at = push.updates[0], 0
        if first.op == _OPERANDS:
            at, sets = first.operands, sets[1:]
        gradients = Gradients(push.arrays[:at])
        arrays = iter(push.arrays[at:])
        for one in sets:
            if one is not None:
                next(arrays)  # its keys
                gradients.add(next(arrays), one.parts)
            else:
                gradients.add(next(arrays))
        runs = [UpdateRun(known, self._steps, gradients)]
        generation = variables.generation
        return PushPlan(generation, push, self._planned, self._work, runs, engine)

    def _note(
        self, plan: PushPlan, variables: HeldVariables, engine: OptimizerEngine
    ) -> None:
        """Remembers the plan of a push, if it is of many whole gradients for one
        optimizer and of nothing else."""
        # `runs_of` begins with a plain run, which is empty for such a push.
        runs = [run for run in plan.runs if run.optimizer or run.plain]
        if len(plan.updates) < MANY or len(runs) != 1 or runs[0].optimizer is None:
            return
        known, steps = runs[0].optimizer, runs[0].steps
        first, *others = plan.push.updates
        # Late steps get their slots from an earlier update of the same push, and a
        # gradient whose dtype was converted has to be converted again.
        pairs = zip(steps, plan.updates, strict=False)
        if len(steps) != len(plan.updates) or any(
            step.late or step.dtype != update.operands[0].dtype
            for step, update in pairs
        ):
            return
        # The first may bring the operands of all others, which are whole gradients.
        if first.op != _OPERANDS or first.optimizer != known.optimizer:
            others.append(first)
        if any(update.op not in _WHOLE for update in others):
            return
        self._updates, self._kinds = list(plan.push.updates), _kinds_of(plan.push)
        self._state = _state_of(variables, engine, known)
        self._optimizer, self._steps = known, steps
        # Without the gradients, whose memory is another's.
        self._planned = [
            replace(update, operands=(), checked=None, beside=None)
            for update in plan.updates
        ]
        self._sets, self._work = _sets_of(plan.push, variables), plan.work


def _kinds_of(push: Push) -> list[tuple[object, ...]]:
    return [(array.shape, array.dtype) for array in push.arrays]


def _sets_of(push: Push, variables: HeldVariables) -> list[HeldSet | None]:
    """Returns for each update of a push the set of small variables that it belongs to,
    or None."""
    found: list[HeldSet | None] = []
    at = 0
    for update in push.updates:
        is_set = update.op == UpdateOp.OPTIMIZE_SET
        keys = push.arrays[at]
        found.append(variables.sets.find(keys, variables) if is_set else None)
        at += update.operands
    return found


def _state_of(
    variables: HeldVariables, engine: OptimizerEngine, known: Registered
) -> tuple[object, ...]:
    """Returns values that change when the remembered checks of a push may no longer be
    valid."""
    is_there = known.optimizer in engine and engine.get(known.optimizer) is known
    return variables.changes, known.bindings.changes, is_there
