"""Loads the tensors of a checkpoint into variables, from files to their components, row
by row.

A parameter server that can read the folder reads the files itself. For other servers,
and for variables of this process, the rows are read here, in pieces of bounded size.

`SavedServers` remembers which tensors of a checkpoint the servers have to load, so that
they can be restored when a server is lost. It is made while the program's objects
exist, and references none of them, so that they may be dropped.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, final

import numpy as np

from zstrat.checkpoint import CheckpointFiles, Manifest, verify
from zstrat.coordinator import PerWorkerIterator
from zstrat.errors import InvalidArgumentError
from zstrat.ps import Ref
from zstrat.transport import to_its_end
from zstrat.variables import HashTable, Optimizer, SlotValues, StorageWithSlots
from zstrat.wire import DTYPES, LoadEntry, StoreEntry

from ._match import Matching
from ._operation import FileThread, ProgressBar, at_rest, cluster_of
from ._snapshot_sources import restore_windows
from ._tables import TableLoad, load_table, table_tensors
from ._tensors import stored_graph

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterable, Iterator, Mapping, Sequence

    from zstrat.checkpoint import StoredTensor, TensorReader
    from zstrat.coordinator import ClusterSession, RestoredRounds
    from zstrat.ps import PsClient
    from zstrat.variables import OptimizerHandle, VariableHandle

    from ._match import Load, MatchResult
    from ._operation import ClusterMoment, Run
    from ._tensors import StoredNode


PIECE: Final = 4 * 2**20
"""Bytes sent to a server in one message, or one row if that is larger."""
ENTRIES: Final = 256
"""Number of tensors that one message asks a server to read: their names fit the
header."""


@dataclass(slots=True)
class LoadingServer:
    """What one parameter server has to load: the tensors to read (``entries``,
    ``tables``), and the slots to reset."""

    ps: int
    entries: list[LoadEntry] = field(default_factory=list)
    resets: list[LoadEntry] = field(default_factory=list)
    tables: list[TableLoad] = field(default_factory=list)


async def check(folder: str, manifest: Manifest, disk: FileThread) -> None:
    """Reads all files of a checkpoint and compares their tensors with the digests in
    the manifest.

    Raises:
        DataLossError: A tensor differs; names the file and the tensor.

    Cancellation: nothing is lost; the file that is being read is read to its end.
    """
    with ProgressBar(f"checking {folder}", sum(manifest.files.values())) as progress:
        await disk(verify, folder, manifest, on_bytes=progress.add)


async def load(
    folder: str, found: MatchResult, disk: FileThread
) -> list[ClusterMoment]:
    """Loads the tensors that a matching has found, while each cluster rests between two
    steps: each step either ended before, or begins afterwards, with the values and the
    data positions of the checkpoint.

    Returns:
        The moment of the load, for each cluster.

    Raises:
        PSUnavailableError: A server is lost, or was restored meanwhile.
        DataLossError, OSError: A file has changed or cannot be read.
        InvalidArgumentError: A server does not have a slot of the checkpoint.

    Cancellation, and all errors: some of the variables may have been restored.
    """
    for optimizer, variable in found.partly:
        # So that servers know its other slots, and their initial values.
        await optimizer.bind_async(variable)
    local, servers = loads_by_server(folder, found.loads)
    files = CheckpointFiles(folder)
    # Also the clusters whose iterators alone are restored: their steps draw data.
    resting = [cluster for cluster, _ in servers] + [
        iterator.session
        for iterator, _, _ in found.places
        if isinstance(iterator, PerWorkerIterator)
    ]
    clusters = {id(cluster): cluster for cluster in resting}.values()
    try:
        # All rest until everything is loaded: no step reads a mix of old values and
        # values of the checkpoint.
        async with at_rest(clusters) as moments:
            for cluster in {id(each): each for each, _ in servers}.values():
                windows = [
                    each
                    for each in found.windows
                    if cluster.open_round(each.optimizer.outer.id) is not None
                ]
                rounds = {each.optimizer.outer.id: each.rounds for each in windows}
                await cluster.restart_rounds(rounds)
                for each in windows:
                    await restore_windows(cluster, each, files, disk)
            await disk(_load_local, local, files)
            await _all_done(
                load_server(cluster.client, cluster.run_async, server, files, disk)
                for cluster, server in servers
            )
            for iterator, _, state in found.places:
                if isinstance(iterator, PerWorkerIterator):
                    await iterator.set_state_async(state)
                else:
                    iterator.set_state(state)
            for moment in moments:
                # A server that was lost and restored meanwhile has older values.
                moment.cluster.require_unrestored(moment.restores)
    finally:
        await to_its_end(disk(files.close))
    return moments


def loads_by_server(
    folder: str, loads: Sequence[Load]
) -> tuple[
    list[tuple[VariableHandle, Load, int]], list[tuple[ClusterSession, LoadingServer]]
]:
    """Divides the loads into those for variables of this process, each with its first
    row, and those for each parameter server of each cluster."""
    local: list[tuple[VariableHandle, Load, int]] = []
    servers: dict[tuple[int, int], tuple[ClusterSession, LoadingServer]] = {}

    def server_of(component: VariableHandle) -> LoadingServer | None:
        if (cluster := cluster_of(component)) is None:
            return None
        ps = component.spec.ps
        return servers.setdefault((id(cluster), ps), (cluster, LoadingServer(ps)))[1]

    for load in loads:
        if isinstance(load.variable, HashTable):
            if load.beside is not None:
                tensors = table_tensors(folder, load, loads)
                for part in load.variable.components:
                    server = server_of(part)
                    assert server is not None
                    server.tables.append(TableLoad(part.spec, tensors))
            continue
        start = 0
        for component in load.variable.components:
            if (server := server_of(component)) is None:
                local.append((component, load, start))
            else:
                _add_entries(server, folder, component, load, start)
            start += component.shape[0] if component.shape else 0
    return local, list(servers.values())


async def _all_done(works: Iterable[Any]) -> None:
    """Awaits all awaitables to their end; then raises the first error, if any."""
    # A task group would cancel the others while they write values.
    for outcome in await asyncio.gather(*works, return_exceptions=True):
        if isinstance(outcome, BaseException):
            raise outcome


def _add_entries(
    server: LoadingServer,
    folder: str,
    component: VariableHandle,
    load: Load,
    start: int,
) -> None:
    optimizer = 0 if load.optimizer is None else load.optimizer.id
    key, tensor = component.spec.key, load.tensor
    # Rows that no gradient had reached get their initial slots back.
    is_part = optimizer and tensor is not None and tensor.by_rows
    if tensor is None or (is_part and not tensor.is_whole):
        server.resets.append(LoadEntry(key, optimizer, "", "", "", 0, 0, 0))
    if tensor is None:
        return
    # The component has rows [start, stop) of the variable now. They may come from
    # several pieces, as the checkpoint may have been cut at other rows.
    stop = start + (component.shape[0] if component.shape else 0)
    for piece, first, last in tensor.within(start, stop):
        rows = tensor.by_rows and bool(tensor.shape)
        at = piece.start + first - start if rows else 0
        path = os.path.join(folder, piece.file)
        server.entries.append(
            LoadEntry(
                key, optimizer, load.leaf, path, piece.name, first, last, at, rows
            )
        )


async def load_server(
    client: PsClient,
    run: Run,
    server: LoadingServer,
    files: CheckpointFiles,
    disk: FileThread,
) -> None:
    """Makes a server read its tensors from files, or sends it rows that are read here.

    Raises: As `load`.
    """
    for table in server.tables:
        await load_table(client, run, server.ps, table, files, disk)
    if server.resets and (resets := await _existing(client, run, server)):
        await run(client.load(server.ps, resets), "resetting optimizers")
    if not server.entries:
        return
    # Asked: the same path may be another folder on the machine of the server.
    probe = server.entries[0].path
    if (await run(client.sees(probe), "looking for the folder"))[server.ps]:
        for at in range(0, len(server.entries), ENTRIES):
            some = server.entries[at : at + ENTRIES]
            await run(client.load(server.ps, some), "restoring variables")
        return
    # The generator runs on the disk's thread, one batch at a time: while a batch is on
    # its way nothing more is read into memory.
    batches = _batches(server.entries, files)
    while batch := await disk(next, batches, None):
        await run(client.store(server.ps, *batch), "restoring variables")


async def _existing(
    client: PsClient, run: Run, server: LoadingServer
) -> list[LoadEntry]:
    """Returns those of the slots to reset that the server has."""
    keys = dict.fromkeys(entry.key for entry in server.resets)
    optimizers = dict.fromkeys(entry.optimizer for entry in server.resets)
    # The pin only lists slots; no other pin has its number.
    number = secrets.randbits(62)
    refs = [Ref(server.ps, key) for key in keys]
    try:
        pinned = await run(client.pin(number, refs, list(optimizers)), "looking")
    finally:
        await to_its_end(run(client.release(number), "looking"))
    existing = {(entry.key, entry.optimizer) for _, _, entry in pinned}
    return [r for r in server.resets if (r.key, r.optimizer) in existing]


def _batches(
    entries: Iterable[LoadEntry], files: CheckpointFiles
) -> Iterator[tuple[list[StoreEntry], list[np.ndarray]]]:
    """Reads the rows of the entries, in batches that fit one message each."""
    some: list[StoreEntry] = []
    arrays: list[np.ndarray] = []
    size = 0
    for entry in entries:
        for at, array in _cut(entry, files[os.path.basename(entry.path)]):
            if some and (size + array.nbytes > PIECE or len(some) == ENTRIES):
                yield some, arrays
                some, arrays, size = [], [], 0
            key, optimizer, leaf = entry.key, entry.optimizer, entry.leaf
            some.append(StoreEntry(key, optimizer, leaf, at, entry.rows))
            arrays.append(array)
            size += array.nbytes
    if some:
        yield some, arrays


def _cut(entry: LoadEntry, reader: TensorReader) -> Iterator[tuple[int, np.ndarray]]:
    """Reads the rows of an entry in pieces, each with the index of its first row."""
    if entry.start == entry.stop:
        yield 0, reader.read(entry.name)
        return
    step = max(1, PIECE // max(1, reader.info(entry.name).row_bytes))
    for first in range(entry.start, entry.stop, step):
        last = min(first + step, entry.stop)
        yield entry.at + first - entry.start, reader.read(entry.name, first, last)


def _load_local(
    local: Sequence[tuple[VariableHandle, Load, int]], files: CheckpointFiles
) -> None:
    """Loads variables of this process; the value and the slots of a variable are set in
    one operation."""
    loads: dict[int, list[tuple[Load, int]]] = defaultdict(list)
    variables = {id(variable): variable for variable, _, _ in local}
    for variable, load, start in local:
        loads[id(variable)].append((load, start))
    for number, variable in variables.items():
        value: np.ndarray | None = None
        slots: dict[OptimizerHandle, SlotValues | None] = {}
        for load, start in loads[number]:
            if load.optimizer is None and load.tensor is not None:
                # A new array: readers may hold the old one, which is never written to.
                value = np.empty(variable.shape, variable.dtype)
                if not load.tensor.is_whole:
                    value[...] = variable.numpy()
                files.fill(value, load.tensor, start)
            elif load.optimizer is not None:
                slots.setdefault(load.optimizer, None)
                if load.tensor is not None:
                    beside = slots[load.optimizer] or SlotValues((), [], ())
                    array = _slot(variable, value, load, start, files)
                    slots[load.optimizer] = SlotValues(
                        (*beside.names, load.leaf),
                        [*beside.leaves, array],
                        (*beside.rows, load.tensor.by_rows),
                    )
        storage = variable.storage
        assert isinstance(storage, StorageWithSlots)
        storage.put(
            value,
            {
                optimizer: beside and _completed(variable, storage, optimizer, beside)
                for optimizer, beside in slots.items()
            },
        )


def _completed(
    variable: VariableHandle,
    storage: StorageWithSlots,
    optimizer: OptimizerHandle,
    beside: SlotValues,
) -> SlotValues:
    """Returns the restored slots of a variable, completed by the present values of
    slots that the checkpoint lacks."""
    assert isinstance(optimizer, Optimizer)
    if optimizer.slots_beside(variable) is None:
        return beside
    rule = optimizer.slot_rule(variable)
    if set(rule.names) <= set(beside.names):
        return beside
    kept = rule.beside(storage.slots_before(rule, variable.name)).on_host()
    for name, array, _ in beside.items():
        kept = kept.replaced(name, array)
    return kept


def _slot(
    variable: VariableHandle,
    value: np.ndarray | None,
    load: Load,
    start: int,
    files: CheckpointFiles,
) -> np.ndarray:
    """Reads one slot of an optimizer for a variable of this process.

    Args:
        value: The restored value of the variable; None: it is not restored.

    Raises:
        InvalidArgumentError: Some rows are not in the checkpoint, and their initial
            values are unknown, because the optimizer does not know its tree yet.
    """
    tensor, optimizer = load.tensor, load.optimizer
    assert tensor is not None
    assert optimizer is not None
    rows = variable.shape[:1] if tensor.by_rows and tensor.shape else tensor.shape[:1]
    out = np.empty((*rows, *tensor.shape[1:]), DTYPES[tensor.dtype])
    if tensor.by_rows and not tensor.is_whole:
        if optimizer.slots_beside(variable) is None:
            raise InvalidArgumentError(
                f"{load.leaf} of optimizer {optimizer.name!r} beside variable "
                f"{variable.name!r}: the checkpoint lacks some rows, and the optimizer "
                "cannot initialize them, as it does not know its tree yet: make it "
                "with zs.Optimizer(transformation, params=params) before restoring"
            )
        rule = optimizer.slot_rule(variable)
        begun = rule.initial(variable.numpy() if value is None else value)
        initial = zip(rule.names, begun, strict=True)
        # Stored rows are filled in below.
        out[...] = np.asarray(dict(initial)[load.leaf])
    files.fill(out, tensor, start)
    return out


log = logging.getLogger("zstrat.saving")


@final
@dataclass(frozen=True)
class SavedServers:
    """The part of one checkpoint that the parameter servers of one cluster have to
    load, remembered for the loss of a server."""

    path: str
    variables: frozenset[int]
    optimizers: frozenset[int]
    lacks: Sequence[str]
    servers: Sequence[LoadingServer] = field(repr=False)
    places: Mapping[int, Sequence[str]] = field(repr=False)
    rounds: Mapping[int, RestoredRounds] = field(repr=False)

    async def check(self) -> None:
        async with FileThread() as disk:
            await check(self.path, await disk(Manifest.of, self.path), disk)

    async def fill(self, client: PsClient) -> None:
        files = CheckpointFiles(self.path)

        async def run(work: Coroutine[Any, Any, Any], what: str) -> Any:
            del what
            return await work  # this is the loop of the cluster

        async with FileThread() as disk:
            try:
                await _all_done(
                    load_server(client, run, server, files, disk)
                    for server in self.servers
                )
            finally:
                await to_its_end(disk(files.close))


async def remember_saved(
    root: Any,
    path: str,
    manifest: Manifest,
    moments: Sequence[ClusterMoment],
) -> None:
    """Makes clusters that can recover a lost parameter server remember a saved
    checkpoint, from which the server is restored.

    Cancellation: some clusters may not remember the checkpoint.
    """
    watched = [moment for moment in moments if moment.cluster.recovers]
    # Matched with the program again, as a restore would be: what is remembered refers
    # to servers and keys, and to none of the objects.
    if watched:
        nodes: list[StoredNode] = list(stored_graph(manifest, path))
        tensors: dict[str, StoredTensor] = dict(manifest.tensors)
        found = Matching(nodes, tensors).find(root, 0)
        if lacks := await remember(path, found, watched):
            log.warning(
                "on_ps_loss='restore': a lost parameter server could not be restored "
                "from checkpoint %s, which lacks %s",
                path,
                ", ".join(lacks),
            )


async def remember(
    path: str, found: MatchResult, moments: Sequence[ClusterMoment]
) -> list[str]:
    """Makes clusters remember a checkpoint that was restored, as `remember_saved` does
    for one that was saved. Returns the names of what the checkpoint lacks."""
    lacks: list[str] = []
    for cluster, cut, restores in moments:
        if cluster.recovers and cut is not None:
            point = _saved_servers(path, found, cluster)
            if not point.variables:
                continue  # it has iterators alone: no server can be restored from it
            lacks += await cluster.remember(point, cut, restores)
    return lacks


def _saved_servers(
    path: str, found: MatchResult, cluster: ClusterSession
) -> SavedServers:
    loads = [
        load
        for load in found.loads
        if any(cluster_of(part) is cluster for part in load.variable.components)
    ]
    values = [load for load in loads if load.optimizer is None]
    _, servers = loads_by_server(path, loads)
    optimizers = {
        value.id
        for value, _ in found.pairs
        if isinstance(value, Optimizer) and not value.is_local
    }
    lacks = [words.strip() for words in (*found.missing, *found.wrong)]
    lacks += [
        f"rows of variable {load.variable.name!r}"
        for load in values
        if load.tensor is not None and not load.tensor.is_whole
    ]
    return SavedServers(
        path,
        frozenset(x.spec.key for load in values for x in load.variable.components),
        frozenset(optimizers),
        lacks,
        [server for _, server in servers],
        found.worker_places,
        {each.optimizer.outer.id: each.rounds for each in found.windows},
    )
