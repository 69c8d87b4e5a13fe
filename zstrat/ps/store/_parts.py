"""What the runs of eager steps have done here, so that no two runs of one are mixed.

An eager step pushes as it goes, in *parts*. A part that was applied stays, whatever
becomes of the worker; so the next run has to do the same in the same place, and fails
if it does not. Each update of a part has a name that says where in the user's code it
was made, for which time, and what it does; operands are not part of it, as another
worker has other data.

The law of this file: all parts of a step that were applied were named by runs that did
the same as far as both got, and no run pushes when a later one has begun.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TYPE_CHECKING, Final, NamedTuple, final

from zstrat.errors import (
    InvalidArgumentError,
    ResourceExhaustedError,
    RetryDiffersError,
    StaleSessionError,
)
from zstrat.wire import AppliedParts, PartEntry, Push, PushPart

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ._ledger import Ledger

MAX_PARTS: Final = 2**17
"""Parts whose names are remembered (a quarter of a gigabyte, if all are long), and
steps that have any."""
MAX_NAME_CHARACTERS: Final = 2048
"""Characters of the names of a part."""
ANSWER: Final = 64 * 1024
"""Bytes of parts that one message describes."""
_ENTRY: Final = 32  # of which the answer has 2,048 at the most
_NAME: Final = 5
NOTHING: Final = "nothing more"
_ENDS: Final = {1: "st", 2: "nd", 3: "rd"}


@dataclass(slots=True)
class _Runs:
    """The runs of one eager step: ``attempt`` is the number of the newest one that is
    known, ``names`` says what each part does."""

    attempt: int = 0
    names: dict[int, Sequence[str]] = field(default_factory=dict)


@final
class Parts:
    """The eager steps of one session that may run again; ``task`` is the server."""

    def __init__(self, task: str) -> None:
        self._task = task
        self._steps: dict[int, _Runs] = {}
        self._count = 0
        self._low_water = 0

    def __len__(self) -> int:
        """Returns the number of parts that are remembered."""
        return self._count

    def claim(self, step: int, attempt: int, ledger: Ledger) -> None:
        """Notes that a run begins: earlier runs of the step have no effect from now on.

        Raises:
            StaleSessionError: A later run has begun.
            ResourceExhaustedError: So many steps cannot be remembered.
        """
        self._forget(ledger.low_water)
        if step < ledger.low_water:
            return  # it is over: whatever it pushes is a duplicate
        if step not in self._steps and len(self._steps) >= MAX_PARTS:
            raise self._full()
        runs = self._steps.setdefault(step, _Runs())
        if attempt < runs.attempt:
            raise StaleSessionError(
                f"{self._task}: step {step} runs elsewhere by now, for the "
                f"{ordinal(runs.attempt)} time, and what its {ordinal(attempt)} run "
                "does no longer has an effect"
            )
        runs.attempt = attempt

    def take(
        self, step: int, attempt: int, part: int, names: Sequence[str], ledger: Ledger
    ) -> None:
        """Notes what a part does that is about to be applied, or was before.

        Raises:
            StaleSessionError: A later run has begun.
            RetryDiffersError: Another one was applied in its place.
            ResourceExhaustedError: So many parts cannot be remembered.
            InvalidArgumentError: The names are too long.
        """
        self.claim(step, attempt, ledger)
        runs = self._steps.get(step)
        if runs is None:
            return
        known = runs.names.get(part)
        if known is not None and ledger.is_duplicate(step, part):
            require_same(step, known, names)
            return
        if sum(map(len, names)) > MAX_NAME_CHARACTERS:
            raise InvalidArgumentError(
                f"{self._task}: the names of a part are longer than "
                f"{MAX_NAME_CHARACTERS}"
            )
        if known is None and self._count >= MAX_PARTS:
            raise self._full()
        self._count += known is None
        runs.names[part] = names

    def applied(self, step: int, first: int, ledger: Ledger) -> AppliedParts:
        """Returns the parts of a step that were applied, as many of them as fit into a
        message, from ``first`` on."""
        runs, entries, room = self._steps.get(step, _Runs()), list[PartEntry](), ANSWER
        for part in sorted(part for part in runs.names if part >= first):
            if not ledger.is_duplicate(step, part):
                continue
            names = list(runs.names[part])
            room -= _ENTRY + sum(len(name.encode()) + _NAME for name in names)
            if room < 0 and entries:
                return AppliedParts(entries, part)
            entries.append(PartEntry(part, names))
        return AppliedParts(entries, 0)

    def noted(self) -> Iterator[tuple[int, int, int, Sequence[str]]]:
        """Yields what is known: (step, attempt, part, names). Each step comes first
        with the part -1, which has no names, so that one without parts is listed."""
        for step, runs in self._steps.items():
            yield step, runs.attempt, -1, ()
            for part, names in runs.names.items():
                yield step, runs.attempt, part, names

    def _full(self) -> ResourceExhaustedError:
        return ResourceExhaustedError(
            f"{self._task}: eager steps that run now have pushed {MAX_PARTS} times: "
            "let each one read less often between its updates, or leave out eager=True"
        )

    def _forget(self, low_water: int) -> None:
        """Forgets steps below the mark, as they are over and do not run again."""
        if low_water <= self._low_water:
            return
        self._low_water = low_water
        for step in [step for step in self._steps if step < low_water]:
            self._count -= len(self._steps.pop(step).names)


def require_same(step: int, before: Sequence[str], now: Sequence[str]) -> None:
    """Refuses a run of a part that does something else than an earlier run did.

    Raises:
        RetryDiffersError: Names the first updates that differ.
    """
    for was, does in zip_longest(before, now, fillvalue=NOTHING):
        if was != does:
            raise RetryDiffersError(step, was, does)


class EagerRun(NamedTuple):
    """One run of an eager step; all steps below ``low_water`` are over. ``leases`` as
    in `Push`."""

    step: int
    attempt: int
    low_water: int
    leases: bytes = b""


def named(push: Push, attempt: int, names: Sequence[str]) -> PushPart:
    """Returns a push as a part of a run."""
    return PushPart(
        push.session,
        push.step,
        push.part,
        push.low_water,
        attempt,
        list(names),
        push.updates,
        push.arrays,
        push.leases,
    )


def plain_push(part: PushPart) -> Push:
    """Returns the push that a part is for the variables."""
    return Push(
        part.session,
        part.step,
        part.part,
        part.low_water,
        part.updates,
        part.arrays,
        leases=part.leases,
    )


def ordinal(number: int) -> str:
    """``1st``, ``2nd``, ``3rd``, ``4th``."""
    teens = number % 100 in (11, 12, 13)
    return f"{number}{'th' if teens else _ENDS.get(number % 10, 'th')}"
