"""Steps that workers run in a simulation: each leaves one mark on each server.

Step ``i`` reads the marks of all servers, and pushes to each a one at place ``i``: of a
dense variable as a one-hot vector, of a table as one row. A step that is told to fails,
and leaves none. Its result is its number, now and then so often that it stays on the
worker until it is fetched.

Where optimizers have rounds, each step reads their variables, and contributes a
gradient of each.

Steps may draw from the iterator of their worker. There each element goes to one step at
most, and none is lost: who has drawn one runs, or gives it back, before the next one
runs.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, final

import numpy as np

from zstrat.program import (
    ResultLayout,
    StepResult,
    StepUpdate,
    Wanted,
    WantedRows,
    load,
    worker_context,
)
from zstrat.wire import UpdateOp

from ._rounds_model import DrawnRounds, gradient_of, update_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from zstrat.variables import VariableSpec

LARGE: Final = 64
"""Numbers of a large result."""
DENSE: Final = b"a step that pushes a vector to each server"
ANSWER: Final = b"a step that reads nothing, and has a result"
ROWS: Final = b"a step that looks rows up and pushes one to each server"


class FailedStepError(Exception):
    """A step of the simulation was to fail."""


@dataclass(frozen=True)
class PlannedMark:
    """An update of a plan, as far as a pipeline asks."""

    op: UpdateOp
    specs: tuple[VariableSpec, ...]


@dataclass(eq=False)
class ScriptedPlan:
    """What of a `zstrat.program.Plan` a worker asks."""

    reads: tuple[VariableSpec, ...]
    updates: tuple[PlannedMark, ...]
    has_lookups: bool
    levels: int = 1
    sent: tuple[object, ...] = ()
    lookups: tuple[object, ...] = ()
    calls: tuple[object, ...] = ()
    targets: tuple[object, ...] = ()
    draws: tuple[object, ...] = ()
    """Not empty: each step draws an element."""
    out_structure: object = field(
        default_factory=lambda: SimpleNamespace(unflatten=lambda leaves: leaves[0])
    )


@dataclass(eq=False)
class ScriptedFunction:
    """What of a `zstrat.program.Function` a worker asks, and what its step does.

    Args:
        training: Which session of the run it belongs to.
        marks, tables: One on each server.
        reads_ahead: Its updates are said to be an optimizer's, so that a pipeline reads
            ahead of them.
        resource: The number of the iterators that steps draw from; 0: they draw from
            none.
        broken: Called with what must not be.
        rounds: Of the optimizers to which each step contributes.
    """

    training: int

    marks: tuple[VariableSpec, ...]
    tables: tuple[VariableSpec, ...]
    by_rows: bool
    fails: frozenset[int]
    ran: Callable[[int, Sequence[np.ndarray]], None]
    reads_ahead: bool = False
    resource: int = 0
    broken: Callable[[str], None] | None = None
    eager: bool = False
    rounds: tuple[DrawnRounds, ...] = ()
    leases: int = 0
    """The number of the leased dataset of which each step reads a batch; 0: none."""
    counted: tuple[VariableSpec, ...] = ()
    """One on each server, with a counter for each example."""
    read: dict[int, list[int]] = field(default_factory=dict)
    """The examples that a step has read, for all copies of the function."""
    plan: ScriptedPlan = field(init=False)
    layouts: tuple[ResultLayout, ResultLayout] = field(init=False)
    """Of a small result, and of a large one."""
    iterator: Any = field(init=False, default=None)
    """Of the worker that has loaded it."""
    leased: Any = field(init=False, default=None)
    drawn: dict[ScriptedStep, None] = field(init=False, default_factory=dict)
    """Steps that have drawn, and neither run nor given back."""
    returned: set[int] = field(init=False, default_factory=set)
    """Elements that were given back, and come next."""
    elements: int = field(init=False, default=0)
    """Elements that were drawn: the numbers from 0 on."""
    used: set[int] = field(init=False, default_factory=set)
    """Elements of the steps that ran."""

    def __post_init__(self) -> None:
        op = UpdateOp.SCATTER_ADD if self.by_rows else UpdateOp.ADD
        said = UpdateOp.OPERANDS if self.reads_ahead else op
        updates = tuple([PlannedMark(said, (spec,)) for spec in self.marks])
        draws = tuple([number for number in (self.resource, self.leases) if number])
        reads = self.marks + tuple([spec for specs in self.moved for spec in specs])
        self.plan = ScriptedPlan(reads, updates, self.by_rows, draws=draws)
        self.plan.targets = tuple([((), _handle_of(each)) for each in self.rounds])
        small = ResultLayout(("int64",), ((),), 0)
        self.layouts = small, replace(small, shapes=((LARGE,),))

    @property
    def moved(self) -> list[tuple[VariableSpec, ...]]:
        """The variables of each optimizer that has rounds."""
        return [each.specs(len(self.marks)) for each in self.rounds]


def _handle_of(drawn: DrawnRounds) -> object:
    """Stands for `zstrat.variables.OptimizerHandle`."""
    return SimpleNamespace(
        id=drawn.number, name="rounds", rounds=drawn.policy, wire=None
    )


@final
class ScriptedStep:
    """Stands for `zstrat.program.Prepared`."""

    def __init__(self, function: ScriptedFunction, number: int) -> None:
        self._function, self._number = function, number
        self.plan = function.plan
        self.wanted = Wanted(function.plan.reads)
        if function.by_rows:
            at = np.array([number], np.int64)
            rows = tuple([WantedRows(table, at) for table in function.tables])
            self.wanted = Wanted(function.plan.reads, rows)

        self.examples = 0
        if function.iterator is not None:
            self._element = self._draw()
            self.examples = 1
            function.drawn[self] = None
        if function.leased is not None:
            self._leased = function.leased.draw()

    def unread(self) -> None:
        """Gives back what it has drawn."""
        function = self._function
        if function.iterator is not None:
            del function.drawn[self]
            function.returned.add(self._element)
            function.iterator.unread(np.int64(self._element))
        if function.leased is not None:
            function.leased.unread(self._leased)

    def run(self, values: Sequence[np.ndarray]) -> StepResult:
        """Computes the step."""
        function, number = self._function, self._number
        if function.iterator is not None:
            self._use()
        function.ran(number, values)
        counts = [] if function.leased is None else self._counts()
        if number in function.fails:
            raise FailedStepError(f"step {number} was to fail")
        updates = [
            StepUpdate(spec, op, 0, arrays)
            for spec, op, arrays in _marks(function, number)
        ]
        updates += counts + self._contributions(values)
        is_large = number % 4 == 1
        layout = function.layouts[is_large]
        result = np.full(layout.shapes[0], number, np.int64)
        return StepResult([result], layout, updates)

    def _counts(self) -> list[StepUpdate]:
        """Counts the examples, which are the same in each run of the step."""
        function, found = self._function, self._leased.tolist()
        before = function.read.setdefault(self._number, found)
        if before != found and function.broken is not None:
            function.broken(f"step {self._number} read {found}, and before {before}")
        updates = []
        for spec in function.counted:
            counts = np.zeros(spec.shape, spec.numpy_dtype)
            counts[found] = 1
            updates.append(StepUpdate(spec, UpdateOp.ADD, 0, (counts,)))
        return updates

    def _contributions(self, values: Sequence[np.ndarray]) -> list[StepUpdate]:
        """A gradient of each variable that moves by rounds, which was read behind the
        marks."""
        function, found = self._function, list[StepUpdate]()
        context = worker_context.get()
        attempt = 1 if context is None else context.attempt
        read = iter(values[len(function.marks) :])
        for drawn, specs in zip(function.rounds, function.moved, strict=True):
            optimizer = drawn.number
            if drawn.is_coupled:
                own = (np.zeros((), np.float32),)  # which counts for nothing in a round
                found.append(StepUpdate(specs[0], UpdateOp.OPERANDS, optimizer, own))
            for spec in specs:
                number = self._number
                gradient = gradient_of(drawn, number, attempt, spec.ps, next(read))
                op, arrays = update_of(drawn, number, gradient)
                found.append(StepUpdate(spec, op, optimizer, arrays))
        return found

    def _draw(self) -> int:
        """The next element: one that was given back, if there is one."""
        function = self._function
        element = int(function.iterator.draw())
        wanted = function.returned or {function.elements}
        if element not in wanted and function.broken is not None:
            function.broken(f"a step has drawn {element}, and not one of {wanted}")
        if element in function.returned:
            function.returned.discard(element)
        else:
            function.elements += 1
        return element

    def _use(self) -> None:
        """Uses the element, which is the next one."""
        function, element = self._function, self._element
        assert function.broken is not None, "a copy on a worker"
        if element in function.used:
            function.broken(f"two steps of one worker have drawn {element}")
        if next(iter(function.drawn), None) is not self:
            lost = [step._element for step in function.drawn]
            function.broken(f"step {self._number} runs before steps with {lost} end")
        function.used.add(element)
        function.drawn.pop(self, None)


def _marks(function: ScriptedFunction, number: int) -> list[Any]:
    marks: list[Any] = [
        (mark, UpdateOp.ADD, (one_hot(mark, number),)) for mark in function.marks
    ]
    if function.by_rows:
        at, row = np.array([number], np.int64), np.ones((1, 2), np.float32)
        marks += [(table, UpdateOp.SCATTER_ADD, (at, row)) for table in function.tables]
    return marks


def one_hot(spec: VariableSpec, place: int) -> np.ndarray:
    """A vector of the variable's shape with a one at that place."""
    vector = np.zeros(spec.shape, spec.numpy_dtype)
    vector[place] = 1
    return vector


