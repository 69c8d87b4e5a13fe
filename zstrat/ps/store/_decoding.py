"""Decodes gradients that arrive, and encodes values that are sent, in the formats of
codecs.

Gradients are decoded before anything else looks at them, so that logs, copies and
rounds have plain arrays. Values are encoded last, when an answer is sent.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeVar, final

from zstrat import codecs
from zstrat.codecs import BFLOAT16, GRADIENT_BLOCK, ROW_BLOCK, arrays_of
from zstrat.errors import InvalidArgumentError
from zstrat.wire import CODED, Codec, Contribute, Push, PushPart, UpdateOp

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    from zstrat.wire import Pulled, Read, Update

    from ._variables import HeldVariables

CodedMessage = TypeVar("CodedMessage", bound=Push | PushPart | Contribute)

_CODECS = {int(codec): codec for codec in Codec if codec is not Codec.NONE}
_OPTIMIZE, _ROWS = int(UpdateOp.OPTIMIZE), int(UpdateOp.OPTIMIZE_ROWS)


def is_coded(updates: Sequence[Update]) -> bool:
    """Returns whether any gradient is in the format of a codec."""
    return any(update.op >= CODED for update in updates)


def wants_codec(reads: Sequence[Read]) -> bool:
    """Returns whether any value is to be sent in the format of a codec."""
    return any([read.codec for read in reads])  # noqa: C419 (a generator is slower)


@final
@dataclass(slots=True)
class Decoding:
    """Decodes the gradients of a message. `compute` may run on any thread."""

    updates: Sequence[Update]
    arrays: Sequence[np.ndarray]
    variables: HeldVariables
    decoded: tuple[list[Update], tuple[np.ndarray, ...]] = field(init=False)

    @property
    def work(self) -> int:
        """Estimates the bytes that decoding moves, in the unit of `work_of`.

        Raises:
            NotFoundError: A variable does not exist.
        """
        # TOP_K makes a whole array of a few numbers.
        coded = [x for x in self.updates if x.op >= CODED and x.op % CODED != _ROWS]
        whole = sum(self.variables[x.key].cell.nbytes for x in coded)
        return 4 * whole + 4 * sum(array.nbytes for array in self.arrays)

    def compute(self) -> None:
        """Decodes all gradients.

        Raises:
            InvalidArgumentError: An array is not a gradient of its variable in the
                format of its codec.
            NotFoundError: A variable does not exist.
        """
        updates: list[Update] = []
        arrays: list[np.ndarray] = []
        at = 0
        for update in self.updates:
            given = self.arrays[at : at + update.operands]
            at += update.operands
            if update.op >= CODED:
                given = self._gradient(update, given)
                op = update.op % CODED
                update = update._replace(op=op, operands=len(given))
            updates.append(update)
            arrays += given
        self.decoded = updates, (*arrays, *self.arrays[at:])

    def message(self, message: CodedMessage) -> CodedMessage:
        """Returns the message with decoded gradients; call it after `compute`."""
        updates, arrays = self.decoded
        return replace(message, updates=updates, arrays=arrays)

    def _gradient(
        self, update: Update, arrays: Sequence[np.ndarray]
    ) -> Sequence[np.ndarray]:
        held = self.variables[update.key]
        number, op = divmod(update.op, CODED)
        codec, is_of_rows = _CODECS.get(number), op == _ROWS
        # All that can be wrong is found here, so that decoding cannot fail half way.
        if (
            codec is None
            or op not in (_OPTIMIZE, _ROWS)
            or len(arrays) != arrays_of(codec) + is_of_rows
            or (is_of_rows and codec is Codec.TOP_K)
            or (held.table is not None and not is_of_rows)
            or held.cell.dtype.kind in "iubc"
        ):
            raise InvalidArgumentError(
                f"{self.variables.task}: an update of variable {held.entry.name!r}, "
                f"{held.cell.dtype}, has the operation {op} with codec {number} and "
                f"{len(arrays)} arrays"
            )
        cell = held.cell
        if not is_of_rows:
            whole = codecs.decode_gradient(codec, cell.shape, arrays, GRADIENT_BLOCK)
            return (whole.astype(cell.dtype, copy=False),)
        indices, *coded = arrays
        shape = (indices.size, *cell.shape[1:])
        rows = codecs.decode_gradient(codec, shape, coded, ROW_BLOCK)
        return (indices, rows.astype(cell.dtype, copy=False))


@final
class ReplyEncoding:
    """Encodes the arrays of an answer in the formats that its reads ask for. `compute`
    may run on any thread."""

    def __init__(self, task: str, reads: Sequence[Read], pulled: Pulled) -> None:
        self.arrays = pulled.arrays
        versions = zip(reads, pulled.versions, strict=False)  # and those of sets
        # Values that the reader has are not in the answer (`Store.read`).
        sent = [read for read, version in versions if read.known != version]
        self._coded = [at for at, read in enumerate(sent) if read.codec]
        for at in self._coded:
            codec, dtype = sent[at].codec, self.arrays[at].dtype
            if codec != Codec.BFLOAT16 or dtype != "float32":
                raise InvalidArgumentError(
                    f"{task}: variable {sent[at].key}, {dtype}, is read by codec "
                    f"{codec}: expected float32, and codec {int(Codec.BFLOAT16)}"
                )

    @property
    def nbytes(self) -> int:
        return sum(self.arrays[at].nbytes for at in self._coded)

    def compute(self) -> None:
        arrays = list(self.arrays)
        for at in self._coded:
            arrays[at] = arrays[at].astype(BFLOAT16)
        self.arrays = (*arrays,)
