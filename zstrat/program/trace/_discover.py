"""Discovers the plan of a step: traces its body with placeholders.

One trace finds out what the body reads, looks up, draws and updates. The placeholders
then become inputs of the traced program (`_flow`); if that is not possible, the body is
traced once more, with values, rows and slots as inputs. The data flow of the program
shows which rows can be requested with the first request, and which only after an
answer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from zstrat.program._device_state import PlannedVariables
from zstrat.program.lookup._lookups import PlannedLookup
from zstrat.program.stages._stages import channels_of
from zstrat.variables import DeviceStorage

from . import _refusals
from ._capture import Capture
from ._captured import warn_of_numbers
from ._flow import Discovery, Flow, body_program
from ._int32_checks import checked_plan, downcast_leaves, wide_leaves
from ._plan import Plan, PlannedUpdate, Template, TracedBody, outputs_of
from ._updates import is_here

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from jax.sharding import Mesh

    from zstrat.variables import GradientCall, VariableHandle

    from ._capture import Recorded
    from ._flow import Placeholder
    from ._iterator import Element, StepIterator
    from ._signature import CutCall
    from ._structure import Structure


@dataclass(frozen=True, slots=True)
class Traced:
    """The body of a step with lookups, as a program.

    Its inputs are the leaves of arguments and elements (``inputs`` is their number),
    the values of ``reads``, and the rows of each lookup. Its outputs are the arrays of
    the result, the operands of each update, and the ids of each lookup. ``kept`` are
    the indices of the reads that an output depends on; the plan has only these reads.
    """

    closed: Any
    inputs: int
    reads: int
    kept: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Staged:
    """The body of a step on variables of this process, or of several processes, as a
    function to trace.

    ``held`` are the variables. ``fingerprint`` identifies how they were stored before
    the trace: while it is the same, the trace is valid.

    ``body(inputs, leaves, values, slots)`` takes the inputs, the leaves of elements,
    the values of the plan's reads, and the slots of each optimizer. It returns arrays
    of the result, values of the variables that it updates, slots, and the operands of
    each update. ``inputs`` and ``leaves`` are examples, for their types.
    """

    body: Callable[..., Any]
    inputs: list[Any]
    leaves: list[Any]
    held: PlannedVariables
    fingerprint: Hashable
    values_like: list[Any]
    slots_like: list[Any]
    mesh: Mesh | None
    """The mesh over the devices of all processes, if XLA executes their collectives."""

    def traced(self) -> Any:
        """Traces the body as a program."""
        return jax.make_jaxpr(self.body)(
            self.inputs, self.leaves, self.values_like, self.slots_like
        )


def retraced(
    plan: Plan, body: TracedBody, call: CutCall, elements: Sequence[Element]
) -> Any:
    """Traces the body as a program: from inputs, leaves of elements, values of reads
    and rows of lookups to results, operands of updates, and ids."""
    keys = [spec.key for spec in plan.reads]

    def replayed(inputs: Any, leaves: Any, values: Any, rows: Any) -> Any:
        outputs = body(inputs, leaves, dict(zip(keys, values, strict=True)), rows)
        return outputs.results, outputs.operands, outputs.ids

    leaves = [_as_taken(leaf) for element in elements for leaf in element.leaves]
    values = [_shaped(spec.shape, spec.numpy_dtype) for spec in plan.reads]
    rows = [
        _shaped((*lookup.shape, *lookup.table.shape[1:]), lookup.table.dtype)
        for lookup in plan.lookups
    ]
    with _refusals.translated_errors(plan.function):
        return jax.make_jaxpr(replayed)(call.inputs, leaves, values, rows)


def leveled(plan: Plan, closed: Any) -> tuple[Plan, Traced]:
    """Adds the levels of lookups to a plan (in which request each lookup's rows are
    requested), and drops reads that are not used."""
    reads, rows = len(plan.reads), len(plan.lookups)
    inputs = len(closed.in_avals) - reads - rows
    kept, levels = _levels(closed, inputs, reads, rows)
    plan = replace(
        plan,
        reads=tuple([plan.reads[n] for n in kept]),
        variables=tuple([plan.variables[n] for n in kept]),
        lookups=tuple(
            [replace(x, level=n) for x, n in zip(plan.lookups, levels, strict=True)]
        ),
    )
    return plan, Traced(closed, inputs, reads, kept)


def staged(
    plan: Plan,
    traced: TracedBody,
    call: CutCall,
    elements: Sequence[Element],
    capture: Capture,
    mesh: Mesh | None,
) -> Staged:
    """Makes the body of a step on variables of this process, or of several processes,
    as a function to trace."""
    if plan.lookups:
        raise _refusals.lookup_among_stages(plan.function, plan.lookups[0])
    keys = [spec.key for spec in plan.reads]
    kept = {key: (v, rule) for key, (v, rule, _) in capture.moves.slots.items()}
    values_like = [_kept(variable) for variable in plan.variables]
    # Replicas may have begun to keep copies in the trace itself, and over the devices
    # of all processes the body does other things.
    like = dict(zip(keys, values_like, strict=True))
    if mesh is not None or not traced.takes(like):
        traced = traced.replayed()

    def body(inputs: Any, leaves: Any, values: Any, slots: Any) -> Any:
        known = dict(zip(keys, values, strict=True))
        beside = dict(zip(kept, slots, strict=True))
        outputs = traced(inputs, leaves, known, (), beside)
        return outputs.results, outputs.moved, outputs.slots, outputs.operands

    changing = [variable for variable, _ in capture.moves.values.values()]
    held = PlannedVariables(plan, changing, list(kept.values()))
    return Staged(
        body,
        call.inputs,
        [_as_taken(leaf) for element in elements for leaf in element.leaves],
        held,
        held.fingerprint,
        values_like,
        [list(rule.kinds) for _, rule in kept.values()],
        mesh,
    )


def _levels(
    closed: Any, inputs: int, reads: int, lookups: int
) -> tuple[tuple[int, ...], list[int]]:
    """Returns the indices of the reads that are used, and the level of each lookup."""
    flow = Flow(closed)
    outputs = len(closed.jaxpr.outvars)
    # Prints and callbacks may use anything: then all reads count (-1 has all bits).
    used = -1 if closed.effects else flow.inputs_of(range(outputs))
    kept = tuple([n for n in range(reads) if used >> (inputs + n) & 1])
    levels: list[int] = []
    for number in range(lookups):
        needs = flow.inputs_of([outputs - lookups + number]) >> inputs
        behind = [levels[n] for n in range(number) if needs >> (reads + n) & 1]
        # Values arrive with the first answer; ids that need one are asked for next.
        if needs & ((1 << reads) - 1):
            behind.append(0)
        levels.append(1 + max(behind, default=-1))
    return kept, levels


def _kept(variable: VariableHandle) -> jax.ShapeDtypeStruct:
    """Returns shape and dtype of the value, or of all copies, of a variable as a step
    gets it."""
    shape, storage = variable.shape, variable.storage
    if isinstance(storage, DeviceStorage) and storage.is_apart:
        shape = (storage.pool.copies, *shape)
    return _shaped(shape, variable.spec.numpy_dtype)


def _shaped(shape: Sequence[int], dtype: Any) -> jax.ShapeDtypeStruct:
    made: Any = jax.ShapeDtypeStruct  # untyped
    shaped: jax.ShapeDtypeStruct = made(
        tuple(shape), jax.dtypes.canonicalize_dtype(dtype)
    )
    return shaped


def _as_taken(leaf: Any) -> Any:
    """Replaces the dtype in the description of an array by the one to which jax casts
    the array, so that jax does not warn. (A real array of numpy may have 64 bits.)"""
    if not isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    as_it_is = jax.dtypes.canonicalize_dtype(leaf.dtype) == leaf.dtype
    return leaf if as_it_is else _shaped(leaf.shape, leaf.dtype)


def discover(
    step: str,
    fn: Callable[..., Any],
    call: CutCall,
    supply: Callable[[int, StepIterator], Element],
) -> tuple[Plan, TracedBody | Traced | Staged]:
    """Traces the body and makes its plan; traces twice if `_flow` cannot use the first
    trace.

    ``supply`` draws the elements for the body, real ones or pytrees of
    ``ShapeDtypeStruct``.

    Raises:
        TypeError, RuntimeError: The body cannot be captured; see `_refusals`.
        Exception: Whatever the body or ``supply`` raises.
    """
    elements: list[Element] = []

    def supplied(ordinal: int, iterator: StepIterator) -> Element:
        elements.append(supply(ordinal, iterator))
        return elements[-1]

    # Where the inputs of the program stand among the leaves of the arguments.
    gaps = _gaps(call)
    traces: list[tuple[Capture, Structure, list[Placeholder]]] = []
    # The elements are not known before the trace has drawn them.
    template = Template(
        fn, call.treedef, tuple(call.leaves), gaps, tuple(call.iterators), ()
    )

    def traced(seed: jax.Array, inputs: list[Any]) -> Any:
        feed = Discovery(seed, supplied)
        capture = Capture(feed, call.iterators)
        structure, arrays = template.run(capture, inputs)
        traces.append((capture, structure, feed.placeholders))
        # Placeholders are outputs, so `body_program` finds which equations have made
        # them.
        return outputs_of(capture, arrays), [each.value for each in feed.placeholders]

    with _refusals.translated_errors(step):
        closed, (outputs, _) = jax.make_jaxpr(traced, return_shape=True)(
            np.zeros((), np.float32), call.inputs
        )
    capture, structure, placeholders = traces[-1]
    results, operands = outputs.results, outputs.operands
    template = replace(template, iterators=tuple(capture.iterators))
    # First, as a leaked value looks like a constant to all that follows.
    _refuse_leaks(step, closed, len(results), capture.updates, placeholders)
    plan = _plan(step, capture, structure, results, operands, closed, bool(call.inputs))
    tree = jax.tree.structure(outputs)
    body = TracedBody(
        plan,
        template.empty([element.treedef for element in elements]),
        list(capture.moves.values),
        list(capture.moves.slots),
        body_program(closed, placeholders, tree),
    )
    wide = wide_leaves(call, gaps, elements)
    # A step that updates variables here, or talks to other processes, runs in stages.
    channels = channels_of(closed)
    if plan.moves or channels or any(map(is_here, plan.variables)):
        mesh = next((channel.mesh for channel in channels if channel.mesh), None)
        in_stages = staged(plan, body, call, elements, capture, mesh)
        if wide:
            plan = replace(
                plan, downcast_leaves=downcast_leaves(plan, in_stages.traced(), wide)
            )
        return plan, in_stages
    # Rows of a hashed table have no numbers until their ids are looked up.
    for update in plan.updates if not plan.lookups else ():
        if update.table is not None and update.table.is_hashed:
            raise _refusals.hashed_update(update.table, update.where)
    indexed = wide and any(update.table is not None for update in plan.updates)
    # Only these need the data flow of the whole program, which costs another trace.
    if plan.lookups or indexed:
        again = retraced(plan, body, call, elements)
        if wide:
            plan = checked_plan(plan, again, wide)
        if plan.lookups:
            if any(lookup.table.is_hashed for lookup in plan.lookups):
                warn_of_numbers(step, fn)
            return leveled(plan, again)
    return plan, body


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
        function=step,
        reads=tuple(variable.spec for variable in capture.reads.values()),
        updates=tuple(
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
        draws=tuple(capture.draws),
        out_structure=structure,
        out_specs=tuple(results),
        has_inputs=has_inputs,
        has_effects=bool(closed.effects),
        asked_context=capture.asked_context,
        variables=tuple(capture.reads.values()),
        targets=tuple(
            (update.variables, update.optimizer) for update in capture.updates
        ),
        lookups=tuple(
            PlannedLookup(lookup.table, lookup.ids.shape, 0, lookup.where)
            for lookup in capture.lookups
        ),
        moves=tuple(capture.moves.notes),
        calls=tuple([_emptied(call) for call in capture.calls]),
    )


def _emptied(call: GradientCall) -> GradientCall:
    """Returns the call without its arrays, which belong to the trace."""
    return call.with_arrays([None] * len(call.arrays))


def _gaps(call: CutCall) -> tuple[int, ...]:
    """Returns the indices of the leaves of a call that are inputs; leaves and inputs
    have the same order."""
    gaps: list[int] = []
    for number, leaf in enumerate(call.leaves):
        # By identity: equal numbers may be an input in one place and static in another.
        if len(gaps) < len(call.inputs) and leaf is call.inputs[len(gaps)]:
            gaps.append(number)
    return tuple(gaps)


def _refuse_leaks(
    step: str,
    closed: Any,
    results: int,
    updates: Sequence[Recorded],
    placeholders: Sequence[Placeholder],
) -> None:
    """Refuses traced values that were made by another trace: they appear as constants
    in this one. (Placeholders of an inner trace are allowed.)

    Raises:
        RuntimeError: The body uses such a value.
    """
    ours = {id(placeholder.value) for placeholder in placeholders}
    foreign = {
        id(var)
        for var, value in zip(closed.jaxpr.constvars, closed.consts, strict=True)
        if isinstance(value, jax.core.Tracer) and id(value) not in ours
    }
    if not foreign:
        return
    outputs = [id(var) for var in closed.jaxpr.outvars]
    owners = [update for update in updates for _ in update.operands]
    for number, var in enumerate(outputs[: results + len(owners)]):
        if var in foreign and number >= results:
            update = owners[number - results]
            what = f"an update of {update.target}"
            raise _refusals.leaked(step, what, update.where)
    raise _refusals.leaked(step, "the body", step)
