"""Records the measurements of one session of a task: phases, staleness, rates.

Recording must be negligible for a step of ten microseconds, so numbers are only
appended to plain lists. A *digest* sorts them into histograms and rates in bulk. The
thread that runs steps appends to its own lists, which it posts with its results
(`StepTimes`); all other data belong to the loop's thread. All lists are bounded, by
`PENDING` or by the limit of a capture.
"""

from __future__ import annotations

import math
import os
import stat
from array import array
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, final

import numpy as np

from zstrat.errors import NotFoundError

from ._histogram import Unit, Windowed
from ._throughput import WORKER_PHASES, Phase, Rate, TimeShares

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from ._histogram import Plain
    from ._throughput import SpanCapture, StepUnderWay

EVERY: Final = 0.25
"""Seconds between two digests of the recorded numbers."""
PENDING: Final = 4096
"""Number of recorded entries from which a digest is made earlier."""

EAGER: Final = 256
"""Number of recorded eager steps from which a digest is made earlier: each may have
hundreds of spans."""

QUICK: Final = 2
"""Count of the numbers recorded for a step that neither drew inputs nor pulled values:
seconds that the step waited, and seconds that it ran."""
FULL: Final = 10
"""Count of the numbers recorded for any other step, and for all steps in a capture:
step number; time of arrival; time of the end of its preparation; seconds that it ran;
time of its end; seconds of its preparation; times of the first request for values and
of the last answer; seconds that the step waited for values; number of examples."""


@final
@dataclass(slots=True)
class EagerNotes:
    """The phases of an eager step, which runs as Python, and draws, reads and pushes
    while it runs. Any thread may append."""

    spans: list[tuple[Phase, float, float]] = field(default_factory=list)
    """Phase, begin and end of each draw, read and push, of the first `PENDING`."""
    examples: int = 0
    """Number of examples that the step has drawn."""
    stale: list[tuple[int, int]] = field(default_factory=list)
    """Server and staleness of each push: how many versions old the values were that the
    pushed update was computed from. Of the first `PENDING` pushes."""

    def spent(self, phase: Phase, began: float, ended: float) -> None:
        """Notes that the step has waited for ``phase`` from ``began`` to ``ended``.
        Beyond `PENDING` notes the time counts as computing."""
        if len(self.spans) < PENDING:
            self.spans.append((phase, began, ended))

    def aged(self, server: int, versions: int) -> None:
        """Notes that an update pushed to ``server`` was computed from values
        ``versions`` versions old."""
        if len(self.stale) < PENDING:
            self.stale.append((server, versions))


class EagerTimes(NamedTuple):
    """The times of an eager step that ran: its number, when it was received, when its
    preparation had ended, the seconds that it ran, when it ended, and what it noted
    itself."""

    step: int
    received: float
    prepared: float
    ran: float
    ended: float
    notes: EagerNotes


@final
@dataclass(slots=True)
class StepTimes:
    """The times of steps that ran, as flat lists of numbers."""

    quick: list[float] = field(default_factory=list)
    """`QUICK` numbers for each step that neither drew nor pulled."""
    full: list[float] = field(default_factory=list)
    """`FULL` numbers for each other step."""
    idle: float = 0.0
    """Seconds in which the worker had no closure."""
    stalled: float = 0.0
    """Seconds in which all closures of the worker waited for values."""
    stalls: dict[int, float] = field(default_factory=dict)
    """The seconds of ``stalled`` by the server that answered last."""
    eager: list[EagerTimes] = field(default_factory=list)
    """The times of eager steps, which are in none of the other lists."""


