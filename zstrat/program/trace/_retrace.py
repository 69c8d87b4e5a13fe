"""The second trace of a body: with what the plan names as its inputs.

The first trace finds out what a body reads. Where that is not enough to compile it (a
body with lookups, or one that is cut into stages), it is traced once more, with values,
rows and slots as inputs. What depends on what in that trace tells which rows can be
asked for with the first request and which only after an answer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import jax

from zstrat.program._device_state import PlannedVariables
from zstrat.variables import DeviceHome

from . import _refusals
from ._capture import Capture
from ._feeds import Replay
from ._flow import Flow

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence

    from jax.sharding import Mesh

    from zstrat.variables import VariableHandle

    from ._iterator import Element
    from ._plan import Plan, Template
    from ._signature import CutCall


@dataclass(frozen=True, slots=True)
class Traced:
    """The body of a step with lookups, as a program: from the leaves of arguments and
    of elements, the values of ``reads`` and the rows of each lookup, to ``results``
    arrays of the result, the operands of each update, and the ids of each lookup.

    Of its ``reads`` the plan leaves out those that nothing depends on; ``kept`` are the
    others, by number. ``inputs`` is how many leaves come before the values.
    """

    closed: Any
    inputs: int
    reads: int
    kept: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Staged:
    """The body of a step of variables that live here, or of several processes, as a
    function to be traced.

    ``held`` are the variables, and ``mark`` is that of `PlannedVariables` from before
    anything was asked about how they lie: if it is still that one, all answers are.

    ``body(inputs, leaves, values, slots)`` takes the inputs, the leaves of elements,
    the values of the plan's reads, and the slots of each optimizer. It returns arrays
    of the result, values of what it moves, slots, and the operands of each update.
    ``inputs`` and ``leaves`` are some, for their types.
    """

    body: Callable[..., Any]
    inputs: list[Any]
    leaves: list[Any]
    held: PlannedVariables
    mark: Hashable
    values_like: list[Any]
    slots_like: list[Any]
    mesh: Mesh | None
    """Of the devices of all processes, if XLA brings them together."""

    def traced(self) -> Any:
        """The body as a program."""
        return jax.make_jaxpr(self.body)(
            self.inputs, self.leaves, self.values_like, self.slots_like
        )


def retraced(
    plan: Plan, template: Template, call: CutCall, elements: Sequence[Element]
) -> Any:
    """The body as a program: from inputs, leaves of elements, values of the plan's
    reads and rows of its lookups to results, operands of updates, and ids."""
    keys = [spec.key for spec in plan.reads]

    def replayed(inputs: Any, drawn: Any, values: Any, rows: Any) -> Any:
        known = dict(zip(keys, values, strict=True))
        feed = Replay(plan.function, known, drawn, rows)
        capture = Capture(feed, template.iterators)
        structure, arrays = template.run(capture, inputs)
        plan.require_same(capture, structure)
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
        return jax.make_jaxpr(replayed)(call.inputs, drawn, values, rows)


def leveled(plan: Plan, closed: Any) -> tuple[Plan, Traced]:
    """The plan of a body with lookups, with their levels, and the body."""
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
    template: Template,
    call: CutCall,
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
    template = template.empty([element.treedef for element in elements])

    def body(inputs: Any, leaves: Any, values: Any, slots: Any) -> Any:
        known = dict(zip(keys, values, strict=True))
        beside = dict(zip(kept, slots, strict=True))
        feed = Replay(plan.function, known, template.drawn(leaves), (), beside)
        capture = Capture(feed, template.iterators)
        structure, arrays = template.run(capture, inputs)
        plan.require_same(capture, structure)
        return (
            arrays,
            [capture.moves.values[key][1] for key in moved],
            [capture.moves.slots[key][2] for key in kept],
            [list(update.operands) for update in capture.updates],
        )

    changing = [variable for variable, _ in found.moves.values.values()]
    held = PlannedVariables(plan, changing, list(kept.values()))
    return Staged(
        body,
        call.inputs,
        [leaf for element in elements for leaf in element.leaves],
        held,
        held.mark,
        [_kept(variable) for variable in plan.variables],
        [list(rule.kinds) for _, rule in kept.values()],
        mesh,
    )


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


def _kept(variable: VariableHandle) -> jax.ShapeDtypeStruct:
    """What a step is given of the variable: its value, or a copy for each replica."""
    shape, home = variable.shape, variable.home
    if isinstance(home, DeviceHome) and home.is_apart:
        shape = (home.residence.copies, *shape)
    return _shaped(shape, variable.spec.numpy_dtype)


def _shaped(shape: Sequence[int], dtype: Any) -> jax.ShapeDtypeStruct:
    made: Any = jax.ShapeDtypeStruct  # untyped
    shaped: jax.ShapeDtypeStruct = made(
        tuple(shape), jax.dtypes.canonicalize_dtype(dtype)
    )
    return shaped
