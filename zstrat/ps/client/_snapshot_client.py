"""Requests of a coordinator to parameter servers, to save and to restore.

Snapshots are named by a number that the caller draws. A server forgets those of a
coordinator whose connection is lost: a `NotFoundError` in the middle means "pin again".
Writing, loading and finding files take as long as the disk does: nothing but the loss
of the server, or the deadline given, ends the wait for them.
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
"""Seconds for what a disk does: the largest shard on the slowest one. A server that is
gone is noticed by its silence, long before."""

ENTRIES: Final = 512
"""Places of one load: paths and names are long, and a header is bounded."""


class PinnedTensor(NamedTuple):
    """A tensor of a snapshot: on which server, and the number that it has there."""

    ps: int
    place: int
    entry: TensorEntry


class SnapshotCalls(AskedServers):
    """The calls of `PsClient` that pin, write, read and load values.

    Raises, all methods:
        PSUnavailableError: A parameter server is gone.
        StaleSessionError: It serves another coordinator.
    """

    unreleased: set[int]
    """Snapshots that may still be on a server."""

    async def pin(
        self,
        snapshot: int,
        refs: Sequence[Ref],
        optimizers: Sequence[int],
        since: Mapping[int, int] | None = None,
    ) -> list[PinnedTensor]:
        """Keeps values, and slots of these optimizers, as they are when the message
        arrives: on each server at one moment.

        Args:
            since: Of parts of tables, by key, a cut: of these the rows that have
                changed since.

        Returns:
            By server, in the order of ``refs``: each value, and after it the slots
            that are there. Slots appear with the first gradient.

        Raises:
            NotFoundError: A variable does not exist.
            AlreadyExistsError: The number is taken.
            BusyError: Too many snapshots are there.

        Cancellation: it may have been pinned: `release` it.
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
        """Has a server write tensors to the new file ``path`` of its machine, and sync
        it. They are dropped then, whether this succeeds or not.

        Args:
            path: Absolute.
            places: Which tensors (`PinnedTensor.place`), and in which order.

        Raises:
            AlreadyExistsError: There is such a file; it is left alone.
            NotFoundError: The folder, or the snapshot, does not exist.
            ResourceExhaustedError: The disk is full, or memory for what changed
                meanwhile.
            PermissionDeniedError, UnavailableError: As the system says. After all of
                these but the first no file is left.
            ValueError: So many names that they do not fit a message (some thousands).

        Cancellation: the server continues, until `release`.
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
            InvalidArgumentError: The tensor does not have these bytes, or they are more
                than 64 MiB.

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
        """Releases a snapshot on all servers, and those whose release has failed. A
        file that is being written is removed. It may be gone already.

        Cancellation: it may be released.
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
        """Has a server read values and slots from files of its machine. Slots that do
        not exist yet are made.

        Everything of a few hundred entries is checked before anything changes; when the
        disk fails after that, or in a later part, values are partly old and partly new.

        Args:
            deadline: Loop time; None: a day.

        Raises:
            NotFoundError: A file, a tensor in it, a variable, an optimizer, or a leaf
                of its state does not exist.
            InvalidArgumentError: A tensor does not fit; says which, expected and got.
            DataLossError: A file was cut short.
            PermissionDeniedError, UnavailableError: As the system says.

        Cancellation: the server continues.
        """
        # Each batch is checked by itself, so a later one may fail after an earlier one
        # was loaded.
        for at in range(0, len(entries), ENTRIES):
            message = LoadTensors(self.session, list(entries[at : at + ENTRIES]))
            await self.each([(ps, message)], Done, deadline=_disk_deadline(deadline))

    async def store(
        self, ps: int, entries: Sequence[StoreEntry], arrays: Sequence[np.ndarray]
    ) -> None:
        """Gives a server values and slots, one array for each place.

        Raises:
            NotFoundError, InvalidArgumentError: As `load`; nothing has changed.

        Cancellation: they may have been stored.
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
        """Has a server read a part of a table from files of its machine: the rows of
        the buckets from ``first`` to before ``last`` replace all that it has.

        Raises:
            NotFoundError, InvalidArgumentError: As `load`; nothing has changed.
            DataLossError, PermissionDeniedError, UnavailableError: Likewise.

        Cancellation: the server continues.
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
        """Gives a server rows of a part of a table: ids, and an array for each leaf.

        Args:
            replaces: They replace all that the part has.

        Raises:
            NotFoundError, InvalidArgumentError: As `load`; nothing has changed.

        Cancellation: they may have been stored.
        """
        message = StoreTable(self.session, key, replaces, list(leaves), tuple(arrays))
        await self.each([(ps, message)], Done)

    async def sees(self, path: str) -> list[bool]:
        """Returns which servers find this file (absolute) on their machine, in task
        order.

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
        """Returns all tensors of a snapshot: the first are those of ``answer``, and the
        others are asked for, as thousands do not fit into one answer."""
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
