"""Answers requests to pin, write, read and release snapshots, and passes on those to
load values.

Other requests are served between two pieces of a tensor, so requests here are
coroutines that take exclusive use of variables again and again, for one piece each;
requests in `zstrat.ps._serving` do so once. One thread does all file I/O, and nothing
else.
"""

from __future__ import annotations

import asyncio
import contextlib
from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np

from zstrat.errors import InvalidArgumentError, UnavailableError
from zstrat.wire import (
    Done,
    Message,
    PinSnapshot,
    ReadSnapshot,
    ReleaseSnapshot,
    SnapshotPart,
    SnapshotPinned,
    SnapshotWritten,
    WriteSnapshot,
)

from ._load_scheduler import LoadRequest, Loads
from ._snapshot import PIECE, Snapshots
from ._snapshot_files import DiskThread, SnapshotWrite

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

    from zstrat.ps._thread import JobThread, MakeThread
    from zstrat.ps.store._store import Store

    from ._snapshot import SnapshotTensor
    from ._snapshot_files import Turn

ENTRIES: Final = 1024
"""The most tensors that one answer describes: with long names they still fit into a
header."""

MAX_READ_BYTES: Final = 64 * 2**20
"""The most bytes of a tensor that one answer contains."""

SnapshotRequest = (
    PinSnapshot | WriteSnapshot | ReadSnapshot | ReleaseSnapshot | LoadRequest
)


