"""How long, how many, how large: counts by size, of which quantiles can be told.

Buckets are a quarter of a power of two wide: the exponent of a float and the first two
bits behind it are the number of its bucket, so a thousand values are sorted in a few
microseconds, histograms of different tasks have the same edges, and merging them is
addition. A quantile is off by less than the width of its bucket, which is a quarter of
its lower edge; counts up to eight are exact.
"""

from __future__ import annotations

import enum
import math
from collections import deque
from typing import TYPE_CHECKING, Any, Final, final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from numpy.typing import ArrayLike

Plain = Any
"""What JSON and msgpack have a word for: None, bool, int, float, str, list, dict."""

_PER_OCTAVE: Final = 4
_MANTISSA: Final = 50
"""Bits of a float64 behind its exponent and the two that tell quarters apart."""
_BIAS: Final = 1023

RECENT: Final = 10
"""Seconds that a window is long, and how many histograms it consists of."""


class Unit(enum.StrEnum):
    """What is counted: says which sizes get a bucket."""

    SECONDS = "seconds"
    """2**-20 (about a microsecond) to 1,024."""
    COUNTS = "counts"
    """1 to 2**30."""
    BYTES = "bytes"
    """1 to 2**40."""


_OCTAVES: Final = {
    Unit.SECONDS: (-20, 10),
    Unit.COUNTS: (0, 30),
    Unit.BYTES: (0, 40),
}


def _upper_edges(unit: Unit) -> tuple[float, ...]:
    first, last = _OCTAVES[unit]
    quarters = [
        2.0**octave * (1 + quarter / _PER_OCTAVE)
        for octave in range(first, last)
        for quarter in range(_PER_OCTAVE)
    ]
    return (*quarters, 2.0**last, math.inf)


EDGES: Final = {unit: _upper_edges(unit) for unit in Unit}
"""Where each bucket ends; the first has all below the second one's lower edge, zero
too, and the last one has no end."""


