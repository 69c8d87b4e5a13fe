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
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

import jax
import jax.numpy as jnp

from ._sets import side_by_side, update_sets
from .trace import _refusals
from .trace._context import worker_context

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jax.sharding import Sharding

    from ._results import StepResult
    from ._sets import UpdateSet
    from .trace._context import WorkerContext
    from .trace._plan import Plan, TracedBody


class CompiledProgram:
    """The program of one signature, compiled when it first runs.

    A call takes the array leaves of the arguments, those of the drawn elements, and the
    values of ``plan.reads``; it returns the arrays of the result and the operands of
    each update. `run_in_sets` runs another program, which returns the gradients of each
    of ``sets`` as one array.
    """

    __slots__ = (
        "_jitted", "_jitted_sets", "_traced", "constant", "plan", "sets"
    )  # fmt: skip

    is_current: Final = True
    """Always: values are inputs of the program."""

    def __init__(self, plan: Plan, body: TracedBody) -> None:
        self.plan = plan
        # The body may be traced again when the program first runs, perhaps for another
        # step by then: it must see the worker context of discovery.
        replayed = partial(_replayed, plan, body, worker_context.get())
        self._jitted = jax.jit(replayed([]))
        self.sets = update_sets(plan)
        self._jitted_sets = jax.jit(replayed(self.sets))
        self._traced: set[Any] = set()
        self.constant: StepResult | None = None
        """The result of the first run, if the plan is constant."""

    def with_others(self, plan: Plan, variables: object) -> CompiledProgram:
        """Returns this program for the variables of another plan."""
        del variables
        copied = copy.copy(self)
        copied.plan, copied.constant = plan, None
        assert not self.sets, "a plan with an optimizer is not shared"
        return copied

    def __call__(
        self, inputs: list[Any], elements: list[Any], values: list[Any]
    ) -> tuple[list[jax.Array], list[list[jax.Array]]]:
        """Runs the program; may return before the results are ready.

        Raises:
            TypeError, RuntimeError: The body cannot be captured; only in the first run.
        """
        results, operands, _ = self._run(self._jitted, inputs, elements, values)
        return results, operands

    def run_in_sets(
        self, inputs: list[Any], elements: list[Any], values: list[Any]
    ) -> tuple[list[jax.Array], list[list[jax.Array]], list[jax.Array]]:
        """Runs the program as a call does, which see; returns the arrays of the result,
        the operands of each update, none of those in ``sets``, and for each set its
        gradients side by side."""
        return self._run(self._jitted_sets, inputs, elements, values)

    def _run(
        self, jitted: Any, inputs: list[Any], elements: list[Any], values: list[Any]
    ) -> tuple[list[jax.Array], list[list[jax.Array]], list[jax.Array]]:
        outputs: tuple[list[jax.Array], list[list[jax.Array]], list[jax.Array]]
        if jitted in self._traced:
            outputs = jitted(inputs, elements, values)
        else:
            with _refusals.translated_errors(self.plan.function):
                outputs = jitted(inputs, elements, values)
            self._traced.add(jitted)
        results, operands, together = outputs
        return settled(
            outputs, results or together or (operands[0] if operands else ())
        )


def _replayed(
    plan: Plan,
    body: TracedBody,
    context: WorkerContext | None,
    sets: Sequence[UpdateSet],
) -> Any:
    taken = {number for each in sets for number in each.updates}
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
                [] if number in taken else [own(x, given) for x in operands]
                for number, operands in enumerate(outputs.operands)
            ],
            [
                side_by_side([outputs.operands[number][0] for number in each.updates])
                for each in sets
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
