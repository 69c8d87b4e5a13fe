"""The updates that a store has applied: pushes, runs of eager steps, leased examples.

Each push is applied exactly once, known in bounded memory. A push of a closure is named
by ``(step, part)``. The coordinator retries a closure when a worker is lost, and then
cannot know whether its push had arrived; the ledger does. It forgets a step when the
coordinator's low-water mark says that it is over for good, and answers for all of them
with that one number. Steps of a window above the mark can be remembered, so what is
remembered is bounded, and the step at the mark, whose end alone raises it, can always
be.

A program updates variables outside of closures, too. Such an own update has a number
that its *writer*, the process that sends it, gave it, so that it may be sent again when
nobody knows whether it arrived. Law: the mark of a writer is raised by that writer's
pushes alone.

No two runs of one eager step are mixed. An eager step pushes as it goes, in *parts*. A
part that was applied stays, whatever becomes of the worker; so the next run has to do
the same in the same place, and fails if it does not. Each update of a part has a name
that says where in the user's code it was made, for which time, and what it does;
operands are not part of it, as another worker has other data.

Law: all parts of a step that were applied were named by runs that did the same as far
as both got, and no run pushes when a later one has begun.

Examples of leased datasets are done by pushes. A push carries the ranges that its step
has drawn, and they are noted as it is applied: so they are in the log, in copies, and
in what the next program of the session finds.
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

    from zstrat.wire import StepRun


UNNAMED: Final = -1
"""The step of a push that belongs to no closure: never a duplicate."""

CAPACITY: Final = 2**20
"""Steps above the mark that can be remembered: twice as many as a coordinator lets be
under way, which needs a moment to learn how far the mark has risen."""


class Ledger:
    """The applied ``(step, part)`` of one session, above the low-water mark."""

    def __init__(self, capacity: int | None = None) -> None:
        self._capacity = CAPACITY if capacity is None else capacity
        self._applied: dict[int, set[int]] = {}
        self.low_water = 0
        self._over: list[tuple[int, int]] = []
        """Runs ``[first, end)`` of steps that are over, apart and in order."""

    def __len__(self) -> int:
        return len(self._applied)

    def is_duplicate(self, step: int, part: int) -> bool:
        """Returns True if the push was applied, or if its step is over."""
        if step == UNNAMED:
            return False
        # Cheapest first: nearly all pushes are new, and above the mark.
        if step < self.low_water or part in self._applied.get(step, ()):
            return True
        return bool(self._over) and self._is_over(step)

    def has_applied(self, step: int) -> bool:
        """Returns whether any push of a step above the mark was applied."""
        return step in self._applied

    def close_steps(self, over: Iterable[StepRun]) -> None:
        """Notes that these steps are over; remembers all the same what they have
        applied."""
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
        """Refuses a step that could not be remembered.

        Raises:
            BusyError: It is too far above the low-water mark.
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
        """Steps with their parts, all that are remembered."""
        return [(step, part) for step, parts in self._applied.items() for part in parts]

    @property
    def over(self) -> Sequence[tuple[int, int]]:
        """Runs ``[first, end)`` of steps above the mark that are over."""
        return self._over

    def _is_over(self, step: int) -> bool:
        place = bisect_right(self._over, step, key=itemgetter(0))
        return place > 0 and step < self._over[place - 1][1]

    def raise_to(self, low_water: int) -> None:
        """Notes that all steps below the mark are over, and forgets them. A mark that
        is lower than the present one came late, and is ignored."""
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
"""Processes whose own updates are remembered, the latest ones: a session has the
program that holds it, or one per worker, and those that were restarted."""


@final
class Writers:
    """The own updates of all processes in one session on the server ``task``."""

    def __init__(self, task: str) -> None:
        self._task = task
        self._ledgers: OrderedDict[int, Ledger] = OrderedDict()

    def __len__(self) -> int:
        """Returns the number of updates of all writers that are remembered."""
        return sum(map(len, self._ledgers.values()))

    def ledger_of(self, push: Push) -> Ledger:
        """Returns the ledger of an own update, with the mark of its writer as it says.

        Raises:
            InvalidArgumentError: Its writer counts this very push among those that are
                over.
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
        """Returns the ledger of a process, which is the latest now."""
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
        """Yields each writer with its ledger, the one that was used last at the end."""
        return self._ledgers.items()


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
        """Returns the parts of a step that were applied, as many of them as fit into a
        message, from ``first`` on."""
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


PACKED: Final = 512
"""Ranges of one message: they fit into a header."""


@final
class DoneLeases:
    """The ranges of leased examples that are done, by dataset and epoch: neighbours
    are joined, and the others in order."""

    def __init__(self) -> None:
        self._runs: dict[tuple[int, int], list[tuple[int, int]]] = {}

    @staticmethod
    def require(packed: bytes) -> None:
        """Checks that these are ranges.

        Raises:
            InvalidArgumentError: They are not.
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
        """Notes ranges as done; one without examples forgets those of its dataset."""
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
        """Yields all ranges, at most `PACKED` at a time."""
        ranges = [
            LEASE.pack(*key, start, stop - start)
            for key, runs in self._runs.items()
            for start, stop in runs
        ]
        for at in range(0, len(ranges), PACKED):
            yield b"".join(ranges[at : at + PACKED])
