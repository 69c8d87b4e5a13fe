"""`RoundStatistics`: measures the rounds of one optimizer: how many are closed, and for
which workers they wait. Without clock or socket.

A round that is closed with the contributions of several workers has waited for the
last one: since the contribution before it, all others were there. The sum of these
seconds is what the same rounds would have saved with one backup worker more.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple, final

from zstrat.telemetry import Throughput

if TYPE_CHECKING:
    from collections.abc import Iterable

    from zstrat.wire import PlainTree

RECENT_ROUNDS: Final = 64
"""Rounds from which it is derived who holds rounds up now."""


class _Wait(NamedTuple):
    """How many rounds a worker was the last to contribute to, and the seconds that they
    waited for it alone."""

    rounds: int = 0
    seconds: float = 0.0


_Waits = dict[int, _Wait]
"""By worker."""


@final
@dataclass(slots=True)
class RoundStatistics:
    """The numbers of the rounds of one optimizer. Workers are known by their place."""

    closed: int = 0
    """Rounds that all servers have applied."""
    late: Counter[int] = field(default_factory=Counter)
    """By worker: contributions to a round that was closed already."""
    dropped: Counter[int] = field(default_factory=Counter)
    """By worker: those of them without effect."""
    _waits: _Waits = field(default_factory=dict)
    _rate: Throughput = field(default_factory=Throughput)
    _recent: deque[tuple[float, _Waits]] = field(
        default_factory=lambda: deque(maxlen=RECENT_ROUNDS + 1)
    )
    """When rounds were applied, and for whom each of them waited."""
    _closing: _Waits = field(default_factory=dict)
    """Of the round that is being closed; {} if only one contribution is a member."""

    def contributed_late(self, worker: int, *, is_dropped: bool) -> None:
        """Counts a contribution to a round that was closed already."""
        self.late[worker] += 1
        if is_dropped:
            self.dropped[worker] += 1

    def closing(self, contributed: Iterable[tuple[float, int]]) -> None:
        """Notes the members of the round that is being closed: when they contributed,
        and which worker did."""
        in_order = sorted(contributed)
        self._closing = {}
        if len(in_order) > 1:
            (before, _), (at, worker) = in_order[-2:]
            self._closing = {worker: _Wait(1, at - before)}

    def applied(self, now: float) -> None:
        """Notes that all servers have applied the round."""
        self.closed += 1
        if now >= self._rate.next_mark:
            self._rate.mark(now, self.closed - 1, self.closed)
        _add(self._waits, self._closing)
        self._recent.append((now, self._closing))

    def metrics(self, now: float, most: int | None = None) -> dict[str, PlainTree]:
        """Returns the numbers as plain data, workers by name: at most ``most``, those
        with the largest ones."""
        (first, _), *others = tuple(self._recent) or ((now, {}),)
        waits: _Waits = {}
        for _, each in others:
            _add(waits, each)
        return {
            "closed": self.closed,
            "per_s": self._rate.rate(now, self.closed),
            "late": _counts(self.late, most),
            "dropped": _counts(self.dropped, most),
            "waited_for": _plain(self._waits, most),
            "recent": {
                "rounds": len(others),
                "seconds": others[-1][0] - first if others else 0.0,
                "waited_for": _plain(waits, most),
            },
        }


def _add(waits: _Waits, more: _Waits) -> None:
    for worker, (rounds, seconds) in more.items():
        before = waits.get(worker, _Wait())
        waits[worker] = _Wait(before.rounds + rounds, before.seconds + seconds)


def _counts(of_workers: Counter[int], most: int | None) -> dict[str, PlainTree]:
    # A copy: the loop may add a worker while another thread asks.
    largest = of_workers.copy().most_common(most)
    return {f"worker:{worker}": count for worker, count in largest}


def _plain(waits: _Waits, most: int | None) -> dict[str, PlainTree]:
    largest = sorted(dict(waits).items(), key=lambda item: -item[1].seconds)[:most]
    return {f"worker:{worker}": each._asdict() for worker, each in largest}
