"""`CompiledProgram`: a plan as one compiled program.

Law of the file: the outputs of a program never share memory with its inputs.

Programs over several parts of one CPU run one at a time (`settled`). XLA gives each
device of a CPU program a thread of one pool, and a device that waits for others in a
collective keeps its thread. If two programs run at once, each may hold threads that the
other needs, and neither ends: XLA then aborts the process. Waiting costs nothing: both
would compute on the same cores.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, Final, TypeVar

import jax
import jax.numpy as jnp

from ._sets import side_by_side
from .trace import _refusals
from .trace._context import worker_context

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jax.sharding import Sharding

    from ._results import StepResult
    from .trace._context import WorkerContext
    from .trace._plan import Plan, TracedBody


class CompiledProgram:
    """The program of one signature, compiled when it first runs.

    A call takes the array leaves of the arguments, those of the drawn elements, and the
    values of ``plan.reads``; it returns the arrays of the result and the operands of
    each of ``plan.sent``.
    """

    __slots__ = ("_jitted", "_traced", "constant", "plan")

    is_current: Final = True
    """Always: values are inputs of the program."""

    def __init__(self, plan: Plan, body: TracedBody) -> None:
        self.plan = plan
        # The body may be traced again when the program first runs, perhaps for another
        # step by then: it must see the worker context of discovery.
        self._jitted = jax.jit(_replayed(plan, body, worker_context.get()))
        self._traced = False
        self.constant: StepResult | None = None
        """The result of the first run, if the plan is constant."""

    def with_others(self, plan: Plan, variables: object) -> CompiledProgram:
        """Returns this program for the variables of another plan."""
        del variables
        copied = copy.copy(self)
        copied.plan, copied.constant = plan, None
        assert len(plan.sent) == len(plan.updates), "no plan with sets is shared"
        return copied

    def __call__(
        self, inputs: list[Any], elements: list[Any], values: list[Any]
    ) -> tuple[list[jax.Array], list[list[jax.Array]]]:
        """Runs the program; may return before the results are ready.

        Raises:
            TypeError, RuntimeError: The body cannot be captured; only in the first run.
        """
        outputs: tuple[list[jax.Array], list[list[jax.Array]]]
        if self._traced:
            outputs = self._jitted(inputs, elements, values)
        else:
            with _refusals.translated_errors(self.plan.function):
                outputs = self._jitted(inputs, elements, values)
            self._traced = True
        results, operands = outputs
        return settled(outputs, results or (operands[0] if operands else ()))


def _replayed(plan: Plan, body: TracedBody, context: WorkerContext | None) -> Any:
    sent = plan.sent
    keys = [spec.key for spec in plan.reads]

    def program(inputs: list[Any], elements: list[Any], values: list[Any]) -> Any:
        context_before = worker_context.set(context)
        try:
            known = dict(zip(keys, values, strict=True))
            outputs = body(inputs, elements, known)
        finally:
            worker_context.reset(context_before)
        given = {id(value) for value in (*inputs, *elements, *values)}
        return (
            [own(array, given) for array in outputs.results],
            [
                [own(x, given) for x in outputs.operands[numbers[0]]]
                if len(numbers) == 1
                else [side_by_side([outputs.operands[n][0] for n in numbers])]
                for _, numbers in sent
            ],
        )

    program.__name__ = program.__qualname__ = plan.function.rpartition(".")[2]
    return program


def own(array: jax.Array, given: set[int]) -> jax.Array:
    """Copies an output that is one of the inputs, which may be the caller's memory."""
    return jnp.copy(array) if id(array) in given else array


# jax's stubs leave it untyped.
_wait: Final[Any] = jax.block_until_ready

Outputs = TypeVar("Outputs")


def settled(outputs: Outputs, arrays: Sequence[Any]) -> Outputs:
    """Waits for a program over several parts of the CPU; returns its outputs.

    Args:
        outputs: A pytree.
        arrays: Some of the outputs; the first one shows where the program runs.
    """
    first = arrays[0] if arrays else None
    is_real = isinstance(first, jax.Array) and not isinstance(first, jax.core.Tracer)
    if is_real and is_waited_for(arrays[0].sharding):
        _wait(arrays[0])  # all outputs are ready at once
    return outputs


def is_waited_for(sharding: Sharding) -> bool:
    """Returns whether a program over these devices must end before the next one."""
    devices: set[Any] = sharding.device_set  # untyped
    return len(devices) > 1 and next(iter(devices)).platform == "cpu"
