"""Histograms of durations, counts and sizes, with approximate quantiles.

Buckets are a quarter of a power of two wide: the exponent of a float and the first two
bits of its mantissa are the number of its bucket. So a thousand values are sorted into
buckets in a few microseconds, histograms of all tasks have the same edges, and merging
them is addition. The error of a quantile is below the width of its bucket, a quarter of
its lower edge; counts up to eight are exact.

`HistogramTable` holds the histograms of all tasks of a run: numpy computes the
quantiles of a thousand histograms in a few milliseconds; one by one they would take a
hundred.
"""

from __future__ import annotations

import enum
import math
from collections import deque
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, Generic, TypeVar, final

import numpy as np

from ._throughput import RECENT, window

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from numpy.typing import ArrayLike


Plain = Any
"""Values of JSON and msgpack: None, bool, int, float, str, list, dict."""

_PER_OCTAVE: Final = 4
"""Number of buckets from a value to its double: a quantile is off by less than a
quarter."""
_MANTISSA: Final = 50
"""Number of bits of a float64 after its exponent and the two bits that number the
quarters."""
_BIAS: Final = 1023
"""The bias of the exponent of a float64 in IEEE 754."""


class Unit(enum.StrEnum):
    """The unit of a histogram, which determines its range of buckets."""

    SECONDS = "seconds"
    """2**-20 (about a microsecond) to 1,024 seconds."""
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
"""For each unit the upper edges of the buckets. The first bucket has all smaller
values, including zero; the last one is unbounded."""


@final
class Histogram:
    """Counts values by size. Negative values and NaN count as zero."""

    __slots__ = ("_counts", "max", "total", "unit")

    def __init__(self, unit: Unit = Unit.SECONDS) -> None:
        self.unit: Final = unit
        self.total = 0.0
        """The sum of all values."""
        self.max = 0.0
        self._counts = np.zeros(len(EDGES[unit]), np.int64)

    @property
    def count(self) -> int:
        """The number of values."""
        return int(self._counts.sum())

    @property
    def counts(self) -> np.ndarray:
        """A copy of the counts, int64, one for each of `EDGES`."""
        return self._counts.copy()

    def add_many(self, values: ArrayLike) -> None:
        """Counts ``values`` ([n], in the unit of the histogram)."""
        array = np.asarray(values, np.float64)
        if array.size:
            self.take(*_counted(array, self.unit))

    def merge(self, other: Histogram) -> None:
        """Adds the counts of another histogram.

        Raises:
            ValueError: The other histogram has another unit.
        """
        if other.unit is not self.unit:
            raise ValueError(
                f"cannot merge a histogram of {other.unit} into one of {self.unit}"
            )
        self.take(other._counts, other.total, other.max)

    def take(self, counts: np.ndarray, total: float, largest: float) -> None:
        """Adds counts in the form of `counts`, with the sum of their values and the
        largest one."""
        self._counts += counts
        self.total += total
        self.max = max(self.max, float(largest))

    def quantile(self, q: float) -> float:
        """Returns the quantile ``q`` (0 to 1); 0 without values.

        Assumes that the values of one bucket are evenly spaced. The result is whole for
        counts and bytes.
        """
        counts, largest = self._counts[None], np.array([self.max])
        return float(_quantiles(counts, largest, q, self.unit)[0])

    def summary(self) -> dict[str, Plain]:
        """Returns ``count``, ``mean``, ``p50``, ``p90``, ``p99`` and ``max``."""
        total, largest = np.array([self.total]), np.array([self.max])
        return summaries(self._counts[None], total, largest, self.unit)[0]

    def buckets(self) -> list[list[float]]:
        """Returns the largest possible value and the count of each bucket that is not
        empty. The value is whole for counts and bytes; for the last bucket, which is
        unbounded, it is the largest value so far."""
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
        """Returns the histogram as plain data, for `from_plain`."""
        places = np.flatnonzero(self._counts)
        return {
            "unit": str(self.unit),
            "total": self.total,
            "max": self.max,
            "buckets": [[place, int(self._counts[place])] for place in places.tolist()],
        }

    @classmethod
    def from_plain(cls, plain: Mapping[str, Plain]) -> Histogram:
        """Creates a histogram from plain data that `plain` returned, maybe in another
        process.

        Raises:
            ValueError: The data is malformed.
        """
        try:
            histogram = cls(Unit(plain["unit"]))
            histogram.total, histogram.max = float(plain["total"]), float(plain["max"])
            for index, count in plain["buckets"]:
                if not (0 <= index < len(histogram._counts) and count >= 0):
                    raise ValueError(f"bucket {index}: {count}")
                histogram._counts[index] += count
        except (LookupError, TypeError, OverflowError, ValueError) as error:
            raise ValueError(f"malformed histogram {plain!r:.80}: {error}") from None
        return histogram


