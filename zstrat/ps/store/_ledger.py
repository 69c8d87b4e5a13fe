"""Which pushes were applied already: each exactly once, known in bounded memory.

A push of a closure is named by ``(step, part)``. The coordinator retries a closure when
a worker is lost, and then cannot know whether its push had arrived; the ledger does.
It forgets a step when the coordinator's low-water mark says that it is over for good,
and answers for all of them with that one number. Steps of a window above the mark can
be remembered, so what is remembered is bounded, and the step at the mark, whose end
alone raises it, can always be.

A program updates variables outside of closures, too. Such an own update has a number
that its *writer*, the process that sends it, gave it, so that it may be sent again when
nobody knows whether it arrived. The law of this file: the mark of a writer is raised by
that writer's pushes alone.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from operator import itemgetter
from typing import TYPE_CHECKING, Final, final

from zstrat.errors import BusyError, InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from zstrat.wire import Push, StepRun

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
        if step < self.low_water or part in self._applied.get(step, ()):
            return True
        return bool(self._over) and self._is_over(step)

    def has_applied(self, step: int) -> bool:
        """Returns whether any push of a step above the mark was applied."""
        return step in self._applied

    def close(self, over: Iterable[StepRun]) -> None:
        """Notes that these steps are over; remembers all the same what they have
        applied."""
        merged: list[tuple[int, int]] = []
        for first, end in sorted([*self._over, *over]):
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
            if len(self._ledgers) > WRITERS:
                self._ledgers.popitem(last=False)
        self._ledgers.move_to_end(writer)
        return ledger

    @property
    def ledgers(self) -> Iterable[tuple[int, Ledger]]:
        """Yields each writer with its ledger, the one that was used last at the end."""
        return self._ledgers.items()
