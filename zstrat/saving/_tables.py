"""Hash tables (tables whose ids may be any numbers) in checkpoints: saving only rows
that changed, and loading parts.

A checkpoint with only the rows that have changed since another one, its *base*, can
still be restored by itself: it has the files of the base, as hard links, which take no
space, and its own files with all variables, the changed rows of tables, and the ids
that were removed. A table is restored from both, first from the base.

Each part of a table takes the rows whose ids are in its buckets, whichever part they
were in when saved: a server that can read the folder reads the ids of all parts, and
the rows of the ids that belong to it; for other servers the rows are read here and
sent.
"""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from zstrat.checkpoint import Manifest, StoredPiece, StoredTensor
from zstrat.errors import NotFoundError
from zstrat.ids import buckets_of, hashes_of
from zstrat.variables import HashTable
from zstrat.wire import TableLeaf, TableTensor

from ._operation import cluster_of
from ._tensors import (
    CLOCK,
    COUNTS,
    GONE,
    IDS,
    TIMES,
    USES,
    WAITING,
    beside_name,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from zstrat.checkpoint import CheckpointFiles, CheckpointFolder
    from zstrat.ps import PsClient
    from zstrat.variables import AbstractVariable, VariableSpec

    from ._graph import Graph
    from ._match import Load
    from ._operation import FileThread, Run
    from ._tensors import Logical


log = logging.getLogger("zstrat.saving")

_LINKED: Final = "part-base-"
"""The beginning of the names of linked files."""

_WHOLE: Final = (CLOCK, COUNTS, GONE, TIMES, WAITING)
"""Leaves that a difference stores completely, not only for changed rows."""


class Base(NamedTuple):
    """A complete checkpoint and, by key, for each part of a table that records changes,
    a point in the part's history of changes (a cut) from before the checkpoint was
    written.

    ``is_linked``: ``path`` is itself a difference to the complete checkpoint, and has
    links to its files.
    """

    path: str
    cuts: Mapping[int, int]
    is_linked: bool = False

    def pieces_of(self, stored: StoredTensor) -> list[StoredPiece]:
        """Returns those pieces of a tensor in the checkpoint ``path`` that belong to
        the complete checkpoint."""
        # A difference to a difference would read every file of the chain: each is to
        # the whole one instead, of which it has all files.
        if not self.is_linked:
            return list(stored.pieces)
        return [piece for piece in stored.pieces if piece.file.startswith(_LINKED)]


async def cuts_of(graph: Graph) -> dict[int, int]:
    """Asks the servers for the present point in the history of changes, by key of each
    part of the tables that record changes."""
    cuts: dict[int, int] = {}
    for node in graph.variables:
        table = node.value
        if isinstance(table, HashTable) and table.follows:
            cluster = cluster_of(table.components[0])
            assert cluster is not None
            specs = [part.spec for part in table.components]
            work = cluster.servers.table_sizes(specs)
            sizes = await cluster.run_async(work, "asking for the cut of a table")
            pairs = zip(specs, sizes, strict=True)
            cuts.update((spec.key, cut) for spec, (_, _, cut, _) in pairs)
    return cuts


def taken_from(
    base: Base, logicals: Iterable[Logical]
) -> tuple[Manifest, list[Logical]]:
    """Returns the manifest of a base, and the tensors whose unchanged rows are taken
    from the base. Blocks.

    Raises:
        DataLossError, NotFoundError: The base is gone, or lacks slots that exist now.
    """
    before, taken = Manifest.of(base.path), []
    for logical in logicals:
        components = logical.variable.value.components
        follows = all(part.spec.key in base.cuts for part in components)
        if not (follows and logical.by_rows and logical.leaf not in _WHOLE):
            continue
        if logical.name not in before.tensors:
            # An optimizer without tree could not begin the others.
            raise NotFoundError(
                f"{base.path} has no {logical.name!r}: its optimizer made the first "
                "update after that"
            )
        taken.append(logical)
    return before, taken


def with_base(
    manifest: Manifest,
    base: Base,
    before: Manifest,
    taken: Iterable[Logical],
    folder: CheckpointFolder,
) -> Manifest:
    """Adds the rows of a base (from `taken_from`) to the tables of a checkpoint that is
    being written, and links the base's files. Blocks.

    Raises:
        OSError: The files of the base are gone, or cannot be linked.
    """
    tensors, files = dict(manifest.tensors), dict(manifest.files)
    names: dict[str, str] = {}
    for logical in taken:
        pieces = base.pieces_of(before.tensors[logical.name])
        # Names with this writer's mark: none is that of a file of the checkpoint that
        # is replaced, which stays whole until the commit.
        for piece in pieces:
            if piece.file not in names:
                names[piece.file] = folder.part(f"base-{len(names)}")
        # A slot may have no pieces for the last rows; ids are all there.
        ids = base.pieces_of(before.tensors[beside_name(logical.variable, IDS)])
        rows = max([piece.stop for piece in ids], default=0)
        renamed = [piece._replace(file=names[piece.file]) for piece in pieces]
        tensors[logical.name] = _joined(renamed, rows, tensors[logical.name])
    for file, name in names.items():
        os.link(os.path.join(base.path, file), folder.path_of(name))
        files[name] = before.files[file]
    return replace(manifest, tensors=tensors, files=files)


def _joined(old: Sequence[StoredPiece], rows: int, new: StoredTensor) -> StoredTensor:
    """Returns a tensor of the ``rows`` rows of the base, followed by the rows of the
    difference."""
    pieces = list(old)
    pieces += [
        piece._replace(start=piece.start + rows, stop=piece.stop + rows)
        for piece in new.pieces
    ]
    shape = (rows + new.shape[0], *new.shape[1:])
    return replace(new, shape=shape, pieces=tuple(pieces))


_BLOCK: Final = 4 * 2**20
"""About how many bytes of rows one message sends."""


class TableLoad(NamedTuple):
    """A part of a table to be loaded, and the stored tensors of all its saved parts."""

    spec: VariableSpec
    tensors: Sequence[TableTensor]


def table_tensors(folder: str, value: Load, loads: Sequence[Load]) -> list[TableTensor]:
    """Returns the tensors that a checkpoint has of a table: values and slots, each with
    the name of the tensor of their ids."""
    beside, found = value.beside, list[TableTensor]()
    assert beside is not None
    for leaf, ids in _bookkeeping_leaves(value.variable).items():
        if leaf in beside:
            found += _tensors_of(folder, 0, leaf, beside[leaf], beside.get(ids))
    for load in loads:
        if load.variable is not value.variable or load.tensor is None:
            continue
        number = 0 if load.optimizer is None else load.optimizer.id
        found += _tensors_of(folder, number, load.leaf, load.tensor, beside[IDS])
    # Of a difference: the rows of the base, what was removed since, and the rows since.
    since = beside[GONE].pieces if GONE in beside else ()
    # Removals between the two: an id may have been removed and created again.
    later = {os.path.join(folder, piece.file) for piece in since}
    return sorted(found, key=lambda x: (x.path in later) * (1 + (x.leaf != GONE)))


def _bookkeeping_leaves(table: AbstractVariable) -> dict[str, str]:
    """Returns which further arrays a table stores for its ids; for each, the leaf that
    has the ids."""
    assert isinstance(table, HashTable)
    uses = {USES: IDS, CLOCK: "", TIMES: ""} if table.tracks else {}
    return uses | ({COUNTS: WAITING} if table.counts else {}) | {GONE: GONE}


def _tensors_of(
    folder: str, number: int, leaf: str, tensor: StoredTensor, ids: StoredTensor | None
) -> Iterator[TableTensor]:
    if not tensor.by_rows:  # equal in all parts, as they count the same steps
        piece = tensor.pieces[0]
        path = os.path.join(folder, piece.file)
        yield TableTensor(number, leaf, path, piece.name, "")
        return
    assert ids is not None
    ids_at = {(x.file, x.start, x.stop): x.name for x in ids.pieces}
    for piece in tensor.pieces:
        path = os.path.join(folder, piece.file)
        name = ids_at[piece.file, piece.start, piece.stop]  # in the same file
        yield TableTensor(number, leaf, path, piece.name, name)


async def load_table(
    client: PsClient,
    run: Run,
    ps: int,
    table: TableLoad,
    files: CheckpointFiles,
    disk: FileThread,
) -> None:
    """Makes a server read its rows of a table from files, or reads the rows here and
    sends them.

    Raises:
        PSUnavailableError: The server is lost.
        DataLossError, OSError: A file has changed or cannot be read.
        InvalidArgumentError: The server does not have a slot of the checkpoint.
    """
    spec = table.spec
    assert spec.buckets is not None
    first, last = spec.buckets
    probe = table.tensors[0].path
    if (await run(client.sees(probe), "looking for the folder"))[ps]:
        work = client.load_table(ps, spec.key, first, last, table.tensors)
        await run(work, "restoring a table")
        return
    batches = _batches(table, files)
    replaces = True
    while batch := await disk(next, batches, None):
        work = client.store_table(ps, spec.key, *batch, replaces=replaces)
        await run(work, "restoring a table")
        replaces = False


def _batches(
    table: TableLoad, files: CheckpointFiles
) -> Iterator[tuple[list[TableLeaf], list[np.ndarray]]]:
    """Reads the rows of a part, in batches that fit one message each. A batch is a list
    of leaves, and a list of arrays: the ids, then the array of each leaf. Yields at
    least one batch, because the first one makes the server drop its old rows."""
    alone = [each for each in table.tensors if not each.ids]
    leaves = [TableLeaf(each.optimizer, each.leaf, rows=False) for each in alone]
    arrays = [files[os.path.basename(x.path)].read(x.name) for x in alone]
    sources: dict[tuple[str, str], list[TableTensor]] = {}
    for each in table.tensors:
        if each.ids:
            sources.setdefault((each.path, each.ids), []).append(each)
    sent = False
    for (path, ids_name), tensors in sources.items():
        reader = files[os.path.basename(path)]
        infos = [reader.info(each.name) for each in tensors]
        step = max(1, _BLOCK // max(1, sum(info.row_bytes for info in infos)))
        tall = [TableLeaf(each.optimizer, each.leaf, rows=True) for each in tensors]
        (count,) = reader.info(ids_name).shape
        # A table without rows, too: one message has to drop what the server has.
        for start in range(0, max(count, 1), step):
            stop = min(start + step, count)
            ids = reader.read(ids_name, start, stop)
            own = _rows_of_part(table.spec, ids)
            if not own.size and sent:
                continue
            rows = [reader.read(x.name, start, stop)[own] for x in tensors]
            yield [*tall, *leaves], [ids[own], *rows, *arrays]
            leaves, arrays, sent = [], [], True


def _rows_of_part(spec: VariableSpec, ids: np.ndarray) -> np.ndarray:
    """Returns the indices of those ids that belong to a part of a table."""
    assert spec.buckets is not None
    buckets = buckets_of(hashes_of(ids))
    return np.flatnonzero((buckets >= spec.buckets[0]) & (buckets < spec.buckets[1]))
