"""Exports the values of variables for other programs: as one plain safetensors file, or
with Orbax.

Whatever its partitioning, a variable is one array in the export, under the path by
which the program reaches the variable. Slots of optimizers are not exported, because
other programs could not use them.
"""

from __future__ import annotations

import asyncio
import os
import re
import secrets
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from zstrat.checkpoint import (
    MANIFEST,
    CheckpointFiles,
    Manifest,
    TensorInfo,
    TensorWriter,
    absolute,
    local_path,
    sync_folder,
)
from zstrat.errors import AlreadyExistsError, InvalidArgumentError
from zstrat.variables import HashTable

from ._graph import SAVE_COUNTER, graph_of
from ._operation import (
    FileThread,
    ProgressBar,
    at_rest,
    clusters_of,
    retried_if_restored,
    run_blocking,
)
from ._save import saved_components
from ._snapshot_sources import PinnedSnapshot, stream
from ._tensors import GONE, IDS, beside_name, logical_tensors, stored_graph

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from zstrat.checkpoint import StoredTensor
    from zstrat.variables import Variable

    from ._graph import Graph


def export_safetensors(source: Any, path: str | os.PathLike[str]) -> str:
    """Writes the values of all variables to one safetensors file; returns its path.

    Args:
        source: Variables, or any `zs.Checkpoint`, ``zs.Module`` or pytree of them, as
            they are now; or the path of a checkpoint.
        path: Path of the new file. An existing file is replaced when the new one is
            complete.

    Arrays are written in pieces: a table may be larger than this machine's memory.

    Raises:
        TypeError: The source contains something that cannot be saved.
        NotFoundError, DataLossError: The path is not of a checkpoint, or the checkpoint
            is damaged.
        AlreadyExistsError: ``path`` is a folder.
        NotFoundError: The folder of the file does not exist.
        PSUnavailableError: A parameter server is gone.
        ResourceExhaustedError: The disk is full; an existing file is unchanged.
        OSError: As reported by the system.
    """
    return run_blocking(
        export_safetensors_async(source, path),
        "zs.export_safetensors_async(source, path)",
    )


async def export_safetensors_async(source: Any, path: str | os.PathLike[str]) -> str:
    """Does what `export_safetensors` does, without blocking the running loop.

    Cancellation: nothing was written.
    """
    final = _file_at(path)
    if isinstance(source, str | os.PathLike):
        folder = absolute(source)
        async with FileThread() as disk:
            await disk(_copy, folder, final)
        return final
    graph = _values_graph(source)
    components = saved_components(graph)
    await retried_if_restored(components, lambda: _stream(graph, components, final))
    return final


def export_orbax(source: Any, path: str | os.PathLike[str]) -> str:
    """Writes the values of all variables as an Orbax checkpoint (``pip install
    zstrat[orbax]``): nested dicts of arrays, by the path of each variable. All values
    are held in memory, and training stands still while they are read.

    Args: As `export_safetensors`; ``path`` must not exist.

    Raises:
        ModuleNotFoundError: Orbax is not installed.
        Exception: Otherwise as `export_safetensors`, and whatever Orbax raises.
    """
    try:
        from orbax.checkpoint import PyTreeCheckpointer
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"export_orbax needs Orbax ({error}): pip install 'zstrat[orbax]'"
        ) from error
    # A path is cut before its parts are unescaped, as names may have slashes in them.
    tree: dict[str, Any] = {}
    for name, value in _arrays(source):
        *above, last = name.split("/")
        below = tree
        for part in above:
            below = below.setdefault(_plain(part), {})
        below[_plain(last)] = value
    final = absolute(path)
    with PyTreeCheckpointer() as writer:
        writer.save(final, tree)
    return final


def _values_graph(source: Any) -> Graph:
    return graph_of(source, skip=frozenset({SAVE_COUNTER}))


async def _stream(graph: Graph, components: Sequence[Variable], path: str) -> None:
    async with FileThread() as disk, PinnedSnapshot(components, []) as pinned:
        # Values, and ids beside the rows of tables; slots and counts stay out.
        logicals = [
            each for each in logical_tensors(graph, pinned) if each.leaf in ("", IDS)
        ]
        infos = [
            TensorInfo(each.name or each.variable.value.name, each.dtype, each.shape)
            for each in logicals
        ]
        pieces = [piece.pinned for each in logicals for piece in each.pieces]
        finish = partial(_finish, path=path)
        with ProgressBar(f"exporting {path}", sum(i.nbytes for i in infos)) as progress:
            await stream(_temporary(path), infos, pieces, disk, progress.add, finish)


