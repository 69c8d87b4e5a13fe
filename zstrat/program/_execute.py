"""Runs step functions: what a worker does with a scheduled call.

`prepare` draws elements and finds the program, so that the values it reads can be asked
for; `Prepared.run` computes. An eager step has no plan and runs through `run_eager`.

Law of the file: a result is complete when it is returned, and nobody writes to its
arrays again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import jax
import numpy as np

from zstrat.variables import read_all

from ._eager import Immediate
from ._refusals import variables_in_our_words
from ._results import StepResult, StepUpdate
from ._signature import cut
from ._structure import ResultLayout, split
from ._wanted import Wanted

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from zstrat.variables import Home, VariableSpec

    from ._compile import Program
    from ._plan import Plan
    from ._programs import Draws, Programs


class Step(Protocol):
    """What is run: a `Function`, as far as it matters here."""

    name: str
    eager: bool
    body: Callable[..., Any]
    programs: Programs


def prepare(
    function: Step, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Prepared:
    """Draws the elements of one step and finds its program; traces it if it is new.

    The arguments must not be written to before the step has run.

    Raises:
        OutOfRangeError: A dataset has no more elements; nothing was drawn.
        TypeError, RuntimeError: The body cannot be captured; nothing was drawn.
        ValueError: The function is eager; see `run_eager`.
        Exception: Whatever the body raises while it is traced.
    """
    if function.eager:
        raise ValueError(f"{function.name!r} is an eager step function: run_eager it")
    call = cut(args, kwargs)
    program, draws = function.programs.find(call, args, kwargs)
    return Prepared(program, call.inputs, draws)


class Prepared:
    """One step that is ready to run as soon as the values it reads are there.

    A step that draws nothing may be run again, with newer values.
    """

    __slots__ = ("_draws", "_inputs", "_program", "plan")

    def __init__(self, program: Program, inputs: list[Any], draws: Draws) -> None:
        self.plan: Plan = program.plan
        self._program = program
        self._inputs = inputs
        self._draws = draws

    @property
    def wanted(self) -> Wanted:
        """What the step asks for now; at first, what it can know without an answer."""
        return Wanted(self.plan.reads)

    @property
    def reads(self) -> tuple[VariableSpec, ...]:
        """The variables whose values `run` takes, in order."""
        return self.plan.reads

    def advance(self, values: Sequence[np.ndarray]) -> Wanted | None:
        """Takes the answer to `wanted`; returns what the step asks for next.

        None if that was the last answer, which is `run`'s then: a plan of ``levels``
        requests advances one time less. The answer may be used until the step has run.

        Raises:
            IndexError: The step looks up a row that is not there.
        """
        del values
        return None

    def unread(self) -> None:
        """Gives the drawn elements back, because the step will not run. Of several
        prepared steps the last one first."""
        self._draws.unread()

    def compute(
        self, values: Sequence[np.ndarray]
    ) -> tuple[list[jax.Array], list[list[jax.Array]]]:
        """Arrays of the result and operands per update; they may not be ready yet."""
        elements = [leaf for element in self._draws.elements for leaf in element.leaves]
        return self._program(self._inputs, elements, list(values))

    def run(self, values: Sequence[np.ndarray]) -> StepResult:
        """Computes the step.

        ``values`` are those of ``reads``. They may be used without a copy, so nobody
        may write to them while this runs; the result shares no memory with them.

        Raises:
            TypeError, RuntimeError: The body cannot be captured, found by its second
                trace when the program first runs.
        """
        program = self._program
        if program.constant is not None:
            return program.constant
        results, operands = self.compute(values)
        _to_host(results, operands)
        result = StepResult(
            [np.asarray(array) for array in results],
            self.plan.layout,
            [
                StepUpdate(
                    planned.spec,
                    planned.op,
                    planned.optimizer,
                    tuple([np.asarray(array) for array in arrays]),
                )
                for planned, arrays in zip(self.plan.updates, operands, strict=True)
            ],
        )
        if self.plan.is_constant:
            program.constant = result
        return result


def run_eager(
    function: Step,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    home: Home | None = None,
) -> StepResult:
    """Runs the Python body at once: reads and updates go to ``home`` as they occur.

    For debugging with print and pdb. An eager step draws and updates as it goes, so it
    has no plan, and ``updates`` is empty.

    Args:
        home: Of all variables; None for each variable's own.

    Raises:
        TypeError: The result is no pytree that can be rebuilt without a trace.
        Exception: Whatever the body raises.
    """
    with variables_in_our_words(function.name), Immediate(home).recording() as eager:
        structure, arrays = split(_called(function, args, kwargs), eager.read)
    plain = structure.plain
    if isinstance(plain, list) and plain[:1] == ["*"]:
        raise TypeError(
            f"the eager step function {function.name!r} returns {structure.treedef}, "
            "and whoever fetches the result cannot rebuild its classes, as nothing was "
            "traced there: return dicts, lists or plain tuples, or leave out eager=True"
        )
    leaves = [_frozen(array) for array in arrays]
    layout = ResultLayout(
        tuple(leaf.dtype.name for leaf in leaves),
        tuple(leaf.shape for leaf in leaves),
        plain,
    )
    return StepResult(leaves, layout, [])


def run_here(function: Step, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Runs a step in this process, through the home of each variable.

    Returns what the body returns, its arrays as ``jax.Array``.
    """
    if function.eager:
        words = variables_in_our_words(function.name)
        with words, Immediate(None).recording() as eager:
            structure, arrays = split(_called(function, args, kwargs), eager.read)
        return structure.unflatten([jax.numpy.asarray(array) for array in arrays])
    prepared = prepare(function, args, kwargs)
    plan = prepared.plan
    try:
        values = read_all(plan.variables)
    except BaseException:
        prepared.unread()
        raise
    results, operands = prepared.compute(values)
    for (variable, optimizer), planned, arrays in zip(
        plan.targets, plan.updates, operands, strict=True
    ):
        host = tuple([np.asarray(array) for array in arrays])
        variable.home.update(variable, planned.op, host, optimizer)
    return plan.out_structure.unflatten(results)


def _called(function: Step, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The body's result. It is given jax arrays, as a captured step is, and containers
    of its own: other calls share these arguments."""
    args, kwargs = jax.tree.map(_as_jax, (args, dict(kwargs)))
    return function.body(*args, **kwargs)


def _as_jax(leaf: Any) -> Any:
    plain = isinstance(leaf, np.ndarray | np.generic) and leaf.dtype.kind not in "OSUmM"
    return jax.numpy.array(leaf) if plain else leaf


def _to_host(results: list[jax.Array], operands: list[list[jax.Array]]) -> None:
    """Starts all transfers from an accelerator before the first one is waited for."""
    if len(results) + len(operands) > 1:
        for arrays in (results, *operands):
            for array in arrays:
                array.copy_to_host_async()


def _frozen(array: Any) -> np.ndarray:
    """A copy that nobody writes to: an eager step may keep what it returned."""
    copied = np.array(array, order="C")
    if not copied.dtype.isnative:  # results travel as the bytes that they are
        copied = copied.astype(copied.dtype.newbyteorder("="))
    copied.flags.writeable = False
    return copied
