"""A plan as one compiled program: inputs and values in, result and operands out.

Law of the file: what a program returns never shares memory with what it was given.

Programs over several parts of one CPU are run one at a time (`settled`). XLA gives each
device of a CPU program a thread of one pool, and a device that waits for the others in
a collective keeps its thread. Where two programs are under way, each may hold threads
that the other needs, and neither ends: XLA then ends the process. Nothing is lost by
waiting: both would compute on the same cores.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, Final, TypeVar

import jax
import jax.numpy as jnp

from .trace import _refusals
from .trace._context import worker_context

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jax.sharding import Sharding

    from ._results import StepResult
    from .trace._body import TracedBody
    from .trace._context import WorkerContext
    from .trace._plan import Plan


class CompiledProgram:
    """Compiled when it first runs, for one signature.

    Calling it takes the array leaves of the arguments, those of the drawn elements, and
    the values of ``plan.reads``; it returns the arrays of the result and, per update,
    its operands.
    """

    __slots__ = ("_jitted", "_traced", "constant", "plan")

    is_current: Final = True
    """It depends on nothing that changes: values are arguments."""

    def __init__(self, plan: Plan, body: TracedBody) -> None:
        self.plan = plan
        # The body may be traced again when the program first runs, perhaps on behalf
        # of another step by then: it must see the worker as discovery saw it.
        self._jitted = jax.jit(_replayed(plan, body, worker_context.get()))
        self._traced = False
        self.constant: StepResult | None = None
        """The result of every run, once known, if the plan is constant."""

    def with_others(self, plan: Plan, variables: object) -> CompiledProgram:
        """This program for other variables, which ``plan`` has in place of its own."""
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


def _replayed(plan: Plan, body: TracedBody, context: WorkerContext | None) -> Any:
    keys = [spec.key for spec in plan.reads]

    def program(inputs: list[Any], elements: list[Any], values: list[Any]) -> Any:
        context_before = worker_context.set(context)
        try:
            known = dict(zip(keys, values, strict=True))
            made = body(inputs, elements, known)
        finally:
            worker_context.reset(context_before)
        given = {id(value) for value in (*inputs, *elements, *values)}
        return (
            [own(array, given) for array in made.results],
            [[own(x, given) for x in operands] for operands in made.operands],
        )

    program.__name__ = program.__qualname__ = plan.function.rpartition(".")[2]
    return program


def own(array: jax.Array, given: set[int]) -> jax.Array:
    """An input that is handed out as it came may be memory of the caller's."""
    return jnp.copy(array) if id(array) in given else array


# jax's stubs leave it untyped.
_wait: Final[Any] = jax.block_until_ready

Outputs = TypeVar("Outputs")


def settled(outputs: Outputs, arrays: Sequence[Any]) -> Outputs:
    """What a program returned; ready, if it is one over several parts of the CPU.

    Args:
        outputs: All that it returned, a pytree.
        arrays: Some of it: the first of them says where the program runs.
    """
    if arrays and _is_real(arrays[0]) and is_waited_for(arrays[0].sharding):
        _wait(arrays[0])  # the program ends with all that it returns
    return outputs


def is_waited_for(sharding: Sharding) -> bool:
    """Whether a program over these devices has to be waited for."""
    devices: set[Any] = sharding.device_set  # untyped
    return len(devices) > 1 and next(iter(devices)).platform == "cpu"


def _is_real(array: Any) -> bool:
    return isinstance(array, jax.Array) and not isinstance(array, jax.core.Tracer)
