"""Finds the plan of a step by tracing its body under abstract values.

The values that the body meets are made up, so that one trace finds out what it reads,
looks up, draws and updates. A body of which more has to be known is traced once more
with these as inputs (`_retrace`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from zstrat.program.lookup._lookups import PlannedLookup
from zstrat.program.stages._stages import channels_of

from . import _refusals
from ._capture import Capture
from ._feeds import Discovery
from ._int32_checks import narrowed, taken_as_ids, wide_leaves
from ._plan import Plan, PlannedUpdate, Template
from ._retrace import Staged, Traced, leveled, retraced, staged
from ._updates import is_here

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from zstrat.variables import GradientCall

    from ._capture import Recorded
    from ._iterator import Element, StepIterator
    from ._signature import CutCall
    from ._structure import Structure


def discover(
    step: str,
    fn: Callable[..., Any],
    call: CutCall,
    supply: Callable[[int, StepIterator], Element],
) -> tuple[Plan, Template | Traced | Staged]:
    """Traces the body, once or, if it looks rows up or is cut into stages, twice; and
    once more, if indices of rows may come from integers of 64 bits.

    ``supply`` gives the elements that the body draws: real ones, or ones that consist
    of ``ShapeDtypeStruct``.

    Raises:
        TypeError, RuntimeError: The body cannot be captured; see `_refusals`.
        Exception: Whatever the body or ``supply`` raises.
    """
    elements: list[Element] = []

    def supplied(ordinal: int, iterator: StepIterator) -> Element:
        elements.append(supply(ordinal, iterator))
        return elements[-1]

    gaps, found = _gaps(call), []
    template = Template(
        fn, call.treedef, tuple(call.leaves), gaps, tuple(call.iterators), ()
    )

    def traced(seed: jax.Array, inputs: list[Any]) -> Any:
        capture = Capture(Discovery(seed, supplied), call.iterators)
        structure, arrays = template.run(capture, inputs)
        found.append((capture, structure))
        return arrays, [list(update.operands) for update in capture.updates]

    with _refusals.in_our_words(step):
        closed, (results, operands) = jax.make_jaxpr(traced, return_shape=True)(
            np.zeros((), np.float32), call.inputs
        )
    capture, structure = found[-1]
    template = replace(template, iterators=tuple(capture.iterators))
    _refuse_leaks(step, closed, len(results), capture.updates)
    plan = _plan(step, capture, structure, results, operands, closed, bool(call.inputs))
    wide = wide_leaves(call, gaps, elements)
    channels = channels_of(closed)
    if plan.moves or channels or any(map(is_here, plan.variables)):
        mesh = next((channel.mesh for channel in channels if channel.mesh), None)
        body = staged(plan, template, call, elements, capture, mesh)
        if wide:
            plan = replace(plan, narrowed=narrowed(plan, body.traced(), wide))
        return plan, body
    indexed = wide and any(update.table is not None for update in plan.updates)
    if plan.lookups or indexed:
        again = retraced(plan, template, call, elements)
        plan = replace(
            plan,
            narrowed=narrowed(plan, again, wide),
            taken=taken_as_ids(plan, again) if wide else frozenset(),
        )
        if plan.lookups:
            return leveled(plan, again)
    return plan, template.empty([element.treedef for element in elements])


def _plan(
    step: str,
    capture: Capture,
    structure: Structure,
    results: Sequence[Any],
    operands: Sequence[Sequence[Any]],
    closed: Any,
    has_inputs: bool,
) -> Plan:
    return Plan(
        step,
        tuple(variable.spec for variable in capture.reads.values()),
        tuple(
            PlannedUpdate(
                tuple([variable.spec for variable in update.variables]),
                update.op,
                update.optimizer.id if update.optimizer is not None else 0,
                tuple(shapes),
                update.where,
                update.table,
                None if update.call is None else _emptied(update.call),
            )
            for update, shapes in zip(capture.updates, operands, strict=True)
        ),
        tuple(capture.draws),
        structure,
        tuple(results),
        has_inputs,
        bool(closed.effects),
        capture.asked_context,
        tuple(capture.reads.values()),
        tuple((update.variables, update.optimizer) for update in capture.updates),
        tuple(
            PlannedLookup(lookup.table, lookup.ids.shape, 0, lookup.where)
            for lookup in capture.lookups
        ),
        tuple(capture.moves.notes),
        calls=tuple([_emptied(call) for call in capture.calls]),
    )


def _emptied(call: GradientCall) -> GradientCall:
    """Without arrays, which belong to the trace."""
    return call.with_arrays([None] * len(call.arrays))


def _gaps(call: CutCall) -> tuple[int, ...]:
    """Where among the leaves the inputs stand: both are in the same order."""
    gaps: list[int] = []
    for number, leaf in enumerate(call.leaves):
        if len(gaps) < len(call.inputs) and leaf is call.inputs[len(gaps)]:
            gaps.append(number)
    return tuple(gaps)


def _refuse_leaks(
    step: str, closed: Any, results: int, updates: Sequence[Recorded]
) -> None:
    """A traced value of somebody else's is a constant to the trace that meets it."""
    foreign = {
        id(var)
        for var, value in zip(closed.jaxpr.constvars, closed.consts, strict=True)
        if isinstance(value, jax.core.Tracer)
    }
    if not foreign:
        return
    outputs = [id(var) for var in closed.jaxpr.outvars]
    owners = [update for update in updates for _ in update.operands]
    for number, var in enumerate(outputs):
        if var in foreign and number >= results:
            update = owners[number - results]
            what = f"an update of {update.target}"
            raise _refusals.leaked(step, what, update.where)
    raise _refusals.leaked(step, "the body", step)
