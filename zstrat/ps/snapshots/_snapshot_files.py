"""Files that a parameter server writes and reads, all on one thread; errors name server
and file.

The coordinator chooses the names of the files, and may be on another machine: so paths
are absolute, an existing file is never overwritten, and an error says on which server
it happened.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np

from zstrat.checkpoint import BLOCK, TensorInfo, TensorWriter
from zstrat.errors import (
    AlreadyExistsError,
    ClosedError,
    InvalidArgumentError,
    NotFoundError,
    PermissionDeniedError,
    ResourceExhaustedError,
    UnavailableError,
)
from zstrat.memory import aligned
from zstrat.wire import SnapshotWritten

from ._snapshot import PIECE, ServerSnapshot, SnapshotTensor, TensorPart, cut

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator, Sequence
    from contextlib import AbstractAsyncContextManager
    from typing import TypeVar

    from zstrat.ps._thread import JobThread

    T = TypeVar("T")
    Turn = Callable[[Sequence[Hashable]], AbstractAsyncContextManager[object]]
    """Holds names, so that no other request uses them, while the body runs."""


class DiskThread:
    """The thread on which one parameter server does all its file I/O. Errors name the
    server ``task``."""

    def __init__(self, thread: JobThread, task: str) -> None:
        self._thread, self._task = thread, task

    def submit(self, job: Callable[[], None]) -> asyncio.Future[None]:
        """Queues a job for the thread; jobs run in order."""
        return self._thread.submit(job)

    async def run(self, job: Callable[[], T]) -> T:
        """Runs a job on the thread and returns its result. Cancellation: the job runs
        all the same."""
        # Futures of the thread carry no outcome.
        outcome: list[T] = []
        await self._thread.submit(lambda: outcome.append(job()))
        return outcome[0]

    @contextlib.contextmanager
    def blamed(self, path: str, what: str) -> Iterator[None]:
        """Converts an error that is raised in the body to an error that names server
        and file; ``what`` is what the body does: "writing".

        Raises:
            AlreadyExistsError, NotFoundError, ResourceExhaustedError: With the name of
                the server added.
            PermissionDeniedError: The user of this server may not touch the file.
            DataLossError: Unchanged.
            UnavailableError: Any other error of the system.
        """
        try:
            yield
        except (AlreadyExistsError, NotFoundError, ResourceExhaustedError) as error:
            raise type(error)(f"{self._task}: {error}") from None
        except (FileNotFoundError, NotADirectoryError) as error:
            raise NotFoundError(
                f"{self._task}: {what} {path}: {error.strerror}"
            ) from None
        except PermissionError as error:
            raise PermissionDeniedError(
                f"{self._task}: {what} {path}: {error.strerror}: the user that the "
                "server runs as needs to be allowed to"
            ) from None
        except OSError as error:
            raise UnavailableError(
                f"{self._task}: {what} {path}: {error.strerror or error}"
            ) from None

    def require_absolute(self, path: str) -> None:
        """Refuses a relative path.

        Raises:
            InvalidArgumentError: The path is relative, so the file would depend on the
                folder in which the server was started.
        """
        if not os.path.isabs(path) or "\0" in path:
            raise InvalidArgumentError(
                f"{self._task}: {path!r} is not an absolute path, and a relative one "
                "means something else on each server"
            )


class NewFile:
    """A file of tensors that is being written; call all methods on the disk thread."""

    def __init__(
        self, disk: DiskThread, path: str, tensors: Sequence[TensorInfo]
    ) -> None:
        self._disk, self._path, self._tensors = disk, path, tensors
        self._writer: TensorWriter | None = None
        self.digests: list[str] = []
        self.size = 0

    def create(self) -> None:
        with self._disk.blamed(self._path, "writing"):
            self._writer = TensorWriter(self._path, self._tensors)
            self.size = self._writer.size

    def write(self, data: np.ndarray) -> None:
        assert self._writer is not None, "write() before create()"
        with self._disk.blamed(self._path, "writing"):
            self._writer.write(data.data)

    def finish(self) -> None:
        assert self._writer is not None, "finish() before create()"
        with self._disk.blamed(self._path, "writing"):
            self.digests = self._writer.finish()

    def abort(self) -> None:
        """Removes the file, unless it was finished."""
        if self._writer is not None:
            self._writer.abort()


BUFFERS: Final = 3


class SnapshotWrite:
    """Writes tensors of a snapshot to a file while requests continue, and unpins each
    piece of a tensor once the piece is queued for the disk.

    The loop copies a piece whenever its variable is free, and a thread writes, hashes
    and syncs. There are three buffers: one is filled while another is written and a
    third one waits, so that the disk never waits for the loop, and memory does not
    depend on the size of the tensors. Pinned memory that no update will write to any
    longer is written without a copy.

    Args:
        turn: Holds names of variables, so that no update runs.
    """

    def __init__(self, snapshot: ServerSnapshot, disk: DiskThread, turn: Turn) -> None:
        self._snapshot, self._disk, self._turn = snapshot, disk, turn
        self._free: deque[np.ndarray] = deque()
        self._writes: deque[asyncio.Future[None]] = deque()

    async def run(
        self, path: str, tensors: Sequence[SnapshotTensor], names: Sequence[str]
    ) -> SnapshotWritten:
        """Creates the file, fills it and flushes it to the disk.

        Raises: The errors of `DiskThread.blamed`; the new file is removed then.
            NotFoundError: The snapshot was released meanwhile.

        Cancellation: the file is removed.
        """
        infos = [
            TensorInfo(name, each.entry.dtype, tuple(each.entry.shape))
            for name, each in zip(names, tensors, strict=True)
        ]
        file = NewFile(self._disk, path, infos)
        try:
            # Awaited: no piece is copied for a file that cannot be made.
            await self._disk.submit(file.create)
            for parts in cut(tensors):
                # Two are with the thread: the third buffer is filled meanwhile.
                if len(self._writes) == BUFFERS - 1:
                    await self._writes.popleft()
                await self._write(file, parts, path)
            await asyncio.gather(*self._writes)
            await self._disk.submit(file.finish)
        except BaseException:
            # On its thread, after what is queued for it there. Nobody waits: whatever
            # is wrong with the file is being reported already.
            with contextlib.suppress(ClosedError):
                self._disk.submit(file.abort)
            for write in self._writes:
                if not write.cancel() and not write.cancelled():
                    write.exception()  # of the same cause
            raise
        return SnapshotWritten(file.digests, file.size)

    async def _write(self, file: NewFile, parts: list[TensorPart], path: str) -> None:
        # A piece of one frozen tensor is written from its own memory, without a copy.
        data = parts[0].tensor.pin.view(*parts[0][1:]) if len(parts) == 1 else None
        buffer = None
        if data is None:
            buffer = self._free.popleft() if self._free else _buffer()
            data = buffer[: sum(part.stop - part.start for part in parts)]
            await self._fill(data, parts)
        writing = self._disk.submit(partial(file.write, data))
        if buffer is not None:
            # Free when it is written, not when it is queued.
            writing.add_done_callback(lambda _: self._free.append(buffer))
        self._writes.append(writing)
        # What is queued is in a buffer, or frozen: rows need not be logged for it.
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
            # Frozen memory is written by nobody, so no turn is needed.
            if tensor.pin.is_frozen:
                tensor.pin.copy(start, out)
                continue
            async with self._turn([tensor.entry.key]):
                tensor.pin.copy(start, out)


def _buffer() -> np.ndarray:
    """Allocates a buffer whose address is aligned for direct writes to the disk."""
    return aligned((PIECE,), np.dtype(np.uint8), BLOCK)
