"""Many histograms at once: those that all tasks of a run tell.

A thousand of them are a matrix, of which numpy finds all quantiles in a few
milliseconds; one by one they would take a hundred, of a core that trains.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Final, Generic, TypeVar, final

import numpy as np

from ._histogram import EDGES, Histogram, Unit, summaries

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from ._histogram import Plain

K = TypeVar("K")


@final
class HistogramTable(Generic[K]):
    """Histograms by key. What is none of the unit, or of another version of zstrat, is
    an empty one: who looks at a run must not stop it.

    Args:
        plains: As `Histogram.plain` gives them.
    """

    def __init__(self, plains: Mapping[K, Plain], unit: Unit = Unit.SECONDS) -> None:
        self._unit: Final = unit
        self._rows: Final = {key: row for row, key in enumerate(plains)}
        self._counts, self._totals, self._maxima = _parsed([*plains.values()], unit)
        made = summaries(self._counts, self._totals, self._maxima, unit)
        self._summaries: Final = dict(zip(plains, made, strict=True))
        self._empty: Final = Histogram(unit).summary()

    def summary(self, key: K) -> dict[str, Plain]:
        """As `Histogram.summary`; of one that is not there that of an empty one."""
        return self._summaries.get(key) or dict(self._empty)

    def merged(self, keys: Iterable[K]) -> Histogram:
        """One of all that these have counted, as far as they are there."""
        rows = [self._rows[key] for key in keys if key in self._rows]
        whole = Histogram(self._unit)
        if rows:
            totals, maxima = self._totals[rows], self._maxima[rows]
            whole.take(self._counts[rows].sum(0), float(totals.sum()), maxima.max())
        return whole


_Parsed = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Counts ([n, buckets] int64), totals and maxima ([n] float64)."""


def _parsed(plains: list[Plain], unit: Unit) -> _Parsed:
    try:
        return _well_formed(plains, unit)
    except (LookupError, TypeError, OverflowError, ValueError):
        found = [_one(plain, unit) for plain in plains]
    width = len(EDGES[unit])
    return (
        np.array([each.counts for each in found], np.int64).reshape(-1, width),
        np.array([each.total for each in found]),
        np.array([each.max for each in found]),
    )


def _well_formed(plains: list[Plain], unit: Unit) -> _Parsed:
    """All together.

    Raises:
        LookupError, TypeError, OverflowError, ValueError: One is no histogram.
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
