"""Adding a large array to a variable while it arrives.

A push is applied whole or not at all, so an addition would begin when the last byte is
there, and read from memory again what has just been written. A *fold* computes
``value + chunk`` for each chunk into other memory, and when the body is whole, that
memory becomes the value. Nobody is kept waiting meanwhile. If another push changes the
variable in between, which its version shows, that push wins: the fold kept no copy of
the chunks that it took, so its own push has to be sent `Again`, and then is taken as it
is. So that senders that cross each other do not always send everything twice, nothing
is folded into such a variable for `NOT_FOLDED_AFTER` updates after that.

One at a time per variable, in memory that the connection lends for the body. If the
sender dies, the fold dies with its connection, and the memory goes back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final
from weakref import ref

import numpy as np

from zstrat.wire import Exchange, Push, UpdateOp

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from zstrat.ps.engine._slots import HeldVariable
    from zstrat.wire import ArraySpec, Message

MIN_FOLDED_BYTES: Final = 4 * 2**20
"""Bytes below which the loop adds by itself, when all is there, as fast."""

NOT_FOLDED_AFTER: Final = 16
"""Updates after one that came in between, before the next fold: at the worst one push
in so many travels twice, and what a fold saves is more than that."""

_UFUNCS: Final = {int(UpdateOp.ADD): np.add, int(UpdateOp.SUB): np.subtract}


@dataclass(eq=False, slots=True, weakref_slot=True)
class Fold:
    """The new value of ``held``, as far as it is computed; lives on the loop."""

    held: HeldVariable
    ufunc: np.ufunc
    source: np.ndarray
    """The value that is added to, read only while the variable has this ``version``."""
    version: int
    sum: np.ndarray | None = None

    def take(self, memory: memoryview, offset: int, chunk: bytes | memoryview) -> None:
        """Adds a chunk to its part of the value; the sum goes to ``memory``, which is
        the body's. The chunk begins at the byte ``offset`` of the body."""
        dtype = self.source.dtype
        # Another push came in between: the rest of the body is received and thrown
        # away.
        if not self.is_current:
            return
        if offset % dtype.itemsize or len(chunk) % dtype.itemsize:
            self.version = -1  # a sender of odd chunks: half an element cannot be added
            return
        # The body's own memory, which the arriving bytes are not needed in any longer.
        if self.sum is None:
            self.sum = np.frombuffer(memory, dtype).reshape(self.source.shape)
        start = offset // dtype.itemsize
        end = start + len(chunk) // dtype.itemsize
        source, out = self.source.reshape(-1)[start:end], self.sum.reshape(-1)
        with np.errstate(all="ignore"):
            self.ufunc(source, np.frombuffer(chunk, dtype), out=out[start:end])

    @property
    def is_current(self) -> bool:
        """Whether the variable has not changed since the fold began. It may change as
        soon as it was asked, if another request has its turn: what is computed from
        that is thrown away when the body is whole."""
        held = self.held
        return held.version == self.version and held.cell.host is self.source


@dataclass(frozen=True, slots=True)
class Folded:
    """A push, alone or in an exchange, whose operand goes into a fold; a request like
    any other when it is whole, and handed to ``take_whole`` then."""

    message: Push | Exchange
    fold: Fold
    take_whole: Callable[[Folded], Message | Awaitable[Message]]

    def take(self, memory: memoryview, offset: int, chunk: bytes | memoryview) -> None:
        """See `zstrat.wire.Sink`."""
        self.fold.take(memory, offset, chunk)

    def finish(self) -> Message | Awaitable[Message]:
        """See `zstrat.wire.Sink`."""
        return self.take_whole(self)

    @property
    def session(self) -> int:
        return self.message.session


def fold_of(
    message: Push | Exchange,
    specs: Sequence[ArraySpec],
    find: Callable[[int], HeldVariable | None],
) -> Fold | None:
    """Returns a fold for the body of a push, if that is one array that a variable can
    be folded with; everything else goes, or is refused, the plain way."""
    # One array and one update: only then is the offset in the body that in the value.
    if (
        len(specs) != 1
        or len(message.updates) != 1
        or specs[0].nbytes < MIN_FOLDED_BYTES
    ):
        return None
    (spec,), (update,) = specs, message.updates
    held, ufunc = find(update.key), _UFUNCS.get(update.op)
    if held is None or ufunc is None or update.optimizer or update.operands != 1:
        return None
    if held.table is not None:
        return None
    source = held.cell.host
    # A value of XLA's has no host buffer to add to.
    if source is None or (source.shape, source.dtype) != (spec.shape, spec.dtype):
        return None
    # A second fold of one variable would lose to the first, and has to be sent again.
    is_busy = held.fold is not None and held.fold() is not None
    if is_busy or held.version < held.no_fold_until:
        return None
    # The loop adds, so adding a chunk may take no longer than copying it.
    if spec.dtype.kind not in "iuf" or spec.dtype.itemsize < 4:
        return None
    fold = Fold(held, ufunc, source, held.version)
    held.fold = ref(fold)  # weak: it dies with the connection of its sender
    return fold
