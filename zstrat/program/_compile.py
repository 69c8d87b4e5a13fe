"""Compiles a plan to one program, and converts the program's outputs to updates.

Law: the outputs of a program never share memory with its inputs.

Programs over several parts of one CPU run one at a time (`settled`). XLA gives each
device of a CPU program a thread of one pool, and a device that waits for others in a
collective keeps its thread. If two programs run at once, each may hold threads that the
other needs, and neither ends: XLA then aborts the process. Waiting costs nothing: both
would compute on the same cores.

Small variables of a plan are sent in *sets* (`zstrat.wire`). The gradients of a set
leave the program of a step as one array, which is also pushed as one array; the values
of a set arrive as one array, of which the program gets views. (If the program divided
the array, each variable would cost a kernel, which XLA compiles for 20 ms.)

The results of a step are arrays for the caller, and updates of variables. Updates of
rows are split over the components of a table (`outgoing`). Gradients and sums of equal
indices are added up here: each row is sent once, and the optimizer takes one step per
row. Other updates keep their duplicates, in order; of rows that replace others only the
last one is sent.

A step of an optimizer counts for all components, also for those without a row in it:
their count of steps grows, so that training does not depend on the partitioning.
"""

from __future__ import annotations

import copy
from itertools import accumulate, groupby
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from zstrat.rows import sums
from zstrat.variables import RESIDENT, present
from zstrat.wire import UpdateOp, in_sets

from .trace import _refusals
from .trace._plan import Sent, UpdateSet
from .trace._signature import worker_context

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable, Sequence

    from jax.sharding import Sharding

    from zstrat.variables import GradientCall, VariableSpec

    from .lookup._lookups import Part
    from .trace._plan import Plan, PlannedUpdate, TracedBody
    from .trace._signature import WorkerContext
    from .trace._structure import ResultLayout


FEWEST: Final = 16
"""Fewest variables for which a set is worth while."""


def sent_by(plan: Plan) -> list[Sent]:
    """Returns what a step of this plan sends, in the order of its updates: single
    updates, and sets of gradients that are sent as one array (`UpdateSet`). A set has
    the position of its first update."""
    sets = {each.numbers[0]: each for each in _update_sets(plan)}
    taken = {number for each in sets.values() for number in each.numbers}
    return [
        sets.get(number) or Sent(update, (number,))
        for number, update in enumerate(plan.updates)
        if number in sets or number not in taken
    ]


def _update_sets(plan: Plan) -> list[Sent]:
    """Groups gradients for one optimizer into sets; a server applies a set in the form
    in which it arrives."""
    changes = [
        spec.key
        for update in plan.updates
        if update.op is not UpdateOp.OPERANDS
        for spec in update.specs
    ]
    if len(changes) < FEWEST or len({*changes}) < len(changes):
        return []  # several updates of a variable keep their order
    if any(spec.ps == RESIDENT for spec in plan.reads):
        return []  # a window is compiled in two parts
    found: list[Sent] = []
    numbers = range(len(plan.updates))
    # A step may train several trees with one optimizer: each has its own operands.
    trees = list(accumulate([x.op is UpdateOp.OPERANDS for x in plan.updates]))
    runs = groupby(numbers, lambda n: (plan.updates[n].optimizer, trees[n]))
    for (optimizer, _), run in runs:
        if not optimizer:
            continue
        kinds: dict[Hashable, list[int]] = {}
        for number in run:
            update, rule = plan.updates[number], plan.targets[number][1]
            spec = update.spec
            if (
                update.op is UpdateOp.OPTIMIZE
                and update.table is None
                and update.call is None
                and spec.ps >= 0
                and rule is not None
                # Rounds and formats take gradients one by one.
                and rule.rounds is None
                and rule.wire is None
            ):
                gradient = update.operands[0]
                kind = spec.ps, spec.dtype, gradient.dtype.name
                kinds.setdefault(kind, []).append(number)
        for alike in kinds.values():
            sizes = [plan.updates[number].spec.nbytes for number in alike]
            for places in in_sets(sizes, FEWEST):
                some = tuple([alike[place] for place in places])
                specs = [plan.updates[number].spec for number in some]
                keys = np.array([spec.key for spec in specs], np.int64)
                found.append(Sent(UpdateSet(specs[0], optimizer, keys), some))
    return found


