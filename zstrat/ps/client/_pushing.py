"""One push: the message for each parameter server, and what came of it.

Decides without I/O. All updates of one server are in one message, as it applies all or
none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, final

from zstrat.ps.store._ledger import UNNAMED
from zstrat.wire import Push, Update, UpdateOp

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy as np

    from zstrat.wire import Exchanged, Pushed


class PsUpdate(NamedTuple):
    """What a push does to one variable. ``optimizer`` is 0 unless ``op`` optimises."""

    ps: int
    key: int
    op: UpdateOp
    optimizer: int
    arrays: Sequence[np.ndarray]


@final
class Pushing:
    """``messages`` by server; `take` is given the answers, and `result` says what the
    caller wants to know when all are here."""

    __slots__ = ("_applied", "messages")

    def __init__(
        self,
        session: int,
        step: int,
        part: int,
        low_water: int,
        updates: Iterable[PsUpdate],
        writer: int = 0,
    ) -> None:
        mine: dict[int, tuple[list[Update], list[np.ndarray]]] = {}
        for ps, key, op, optimizer, operands in updates:
            if ps not in mine:
                mine[ps] = ([], [])
            entries, arrays = mine[ps]
            entries.append(Update(key, int(op), optimizer, len(operands)))
            arrays.extend(operands)
        self.messages = {
            ps: Push(session, step, part, low_water, entries, tuple(arrays), writer)
            for ps, (entries, arrays) in mine.items()
        }
        self._applied = not mine

    def take(self, answer: Pushed | Exchanged) -> None:
        self._applied |= answer.applied

    def result(self) -> bool:
        """Whether any server applied it, or there was nothing to apply."""
        return self._applied


@final
class OwnUpdates:
    """Numbers for the updates that a process makes by itself, outside of closures.

    ``writer`` is its incarnation; 0: its updates have no names.
    """

    __slots__ = ("_next", "_open", "writer")

    def __init__(self, writer: int) -> None:
        self.writer = writer
        self._next = 0
        self._open: dict[int, None] = {}  # in the order of their numbers

    def begin(self) -> tuple[int, int]:
        """A number that was never used, and the lowest one that is not over."""
        if not self.writer:
            return UNNAMED, 0
        number, self._next = self._next, self._next + 1
        self._open[number] = None
        return number, next(iter(self._open))

    def end(self, number: int) -> None:
        """That update is over, however it ended: what of it is still under way is of
        no effect once the servers know."""
        self._open.pop(number, None)