class SnapshotService:
    """Serves requests about snapshots on one parameter server.

    Args:
        turn: Holds names (keys of variables, optimizers), so that no other request uses
            them.
        check: Raises unless the session with this number is open.
        compute: The thread on which optimizers run.
        make_thread: Makes the thread for file I/O.
    """

    def __init__(
        self,
        task: str,
        store: Store,
        turn: Turn,
        check: Callable[[int], None],
        compute: JobThread,
        make_thread: MakeThread,
    ) -> None:
        self._task, self._store = task, store
        self._turn, self._check = turn, check
        self._thread = make_thread(f"disk {task}")
        self._disk = DiskThread(self._thread, task)
        self._loads = Loads(task, store, turn, check, compute, self._disk)
        self._snapshots = Snapshots(task)
        self._epoch = 0
        """Grows when the coordinator is lost, so that requests from before can be given
        up."""
        self._sorting = asyncio.Lock()
        self._busy = 0
        self._idle = asyncio.Event()
        self._idle.set()

    def handle(self, message: SnapshotRequest) -> Message | Awaitable[Message]:
        """Answers one request of the open session."""
        match message:
            case PinSnapshot():
                # Now: a coroutine starts later, and its coordinator may be lost then.
                return self._pin(message, self._epoch)
            case WriteSnapshot():
                return self._write(message, self._epoch)
            case ReadSnapshot():
                return self._read(message, self._epoch)
            case ReleaseSnapshot(snapshot=snapshot):
                self._snapshots.release(snapshot)
                return Done()
            case _:
                return self._load(message)

    def clear(self) -> None:
        """Releases all snapshots; gives up and removes files that are being written."""
        # Before anything is released: what runs at the moment finds the epoch changed.
        self._epoch += 1
        self._snapshots.clear()

    async def close(self, deadline: float) -> bool:
        """Finishes requests under way, or gives them up at the deadline (loop time).

        Returns:
            False if the file thread has not ended by the deadline.

        Cancellation: gives requests up at once.
        """
        finished = True
        try:
            async with asyncio.timeout_at(deadline):
                await self._idle.wait()
        except TimeoutError:
            finished = False
        finally:
            # What did not end in time finds its snapshot released.
            self.clear()
        return await self._thread.close(deadline) and finished

    def statistics(self) -> dict[str, int]:
        """Returns the number of snapshots, and the bytes of memory that they keep."""
        return {
            "snapshots": len(self._snapshots),
            "undo_bytes": self._snapshots.log_bytes,
        }

    def _require(self, epoch: int) -> None:
        """Raises UnavailableError if the coordinator was lost since ``epoch``: its
        snapshots are gone, and snapshots of its next connection may have the same
        numbers."""
        if epoch != self._epoch:
            raise UnavailableError(
                f"{self._task}: the coordinator that asked for this snapshot was lost "
                "meanwhile, or its session ended; take another one"
            )

    async def _pin(self, message: PinSnapshot, epoch: int) -> SnapshotPinned:
        self._require(epoch)
        if message.first:
            # The rest of the answer to a pin that was made before.
            snapshot = self._snapshots.get(message.snapshot)
        else:
            if len(set(message.keys)) != len(message.keys):
                raise InvalidArgumentError(f"{self._task}: a key to pin repeats")
            if len(message.since) not in (0, len(message.keys)):
                raise InvalidArgumentError(
                    f"{self._task}: {len(message.keys)} variables are pinned since "
                    f"{len(message.since)} cuts"
                )
            # All variables at once, so that the snapshot is of one moment.
            async with self._turn(message.keys):
                self._check(message.session)
                # Again: the coordinator may have been lost while this waited for its
                # turn.
                self._require(epoch)
                snapshot = self._snapshots.pin(
                    message.snapshot,
                    self._store.variables.find(message.keys),
                    message.optimizers,
                    message.since,
                )
        entries = [each.entry for each in snapshot.tensors]
        some = entries[message.first : message.first + ENTRIES]
        return SnapshotPinned(some, len(entries))

    async def _write(self, message: WriteSnapshot, epoch: int) -> SnapshotWritten:
        self._require(epoch)
        snapshot = self._snapshots.get(message.snapshot)
        self._disk.require_absolute(message.path)
        if len(message.names) != len(message.tensors):
            raise InvalidArgumentError(
                f"{self._task}: {len(message.tensors)} tensors come with "
                f"{len(message.names)} names"
            )
        tensors = [
            self._snapshots.tensor(message.snapshot, place) for place in message.tensors
        ]
        # Before the file is made: a value that was written already is not there.
        for tensor in tensors:
            tensor.pin.require()
        with self._working():
            # Before the first piece, as the order of rows decides what is where in the
            # file.
            for tensor in tensors:
                await self._sort(tensor)
            write = SnapshotWrite(snapshot, self._disk, self._turn)
            return await write.run(message.path, tensors, message.names)

    async def _read(self, message: ReadSnapshot, epoch: int) -> SnapshotPart:
        self._require(epoch)
        tensor = self._snapshots.tensor(message.snapshot, message.tensor)
        pin, start, size = tensor.pin, message.offset, message.size
        if start < 0 or not 0 <= size <= MAX_READ_BYTES or start + size > pin.nbytes:
            raise InvalidArgumentError(
                f"{self._task}: bytes {start} to {start + size} of a tensor of "
                f"{pin.nbytes} (at most {MAX_READ_BYTES} at a time)"
            )
        await self._sort(tensor)
        part = pin.view(start, start + size)
        if part is None:
            part = np.empty(size, np.uint8)
            for at in range(0, size, PIECE):
                async with self._turn([tensor.entry.key]):
                    pin.copy(start + at, part[at : at + PIECE])
                await asyncio.sleep(0)  # requests come between two pieces
        return SnapshotPart((part,))

    async def _sort(self, tensor: SnapshotTensor) -> None:
        """Computes the order of the rows of a table, if it is not known yet."""
        order = tensor.order
        if order is None or order.is_known:
            return
        # Values and slots of a table share one order, and are read at the same time.
        async with self._sorting:
            if order.is_known:
                return
            ids = np.empty(order.ids.nbytes, np.uint8)
            for at in range(0, len(ids), PIECE):
                async with self._turn([tensor.entry.key]):
                    order.ids.copy(at, ids[at : at + PIECE])
                await asyncio.sleep(0)  # requests come between two pieces
            # On the disk's thread: sorting millions of ids takes longer than a turn of
            # the loop.
            await self._disk.run(partial(order.sort, ids.view(np.int64)))
            # From now on rows of ids need not be logged.
            order.ids.release()

    async def _load(self, message: LoadRequest) -> Done:
        with self._working():
            return await self._loads.answer(message)

    @contextlib.contextmanager
    def _working(self) -> Iterator[None]:
        self._busy += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._busy -= 1
            if not self._busy:
                self._idle.set()
