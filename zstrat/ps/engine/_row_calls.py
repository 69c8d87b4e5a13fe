"""Updates of rows that share calls of one program: gathered, computed, scattered back.

The law: a call sees the rows of as many updates as fit into it, one behind the other,
whatever tables they are of.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ._arithmetic import RowRun, pack
from ._layouts import precision
from ._slots import RowStep, Slots, lose

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from ._row_programs import RowKind, RowKinds, RowProgram


class Open(NamedTuple):
    """An update under way: where its rows are, as opaque vectors."""

    step: RowStep
    tables: list[np.ndarray]


class Ready(NamedTuple):
    """Updates that go into the same calls, and need nothing beforehand."""

    kind: RowKind
    opened: list[Open]

    @property
    def steps(self) -> list[RowStep]:
        return [step for step, _ in self.opened]

    @property
    def is_compiled(self) -> bool:
        programs = self.kind.programs
        rows = sum([len(step.indices) for step, _ in self.opened])
        return all(size in programs for size in self.kind.sizes(rows))


def together(kind: RowKind, slots: Slots, number: int) -> object:
    """Updates of a kind for which this is equal share a call: those with equal slots
    without rows, and each by itself (``number``) if these are computed from rows."""
    if not kind.is_apart:
        return number
    return b"".join([cell.look().tobytes() for cell in slots.shared])


def calls(
    optimizer: int, kinds: RowKinds, kind: RowKind, opened: Sequence[Open]
) -> list[np.ndarray]:
    """Updates the rows of all; returns the new slots without rows."""
    steps = [step for step, _ in opened]
    shared = [cell.look() for cell in steps[0].slots[optimizer].shared]
    new: list[np.ndarray] | None = None
    counts = [len(step.indices) for step in steps]
    packed, sizes = pack(counts, kind.most), kind.sizes(sum(counts))
    for pieces, size in zip(packed, sizes, strict=True):
        try:
            program = kinds.program(kind, size, steps[0].cell)
            _fill(program, pieces, opened)
            with precision(kind.layout.is_wide):
                fresh, others = program.run(shared, steps[0].operands)
        except Exception as error:
            # Goes to the caller. Only XLA itself can fail here, out of memory say.
            if new is not None:  # some rows are written and others are not
                lose(optimizer, steps, error)
            raise
        _scatter(pieces, opened, fresh)
        if new is None:
            new = others
    assert new is not None
    return new


def _fill(
    program: RowProgram, pieces: Sequence[RowRun], opened: Sequence[Open]
) -> None:
    """Gathers the rows of one call; the padding is zero, where nothing overflows."""
    at = 0
    for update, start, stop in pieces:
        step, tables = opened[update]
        indices, end = step.indices[start:stop], at + stop - start
        for table, buffer in zip(tables, program.opaque, strict=False):
            table.take(indices, out=buffer[at:end], mode="clip")
        program.inputs[-1][at:end] = step.gradient[start:stop]
        at = end
    if at < len(program.inputs[-1]):
        for buffer in program.inputs:
            buffer[at:] = 0


def _scatter(
    pieces: Sequence[RowRun], opened: Sequence[Open], fresh: Sequence[np.ndarray]
) -> None:
    at = 0
    for update, start, stop in pieces:
        step, tables = opened[update]
        indices, end = step.indices[start:stop], at + stop - start
        for table, rows in zip(tables, fresh, strict=True):
            table[indices] = rows[at:end]
        at = end
