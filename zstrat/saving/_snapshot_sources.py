"""The sources of saved tensors: parameter servers, and workers that keep arrays of
their own.

A *source* is a parameter server, or this process for its own variables. A server that
can access the checkpoint's folder writes its own file; the tensors of other servers are
fetched in pieces of a bounded size and written here.

Workers of a `LocalOptimizer` keep arrays for their *windows* of several local steps
(the state of the inner optimizer, for example). A checkpoint has the number of the
optimizer's open round and, for each variable, the arrays of each worker, under names
such as "0/.mu" for the first worker. The arrays are pinned on the workers and fetched
while training continues. A restore sends them to the workers with the same indices; a
worker without arrays in the checkpoint starts without them.
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import secrets
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

from zstrat.checkpoint import TensorInfo, TensorWriter
from zstrat.coordinator import RestoredRounds
from zstrat.errors import PSUnavailableError
from zstrat.ps import Ref
from zstrat.strategy import SyncOnReadVariable
from zstrat.transport import to_its_end
from zstrat.variables import StorageWithSlots
from zstrat.wire import (
    PinSnapshot,
    ReadSnapshot,
    ReleaseSnapshot,
    StoreEntry,
    StoreTensors,
    TensorEntry,
    raw,
)

from ._operation import at_rest, cluster_of

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

    import numpy as np

    from zstrat.checkpoint import CheckpointFiles, StoredTensor
    from zstrat.coordinator import ClusterSession
    from zstrat.program import LocalOptimizer
    from zstrat.variables import AbstractVariable, Optimizer, Variable
    from zstrat.wire import Buffer

    from ._operation import ClusterMoment, FileThread


PIECE: Final = 4 * 2**20
"""Bytes fetched by one request: so many that the round trip costs little beside
them."""
AHEAD: Final = 4
"""Number of pieces fetched at a time; as many again are being written meanwhile."""


class SourceTensor(NamedTuple):
    """A tensor of a snapshot; updates of the variable do not change it. ``number`` is
    its index in ``source``."""

    source: SnapshotSource
    number: int
    entry: TensorEntry

    @property
    def info(self) -> TensorInfo:
        return TensorInfo("", self.entry.dtype, tuple(self.entry.shape))


class Written(NamedTuple):
    """The digests of the tensors in a written file, and its size in bytes."""

    digests: list[str]
    size: int


class SnapshotSource(abc.ABC):
    """One process that holds pinned tensors. A source that can write files itself
    overrides `shares` and `write`."""

    name: str
    """The name of the source in file names: "ps0", "local"."""

    async def shares(self, path: str) -> bool:
        """Returns whether the source can access the folder of the file ``path``, and so
        write files there itself."""
        del path
        return False

    async def write(
        self, path: str, numbers: Sequence[int], names: Sequence[str]
    ) -> Written:
        """Makes the source write tensors to a new file. Allowed only if `shares` is
        true."""
        raise NotImplementedError(f"{self.name} does not write {path}")

    @abc.abstractmethod
    async def fetch(self, number: int, offset: int, size: int) -> Buffer:
        """Fetches ``size`` bytes of tensor ``number``, from ``offset`` on."""


class LocalSnapshotSource(SnapshotSource):
    """Variables of this process. Their arrays are never written to, so holding
    references pins them."""

    name = "local"

    def __init__(self) -> None:
        self._arrays: list[np.ndarray] = []

    def pin(
        self, variables: Iterable[Variable], optimizers: Sequence[Optimizer]
    ) -> list[SourceTensor]:
        found = []
        for variable in variables:
            storage = variable.storage
            assert isinstance(storage, StorageWithSlots)
            key = variable.spec.key
            value, slots = storage.taken(variable.name)
            # A collective in multi-process training: all processes save then.
            if isinstance(variable, SyncOnReadVariable):
                value = variable.saved_value()
            found.append(self._put(key, 0, "", value, bool(value.ndim)))
            for optimizer in optimizers:
                beside = slots.get(optimizer.id)
                for leaf, array, rows in () if beside is None else beside.items():
                    found.append(self._put(key, optimizer.id, leaf, array, rows))
        return found

    def _put(
        self, key: int, optimizer: int, leaf: str, array: np.ndarray, rows: bool
    ) -> SourceTensor:
        self._arrays.append(array)
        entry = TensorEntry(
            key, optimizer, leaf, array.dtype.name, list(array.shape), rows
        )
        return SourceTensor(self, len(self._arrays) - 1, entry)

    async def fetch(self, number: int, offset: int, size: int) -> Buffer:
        return raw(self._arrays[number])[offset : offset + size]


class ServerSnapshotSource(SnapshotSource):
    """One parameter server, and the tensors of one snapshot on it."""

    def __init__(self, cluster: ClusterSession, snapshot: int, ps: int) -> None:
        self._cluster, self._snapshot, self._ps = cluster, snapshot, ps
        self.name = f"ps{ps}"

    # Asked of the server itself: two machines may have different folders of one path.
    async def shares(self, path: str) -> bool:
        sees = self._cluster.client.sees(path)
        return (await self._cluster.run_async(sees, "looking for the folder"))[self._ps]

    async def write(
        self, path: str, numbers: Sequence[int], names: Sequence[str]
    ) -> Written:
        client = self._cluster.client
        work = client.write_snapshot(self._ps, self._snapshot, path, numbers, names)
        answer = await self._cluster.run_async(work, f"writing {path}")
        return Written(answer.digests, answer.size)

    async def fetch(self, number: int, offset: int, size: int) -> Buffer:
        client = self._cluster.client
        work = client.read_snapshot(self._ps, self._snapshot, number, offset, size)
        return await self._cluster.run_async(work, "reading a snapshot")


class PinnedSnapshot:
    """Values and slots of variables as they were at one moment between two steps; an
    async context manager that releases them at its end.

    Cost: training stands still until the running steps have ended, and for two round
    trips to each server; afterwards it continues.

    Args:
        note: Called while training stands still.
        clusters: Clusters that have to stand still, too, besides those of the
            variables.
        since: For parts of tables, by key: the point in the table's history of changes
            since which changed rows are wanted.

    Raises:
        PSUnavailableError: A server is gone.
        UnavailableError: A step cannot be ended: see `ClusterSession.at_rest`.
    """

    def __init__(
        self,
        variables: Sequence[Variable],
        optimizers: Sequence[Optimizer],
        note: Callable[[], Awaitable[None]] | None = None,
        clusters: Sequence[ClusterSession] = (),
        since: Mapping[int, int] | None = None,
    ) -> None:
        self._since = since
        self._variables, self._optimizers, self._note = variables, optimizers, note
        self._number = secrets.randbits(62)
        self._besides = clusters
        self._clusters: list[ClusterSession] = []
        self.moments: list[ClusterMoment] = []
        """For each cluster, the moment of the snapshot: which steps it includes."""

    async def __aenter__(self) -> list[SourceTensor]:
        clusters = {id(cluster): cluster for cluster in self._besides}
        refs: dict[int, list[Ref]] = {}
        local = []
        for variable in self._variables:
            cluster = cluster_of(variable)
            if cluster is None:
                local.append(variable)
                continue
            clusters[id(cluster)] = cluster
            ref = Ref(variable.spec.ps, variable.spec.key)
            refs.setdefault(id(cluster), []).append(ref)
        try:
            # Pinned while all clusters rest: one moment, across servers and processes.
            # A pin copies no values, so training stands still for round trips only.
            async with at_rest(clusters.values()) as self.moments:
                pinned = LocalSnapshotSource().pin(local, self._optimizers)
                for number, found in refs.items():
                    pinned += await self._pin(clusters[number], found)
                if self._note is not None:
                    await self._note()
        except BaseException:  # to the caller; __aexit__ does not run then
            await self.__aexit__()
            raise
        return pinned

    async def __aexit__(self, *_: object) -> None:
        for cluster in self._clusters:
            work = cluster.client.release(self._number)
            release = cluster.run_async(work, "releasing a snapshot")
            # A server that is gone has released everything: what was written is whole
            # without it, and a user who pressed Ctrl-C does not see another error.
            with contextlib.suppress(PSUnavailableError):
                await to_its_end(release)

    async def _pin(
        self, cluster: ClusterSession, refs: list[Ref]
    ) -> list[SourceTensor]:
        optimizers = [each.id for each in self._optimizers if not each.is_local]
        # Before the request: if it is cancelled a server may have pinned nevertheless.
        self._clusters.append(cluster)
        pin = cluster.client.pin(self._number, refs, optimizers, self._since)
        found = await cluster.run_async(pin, "pinning a snapshot")
        sources = {
            ps: ServerSnapshotSource(cluster, self._number, ps) for ps, _, _ in found
        }
        return [SourceTensor(sources[ps], number, entry) for ps, number, entry in found]


async def stream(
    path: str,
    infos: Sequence[TensorInfo],
    tensors: Iterable[SourceTensor],
    disk: FileThread,
    on_bytes: Callable[[int], None],
    finish: Callable[[TensorWriter], list[str]] | None = None,
) -> Written:
    """Fetches tensors and writes them here, to a new file.

    Args:
        infos: The tensors of the file, in order.
        on_bytes: Called with the number of bytes after each fetch.
        finish: Ends the file and returns its digests. None: `TensorWriter.finish`.

    Cancellation, and all errors: no file is left.
    """
    # `make` aborts it if this is cancelled while the file is created.
    writer = await disk.make(TensorWriter.abort, TensorWriter, path, infos)
    try:
        await _fill(writer, tensors, disk, on_bytes)
        end = writer.finish if finish is None else partial(finish, writer)
        return Written(await disk(end), writer.size)
    finally:
        await to_its_end(disk(writer.abort))


async def _fill(
    writer: TensorWriter,
    tensors: Iterable[SourceTensor],
    disk: FileThread,
    on_bytes: Callable[[int], None],
) -> None:
    """Fetches tensors and appends them to a file: while some pieces are written the
    next are fetched."""
    writing: asyncio.Future[None] | None = None
    try:
        for batch in _batches(tensors):
            pieces = await asyncio.gather(
                *(each.source.fetch(each.number, *part) for each, *part in batch)
            )
            # One write at a time, as the file is written in order; more batches than
            # the one that is written and the one that is fetched are never in memory.
            if writing is not None:
                await writing
            writing = asyncio.ensure_future(disk(_append, writer, pieces))
            on_bytes(sum(size for _, _, size in batch))
    finally:
        if writing is not None:
            await to_its_end(writing)


def _append(writer: TensorWriter, pieces: Sequence[Buffer]) -> None:
    for piece in pieces:
        writer.write(piece)


def _batches(
    tensors: Iterable[SourceTensor],
) -> Iterable[list[tuple[SourceTensor, int, int]]]:
    """Divides tensors into pieces, ``(tensor, offset, size)``; yields a few pieces at a
    time."""
    # Batches reach over the ends of tensors: small ones are fetched side by side.
    batch = []
    for tensor in tensors:
        total = tensor.info.nbytes
        for offset in range(0, total, PIECE):
            batch.append((tensor, offset, min(PIECE, total - offset)))
            if len(batch) == AHEAD:
                yield batch
                batch = []
    if batch:
        yield batch


class RestoredWindows(NamedTuple):
    """A `LocalOptimizer` of the program, and the arrays that a checkpoint has for its
    windows of local steps on workers."""

    optimizer: LocalOptimizer
    round: int
    arrays: Sequence[tuple[AbstractVariable, str, StoredTensor]]
    """Stored arrays, each with its variable and its name: index of the worker and name
    of the array."""

    @property
    def rounds(self) -> RestoredRounds:
        return RestoredRounds(self.round, self.optimizer.fragments)


class WorkerLostError(Exception):
    """A worker was lost while a checkpoint that includes its arrays was written."""


class _WorkerSource(SnapshotSource):
    """The arrays that one worker has pinned for a snapshot."""

    def __init__(self, cluster: ClusterSession, snapshot: int, worker: int) -> None:
        self._cluster, self._snapshot, self._worker = cluster, snapshot, worker
        self.name = f"worker{worker}"

    async def fetch(self, number: int, offset: int, size: int) -> Buffer:
        """Fetches ``size`` bytes of the worker's array ``number``, from ``offset`` on.

        Raises:
            WorkerLostError: The worker is lost.
        """
        fields = self._snapshot, number, offset, size
        part = await self._cluster.ask_worker(self._worker, ReadSnapshot, *fields)
        if part is None:
            raise WorkerLostError(f"{self.name} was lost meanwhile")
        array: Buffer = part.arrays[0]
        return array


def number_in_checkpoints(optimizer: LocalOptimizer) -> int:
    """Returns the number by which checkpoints identify an optimizer in entries of
    workers' arrays; no other optimizer has it."""
    # Negative, as ids are positive: the outer optimizer has slots under its own.
    return -optimizer.outer.id


