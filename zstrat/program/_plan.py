"""What one step function does for one signature: its communication, known beforehand.

A plan is found by tracing the body once under abstract values (discovery). It says
which variables are read and updated, how many elements are drawn from which iterator
and what comes back. The coordinator needs no more than this; a worker compiles it into
a `Program`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from zstrat.variables import LOCAL

from . import _refusals
from ._capture import Capture, Discovery
from ._iterator import StepIterator
from ._structure import ResultLayout, Structure, split

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from zstrat.variables import Optimizer, Variable, VariableSpec
    from zstrat.wire._messages import UpdateOp

    from ._capture import Recorded
    from ._iterator import Element
    from ._signature import Call
    from ._structure import TreeDef


@dataclass(frozen=True, slots=True)
class PlannedUpdate:
    """One update. ``optimizer`` is 0 for none; ``where`` is the user's line."""

    spec: VariableSpec
    op: UpdateOp
    optimizer: int
    operands: tuple[jax.ShapeDtypeStruct, ...]
    where: str


@dataclass(frozen=True, slots=True)
class Template:
    """The body and its arguments, with gaps where the inputs of the program go."""

    fn: Callable[..., Any]
    treedef: TreeDef
    leaves: tuple[Any, ...]
    gaps: tuple[int, ...]
    iterators: tuple[StepIterator, ...]
    elements: tuple[TreeDef, ...]

    def run(
        self, capture: Capture, inputs: Sequence[Any]
    ) -> tuple[Structure, list[jax.Array]]:
        """The body under a capture: the structure and the arrays of its result."""
        leaves = list(self.leaves)
        for gap, value in zip(self.gaps, inputs, strict=True):
            leaves[gap] = value
        args, kwargs = self.treedef.unflatten(leaves)
        with capture.recording():
            structure, arrays = split(self.fn(*args, **kwargs), capture.read)
            return structure, [jnp.asarray(array) for array in arrays]


@dataclass(frozen=True, eq=False)
class Plan:
    """See the module's docstring. ``draws`` are ordinals of the iterators among the
    arguments, in the order of the draws; ``out_specs`` are the arrays of the result.

    ``variables`` are the handles behind ``reads``; ``targets`` the variables and
    optimizers behind ``updates``.
    """

    function: str
    reads: tuple[VariableSpec, ...]
    updates: tuple[PlannedUpdate, ...]
    draws: tuple[int, ...]
    out_structure: Structure
    out_specs: tuple[jax.ShapeDtypeStruct, ...]
    has_inputs: bool
    has_effects: bool
    asked_context: bool
    variables: tuple[Variable, ...]
    targets: tuple[tuple[Variable, Optimizer | None], ...]

    @property
    def has_lookups(self) -> bool:
        """Whether it reads rows of tables, which each run asks for anew."""
        return False

    @property
    def levels(self) -> int:
        """Requests, one after the other, before it can run."""
        return 1

    @property
    def read_only(self) -> bool:
        """Whether it updates nothing."""
        return not self.updates

    @property
    def is_constant(self) -> bool:
        """Whether every run gives the same result and does nothing else."""
        moving = self.has_inputs or self.draws or self.reads or self.updates
        return not moving and not self.has_effects

    @property
    def draws_per_step(self) -> Mapping[int, int]:
        """Elements drawn by one step, by ordinal of the iterator."""
        return {n: self.draws.count(n) for n in dict.fromkeys(self.draws)}

    @cached_property
    def layout(self) -> ResultLayout:
        """How to cut and rebuild the result; always the same object."""
        return ResultLayout(
            tuple(spec.dtype.name for spec in self.out_specs),
            tuple(spec.shape for spec in self.out_specs),
            self.out_structure.plain,
        )

    def require_shared(self) -> None:
        """Refuses a plan that other tasks cannot run, because it uses variables of this
        process.

        Raises:
            ValueError: Names the variables.
        """
        specs = (*self.reads, *(update.spec for update in self.updates))
        local = dict.fromkeys(str(spec) for spec in specs if spec.ps == LOCAL)
        if local:
            raise _refusals.not_shared(f"the step function {self.function!r}", *local)


def discover(
    step: str,
    fn: Callable[..., Any],
    call: Call,
    supply: Callable[[int, StepIterator], Element],
) -> tuple[Plan, Template]:
    """Traces the body once.

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
    return plan, _empty(template, [element.treedef for element in elements])


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
                update.variable.spec,
                update.op,
                update.optimizer.id if update.optimizer is not None else 0,
                tuple(shapes),
                update.where,
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
        tuple((update.variable, update.optimizer) for update in capture.updates),
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
            what = f"an update of {update.variable.spec}"
            raise _refusals.leaked(step, what, update.where)
    raise _refusals.leaked(step, "the body", step)
