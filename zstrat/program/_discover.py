"""Finds the plan of a step by tracing its body under abstract values.

A body with lookups is traced once more, with rows as inputs and ids as outputs. What
depends on what in that trace tells which rows can be asked for with the first request
and which only after an answer, and each part of the program is cut out of it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.tree_util import keystr, tree_flatten_with_path

from zstrat.variables import DeviceHome

from . import _refusals
from ._capture import Capture
from ._feeds import Discovery, Replay
from ._flow import Flow
from ._iterator import StepIterator
from ._lookups import PlannedLookup
from ._moves import is_here, slots_like
from ._narrow import is_narrowed
from ._plan import Plan, PlannedUpdate, Template
from ._stages import channels_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from jax.sharding import Mesh

    from zstrat.variables import Optimizer, Variable

    from ._capture import Recorded
    from ._iterator import Element
    from ._signature import Call
    from ._structure import Structure, TreeDef


@dataclass(frozen=True, slots=True)
class Traced:
    """The body of a step with lookups, as a program: from the leaves of arguments and
    of elements, the values of ``reads`` and the rows of each lookup, to ``results``
    arrays of the result, the operands of each update, and the ids of each lookup.

    Of its ``reads`` the plan leaves out those that nothing depends on; ``kept`` are the
    others, by number. ``inputs`` is how many leaves come before the values. Those of
    them that jax makes 32-bit integers of, and from which ids are computed, are
    ``narrowed``: by number, with their place in words.
    """

    closed: Any
    inputs: int
    reads: int
    kept: tuple[int, ...]
    narrowed: dict[int, str]


@dataclass(frozen=True, slots=True)
class Staged:
    """The body of a step of variables that live here, or of several processes, as a
    function to be traced.

    ``body(inputs, leaves, values, slots)`` takes the inputs, the leaves of elements,
    the values of the plan's reads, and the slots of each of ``slots``. It returns
    arrays of the result, values of ``moved``, slots, and the operands of each update.
    ``inputs`` and ``leaves`` are some, for their types.
    """

    body: Callable[..., Any]
    inputs: list[Any]
    leaves: list[Any]
    moved: tuple[Variable, ...]
    slots: tuple[tuple[Variable, Optimizer], ...]
    values_like: list[Any]
    slots_like: list[Any]
    mesh: Mesh | None
    """Of the devices of all processes, if XLA brings them together."""


def discover(
    step: str,
    fn: Callable[..., Any],
    call: Call,
    supply: Callable[[int, StepIterator], Element],
) -> tuple[Plan, Template | Traced | Staged]:
    """Traces the body, once or, if it looks rows up or is cut into stages, twice.

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
    _refuse_leaks(step, closed, len(results), capture.updates)
    plan = _plan(step, capture, structure, results, operands, closed, bool(call.inputs))
    if plan.moves or channels_of(closed) or any(map(is_here, plan.variables)):
        mesh = next((c.mesh for c in channels_of(closed) if c.mesh), None)
        return plan, _staged(plan, template, call, elements, capture, mesh)
    if plan.lookups:
        return _traced(plan, template, call, elements)
    return plan, _empty(template, [element.treedef for element in elements])


def _traced(
    plan: Plan, template: Template, call: Call, elements: Sequence[Element]
) -> tuple[Plan, Traced]:
    """The second trace of a body with lookups, and the plan with their levels."""
    keys = [spec.key for spec in plan.reads]

    def replayed(inputs: Any, drawn: Any, values: Any, rows: Any) -> Any:
        known = dict(zip(keys, values, strict=True))
        feed = Replay(plan.function, known, drawn, rows)
        capture = Capture(feed, template.iterators)
        structure, arrays = template.run(capture, inputs)
        require_same(plan, capture, structure)
        return (
            arrays,
            [list(update.operands) for update in capture.updates],
            [lookup.ids for lookup in capture.lookups],
        )

    drawn = [element.treedef.unflatten(element.leaves) for element in elements]
    values = [_shaped(spec.shape, spec.numpy_dtype) for spec in plan.reads]
    rows = [
        _shaped((*lookup.shape, *lookup.table.shape[1:]), lookup.table.dtype)
        for lookup in plan.lookups
    ]
    with _refusals.in_our_words(plan.function):
        closed = jax.make_jaxpr(replayed)(call.inputs, drawn, values, rows)
    inputs = len(closed.in_avals) - len(values) - len(rows)
    kept, levels = _levels(closed, inputs, len(values), len(rows))
    plan = replace(
        plan,
        reads=tuple([plan.reads[n] for n in kept]),
        variables=tuple([plan.variables[n] for n in kept]),
        lookups=tuple(
            [replace(x, level=n) for x, n in zip(plan.lookups, levels, strict=True)]
        ),
    )
    leaves = {
        **_named_inputs(call),
        **{
            f"element {n}{keystr(path)} of the step": leaf
            for n, element in enumerate(drawn)
            for path, leaf in tree_flatten_with_path(element)[0]
        },
    }
    narrowed = _narrowed(plan, closed, leaves)
    return plan, Traced(closed, inputs, len(values), kept, narrowed)


