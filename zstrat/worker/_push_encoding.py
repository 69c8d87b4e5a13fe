"""`PushEncoding`: gradients in the format that their optimizer asks for (``wire=``),
where they go over a network."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, final

import numpy as np

from zstrat.codecs import BLOCK, ROW_BLOCK, Lent, Residuals, decode, encode
from zstrat.wire import CODED, Codec, UpdateOp

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from zstrat.codecs import Wire
    from zstrat.ps import PsUpdate

MIN_NUMBERS: Final = BLOCK
"""Gradients with fewer numbers travel as they are: the header costs more."""


@final
class PushEncoding:
    """Encodes the pushes of one session of a worker. For the executor thread.

    Args:
        shares_memory: Whether bodies to a parameter server go through shared memory,
            which is faster than any format. For any thread.
    """

    def __init__(self, shares_memory: Callable[[int], bool]) -> None:
        self._shares_memory = shares_memory
        self.residuals: Final = Residuals()
        self.bytes_before = 0
        """Bytes of the gradients that were encoded,"""
        self.bytes_after = 0
        """and of what stands for them."""

    def encoded(
        self, step: int, updates: Sequence[PsUpdate], wires: Mapping[int, Wire]
    ) -> tuple[list[PsUpdate], list[Lent]]:
        """Encodes the updates of a step.

        Args:
            wires: The formats, by number of the optimizer.

        Returns:
            The updates, and the residuals that they have taken: give them back to
            `residuals` when the push has ended.
        """
        lent: list[Lent] = []
        sent = [self._encoded(step, update, wires, lent) for update in updates]
        return sent, lent

    def _encoded(
        self,
        step: int,
        update: PsUpdate,
        wires: Mapping[int, Wire],
        lent: list[Lent],
    ) -> PsUpdate:
        wire = wires.get(update.optimizer)
        gradient = update.arrays[-1]
        if (
            wire is None
            or update.op not in (UpdateOp.OPTIMIZE, UpdateOp.OPTIMIZE_ROWS)
            or gradient.size < MIN_NUMBERS
            or gradient.dtype.kind in "iub"
            or self._shares_memory(update.ps)
        ):
            return update
        is_of_rows = update.op == UpdateOp.OPTIMIZE_ROWS
        codec = wire.codec
        if is_of_rows and codec is Codec.TOP_K:
            return update
        block = ROW_BLOCK if is_of_rows else BLOCK
        seed: int | None = step << 32 | update.key
        if wire.has_feedback and not is_of_rows:
            before, seed = self.residuals.take(update.key), None
            if before is not None:
                gradient = gradient + before
            coded = encode(
                codec, gradient, block=block, seed=seed, density=wire.density or 1.0
            )
            after = np.subtract(
                gradient, decode(codec, gradient.shape, coded, block), dtype=np.float32
            )
            # What is not finite was sent; kept, it would spoil all later steps.
            np.nan_to_num(after, copy=False, nan=0.0, posinf=0.0, neginf=0.0)
            lent.append(Lent(update.key, before, after))
        else:
            coded = encode(codec, gradient, block=block, seed=seed)
        self.bytes_before += update.arrays[-1].nbytes
        self.bytes_after += sum(array.nbytes for array in coded)
        arrays = (*update.arrays[:-1], *coded)
        return update._replace(op=update.op + CODED * codec, arrays=arrays)
