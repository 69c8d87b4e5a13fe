"""Runs step functions, on workers (`prepare`) and in this process (`run_here`).

On a worker, `prepare` draws elements and finds the program; then the worker requests
the values that the step reads, and `Prepared.run` computes. An eager step has no plan,
and runs through `run_eager`.

Law of the file: a result is complete when it is returned, and its arrays are never
written to again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import jax
import numpy as np

from zstrat.variables import (
    LOCAL,
    Binds,
    CreatedInStep,
    apply_now,
    read_all,
    read_parts,
    require_divisors,
    require_unmasked,
    update_all,
)
from zstrat.wire import UpdateOp, parts_of

from ._compile import CompiledProgram, Computed, StepResult, StepUpdate, outgoing
from ._device_state import Outdated
from ._programs import HereProgram
from .lookup._lookups import Wanted
from .lookup._rows_program import Lookups, RowsProgram
from .trace import joined
from .trace._captured import watch_keras_models
from .trace._eager import Immediate
from .trace._int32_checks import require_fitting, warn_of_arguments
from .trace._iterator import StepIterator
from .trace._refusals import not_shared, translated_variable_errors
from .trace._signature import cut
from .trace._structure import ResultLayout, is_described, split
from .windows._fragments import OverlappedProgram

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from zstrat.variables import Storage, VariableHandle

    from ._programs import CompiledPrograms
    from .trace._iterator import Draws
    from .trace._plan import Plan, PlannedUpdate, UpdateSet
    from .trace._structure import Structure


class ExecutedFunction(Protocol):
    """The attributes of a `Function` that this file uses."""

    name: str
    eager: bool
    body: Callable[..., Any]
    programs: CompiledPrograms


def prepare(
    function: ExecutedFunction, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Prepared:
    """Draws the elements of one step and finds its program; traces the step if no
    program fits.

    The arguments must not be written to before the step has run.

    Raises:
        OutOfRangeError: A dataset has no more elements; nothing was drawn.
        TypeError, RuntimeError: The body cannot be captured; nothing was drawn.
        ValueError: The function is eager (see `run_eager`).
        IndexError: The step looks up an id outside of the table. Drawn elements are
            used up, as in every step that fails.
        ValueError: Ids or indices of rows are computed from integers that do not fit 32
            bits.
        Exception: Whatever the body raises while it is traced.
    """
    if function.eager:
        raise ValueError(f"{function.name!r} is an eager step function: run_eager it")
    call = cut(args, kwargs)
    program, draws = function.programs.find(call, args, kwargs)
    # A worker does not have the devices that hold these variables.
    if isinstance(program, HereProgram):
        draws.unread()
        program.plan.require_shared()
        here = [spec for spec in program.plan.specs if spec.ps == LOCAL]
        raise not_shared(f"the step function {function.name!r} uses", *here)
    return Prepared(program, call.inputs, draws)


class Prepared:
    """One step that is ready to run when the answers to its requests have arrived.

    A step without draws and lookups may run again, with newer values.
    """

    __slots__ = (
        "_begun", "_draws", "_given", "_lookups", "_program", "plan", "wanted"
    )  # fmt: skip

    def __init__(
        self, program: CompiledProgram | RowsProgram, inputs: list[Any], draws: Draws
    ) -> None:
        self.plan: Plan = program.plan
        self._program = program
        self._draws = draws
        self._given = inputs
        self._begun: list[jax.Array] | None = None
        self.wanted = Wanted(self.plan.reads)
        """The next request for values and rows. The first request needs no earlier
        answer."""
        self._lookups: Lookups | None = None
        # Before ids are computed from them.
        if self.plan.downcast_leaves:
            given = [*inputs, *_leaves(draws)]
            require_fitting(self.plan.function, given, self.plan.downcast_leaves)
        if self.plan.watch is not None:
            self.plan.watch([*inputs, *_leaves(draws)])
        if isinstance(program, RowsProgram):
            self._lookups = Lookups(program, [*inputs, *_leaves(draws)])
            self.wanted = self._lookups.first()

    @property
    def examples(self) -> int:
        """Number of examples that the step has drawn: rows of each element's first
        array."""
        return sum([_examples(element.leaves) for element in self._draws.elements])

    @property
    def may_begin(self) -> bool:
        """Whether a part of the step can be computed before the values that it pulls
        arrive."""
        return isinstance(self._program, OverlappedProgram)

    def begin(self, values: Sequence[Any]) -> None:
        """Starts to compute the part that needs no pulled values; `run` computes the
        rest.

        ``values`` are those of ``plan.reads``, with anything in place of values to be
        pulled.
        """
        assert isinstance(self._program, OverlappedProgram)
        elements = _leaves(self._draws)
        self._begun = self._program.begin(self._given, elements, values)

    def forget_begun(self) -> None:
        """Drops what `begin` has computed, because the values that it used have
        changed."""
        self._begun = None

    def unread(self) -> None:
        """Gives the drawn elements back, because the step will not run.

        Of several prepared steps, call this for the last one first.
        """
        self._draws.unread()

    def advance(self, values: Sequence[np.ndarray]) -> Wanted | None:
        """Takes the answer to the request `wanted`, and returns the next request.

        Returns None if that was the last answer, which `run` takes: a plan with
        ``levels`` requests advances one time less. The step may use the arrays of the
        answer until it has run.

        Raises:
            IndexError: The step looks up an id outside of the table.
        """
        wanted = None if self._lookups is None else self._lookups.advance(values)
        if wanted is not None:
            self.wanted = wanted
        return wanted

    def compute(self, values: Sequence[np.ndarray]) -> Computed:
        """Starts to compute the step; the returned arrays may not be ready."""
        if self._lookups is not None:
            return self._lookups.compute(values)
        assert isinstance(self._program, CompiledProgram)
        elements, given = _leaves(self._draws), list(values)
        if self._begun is not None:
            assert isinstance(self._program, OverlappedProgram)
            program, begun = self._program, self._begun
            results, operands = program.finish(begun, self._given, elements, given)
        else:
            results, operands = self._program(self._given, elements, given)
        sent = [update for update, _ in self.plan.sent]
        return Computed(results, operands, lambda: _outgoing(sent, operands))

    def run(self, values: Sequence[np.ndarray]) -> StepResult:
        """Computes the step.

        ``values`` are the answer to the last `wanted`. They may be used without a copy,
        so they must not be written to meanwhile; the result shares no memory with them.

        Raises:
            TypeError, RuntimeError: The body cannot be captured, which its second trace
                shows when the program first runs.
            IndexError: The step updates a row outside of the table.
        """
        program = self._program
        # Nothing is drawn and nothing is read, so the first result is that of all runs.
        if program.constant is not None:
            return program.constant
        computed = self.compute(values)
        # All transfers at once; the reads below then only wait.
        computed.to_host()
        leaves = [np.asarray(array) for array in computed.results]
        result = StepResult(leaves, self.plan.layout, computed.updates())
        if self.plan.is_constant:
            program.constant = result
        return result


def run_eager(
    function: ExecutedFunction,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    storage: Storage | None = None,
    draw: Callable[[StepIterator], Any] = StepIterator.draw,
) -> StepResult:
    """Runs the Python body at once: reads and updates are sent to ``storage`` as they
    occur.

    For debugging with print and pdb. An eager step has no plan, and its result has no
    ``updates``.

    Args:
        storage: Storage of all variables; None: each variable's own.
        draw: Returns the next element of an iterator.

    Raises:
        TypeError: The result is not a pytree that can be rebuilt without a trace.
        Exception: Whatever the body raises.
    """
    structure, arrays = _called(function, args, kwargs, Immediate(storage, draw))
    plain = structure.plain
    if not is_described(plain):
        raise TypeError(
            f"the eager step function {function.name!r} returns {structure.treedef}, "
            "with a node whose other fields are not numbers, text and tuples of these. "
            "The program cannot rebuild it, because it has not traced the step: return "
            "the arrays in dicts, tuples or classes without such fields, or leave out "
            "eager=True"
        )
    leaves = [_frozen(array) for array in arrays]
    layout = ResultLayout(
        tuple(leaf.dtype.name for leaf in leaves),
        tuple(leaf.shape for leaf in leaves),
        plain,
    )
    return StepResult(leaves, layout, [])


def examples_in(element: Any) -> int:
    """Returns the number of examples of an element: rows of its first array."""
    return _examples(joined.leaves(element))


def _examples(leaves: Sequence[Any]) -> int:
    return 0 if not leaves else np.shape(leaves[0])[0] if np.ndim(leaves[0]) else 1


def run_here(
    function: ExecutedFunction, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """Runs a step in this process: reads and updates use the storage of each variable.

    Returns the body's result, its arrays as ``jax.Array``. The first call of a step
    that creates its variables runs eagerly.
    """
    if function.eager:
        return _run_body(function, args, kwargs)
    call = cut(args, kwargs)
    try:
        program, draws = function.programs.find(call, args, kwargs)
    except CreatedInStep:
        if not function.programs.may_create():
            raise
        return _run_body(function, args, kwargs)
    draws.require_real()
    while isinstance(program, HereProgram):
        try:
            return _run_stages(program, call.inputs, draws)
        except Outdated:  # since it was found; the drawn elements were given back
            program, draws = function.programs.find(call, args, kwargs)
    prepared = Prepared(program, call.inputs, draws)
    plan = prepared.plan
    try:
        for _, rule in plan.targets:
            if rule is not None and rule.rounds is not None:
                raise ValueError(
                    f"the step function {plan.function!r} is called here, but "
                    f"optimizer {rule.name!r} has rounds, which collect the gradients "
                    "of steps on workers: schedule it, coordinator.schedule(step, "
                    "args=...)"
                )
        values = _answered(plan, prepared)
    except BaseException:  # to the caller: the step may be run again
        prepared.unread()
        raise
    # From here on the elements are used up, as in each step that runs.
    computed = prepared.compute(values)
    _apply(plan, computed.updates())
    return plan.out_structure.unflatten(computed.results)


def _run_body(
    function: ExecutedFunction, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """Runs the Python body with real values, without tracing; the body may create
    variables."""
    structure, arrays = _called(function, args, kwargs, Immediate())
    return structure.unflatten([jax.numpy.asarray(array) for array in arrays])


def _run_stages(program: HereProgram, inputs: list[Any], draws: Draws) -> Any:
    elements, plan = _leaves(draws), program.plan
    if plan.downcast_leaves:
        require_fitting(plan.function, [*inputs, *elements], plan.downcast_leaves)
    if plan.watch is not None:
        plan.watch([*inputs, *elements])
    try:
        results, operands = program.run(inputs, elements, draws)
    except BaseException:  # to the caller, which may run it again
        draws.unread()
        raise
    # Variables of this process are updated: the drawn elements are used up.
    if operands:
        _apply(plan, _outgoing(plan.updates, operands))
    return plan.out_structure.unflatten(results)


def _answered(plan: Plan, prepared: Prepared) -> list[np.ndarray]:
    """Reads what the requests of a step ask for, request by request; returns the last
    answer."""
    handles = {v.spec.key: v for v in plan.variables}
    for lookup in plan.lookups:
        handles.update((v.spec.key, v) for v in lookup.table.components)
    wanted: Wanted | None = prepared.wanted
    while wanted is not None:
        values = read_all([handles[spec.key] for spec in wanted.reads])
        values += read_parts([(handles[spec.key], at) for spec, at in wanted.rows])
        wanted = prepared.advance(values)
    return values


def _outgoing(
    sent: Sequence[PlannedUpdate | UpdateSet], operands: Sequence[Sequence[jax.Array]]
) -> list[StepUpdate]:
    """Makes the updates of a step for variables that are not on devices of this
    process."""
    updates: list[StepUpdate] = []
    for update, arrays in zip(sent, operands, strict=True):
        updates += outgoing(update, arrays)
    return updates


def _apply(plan: Plan, updates: Sequence[StepUpdate]) -> None:
    if not updates:
        return  # as in steps whose variables are all on devices of this process
    # First: a server needs the tree before its gradients.
    for call in plan.calls:
        for storage in {id(v.storage): v.storage for v in call.variables}.values():
            assert isinstance(storage, Binds), storage
            storage.bind(call)
    handles = {v.spec.key: v for variables, _ in plan.targets for v in variables}
    rules = {rule.id: rule for _, rule in plan.targets if rule is not None}
    waiting: dict[int, Any] = {}
    updates = [each for update in updates for each in _apart(update, handles)]
    for update in updates:  # before any of them is made
        if update.op is UpdateOp.SCATTER_DIV:
            require_divisors(update.spec, update.op, update.arrays[-1])
    for update in updates:
        key = update.spec.key
        # What was made before these gradients is made first, so the order of the body
        # stays. And `update_all` takes updates of different variables.
        if update.call is not None or key in waiting:
            update_all(list(waiting.values()))
            waiting.clear()
        if update.call is not None:
            apply_now(update.call.with_arrays(update.arrays))
        else:
            rule = rules.get(update.optimizer)
            waiting[key] = (handles[key], update.op, update.arrays, rule)
    update_all(list(waiting.values()))


def _apart(
    update: StepUpdate, handles: Mapping[int, VariableHandle]
) -> Iterable[StepUpdate]:
    """Splits an update of a set into updates of its variables; returns any other update
    as it is."""
    if update.op is not UpdateOp.OPTIMIZE_SET:
        return [update]
    keys, array = update.arrays
    specs = [handles[key].spec for key in keys.tolist()]
    parts = parts_of([spec.shape for spec in specs])
    return [
        StepUpdate(spec, UpdateOp.OPTIMIZE, update.optimizer, (part.of(array),))
        for spec, part in zip(specs, parts, strict=True)
    ]


def _leaves(draws: Draws) -> list[Any]:
    return [leaf for element in draws.elements for leaf in element.leaves]


def _called(
    function: ExecutedFunction,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    eager: Immediate,
) -> tuple[Structure, list[Any]]:
    """Calls the body with jax arrays, as a captured step gets them; returns structure
    and arrays of its result. The containers of the arguments are copied, because other
    calls share them."""
    with translated_variable_errors(function.name), eager.recording():
        watch_keras_models()
        # Before the arguments become arrays of jax, which have lost the bits.
        eager.note_downcasts(joined.leaves((args, dict(kwargs))))
        warn_of_arguments(function.name, args, kwargs, function.programs.warned)
        args, kwargs = joined.mapped(_as_jax, (args, dict(kwargs)))
        return split(function.body(*args, **kwargs), eager.read)


def _as_jax(leaf: Any) -> Any:
    require_unmasked(leaf, "an argument")
    plain = isinstance(leaf, np.ndarray | np.generic) and leaf.dtype.kind not in "OSUmM"
    return jax.numpy.array(leaf) if plain else leaf


def _frozen(array: Any) -> np.ndarray:
    """Makes a read-only copy of a result, because an eager step may write to the
    original."""
    copied = np.array(array, order="C")
    if not copied.dtype.isnative:  # results are sent as raw bytes
        copied = copied.astype(copied.dtype.newbyteorder("="))
    copied.flags.writeable = False
    return copied
