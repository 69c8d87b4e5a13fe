"""`OverlappedProgram`: a window whose first steps do not need the values on servers.

The program is cut in two. The *head* is all that depends on no pulled value: it runs
while the request for these values is under way. The *tail* takes what the head has
computed, and the values.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, final

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun

from zstrat.program._compile import CompiledProgram, settled
from zstrat.program.trace._discover import retraced
from zstrat.variables import RESIDENT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zstrat.program.trace._iterator import Element
    from zstrat.program.trace._plan import Plan, TracedBody
    from zstrat.program.trace._signature import CutCall

_LOOPS: Final = frozenset({"scan", "while"})


@final
class OverlappedProgram(CompiledProgram):
    """The program of a window with ``overlap``.

    Args:
        closed: From inputs, leaves of elements and values of reads to results and
            operands.
        late: The numbers of the inputs that are pulled.
    """

    __slots__ = ("_early", "_head", "_tail", "has_loop")

    def __init__(
        self, plan: Plan, body: TracedBody, closed: ClosedJaxpr, late: frozenset[int]
    ) -> None:
        super().__init__(plan, body)
        jaxpr: Any = closed.jaxpr
        after = {jaxpr.invars[number] for number in late}
        first: list[Any] = []
        rest: list[Any] = []
        for eqn in jaxpr.eqns:
            waits = any(not isinstance(x, Literal) and x in after for x in eqn.invars)
            (rest if waits else first).append(eqn)
            if waits:
                after.update(eqn.outvars)
        self.has_loop: Final = any(eqn.primitive.name in _LOOPS for eqn in first)
        """Whether there are steps before those that need pulled values."""
        made = {var for eqn in first for var in eqn.outvars}
        used = [*[x for eqn in rest for x in eqn.invars], *jaxpr.outvars]
        given = [x for x in dict.fromkeys(_vars(used)) if x in made]
        self._early = [n for n in range(len(jaxpr.invars)) if n not in late]
        early = [jaxpr.invars[number] for number in self._early]
        head = jaxpr.replace(invars=early, outvars=given, eqns=first)
        tail = jaxpr.replace(invars=[*given, *jaxpr.invars], eqns=rest)
        inputs = set(jaxpr.invars)
        is_input = [not isinstance(x, Literal) and x in inputs for x in jaxpr.outvars]
        run = jaxpr_as_fun(ClosedJaxpr(tail, closed.consts))

        def tailed(*values: Any) -> list[Any]:
            # Outputs share no memory with inputs.
            outputs = zip(run(*values), is_input, strict=True)
            return [jnp.copy(x) if is_given else x for x, is_given in outputs]

        self._head = jax.jit(jaxpr_as_fun(ClosedJaxpr(head, closed.consts)))
        self._tail = jax.jit(tailed)

    def begin(
        self, inputs: Sequence[Any], elements: Sequence[Any], values: Sequence[Any]
    ) -> list[jax.Array]:
        """Computes the head; of ``values`` it does not look at those that are
        pulled."""
        given = [*inputs, *elements, *values]
        return list(self._head(*[given[number] for number in self._early]))

    def finish(
        self,
        begun: Sequence[jax.Array],
        inputs: Sequence[Any],
        elements: Sequence[Any],
        values: Sequence[Any],
    ) -> tuple[list[jax.Array], list[list[jax.Array]]]:
        """Computes the tail; returns the arrays of the result, and the operands of
        each update."""
        outputs = list(self._tail(*begun, *inputs, *elements, *values))
        settled(outputs, outputs)
        count = len(self.plan.out_specs)
        left = iter(outputs[count:])
        operands = [[next(left) for _ in x.operands] for x in self.plan.updates]
        return outputs[:count], operands

    def __call__(
        self, inputs: list[Any], elements: list[Any], values: list[Any]
    ) -> tuple[list[jax.Array], list[list[jax.Array]]]:
        begun = self.begin(inputs, elements, values)
        return self.finish(begun, inputs, elements, values)


def program_of_window(
    plan: Plan, body: TracedBody, call: CutCall, elements: Sequence[Element]
) -> CompiledProgram:
    """Returns the program of a window; in two parts if steps of it come before the
    values that it pulls."""
    closed = retraced(plan, body, call, elements)
    first = len(closed.in_avals) - len(plan.reads)
    late = {n for n, spec in enumerate(plan.reads, first) if spec.ps != RESIDENT}
    if closed.effects:  # whose order would change
        return CompiledProgram(plan, body)
    program = OverlappedProgram(plan, body, closed, frozenset(late))
    return program if program.has_loop else CompiledProgram(plan, body)


def _vars(atoms: Sequence[Any]) -> list[Any]:
    return [x for x in atoms if not isinstance(x, Literal)]