@final
class Recorder:
    """Collects the measurements of one session of a task. Used on the loop's thread.

    Args:
        phases: The phases that the task records.
    """

    def __init__(self, phases: Iterable[Phase]) -> None:
        self._phases: Final = {phase: Windowed() for phase in phases}
        self._staleness: Final[dict[str, Windowed]] = {}
        self._rates: Final[dict[str, Rate]] = {}
        self._shares: Final = TimeShares()
        self._stalls: Final = TimeShares()
        self._began: float | None = None
        self._busy_until = -math.inf
        self._steps: Final = StepTimes()
        self._spans: Final[dict[Phase, list[float]]] = {}
        self._stale: Final[dict[str, list[int]]] = {}
        self._digested = 0.0
        self._capture: SpanCapture | None = None
        self.on_capture: Callable[[bool], None] = _ignore
        """Called with True when a capture of spans begins, and with False when it
        ends."""

    def ran(self, times: StepTimes, now: float) -> None:
        """Adds the times of steps that ran."""
        steps = self._steps
        steps.quick += times.quick
        steps.full += times.full
        steps.eager += times.eager
        steps.idle += times.idle
        steps.stalled += times.stalled
        # At once, not in a digest: there are as many as servers, not as steps.
        for server, seconds in times.stalls.items():
            self._stalls.add(f"ps:{server}", seconds, now)
        if self._capture is not None:
            self._capture.sample(now)
        # By time, so that a look finds recent numbers; or earlier, so that lists of
        # quick steps stay small.
        many = len(steps.quick) > PENDING * QUICK or len(steps.full) > PENDING * FULL
        many |= len(steps.eager) > EAGER
        if many or now - self._digested > EVERY:
            self.digest(now)

    def spent(self, phase: Phase, step: int, began: float, ended: float) -> None:
        """Records a phase of a step other than those in `StepTimes`."""
        # One flat list a phase: appending three numbers makes no object that lasts.
        spans = self._spans.get(phase)
        if spans is None:
            spans = self._spans[phase] = []
        spans += (step, began, ended)
        if self._capture is not None:
            self._capture.sample(ended)
        if len(spans) > PENDING * 3:
            self.digest(ended)

    def stale(self, store: str, versions: int) -> None:
        """Records the age, in versions, of the values from which an update pushed to
        ``store`` was computed."""
        ages = self._stale.get(store)
        if ages is None:
            ages = self._stale[store] = []
        ages.append(versions)
        if len(ages) > PENDING:
            # With the time of the last digest, as the caller does not know the time.
            self.digest(self._digested)

    def count(self, name: str, amount: float, now: float) -> None:
        """Adds an amount to the counter of rate ``name``."""
        self._rate(name, now).add(amount, now)

    def start(self, totals: Mapping[str, float], now: float) -> None:
        """Begins the session; ``totals`` are the current values of counters that are
        kept elsewhere, and may have grown before the session."""
        self._began = now
        for name, total in totals.items():
            self._rates[name] = Rate(now, total)

    def reach(self, totals: Mapping[str, float], now: float) -> None:
        """Updates rates by the current totals of counters that are kept elsewhere."""
        for name, total in totals.items():
            self._rate(name, now).reach(total, now)

    def _rate(self, name: str, now: float) -> Rate:
        rate = self._rates.get(name)
        if rate is None:
            # Since the start of the session: the total was zero until now.
            rate = self._rates[name] = Rate(now if self._began is None else self._began)
        return rate

    def plain(
        self, now: float, under_way: StepUnderWay | None = None
    ) -> dict[str, Plain]:
        """Returns all measurements as plain data: ``phases`` and ``staleness`` as
        `Windowed.plain` by phase and store; ``rates`` per second; ``time``: shares of
        the time of the step thread, or of the loop that applies pushes; ``stalls``:
        shares in which the step thread waited for each server; ``now``: ``phase``,
        ``step`` and ``seconds`` of the current phase."""
        self.digest(now)
        present: dict[str, Plain] = {}
        if under_way is not None:
            seconds = max(0.0, now - under_way.began)
            present = {
                "phase": str(under_way.phase),
                "step": under_way.step,
                "seconds": seconds,
            }
        return {
            "phases": {
                str(phase): each.plain(now) for phase, each in self._phases.items()
            },
            "staleness": {
                store: each.plain(now) for store, each in self._staleness.items()
            },
            "rates": {name: rate.per_second(now) for name, rate in self._rates.items()},
            "time": self._shares.shares(now, under_way),
            "stalls": self._stalls.shares(now),
            "now": present,
        }

    def begin_capture(self, capture: SpanCapture, now: float) -> None:
        """Begins to copy spans and traffic (bytes received and sent) into the
        capture."""
        self.digest(now)  # what came before is in no capture
        self._capture = capture
        capture.sample(now)
        self.on_capture(True)

    def end_capture(self, now: float) -> SpanCapture:
        """Ends and returns the capture; its spans are not sorted.

        Raises:
            NotFoundError: There is no capture.
        """
        self.digest(now)  # the spans since the last digest belong to it
        capture, self._capture = self._capture, None
        self.on_capture(False)
        if capture is None:
            raise NotFoundError("no capture is running: the session was restarted")
        capture.sample(now)
        return capture

    def digest(self, now: float) -> None:
        """Sorts the recorded numbers into histograms and rates."""
        self._digested = now
        if self._began is None:
            self._began = now
        # The program that began the capture may be lost and never end it.
        if self._capture is not None and now > self._capture.until:
            self.on_capture(False)
        steps = self._steps
        if steps.quick:
            self._digest_quick(_rows(steps.quick, QUICK), now)
            steps.quick.clear()
        if steps.full:
            self._digest_full(_rows(steps.full, FULL), now)
            steps.full.clear()
        # Before the staleness below, to which eager steps add.
        if steps.eager:
            eager, steps.eager = steps.eager, []
            self._digest_eager(eager, now)
        # Counted once, however many steps wait side by side: shares add up to one.
        self._shares.add("pull", steps.stalled, now)
        self._shares.add("idle", steps.idle, now)
        steps.stalled = steps.idle = 0.0
        for phase, spans in self._spans.items():
            if spans:
                number, began, ended = _rows(spans, 3).T
                self._took(phase, number, began, ended, now)
                # Pushes that wait for one thread overlap; a share has each second once.
                if phase is Phase.APPLY:
                    self._shares.add(str(phase), self._busy(began, ended), now)
                spans.clear()
        for store, found in self._stale.items():
            if found:
                windowed = self._staleness.setdefault(store, Windowed(Unit.COUNTS))
                windowed.add_many(found, now)
                found.clear()

    def _busy(self, began: np.ndarray, ended: np.ndarray) -> float:
        """Returns the seconds that the spans cover and no earlier span has covered:
        spans may overlap, as several wait for the same thread."""
        # A sweep over the spans by their begin; `maximum.accumulate` is how far those
        # before reach.
        order = np.argsort(began)
        began, ended = began[order], np.maximum.accumulate(ended[order])
        before = np.concatenate(([self._busy_until], ended[:-1]))
        before = np.maximum(before, self._busy_until)
        self._busy_until = max(self._busy_until, float(ended[-1]))
        return float(np.maximum(0.0, ended - np.maximum(began, before)).sum())

    def _digest_quick(self, rows: np.ndarray, now: float) -> None:
        """Sorts the rows of steps that only waited and ran into histograms. There is no
        capture."""
        waited, ran = rows.T
        self.count("steps_per_s", len(rows), now)
        self._shares.add("compute", float(ran.sum()), now)
        self._phases[Phase.WAIT].add_many(waited, now)
        self._phases[Phase.COMPUTE].add_many(ran, now)

    def _digest_full(self, rows: np.ndarray, now: float) -> None:
        """Sorts the rows of steps that drew, pulled, or ran in a capture into
        histograms."""
        number, received, prepared, ran, ended = rows.T[:5]
        drew, asked, arrived, pulled, examples = rows.T[5:]
        self.count("steps_per_s", len(rows), now)
        self.count("examples_per_s", float(examples.sum()), now)
        self._shares.add("draw", float(drew.sum()), now)
        self._shares.add("compute", float(ran.sum()), now)
        self._took(Phase.WAIT, number, received, prepared - drew, now)
        self._took(Phase.DRAW, number, prepared - drew, prepared, now, drew > 0)
        self._took(Phase.COMPUTE, number, ended - ran, ended, now)
        # A time line shows the whole transfer; the histogram and the shares have only
        # what the step thread waited for, as the rest passed while it computed.
        pulls = pulled > 0
        self._captures(Phase.PULL, number, asked, arrived, pulls)
        self._phases[Phase.PULL].add_many(pulled[pulls], now)

    def _digest_eager(self, times: list[EagerTimes], now: float) -> None:
        """Sorts the times of all eager steps into histograms together, because to sort
        one number costs as much as to sort many."""
        found: dict[Phase, list[float]] = {phase: [] for phase in WORKER_PHASES}
        for step, received, prepared, ran, ended, notes in times:
            found[Phase.WAIT] += (step, received, prepared)
            found[Phase.COMPUTE] += (step, ended - ran, ended)
            for phase, *span in notes.spans:
                found[phase] += (step, *span)
            for server, versions in notes.stale:
                self.stale(f"ps:{server}", versions)
        self.count("steps_per_s", len(times), now)
        self.count("examples_per_s", sum(each.notes.examples for each in times), now)
        computed = 0.0
        for phase, numbers in found.items():
            if numbers:
                step, began, end = _rows(numbers, 3).T
                self._took(phase, step, began, end, now)
                if phase is Phase.COMPUTE:
                    computed += float((end - began).sum())
                elif phase is not Phase.WAIT:
                    waited = float((end - began).sum())
                    self._shares.add(str(phase), waited, now)
                    computed -= waited
        # Of an eager step what it waited for is within what it computed.
        self._shares.add("compute", max(0.0, computed), now)

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
        if self._capture is None:
            return
        columns = [number, began, ended]
        if which is not None:
            columns = [column[which] for column in columns]
        spans = zip(*[each.tolist() for each in columns], strict=True)
        self._capture.add(phase, spans)


def _rows(numbers: list[float], width: int) -> np.ndarray:
    """Returns a flat list as rows of ``width`` numbers, float64."""
    # By way of `array`, which takes a third less time than numpy from a list.
    return np.frombuffer(array("d", numbers), np.float64).reshape(-1, width)


def _ignore(_: object) -> None:
    pass


def log_file() -> str:
    """Returns the path of the log file of this process, to which standard error is
    redirected; "" if standard error is not a file, or without /proc."""
    try:
        if not stat.S_ISREG(os.fstat(2).st_mode):
            return ""
        # As bytes: a name need not be UTF-8, and the report has to be.
        return os.readlink(b"/proc/self/fd/2").decode("utf-8", "replace")
    except OSError:
        return ""


def resident_bytes() -> int:
    """Returns the bytes of resident memory of this process, with shared pages; 0 while
    no file descriptor is free."""
    try:
        pages = int(Path("/proc/self/statm").read_text("ascii").split()[1])
    except FileNotFoundError:  # not Linux
        import psutil

        return int(psutil.Process().memory_info().rss)
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGESIZE")
