"""What one task notes of one session: phases, staleness, rates.

Noting has to cost nothing beside a step of ten microseconds, so numbers are only put
behind each other, in plain lists, by whoever has them, and sorted into histograms in
bulk. The thread that runs steps writes into a list of its own, which travels with what
it posts (`StepTimes`); all else belongs to the loop. Everything is bounded: the lists
by `PENDING`, spans of a capture by what it asked for.
"""

from __future__ import annotations

from array import array
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, final

import numpy as np

from ._histogram import Unit, Windowed
from ._phases import Phase, PhaseSpan
from ._throughput import Rate

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ._histogram import Plain

EVERY: Final = 0.25
"""Seconds between two digests."""
PENDING: Final = 4096
"""Entries after which there is one earlier."""

QUICK: Final = 5
"""Numbers of a step that has neither drawn nor pulled: its number; when it was received
and when its preparation had ended; the seconds that it ran, and when it ended."""
FULL: Final = 10
"""Numbers of any other: these, the seconds that its preparation took; when its values
were asked for first and were there last, and the seconds in between that they were
awaited; how many examples it has drawn."""


@final
@dataclass(slots=True)
class StepTimes:
    """Steps that ran, number behind number."""

    quick: list[float] = field(default_factory=list)
    """`QUICK` numbers for each."""
    full: list[float] = field(default_factory=list)
    """`FULL` numbers for each."""
    idle: float = 0.0
    """Seconds in which there was no closure,"""
    stalled: float = 0.0
    """and in which all waited for values."""


