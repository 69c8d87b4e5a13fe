"""The ids of the rows of a table, their uses and changes, and the initial rows of new
ids."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar, Final, final

import numpy as np

from zstrat.errors import InvalidArgumentError, ResourceExhaustedError
from zstrat.ids import IdGenerator, hashes_of, mixed
from zstrat.ps.engine._arithmetic import gather
from zstrat.ps.store._cell import Cell

from ._growing_cell import GrowingCell
from ._index import NO_ROW
from ._waiting import COUNTS, WAITING, IdNumbers, IndexedIds, Sketch, WaitingIds

if TYPE_CHECKING:
    from collections.abc import Iterable

    from zstrat.initializers import Initializer
    from zstrat.wire import TableEntry

IDS: Final = ".ids"
"""The name of the ids of the rows, among the arrays that a copy or a snapshot has
besides the value."""

USES: Final = ".uses"
CLOCK: Final = ".clock"
TIMES: Final = ".times"
CHANGED: Final = ".changed"
CUT: Final = ".cut"
GONE: Final = ".gone"
GONE_AT: Final = ".gone_at"
TALL: Final = (IDS, USES, CHANGED)
"""Names of the arrays that have one row for each row of the value."""

_DRAWN: Final = 2**16
"""Number of elements of initial rows that are drawn at a time: few enough to stay in
the processor's cache, which takes less than half the time."""

_MARKS: Final = 256
"""The most times that are noted; twice the number of parts into which an age is
divided."""

_COIN: Final = np.uint64(0x5DEECE66D)
_ID: Final = np.dtype(np.int64)


