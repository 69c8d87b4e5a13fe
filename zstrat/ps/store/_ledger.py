"""Ledgers of what a store has applied: pushes, parts of eager steps, ranges of leased
examples.

Each push is applied exactly once, and the memory to ensure that is bounded. A push of a
closure is named by ``(step, part)``. The coordinator retries a closure when a worker is
lost, and then cannot know whether its push had arrived; the ledger does. It forgets a
step when the coordinator's low-water mark has passed it: the mark is the number below
which all steps are over for good, so that pushes of these count as duplicates. Only
steps in a range of `CAPACITY` above the mark are remembered, so the memory is bounded,
and the step at the mark, whose end alone raises the mark, can always be remembered.

A program updates variables outside of closures, too. Such an *own* update gets a number
from its *writer*, the process that sends it, so that it may be sent again when it is
unknown whether it arrived. Law: the low-water mark of a writer is raised by that
writer's pushes alone.

No two runs of one eager step are mixed. An eager step pushes while it runs, in *parts*.
A part that was applied stays, whatever happens to the worker; so the next run has to
push the same part, and fails if it does not. Each update of a part has a name that says
at which line of the user's code it was made, how many times before, and what it does;
operands are not part of the name, as another worker has other data.

Law: all applied parts of a step were named by runs that did the same as far as both
got, and no run pushes when a later run has begun.

A push also says which examples of leased datasets are done: it carries the ranges that
its step has drawn, and they are noted when the push is applied. So they are in the log
for backups, in copies, and in the state that the next program of the session finds.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import OrderedDict
from dataclasses import dataclass, field
from itertools import zip_longest
from operator import itemgetter
from typing import TYPE_CHECKING, Final, NamedTuple, final

from zstrat.errors import (
    BusyError,
    InvalidArgumentError,
    ResourceExhaustedError,
    RetryDiffersError,
    StaleSessionError,
)
from zstrat.wire import LEASE, AppliedParts, PartEntry, Push, PushPart

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import numpy as np

    from zstrat.wire import Exchange, StepRun


UNNAMED: Final = -1
"""The step of a push that belongs to no closure; such a push is never a duplicate."""

CAPACITY: Final = 2**20
"""Number of steps above the mark that can be remembered: twice as many as a coordinator
lets be under way, because it learns a moment later how far the mark has risen."""


class Ledger:
    """The applied ``(step, part)`` pairs of one session, above the low-water mark."""

    def __init__(self, capacity: int | None = None) -> None:
        self._capacity = CAPACITY if capacity is None else capacity
        self._applied: dict[int, set[int]] = {}
        self.low_water = 0
        self._over: list[tuple[int, int]] = []
        """Ranges ``[first, end)`` of steps above the low-water mark that are over,
        disjoint and in order."""

    def __len__(self) -> int:
        return len(self._applied)

    def is_duplicate(self, step: int, part: int) -> bool:
        """Returns whether the push was applied, or its step is over."""
        if step == UNNAMED:
            return False
        # Cheapest first: nearly all pushes are new, and above the mark.
        if step < self.low_water or part in self._applied.get(step, ()):
            return True
        return bool(self._over) and self._is_over(step)

    def has_applied(self, step: int) -> bool:
        """Returns whether any push of a step above the low-water mark was applied."""
        return step in self._applied

    def close_steps(self, over: Iterable[StepRun]) -> None:
        """Notes that these steps are over; still remembers what they have applied."""
        merged: list[tuple[int, int]] = []
        for first, end in sorted([*self._over, *over]):
            # The mark alone answers for what is below it.
            if end <= max(first, self.low_water):
                continue
            if merged and first <= merged[-1][1]:
                merged[-1] = merged[-1][0], max(end, merged[-1][1])
            else:
                merged.append((first, end))
        self._over = merged

    def admit(self, step: int) -> None:
        """Checks that a step can be remembered.

        Raises:
            BusyError: The step is too far above the low-water mark.
        """
        if step - self.low_water >= self._capacity:
            raise BusyError(
                f"step {step} cannot be remembered: {self._capacity} steps above the "
                f"low-water mark {self.low_water} can be; wait until older steps end"
            )

    def record(self, step: int, part: int) -> None:
        # Below the mark nothing is remembered: it would never be forgotten.
        if step != UNNAMED and step >= self.low_water:
            self._applied.setdefault(step, set()).add(part)

    @property
    def applied(self) -> list[tuple[int, int]]:
        """All remembered ``(step, part)`` pairs."""
        return [(step, part) for step, parts in self._applied.items() for part in parts]

    @property
    def over(self) -> Sequence[tuple[int, int]]:
        """Ranges ``[first, end)`` of steps above the low-water mark that are over."""
        return self._over

    def _is_over(self, step: int) -> bool:
        place = bisect_right(self._over, step, key=itemgetter(0))
        return place > 0 and step < self._over[place - 1][1]

    def raise_to(self, low_water: int) -> None:
        """Raises the low-water mark: all steps below it are over, and are forgotten. A
        mark that is lower than the present one came late, and is ignored."""
        old, new = self.low_water, low_water
        if new <= old:
            return
        self.low_water = new
        if self._over:
            self._over = [run for run in self._over if run[1] > new]
        # The mark moves by a few steps at a time; a jump is cheaper by a sweep.
        if new - old <= len(self._applied):
            for step in range(old, new):
                self._applied.pop(step, None)
        else:
            self._applied = {s: p for s, p in self._applied.items() if s >= new}


WRITERS: Final = 4096
"""Number of processes whose updates outside of closures are remembered, those that
pushed latest: a session has one program, or one per worker, and processes that were
restarted."""


@final
class Writers:
    """The ledgers of own updates (outside of closures) of all processes in one session
    on the server ``task``."""

    def __init__(self, task: str) -> None:
        self._task = task
        self._ledgers: OrderedDict[int, Ledger] = OrderedDict()

    def __len__(self) -> int:
        """Returns the number of remembered updates of all writers."""
        return sum(map(len, self._ledgers.values()))

    def ledger_of(self, push: Push) -> Ledger:
        """Returns the ledger of the process that has sent an update outside of closures
        (its writer); raises the writer's low-water mark as the push says.

        Raises:
            InvalidArgumentError: The push says that it is itself below the mark of its
                writer.
        """
        if push.low_water > push.step:
            raise InvalidArgumentError(
                f"{self._task}: update {push.step} of a program says that all of its "
                f"updates below {push.low_water} are over, itself among them"
            )
        ledger = self.of(push.writer)
        ledger.raise_to(push.low_water)
        return ledger

    def of(self, writer: int) -> Ledger:
        """Returns the ledger of a process, and notes that this was used last."""
        ledger = self._ledgers.get(writer)
        if ledger is None:
            ledger = self._ledgers[writer] = Ledger()
            # It is most likely gone: what it sends again from now on is applied again.
            if len(self._ledgers) > WRITERS:
                self._ledgers.popitem(last=False)
        self._ledgers.move_to_end(writer)
        return ledger

    @property
    def ledgers(self) -> Iterable[tuple[int, Ledger]]:
        """Yields each writer with its ledger, in the order of their last use."""
        return self._ledgers.items()


MAX_PARTS: Final = 2**17
"""The most parts whose names are remembered (a quarter of a gigabyte, if all names are
long), and the most steps that have any parts."""
MAX_NAME_CHARACTERS: Final = 2048
"""The most characters that the names of one part may have."""
ANSWER: Final = 64 * 1024
"""The most bytes of parts that one message describes."""
_ENTRY: Final = 32  # of which the answer has 2,048 at the most
_NAME: Final = 5
NOTHING: Final = "nothing more"
_ENDS: Final = {1: "st", 2: "nd", 3: "rd"}


@dataclass(slots=True)
class _Runs:
    """The runs of one eager step: ``attempt`` is the number of the newest known run,
    ``names`` has the names of the updates of each part."""

    attempt: int = 0
    names: dict[int, Sequence[str]] = field(default_factory=dict)


@final
class Parts:
    """The applied parts of eager steps of one session that may run again; errors name
    the server ``task``."""

    def __init__(self, task: str) -> None:
        self._task = task
        self._steps: dict[int, _Runs] = {}
        self._count = 0
        self._low_water = 0

    def __len__(self) -> int:
        """Returns the number of parts that are remembered."""
        return self._count

    def claim(self, step: int, attempt: int, ledger: Ledger) -> None:
        """Notes that a run of an eager step begins: earlier runs of the step have no
        effect from now on.

        Raises:
            StaleSessionError: A later run of the step has begun.
            ResourceExhaustedError: Too many steps are remembered already.
        """
        # The mark rises often and eager steps are few, so they follow it when one
        # comes.
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

    def note(
        self, step: int, attempt: int, part: int, names: Sequence[str], ledger: Ledger
    ) -> None:
        """Notes the names of a part that is about to be applied, or compares them with
        those that were noted before.

        Raises:
            StaleSessionError: A later run of the step has begun.
            RetryDiffersError: An earlier run has applied another part under this
                number.
            ResourceExhaustedError: Too many parts are remembered already.
            InvalidArgumentError: The names are too long.
        """
        self.claim(step, attempt, ledger)
        runs = self._steps.get(step)
        if runs is None:
            return
        known = runs.names.get(part)
        # Applied already: this run has to do the same. One that was only noted may be
        # replaced.
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
        """Returns the applied parts of a step from number ``first`` on, as many as fit
        into a message."""
        runs, entries, room = self._steps.get(step, _Runs()), list[PartEntry](), ANSWER
        for part in sorted(part for part in runs.names if part >= first):
            if not ledger.is_duplicate(step, part):
                continue
            names = list(runs.names[part])
            room -= _ENTRY + sum(len(name.encode()) + _NAME for name in names)
            # One part always goes, whatever its size: the sender asks again from the
            # next one on.
            if room < 0 and entries:
                return AppliedParts(entries, part)
            entries.append(PartEntry(part, names))
        return AppliedParts(entries, 0)

    def noted(self) -> Iterator[tuple[int, int, int, Sequence[str]]]:
        """Yields all remembered parts: (step, attempt, part, names). Each step comes
        first with the part -1 and no names, so that a step without parts is yielded,
        too."""
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
        """Forgets steps below the low-water mark, because they are over and do not run
        again."""
        if low_water <= self._low_water:
            return
        self._low_water = low_water
        for step in [step for step in self._steps if step < low_water]:
            self._count -= len(self._steps.pop(step).names)


def require_same(step: int, before: Sequence[str], now: Sequence[str]) -> None:
    """Compares the names of a part with those that an earlier run of the step gave it.

    Raises:
        RetryDiffersError: The names differ; the error has the first ones that do.
    """
    for was, does in zip_longest(before, now, fillvalue=NOTHING):
        if was != does:
            raise RetryDiffersError(step, was, does)


class EagerRun(NamedTuple):
    """One run of an eager step; all steps below ``low_water`` are over. ``leases`` are
    those of its pushes, as in `Push`."""

    step: int
    attempt: int
    low_water: int
    leases: bytes = b""


def named(push: Push, attempt: int, names: Sequence[str]) -> PushPart:
    """Returns a push as a part of run ``attempt``, whose updates have these names."""
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


def plain_push(message: PushPart | Exchange, arrays: Sequence[np.ndarray]) -> Push:
    """Returns a part of an eager step, or the push of an exchange, as a push; its
    operands are ``arrays``."""
    return Push(
        message.session,
        message.step,
        message.part,
        message.low_water,
        message.updates,
        tuple(arrays),
        leases=message.leases,
    )


def ordinal(number: int) -> str:
    """Returns a number in English ordinal form: ``1st``, ``2nd``, ``3rd``, ``4th``."""
    teens = number % 100 in (11, 12, 13)
    return f"{number}{'th' if teens else _ENDS.get(number % 10, 'th')}"


PACKED: Final = 512
"""The most ranges of one message, which fit into a header."""


@final
class DoneLeases:
    """The ranges of leased examples that are done, by dataset and epoch. Ranges that
    touch are joined; they are kept in order."""

    def __init__(self) -> None:
        self._runs: dict[tuple[int, int], list[tuple[int, int]]] = {}

    @staticmethod
    def require(packed: bytes) -> None:
        """Checks that packed bytes are ranges of examples.

        Raises:
            InvalidArgumentError: The bytes are not ranges.
        """
        if len(packed) % LEASE.size:
            raise InvalidArgumentError(
                f"the leases of a push have {len(packed)} bytes, no multiple of "
                f"{LEASE.size}"
            )
        for _, _, start, size in LEASE.iter_unpack(packed):
            # Joined ranges are packed again, for copies and for the next program.
            if start + size >= 2**64:
                raise InvalidArgumentError(
                    f"the leases of a push have {size} examples from {start} on: their "
                    "end is above 64 bits"
                )

    def note(self, packed: bytes) -> None:
        """Notes leased ranges as done. A range of size 0 makes the ledger forget all
        ranges of that dataset, which was restored or begins again."""
        for dataset, epoch, start, size in LEASE.iter_unpack(packed):
            if not size:
                # It was restored, or begins again: what was done is to be done again.
                kept = [key for key in self._runs if key[0] != dataset]
                self._runs = {key: self._runs[key] for key in kept}
                continue
            stop = start + size
            runs = self._runs.setdefault((dataset, epoch), [])
            # By the ends, and then by the beginnings: the runs that overlap this range
            # or touch it.
            first = bisect_left(runs, start, key=itemgetter(1))
            last = bisect_right(runs, stop, key=itemgetter(0))
            if first < last:  # it touches these
                start, stop = min(start, runs[first][0]), max(stop, runs[last - 1][1])
            runs[first:last] = [(start, stop)]

    def packed(self) -> Iterator[bytes]:
        """Yields all ranges that are done, packed, at most `PACKED` at a time."""
        ranges = [
            LEASE.pack(*key, start, stop - start)
            for key, runs in self._runs.items()
            for start, stop in runs
        ]
        for at in range(0, len(ranges), PACKED):
            yield b"".join(ranges[at : at + PACKED])
