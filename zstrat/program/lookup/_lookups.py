"""The requests of a step to parameter servers, level by level, and their answers.

A step asks for everything that it reads in one request. If ids of lookups depend on
values that it reads, it sends another request with these ids: each round is a *level*.
A step without lookups has one level.

The lookups of one level are executed together: ids are converted to the rows to
request, and answers to the rows that lookups return. All ids of a level are one vector,
table after table. In it, each row of each component has its own number: the rows of the
first component, then those of the second, and so on. One sort of these numbers finds
duplicates in any table, the component of each row, and the positions of each row in the
result. Tables with rows of the same shape and dtype are neighbours: their rows are one
array, a *block*, which the program takes as one input and slices.

Ids of a hash table have no fixed row numbers: the ids of one request are numbered in
the order of their hashes, which is also the order of the components.

Law of the file: the layout of a level is computed once; a step does no work per lookup,
and per component only a slice.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from zstrat.memory import aligned
from zstrat.rows import Runs, runs
from zstrat.variables import TableLayout, absent

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zstrat.variables import Table, VariableSpec

    Kind = tuple[str, tuple[int, ...]]


Part = tuple["VariableSpec", slice, np.ndarray]
"""A component, the slice of the summed rows that belongs to it, and the indices of
these rows in it."""


class WantedRows(NamedTuple):
    """The rows of one variable that a step requests: ``indices`` ``[n]`` of its first
    axis, int64, strictly ascending; or ids of a part of a hash table, with strictly
    ascending hashes."""

    spec: VariableSpec
    indices: np.ndarray


class Wanted(NamedTuple):
    """One request of a step, for values of variables and for rows.

    The answer is one list: the values of ``reads`` in order, then for each of ``rows``
    an array ``[n, ...]`` of the variable's dtype.
    """

    reads: tuple[VariableSpec, ...] = ()
    rows: tuple[WantedRows, ...] = ()


@dataclass(frozen=True, slots=True)
class PlannedLookup:
    """A lookup of rows of a table: the ``shape`` of its ids, the ``level`` of the
    request in which the rows are requested, and the user's line."""

    table: Table
    shape: tuple[int, ...]
    level: int
    where: str

    @property
    def size(self) -> int:
        """Number of ids of the lookup."""
        return int(np.prod(self.shape, dtype=np.int64))


class IdSegment(NamedTuple):
    """The ids of one table in a level: ``[start, stop)`` of the vector of ids. The
    table's rows are numbered from ``base``, its components from ``first``."""

    table: Table
    lookups: tuple[int, ...]
    start: int
    stop: int
    base: int
    first: int

    @property
    def heights(self) -> list[int]:
        """How many row numbers each component has. The components of a hash table share
        as many numbers as there are ids; all are counted for the first component."""
        if self.table.is_hashed:
            others = len(self.table.components) - 1
            return [self.stop - self.start, *[0] * others]
        return [component.shape[0] for component in self.table.components]


class LookupBlock(NamedTuple):
    """Segments whose rows have the same shape and dtype: ids ``[start, stop)`` of the
    vector, components ``[first, last)``."""

    kind: Kind
    segments: tuple[IdSegment, ...]
    start: int
    stop: int
    first: int
    last: int


class LevelRequest(NamedTuple):
    """The request of one step for a level.

    The rows of component c are ``found.unique[cuts[c]:cuts[c + 1]]``; ``rows`` has the
    components of which rows are requested. ``absent_mask`` marks ids that are `ABSENT`,
    if any; they are not in ``found``.
    """

    found: Runs
    cuts: list[int]
    rows: tuple[WantedRows, ...]
    absent_mask: np.ndarray | None = None


