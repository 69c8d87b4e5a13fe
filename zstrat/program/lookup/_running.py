"""One step with lookups on its way through its levels.

An answer is the values and rows of one `Wanted`. The values come with the first one and
stay; of the rows of each level the blocks are made when the next thing is computed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from zstrat.program._results import Computed

from ._lookups import Wanted

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from ._lookups import LevelRequest
    from ._rows_program import RowsProgram


class Lookups:
    """What one step has asked for and got.

    ``given`` are the leaves of arguments and elements.
    """

    __slots__ = ("_asked", "_blocks", "_given", "_program")

    def __init__(self, program: RowsProgram, given: list[Any]) -> None:
        self._program = program
        self._given = given
        self._asked: list[LevelRequest | None] = []
        self._blocks: list[list[np.ndarray]] = []

    def first(self) -> Wanted:
        """What is wanted before anything was answered.

        Raises:
            IndexError: A table has no such row.
        """
        return Wanted(self._program.plan.reads, self._ask())

    def advance(self, answer: Sequence[np.ndarray]) -> Wanted | None:
        """What is wanted next, None if nothing is. Raises as `first`."""
        if len(self._asked) == self._program.plan.levels:
            return None
        self._take(answer)
        return Wanted((), self._ask())

    def compute(self, answer: Sequence[np.ndarray]) -> Computed:
        """Computes with the last answer."""
        self._take(answer)
        outputs = self._program(self._given, self._blocks)
        arrays = [*outputs.operands.values(), outputs.shared]
        return Computed(
            outputs.results,
            arrays,
            lambda: self._program.updates(outputs, self._asked),
        )

    def _ask(self) -> tuple[Any, ...]:
        number = len(self._asked)
        level = self._program.levels[number]
        if level is None:
            self._asked.append(None)
            return ()
        ids = self._program.ids(number, self._given, self._blocks)
        asked = level.ask(ids)
        self._asked.append(asked)
        return asked.rows

    def _take(self, answer: Sequence[np.ndarray]) -> None:
        number = len(self._blocks)
        rows = answer
        if number == 0:
            reads = len(self._program.plan.reads)
            self._given = [*self._given, *answer[:reads]]
            rows = answer[reads:]
        level, asked = self._program.levels[number], self._asked[number]
        if level is None or asked is None:
            self._blocks.append([])
        else:
            self._blocks.append(level.assembled(asked, rows))