@final
class Windowed:
    """A histogram of all values since the start, and one of recent values (`window`): a
    ring with one histogram for each second with values."""

    __slots__ = ("_ring", "total")

    def __init__(self, unit: Unit = Unit.SECONDS) -> None:
        self.total: Final = Histogram(unit)
        """The histogram of all values since the start."""
        # One more than `RECENT`, as the current second is not over.
        self._ring: Final[deque[tuple[int, Histogram]]] = deque(maxlen=RECENT + 1)

    def add_many(self, values: ArrayLike, now: float) -> None:
        """Counts values at the time ``now``, in seconds of any monotonic clock."""
        second = math.floor(now)
        if not self._ring or self._ring[-1][0] != second:
            self._ring.append((second, Histogram(self.total.unit)))
        # Counted once for both: sorting the values costs more than adding the counts.
        array = np.asarray(values, np.float64)
        if array.size:
            counted = _counted(array, self.total.unit)
            self._ring[-1][1].take(*counted)
            self.total.take(*counted)

    def recent(self, now: float) -> Histogram:
        """Returns a histogram of the values of the last `RECENT` seconds and the
        current one, or of more seconds if values are rare (`window`)."""
        since = math.floor(now) - window([second for second, _ in self._ring], now)
        merged = Histogram(self.total.unit)
        for second, histogram in self._ring:
            if second >= since:
                merged.merge(histogram)
        return merged

    def plain(self, now: float) -> dict[str, Plain]:
        """Returns both histograms as plain data: ``total`` and ``recent``."""
        return {"total": self.total.plain(), "recent": self.recent(now).plain()}


def _counted(values: np.ndarray, unit: Unit) -> tuple[np.ndarray, float, float]:
    """Counts values ([n] float64, n > 0) by bucket; returns the counts, the sum and the
    largest value."""
    values = np.maximum(values, 0.0)
    np.copyto(values, 0.0, where=np.isnan(values))  # which `maximum` keeps
    first, _ = _OCTAVES[unit]
    # The bits of positive floats, read as integers, are in the order of the floats: so
    # their first bits number the buckets, without a logarithm.
    places = (values.view(np.int64) >> _MANTISSA) - ((first + _BIAS) * _PER_OCTAVE - 1)
    width = len(EDGES[unit])
    np.clip(places, 0, width - 1, out=places)
    counts = np.bincount(places, minlength=width)
    return counts, float(values.sum()), float(values.max())


def summaries(
    counts: np.ndarray, totals: np.ndarray, maxima: np.ndarray, unit: Unit
) -> list[dict[str, Plain]]:
    """Computes `Histogram.summary` of many histograms.

    Args:
        counts: [n, buckets] int64.
        totals: [n], the sums of their values.
        maxima: [n], their largest values.
    """
    numbers = counts.sum(1)
    columns = {
        "count": numbers,
        "mean": totals / np.maximum(numbers, 1),
        **{f"p{q}": _quantiles(counts, maxima, q / 100, unit) for q in (50, 90, 99)},
        "max": maxima,
    }
    rows = zip(*[column.tolist() for column in columns.values()], strict=True)
    return [dict(zip(columns, row, strict=True)) for row in rows]