@final
class Histogram:
    """Counts of values by size. Not negative, and no NaN: those count as zero."""

    __slots__ = ("_counts", "max", "total", "unit")

    def __init__(self, unit: Unit = Unit.SECONDS) -> None:
        self.unit: Final = unit
        self.total = 0.0
        """The sum of all values."""
        self.max = 0.0
        self._counts = np.zeros(len(EDGES[unit]), np.int64)

    @property
    def count(self) -> int:
        """How many values there are."""
        return int(self._counts.sum())

    @property
    def counts(self) -> np.ndarray:
        """int64, one for each of `EDGES`: a copy."""
        return self._counts.copy()

    def add_many(self, values: ArrayLike) -> None:
        """Counts values ([n], in the unit)."""
        array = np.ascontiguousarray(values, np.float64)
        if not array.size:
            return
        array = np.where(array > 0, array, 0.0)
        first, _ = _OCTAVES[self.unit]
        places = (array.view(np.int64) >> _MANTISSA) - (
            (first + _BIAS) * _PER_OCTAVE - 1
        )
        np.clip(places, 0, len(self._counts) - 1, out=places)
        self._counts += np.bincount(places, minlength=len(self._counts))
        self.total += float(array.sum())
        self.max = max(self.max, float(array.max()))

    def merge(self, other: Histogram) -> None:
        """Adds all that the other one has counted.

        Raises:
            ValueError: It counts something else.
        """
        if other.unit is not self.unit:
            raise ValueError(f"a histogram of {other.unit} and one of {self.unit}")
        self._counts += other._counts
        self.total += other.total
        self.max = max(self.max, other.max)

    def quantile(self, q: float) -> float:
        """What a part ``q`` (0 to 1) of all do not exceed; 0 if there is none.

        Values of one bucket are taken to lie evenly; counts and bytes are whole.
        """
        count = self.count
        if not count:
            return 0.0
        rank = min(max(1, math.ceil(q * count)), count)
        sums = np.cumsum(self._counts)
        place = int(np.searchsorted(sums, rank))
        inside = int(self._counts[place])
        before = int(sums[place]) - inside
        lower = EDGES[self.unit][place - 1] if place else 0.0
        upper = min(EDGES[self.unit][place], max(self.max, lower))
        value = lower + (upper - lower) * (rank - before - 0.5) / inside
        if self.unit is Unit.SECONDS:
            return value
        return float(math.floor(value)) if place else 0.0

    def summary(self) -> dict[str, Plain]:
        """``count``, ``mean``, ``p50``, ``p90``, ``p99`` and ``max``."""
        count = self.count
        return {
            "count": count,
            "mean": self.total / count if count else 0.0,
            "p50": self.quantile(0.5),
            "p90": self.quantile(0.9),
            "p99": self.quantile(0.99),
            "max": self.max,
        }

    def buckets(self) -> list[list[float]]:
        """Pairs of the largest value that a bucket has room for and its count, of those
        that have any; of counts and bytes the largest whole one. That of the last
        bucket, which has no end, is the largest value there was."""
        edges = EDGES[self.unit]
        whole = self.unit is not Unit.SECONDS
        found: list[list[float]] = []
        for place in np.flatnonzero(self._counts).tolist():
            upper = edges[place]
            if math.isinf(upper):
                upper = self.max
            elif whole:
                upper = math.ceil(upper) - 1
            found.append([upper, int(self._counts[place])])
        return found

    def plain(self) -> dict[str, Plain]:
        """As plain data, from which `from_plain` makes an equal one."""
        places = np.flatnonzero(self._counts)
        return {
            "unit": str(self.unit),
            "total": self.total,
            "max": self.max,
            "buckets": [[place, int(self._counts[place])] for place in places.tolist()],
        }

    @classmethod
    def from_plain(cls, plain: Mapping[str, Plain]) -> Histogram:
        """What another process has counted.

        Raises:
            ValueError: It is none of those that `plain` gives.
        """
        try:
            made = cls(Unit(plain["unit"]))
            made.total, made.max = float(plain["total"]), float(plain["max"])
            for place, count in plain["buckets"]:
                if not (0 <= place < len(made._counts) and count >= 0):
                    raise ValueError(f"bucket {place}: {count}")
                made._counts[place] += count
        except (LookupError, TypeError, OverflowError, ValueError) as error:
            raise ValueError(f"no histogram: {plain!r:.80}: {error}") from None
        return made


@final
class Windowed:
    """A histogram of all since the start, and one of the last `RECENT` seconds: a ring
    of one for each second in which something came."""

    __slots__ = ("_ring", "total")

    def __init__(self, unit: Unit = Unit.SECONDS) -> None:
        self.total: Final = Histogram(unit)
        """Of all since the start."""
        self._ring: Final[deque[tuple[int, Histogram]]] = deque(maxlen=RECENT + 1)

    def add_many(self, values: ArrayLike, now: float) -> None:
        """Counts values that came just now (seconds, of any clock that does not go
        back)."""
        second = math.floor(now)
        if not self._ring or self._ring[-1][0] != second:
            self._ring.append((second, Histogram(self.total.unit)))
        self._ring[-1][1].add_many(values)
        self.total.add_many(values)

    def recent(self, now: float) -> Histogram:
        """Of those that came in the last `RECENT` seconds, and in the present one."""
        since = math.floor(now) - RECENT
        return merged(
            (each for second, each in self._ring if second >= since), self.total.unit
        )

    def plain(self, now: float) -> dict[str, Plain]:
        """Both, as plain data: ``total`` and ``recent``."""
        return {"total": self.total.plain(), "recent": self.recent(now).plain()}


def merged(histograms: Iterable[Histogram], unit: Unit = Unit.SECONDS) -> Histogram:
    """One of all that these have counted, all of ``unit``."""
    whole = Histogram(unit)
    for each in histograms:
        whole.merge(each)
    return whole