class Level:
    """The layout of the lookups of one level; ``order`` is the order of the lookups'
    ids in the vector."""

    def __init__(self, lookups: Sequence[tuple[int, PlannedLookup]]) -> None:
        self._planned = dict(lookups)
        self.blocks: tuple[LookupBlock, ...] = _blocks(lookups)
        segments = [segment for block in self.blocks for segment in block.segments]
        self.order: tuple[int, ...] = tuple(
            [number for segment in segments for number in segment.lookups]
        )
        self.size: int = segments[-1].stop
        self._segments = segments
        self._components = [c for segment in segments for c in segment.table.components]
        heights = [height for segment in segments for height in segment.heights]
        # The first number of each component, and the end of the last one.
        self._bounds = np.cumsum([0, *heights], dtype=np.int64)
        # An id plus its base is the number of its row among those of all tables.
        self._base = np.repeat(
            np.array([s.base for s in segments], np.int64),
            [s.stop - s.start for s in segments],
        )
        # Without empty segments, for which ``reduceat`` returns an element of the next
        # one.
        self._full = [segment for segment in segments if segment.start < segment.stop]
        self._starts = np.array([segment.start for segment in self._full], np.intp)
        fits = np.iinfo(np.int64)
        ends = [
            (fits.min, fits.max) if s.table.is_hashed else (0, s.table.shape[0] - 1)
            for s in self._full
        ]
        self._least, self._most = np.array(ends, np.int64).reshape(-1, 2).T
        self._modular = [s for s in self._full if s.table.layout is TableLayout.MOD]
        self._hashed = [s for s in self._full if s.table.is_hashed]

    def ask(self, ids: np.ndarray) -> LevelRequest:
        """Makes the request for ids ``[size]``, int64.

        Raises:
            IndexError: An id is outside of its table; names the id and the user's line.
        """
        # Most requests have no padding, and need no mask.
        absent_mask = absent(ids) if self._require_inside(ids) else None
        if 0 < len(self._hashed) == len(self._full):
            return self._ask_hashed(ids, absent_mask)
        keys = ids + self._base
        for segment in self._modular:
            own = slice(segment.start, segment.stop)
            count = len(segment.table.components)
            bounds = self._bounds[segment.first : segment.first + count]
            # Row i of the table is row i // count of component i % count.
            keys[own] = bounds[ids[own] % count] + ids[own] // count
        bounds = self._bounds
        ids_of: dict[int, np.ndarray] = {}
        if self._hashed:
            bounds, ids_of = self._numbered(ids, keys)
        if absent_mask is None:
            found = runs(keys)
        else:  # positions among all keys
            found = runs(keys[~absent_mask])
            found = found._replace(order=np.flatnonzero(~absent_mask)[found.order])
        cuts = np.searchsorted(found.unique, bounds).tolist()
        wanted = [
            WantedRows(
                component.spec,
                found.unique[start:stop] - bounds[c]
                if c not in ids_of
                else ids_of[c].take(found.unique[start:stop] - bounds[c]),
            )
            for c, (component, (start, stop)) in enumerate(
                zip(self._components, itertools.pairwise(cuts), strict=True)
            )
            if start < stop
        ]
        return LevelRequest(found, cuts, tuple(wanted), absent_mask)

    def _ask_hashed(
        self, ids: np.ndarray, absent_mask: np.ndarray | None
    ) -> LevelRequest:
        """Does what `ask` does, if all tables are hash tables: ids are sorted once,
        table by table."""
        parts: list[Runs] = []
        cuts, wanted = [0], []
        kept = 0
        for segment in self._segments:
            own = ids[segment.start : segment.stop]
            places: np.ndarray | None = None
            if absent_mask is not None:
                absent_here = absent_mask[segment.start : segment.stop]
                places = np.flatnonzero(~absent_here)
                own = own.take(places)
            found = segment.table.runs(own)
            # The end of one table is the beginning of the next one.
            before = cuts.pop()
            ends = segment.table.cuts(found.unique)
            for component, (start, stop) in zip(
                segment.table.components, itertools.pairwise(ends), strict=True
            ):
                cuts.append(before + start)
                if start < stop:
                    some = found.unique[start:stop]
                    wanted.append(WantedRows(component.spec, some))
            cuts.append(before + ends[-1])
            order = found.order if places is None else places.take(found.order)
            parts.append(
                found._replace(order=order + segment.start, starts=found.starts + kept)
            )
            kept += len(own)
        joined = parts[0]
        if len(parts) > 1:
            joined = Runs(*map(np.concatenate, zip(*parts, strict=True)))
        return LevelRequest(joined, cuts, tuple(wanted), absent_mask)

    def _numbered(
        self, ids: np.ndarray, keys: np.ndarray
    ) -> tuple[np.ndarray, dict[int, np.ndarray]]:
        """Numbers the ids of hash tables and writes the numbers to ``keys``. Returns
        the first number of each component, and by component the ids that have these
        numbers."""
        # Numbers of hashed ids are those of this request; the layout belongs to all
        # steps.
        bounds = self._bounds.copy()
        ids_of: dict[int, np.ndarray] = {}
        for segment in self._hashed:
            own, first = slice(segment.start, segment.stop), segment.first
            found = segment.table.runs(ids[own])
            keys[own] = found.inverse() + segment.base
            cuts = segment.table.cuts(found.unique)
            for c, (start, stop) in enumerate(itertools.pairwise(cuts), first):
                bounds[c] = segment.base + start
                ids_of[c] = found.unique[start:stop]
        return bounds, ids_of

    def assembled(
        self, asked: LevelRequest, answers: Sequence[np.ndarray]
    ) -> list[np.ndarray]:
        """Makes the array of rows ``[n, *row]`` of each block, in the order of its ids,
        from the answers to a request.

        Raises:
            ValueError: An answer does not fit the request.
        """
        _require_answers(asked, answers)
        inverse = _inverse(asked, self.size)
        left = iter(answers)
        blocks = []
        for block in self.blocks:
            first, last = asked.cuts[block.first], asked.cuts[block.last]
            full = range(block.first, block.last)
            parts = [next(left) for c in full if asked.cuts[c] < asked.cuts[c + 1]]
            places = inverse[block.start : block.stop]
            if not parts:
                table = block.segments[0].table
                rows = np.zeros((len(places), *table.shape[1:]), table.dtype)
            else:
                rows = parts[0] if len(parts) == 1 else np.concatenate(parts)
                assert len(rows) == last - first
                # Aligned, so XLA reads the rows where they are.
                own = aligned((len(places), *rows.shape[1:]), rows.dtype)
                # Rows of a block count from its own first one.
                places = places - first if first else places
                # mode="clip": the indices are valid, and numpy need not check them.
                rows = rows.take(places, 0, own, mode="clip")
                if asked.absent_mask is not None:
                    rows[asked.absent_mask[block.start : block.stop]] = 0
            blocks.append(rows)
        return blocks

    def runs_of(self, asked: LevelRequest, segments: Sequence[IdSegment]) -> Runs:
        """Returns the runs of equal ids of neighbouring segments; positions of ids and
        runs count from the first of these segments."""
        first, last = segments[0], segments[-1]
        low = asked.cuts[first.first]
        high = asked.cuts[last.first + len(last.table.components)]
        found, ids = asked.found, slice(first.start, last.stop)
        # Padding is not in the runs, so positions are counted by the runs before.
        if asked.absent_mask is not None:
            before = int(found.counts[:low].sum())
            ids = slice(before, before + int(found.counts[low:high].sum()))
        return Runs(
            found.unique[low:high],
            found.order[ids] - first.start,
            found.starts[low:high] - ids.start,
            found.counts[low:high],
        )

    def parts_of(
        self, asked: LevelRequest, segments: Sequence[IdSegment]
    ) -> list[list[Part]]:
        """Splits the runs of equal ids of neighbouring segments over the components of
        each segment."""
        first, rows = asked.cuts[segments[0].first], asked.rows
        # The request has only components with rows, so those before are counted.
        place = sum(asked.cuts[c] < asked.cuts[c + 1] for c in range(segments[0].first))
        parts: list[list[Part]] = []
        for segment in segments:
            own: list[Part] = []
            last = segment.first + len(segment.table.components)
            for c in range(segment.first, last):
                start, stop = asked.cuts[c] - first, asked.cuts[c + 1] - first
                if start < stop:
                    spec, indices = rows[place]
                    own.append((spec, slice(start, stop), indices))
                    place += 1
            parts.append(own)
        return parts

    def _require_inside(self, ids: np.ndarray) -> bool:
        """Refuses ids outside of their table; returns whether some ids may be
        `ABSENT`."""
        if not len(self._starts):
            return False
        # All tables in one pass; which id it is, is only asked if one is outside.
        low = np.minimum.reduceat(ids, self._starts)
        high = np.maximum.reduceat(ids, self._starts)
        if not ((low < self._least) | (high > self._most)).any():
            return bool((low < 0).any())
        for segment in self._full:
            start = segment.start
            for number in segment.lookups:
                lookup = self._planned[number]
                try:
                    lookup.table.require_inside(ids[start : start + lookup.size])
                except IndexError as error:
                    raise IndexError(f"{lookup.where}: {error}") from None
                start += lookup.size
        return True


