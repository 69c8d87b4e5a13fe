"""Writes a checkpoint: pins the values, writes the files in parallel, commits the
manifest.

Law of the file: nothing is a checkpoint before the manifest is committed, and if
writing ends before that, for whatever reason, the folder is as it was.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from zstrat import __version__
from zstrat.checkpoint import CheckpointFolder, Manifest
from zstrat.coordinator import PerWorkerIterator
from zstrat.errors import InvalidArgumentError
from zstrat.transport import to_its_end
from zstrat.variables import HashTable

from ._load import remember_saved
from ._operation import FileThread, ProgressBar, clusters_of, retried_if_restored
from ._snapshot_sources import PinnedSnapshot, PinnedWindows, WorkerLostError, stream
from ._tables import taken_from, with_base
from ._tensors import logical_tensors, plain_graph

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from zstrat.coordinator import SessionCut
    from zstrat.variables import Variable

    from ._graph import Graph, ObjectNode
    from ._snapshot_sources import SnapshotSource, SourceTensor, Written
    from ._tables import Base
    from ._tensors import Logical

log = logging.getLogger("zstrat.saving")

PART: Final = 4 * 2**30
"""Bytes of tensors after which a source begins another file: one request to a server
then takes no longer than a person would wait."""

NAMES: Final = 100_000
"""Most characters of the names of a file's tensors: names and digests are sent in the
header of a message."""
DIGEST: Final = 64
"""Characters in a header that a tensor takes besides its name."""


_NO_CUT: Final = (
    "%s is not one moment of the training: other programs update the variables, and "
    "each parameter server is saved at another moment; pause them before you save"
)


async def save(
    graph: Graph,
    path: str,
    metadata: Callable[[], Mapping[str, Any]] = dict,
    base: Base | None = None,
) -> None:
    """Makes the folder ``path`` a checkpoint of the graph.

    Training continues meanwhile: the written values are those at the moment when the
    snapshot was pinned, between two steps.

    Args:
        metadata: Called at that moment.
        base: A complete checkpoint. For tables that record changes, only the rows that
            have changed since it are written.

    Raises:
        PSUnavailableError: A server is gone.
        BusyError: Another writer is at work in the folder.
        NotFoundError: The parent folder does not exist.
        InvalidArgumentError: The position of an iterator cannot be saved; says why.
        ResourceExhaustedError: A disk is full.
        OSError: As reported by the system.

    Cancellation, and all errors: the folder is as it was; or, if cancelled after the
    commit, the new checkpoint is there.
    """
    variables = saved_components(graph)
    # Without a bound: each turn means that a worker was lost, and one that is lost is
    # not asked for its windows again.
    while True:
        try:
            await retried_if_restored(
                variables, lambda: _save(graph, variables, path, metadata, base)
            )
            return
        except WorkerLostError as error:  # whose windows are not in the next one
            log.warning("checkpoint %s is written again: %s", path, error)


async def _save(
    graph: Graph,
    components: Sequence[Variable],
    path: str,
    metadata: Callable[[], Mapping[str, Any]],
    base: Base | None,
) -> None:
    async with FileThread() as disk:
        folder = await disk.make(CheckpointFolder.close, CheckpointFolder, path)
        windows = [node.value for node in graph.local_optimizers]
        kept = PinnedWindows(clusters_of(components), windows, components)
        try:
            optimizers = [node.value for node in graph.optimizers]
            about: dict[str, Any] = {}
            states: dict[str, Mapping[str, Any]] = {}
            for node in graph.optimizers:  # on that thread: jax traces it
                states[node.path] = await disk(getattr, node.value, "state_classes")

            async def note() -> None:
                for node in graph.local_optimizers:
                    states[node.path] = {"round": kept.open_round(node.value)}
                # While no step runs: arrays of workers and places of iterators belong
                # to the same moment as the values.
                await kept.pin()
                for node in graph.iterators:
                    states[node.path] = await _state_of(node)
                about.update(await disk(metadata))

            clusters = [
                node.value.session
                for node in graph.iterators
                if isinstance(node.value, PerWorkerIterator)
            ]
            since = None if base is None else base.cuts
            snapshot = PinnedSnapshot(components, optimizers, note, clusters, since)
            async with snapshot as pinned:
                cuts = [moment.cut for moment in snapshot.moments]
                about["steps"] = [_plain_cut(cut) for cut in cuts]
                if None in cuts:
                    log.warning(_NO_CUT, path)
                found = [*pinned, *kept.pinned]
                manifest = await _write(graph, found, states, folder, disk, about, base)
            # A server that was lost and filled again meanwhile has served values of an
            # older checkpoint: then this one is written again, not committed.
            for moment in snapshot.moments:
                moment.cluster.require_unrestored(moment.restores)
            await disk(folder.commit, manifest)
            for node in graph.iterators:
                if isinstance(node.value, PerWorkerIterator):
                    await node.value.start_at_async(states[node.path])
            root = graph.nodes[0].value
            await remember_saved(root, path, manifest, snapshot.moments)
        finally:
            # One call, which cancelling ends late: nothing may be left over.
            await to_its_end(_end(kept, folder, disk))


async def _end(kept: PinnedWindows, folder: CheckpointFolder, disk: FileThread) -> None:
    try:
        await kept.release()
    finally:
        await disk(folder.close)


async def _state_of(node: ObjectNode) -> Mapping[str, Any]:
    """Returns the position of an iterator in its data.

    Raises:
        InvalidArgumentError: The position cannot be determined.
    """
    try:
        if isinstance(node.value, PerWorkerIterator):
            return await node.value.position_async()
        state: Mapping[str, Any] = node.value.get_state()
    except InvalidArgumentError as error:
        raise InvalidArgumentError(f"the iterator at {node.path}: {error}") from error
    return state


def _plain_cut(cut: SessionCut | None) -> dict[str, Any] | None:
    """Returns, in the form of the manifest, which steps of a cluster a checkpoint
    includes; None if unknown."""
    if cut is None:
        return None
    return {"below": cut.end, "besides": [list(run) for run in cut.besides]}


def saved_components(graph: Graph) -> list[Variable]:
    """Returns the components of all variables of a graph, each once, also if several
    variables share one."""
    # By key: a part of a sharded variable may also be tracked alone.
    found = {c.spec.key: c for node in graph.variables for c in node.value.components}
    return list(found.values())


async def _write(
    graph: Graph,
    pinned: Sequence[SourceTensor],
    states: Mapping[str, Mapping[str, Any]],
    folder: CheckpointFolder,
    disk: FileThread,
    metadata: Mapping[str, Any],
    base: Base | None,
) -> Manifest:
    logicals = logical_tensors(graph, pinned)
    # Before anything is written: the checkpoint may have to be a whole one.
    taken = None if base is None else await disk(taken_from, base, logicals)
    parts = _parts(logicals)
    # A new file: a server that finds it shares this folder, not another of its name.
    seen = await disk(folder.show)
    total = sum(logical.nbytes for logical in logicals)
    with ProgressBar(f"saving {folder.path}", total) as progress:
        writing = [
            _write_part(source, folder, number, pieces, seen, disk, progress)
            for number, (source, pieces) in enumerate(parts)
        ]
        # All of them to their end, also when one fails: no write is under way when the
        # snapshot is released and the folder is swept.
        outcomes = await asyncio.gather(*writing, return_exceptions=True)
    files: dict[str, int] = {}
    where: dict[int, tuple[str, str, str]] = {}
    for (_, pieces), outcome in zip(parts, outcomes, strict=True):
        if isinstance(outcome, BaseException):
            raise outcome
        file, written = outcome
        files[file] = written.size
        for (each, name), digest in zip(pieces, written.digests, strict=True):
            where[id(each)] = file, name, digest
    about = {"zstrat": __version__, "saved_at": time.time(), **metadata}
    tensors = {logical.name: logical.stored(where) for logical in logicals}
    made = Manifest(tensors, files, plain_graph(graph, logicals, states), about)
    if base is None or taken is None:
        return made
    return await disk(with_base, made, base, *taken, folder)


def _parts(
    logicals: Sequence[Logical],
) -> list[tuple[SnapshotSource, list[tuple[SourceTensor, str]]]]:
    """Distributes tensors over files: returns for each file its source, and its tensors
    with their names in the file."""
    parts: list[tuple[SnapshotSource, list[tuple[SourceTensor, str]]]] = []
    open_: dict[int, _FilePart] = {}
    tables: dict[int, _FilePart] = {}
    done: set[int] = set()
    for logical in logicals:
        for pinned, name, _, _ in logical.pieces:
            if id(pinned) in done:  # a component that is also tracked alone
                continue
            done.add(id(pinned))
            # Rows of a table are in one file with their ids.
            is_table = isinstance(logical.variable.value, HashTable)
            part = tables.get(pinned.entry.key) or open_.get(id(pinned.source))
            # A file that is full takes no other tensors, except those of its tables.
            if part is None or (part.is_full and pinned.entry.key not in tables):
                part = open_[id(pinned.source)] = _FilePart()
                parts.append((pinned.source, part.pieces))
            if is_table:
                tables[pinned.entry.key] = part
            part.add(pinned, name)
    return parts


@dataclass(slots=True)
class _FilePart:
    """The tensors of one file, and their size so far."""

    pieces: list[tuple[SourceTensor, str]] = field(default_factory=list)
    _bytes: int = 0
    _characters: int = 0

    @property
    def is_full(self) -> bool:
        return self._bytes >= PART or self._characters >= NAMES

    def add(self, pinned: SourceTensor, name: str) -> None:
        self.pieces.append((pinned, name))
        self._bytes += pinned.info.nbytes
        self._characters += len(name.encode()) + DIGEST


async def _write_part(
    source: SnapshotSource,
    folder: CheckpointFolder,
    number: int,
    pieces: Sequence[tuple[SourceTensor, str]],
    seen: str,
    disk: FileThread,
    progress: ProgressBar,
) -> tuple[str, Written]:
    file = folder.part(f"{source.name}-{number}")
    path = folder.path_of(file)
    # Asked of each source: some servers may see the folder, and others not.
    if await source.shares(seen):
        numbers, names = (
            [each.number for each, _ in pieces],
            [name for _, name in pieces],
        )
        written = await source.write(path, numbers, names)
        progress.add(written.size)
        return file, written
    infos = [each.info._replace(name=name) for each, name in pieces]
    tensors = [each for each, _ in pieces]
    return file, await stream(path, infos, tensors, disk, progress.add)
