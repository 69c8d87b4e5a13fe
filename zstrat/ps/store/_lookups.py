"""Rows of variables that a request reads: validated, then gathered on any thread.

An answer is as large as its indices are many, whatever the tables are, so what a
request asks for is bounded before memory is taken for it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np

from zstrat.errors import InvalidArgumentError, ResourceExhaustedError
from zstrat.ps.client._reading import ROWS
from zstrat.ps.engine._arithmetic import check_rows, gather

from ._creating import available_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from zstrat.ps.engine._slots import HeldVariable
    from zstrat.wire import Exchange, PullRows

    from ._variables import HeldVariables

_LARGE_REPLY: Final = 2**20
"""Bytes of rows above which a caller learns the size of its answer before it: see
`Caller.promise`."""
ASKED_ABOVE: Final = 16 * 2**20
"""Bytes of rows for which it is asked whether the machine has them: asking takes as
long as gathering a hundred KiB."""


@dataclass(slots=True)
class RowsPlan:
    """Validated reads: rows to gather, and values that are leased (`Store.plan_rows`).
    ``work`` is the bytes of the rows."""

    generation: int
    wanted: Sequence[tuple[HeldVariable, np.ndarray]]
    work: int
    versions: list[int] = field(default_factory=list)
    leases: Sequence[np.ndarray] = ()
    rows: list[np.ndarray] = field(default_factory=list)

    def compute(self) -> None:
        """Gathers; raises UnavailableError for a value that was lost."""
        for held, indices in self.wanted:
            try:
                self.rows.append(gather(held.cell.look(), indices))
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
    """Returns a lookup of rows of these variables.

    Args:
        largest: Bound of the bytes of the answer.

    Raises:
        NotFoundError: No variable has one of the keys.
        InvalidArgumentError: Some indices are outside the variable's rows, they are not
            one array per variable, or the answer would be too large.
        ResourceExhaustedError: The machine has not four times the memory for it.
    """
    task = variables.task
    if len(rows) > ROWS:
        raise too_many(task, "reads rows of", len(rows), ROWS)
    if len(rows) != len(indices):
        raise InvalidArgumentError(
            f"{task}: rows of {len(rows)} variables are wanted by {len(indices)} "
            "arrays of indices"
        )
    wanted, work = [], 0
    for key, at in zip(rows, indices, strict=True):
        held = variables[key]
        shape, who = held.cell.shape, f"variable {held.entry.name!r}: a lookup"
        check_rows(at, (at.size, *shape[1:]), shape, who)
        wanted.append((held, at.astype(np.intp, copy=False)))
        # 16: an index as it came, and its copy as intp, if it needs one.
        work += len(at) * (held.cell.nbytes // max(1, shape[0]) + 16)
    if work > largest:
        raise InvalidArgumentError(
            f"{task}: a lookup asks for {work} bytes of rows, the limit is {largest}: "
            "ask for fewer at a time"
        )
    _check_memory(task, work)
    return RowsPlan(variables.generation, wanted, work)


def promise_large_reply(
    variables: HeldVariables,
    message: PullRows | Exchange,
    promise: Callable[[int], None],
) -> None:
    """Counts a large answer as waiting before it is computed: a short message may ask
    for many bytes, and its sender must not ask for more before it has read them.

    Args:
        promise: `Caller.promise` of the sender.
    """
    nbytes, operands = 0, len(message.arrays) - len(message.rows)
    # Not validated yet: as far as its variables exist.
    for key, at in zip(message.rows, message.arrays[operands:], strict=False):
        held = variables.get(key)
        if held is not None and held.cell.shape:
            nbytes += at.size * (held.cell.nbytes // max(1, held.cell.shape[0]))
    if nbytes > _LARGE_REPLY:
        promise(nbytes)


def too_many(task: str, what: str, count: int, most: int) -> InvalidArgumentError:
    """Returns the words for a message that names more variables than one may."""
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
