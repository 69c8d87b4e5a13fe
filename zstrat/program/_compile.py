"""A plan as one compiled program: inputs and values in, result and operands out.

Law of the file: what a program returns never shares memory with what it was given.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from .stages._serialized_cpu import settled
from .trace import _refusals
from .trace._capture import Capture
from .trace._context import tracing_again, worker_context
from .trace._feeds import Replay

if TYPE_CHECKING:
    from ._results import StepResult
    from .trace._context import WorkerContext
    from .trace._plan import Plan, Template


class CompiledProgram:
    """Compiled when it first runs, for one signature.

    Calling it takes the array leaves of the arguments, those of the drawn elements, and
    the values of ``plan.reads``; it returns the arrays of the result and, per update,
    its operands.
    """

    __slots__ = ("_jitted", "_traced", "constant", "plan")

    def __init__(self, plan: Plan, template: Template) -> None:
        self.plan = plan
        # The body is traced again when the program first runs, perhaps on behalf of
        # another step by then: it must see the worker as discovery saw it.
        self._jitted = jax.jit(_replayed(plan, template, worker_context.get()))
        self._traced = False
        self.constant: StepResult | None = None
        """The result of every run, once known, if the plan is constant."""

    def with_others(self, plan: Plan, variables: object) -> CompiledProgram:
        """The same program for other variables, which ``plan`` has in place of its
        own."""
        del variables
        made = copy.copy(self)
        made.plan, made.constant = plan, None
        return made

    def __call__(
        self, inputs: list[Any], elements: list[Any], values: list[Any]
    ) -> tuple[list[jax.Array], list[list[jax.Array]]]:
        """Runs it; may return before the results are ready.

        Raises:
            TypeError, RuntimeError: The body cannot be captured. Only the first time.
        """
        outputs: tuple[list[jax.Array], list[list[jax.Array]]]
        if self._traced:
            outputs = self._jitted(inputs, elements, values)
        else:
            with _refusals.in_our_words(self.plan.function):
                outputs = self._jitted(inputs, elements, values)
            self._traced = True
        results, operands = outputs
        return settled(outputs, results or (operands[0] if operands else ()))


def _replayed(plan: Plan, template: Template, context: WorkerContext | None) -> Any:
    keys = [spec.key for spec in plan.reads]

    def program(inputs: list[Any], elements: list[Any], values: list[Any]) -> Any:
        known = dict(zip(keys, values, strict=True))
        feed = Replay(plan.function, known, template.drawn(elements))
        capture = Capture(feed, template.iterators)
        context_before = worker_context.set(context)
        again_before = tracing_again.set(True)
        try:
            structure, arrays = template.run(capture, inputs)
        finally:
            tracing_again.reset(again_before)
            worker_context.reset(context_before)
        plan.require_same(capture, structure)
        given = {id(value) for value in (*inputs, *elements, *values)}
        return (
            [own(array, given) for array in arrays],
            [[own(x, given) for x in update.operands] for update in capture.updates],
        )

    program.__name__ = program.__qualname__ = plan.function.rpartition(".")[2]
    return program


def own(array: jax.Array, given: set[int]) -> jax.Array:
    """An input that is handed out as it came may be memory of the caller's."""
    return jnp.copy(array) if id(array) in given else array
