"""The variables of one parameter server: versions, reads, and pushes that apply whole.

Decides without I/O and without a clock. Anything that changes the store happens in
three parts, so that the middle one may run on another thread:

1. ``plan_push``, ``plan_create``, ``plan_optimizer`` (loop): validate, touch nothing;
2. ``plan.compute()`` (any thread): does the arithmetic (`zstrat.ps._plans`);
3. ``commit`` (loop): versions, ledger, statistics.

A version is a number that grows by one with every applied update, and never returns
for a key within a session, not even when the variable is deleted and created anew.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, assert_never

import numpy as np

from zstrat.errors import (
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
    StaleSessionError,
)
from zstrat.wire import (
    Again,
    Done,
    Exchange,
    InitialEntry,
    Pulled,
    Push,
    Pushed,
    Read,
    VariableEntry,
)

from ._arithmetic import check_rows
from ._creating import CreatePlan, InitializePlan, create_plan, initialize_plan
from ._fold import PATIENCE, Fold, fold_of
from ._ledger import Ledger
from ._memory import available_bytes
from ._plans import Held, OptimizerPlan, Plan, PushPlan, RowsPlan
from ._reading import READS, ROWS
from ._validating import push_plan, unknown

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from zstrat.wire import ArraySpec

    from ._cell import Cell
    from ._engine import OptimizerEngine


ASKED_ABOVE: Final = 16 * 2**20
"""Bytes of rows for which it is asked whether the machine has them: asking takes as
long as gathering a hundred KiB."""


@dataclass(slots=True)
class Counts:
    """What the store did since it was opened."""

    pulls: int = 0
    reads: int = 0
    unchanged: int = 0
    rows: int = 0
    pushes: int = 0
    updates: int = 0
    duplicates: int = 0


class Store:
    """All variables that one task holds for one session.

    ``task`` names the parameter server in errors; ``largest`` bounds the bytes of rows
    that one request may ask for.
    """

    def __init__(
        self, engine: OptimizerEngine, *, task: str = "ps", largest: int = 2**36
    ) -> None:
        self._task, self._largest = task, largest
        self.engine = self._engine = engine
        self._held: dict[int, Held] = {}
        self._ledger = Ledger()
        self._generation = 0
        self._first_version = 0
        self.counts = Counts()

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, key: int) -> bool:
        return key in self._held

    # ---- reading -----------------------------------------------------------------

    def read(self, reads: Sequence[Read]) -> tuple[list[int], tuple[np.ndarray, ...]]:
        """Versions of all, and values of those that the reader does not know yet.

        The arrays are read-only views of live memory whose content never changes.

        Raises:
            NotFoundError: No variable has one of the keys.
            InvalidArgumentError: They are more than `READS`.
        """
        if len(reads) > READS:
            raise self._too_many("reads", len(reads), READS)
        versions, arrays = [], []
        for key, known in reads:
            held = self._held.get(key)
            if held is None:
                raise self._unknown(key)
            versions.append(held.version)
            if held.version != known:
                arrays.append(held.cell.lease())
        counts = self.counts
        counts.pulls += 1
        counts.reads += len(versions)
        counts.unchanged += len(versions) - len(arrays)
        return versions, tuple(arrays)

    def find(self, keys: Iterable[int]) -> list[Held]:
        """The variables themselves, for their owner of the moment.

        Raises:
            NotFoundError: No variable has one of the keys.
        """
        found: list[Held] = []
        for key in keys:
            held = self._held.get(key)
            if held is None:
                raise self._unknown(key)
            found.append(held)
        return found

    def nbytes(self, keys: Iterable[int]) -> int:
        """Bytes of those variables that exist."""
        return sum(held.cell.nbytes for key in keys if (held := self._held.get(key)))

    def plan_rows(
        self, reads: Sequence[Read], rows: Sequence[int], indices: Sequence[np.ndarray]
    ) -> RowsPlan:
        """`read`, and rows of variables besides: a plan, because many rows take long.

        Raises:
            NotFoundError: No variable has one of the keys.
            InvalidArgumentError: Some indices are none of the variable's rows, they are
                not one array per variable, or the answer would be too large.
            ResourceExhaustedError: The machine has not four times the memory for it.
        """
        if len(rows) > ROWS:
            raise self._too_many("reads rows of", len(rows), ROWS)
        if len(rows) != len(indices):
            raise InvalidArgumentError(
                f"{self._task}: rows of {len(rows)} variables are wanted by "
                f"{len(indices)} arrays of indices"
            )
        wanted, work = [], 0
        for key, at in zip(rows, indices, strict=True):
            held = self._held.get(key)
            if held is None:
                raise self._unknown(key)
            shape, who = held.cell.shape, f"variable {held.entry.name!r}: a lookup"
            check_rows(at, (at.size, *shape[1:]), shape, who)
            wanted.append((held, at.astype(np.intp, copy=False)))
            work += len(at) * (held.cell.nbytes // max(1, shape[0]) + 16)
        if work > self._largest:
            raise InvalidArgumentError(
                f"{self._task}: a lookup asks for {work} bytes of rows, the limit is "
                f"{self._largest}: ask for fewer at a time"
            )
        self._check_memory(work)
        versions, leases = self.read(reads)
        return RowsPlan(self._generation, versions, leases, wanted, work)

    def row_bytes(self, rows: Sequence[int], indices: Sequence[np.ndarray]) -> int:
        """Bytes of the answer to a lookup, as far as its variables exist."""
        total = 0
        for key, at in zip(rows, indices, strict=False):
            held = self._held.get(key)
            if held is not None and held.cell.shape:
                total += at.size * (held.cell.nbytes // max(1, held.cell.shape[0]))
        return total

    def _too_many(self, what: str, count: int, most: int) -> InvalidArgumentError:
        return InvalidArgumentError(
            f"{self._task}: a message {what} {count} variables, the limit is {most}: "
            "send several"
        )

    def _check_memory(self, work: int) -> None:
        if work < ASKED_ABOVE:
            return
        left = available_bytes()
        if left is not None and work > left // 4:
            raise ResourceExhaustedError(
                f"{self._task}: a lookup asks for {work} bytes of rows, of {left} that "
                "are left on its machine: ask for fewer at a time"
            )

    # ---- creating ----------------------------------------------------------------

    def create(
        self, entries: Sequence[VariableEntry], arrays: Sequence[np.ndarray]
    ) -> None:
        """Creates all or none; one of the same key, shape and dtype stays as it is.

        Raises:
            AlreadyExistsError: A key is taken by a variable of another shape or dtype.
            InvalidArgumentError: The message is not one array per entry, keys repeat.
        """
        plan = self.plan_create(entries, arrays)
        plan.compute()
        self.commit(plan)

    def plan_create(
        self, entries: Sequence[VariableEntry], arrays: Sequence[np.ndarray]
    ) -> CreatePlan:
        """`create` up to its validation, with the same errors."""
        return create_plan(entries, arrays, self._held, self._task, self._generation)

    def plan_initialize(
        self, entries: Sequence[InitialEntry], code: bytes
    ) -> InitializePlan:
        """Like `plan_create`; the values are made by shipped code.

        Raises:
            AlreadyExistsError: A key is taken by a variable of another shape or dtype.
            InvalidArgumentError: Keys repeat.
            ProtocolError: No such dtype travels.
        """
        return initialize_plan(
            entries,
            code,
            self._engine.load_code,
            self._held,
            self._task,
            self._generation,
        )

    def delete(self, keys: Sequence[int]) -> None:
        """Deletes all or none.

        Raises:
            NotFoundError: No variable has one of the keys.
        """
        for key in keys:
            if key not in self._held:
                raise self._unknown(key)
        for key in set(keys):
            version = self._held.pop(key).version
            self._first_version = max(self._first_version, version + 1)

    def withdraw(self, keys: Sequence[int], optimizers: Sequence[int]) -> None:
        """Drops what is there of a creation that failed elsewhere."""
        self.delete([key for key in keys if key in self._held])
        for number in optimizers:
            self._engine.forget(number)
            for held in self._held.values():
                held.slots.pop(number, None)

    def clear(self) -> None:
        """Drops the session's variables, optimizers and memory of pushes.

        A plan that is still computing cannot be committed any more.
        """
        self._held.clear()
        self._engine.clear()
        self._ledger = Ledger()
        self._generation += 1
        self._first_version = 0

    # ---- pushing -----------------------------------------------------------------

    def push(self, push: Push) -> Pushed:
        """Plan, compute and commit at once."""
        plan = self.plan_push(push)
        if isinstance(plan, Pushed):
            return plan
        plan.compute()
        answer = self.commit(plan)
        assert isinstance(answer, Pushed)
        return answer

    def plan_push(self, push: Push) -> PushPlan | Pushed:
        """Validates a push; changes nothing but the low-water mark.

        Returns:
            A plan to compute and commit, or the answer if the push is a duplicate.

        Raises:
            NotFoundError: A variable or optimizer does not exist.
            InvalidArgumentError: An update does not fit its variable, or the low-water
                mark is above the step.
            BusyError: The step could not be remembered.
        """
        return self._duplicate(push) or push_plan(
            push, self._held, self._engine, self._task, self._generation
        )

    def fold(self, message: Push | Exchange, specs: Sequence[ArraySpec]) -> Fold | None:
        """Begins to apply a push whose body follows, if that can be done: `push_folded`
        ends it. Changes nothing, and nobody has to wait for it."""
        return fold_of(message, specs, self._held.get)

    def push_folded(self, push: Push, fold: Fold) -> Pushed | Again:
        """Applies a push whose arithmetic was done on the way, or says that it has to
        come again because its variable has changed since.

        Raises:
            InvalidArgumentError: The low-water mark is above the step.
            BusyError: The step could not be remembered.
        """
        duplicate = self._duplicate(push)
        if duplicate is not None:
            return duplicate
        held = fold.held
        if self._held.get(held.entry.key) is not held:
            return Again()  # it was deleted; the answer to the next one says so
        if not fold.is_current or fold.sum is None:
            held.patient_until = held.version + PATIENCE
            return Again()
        held.cell.replace(fold.sum)
        held.version += 1
        self._record(push)
        return Pushed(applied=True, versions=self._versions(push))

    # ---- optimizers --------------------------------------------------------------

    def plan_optimizer(
        self, optimizer: int, name: str, code: bytes
    ) -> OptimizerPlan | Done:
        """The same code under the same id again has nothing to do."""
        if self._engine.is_registered(optimizer, code):
            return Done()
        return OptimizerPlan(self._generation, self._engine, optimizer, name, code)

    # ---- committing --------------------------------------------------------------

    def commit(self, plan: Plan) -> Done | Pushed | Pulled:
        """Makes what a plan has computed true: versions, keys, the memory of steps.

        Raises:
            StaleSessionError: The store was cleared while the plan computed.
            AlreadyExistsError: The id of an optimizer is taken by another one.
        """
        if plan.generation != self._generation:
            raise StaleSessionError(
                f"{self._task}: the session ended while its request was computed"
            )
        match plan:
            case PushPlan():
                return self._commit_push(plan)
            case RowsPlan(versions=versions, leases=leases, rows=rows):
                self.counts.rows += sum(map(len, rows))
                return Pulled(versions, (*leases, *rows))
            case CreatePlan(entries=entries, cells=cells):
                self._hold(entries, cells)
            case InitializePlan(entries=new, cells=cells):
                self._hold([VariableEntry(*entry[:4]) for entry in new], cells)
            case OptimizerPlan(loaded=loaded):
                assert loaded is not None, "commit before compute"
                self._engine.register(loaded)
            case _:
                assert_never(plan)
        return Done()

    def _hold(self, entries: Sequence[VariableEntry], cells: Sequence[Cell]) -> None:
        for entry, cell in zip(entries, cells, strict=True):
            cell.who = f"{self._task}: variable {entry.name!r}"
            self._held[entry.key] = Held(entry, cell, self._first_version)

    def _commit_push(self, plan: PushPlan) -> Pushed:
        for update in plan.updates:
            update.held.version += 1
        self._record(plan.push)
        return Pushed(applied=True, versions=self._versions(plan.push))

    def _record(self, push: Push) -> None:
        self._ledger.record(push.step, push.part)
        self.counts.pushes += 1
        self.counts.updates += len(push.updates)

    def _duplicate(self, push: Push) -> Pushed | None:
        """The answer to a push that was applied before; admits any other.

        Of a step that a coordinator still waits for, no mark that it sent is above it.
        A mark that is would have the pushes of all others counted as duplicates.
        """
        if push.low_water > max(push.step, 0):
            raise InvalidArgumentError(
                f"{self._task}: a push of step {push.step} says that all steps below "
                f"{push.low_water} are over, its own too: low_water is at most "
                f"{max(push.step, 0)} while the step is under way"
            )
        self._ledger.raise_to(push.low_water)
        if self._ledger.is_duplicate(push.step, push.part):
            self.counts.duplicates += 1
            return Pushed(applied=False, versions=self._versions(push))
        self._ledger.admit(push.step)
        return None

    # ---- statistics --------------------------------------------------------------

    def statistics(self) -> dict[str, int]:
        """Cheap: one pass over the variables, none over their values."""
        held, counts = self._held.values(), self.counts
        return {
            "variables": len(held),
            "bytes": sum(each.cell.nbytes for each in held),
            "held_bytes": sum(each.cell.held_bytes for each in held),
            "slot_bytes": sum(
                s.nbytes for each in held for s in list(each.slots.values())
            ),
            "pulls": counts.pulls,
            "reads": counts.reads,
            "unchanged": counts.unchanged,
            "rows": counts.rows,
            "pushes": counts.pushes,
            "updates": counts.updates,
            "duplicates": counts.duplicates,
            "remembered_steps": len(self._ledger),
            "low_water": self._ledger.low_water,
        }

    def _versions(self, push: Push) -> list[int]:
        """Of a duplicate, a variable may be gone: -1."""
        held = self._held
        return [held[u.key].version if u.key in held else -1 for u in push.updates]

    def _unknown(self, key: int) -> NotFoundError:
        return unknown(self._task, key, len(self._held))
