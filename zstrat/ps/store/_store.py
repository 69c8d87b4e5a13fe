"""The variables of one parameter server: versions, reads, and pushes that are applied
whole.

Decides without I/O and without a clock. Every change of the store is made in three
parts, so that the middle one may run on another thread:

1. ``plan_push``, ``create_plan``, ``plan_optimizer`` (loop): validate, touch nothing;
2. ``plan.compute()`` (any thread): does the arithmetic (`_plans`);
3. ``commit`` (loop): versions, ledger, statistics.

A version is a number that grows by one with every applied update, and never returns
for a key within a session (`_variables`).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, assert_never

import numpy as np

from zstrat.errors import (
    AlreadyExistsError,
    InvalidArgumentError,
    StaleSessionError,
)
from zstrat.ps.client._reading import READS, SETS
from zstrat.ps.engine._slots import Unbound
from zstrat.wire import (
    Again,
    AskParts,
    CloseRound,
    Contribute,
    DeleteVariables,
    Done,
    Exchange,
    Fence,
    Pulled,
    Push,
    Pushed,
    PushPart,
    RaiseMark,
    RaiseWriterMark,
    Read,
    StepRun,
    TableSizes,
    VariableEntry,
    Withdraw,
)

from ._alike_pushes import AlikePushes
from ._changes import ChangeLog, log_plan
from ._creating import (
    CreatePlan,
    InitializePlan,
    TablesPlan,
)
from ._fold import NOT_FOLDED_AFTER, Fold, fold_of
from ._ledger import DoneLeases, Ledger, Parts, Writers, plain_push
from ._lookups import (
    RowsPlan,
    require_table,
    rows_plan,
    table_items,
    too_many,
)
from ._plan import ReadPlan
from ._plans import BindPlan, OptimizerPlan, Plan, PushPlan
from ._rounds import OpenRounds, merged_part
from ._variables import HeldVariables

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from zstrat.ps.engine._engine import OptimizerEngine
    from zstrat.wire import AppliedParts, ArraySpec, Message, PullTable


@dataclass(slots=True)
class Counts:
    """Counts of what a store has done since it was opened."""

    pulls: int = 0
    reads: int = 0
    unchanged: int = 0
    rows: int = 0
    pushes: int = 0
    updates: int = 0
    duplicates: int = 0


class Store:
    """The variables that one parameter server holds for one session, and their
    optimizers.

    ``task`` names the parameter server in errors; ``largest`` bounds the bytes of rows
    that one request may ask for.
    """

    def __init__(
        self,
        engine: OptimizerEngine,
        *,
        task: str = "ps",
        largest: int = 2**36,
        spill: Path | None = None,
    ) -> None:
        self._task, self._largest = task, largest
        self.engine = engine
        self.variables = HeldVariables(task, spill)
        """The variables of the open session."""
        self.alike_pushes = AlikePushes()
        self.ledger, self.writers = Ledger(), Writers(task)
        self.leases = DoneLeases()
        self.parts, self.rounds = Parts(task), OpenRounds(task)
        self.counts = Counts()
        self.log: ChangeLog | None = None
        self.round_closed: Callable[[], None] = lambda: None
        """Called each time that a round was closed."""
        self.kept: set[int] = set()
        self.kept_optimizers: dict[int, str] = {}
        """With ``kept``, what the program before has left: the names of its optimizers
        by number, and the keys of its variables."""

    def __len__(self) -> int:
        return len(self.variables)

    def __contains__(self, key: int) -> bool:
        return key in self.variables

    def read(
        self,
        reads: Sequence[Read],
        sets: Sequence[int] = (),
        keys: Sequence[np.ndarray] = (),
    ) -> tuple[list[int], tuple[np.ndarray, ...]]:
        """Returns the versions of all variables, and the values that the reader lacks:
        one array for each variable of ``reads``, and one for each set of small
        variables in ``sets``, whose ``keys`` are given.

        The arrays are read-only views of live memory whose content never changes.

        Raises:
            NotFoundError: No variable has one of the keys.
            InvalidArgumentError: There are more reads than `READS`, or sets than
                `SETS`, or a variable is a table of any id, or keys are not those of a
                set.
        """
        if len(reads) > READS:
            raise too_many(self._task, "reads", len(reads), READS)
        if len(sets) > SETS:
            raise too_many(self._task, "reads sets of", len(sets), SETS)
        # Per variable of each pull, so no helper is called in this loop.
        variables, versions, arrays = self.variables, [], []
        for key, known, _ in reads:
            held = variables[key]
            if held.table is not None:
                raise InvalidArgumentError(
                    f"{held.cell.who} is a table of any id, which is not read as a "
                    "whole: look ids up, or read its items"
                )
            versions.append(held.version)
            # A version never names two contents, so an equal number is an equal value.
            if held.version != known:
                arrays.append(held.cell.lease())
        counts = self.counts
        counts.pulls += 1
        counts.reads += len(versions)
        counts.unchanged += len(versions) - len(arrays)
        for known, named in zip(sets, keys, strict=True):
            one = variables.sets.find(named, variables)
            version = one.version
            versions.append(version)
            counts.reads += len(one.keys)
            if version != known:
                arrays.append(one.value())
            else:
                counts.unchanged += len(one.keys)
        return versions, tuple(arrays)

    def plan_rows(
        self,
        reads: Sequence[Read],
        rows: Sequence[int],
        indices: Sequence[np.ndarray],
        sets: Sequence[int] = (),
        keys: Sequence[np.ndarray] = (),
    ) -> RowsPlan:
        """Plans to read values as `read` does, and rows of variables, which may be
        many.

        Raises:
            NotFoundError: No variable has one of the keys.
            InvalidArgumentError: Indices are out of range, there is not one array of
                them per variable, or the answer would be too large.
            ResourceExhaustedError: The machine does not have four times the memory of
                the answer.
        """
        # Values are leased now, in the versions that the answer names; rows come later,
        # while the request holds the names of their variables.
        plan = rows_plan(self.variables, rows, indices, self._largest)
        plan.versions, plan.leases = self.read(reads, sets, keys)
        return plan

    def plan_items(self, message: PullTable) -> ReadPlan:
        """Plans to read buckets of a table: ids and their rows.

        Raises:
            NotFoundError: No variable has the key.
            InvalidArgumentError: The variable is not a table, the buckets do not exist,
                or it is not known what has changed since the given number.
        """
        items = table_items(self.variables, message, self._largest)

        def answer(arrays: tuple[np.ndarray, ...]) -> Pulled:
            self.counts.rows += len(arrays[0])
            return Pulled([items.held.version], arrays, self.counts.pushes)

        return ReadPlan(self.variables.generation, items.work, items.read, answer)

    def table_sizes(self, keys: Sequence[int]) -> TableSizes:
        """Returns, for each table in order: rows, bytes, counts of rows added and
        removed, ids that wait for a row, gradients of them that were dropped, and the
        number of the last change.

        Raises:
            NotFoundError: No variable has one of the keys.
            InvalidArgumentError: A variable is not a table.
        """
        held = self.variables.find(keys)
        tables = [require_table(each) for each in held]
        return TableSizes(
            [each.cell.shape[0] for each in held],
            [
                each.cell.nbytes
                + table.nbytes
                + sum(slots.nbytes for slots in each.slots.values())
                for each, table in zip(held, tables, strict=True)
            ],
            [table.births for table in tables],
            [table.removed for table in tables],
            [0 if x.waiting is None else x.waiting.waiting for x in tables],
            [table.refused for table in tables],
            [table.cut for table in tables],
        )

    def delete(self, keys: Sequence[int], *, again: bool = False) -> None:
        """Deletes variables, all or none; with ``again``, those that still exist.

        Raises:
            NotFoundError: No variable has one of the keys.
        """
        # A request that is sent again may find some of them deleted.
        if again:
            keys = [key for key in keys if key in self.variables]
        self._delete(keys)
        if self.log is not None:
            self.log.append(DeleteVariables(0, list(keys)))

    def withdraw(self, keys: Sequence[int], optimizers: Sequence[int]) -> None:
        """Drops variables and optimizers that a creation has left here which failed on
        another server. Those that an earlier program had created under the same numbers
        stay."""
        ours = [key for key in keys if key in self.variables and key not in self.kept]
        self._delete(ours)
        for number in optimizers:
            self.engine.forget(number)
            # Its code goes, but not the state that an earlier program has trained.
            if number in self.kept_optimizers:
                continue
            for held in self.variables.values():
                held.slots.pop(number, None)
        if self.log is not None:
            self.log.append(Withdraw(0, list(keys), list(optimizers)))

    def _delete(self, keys: Sequence[int]) -> None:
        self.variables.delete(keys)
        self.alike_pushes = AlikePushes()  # it holds the memory of what it has planned
        self.engine.unbind(keys)
        self.rounds.forget(keys)
        self.kept.difference_update(keys)

    def clear(self) -> None:
        """Drops the variables, optimizers and ledgers of the session.

        A plan that is still being computed can no longer be committed.
        """
        self.variables.clear()
        self.engine.clear()
        self.alike_pushes = AlikePushes()
        self._forget_pushes()
        self.leases = DoneLeases()
        self.rounds = OpenRounds(self._task)
        self.kept.clear()
        self.kept_optimizers.clear()

    def change_program(self) -> None:
        """Prepares the store for another program, which takes its content over in a
        session of another number. Variables, slots, rounds and the ranges of leased
        examples stay; pushes are counted from the start. That program sends its
        optimizers and trees again; until then the present ones are kept, to close a
        round that other servers have closed."""
        # Added: what a program before that one has left may not be claimed yet either.
        self.kept.update(self.variables)
        optimizers = {known.optimizer: known.name for known in self.engine}
        self.kept_optimizers.update(optimizers)
        self.engine.is_former = True
        self._forget_pushes()

    def _drop_former_optimizers(self) -> None:
        # Their slots stay, without layouts, until the trees of the new program come.
        for held in self.variables.values():
            held.slots = {
                number: Unbound.of(slots)
                for number, slots in held.slots.items()
                if slots.leaves
            }
        self.engine.clear()

    def _forget_pushes(self) -> None:
        self.ledger, self.writers = Ledger(), Writers(self._task)
        self.parts = Parts(self._task)

    def plan_push(self, push: Push) -> PushPlan | Pushed:
        """Validates a push; changes nothing but the low-water mark of its writer.

        Returns:
            A plan to compute and commit, or the answer if the push is a duplicate.

        Raises:
            NotFoundError: A variable or optimizer does not exist.
            InvalidArgumentError: An update does not fit its variable, or the push says
                that its own number is below the low-water mark.
            BusyError: The step could not be remembered.
        """
        return self._duplicate(push) or self.plan_again(push)

    def plan_again(self, push: Push) -> PushPlan:
        """Plans a push that the primary has applied, in a backup that has applied all
        pushes before it. Does not check for duplicates, because the primary has done
        that."""
        return self.alike_pushes.plan(push, self.variables, self.engine)

    def raise_mark(self, low_water: int) -> None:
        """Raises the low-water mark of closures: all below it are over. Their pushes
        count as duplicates from now on, and they are forgotten."""
        if self.log is not None:
            self.log.append(RaiseMark(0, low_water))
        self.ledger.raise_to(low_water)

    def fold(self, message: Push | Exchange, specs: Sequence[ArraySpec]) -> Fold | None:
        """Begins to apply a push while its body arrives, if possible; `push_folded`
        ends that. Changes nothing yet, and no request waits for it."""
        return fold_of(message, specs, self.variables.get)

    def push_folded(self, push: Push, fold: Fold) -> Pushed | Again:
        """Applies a push that was added to its variable while it arrived. Answers
        `Again` if the variable has changed meanwhile.

        Raises:
            InvalidArgumentError: The push says that its own number is below the
                low-water mark.
            BusyError: The step could not be remembered.
        """
        duplicate = self._duplicate(push)
        if duplicate is not None:
            return duplicate
        held = fold.held
        if self.variables.get(held.entry.key) is not held:
            return Again()  # it was deleted, as the answer to the next push says
        if not fold.is_current or fold.sum is None or self.log is not None:
            # With a log: the fold began before it, and has kept no operand for the log.
            held.no_fold_until = held.version + NOT_FOLDED_AFTER
            return Again()
        # The operand was added up already: memory of the connection becomes the value.
        held.cell.replace(fold.sum)
        held.version += 1
        self._record(push, 1)
        return Pushed(True, self._versions(push), self.counts.pushes)

    def plan_part(self, part: PushPart) -> PushPlan | Pushed:
        """Plans a part of an eager step, otherwise as `plan_push`.

        Raises:
            RetryDiffersError: Another part was applied under its number.
            StaleSessionError: A later run of the step has begun.
        """
        # First: a run that differs has to fail, even where its push counts as a
        # duplicate.
        self.note_part(part)
        return self.plan_push(plain_push(part, part.arrays))

    def note_part(self, part: PushPart) -> None:
        """Notes the names of a part's updates in the ledger of eager steps. Raises as
        `plan_part`."""
        step, attempt, number, names = part.step, part.attempt, part.part, part.names
        if self.log is not None:  # a part that is refused may be remembered, too
            noted = PushPart(0, step, number, part.low_water, attempt, names, [], ())
            self.log.append(noted)
        self.parts.note(step, attempt, number, names, self.ledger)

    def claim(self, step: int, attempt: int) -> None:
        """Ends earlier runs of an eager step: they have no effect from now on.

        Raises:
            StaleSessionError: A later run of the step has begun.
        """
        if self.log is not None:
            self.log.append(AskParts(0, step, attempt, 0))
        self.parts.claim(step, attempt, self.ledger)

    def applied_parts(self, step: int, first: int) -> AppliedParts:
        """Returns the parts that runs of an eager step have pushed, from number
        ``first`` on."""
        return self.parts.applied(step, first, self.ledger)

    def close_steps(self, low_water: int, over: Sequence[StepRun]) -> None:
        """Ends all steps below the mark and those of ``over``: their pushes have no
        effect from now on. The ledger remembers what they have applied until
        `end_steps`."""
        if self.log is not None:
            self.log.append(Fence(0, low_water, list(over), []))
        # Steps below the mark as one run. The mark rises only in `end_steps`, which
        # first asks what they have applied.
        self.ledger.close_steps([StepRun(0, low_water), *over])

    def end_steps(self, low_water: int, asked: Sequence[int]) -> list[int]:
        """Ends and forgets all steps below the mark.

        Returns:
            Those steps of ``asked`` that have applied something on this server.
        """
        # Before the mark is raised: what is below it is forgotten.
        applied = [step for step in asked if self.ledger.has_applied(step)]
        self.raise_mark(low_water)
        return applied

    def contribute(self, message: Contribute) -> None:
        """Keeps the gradients of a step for rounds. Raises as
        `OpenRounds.contribute`."""
        kept = self.rounds.contribute(message, self.ledger, self.variables, self.engine)
        if kept and self.log is not None:
            self.log.append(replace(message, session=0))

    def commit_round(self, message: CloseRound, plan: PushPlan) -> None:
        """Commits the update of a round, and closes the round.

        Raises:
            StaleSessionError: The store was cleared while the plan computed.
        """
        # The merge ran on the thread, and the session may have been cleared meanwhile.
        self.require_generation(plan.generation)
        for update in plan.updates:
            update.held.version += 1
        self.counts.pushes += 1
        self.counts.updates += len(plan.updates)
        self.rounds.closed(message)
        optimizer, _, _, members = message.order
        for member in members:  # a run of it that was lost may contribute yet
            self.ledger.record(member.step, merged_part(optimizer))
        if self.log is not None:
            self.log.append(replace(message, session=0))
        # Only now: pulls that are woken read the number of the round and the new
        # values.
        self.round_closed()

    def plan_optimizer(
        self, optimizer: int, name: str, code: bytes
    ) -> OptimizerPlan | Done:
        """Plans to load an optimizer. Returns `Done` if it was loaded before from the
        same code under the same id.

        Raises:
            AlreadyExistsError: The program before has left slots of an optimizer of
                another name under this id.
        """
        # Until now they were kept to close rounds that other servers have closed
        # (`change_program`).
        if self.engine.is_former:
            self._drop_former_optimizers()
        before = self.kept_optimizers.get(optimizer, name)
        if before != name:
            raise AlreadyExistsError(
                f"{self._task} keeps slots of optimizer {before!r} under number "
                f"{optimizer}; {name!r} cannot be created under it"
            )
        if self.engine.is_registered(optimizer, code):
            return Done()
        return OptimizerPlan(
            self.variables.generation, self.engine, optimizer, name, code
        )

    def plan_binding(
        self, optimizer: int, arrays: Sequence[np.ndarray]
    ) -> BindPlan | Done:
        """Plans to bind the variables of a tree to an optimizer. Returns `Done` if
        exactly this tree has bound them already.

        Raises:
            NotFoundError: The optimizer does not exist.
            InvalidArgumentError: The tree is not one array of bytes.
            BusyError: The optimizer has too many trees.
        """
        known = self.engine.get(optimizer)
        if len(arrays) != 1 or arrays[0].dtype != np.uint8:
            raise InvalidArgumentError(
                f"{self._task}: the tree of optimizer {known.name!r} is one array of "
                f"bytes, got {[array.dtype.name for array in arrays]!r:.80}"
            )
        data = arrays[0].tobytes()
        if known.bindings.has(data, self.variables.get):
            return Done()
        return BindPlan(self.variables.generation, known, data, self.variables.get)

    def commit(self, plan: Plan) -> Message:
        """Makes the changes visible that a plan has computed: versions, keys, ledger.
        Returns the answer.

        Raises:
            StaleSessionError: The store was cleared while the plan computed.
            AlreadyExistsError: Another optimizer has the id.
        """
        # The loop may have opened another session while the thread computed.
        self.require_generation(plan.generation)
        match plan:
            case PushPlan():
                return self._commit_push(plan)
            case RowsPlan(versions=versions, leases=leases, rows=rows):
                self.counts.rows += sum(map(len, rows))
                return Pulled(versions, (*leases, *rows), self.counts.pushes)
            case ReadPlan(answer=answer, found=found):
                return answer(found)
            case TablesPlan(made=tables):
                self.variables.hold_tables(tables)
            case CreatePlan(entries=entries, cells=cells):
                self.variables.hold(entries, cells)
            case InitializePlan(entries=new, cells=cells):
                made = [VariableEntry(*entry[:4]) for entry in new]
                self.variables.hold(made, cells)
            case OptimizerPlan(loaded=loaded):
                assert loaded is not None, "commit before compute"
                self.engine.register(loaded)
            case BindPlan(optimizer=optimizer, tree=tree):
                assert tree is not None, "commit before compute"
                here = [key for key in tree.leaves if key in self.variables]
                optimizer.bindings.add(tree, here)
            case _:
                assert_never(plan)
        if self.log is not None:
            log_plan(self.log, plan)
        return Done()

    def require_generation(self, generation: int) -> None:
        """Raises StaleSessionError if the store was cleared since
        `HeldVariables.generation` was ``generation``."""
        if generation != self.variables.generation:
            raise StaleSessionError(
                f"{self._task}: the session ended while its request was computed"
            )

    def gave_up(self, plan: Plan) -> None:
        """Notes that a plan has failed: if values were lost, marks the backup as
        diverged."""
        if self.log is None or not isinstance(plan, PushPlan):
            return
        # The push was not logged, so the backup keeps the values that are lost here.
        if any(update.held.cell.lost for update in plan.updates):
            self.log.mark_diverged(
                "an update failed half way, and what it wrote is lost"
            )

    def _commit_push(self, plan: PushPlan) -> Pushed:
        for update in plan.updates:
            update.held.version += 1
        self._record(plan.logged, len(plan.updates))
        return Pushed(True, self._versions(plan.push), self.counts.pushes)

    def _record(self, push: Push, updates: int) -> None:
        if self.log is not None:
            self.log.append(push)
        self._ledger_of(push).record(push.step, push.part)
        if push.leases:
            self.leases.note(push.leases)
        self.counts.pushes += 1
        self.counts.updates += updates

    def _ledger_of(self, push: Push) -> Ledger:
        """Returns the ledger that decides whether a push was applied: that of the
        session or, for an update outside of closures, that of its writer.

        Raises:
            InvalidArgumentError: The push says that its own number is below the
                low-water mark.
        """
        return self.writers.ledger_of(push) if push.writer else self.ledger

    def _duplicate(self, push: Push) -> Pushed | None:
        """Returns the answer to a push that was applied before; otherwise None, after
        checking that the step can be remembered."""
        # Before `_ledger_of`, which raises the mark of the writer: a malformed push
        # changes nothing.
        if push.leases:
            self.leases.require(push.leases)
        ledger = self._ledger_of(push)
        if push.writer and self.log is not None:  # its mark rises even if it is refused
            self.log.append(RaiseWriterMark(push.writer, push.low_water))
        if ledger.is_duplicate(push.step, push.part):
            self.counts.duplicates += 1
            return Pushed(applied=False, versions=self._versions(push))
        ledger.admit(push.step)
        return None

    def statistics(self) -> dict[str, int]:
        """Returns counts and bytes of the store. Cheap, as it reads no values."""
        held = self.variables.values()
        tables = [(each, each.table) for each in held if each.table is not None]
        return {
            "variables": len(held),
            "bytes": sum(each.cell.nbytes for each in held),
            "held_bytes": sum(each.cell.held_bytes for each in held),
            "slot_bytes": sum(
                s.nbytes for each in held for s in list(each.slots.values())
            ),
            **asdict(self.counts),
            "contributions": self.rounds.count,
            "contribution_bytes": self.rounds.nbytes,
            "remembered_steps": len(self.ledger) + len(self.writers),
            "low_water": self.ledger.low_water,
            "table_rows": sum(each.cell.shape[0] for each, _ in tables),
            "table_id_bytes": sum(table.nbytes for _, table in tables),
            "table_waiting": sum(
                0 if table.waiting is None else table.waiting.waiting
                for _, table in tables
            ),
            "table_births": sum(table.births for _, table in tables),
            "table_removed": sum(table.removed for _, table in tables),
            "table_refused": sum(table.refused for _, table in tables),
        }

    def _versions(self, push: Push) -> list[int]:
        return self.variables.versions([update.key for update in push.updates])