@final
class Recorder:
    """Of one session of a task. Belongs to the loop.

    Args:
        phases: Those that there are.
    """

    def __init__(self, phases: Iterable[Phase]) -> None:
        self._phases: Final = {phase: Windowed() for phase in phases}
        self._staleness: Final[dict[str, Windowed]] = {}
        self._rates: Final[dict[str, Rate]] = {}
        self._shares: Final[dict[str, Rate]] = {}
        self._steps: Final = StepTimes()
        self._spans: Final[dict[Phase, list[float]]] = {}
        self._stale: Final[dict[str, list[int]]] = {}
        self._digested = 0.0
        self._captured: deque[PhaseSpan] | None = None
        self._until = 0.0
        self.is_cut = False
        """Spans of the present capture, or of the last one, had to be forgotten."""
        self.is_fresh = False
        """Something was noted since this was last set to False."""

    # ---- what happened -----------------------------------------------------------

    def ran(self, times: StepTimes, now: float) -> None:
        """Steps have run."""
        steps = self._steps
        steps.quick += times.quick
        steps.full += times.full
        steps.idle += times.idle
        steps.stalled += times.stalled
        self.is_fresh = True
        many = len(steps.quick) > PENDING * QUICK or len(steps.full) > PENDING * FULL
        if many or now - self._digested > EVERY:
            self.digest(now)

    def spent(self, phase: Phase, step: int, began: float, ended: float) -> None:
        """A step was in a phase, but for those that `ran` tells."""
        spans = self._spans.get(phase)
        if spans is None:
            spans = self._spans[phase] = []
        spans += (step, began, ended)
        self.is_fresh = True
        if len(spans) > PENDING * 3:
            self.digest(ended)

    def stale(self, store: str, versions: int) -> None:
        """What a push to the store was computed from was so many versions old."""
        found = self._stale.get(store)
        if found is None:
            found = self._stale[store] = []
        found.append(versions)
        if len(found) > PENDING:
            self.digest(self._digested)

    def count(self, name: str, amount: float, now: float) -> None:
        """So many more of something of which the rate is told."""
        self._rate(name).add(amount, now)

    def reach(self, name: str, total: float, now: float) -> None:
        """The same, where somebody else keeps the sum."""
        self._rate(name).reach(total, now)

    def _rate(self, name: str) -> Rate:
        rate = self._rates.get(name)
        if rate is None:
            rate = self._rates[name] = Rate()
        return rate

    # ---- what is told ------------------------------------------------------------

    def plain(self, now: float) -> dict[str, Plain]:
        """All of it, as plain data: ``phases`` and ``staleness`` as `Windowed.plain`
        by phase and store, ``rates`` per second, and ``time``, the shares of the time
        of the thread that runs steps."""
        self.digest(now)
        return {
            "phases": {
                str(phase): each.plain(now) for phase, each in self._phases.items()
            },
            "staleness": {
                store: each.plain(now) for store, each in self._staleness.items()
            },
            "rates": {name: rate.per_second(now) for name, rate in self._rates.items()},
            "time": {
                name: share.per_second(now) for name, share in self._shares.items()
            },
        }

    # ---- a capture ---------------------------------------------------------------

    def begin_capture(self, limit: int, now: float, until: float) -> None:
        """From now on spans are kept, the last ``limit`` of them, and none that begins
        after ``until``: who asked may be gone."""
        self.digest(now)
        self._captured, self._until = deque(maxlen=limit), until
        self.is_cut = False

    def spans(self, now: float) -> list[PhaseSpan]:
        """Those that were captured since they were last asked for, in no order."""
        self.digest(now)
        captured = self._captured
        if captured is None:
            return []
        found = list(captured)
        captured.clear()
        return found

    def end_capture(self) -> None:
        """Spans are not kept any more."""
        self._captured = None

    # ---- in bulk -----------------------------------------------------------------

    def digest(self, now: float) -> None:
        """Sorts what was noted into histograms and rates."""
        self._digested = now
        steps = self._steps
        if steps.quick:
            self._digest_steps(_rows(steps.quick, QUICK), now)
            steps.quick.clear()
        if steps.full:
            self._digest_steps(_rows(steps.full, FULL), now)
            steps.full.clear()
        self._share("pull", steps.stalled, now)
        self._share("idle", steps.idle, now)
        steps.stalled = steps.idle = 0.0
        for phase, spans in self._spans.items():
            if spans:
                number, began, ended = _rows(spans, 3).T
                self._took(phase, number, began, ended, now)
                spans.clear()
        for store, found in self._stale.items():
            if found:
                windowed = self._staleness.setdefault(store, Windowed(Unit.COUNTS))
                windowed.add_many(found, now)
                found.clear()

    def _digest_steps(self, rows: np.ndarray, now: float) -> None:
        number, received, prepared, ran, ended = rows.T[:QUICK]
        self.count("steps", len(rows), now)
        drew: Any = 0.0
        if rows.shape[1] == FULL:
            drew, asked, arrived, pulled, examples = rows.T[QUICK:]
            self._share("draw", float(drew.sum()), now)
            self.count("examples", float(examples.sum()), now)
            self._took(Phase.DRAW, number, prepared - drew, prepared, now, drew > 0)
            pulls = pulled > 0
            self._captures(Phase.PULL, number, asked, arrived, pulls)
            self._phases[Phase.PULL].add_many(pulled[pulls], now)
        self._share("compute", float(ran.sum()), now)
        self._took(Phase.WAIT, number, received, prepared - drew, now)
        self._took(Phase.COMPUTE, number, ended - ran, ended, now)

    def _share(self, name: str, seconds: float, now: float) -> None:
        share = self._shares.get(name)
        if share is None:
            share = self._shares[name] = Rate()
        share.add(seconds, now)

    def _took(
        self,
        phase: Phase,
        number: np.ndarray,
        began: np.ndarray,
        ended: np.ndarray,
        now: float,
        which: np.ndarray | None = None,
    ) -> None:
        took = ended - began
        self._phases[phase].add_many(took if which is None else took[which], now)
        self._captures(phase, number, began, ended, which)

    def _captures(
        self,
        phase: Phase,
        number: np.ndarray,
        began: np.ndarray,
        ended: np.ndarray,
        which: np.ndarray | None,
    ) -> None:
        captured = self._captured
        if captured is None:
            return
        columns = [number, began, ended]
        if which is not None:
            columns = [column[which] for column in columns]
        for step, start, end in zip(*[each.tolist() for each in columns], strict=True):
            if start <= self._until:
                self.is_cut |= len(captured) == captured.maxlen
                captured.append(PhaseSpan(int(step), phase, start, end))


def _rows(numbers: list[float], width: int) -> np.ndarray:
    """[n, width] float64. By way of `array`, which takes a third less time."""
    return np.frombuffer(array("d", numbers), np.float64).reshape(-1, width)
