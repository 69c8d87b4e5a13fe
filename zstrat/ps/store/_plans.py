"""Plans: validated changes of a store that are not made yet.

A plan owns the variables that it names from the moment it is made until it is committed
or given up: no read and no other plan may use them meanwhile. So ``compute()`` of a
plan may run on any thread; it fails as a whole or succeeds as a whole.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

import numpy as np

from zstrat.errors import InvalidArgumentError, ResourceExhaustedError
from zstrat.ps.engine._arithmetic import (
    OPTIMIZERS,
    SCATTERS,
    check,
    check_ids,
    compute,
)
from zstrat.ps.engine._engine import Checked, OptimizerEngine, Registered, fitting
from zstrat.ps.engine._slots import Ahead, Gradients, RowStep, SlotStep, lose
from zstrat.ps.tables._row_changes import Eviction, RowChanges
from zstrat.wire import EvictionRule, UpdateOp

from ._cell import Write
from ._creating import CreatePlan, InitializePlan, TablesPlan
from ._lookups import SEARCH, RowsPlan
from ._plan import ReadPlan, StorePlan

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from zstrat.ps.engine._bindings import Tree
    from zstrat.ps.engine._row_updates import RowCalls
    from zstrat.ps.engine._slots import HeldVariable
    from zstrat.ps.engine._xla import Division
    from zstrat.ps.tables._id_table import IdTable
    from zstrat.wire import Push, SetPart

    from ._cell import Cell
    from ._variables import HeldSet, HeldVariables


_OPS: Final[dict[int, UpdateOp]] = {int(op): op for op in UpdateOp}
_REMOVALS: Final = frozenset(
    {
        UpdateOp.REMOVE_ROWS,
        UpdateOp.EVICT_ROWS,
        UpdateOp.FORGET_REMOVED,
        UpdateOp.NOTE_TIME,
    }
)
_OF_ROWS: Final = SCATTERS | _REMOVALS | {UpdateOp.OPTIMIZE_ROWS}


@dataclass(frozen=True, slots=True)
class ServerUpdate:
    """A validated update of one variable."""

    held: HeldVariable
    op: UpdateOp
    operands: Sequence[np.ndarray]
    checked: Checked | None = None
    """The validated update of an optimizer, if one makes it; None for a plain
    update."""
    beside: tuple[np.ndarray, SetPart] | None = None
    """For a variable of a set: the concatenated gradients of the set, and the part of
    this variable."""

    def compute(self) -> None:
        """Makes a plain update of the value. The programs of an optimizer make its
        updates."""
        cell = self.held.cell
        if self.op in _REMOVALS:
            return  # when the push was applied (`RowChanges`)
        if self.op is UpdateOp.ASSIGN:
            source = out = cell.overwrite()
        elif self.op in SCATTERS:
            source = out = cell.begin_rows(self.operands[0])
        else:
            source, out = cell.begin()
        try:
            compute(self.op, source, self.operands, out)
        except MemoryError:
            raise ResourceExhaustedError(
                f"{cell.who}: not enough memory for {self.op.name}"
            ) from None
        cell.settle()

    @property
    def write(self) -> Write:
        """How the update writes to the memory of the value."""
        if self.op is UpdateOp.OPTIMIZE:
            return Write.GIVE
        if self.op in _OF_ROWS:
            return Write.ROWS
        return Write.REPLACE if self.op is UpdateOp.ASSIGN else Write.WHOLE


@dataclass(slots=True)
class UpdateRun:
    """Updates that may be made in any order: those of one optimizer, of whole variables
    and of rows; or plain updates, which are made in their order."""

    optimizer: Registered | None
    steps: list[SlotStep] = field(default_factory=list)
    gradients: Gradients = field(default_factory=Gradients)
    """The gradients of ``steps``."""
    rows: list[RowStep] = field(default_factory=list)
    plain: list[ServerUpdate] = field(default_factory=list)
    ready: list[RowCalls] | None = None
    """The calls that update the rows in place, if that is possible at once;
    `choose_programs` sets this, and ``division``."""
    is_late: bool = False
    """Whether slots may have to be made or converted only when this run begins, after
    earlier runs of the push."""
    division: Division | None = None
    """Which of the whole variables share programs, if their slots exist."""

    def find_rows(
        self, changes: dict[int, RowChanges], engine: OptimizerEngine
    ) -> Iterator[np.ndarray]:
        """Replaces ids of tables by rows in all updates (`RowChanges`), and yields the
        ids that are evicted. Raises as `RowChanges`."""
        for at, step in enumerate(self.rows):
            known = changes.get(id(step.cell))
            if known is not None:
                # Of ids that the table has not admitted yet, the gradient is dropped.
                rows, kept = known.trained_rows_of(step.indices, engine)
                gradient = step.gradient if kept is None else step.gradient[kept]
                self.rows[at] = step._replace(indices=rows, gradient=gradient)
                # `choose_programs` has seen ids in place of rows, and before new ones
                # were born.
                self.ready = None
        for at, update in enumerate(self.plain):
            known = changes.get(id(update.held.cell))
            if known is None:
                continue
            ids, *values = update.operands
            if update.op is UpdateOp.REMOVE_ROWS:
                known.remove(ids)
            elif update.op is UpdateOp.FORGET_REMOVED:
                known.forget_removed(int(ids[0]))
            elif update.op is UpdateOp.NOTE_TIME:
                known.note_time(*ids.tolist())
            elif update.op is UpdateOp.EVICT_ROWS:
                # `_check_removal` has refused evictions from other variables.
                table, who = update.held.table, update.held.cell.who
                assert table is not None
                yield known.evict(Eviction.of(ids, table, who))
            else:
                rows = known.rows_of(ids, engine)
                self.plain[at] = replace(update, operands=(rows, *values))

    def choose_programs(self) -> None:
        """Sets ``ready`` and ``division``, unless they are known already: whether rows
        can be updated in place, and which whole variables share programs."""
        if self.optimizer is None:
            return
        programs = self.optimizer.programs
        if self.rows and self.ready is None:
            self.ready = programs.rows.ready(self.rows)
        if self.steps and self.division is None:
            self.division = programs.division(self.steps)

    @property
    def is_prepared(self) -> bool:
        """Whether `prepare` would have almost nothing to do."""
        self.choose_programs()
        return self.optimizer is None or (
            (self.ready is not None or not self.rows)
            and not self.is_late
            and (not self.steps or self._has_programs(self.optimizer))
        )

    def _has_programs(self, optimizer: Registered) -> bool:
        division = self.division
        return division is not None and optimizer.programs.is_prepared(division)

    def prepare(self, ahead: Ahead) -> None:
        """Does all that can fail before values are written: compiling, making slots,
        reserving memory."""
        if self.optimizer is not None:
            unready = self.rows if self.ready is None else []
            # A program takes each row once, so gradients of equal rows are summed.
            unready[:] = [step.distinct() for step in unready]
            self.optimizer.programs.prepare(self.steps, unready, ahead)
            self.division = None  # slots were made, or programs

    def compute(self, ahead: Ahead) -> None:
        """Makes the updates. If that fails, the values written so far are lost."""
        if self.optimizer is not None:
            programs = self.optimizer.programs
            # Earlier runs of the push have made the slots by now, or given them other
            # dtypes.
            if self.is_late:
                programs.complete(self.steps, self.rows, ahead)
            steps, gradients, rows = self.steps, self.gradients, self.rows
            programs.apply(steps, gradients, rows, self.ready, self.division)
        for at, update in enumerate(self.plain):
            try:
                update.compute()
            except BaseException as error:  # to the pusher, and to later readers
                for before in self.plain[:at]:
                    # Earlier ones are written, and half of a push must not be seen.
                    before.held.cell.lose(str(error))
                raise

    def lose(self, error: BaseException) -> None:
        """Marks the values that the run has written as lost."""
        if self.optimizer is not None:
            lose(self.optimizer.optimizer, [*self.steps, *self.rows], error)
        for update in self.plain:
            update.held.cell.lose(str(error))


@dataclass(frozen=True, slots=True)
class PushPlan(StorePlan):
    """The plan of a validated push. ``work`` estimates the bytes that its arithmetic
    moves."""

    generation: int
    push: Push
    updates: Sequence[ServerUpdate]
    work: int
    runs: Sequence[UpdateRun]
    engine: OptimizerEngine
    tables: Sequence[HeldVariable] = ()
    """The variables of ``updates`` that are tables of any id."""
    evicted: list[np.ndarray] = field(default_factory=list)
    """For each eviction, in order, the ids that it has dropped."""

    def compute(self) -> None:
        """Applies the updates in order. All that can fail comes before the first value
        is written: values that were lost, memory for values that readers hold,
        compiling. If XLA fails nevertheless, the values that the push had changed are
        lost, because half of a push must never be seen."""
        changes = self._row_changes()
        try:
            # Ids become rows before anything is reserved: new rows change how long a
            # value is.
            if changes:
                for run in self.runs:
                    self.evicted.extend(run.find_rows(changes, self.engine))
            for run in self.runs:
                run.choose_programs()
            # All memory at once: no update may lack some after another was made.
            self._reserve()
            self._apply()
        except BaseException:  # to the caller; nothing may be left over
            for update in self.updates:
                # Several updates may be of one cell: giving up twice does no harm.
                update.held.cell.unreserve()
            for each in changes.values():
                each.undo()
            raise
        for each in changes.values():
            # Only now do the rows move to where removed ones were: all updates have
            # their numbers.
            each.finish()

    @property
    def logged(self) -> Push:
        """The push as a backup applies it: with the ids that were evicted, in place of
        the rules that chose them."""
        if not self.evicted:
            return self.push
        updates, arrays, at = [], list(self.push.arrays), 0
        evicted = iter(self.evicted)
        for update in self.push.updates:
            if update.op == UpdateOp.EVICT_ROWS:
                arrays[at] = next(evicted)
                update = update._replace(op=int(UpdateOp.REMOVE_ROWS))
            updates.append(update)
            at += update.operands
        return replace(self.push, updates=updates, arrays=tuple(arrays))

    def _row_changes(self) -> dict[int, RowChanges]:
        """Returns the changes of rows of each table, by the `id` of its cell."""
        return {
            id(held.cell): RowChanges(held, held.table)
            for held in self.tables
            if held.table is not None
        }

    def _apply(self) -> None:
        ahead = Ahead()
        optimized = [run for run in self.runs if run.optimizer is not None]
        # What is done ahead of the first is for those that come after it. One alone
        # that is prepared has nothing to compile, and no slots to make.
        if len(optimized) != 1 or not optimized[0].is_prepared:
            for run in self.runs:
                run.prepare(ahead)
        for at, run in enumerate(self.runs):
            try:
                run.compute(ahead)
            except BaseException as error:  # to the pusher, and to later readers
                for before in self.runs[:at]:
                    before.lose(error)
                raise

    def is_short(self, limit: int) -> bool:
        """Returns whether the push moves at most ``limit`` bytes in all, and has
        nothing to compile."""
        # Of small variables as one array, an eighth of what `work_of` counts for each.
        if self.work > 8 * limit or not self.is_compiled:
            return False
        runs = [run for run in self.runs if run.optimizer is not None]
        are_flat = all(
            run.division is not None and run.division.is_flat and not run.rows
            for run in runs
        )
        return self.work <= (8 * limit if runs and are_flat else limit)

    @property
    def is_compiled(self) -> bool:
        """Whether all programs that the push needs are compiled."""
        return all(run.is_prepared for run in self.runs) and all(
            map(self.engine.can_extend_slots, self.tables)
        )

    def _reserve(self) -> None:
        # The first updates of these: in place, so nothing changes for those after.
        ready = {id(step.cell) for run in self.runs if run.ready for step in run.rows}
        found: dict[int, tuple[Cell, list[Write]]] = {}
        (only, *others) = self.runs
        if not others and not only.rows and not only.plain:  # XLA has memory of its own
            # Where all values are in arrays of XLA's, none was lost.
            if only.division is None or not only.division.is_in_place:
                for step in only.steps:
                    step.cell.require()
                    step.cell.unreserve()
            return
        for update in self.updates:
            held = update.held
            if id(held.cell) in ready:
                ready.remove(id(held.cell))
                continue
            _, writes = found.setdefault(held.entry.key, (held.cell, []))
            writes.append(update.write)
        for cell, writes in found.values():
            cell.reserve(writes)


def push_plan(
    push: Push, variables: HeldVariables, engine: OptimizerEngine
) -> PushPlan:
    """Checks that a push fits the variables that it names, and returns its plan;
    changes nothing.

    Raises:
        NotFoundError: A variable or optimizer does not exist.
        InvalidArgumentError: An update does not fit its variable.
    """
    arrays, at, work, task = push.arrays, 0, 0, variables.task
    planned: list[ServerUpdate] = []
    shared: dict[int, Sequence[np.ndarray]] = {}
    for key, code, optimizer, count in push.updates:
        held = variables[key]
        op = _OPS.get(code)
        if op is None or not 0 < count <= len(arrays) - at:
            raise InvalidArgumentError(
                f"{task}: an update of variable {held.entry.name!r} has the "
                f"operation {code} with {count} of {len(arrays) - at} arrays left"
            )
        operands = arrays[at : at + count]
        at += count
        if op is UpdateOp.OPERANDS:
            # By `get`, which refuses operands of an optimizer that is not there.
            shared[engine.get(optimizer).optimizer] = operands
            continue
        if op is UpdateOp.OPTIMIZE_SET:
            one, given = variables.sets.find(operands[0], variables), operands[1:]
            planned += _of_set(one, optimizer, given, engine, shared.get(optimizer))
            # As in `work_of` for a whole update.
            work += sum([16 * cell.nbytes for cell in one.cells])
            continue
        if op in OPTIMIZERS:
            known = engine.check(optimizer, op, held, operands, shared.get(optimizer))
            planned.append(ServerUpdate(held, op, operands, known))
        else:
            _check_plain(optimizer, op, held, operands)
            planned.append(ServerUpdate(held, op, operands))
        work += work_of(op, held, operands)
    if at != len(arrays):
        raise InvalidArgumentError(
            f"{task}: a push has {len(arrays)} arrays, its updates take {at}"
        )
    tables = [update.held for update in planned if update.held.table is not None]
    generation, runs = variables.generation, runs_of(planned)
    return PushPlan(generation, push, planned, work, runs, engine, tables)


def _of_set(
    one: HeldSet,
    optimizer: int,
    gradients: Sequence[np.ndarray],
    engine: OptimizerEngine,
    operands: Sequence[np.ndarray] | None,
) -> Iterator[ServerUpdate]:
    """Yields the updates of the variables of a set, from their concatenated gradients.
    Raises as `push_plan`."""
    if len(gradients) != 1:
        raise InvalidArgumentError(
            f"{one.cells[0].who}: expected keys and gradients of its set, got "
            f"{1 + len(gradients)} arrays"
        )
    op, (array,) = UpdateOp.OPTIMIZE, gradients
    one.require_fit(array)
    for held, part in zip(one.held, one.parts, strict=True):
        gradient = (part.of(array),)
        known = engine.check(optimizer, op, held, gradient, operands)
        yield ServerUpdate(held, op, gradient, known, (array, part))


def runs_of(updates: Iterable[ServerUpdate]) -> list[UpdateRun]:
    """Groups updates into runs: consecutive updates of one optimizer on different
    variables, and the plain updates between them."""
    found = [UpdateRun(None)]
    # Keys that this run updates; a second update of one has to see the first.
    seen = set[int]()
    before = set[int]()  # keys that an earlier run, or a plain update, has changed
    for update in updates:
        held, key, run = update.held, update.held.entry.key, found[-1]
        checked = update.checked
        optimizer = None if checked is None else checked.optimizer
        operands = () if checked is None else checked.operands
        if (
            optimizer is not run.optimizer
            # A run has one set of operands, those of one tree.
            or operands is not run.gradients.operands
            or key in seen
        ):
            run = UpdateRun(optimizer, gradients=Gradients(operands))
            found.append(run)
            before |= seen
            seen.clear()
        if checked is None:
            run.plain.append(update)
            before.add(key)
            continue
        seen.add(key)
        late, rule = key in before, checked.bound.alike
        uses = checked.bound.leaf.rule.uses
        run.is_late = run.is_late or late
        gradient = fitting(given := update.operands[-1], checked.bound)
        if update.op is UpdateOp.OPTIMIZE:
            dtype = gradient.dtype
            step = SlotStep(held.cell, held.slots, rule, dtype, uses, late)
            run.steps.append(step)
            if update.beside is not None and gradient is given:
                array, part = update.beside
                run.gradients.add(array, [part])
            else:
                run.gradients.add(gradient)
        else:
            indices = update.operands[0].astype(np.intp, copy=False)
            own = run.gradients.operands_for(uses)
            rows = RowStep(held.cell, held.slots, rule, indices, gradient, own)
            run.rows.append(rows._replace(mixed=checked.mixed, late=late))
    return found


@dataclass(slots=True)
class OptimizerPlan(StorePlan):
    """The plan to load an optax transformation from shipped code and register it."""

    generation: int
    engine: OptimizerEngine
    optimizer: int
    name: str
    code: bytes
    loaded: Registered | None = None

    def compute(self) -> None:
        """Loads the transformation, importing jax and optax if need be. Raises as
        `OptimizerEngine.load`."""
        self.loaded = self.engine.load(self.optimizer, self.name, self.code)


@dataclass(slots=True)
class BindPlan(StorePlan):
    """The plan to trace the tree of an optimizer and bind its variables. ``find``
    returns the variable with a key."""

    generation: int
    optimizer: Registered
    data: bytes
    find: Callable[[int], HeldVariable | None]
    tree: Tree | None = None

    def compute(self) -> None:
        """Traces the transformation for the tree. Raises as `Bindings.trace`."""
        with self.optimizer.programs.on_cpu():
            self.tree = self.optimizer.bindings.trace(self.data, self.find)


Plan = (
    PushPlan
    | RowsPlan
    | ReadPlan
    | CreatePlan
    | InitializePlan
    | TablesPlan
    | OptimizerPlan
    | BindPlan
)


def work_of(op: UpdateOp, held: HeldVariable, operands: Sequence[np.ndarray]) -> int:
    """Estimates the work of an update: the bytes that numpy moves in the same time. A
    scatter counts its rows, and the whole value if that must be copied; Adam, with the
    time to start XLA, counts 16 additions, and on rows half a scatter, which writes to
    fresh memory."""
    if op is UpdateOp.OPTIMIZE:
        return 16 * held.cell.nbytes
    if op in _REMOVALS:
        return _removal_work(op, held, operands[0])
    if op in _OF_ROWS:
        factor = 8 if op in SCATTERS else 4
        rows = 16 * operands[0].size + factor * operands[-1].nbytes
        if held.table is not None:  # some ids are found, and some are born
            return 2 * (rows + SEARCH * operands[0].size)
        return rows + (held.cell.nbytes if held.cell.is_shared else 0)
    return held.cell.nbytes


def _removal_work(op: UpdateOp, held: HeldVariable, operand: np.ndarray) -> int:
    """Returns the most work that an update may take that removes ids: it is not known
    yet which ids an eviction removes."""
    table, count = held.table, operand.size
    if table is None or op is UpdateOp.NOTE_TIME:
        return 0
    if op is UpdateOp.FORGET_REMOVED:
        count = 0 if table.gone is None else len(table.gone)
    elif op is UpdateOp.EVICT_ROWS:
        rule, _, first, last = operand.tolist()
        index = table.index
        if rule == EvictionRule.WAITING and table.waiting is not None:
            index = table.waiting.index
        count = index.most(int(first), int(last))
    slots = sum(slots.nbytes for slots in held.slots.values())
    each = held.cell.row_bytes + slots // max(1, held.cell.shape[0])
    return count * (4 * SEARCH + 2 * each)


def _check_plain(
    optimizer: int, op: UpdateOp, held: HeldVariable, operands: Sequence[np.ndarray]
) -> None:
    name = held.entry.name
    if optimizer:
        raise InvalidArgumentError(
            f"variable {name!r}: {op.name} takes no optimizer, got {optimizer}"
        )
    is_table = held.table is not None
    if op in _REMOVALS or (is_table and op not in SCATTERS):
        _check_removal(op, operands, held.table, name)
        return
    check(op, operands, held.cell.shape, held.cell.dtype, name, of_ids=is_table)


def _check_removal(
    op: UpdateOp, operands: Sequence[np.ndarray], table: IdTable | None, name: str
) -> None:
    if op not in _REMOVALS:
        raise InvalidArgumentError(
            f"variable {name!r}: {op.name} is of all rows, and a table of any id has "
            "no such update: name the ids, as in SCATTER_UPDATE"
        )
    if table is None:
        raise InvalidArgumentError(
            f"variable {name!r}: {op.name} expects a table of any id, got a variable "
            "with a fixed number of rows"
        )
    if len(operands) != 1:
        raise InvalidArgumentError(
            f"variable {name!r}: {op.name} expects 1 array, got {len(operands)}"
        )
    (ids,) = operands
    if op is UpdateOp.EVICT_ROWS:
        Eviction.of(ids, table, f"variable {name!r}: {op.name}")
        return
    if op is UpdateOp.NOTE_TIME:
        if table.uses is None:
            raise InvalidArgumentError(
                f"variable {name!r}: {op.name} expects a table that notes when its "
                "rows are used: create it with eviction="
            )
        fits = ids.dtype == np.float64 and ids.shape == (2,)
        if not (fits and np.isfinite(ids).all() and ids[1] > 0):
            raise InvalidArgumentError(
                f"variable {name!r}: {op.name} expects a time and an age above 0, "
                f"finite, float64 of shape (2,), got {ids.dtype.name} of shape "
                f"{ids.shape}, {ids.ravel()[:2].tolist()}"
            )
        return
    if op is UpdateOp.FORGET_REMOVED and table.gone is None:
        raise InvalidArgumentError(
            f"variable {name!r}: {op.name} expects a table that follows changes, got "
            "one that does not"
        )
    if op is UpdateOp.FORGET_REMOVED and ids.shape != (1,):
        raise InvalidArgumentError(
            f"variable {name!r}: {op.name} expects a cut, int64 of shape (1,), got "
            f"shape {ids.shape}"
        )
    check_ids(ids, ids.shape, (0,), f"variable {name!r}: {op.name}")
