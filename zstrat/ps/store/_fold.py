"""Folds: adds a large pushed array to a variable while the array arrives.

A push is applied whole or not at all, so an addition would begin when the last byte has
arrived, and read again from memory what has just been written there. A *fold* computes
``value + chunk`` for each chunk into other memory, and when the body is complete, that
memory becomes the value. No other request waits meanwhile. If another push changes the
variable in between, which its version shows, that push wins: the fold kept no copy of
its chunks, so its own push has to be sent `Again`, and then is applied without a fold.
So that senders that push at the same time do not always send everything twice, nothing
is folded into such a variable for the next `NOT_FOLDED_AFTER` updates.

There is one fold at a time per variable, in memory that the connection lends for the
body. If the sender dies, the fold ends with its connection, which gets the memory back.
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
"""Size in bytes of pushed arrays below which there is no fold: the event loop adds them
as fast when they have arrived."""

NOT_FOLDED_AFTER: Final = 16
"""Number of updates of a variable for which it is not folded into, after another push
has interrupted a fold. So at worst one push in so many is sent twice, and a fold saves
more than that."""

_UFUNCS: Final = {int(UpdateOp.ADD): np.add, int(UpdateOp.SUB): np.subtract}


@dataclass(eq=False, slots=True, weakref_slot=True)
class Fold:
    """The new value of the variable ``held``, as far as it is computed. Lives on the
    event loop."""

    held: HeldVariable
    ufunc: np.ufunc
    source: np.ndarray
    """The value to add to. It is read only while the variable has this ``version``."""
    version: int
    sum: np.ndarray | None = None

    def take(self, memory: memoryview, offset: int, chunk: bytes | memoryview) -> None:
        """Adds a chunk of the body, which begins at its byte ``offset``, to that part
        of the value; writes the sum to ``memory``, which is lent for the body."""
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
        """Whether the variable has not changed since the fold began. It may change at
        any time after this: the sums that are computed from a changed value are
        discarded when the body is complete."""
        held = self.held
        return held.version == self.version and held.cell.host is self.source


@dataclass(frozen=True, slots=True)
class Folded:
    """A push, alone or in an exchange, whose operand is added by a fold while it
    arrives. When its body is complete it is handed to ``take_whole``, and handled as
    any other request."""

    message: Push | Exchange
    fold: Fold
    take_whole: Callable[[Folded], Message | Awaitable[Message]]

    def take(self, memory: memoryview, offset: int, chunk: bytes | memoryview) -> None:
        """Passes a chunk of the body to the fold; see `zstrat.wire.Sink`."""
        self.fold.take(memory, offset, chunk)

    def finish(self) -> Message | Awaitable[Message]:
        """Handles the push, whose body is complete; see `zstrat.wire.Sink`."""
        return self.take_whole(self)

    @property
    def session(self) -> int:
        return self.message.session


def fold_of(
    message: Push | Exchange,
    specs: Sequence[ArraySpec],
    find: Callable[[int], HeldVariable | None],
) -> Fold | None:
    """Returns a fold for the body of a push, if that is one array to add to a variable,
    large enough for a fold; None for all others, which are applied, or refused, without
    a fold."""
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