def prepare(
    function: ScriptedFunction, args: tuple[Any, ...], kwargs: object
) -> ScriptedStep:
    """Stands for `zstrat.program.prepare`."""
    del kwargs
    return ScriptedStep(function, int(args[0]))


@final
class Scripts:
    """The functions of a run, by what stands for their code.

    Args:
        ran: Told of each run: the worker, the function as that worker has loaded it,
            the number of the step, and the values that it has read.
    """

    prepare = staticmethod(prepare)

    def __init__(
        self,
        ran: Callable[[str, ScriptedFunction, int, Sequence[np.ndarray]], None],
        broken: Callable[[str], None],
    ) -> None:
        self._ran, self._broken = ran, broken
        self._made: dict[bytes, ScriptedFunction] = {}

    def add(self, code: bytes, function: ScriptedFunction) -> None:
        """From now on the code stands for a copy of this function."""
        self._made[code] = function

    def load(
        self,
        worker: str,
        code: bytes,
        arrays: Sequence[np.ndarray],
        resolve: Callable[[int], object],
    ) -> Any:
        """Stands for `zstrat.program.load` on a worker."""
        made = self._made.get(code)
        if made is None:
            return load(code, arrays, resolve)
        loaded = replace(made, ran=_untold)
        loaded.ran = partial(self._ran, worker, loaded)
        loaded.broken = self._broken
        if made.resource:
            loaded.iterator = resolve(made.resource)
        if made.leases:
            loaded.leased = resolve(made.leases)
        return loaded


def _untold(number: int, values: Sequence[np.ndarray]) -> None:
    raise AssertionError(f"step {number} is nobody's, with {len(values)} values")
