"""Rounds: contributions of steps that wait here, and the update that is made of them.

A contribution is the gradients of one run of a step, and changes no variable. The order
to close a round names its members; their gradients are merged in that order and go
through the optimizer once. The law of this file: what a round applies depends on that
order and on its members alone, not on when contributions came, nor on what else waits.
So every server applies the same round, and a backup repeats it to the last bit.

After Chen et al., "Revisiting Distributed Synchronous SGD" (2016), with one member set
for all servers. `MergeRule.RDA` is from Douillard et al., "Decoupled DiLoCo" (2026).
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, NamedTuple, final

import numpy as np

from zstrat.errors import (
    BusyError,
    InvalidArgumentError,
    ProtocolError,
)
from zstrat.rows import runs, sums
from zstrat.wire import (
    CloseRound,
    Contribute,
    CopyRounds,
    MergeRule,
    PullMerged,
    Push,
    RoundNumber,
    Update,
    UpdateOp,
)

from ._ledger import UNNAMED

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Iterator, Sequence

    from zstrat.ps.engine._engine import OptimizerEngine
    from zstrat.wire import Message, RoundMember

    from ._ledger import Ledger
    from ._variables import HeldVariables

MAX_CONTRIBUTIONS: Final = 4096
"""Contributions to rounds of one optimizer that may wait on a server."""

_RULES: Final = {int(rule): rule for rule in MergeRule}


class Gradient(NamedTuple):
    """A gradient of a variable: one array of its shape, or indices ``[n]`` and rows
    ``[n, ...]``."""

    arrays: Sequence[np.ndarray]

    @property
    def is_of_rows(self) -> bool:
        return len(self.arrays) == 2

    @property
    def op(self) -> UpdateOp:
        return UpdateOp.OPTIMIZE_ROWS if self.is_of_rows else UpdateOp.OPTIMIZE


class Contribution(NamedTuple):
    """The gradients of one run of a step for one optimizer, by key of the variable."""

    attempt: int
    gradients: dict[int, Gradient]

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for each in self.gradients.values() for x in each.arrays)


@final
@dataclass(slots=True)
class Merging:
    """The gradients of a round by variable, each with its weight, in the order of the
    members. `compute` may run on any thread."""

    rule: MergeRule
    weight: float
    """The sum of the weights of all members."""
    gradients: dict[int, list[tuple[float, Gradient]]]
    merged: dict[int, Gradient] = field(default_factory=dict)

    @property
    def work(self) -> int:
        """Estimates the bytes that it moves, as `work_of`."""
        parts = [g for found in self.gradients.values() for _, g in found]
        return 2 * sum(array.nbytes for each in parts for array in each.arrays)

    def compute(self) -> None:
        with np.errstate(all="ignore"):  # what is too large is inf, as in XLA
            for key, found in self.gradients.items():
                self.merged[key] = self._merged(found)

    def _merged(self, found: Sequence[tuple[float, Gradient]]) -> Gradient:
        if all(gradient.is_of_rows for _, gradient in found):
            return self._merged_rows(found)
        dense = [
            (w, gradient.arrays[0]) for w, gradient in found if not gradient.is_of_rows
        ]
        of_rows = [(w, gradient) for w, gradient in found if gradient.is_of_rows]
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
        known = runs(indices)
        return known.unique, sums(known, np.concatenate(parts))

    def _averaged(self, total: np.ndarray) -> np.ndarray:
        if self.rule is not MergeRule.SUM:
            total /= self.weight
        return total

    def _rda(self, found: Sequence[tuple[float, np.ndarray]]) -> np.ndarray:
        dtype = found[0][1].dtype
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


def _weighted(weight: float, array: np.ndarray) -> np.ndarray:
    """Returns a new array, of 32 bits at least."""
    dtype = np.float32 if array.dtype.itemsize < 4 else array.dtype
    copied = array.astype(dtype)
    if weight != 1.0:
        copied *= weight
    return copied


@final
class OpenRounds:
    """The open round of each optimizer on the server ``task``."""

    def __init__(self, task: str) -> None:
        self._task = task
        self._numbers: dict[int, int] = {}
        """How many rounds of each optimizer were closed."""
        self._waiting: dict[int, dict[int, Contribution]] = defaultdict(dict)
        """Contributions by optimizer and step."""

    def number(self, optimizer: int) -> int:
        """Returns how many rounds of the optimizer were closed here."""
        return self._numbers.get(optimizer, 0)

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
        """Keeps the gradients of a step; drops those of an earlier attempt of it, and
        those of a step that is over.

        Args:
            ledger: Knows which steps are over; None in a backup, as the primary has
                kept it, maybe before its step was over.

        Returns:
            Whether it was kept.

        Raises:
            NotFoundError: A variable or an optimizer does not exist.
            InvalidArgumentError: A gradient does not fit its variable, or there are two
                of one variable.
            BusyError: Too many contributions wait.
        """
        found: dict[int, dict[int, Gradient]] = defaultdict(dict)
        at, arrays = 0, message.arrays
        for key, code, optimizer, count in message.updates:
            held = variables[key]
            gradient = Gradient(arrays[at : at + count])
            at += count
            if count not in (1, 2) or code != gradient.op or key in found[optimizer]:
                raise InvalidArgumentError(
                    f"{self._task}: step {message.step} contributes operation {code} "
                    f"with {count} arrays to variable {held.entry.name!r}: expected "
                    "one gradient of each variable in a round"
                )
            engine.require_fit(optimizer, gradient.op, held, gradient.arrays)
            found[optimizer][key] = gradient
        if at != len(arrays):
            raise InvalidArgumentError(
                f"{self._task}: a contribution has {len(arrays)} arrays, its updates "
                f"take {at}"
            )
        if ledger is not None and ledger.is_duplicate(message.step, UNNAMED):
            return False
        for optimizer, gradients in found.items():
            waiting = self._waiting[optimizer]
            before = waiting.get(message.step)
            if before is not None and before.attempt >= message.attempt:
                continue
            if before is None and len(waiting) >= MAX_CONTRIBUTIONS:
                raise BusyError(
                    f"{self._task}: {MAX_CONTRIBUTIONS} contributions to rounds of "
                    "one optimizer wait already"
                )
            waiting[message.step] = Contribution(message.attempt, gradients)
        return True

    def merging(self, message: CloseRound | PullMerged) -> Merging | None:
        """Returns how the members of the open round are merged; None if that round was
        closed before.

        Raises:
            ProtocolError: An earlier round is open, the rule is unknown, or another run
                of a member is here.
        """
        optimizer, open_now = message.optimizer, self.number(message.optimizer)
        rule = _RULES.get(message.rule)
        if message.number < open_now:
            return None
        if message.number > open_now or rule is None:
            raise ProtocolError(
                f"{self._task}: round {message.number} of optimizer {optimizer} is to "
                f"be merged by rule {message.rule}, and round {open_now} is open"
            )
        found: dict[int, list[tuple[float, Gradient]]] = defaultdict(list)
        for step, attempt, weight in message.members:
            waiting = self._waiting[optimizer].get(step)
            if waiting is None:
                continue  # the step has no gradient of a variable on this server
            if waiting.attempt != attempt:
                raise ProtocolError(
                    f"{self._task}: run {attempt} of step {step} is a member of round "
                    f"{message.number} of optimizer {optimizer}, but run "
                    f"{waiting.attempt} is here"
                )
            if not weight:
                continue  # the mean of an empty batch may be NaN, and 0 times NaN is
            for key, gradient in waiting.gradients.items():
                found[key].append((weight, gradient))
        total = sum(member.weight for member in message.members)
        return Merging(rule, total, dict(found))

    def keys(self, optimizer: int, members: Sequence[RoundMember]) -> list[Hashable]:
        """Returns the names of the variables that the members update."""
        waiting = self._waiting[optimizer]
        found = dict.fromkeys(
            key
            for member in members
            if member.step in waiting
            for key in waiting[member.step].gradients
        )
        return [("optimizer", optimizer), *found]

    def closed(self, message: CloseRound) -> None:
        """Notes that a round was applied; drops its contributions, and stale ones."""
        self._numbers[message.optimizer] = message.number + 1
        members = {(member.step, member.attempt) for member in message.members}
        kept, waiting = set(message.kept), self._waiting[message.optimizer]
        for step, contribution in list(waiting.items()):
            is_stale = step < message.over and step not in kept
            if is_stale or (step, contribution.attempt) in members:
                del waiting[step]

    def forget(self, keys: Iterable[int]) -> None:
        """Drops the gradients of variables that are gone."""
        for waiting in self._waiting.values():
            for step, contribution in list(waiting.items()):
                for key in keys:
                    contribution.gradients.pop(key, None)
                if not contribution.gradients:
                    del waiting[step]

    def messages(self) -> Iterator[Message]:
        """Yields the messages that build these rounds in a backup."""
        if self._numbers:
            yield CopyRounds([RoundNumber(*each) for each in self._numbers.items()])
        for optimizer, waiting in self._waiting.items():
            for step, each in waiting.items():
                updates, arrays = updates_of(optimizer, each.gradients)
                yield Contribute(0, step, each.attempt, updates, arrays)

    def copy(self, message: CopyRounds) -> None:
        """Sets the open rounds, in a backup."""
        self._numbers.update(message.rounds)


def updates_of(
    optimizer: int, gradients: dict[int, Gradient]
) -> tuple[list[Update], tuple[np.ndarray, ...]]:
    """Returns gradients in the form of messages."""
    updates = [
        Update(key, int(each.op), optimizer, len(each.arrays))
        for key, each in gradients.items()
    ]
    return updates, tuple([x for each in gradients.values() for x in each.arrays])


def merged_push(message: CloseRound, merging: Merging) -> Push:
    """Returns the update of a round as a push."""
    updates, arrays = updates_of(message.optimizer, merging.merged)
    if message.arrays and updates:
        operands = len(message.arrays)
        shared = Update(
            updates[0].key, int(UpdateOp.OPERANDS), message.optimizer, operands
        )
        updates, arrays = [shared, *updates], (*message.arrays, *arrays)
    return Push(0, UNNAMED, 0, 0, updates, arrays)