def _finish(writer: TensorWriter, path: str) -> list[str]:
    digests = writer.finish()
    # Its bytes are on the disk: after a crash the old file or the new one is there.
    os.replace(writer.path, path)
    sync_folder(os.path.dirname(path))
    return digests


def _file_at(path: str | os.PathLike[str]) -> str:
    final = local_path(path)
    if os.path.isdir(absolute(final)):
        raise AlreadyExistsError(
            f"exporting to {final!r}: it is a folder: give the path of a file"
        )
    return final


def _temporary(path: str) -> str:
    return f"{path}.{secrets.token_hex(4)}.tmp"


def _stored_values(folder: str) -> list[tuple[str, StoredTensor]]:
    """Returns the names and tensors of the variables in a checkpoint."""
    manifest = Manifest.of(folder)
    nodes = stored_graph(manifest, os.path.join(folder, MANIFEST))
    variables = [node for node in nodes if node.kind == "variable"]
    # A difference has old rows of its base, which only a table can tell from new ones.
    for node in variables:
        if GONE in node.beside:
            raise InvalidArgumentError(
                f"checkpoint {folder} has rows of {node.path!r} twice, of its base and "
                "since: restore it, and export the program's objects, or export a "
                "checkpoint with all rows (full_every=)"
            )
    names = [
        name
        for node in variables
        for name in (node.tensor, node.beside.get(IDS, ""))
        if name
    ]
    return [(n, manifest.tensors[n]) for n in names if n != SAVE_COUNTER]


def _copy(folder: str, path: str) -> None:
    """Copies the variables of a checkpoint to one plain safetensors file."""
    stored = _stored_values(folder)
    infos = [TensorInfo(name, each.dtype, each.shape) for name, each in stored]
    with (
        CheckpointFiles(folder) as files,
        TensorWriter(_temporary(path), infos) as writer,
        ProgressBar(f"exporting {path}", sum(i.nbytes for i in infos)) as progress,
    ):
        for piece in (piece for _, tensor in stored for piece in tensor.pieces):
            # What differs from its digest is known at the end of its piece, long before
            # the file gets its name.
            for part in files[piece.file].checked(piece.name, piece.digest):
                writer.write(part)
                progress.add(len(part))
        _finish(writer, path)


def _arrays(source: Any) -> Iterator[tuple[str, np.ndarray]]:
    if not isinstance(source, str | os.PathLike):
        graph = _values_graph(source)
        components = saved_components(graph)
        yield from run_blocking(
            retried_if_restored(components, lambda: _read(graph, components))
        )
        return
    folder = absolute(source)
    with CheckpointFiles(folder) as files:
        for name, tensor in _stored_values(folder):
            for piece in tensor.pieces:
                files[piece.file].verify(piece.name, piece.digest)
            yield name, files.read(tensor)


async def _read(
    graph: Graph, components: Sequence[Variable]
) -> list[tuple[str, np.ndarray]]:
    """Reads the values of all variables of a graph, at one moment between two steps."""
    # At rest, as each variable is read by itself: a step could come in between.
    async with at_rest(clusters_of(components)):
        found: list[tuple[str, np.ndarray]] = []
        for node in graph.variables:
            if isinstance(node.value, HashTable):
                ids, rows = await asyncio.to_thread(_all_rows, node.value)
                found += [(node.path, rows), (beside_name(node, IDS), ids)]
            else:
                value = await asyncio.to_thread(node.value.numpy)
                found.append((node.path or node.value.name, value))
        return found


def _all_rows(table: HashTable) -> tuple[np.ndarray, np.ndarray]:
    # `items` yields batches, and none of an empty table, which still has a dtype.
    nothing = np.empty(0, np.int64), np.empty((0, *table.shape[1:]), table.dtype)
    ids, rows = zip(nothing, *table.items(), strict=True)
    return np.concatenate(ids), np.concatenate(rows)


def _plain(part: str) -> str:
    """Returns the name from which `escaped` made a part of a path."""
    return re.sub(r"\.([.S])", lambda found: "/" if found[1] == "S" else ".", part)
