"""Synchronous rounds: keeps contributions of steps, and merges those of a round to one
update.

A contribution is the gradients of one run of a step, and changes no variable. The order
to close a round names its members; their gradients are merged in that order and go
through the optimizer once. The law of this file: the update of a round depends on that
order and on its members alone, not on when contributions came, nor on which other
contributions wait. So every server applies the same round, and a backup repeats it to
the last bit.

After Chen et al., "Revisiting Distributed Synchronous SGD" (2016), with one member set
for all servers. `MergeRule.RDA` is from Douillard et al., "Decoupled DiLoCo" (2026).
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple, final

import numpy as np

from zstrat.errors import (
    BusyError,
    InvalidArgumentError,
    NotFoundError,
    ProtocolError,
)
from zstrat.ids import hashes_of
from zstrat.rows import Runs, runs, sums
from zstrat.wire import (
    CloseRound,
    Contribute,
    HeldRounds,
    MergeRule,
    Push,
    RoundOrder,
    Update,
    UpdateOp,
)

from ._ledger import UNNAMED

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Iterator, Sequence

    from zstrat.ps.engine._engine import OptimizerEngine
    from zstrat.wire import Message, StepContribution

    from ._ledger import Ledger
    from ._variables import HeldVariables

MAX_CONTRIBUTIONS: Final = 4096
"""The most contributions to rounds of one optimizer that may wait on a server."""

_RULES: Final = {int(rule): rule for rule in MergeRule}


class Gradient(NamedTuple):
    """A gradient of a variable: one array of its shape, or indices ``[n]`` and rows
    ``[n, ...]``; ``of_ids``: with ids of a table instead of indices."""

    arrays: Sequence[np.ndarray]
    of_ids: bool = False

    @property
    def is_of_rows(self) -> bool:
        return len(self.arrays) == 2

    @property
    def op(self) -> UpdateOp:
        return UpdateOp.OPTIMIZE_ROWS if self.is_of_rows else UpdateOp.OPTIMIZE


class Contribution(NamedTuple):
    """The gradients of one run of a step for one optimizer, by key of the variable.
    Empty if the step has only updated variables on other servers."""

    given: StepContribution
    gradients: dict[int, Gradient]

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for each in self.gradients.values() for x in each.arrays)


@final
@dataclass(slots=True)
class Merging:
    """Merges the gradients of a round: by variable, each with its weight, in the order
    of the members. `compute` may run on any thread."""

    rule: MergeRule
    weight: float
    """The sum of the weights of all members."""
    gradients: dict[int, list[tuple[float, Gradient]]]
    merged: dict[int, Gradient] = field(default_factory=dict)

    @property
    def work(self) -> int:
        """Estimates the bytes that merging moves, in the unit of `work_of`."""
        parts = [g for found in self.gradients.values() for _, g in found]
        return 2 * sum(array.nbytes for each in parts for array in each.arrays)

    def compute(self) -> None:
        with np.errstate(all="ignore"):  # what is too large is inf, as in XLA
            for key, found in self.gradients.items():
                self.merged[key] = self._merged(found)

    def _merged(self, found: Sequence[tuple[float, Gradient]]) -> Gradient:
        # Rows stay rows only if every member has rows: one dense gradient makes the sum
        # dense.
        if all(gradient.is_of_rows for _, gradient in found):
            return self._merged_rows(found)
        dense = [
            (w, gradient.arrays[0]) for w, gradient in found if not gradient.is_of_rows
        ]
        of_rows = [(w, gradient) for w, gradient in found if gradient.is_of_rows]
        # The mean direction needs whole gradients, so rows fall back to the weighted
        # mean.
        if self.rule is MergeRule.RDA and not of_rows:
            return Gradient((self._rda(dense),))
        dtype = dense[0][1].dtype
        total = _weighted(*dense[0])
        for weight, array in dense[1:]:
            total += _weighted(weight, array)
        if of_rows:
            indices, rows = self._summed_rows(of_rows)
            total[indices] += rows
        return Gradient((self._averaged(total).astype(dtype, copy=False),))

    def _merged_rows(self, found: Sequence[tuple[float, Gradient]]) -> Gradient:
        dtype = found[0][1].arrays[1].dtype
        indices, rows = self._summed_rows(found)
        return Gradient((indices, self._averaged(rows).astype(dtype, copy=False)))

    @staticmethod
    def _summed_rows(
        found: Sequence[tuple[float, Gradient]],
    ) -> tuple[np.ndarray, np.ndarray]:
        indices = np.concatenate([gradient.arrays[0] for _, gradient in found])
        parts = [_weighted(w, gradient.arrays[1]) for w, gradient in found]
        known = _runs_of_ids(indices) if found[0][1].of_ids else runs(indices)
        return known.unique, sums(known, np.concatenate(parts))

    def _averaged(self, total: np.ndarray) -> np.ndarray:
        if self.rule is not MergeRule.SUM:
            total /= self.weight
        return total

    def _rda(self, found: Sequence[tuple[float, np.ndarray]]) -> np.ndarray:
        dtype = found[0][1].dtype
        # In 64 bits, as the squares of 16-bit gradients would overflow.
        wide = np.dtype(np.complex128 if dtype.kind == "c" else np.float64)
        length = 0.0
        direction: Any = np.zeros(found[0][1].shape, wide)
        for weight, array in found:
            gradient = array.astype(wide)
            norm = float(np.linalg.norm(gradient))
            length += weight * norm
            if norm:
                direction += gradient * (weight / norm)
        norm = float(np.linalg.norm(direction))
        scale = length / self.weight / norm if norm else 0.0
        result: np.ndarray = (direction * scale).astype(dtype)
        return result


def _runs_of_ids(ids: np.ndarray) -> Runs:
    """Groups equal ids, in the order of their hashes."""
    hashes = hashes_of(ids)
    order = np.argsort(hashes, kind="stable")
    ordered = hashes.take(order)
    starts = np.flatnonzero(np.append(True, ordered[1:] != ordered[:-1])[: len(ids)])
    counts = np.diff(np.append(starts, len(ids)))
    return Runs(ids.take(order.take(starts)), order, starts, counts)


def _weighted(weight: float, array: np.ndarray) -> np.ndarray:
    """Returns the array multiplied by the weight, as a new array of at least 32
    bits."""
    dtype = np.float32 if array.dtype.itemsize < 4 else array.dtype
    copied = array.astype(dtype)
    if weight != 1.0:
        copied *= weight
    return copied


@final
class OpenRounds:
    """The open round of each optimizer on the server ``task``, and the contributions to
    it."""

    def __init__(self, task: str) -> None:
        self._task = task
        self._closed: dict[int, HeldRounds] = {}
        """For each optimizer the round that was closed last. It is kept because its
        coordinator may end before another server has closed the same round."""
        self._waiting: dict[int, dict[int, Contribution]] = defaultdict(dict)
        """Contributions that wait for a round, by optimizer and step."""

    def number(self, optimizer: int) -> int:
        """Returns how many rounds of the optimizer were closed on this server."""
        return self._last(optimizer).closed.number + 1

    @property
    def count(self) -> int:
        """Number of contributions that wait."""
        return sum(map(len, self._waiting.values()))

    @property
    def nbytes(self) -> int:
        """Bytes of the contributions that wait."""
        waiting = list(self._waiting.values())
        return sum(each.nbytes for steps in waiting for each in list(steps.values()))

    def contribute(
        self,
        message: Contribute,
        ledger: Ledger | None,
        variables: HeldVariables,
        engine: OptimizerEngine,
    ) -> bool:
        """Keeps the gradients of a step for a round, and drops those of earlier
        attempts of it. Ignores a step that is over, or was a member of a round already.

        Args:
            ledger: Knows which steps are over; None in a backup, which keeps all that
                the primary has kept, maybe before a step was over.

        Returns:
            Whether the contribution was kept.

        Raises:
            NotFoundError: A variable or an optimizer does not exist.
            InvalidArgumentError: A gradient does not fit its variable, or a variable
                has two gradients.
            BusyError: Too many contributions wait.
        """
        given = {each.optimizer: each for each in message.contributions}
        found: dict[int, dict[int, Gradient]] = {number: {} for number in given}
        # Of an optimizer that is not here nothing is kept, not even that a step has no
        # gradient.
        for number in given:
            engine.get(number)
        at, arrays = 0, message.arrays
        for key, code, optimizer, count in message.updates:
            held = variables[key]
            gradient = Gradient(arrays[at : at + count], held.table is not None)
            at += count
            gradients = found.get(optimizer)
            fits = count in (1, 2) and code == gradient.op
            if gradients is None or not fits or key in gradients:
                raise InvalidArgumentError(
                    f"{self._task}: a step contributes operation {code} with {count} "
                    f"arrays of optimizer {optimizer} to variable "
                    f"{held.entry.name!r}: expected one gradient of each variable in a "
                    "round"
                )
            engine.require_fit(optimizer, gradient.op, held, gradient.arrays)
            gradients[key] = gradient
        if at != len(arrays):
            raise InvalidArgumentError(
                f"{self._task}: a contribution has {len(arrays)} arrays, its updates "
                f"take {at}"
            )
        # All are checked before one is kept: the log gets a contribution whole or not.
        new: list[Contribution] = []
        for optimizer, gradients in found.items():
            waiting, each = self._waiting[optimizer], given[optimizer]
            part = merged_part(optimizer)
            if ledger is not None and ledger.is_duplicate(each.step, part):
                continue
            before = waiting.get(each.step)
            if before is not None and before.given.attempt >= each.attempt:
                continue
            if before is None and len(waiting) >= MAX_CONTRIBUTIONS:
                raise BusyError(
                    f"{self._task}: {MAX_CONTRIBUTIONS} contributions to rounds of "
                    "one optimizer wait already"
                )
            new.append(Contribution(each, gradients))
        for kept in new:
            self._waiting[kept.given.optimizer][kept.given.step] = kept
        return bool(new)

    def merging(self, order: RoundOrder) -> Merging | None:
        """Returns the computation that merges the members of the open round; None if
        the round was closed before. An order without members also closes all rounds
        before its round.

        Raises:
            ProtocolError: An earlier round is open, or the rule is unknown.
            NotFoundError: The contribution of a member is not here.
        """
        optimizer, number, rule_number, members = order
        rule, open_now = _RULES.get(rule_number), self.number(optimizer)
        if number < open_now:
            return None
        if (members and number > open_now) or rule is None:
            raise ProtocolError(
                f"{self._task}: round {number} of optimizer {optimizer} is to be "
                f"merged by rule {rule_number}, and round {open_now} is open"
            )
        found: dict[int, list[tuple[float, Gradient]]] = defaultdict(list)
        for step, attempt, weight in members:
            waiting = self._waiting[optimizer].get(step)
            here = None if waiting is None else waiting.given.attempt
            if waiting is None or here != attempt:
                raise NotFoundError(
                    f"{self._task} has lost what run {attempt} of step {step} has "
                    f"contributed to round {number} of optimizer {optimizer}: "
                    f"{'nothing' if here is None else f'run {here}'} is there"
                )
            if not weight:
                # The mean of an empty batch may be NaN, and 0 times NaN is NaN.
                continue
            for key, gradient in waiting.gradients.items():
                found[key].append((weight, gradient))
        total = sum(member.weight for member in members)
        return Merging(rule, total, dict(found))

    def keys(self, order: RoundOrder) -> list[Hashable]:
        """Returns the names that closing a round uses: its optimizer, and the variables
        that its members update."""
        waiting = self._waiting[order.optimizer]
        found = dict.fromkeys(
            key
            for member in order.members
            if member.step in waiting
            for key in waiting[member.step].gradients
        )
        return [("optimizer", order.optimizer), *found]

    def closed(self, message: CloseRound) -> None:
        """Notes that a round was applied; drops the contributions of its members, and
        stale ones."""
        order = message.order
        self._closed[order.optimizer] = HeldRounds(order, [], message.arrays)
        members = {member.step for member in order.members}
        kept, waiting = set(message.kept), self._waiting[order.optimizer]
        # A step below `over` will not contribute again, unless a later round waits for
        # it.
        for step in list(waiting):
            if step in members or (step < message.over and step not in kept):
                del waiting[step]

    def forget(self, keys: Iterable[int]) -> None:
        """Drops the waiting gradients of deleted variables."""
        for waiting in self._waiting.values():
            for contribution in waiting.values():
                for key in keys:
                    contribution.gradients.pop(key, None)

    def messages(self) -> Iterator[Message]:
        """Yields the messages that rebuild these rounds in a backup."""
        yield from self._closed.values()
        for optimizer, waiting in self._waiting.items():
            for given, gradients in waiting.values():
                yield Contribute(0, [given], *updates_of(optimizer, gradients))

    def copy(self, message: HeldRounds) -> None:
        """Sets the state of the last closed round in a backup, as the primary has
        it."""
        self._closed[message.closed.optimizer] = message

    def held(self, after: int) -> HeldRounds:
        """Returns the rounds of the next optimizer whose number is above ``after``."""
        # The owner asks for one optimizer after the other: an answer fits a message.
        known = [number for number in (*self._closed, *self._waiting) if number > after]
        optimizer = min(known, default=0)
        waiting = [each.given for each in self._waiting.get(optimizer, {}).values()]
        return replace(self._last(optimizer), contributions=waiting)

    def _last(self, optimizer: int) -> HeldRounds:
        none = RoundOrder(optimizer, -1, 0, [])
        return self._closed.get(optimizer) or HeldRounds(none, [], ())


def merged_part(optimizer: int) -> int:
    """Returns the part under which the ledger notes that a step's contribution was
    merged. It is negative, as parts of pushes are not."""
    return UNNAMED - optimizer


def updates_of(
    optimizer: int, gradients: dict[int, Gradient]
) -> tuple[list[Update], tuple[np.ndarray, ...]]:
    """Returns gradients as the updates and arrays of a message."""
    updates = [
        Update(key, int(each.op), optimizer, len(each.arrays))
        for key, each in gradients.items()
    ]
    return updates, tuple([x for each in gradients.values() for x in each.arrays])


def merged_push(message: CloseRound, merging: Merging) -> Push:
    """Returns the merged update of a round as a push, which a store applies."""
    optimizer = message.order.optimizer
    updates, arrays = updates_of(optimizer, merging.merged)
    if message.arrays and updates:
        operands = len(message.arrays)
        shared = Update(updates[0].key, int(UpdateOp.OPERANDS), optimizer, operands)
        updates, arrays = [shared, *updates], (*message.arrays, *arrays)
    return Push(0, UNNAMED, 0, 0, updates, arrays)