def _quantiles(
    counts: np.ndarray, maxima: np.ndarray, q: float, unit: Unit
) -> np.ndarray:
    """Computes `Histogram.quantile` of many histograms ([n, buckets], maxima [n])."""
    sums, edges, rows = counts.cumsum(1), np.array(EDGES[unit]), np.arange(len(counts))
    # The bucket in which the value of that rank is: the first whose sum reaches it.
    ranks = np.maximum(1, np.ceil(q * counts.sum(1))).astype(np.int64)
    places = np.minimum((sums < ranks[:, None]).sum(1), len(edges) - 1)
    inside = np.maximum(counts[rows, places], 1)
    before = sums[rows, places] - inside
    lower = np.where(places > 0, edges[places - 1], 0.0)
    # No quantile is above the largest value; the last bucket has no other edge.
    upper = np.minimum(edges[places], np.maximum(maxima, lower))
    values = lower + (upper - lower) * (ranks - before - 0.5) / inside
    if unit is not Unit.SECONDS:
        values = np.where(places > 0, np.floor(values), 0.0)
    return np.where(counts.sum(1) > 0, values, 0.0)


K = TypeVar("K")


@final
class HistogramTable(Generic[K]):
    """Histograms by key. Data of another unit or another version of zstrat count as an
    empty histogram: observing a run must not stop it.

    Args:
        plains: The results of `Histogram.plain`.
    """

    def __init__(self, plains: Mapping[K, Plain], unit: Unit = Unit.SECONDS) -> None:
        self._unit: Final = unit
        self._rows: Final = {key: row for row, key in enumerate(plains)}
        self._counts, self._totals, self._maxima = _parsed([*plains.values()], unit)
        made = summaries(self._counts, self._totals, self._maxima, unit)
        self._summaries: Final = dict(zip(plains, made, strict=True))
        self._empty: Final = Histogram(unit).summary()

    def summary(self, key: K) -> dict[str, Plain]:
        """Returns the `Histogram.summary` of a key; that of an empty histogram if the
        key is missing."""
        # A copy: entries of several tasks must not share one dict.
        return self._summaries.get(key) or dict(self._empty)

    def merged(self, keys: Iterable[K]) -> Histogram:
        """Merges the histograms of these keys; missing keys are ignored."""
        rows = [self._rows[key] for key in keys if key in self._rows]
        merged = Histogram(self._unit)
        if rows:
            totals, maxima = self._totals[rows], self._maxima[rows]
            merged.take(self._counts[rows].sum(0), float(totals.sum()), maxima.max())
        return merged


_Parsed = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Counts ([n, buckets] int64), totals and maxima ([n] float64) of n histograms."""


def _parsed(plains: list[Plain], unit: Unit) -> _Parsed:
    try:
        return _well_formed(plains, unit)
    # One of them is malformed: one by one, the others are kept.
    except (LookupError, TypeError, OverflowError, ValueError):
        found = [_one(plain, unit) for plain in plains]
    width = len(EDGES[unit])
    return (
        np.array([each.counts for each in found], np.int64).reshape(-1, width),
        np.array([each.total for each in found]),
        np.array([each.max for each in found]),
    )


def _well_formed(plains: list[Plain], unit: Unit) -> _Parsed:
    """Parses the buckets of all histograms together.

    Raises:
        LookupError, TypeError, OverflowError, ValueError: A histogram is malformed.
    """
    units = {plain["unit"] for plain in plains}
    pairs = [plain["buckets"] for plain in plains]
    lengths = set(map(len, chain.from_iterable(pairs)))
    if not units <= {unit} or not lengths <= {2}:
        raise ValueError("other units, or no pairs")
    numbers = chain.from_iterable(chain.from_iterable(pairs))
    places, counts = np.fromiter(numbers, np.int64).reshape(-1, 2).T
    width = len(EDGES[unit])
    if places.size and not (0 <= places.min() <= places.max() < width):
        raise ValueError("a bucket that there is not")
    if counts.size and counts.min() < 0:
        raise ValueError("a count below zero")
    rows = np.repeat(np.arange(len(pairs)), [len(each) for each in pairs])
    table = np.zeros(len(pairs) * width, np.int64)
    # Not ``+=``, which would count a bucket that comes twice only once.
    np.add.at(table, rows * width + places, counts)
    # By way of float, which takes no None.
    totals = np.array([float(plain["total"]) for plain in plains])
    maxima = np.array([float(plain["max"]) for plain in plains])
    return table.reshape(-1, width), totals, maxima


def _one(plain: Plain, unit: Unit) -> Histogram:
    try:
        found = Histogram.from_plain(plain)
    except ValueError:
        return Histogram(unit)
    return found if found.unit is unit else Histogram(unit)
