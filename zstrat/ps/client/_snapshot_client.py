"""A coordinator's requests to parameter servers that save and restore values.

Snapshots are named by a number that the caller draws. A server forgets the snapshots of
a coordinator whose connection is lost: a `NotFoundError` in the middle means "pin
again". Writing, loading and finding files take as long as the disk does: only the loss
of the server, or the deadline given, ends the wait.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final, NamedTuple

from zstrat.errors import NotFoundError, PermissionDeniedError, ProtocolError
from zstrat.wire import (
    Done,
    LoadEntry,
    LoadTable,
    LoadTensors,
    PinSnapshot,
    ReadSnapshot,
    ReleaseSnapshot,
    SnapshotPart,
    SnapshotPinned,
    SnapshotWritten,
    StoreEntry,
    StoreTable,
    StoreTensors,
    TableLeaf,
    TableTensor,
    TensorEntry,
    WriteSnapshot,
)

from ._asking import AskedServers, by_server

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np

    from ._reading import Ref

SNAPSHOT_TIMEOUT: Final = 24 * 3600.0
"""Seconds that requests wait for a disk: enough for the largest shard on the slowest
disk. A lost server is noticed by its silence, long before."""

ENTRIES: Final = 512
"""The most entries of one load: paths and names are long, and the size of a header is
bounded."""


class PinnedTensor(NamedTuple):
    """A tensor of a snapshot: the server that has it, and its number there."""

    ps: int
    place: int
    entry: TensorEntry


class SnapshotCalls(AskedServers):
    """The calls of `PsClient` that pin, write, read and load values.

    Raises, all methods:
        PSUnavailableError: A parameter server is gone.
        StaleSessionError: The server serves another coordinator.
    """

    unreleased: set[int]
    """Snapshots that a server may still hold."""

    async def pin(
        self,
        snapshot: int,
        refs: Sequence[Ref],
        optimizers: Sequence[int],
        since: Mapping[int, int] | None = None,
    ) -> list[PinnedTensor]:
        """Pins the values of variables, and their slots of these optimizers, as they
        are when the message arrives; on each server, all at one moment.

        Args:
            since: For parts of tables, by key, the number of a change: only rows that
                have changed since then are pinned.

        Returns:
            The pinned tensors, by server and in the order of ``refs``: each value, and
            after it those of its slots that exist. Slots are made with the first
            gradient.

        Raises:
            NotFoundError: A variable does not exist.
            AlreadyExistsError: Another snapshot has the number.
            BusyError: The server has too many snapshots.

        Cancellation: the snapshot may have been pinned; `release` it.
        """
        # One message to each server, whatever the number of variables: one moment.
        keys_of, wanted = by_server(ref[:2] for ref in refs), list(optimizers)
        messages = [
            (ps, PinSnapshot(self.session, snapshot, keys, wanted, since=cuts))
            for ps, keys in keys_of.items()
            for cuts in ([since.get(key, -1) for key in keys] if since else [],)
        ]
        answers = await self.each(messages, SnapshotPinned)
        found = []
        for ps, answer in zip(keys_of, answers, strict=True):
            entries = await self._rest(ps, snapshot, answer)
            found += [PinnedTensor(ps, at, each) for at, each in enumerate(entries)]
        return found

    async def write_snapshot(
        self,
        ps: int,
        snapshot: int,
        path: str,
        places: Sequence[int],
        names: Sequence[str],
    ) -> SnapshotWritten:
        """Makes a server write tensors of a snapshot to the new file ``path`` of its
        machine, and flush the file to the disk. The server drops these tensors
        afterwards, also if this fails.

        Args:
            path: An absolute path on the machine of the server.
            places: The tensors to write (`PinnedTensor.place`), in this order.

        Raises:
            AlreadyExistsError: The file exists; it stays unchanged.
            NotFoundError: The folder, or the snapshot, does not exist.
            ResourceExhaustedError: The disk is full, or the server lacks memory for
                values that changed meanwhile.
            PermissionDeniedError, UnavailableError: The system refuses. After all of
                these errors but AlreadyExistsError no file is left.
            ValueError: The names do not fit a message (some thousands).

        Cancellation: the server continues to write, until `release`.
        """
        message = WriteSnapshot(self.session, snapshot, path, list(places), list(names))
        (written,) = await self.each(
            [(ps, message)], SnapshotWritten, deadline=_disk_deadline(None)
        )
        return written

    async def read_snapshot(
        self, ps: int, snapshot: int, place: int, offset: int, size: int
    ) -> np.ndarray:
        """Returns bytes ``[offset, offset + size)`` of a tensor: uint8 [size],
        read-only.

        Raises:
            NotFoundError: The snapshot does not exist, or was written.
            InvalidArgumentError: The tensor does not have these bytes, or more than 64
                MiB are asked for.

        Cancellation: nothing is lost.
        """
        message = ReadSnapshot(self.session, snapshot, place, offset, size)
        (part,) = await self.each([(ps, message)], SnapshotPart)
        # The caller copies by these sizes.
        if len(part.arrays) != 1 or part.arrays[0].nbytes != size:
            raise ProtocolError(
                f"/job:ps/task:{ps} answered a part of a snapshot with something else "
                f"than {size} bytes"
            )
        return part.arrays[0]

    async def release(self, snapshot: int) -> None:
        """Releases a snapshot on all servers, and all earlier snapshots whose release
        has failed. Removes a file that is being written. A snapshot that is gone
        already is not an error.

        Cancellation: the snapshot may be released.
        """
        # A server that was frozen may have it from a request of before.
        self.unreleased.add(snapshot)
        numbers = sorted(self.unreleased)
        messages = [ReleaseSnapshot(self.session, number) for number in numbers]
        pairs = [(ps, each) for ps in range(self.count) for each in messages]
        await self.each(pairs, Done)
        # Only now: a release that failed is tried again with the next one.
        self.unreleased.difference_update(numbers)

    async def load(
        self, ps: int, entries: Sequence[LoadEntry], *, deadline: float | None = None
    ) -> None:
        """Makes a server read values and slots from files of its machine. Slots that do
        not exist yet are made.

        A few hundred entries at a time are checked, and then loaded. If the disk fails
        while they are loaded, or a later check fails, values are partly old and partly
        new.

        Args:
            deadline: In loop time; None: a day from now.

        Raises:
            NotFoundError: A file, a tensor in it, a variable, an optimizer, or a leaf
                of its state does not exist.
            InvalidArgumentError: A tensor has the wrong shape or dtype; the error names
                it, and says what was expected.
            DataLossError: A file was truncated.
            PermissionDeniedError, UnavailableError: The system refuses.

        Cancellation: the server continues to load.
        """
        # Each batch is checked by itself, so a later one may fail after an earlier one
        # was loaded.
        for at in range(0, len(entries), ENTRIES):
            message = LoadTensors(self.session, list(entries[at : at + ENTRIES]))
            await self.each([(ps, message)], Done, deadline=_disk_deadline(deadline))

    async def store(
        self, ps: int, entries: Sequence[StoreEntry], arrays: Sequence[np.ndarray]
    ) -> None:
        """Replaces values and slots on a server, each entry by one of the arrays.

        Raises:
            NotFoundError, InvalidArgumentError: As `load`; nothing has changed.

        Cancellation: the arrays may have been stored.
        """
        message = StoreTensors(self.session, list(entries), tuple(arrays))
        await self.each([(ps, message)], Done)

    async def load_table(
        self,
        ps: int,
        key: int,
        first: int,
        last: int,
        tensors: Sequence[TableTensor],
    ) -> None:
        """Makes a server read a part of a table from files of its machine: all rows of
        the part are replaced by the rows in the files that belong to the buckets of ids
        from ``first`` to before ``last``.

        Raises:
            NotFoundError, InvalidArgumentError: As `load`; nothing has changed.
            DataLossError, PermissionDeniedError, UnavailableError: As `load`; nothing
                has changed.

        Cancellation: the server continues to load.
        """
        message = LoadTable(self.session, key, first, last, True, list(tensors))
        await self.each([(ps, message)], Done, deadline=_disk_deadline(None))

    async def store_table(
        self,
        ps: int,
        key: int,
        leaves: Sequence[TableLeaf],
        arrays: Sequence[np.ndarray],
        *,
        replaces: bool,
    ) -> None:
        """Stores rows in a part of a table on a server: an array of ids, and an array
        for each leaf.

        Args:
            replaces: Whether they replace all rows of the part; else they are added.

        Raises:
            NotFoundError, InvalidArgumentError: As `load`; nothing has changed.

        Cancellation: the rows may have been stored.
        """
        message = StoreTable(self.session, key, replaces, list(leaves), tuple(arrays))
        await self.each([(ps, message)], Done)

    async def sees(self, path: str) -> list[bool]:
        """Returns, for each server in task order, whether it finds this file (an
        absolute path) on its machine.

        Cancellation: nothing is lost.
        """
        # An entry without a name: a server only looks for the file.
        probe = LoadEntry(0, 0, "", path, "", 0, 0, 0)

        async def asks(ps: int) -> bool:
            try:
                await self.load(ps, [probe])
            except (NotFoundError, PermissionDeniedError):
                return False
            return True

        return list(await asyncio.gather(*map(asks, range(self.count))))

    async def _rest(
        self, ps: int, snapshot: int, answer: SnapshotPinned
    ) -> list[TensorEntry]:
        """Returns all tensors of a snapshot: those in ``answer``, and the remaining
        ones, which further requests read because thousands do not fit into one
        answer."""
        entries = list(answer.tensors)
        while len(entries) < answer.total:
            message = PinSnapshot(self.session, snapshot, [], [], len(entries))
            (more,) = await self.each([(ps, message)], SnapshotPinned)
            if not more.tensors:
                raise ProtocolError(
                    f"/job:ps/task:{ps} describes {len(entries)} tensors of a snapshot "
                    f"of {answer.total}"
                )
            entries += more.tensors
        return entries


def _disk_deadline(deadline: float | None) -> float:
    """Returns the deadline of a request that waits for a disk, in loop time."""
    if deadline is not None:
        return deadline
    return asyncio.get_running_loop().time() + SNAPSHOT_TIMEOUT