def read_sets(plan: Plan) -> list[list[int]]:
    """Returns the sets that a step of this plan reads, as indices in ``plan.reads``:
    sets that the step updates, whose values a server stores as one array, and others.
    """
    # A request names the variables of a set by their places in it.
    at = {spec.key: place for place, spec in enumerate(plan.reads)}
    # First the sets of gradients, as the server has their values side by side after the
    # update.
    sets = [
        [at.get(key, -1) for key in update.keys.tolist()]
        for update, _ in plan.sent
        if isinstance(update, UpdateSet)
    ]
    found = [places for places in sets if -1 not in places]
    taken = {place for places in found for place in places}
    kinds: dict[Hashable, list[int]] = {}
    for place, spec in enumerate(plan.reads):
        if place not in taken and spec.ps >= 0 and spec.buckets is None:
            kinds.setdefault((spec.ps, spec.dtype), []).append(place)
    for alike in kinds.values():
        sizes = [plan.reads[place].nbytes for place in alike]
        found += [[alike[at] for at in some] for some in in_sets(sizes, FEWEST)]
    return found


def side_by_side(arrays: Sequence[jax.Array]) -> jax.Array:
    """Joins arrays to one array ``[elements]`` of all their elements, inside of a
    program."""
    return jnp.concatenate([array.reshape(-1) for array in arrays])


class StepUpdate(NamedTuple):
    """One update that a step makes. ``optimizer`` is the optimizer's id, 0 for none;
    ``arrays`` are the operands of the `UpdateOp`, in the dtype and shapes of the plan.
    """

    spec: VariableSpec
    op: UpdateOp
    optimizer: int
    arrays: tuple[np.ndarray, ...]
    call: GradientCall | None = None
    """The call of ``apply_gradients``, if the update is for variables of this process
    that are trained as one tree."""


class StepResult(NamedTuple):
    """The result of a step; ``leaves`` are its arrays, ready and read-only."""

    leaves: list[np.ndarray]
    layout: ResultLayout
    updates: list[StepUpdate]


class Computed(NamedTuple):
    """A step whose program was started: results and operands, which may not be ready.
    Calling ``updates`` waits for the operands and makes the updates."""

    results: list[jax.Array]
    operands: Sequence[Sequence[jax.Array]]
    updates: Callable[[], list[StepUpdate]]

    def to_host(self) -> None:
        """Starts to copy all arrays from an accelerator to the host."""
        if len(self.results) < 2 and not self.operands:
            return
        all_arrays = [
            array for arrays in (self.results, *self.operands) for array in arrays
        ]
        # Not on a CPU, where a read is faster than the call. All outputs of one program
        # are on devices of one kind.
        if len(all_arrays) < 2 or next(iter(all_arrays[0].devices())).platform == "cpu":
            return
        for array in all_arrays:
            array.copy_to_host_async()


SUMMED: Final = frozenset(
    {UpdateOp.OPTIMIZE_ROWS, UpdateOp.SCATTER_ADD, UpdateOp.SCATTER_SUB}
)
"""Kinds of updates that add up the rows of equal indices."""


def outgoing(
    update: PlannedUpdate | UpdateSet, operands: Iterable[jax.Array]
) -> list[StepUpdate]:
    """Converts the operands of one planned update to updates of components, after
    waiting for the operands.

    Raises:
        IndexError: An index is outside of the table; names the index and the user's
            line.
    """
    arrays = tuple([np.asarray(array) for array in operands])
    if isinstance(update, UpdateSet):
        op, pair = UpdateOp.OPTIMIZE_SET, (update.keys, *arrays)
        return [StepUpdate(update.spec, op, update.optimizer, pair)]
    if update.op is UpdateOp.OPERANDS:
        return shared(update, arrays)
    if update.call is not None:
        fields = update.spec, update.op, update.optimizer, arrays, update.call
        return [StepUpdate(*fields)]
    if update.table is None:
        return [StepUpdate(update.spec, update.op, update.optimizer, arrays)]
    indices, rows = arrays
    return split(update, indices, rows)


def shared(update: PlannedUpdate, arrays: tuple[np.ndarray, ...]) -> list[StepUpdate]:
    """Makes an update with operands that an optimizer uses for all its updates, one for
    each parameter server."""
    # Reversed, so the first variable on each server stands for it.
    firsts = {spec.ps: spec for spec in reversed(update.specs)}
    return [
        StepUpdate(spec, update.op, update.optimizer, arrays)
        for spec in firsts.values()
    ]


