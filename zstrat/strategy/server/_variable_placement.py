"""On which parameter server a new variable is put, and under which key.

`VariablePlacement` decides on the ps: round robin in the order of creation, one counter
per strategy, as TF does, or by bytes. `Numbers` counts the keys in the same order.

Law of the file: what a failed creation took is given out again, because programs that
share parameter servers tell a variable by its place among those that were created.
Part of it may be on a ps all the same, and has to go before: that is
`Numbers.doubtful`.
"""

from __future__ import annotations

import contextlib
import enum
from typing import TYPE_CHECKING, Final, final

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from zstrat.variables import VariableHandle, VariableSpec

    from ._variable_plan import VariablePlan

_BLOCK_BITS: Final = 20
"""A session has a block of 2**20 numbers, far more than a program makes variables."""

_BLOCKS: Final = 2**40
"""Blocks until sessions have the same again: with those bits a number has 60."""


class PlacementRule(enum.StrEnum):
    """Which ps a new component goes to."""

    ROUND_ROBIN = "round_robin"
    BYTES = "bytes"


class VariablePlacement:
    """Decides on which ps the next component lives."""

    def __init__(
        self, ps_count: int, rule: PlacementRule = PlacementRule.ROUND_ROBIN
    ) -> None:
        self._rule = rule
        self._placed = 0
        self._bytes = [0] * ps_count

    def place(self, sizes: Sequence[int], beside: int | None = None) -> list[int]:
        """Task indices for new components of these bytes: in turn, or each to the ps
        with the fewest bytes, the first of several. ``beside`` puts all of them there
        and leaves the turn of the others as it is."""
        where = []
        for size in sizes:
            ps = self._next() if beside is None else beside
            self._bytes[ps] += size
            where.append(ps)
        return where

    def mark(self) -> tuple[int, list[int]]:
        """Whose turn it is and what lies where, for `back_to`."""
        return self._placed, list(self._bytes)

    def back_to(self, mark: tuple[int, list[int]]) -> None:
        """What was placed since is not there."""
        self._placed, self._bytes = mark[0], list(mark[1])

    def free(self, ps: int, size: int) -> None:
        """A component of that many bytes is gone."""
        self._bytes[ps] -= size

    def _next(self) -> int:
        if self._rule is PlacementRule.BYTES:
            return min(range(len(self._bytes)), key=self._bytes.__getitem__)
        ps = self._placed % len(self._bytes)
        self._placed += 1
        return ps


@final
class Numbers:
    """The keys and optimizer ids of one session, counted from the number of the first
    session that had them. Whoever changes them has a lock."""

    def __init__(self, origin: int, placement: VariablePlacement) -> None:
        self._placement = placement
        self._first = first_number(origin)
        self._created = self._optimizers = self._first
        self._variables_at_risk: list[VariableSpec] = []
        self._optimizers_at_risk: list[int] = []

    def has_variable(self, spec: VariableSpec) -> bool:
        """Whether a variable was created in this session."""
        return self._first < spec.key <= self._created

    def has_optimizer(self, number: int) -> bool:
        """Whether an optimizer was created in this session."""
        return self._first < number <= self._optimizers

    @property
    def doubtful(self) -> tuple[list[VariableSpec], list[int]]:
        """Variables and optimizers of a creation that failed, or is under way: nobody
        knows which of them are there."""
        return list(self._variables_at_risk), list(self._optimizers_at_risk)

    def settled(self) -> None:
        """Of what was doubtful nothing is left, or all is as it should be."""
        self._variables_at_risk.clear()
        self._optimizers_at_risk.clear()

    @contextlib.contextmanager
    def taking(self) -> Iterator[None]:
        """A creation: if it fails, what is taken inside is as if it never had been."""
        before = self._created, self._optimizers, self._placement.mark()
        try:
            yield
        except BaseException:  # to the caller, who has created nothing
            self._created, self._optimizers, mark = before
            self._placement.back_to(mark)
            raise
        self.settled()

    def components(
        self, new: VariablePlan, beside: VariableHandle | None
    ) -> list[VariableSpec]:
        """The components of a new variable, with keys and places."""
        where = self._placement.place(
            new.sizes, None if beside is None else beside.spec.ps
        )
        first = self._created + 1
        self._created += len(where)
        specs = [new.spec(n, first + n, ps) for n, ps in enumerate(where)]
        self._variables_at_risk += specs
        return specs

    def optimizer(self) -> int:
        """The number of a new optimizer."""
        self._optimizers += 1
        self._optimizers_at_risk.append(self._optimizers)
        return self._optimizers

    def give_back(self, optimizer: int) -> None:
        """Nobody has a handle to that one; if others came after it, it stays."""
        if optimizer == self._optimizers:
            self._optimizers -= 1
            self._optimizers_at_risk.append(optimizer)

    def freed(self, variables: Sequence[VariableHandle]) -> None:
        """These were deleted. Their keys never return: somebody may have a handle."""
        for variable in variables:
            self._placement.free(variable.spec.ps, variable.spec.nbytes)


def first_number(session: int) -> int:
    """What the keys and optimizer ids of a session are counted from.

    A handle that outlives its session must not name a variable of the next one by
    chance. Below 2**60, which fits the 63 bits of a signed integer on the wire.
    """
    return session % _BLOCKS << _BLOCK_BITS
