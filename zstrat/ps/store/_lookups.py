"""Lookups: rows of variables that a request reads. Validated first, then gathered on
any thread.

The size of an answer grows with the number of its indices, not with the tables. So that
size is checked before memory is allocated for it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np

from zstrat.errors import InvalidArgumentError, ResourceExhaustedError
from zstrat.ids import BUCKETS
from zstrat.memory import available_bytes
from zstrat.ps.client._reading import ROWS
from zstrat.ps.engine._arithmetic import check_ids, check_rows, gather
from zstrat.ps.tables import NO_ROW

from ._plan import StorePlan

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from zstrat.ps.engine._slots import HeldVariable
    from zstrat.ps.tables._id_table import IdTable
    from zstrat.wire import Exchange, PullRows, PullTable

    from ._variables import HeldVariables

_LARGE_REPLY: Final = 2**20
"""Bytes of rows above which the size of an answer is announced to the transport before
the answer is computed: see `Caller.promise`."""
ASKED_ABOVE: Final = 16 * 2**20
"""Bytes of rows above which the machine is asked whether it has so much memory: asking
takes as long as gathering a hundred KiB."""

SEARCH: Final = 256
"""Bytes that are gathered in the time in which one id is found in a table. Making the
initial row for an id that is not found takes as long as its row again, and more."""


@dataclass(slots=True)
class RowsPlan(StorePlan):
    """The plan of a validated read of rows to gather, and of values that are leased
    (`Store.plan_rows`). ``work`` estimates the bytes that are moved."""

    generation: int
    wanted: Sequence[tuple[HeldVariable, np.ndarray]]
    work: int
    versions: list[int] = field(default_factory=list)
    leases: Sequence[np.ndarray] = ()
    rows: list[np.ndarray] = field(default_factory=list)

    def compute(self) -> None:
        """Gathers the rows. Raises UnavailableError for a value that was lost."""
        for held, indices in self.wanted:
            # No lease: the plan has the variable's turn, and `gather` copies.
            value = held.cell.look()
            try:
                if held.table is not None:
                    self.rows.append(held.table.read(value, indices))
                else:
                    self.rows.append(gather(value, indices))
            except MemoryError:
                raise ResourceExhaustedError(
                    f"{held.cell.who}: not enough memory for {len(indices)} rows of it"
                ) from None


def rows_plan(
    variables: HeldVariables,
    rows: Sequence[int],
    indices: Sequence[np.ndarray],
    largest: int,
) -> RowsPlan:
    """Returns the plan to gather rows of these variables.

    Args:
        largest: The most bytes that the answer may have.

    Raises:
        NotFoundError: No variable has one of the keys.
        InvalidArgumentError: Indices are out of range, there is not one array of them
            per variable, or the answer would be too large.
        ResourceExhaustedError: The machine does not have four times the memory of the
            answer.
    """
    task = variables.task
    if len(rows) > ROWS:
        raise too_many(task, "reads rows of", len(rows), ROWS)
    if len(rows) != len(indices):
        raise InvalidArgumentError(
            f"{task}: rows of {len(rows)} variables are wanted by {len(indices)} "
            "arrays of indices"
        )
    wanted, work, searched = [], 0, 0
    for key, at in zip(rows, indices, strict=True):
        held = variables[key]
        shape, who = held.cell.shape, f"variable {held.entry.name!r}: a lookup"
        if held.table is not None:
            check_ids(at, (at.size, *shape[1:]), shape, who)
            wanted.append((held, at))
            searched += len(at) * (held.cell.row_bytes + SEARCH)
        else:
            check_rows(at, (at.size, *shape[1:]), shape, who)
            wanted.append((held, at.astype(np.intp, copy=False)))
        # 16: an index as it came, and its copy as intp, if it needs one.
        work += len(at) * (held.cell.row_bytes + 16)
    if work > largest:
        raise InvalidArgumentError(
            f"{task}: a lookup asks for {work} bytes of rows, the limit is {largest}: "
            "ask for fewer at a time"
        )
    # After the limit: the kernel is not asked about what is refused anyway.
    _check_memory(task, work)
    return RowsPlan(variables.generation, wanted, work + searched)


@dataclass(frozen=True, slots=True)
class TableItems:
    """The plan of a validated read of a table: rows in its buckets from ``first`` to
    before ``last``.

    Args:
        largest: The most bytes that the answer may have.
    """

    held: HeldVariable
    first: int
    last: int
    largest: int
    since: int = -1
    wanted: np.ndarray | None = None
    """Distinct ids whose rows are read, instead of buckets."""

    @property
    def work(self) -> int:
        """Estimates the bytes that reading the rows moves in memory."""
        table = require_table(self.held)
        if self.wanted is None:
            rows = table.index.most(self.first, self.last)
        else:
            rows = len(self.wanted)
        return rows * (self.held.cell.row_bytes + 2 * SEARCH)

    def read(self) -> tuple[np.ndarray, ...]:
        """Returns ids and rows; with ``since`` also the ids that were removed, and the
        cut.

        Raises:
            UnavailableError: The value was lost.
            InvalidArgumentError: There are too many rows for one answer.
        """
        held, value = self.held, self.held.cell.look()
        table = held.table
        assert table is not None
        if self.wanted is None:
            ids, at = table.index.items(self.first, self.last)
        else:
            # Ids that were removed, or never came, are left out of the answer.
            at = table.index.rows(self.wanted)
            there = at != NO_ROW
            ids, at = self.wanted[there], at[there]
        further: tuple[np.ndarray, ...] = ()
        # The turn of the table is held, so rows and changes are of one moment.
        if table.changed is not None and self.since >= 0:
            new = table.changed.look().take(at) > self.since
            ids, at = ids[new], at[new]
            removed = table.removed_since(self.since, self.first, self.last)
            further = removed, np.array([table.cut])
        nbytes = len(at) * (held.cell.row_bytes + 8)
        if nbytes > self.largest:
            raise InvalidArgumentError(
                f"{held.cell.who}: buckets {self.first} to {self.last} are {nbytes} "
                f"bytes, the limit is {self.largest}: ask for fewer at a time"
            )
        return ids, gather(value, at), *further


def table_items(
    variables: HeldVariables, message: PullTable, largest: int
) -> TableItems:
    """Returns a read of buckets of a table.

    Raises:
        NotFoundError: No variable has the key.
        InvalidArgumentError: It is not a table, or has no such buckets, or it is not
            known what has changed since.
    """
    key, first, last, since = message.key, message.first, message.last, message.since
    held = variables[key]
    table = require_table(held)
    if since >= 0:
        table.require_cut(since)
    if not 0 <= first <= last <= BUCKETS:
        raise InvalidArgumentError(
            f"{held.cell.who}: expected buckets from 0 to {BUCKETS}, got {first} to "
            f"{last}"
        )
    if len(message.arrays) > 1:
        raise InvalidArgumentError(
            f"{held.cell.who}: expected one array of ids at most, got "
            f"{len(message.arrays)}"
        )
    for ids in message.arrays:
        check_ids(ids, (ids.size, *held.cell.shape[1:]), held.cell.shape, held.cell.who)
    wanted = message.arrays[0] if message.arrays else None
    return TableItems(held, first, last, largest, since, wanted)


def require_table(held: HeldVariable) -> IdTable:
    """Returns the ids of a table.

    Raises:
        InvalidArgumentError: The variable is not a table of any id.
    """
    if held.table is None:
        raise InvalidArgumentError(
            f"{held.cell.who} is not a table of any id: read its rows by their indices"
        )
    return held.table


def promise_large_reply(
    variables: HeldVariables,
    message: PullRows | Exchange,
    promise: Callable[[int], None],
) -> None:
    """Announces the size of a large answer before the answer is computed: a short
    message may ask for many bytes, and its sender may not ask for more before it has
    read them.

    Args:
        promise: `Caller.promise` of the sender.
    """
    nbytes = 0
    operands = len(message.arrays) - len(message.rows) - len(message.sets)
    # Not validated yet: as far as its variables exist.
    for key, at in zip(message.rows, message.arrays[max(0, operands) :], strict=False):
        held = variables.get(key)
        if held is not None and held.cell.shape:
            nbytes += at.size * held.cell.row_bytes
    if nbytes > _LARGE_REPLY:
        promise(nbytes)


def too_many(task: str, what: str, count: int, most: int) -> InvalidArgumentError:
    """Returns the error for a message that names ``count`` variables where at most
    ``most`` are allowed."""
    return InvalidArgumentError(
        f"{task}: a message {what} {count} variables, the limit is {most}: send several"
    )


def _check_memory(task: str, work: int) -> None:
    if work < ASKED_ABOVE:
        return
    left = available_bytes()
    if left is not None and work > left // 4:
        raise ResourceExhaustedError(
            f"{task}: a lookup asks for {work} bytes of rows, of {left} that are left "
            "on its machine: ask for fewer at a time"
        )