def parted(
    update: PlannedUpdate, rows: np.ndarray, parts: Iterable[Part]
) -> list[StepUpdate]:
    """Makes the updates of a table's components from rows that were summed and split
    already."""
    updates = [
        StepUpdate(spec, update.op, update.optimizer, (indices, rows[where]))
        for spec, where, indices in parts
    ]
    return _counted(update, updates, rows)


def split(
    update: PlannedUpdate, indices: np.ndarray, rows: np.ndarray
) -> list[StepUpdate]:
    """Splits an update of the rows at ``indices`` ``[n]`` of a table over the table's
    components.

    Raises:
        IndexError: An index is outside of the table; names the index and the user's
            line.
    """
    table = update.table
    assert table is not None
    try:
        table.require_inside(indices)
    except IndexError as error:
        raise IndexError(f"{update.where}: {error}") from None
    # Padding is neither summed nor sent.
    indices, rows = present(indices, rows)
    index_runs = table.runs(indices)
    if update.op in SUMMED:
        ordered, rows = index_runs.unique, sums(index_runs, rows)
    elif update.op is UpdateOp.SCATTER_UPDATE:
        # The last of equal indices, in the order of the body.
        last = index_runs.order[index_runs.starts + index_runs.counts - 1]
        ordered, rows = index_runs.unique, rows[last]
    else:
        ordered, rows = (
            indices[index_runs.order].astype(np.int64),
            rows[index_runs.order],
        )
    parts = [
        StepUpdate(
            update.specs[piece.component],
            update.op,
            update.optimizer,
            (piece.local, rows[piece.positions]),
        )
        for piece in table.pieces(ordered)
    ]
    return _counted(update, parts, rows)


def _counted(
    update: PlannedUpdate, updates: list[StepUpdate], rows: np.ndarray
) -> list[StepUpdate]:
    """Adds updates without rows for those components of a table that an optimizer's
    step does not touch, so that their count of steps grows, too."""
    specs = update.specs
    if update.op is not UpdateOp.OPTIMIZE_ROWS or len(updates) == len(specs):
        return updates
    there = {each.spec.key: each for each in updates}
    nothing = np.empty(0, np.int64), rows[:0]
    return [
        there.get(spec.key) or StepUpdate(spec, update.op, update.optimizer, nothing)
        for spec in specs
    ]


class CompiledProgram:
    """The program of one signature (types of arguments and elements), compiled when it
    first runs.

    A call takes the array leaves of the arguments, those of the drawn elements, and the
    values of ``plan.reads``; it returns the arrays of the result and the operands of
    each of ``plan.sent``.
    """

    __slots__ = ("_jitted", "_traced", "constant", "plan")

    is_current: Final = True
    """Always True: values are inputs of the program, so it fits however variables are
    stored."""

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
        # The compiled function knows variables by their places alone.
        copied = copy.copy(self)
        copied.plan, copied.constant = plan, None
        assert len(plan.sent) == len(plan.updates), "no plan with sets is shared"
        return copied

    def __call__(
        self, inputs: list[Any], elements: list[Any], values: list[Any]
    ) -> tuple[list[jax.Array], list[list[jax.Array]]]:
        """Runs the program; may return before the results are ready.

        Raises:
            TypeError, RuntimeError: The body cannot be captured; raised in the first
                run only.
        """
        outputs: tuple[list[jax.Array], list[list[jax.Array]]]
        # jax compiles at the first call, and only then can the body raise errors to
        # translate.
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

    # The name in jax's profiles and logs.
    program.__name__ = program.__qualname__ = plan.function.rpartition(".")[2]
    return program


def own(array: jax.Array, given: set[int]) -> jax.Array:
    """Copies an output that is one of the inputs (``given``, by ``id``), whose memory
    may be the caller's."""
    return jnp.copy(array) if id(array) in given else array


# jax's stubs leave it untyped.
_wait: Final[Any] = jax.block_until_ready

Outputs = TypeVar("Outputs")


def settled(outputs: Outputs, arrays: Sequence[Any]) -> Outputs:
    """Waits for a program if it runs over several parts of the CPU; returns its
    outputs.

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