def _inverse(asked: LevelRequest, size: int) -> np.ndarray:
    """Returns for each id its index among the unique ids; any index for `ABSENT`."""
    if asked.absent_mask is None:
        return asked.found.inverse()
    found = asked.found
    # Row 0 for padding, which is overwritten with zeros later.
    inverse = np.zeros(size, np.intp)
    inverse[found.order] = np.repeat(np.arange(len(found.unique)), found.counts)
    return inverse


def _blocks(lookups: Sequence[tuple[int, PlannedLookup]]) -> tuple[LookupBlock, ...]:
    kinds: dict[Kind, dict[Table, list[int]]] = {}
    planned = dict(lookups)
    for number, lookup in lookups:
        table = lookup.table
        kind = (table.dtype.name, table.shape[1:])
        kinds.setdefault(kind, {}).setdefault(table, []).append(number)
    blocks, at, base, component = [], 0, 0, 0
    for kind, tables in kinds.items():
        segments = []
        for table, numbers in tables.items():
            stop = at + sum(planned[number].size for number in numbers)
            segment = IdSegment(table, tuple(numbers), at, stop, base, component)
            segments.append(segment)
            at, base = stop, base + sum(segment.heights)
            component += len(table.components)
        start, first = segments[0].start, segments[0].first
        blocks.append(LookupBlock(kind, tuple(segments), start, at, first, component))
    return tuple(blocks)


def _require_answers(asked: LevelRequest, answers: Sequence[np.ndarray]) -> None:
    for wanted, answer in zip(asked.rows, answers, strict=True):
        expected = (len(wanted.indices), *wanted.spec.shape[1:])
        if answer.shape != expected or answer.dtype != wanted.spec.numpy_dtype:
            raise ValueError(
                f"{wanted.spec.device} answered {answer.dtype}{list(answer.shape)} to "
                f"a read of {expected[0]} rows of {wanted.spec}; expected shape "
                f"{list(expected)}"
            )