def _staged(
    plan: Plan,
    template: Template,
    call: Call,
    elements: Sequence[Element],
    found: Capture,
    mesh: Mesh | None,
) -> Staged:
    """The second trace of a body that is cut into stages."""
    if plan.lookups:
        raise _refusals.lookup_among_stages(plan.function, plan.lookups[0])
    keys = [spec.key for spec in plan.reads]
    kept = {key: (v, rule) for key, (v, rule, _) in found.moves.slots.items()}
    moved = list(found.moves.values)
    template = _empty(template, [element.treedef for element in elements])

    def body(inputs: Any, leaves: Any, values: Any, slots: Any) -> Any:
        known = dict(zip(keys, values, strict=True))
        beside = dict(zip(kept, slots, strict=True))
        feed = Replay(plan.function, known, template.drawn(leaves), (), beside)
        capture = Capture(feed, template.iterators)
        structure, arrays = template.run(capture, inputs)
        require_same(plan, capture, structure)
        return (
            arrays,
            [capture.moves.values[key][1] for key in moved],
            [capture.moves.slots[key][2] for key in kept],
            [list(update.operands) for update in capture.updates],
        )

    return Staged(
        body,
        call.inputs,
        [leaf for element in elements for leaf in element.leaves],
        tuple([variable for variable, _ in found.moves.values.values()]),
        tuple(kept.values()),
        [_kept(variable) for variable in plan.variables],
        [slots_like(variable, rule) for variable, rule in kept.values()],
        mesh,
    )


def _named_inputs(call: Call) -> dict[str, Any]:
    """The inputs by their places in words, in order."""
    args, kwargs = call.treedef.unflatten(call.leaves)
    paths = [
        f"{root}{keystr(path)}"
        for root, tree in (("args", args), ("kwargs", kwargs))
        for path, _ in tree_flatten_with_path(tree)[0]
    ]
    return {paths[gap]: call.leaves[gap] for gap in _gaps(call)}


def _narrowed(plan: Plan, closed: Any, leaves: Mapping[str, Any]) -> dict[int, str]:
    """The leaves of 64 bits that are 32 bits wide in the program, and of which ids or
    indices of rows are computed."""
    flow = Flow(closed)
    outputs, at = len(closed.jaxpr.outvars), len(plan.out_specs)
    ids = list(range(outputs - len(plan.lookups), outputs))
    indices = []
    for update in plan.updates:
        indices += [at] if update.table is not None else []
        at += len(update.operands)
    # These keep their 64 bits on the host, and are looked at there.
    taken = {flow.input_at_origin(n) for n in ids} - {None}
    computed = flow.inputs_of(
        [
            n
            for n in (*ids, *indices)
            if (source := flow.input_at_origin(n)) is None or source not in taken
        ]
    )
    return {
        number: place
        for number, (place, leaf) in enumerate(leaves.items())
        if computed >> number & 1 and is_narrowed(leaf)
    }


def _levels(
    closed: Any, inputs: int, reads: int, lookups: int
) -> tuple[tuple[int, ...], list[int]]:
    """The reads that anything depends on, and the level of each lookup."""
    flow = Flow(closed)
    outputs = len(closed.jaxpr.outvars)
    used = -1 if closed.effects else flow.inputs_of(range(outputs))
    kept = tuple([n for n in range(reads) if used >> (inputs + n) & 1])
    levels: list[int] = []
    for number in range(lookups):
        needs = flow.inputs_of([outputs - lookups + number]) >> inputs
        behind = [levels[n] for n in range(number) if needs >> (reads + n) & 1]
        if needs & ((1 << reads) - 1):
            behind.append(0)
        levels.append(1 + max(behind, default=-1))
    return kept, levels


def require_same(plan: Plan, capture: Capture, structure: Structure) -> None:
    """Refuses a trace that is not the one that made the plan.

    Raises:
        RuntimeError: The body depends on more than its arguments.
    """
    made = [
        (tuple([v.spec for v in update.variables]), update.op)
        for update in capture.updates
    ]
    planned = [(update.specs, update.op) for update in plan.updates]
    if made != planned or capture.moves.notes != list(plan.moves):
        raise _refusals.changed(plan.function, "its updates are others")
    looked = [(lookup.table, lookup.ids.shape) for lookup in capture.lookups]
    if looked != [(lookup.table, lookup.shape) for lookup in plan.lookups]:
        raise _refusals.changed(plan.function, "its lookups are others")
    if tuple(capture.draws) != plan.draws:
        raise _refusals.changed(plan.function, "it draws other elements")
    if structure != plan.out_structure:
        raise _refusals.changed(plan.function, "its result has another structure")


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
    )


def _gaps(call: Call) -> tuple[int, ...]:
    """Where among the leaves the inputs stand: both are in the same order."""
    gaps: list[int] = []
    for number, leaf in enumerate(call.leaves):
        if len(gaps) < len(call.inputs) and leaf is call.inputs[len(gaps)]:
            gaps.append(number)
    return tuple(gaps)


def _empty(template: Template, elements: Sequence[TreeDef]) -> Template:
    """The template without values: no argument and no dataset is kept alive by it."""
    stand_ins = {id(it): StepIterator(None, name=it.name) for it in template.iterators}
    leaves = [stand_ins.get(id(leaf), leaf) for leaf in template.leaves]
    for gap in template.gaps:
        leaves[gap] = None
    return Template(
        template.fn,
        template.treedef,
        tuple(leaves),
        template.gaps,
        tuple(stand_ins[id(iterator)] for iterator in template.iterators),
        tuple(elements),
    )


def _shaped(shape: Sequence[int], dtype: Any) -> jax.ShapeDtypeStruct:
    made: Any = jax.ShapeDtypeStruct  # untyped
    shaped: jax.ShapeDtypeStruct = made(
        tuple(shape), jax.dtypes.canonicalize_dtype(dtype)
    )
    return shaped


def _kept(variable: Variable) -> jax.ShapeDtypeStruct:
    """What a step is given of the variable: its value, or a copy for each replica."""
    shape, home = variable.shape, variable.home
    if isinstance(home, DeviceHome) and home.is_apart:
        shape = (home.residence.copies, *shape)
    return _shaped(shape, variable.spec.numpy_dtype)


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
