"""What updates do to a value, and how many of them need memory beside it.

Decides without a cell being touched: the answer is what `Cell.reserve` has to have
before the first update of a push begins.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ._cell import Cell


class Write(Enum):
    """What an update does to a value."""

    ANEW = "numpy writes all of it, whatever it was"
    WHOLE = "numpy computes all of it from what it was"
    ROWS = "numpy writes some rows"
    GIVE = "XLA takes it and gives another one back"


def wanted_beside(
    cell: Cell, writes: Iterable[Write], is_lost: bool, on_device: bool
) -> int:
    """How many of these updates, in this order, go beside the value as it is by then:
    ``is_lost`` if there is none to begin with, ``on_device`` if XLA has it.

    Raises:
        UnavailableError: The value was lost, and is not assigned first.
    """
    wanted = 0
    for write in writes:
        if write is Write.ANEW:
            is_lost = False
        elif is_lost:
            cell.require()
        if write is Write.GIVE:
            on_device = True
            continue
        # What is beside once is our own until XLA takes it.
        beside = on_device
        if not (beside or wanted):
            rows = write is Write.ROWS
            beside = cell.is_shared or (cell.is_pinned and not rows)
        wanted += beside
        on_device = False
    return wanted
