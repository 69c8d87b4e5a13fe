"""A snapshot goes to a file while requests go on.

The loop copies a piece whenever its variable is free, and a thread writes, hashes and
syncs. Three buffers: one is filled while another is written and a third one waits, so
that the disk never waits for the loop, and memory does not depend on the tensors. What
nobody can write any more is not copied at all.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np

from zstrat.checkpoint import BLOCK, TensorInfo
from zstrat.errors import ClosedError, NotFoundError
from zstrat.rows import aligned
from zstrat.wire import SnapshotWritten

from ._file_thread import NewFile
from ._snapshot import PIECE, ServerSnapshot, SnapshotTensor, TensorPart, cut

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Sequence
    from contextlib import AbstractAsyncContextManager

    from ._file_thread import DiskThread

    Turn = Callable[[Sequence[Hashable]], AbstractAsyncContextManager[object]]
    """Names that the body has for itself."""

BUFFERS: Final = 3


class SnapshotWrite:
    """Writes tensors of a snapshot, which then are not kept any more.

    Args:
        turn: What holds off updates of variables.
    """

    def __init__(self, snapshot: ServerSnapshot, disk: DiskThread, turn: Turn) -> None:
        self._snapshot, self._disk, self._turn = snapshot, disk, turn
        self._free: deque[np.ndarray] = deque()
        self._writes: deque[asyncio.Future[None]] = deque()

    async def run(
        self, path: str, tensors: Sequence[SnapshotTensor], names: Sequence[str]
    ) -> SnapshotWritten:
        """Creates the file, fills it and syncs it.

        Raises: What `DiskThread.blamed` says, and then there is no file of ours.
            NotFoundError: The snapshot was released meanwhile.

        Cancellation: the file is removed.
        """
        infos = [
            TensorInfo(name, each.entry.dtype, tuple(each.entry.shape))
            for name, each in zip(names, tensors, strict=True)
        ]
        file = NewFile(self._disk, path, infos)
        try:
            await self._disk.submit(file.create)
            for parts in cut(tensors):
                if len(self._writes) == BUFFERS - 1:
                    await self._writes.popleft()
                await self._write(file, parts, path)
            await asyncio.gather(*self._writes)
            await self._disk.submit(file.finish)
        except BaseException:
            # On its thread, behind what is queued for it there. Nobody waits: whatever
            # is wrong with the file is being reported already.
            with contextlib.suppress(ClosedError):
                self._disk.submit(file.abort)
            for write in self._writes:
                if not write.cancel() and not write.cancelled():
                    write.exception()  # of the same cause
            raise
        return SnapshotWritten(file.digests, file.size)

    async def _write(self, file: NewFile, parts: list[TensorPart], path: str) -> None:
        data = parts[0].tensor.pin.view(*parts[0][1:]) if len(parts) == 1 else None
        buffer = None
        if data is None:
            buffer = self._free.popleft() if self._free else _buffer()
            data = buffer[: sum(part.stop - part.start for part in parts)]
            await self._fill(data, parts)
        writing = self._disk.submit(partial(file.write, data))
        if buffer is not None:
            writing.add_done_callback(lambda _: self._free.append(buffer))
        self._writes.append(writing)
        for part in parts:
            part.tensor.pin.forget(part.stop)
        await asyncio.sleep(0)  # requests come between two pieces
        if self._snapshot.is_released:
            raise NotFoundError(
                f"{path} is not written any further: its snapshot was released, or "
                "the connection of its coordinator was lost"
            )

    async def _fill(self, data: np.ndarray, parts: list[TensorPart]) -> None:
        at = 0
        for tensor, start, stop in parts:
            out = data[at : at + stop - start]
            at += len(out)
            if tensor.pin.is_frozen:
                tensor.pin.copy(start, out)
                continue
            async with self._turn([tensor.entry.key]):
                tensor.pin.copy(start, out)


def _buffer() -> np.ndarray:
    """Aligned as the disk likes it."""
    return aligned((PIECE,), np.dtype(np.uint8), BLOCK)