class PinnedWindows:
    """The arrays that workers of some clusters keep for windows of local steps, pinned
    at one moment.

    Args:
        components: The components of the variables to which the arrays belong.
    """

    def __init__(
        self,
        clusters: Sequence[ClusterSession],
        optimizers: Sequence[LocalOptimizer],
        components: Sequence[Variable],
    ) -> None:
        self._clusters, self._number = clusters, secrets.randbits(62)
        self._optimizers = {each.outer.id: each for each in optimizers}
        self._shapes = {each.spec.key: list(each.shape) for each in components}
        self._workers: list[tuple[ClusterSession, int]] = []
        self.pinned: list[SourceTensor] = []

    def open_round(self, optimizer: LocalOptimizer) -> int:
        """Returns the number of the open round of an optimizer; 0 if none of the
        clusters has the optimizer."""
        numbers = [each.open_round(optimizer.outer.id) for each in self._clusters]
        return max([number for number in numbers if number is not None], default=0)

    async def pin(self) -> None:
        """Pins the arrays on the connected workers. `release` has to follow in any
        case."""
        if self._optimizers:
            self._workers = [
                (c, worker) for c in self._clusters for worker in c.workers
            ]
            found = await asyncio.gather(*(self._pin(*each) for each in self._workers))
            self.pinned = [tensor for tensors in found for tensor in tensors]

    async def release(self) -> None:
        """Releases the arrays on the workers that are still connected."""
        released = [
            cluster.ask_worker(worker, ReleaseSnapshot, self._number)
            for cluster, worker in self._workers
        ]
        await asyncio.gather(*released)

    async def _pin(self, cluster: ClusterSession, worker: int) -> list[SourceTensor]:
        source = _WorkerSource(cluster, self._number, worker)
        optimizers, count, total = list(self._optimizers), 0, 1
        pinned: list[SourceTensor] = []
        while count < total:  # an answer lists as many as fit into one message
            answer = await cluster.ask_worker(
                worker, PinSnapshot, self._number, [], optimizers, count
            )
            if answer is None or not answer.tensors:
                break  # it was lost: it starts from scratch after a restore
            for index, entry in enumerate(answer.tensors, count):
                shape = self._shapes.get(entry.key)
                if shape is not None:
                    number = number_in_checkpoints(self._optimizers[entry.optimizer])
                    own = entry._replace(
                        optimizer=number,
                        leaf=f"{worker}/{entry.leaf}",
                        rows=bool(shape) and entry.shape[:1] == shape[:1],
                    )
                    pinned.append(SourceTensor(source, index, own))
            count, total = count + len(answer.tensors), answer.total
        return pinned


async def restore_windows(
    cluster: ClusterSession,
    windows: RestoredWindows,
    files: CheckpointFiles,
    disk: FileThread,
) -> None:
    """Sends stored arrays to the connected workers. A worker that is lost meanwhile
    starts without arrays, and so does a component whose variable is divided at other
    rows now.

    Raises:
        DataLossError, OSError: A file has changed or cannot be read.
    """
    workers, optimizer = set(cluster.workers), windows.optimizer.outer.id
    for variable, name, tensor in windows.arrays:
        worker, _, leaf = name.partition("/")
        if int(worker) not in workers:
            continue
        pieces = {(each.start, each.stop): each for each in tensor.pieces}
        start = 0
        for component in variable.components:
            stop = start + (component.shape[0] if component.shape else 0)
            # Only of the same rows: windows are whole arrays of one component.
            piece = pieces.get((start, stop))
            start = stop
            if piece is None or cluster_of(component) is not cluster:
                continue
            array = await disk(files[piece.file].read, piece.name)
            entry = StoreEntry(component.spec.key, optimizer, leaf, 0)
            await cluster.ask_worker(int(worker), StoreTensors, [entry], (array,))
