"""`PushEncoding`: gradients in the format that their optimizer asks for (``wire=``),
where they go over a network.

The law of this file: the sum of what was sent and acknowledged, and of what `Residuals`
keep, is the sum of the gradients whose pushes were acknowledged. A step takes the
residual away with it; when its push is acknowledged, what the format left out comes
back; when the push fails, the residual comes back as it was, since the step runs again
elsewhere. So steps may be under way at the same time, and none sends a residual twice.

Error feedback is from Seide et al., "1-Bit Stochastic Gradient Descent" (2014).
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final, NamedTuple, final

import numpy as np

from zstrat.codecs import GRADIENT_BLOCK, ROW_BLOCK, decode_gradient, encode_gradient
from zstrat.wire import CODED, Codec, UpdateOp

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from zstrat.codecs import Wire
    from zstrat.ps import PsUpdate

MIN_NUMBERS: Final = GRADIENT_BLOCK
"""Gradients with fewer numbers travel as they are: the header costs more."""

_BYTES: Final = {Codec.BFLOAT16: 2, Codec.INT8: 1}
"""Bytes of a number; gradients whose numbers have no more travel as they are."""


class Lent(NamedTuple):
    """The residual of a variable while a push is under way."""

    key: int
    before: np.ndarray | None
    after: np.ndarray
    """What the format leaves out."""


@final
class Residuals:
    """The residuals of one worker for one coordinator, in all sessions. For any
    thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: dict[int, np.ndarray] = {}

    @property
    def nbytes(self) -> int:
        """Bytes that are kept."""
        with self._lock:
            return sum(array.nbytes for array in self._kept.values())

    def take(self, key: int) -> np.ndarray | None:
        """Takes the residual of a variable away; None if there is none."""
        with self._lock:
            return self._kept.pop(key, None)

    def clear(self) -> None:
        """Drops all of them, as they are of gradients of other values."""
        with self._lock:
            self._kept.clear()

    def settle(self, lent: Iterable[Lent], *, is_sent: bool) -> None:
        """Brings back what a push has left out, or, if it failed, what it had taken."""
        for key, before, after in lent:
            back = after if is_sent else before
            if back is None:
                continue
            with self._lock:
                there = self._kept.get(key)
                self._kept[key] = back if there is None else there + back


@final
class PushEncoding:
    """Encodes the pushes of one session of a worker. For the executor thread.

    Args:
        shares_memory: Whether bodies to a parameter server go through shared memory,
            which is faster than any format. For any thread.
        counts: Bytes of gradients that were encoded (``encoded_from``), and of what
            stands for them (``encoded_to``).
        residuals: Those of the coordinator's session before; None: it is its first.
    """

    def __init__(
        self,
        shares_memory: Callable[[int], bool],
        counts: Counter[str],
        residuals: Residuals | None = None,
    ) -> None:
        self._shares_memory, self._counts = shares_memory, counts
        self.residuals: Final = Residuals() if residuals is None else residuals

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
        try:
            sent = [self._encoded(step, update, wires, lent) for update in updates]
        except BaseException:  # to the step, which does not push
            self.residuals.settle(lent, is_sent=False)
            raise
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
            or wire.push is None
            or update.op not in (UpdateOp.OPTIMIZE, UpdateOp.OPTIMIZE_ROWS)
            or gradient.size < MIN_NUMBERS
            or gradient.dtype.kind in "iubc"
            or gradient.dtype.itemsize <= _BYTES.get(wire.codec, 0)
            or self._shares_memory(update.ps)
        ):
            return update
        is_of_rows = update.op == UpdateOp.OPTIMIZE_ROWS
        codec = wire.codec
        if is_of_rows and codec is Codec.TOP_K:
            return update
        block = ROW_BLOCK if is_of_rows else GRADIENT_BLOCK
        seed: int | None = step << 32 | update.key
        if wire.has_feedback and not is_of_rows:
            before, seed = self.residuals.take(update.key), None
            lent.append(Lent(update.key, before, gradient))
            if before is not None:
                gradient = gradient + before
            coded = encode_gradient(
                codec, gradient, block=block, seed=seed, density=wire.density or 1.0
            )
            after = np.subtract(
                gradient,
                decode_gradient(codec, gradient.shape, coded, block),
                dtype=np.float32,
            )
            # What is not finite was sent; kept, it would spoil all later steps.
            np.nan_to_num(after, copy=False, nan=0.0, posinf=0.0, neginf=0.0)
            lent[-1] = Lent(update.key, before, after)
        else:
            coded = encode_gradient(codec, gradient, block=block, seed=seed)
        self._counts["encoded_from"] += gradient.nbytes
        self._counts["encoded_to"] += sum(array.nbytes for array in coded)
        arrays = (*update.arrays[:-1], *coded)
        return update._replace(op=update.op + CODED * codec, arrays=arrays)