@final
class IdTable(IndexedIds):
    """The ids of the rows of one table: ``ids`` is int64 ``[height]``.

    Args:
        code: The pickled form of ``initializer``.
        who: Names the table in errors.
    """

    gone_kept: ClassVar[int] = 2**20
    """The number of removed ids that are remembered in any case; if the table has more
    rows, as many as it has rows."""

    def __init__(
        self, entry: TableEntry, code: bytes, initializer: Initializer, who: str
    ) -> None:
        self.entry, self.code, self._initializer = entry, code, initializer
        self._who = who
        super().__init__()
        self.uses: GrowingCell | None = None
        """For each row, the clock (`now`) at its last gradient, and the number of its
        gradients, uint32 ``[height, 2]``; None if the table does not note uses."""
        # A cell, as all of these are saved, copied and pinned like values.
        self._clock = Cell(np.zeros(1, _ID))
        self._times = Cell(np.full((_MARKS, 2), -1.0))
        """Noted times in seconds, ascending, each with the clock at that time. Unused
        entries come first, and are -1."""
        if entry.tracks:
            self.uses = GrowingCell((2,), np.dtype(np.uint32))
        self.waiting: WaitingIds | Sketch | None = None
        """Ids that were pushed and have no row yet, with their counts; None if every
        pushed id gets a row at once."""
        if entry.gradients > 1 and entry.sketch:
            self.waiting = Sketch(entry.gradients, entry.sketch, who)
        elif entry.gradients > 1:
            self.waiting = WaitingIds(entry.gradients, who)
        self.changed: GrowingCell | None = None
        """For each row, the number of its last change, int64 ``[height]``; None if the
        table does not note changes."""
        self.gone: IdNumbers | None = None
        """Removed ids, each with the number of the change that removed it; None if the
        table does not note changes."""
        self._cut = Cell(np.zeros(2, _ID))
        """The number of the last change (*cut*), and the number up to which removed ids
        were forgotten."""
        if entry.follows:
            self.changed = GrowingCell((), _ID)
            self.gone = IdNumbers(np.int64, f"{who}, {GONE}")
        for name, cell in self.leaves().items():
            cell.who = f"{who}, {name}"
        self.births = self.removed = self.refused = 0
        """Counts since the server has the table: rows added, rows removed, and
        gradients that were dropped because their id had no row."""

    @property
    def nbytes(self) -> int:
        """Bytes of ids, index, and all other arrays besides the value."""
        beside = self.uses, self.changed, self.waiting, self.gone
        return super().nbytes + sum(each.nbytes for each in beside if each is not None)

    def empty(self) -> IdTable:
        """Returns a table with the same settings and no rows, which may replace this
        one."""
        other = IdTable(self.entry, self.code, self._initializer, self._who)
        other.births, other.removed = self.births, self.removed
        other.refused = self.refused
        # Of the rows before nothing is known: cuts begin where those of the old table
        # end.
        other.set_cut(self.cut, self.cut)
        return other

    def leaves(self) -> dict[str, Cell]:
        """Returns the arrays that a copy or a snapshot has besides the value, by
        name."""
        found: dict[str, Cell] = {IDS: self.ids}
        if self.uses is not None:
            found |= {USES: self.uses, CLOCK: self._clock, TIMES: self._times}
        if self.waiting is not None:
            found |= {WAITING: self.waiting.ids, COUNTS: self.waiting.numbers}
        if self.changed is not None and self.gone is not None:
            found |= {CHANGED: self.changed, CUT: self._cut}
            found |= {GONE: self.gone.ids, GONE_AT: self.gone.numbers}
        return found

    @property
    def now(self) -> int:
        """The clock of the table: the number of pushes with gradients for the table,
        plus that of noted times."""
        return int(self._clock.look()[0])

    def _set_clock(self, now: int) -> None:
        self._clock.overwrite()[...] = now
        self._clock.settle()

    def note_use(self, rows: np.ndarray) -> None:
        """Notes one push with gradients for these distinct rows."""
        assert self.uses is not None
        now = self.now + 1
        self._set_clock(now)
        uses = self.uses.begin_rows(rows)
        uses[rows, 0] = now
        uses[rows, 1] += 1
        self.uses.settle()

    def note_time(self, now: float, seconds: float) -> None:
        """Notes the present time, with the clock at this time.

        Args:
            seconds: The age by which rows will be evicted. Times that are closer
                together than a 128th of it are not noted, and of the times that are
                longer ago only the last one is kept.
        """
        marks = self._times.look()
        marks = marks[marks[:, 1] >= 0]
        marks[:, 0] = np.minimum(marks[:, 0], now)  # the clock was set back
        after = np.append(marks[1:, 0], np.inf)
        marks = marks[(after > now - seconds) & (after > marks[:, 0])]
        if not len(marks) or now - marks[-1, 0] >= seconds * 2 / _MARKS:
            marks = np.append(marks, [[now, self.now]], axis=0)
            self._set_clock(self.now + 1)  # rows that are assigned next are later
        if len(marks) > _MARKS:  # the age was less before
            marks = marks[(len(marks) + 1) % 2 :: 2]
        noted = self._times.overwrite()
        noted[...] = -1.0
        noted[len(noted) - len(marks) :] = marks
        self._times.settle()

    def clock_at(self, time: float) -> int:
        """Returns the clock at the last noted time that is not after ``time``; -1 if
        there is none."""
        marks = self._times.look()
        known = marks[(marks[:, 1] >= 0) & (marks[:, 0] <= time), 1]
        return int(known.max(initial=-1))

    @property
    def cut(self) -> int:
        """The number of the last change of any rows."""
        return int(self._cut.look()[0])

    def require_cut(self, since: int) -> None:
        """Checks that it is known what has changed since the change with the number
        ``since``.

        Raises:
            InvalidArgumentError: The number is too old, or the table does not note
                changes.
        """
        forgotten = int(self._cut.look()[1])
        if self.changed is None:
            raise InvalidArgumentError(
                f"{self._who}: the table does not note what changes: create it so "
                "that it follows changes"
            )
        if not forgotten <= since <= self.cut:
            raise InvalidArgumentError(
                f"{self._who}: it is not known what has changed since cut {since}, but "
                f"since {forgotten} to {self.cut}: read or save all of it"
            )

    def begin_cuts(self, session: int) -> None:
        """Starts the numbers of changes at one that only this session uses: a number
        from before a server was lost and restored must not be taken for a present
        one."""
        # From the session's number, so that all servers and copies count alike.
        number = int(mixed(np.array([session], np.uint64))[0] >> np.uint64(34)) << 32
        self.set_cut(number, number)

    def set_cut(self, cut: int, forgotten: int) -> None:
        self._cut.overwrite()[...] = cut, forgotten
        self._cut.settle()

    def note_changes(self, rows: Iterable[np.ndarray], removed: np.ndarray) -> None:
        """Notes one change, in which ``rows`` (may repeat) were written and the ids
        ``removed`` were removed."""
        assert self.changed is not None
        assert self.gone is not None
        number = self.cut + 1
        for each in rows:
            self.changed.begin_rows(each)[each] = number
            self.changed.settle()
        forgotten = int(self._cut.look()[1])
        try:
            self.gone.put(np.unique(removed), number)
            is_full = len(self.gone) > max(self.gone_kept, self.ids.shape[0])
        except ResourceExhaustedError:  # rows were written: it is too late to fail
            is_full = True
        if is_full:  # nobody asks, or all of the table is less to read
            self.gone.clear()
            forgotten = number
        self.set_cut(number, forgotten)

    def forget_removed(self, cut: int) -> None:
        """Forgets which ids were removed up to the change with the number ``cut``."""
        if self.gone is not None:
            gone = self.gone.ids.look()[self.gone.numbers.look() <= cut]
            self.gone.drop(gone)
            before = int(self._cut.look()[1])
            # Not beyond the last change: all later cuts would be refused.
            self.set_cut(self.cut, max(before, min(cut, self.cut)))

    def removed_since(self, cut: int, first: int, last: int) -> np.ndarray:
        """Returns the ids in buckets from ``first`` to before ``last`` that were
        removed since the change ``cut``, and have no row now."""
        assert self.gone is not None
        ids, places = self.gone.index.items(first, last)
        ids = ids.compress(self.gone.numbers.look().take(places) > cut)
        return ids.compress(self.index.rows(ids) == NO_ROW)

    def are_lucky(self, ids: np.ndarray) -> np.ndarray:
        """Returns which ids may get a row, bool ``[n]``: each with the chance of the
        table, always with the same result for the same id."""
        if self.entry.chance >= 1.0:
            return np.ones(len(ids), bool)
        # 53 bits, as many as the fraction of a float64 has.
        coins = mixed(hashes_of(ids) ^ _COIN) >> np.uint64(11)
        return coins < np.uint64(max(0.0, self.entry.chance) * 2.0**53)

    def forget_index(self) -> None:
        """Drops all indices, because other code has written the ids."""
        super().forget_index()
        for each in self.waiting, self.gone:
            if each is not None:
                each.forget_index()

    def make_indices(self) -> None:
        """Makes the indices that `forget_index` has dropped."""
        _ = self.index
        for each in self.waiting, self.gone:
            if each is not None:
                _ = each.index

    def first_rows(self, ids: np.ndarray, out: np.ndarray) -> None:
        """Writes the initial rows of these ids to ``out``, ``[n, *row]``."""
        # Drawn from seed and id alone: any server, and any order, gives the same rows.
        size = max(1, _DRAWN // math.prod(out.shape[1:]))
        for start in range(0, len(ids), size):
            some = slice(start, start + size)
            self._initializer.rows(IdGenerator(self.entry.seed, ids[some]), out[some])

    def read(self, value: np.ndarray, ids: np.ndarray) -> np.ndarray:
        """Returns a copy of the rows of ids, in their order; for an id without a row,
        its initial row. Changes nothing.

        Args:
            value: The value of the table, ``[height, *row]``.
        """
        rows = self.index.rows(ids)
        unknown = np.flatnonzero(rows == NO_ROW)
        if not unknown.size:
            return gather(value, rows)
        out = np.empty((len(ids), *value.shape[1:]), value.dtype)
        known = np.flatnonzero(rows != NO_ROW)
        if known.size:
            out[known] = gather(value, rows.take(known))
        first = np.empty((len(unknown), *value.shape[1:]), value.dtype)
        self.first_rows(ids.take(unknown), first)
        out[unknown] = first
        return out
