"""The rounds that a program has left on the parameter servers of its session, for the
program that continues it. Decides only.

A contribution that every server has is one to the open round of the next program. One
that only some have is of a step that was under way: it has no effect. The order to
close a round may have reached some servers only; the others get it with the same
members. So each contribution is in one round, on all servers, or in none.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from zstrat.wire import HeldRounds, StepContribution

    HeldOnServers = Sequence[Mapping[int, HeldRounds]]
    """For each server the rounds that it has, by number of the optimizer."""


def inherited_rounds(held: HeldOnServers) -> dict[int, HeldRounds]:
    """Returns, by optimizer, the round that all servers have to close if they have not,
    and the contributions to the next one, in the order of their steps."""
    decided: dict[int, HeldRounds] = {}
    for optimizer in sorted({number for each in held for number in each}):
        there = [each[optimizer] for each in held if optimizer in each]
        last = max(there, key=lambda each: each.closed.number)
        common: set[StepContribution] = set()
        if len(there) == len(held):
            common = set.intersection(*[set(each.contributions) for each in there])
        decided[optimizer] = replace(last, contributions=sorted(common))
    return decided


def first_free_step(held: HeldOnServers) -> int:
    """Returns the first step number that no contribution has, the least one that the
    next program may use."""
    taken = [
        given.step
        for each in held
        for rounds in each.values()
        for given in rounds.contributions
    ]
    return max(taken, default=0) + 1
