"""Checkpoints with the rows of tables that have changed since another checkpoint.

Such a folder is whole by itself: it has the files of its *base*, by hard links, which
take no room, and files of its own with all variables, the rows of tables that have
changed since, and the ids that were removed. A table is restored from both, one after
the other.
"""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple

from zstrat.checkpoint import Manifest, StoredPiece, StoredTensor
from zstrat.variables import HashTable

from ._servers import cluster_of
from ._tensors import CLOCK, COUNTS, GONE, IDS, TIMES, WAITING, beside_name

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from zstrat.checkpoint import CheckpointFolder

    from ._graph import Graph
    from ._tensors import Logical

log = logging.getLogger("zstrat.saving")

_LINKED: Final = "part-base-"
"""How names of linked files begin."""

_WHOLE: Final = (CLOCK, COUNTS, GONE, TIMES, WAITING)
"""What a difference has all of."""


class Base(NamedTuple):
    """A whole checkpoint, and the cut of each part of a table that follows changes, by
    key, from before it was written.

    ``is_linked``: ``path`` is a difference to it, which has its files.
    """

    path: str
    cuts: Mapping[int, int]
    is_linked: bool = False

    def pieces_of(self, stored: StoredTensor) -> list[StoredPiece]:
        """Returns the pieces of a tensor in ``path`` that are the base's."""
        if not self.is_linked:
            return list(stored.pieces)
        return [piece for piece in stored.pieces if piece.file.startswith(_LINKED)]


async def cuts_of(graph: Graph) -> dict[int, int]:
    """Asks for the cuts of now, of the tables that follow changes."""
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


def with_base(
    manifest: Manifest,
    base: Base,
    folder: CheckpointFolder,
    logicals: Iterable[Logical],
) -> Manifest:
    """Adds the rows of a base to the tables of a checkpoint that is being written, and
    links its files. Blocks.

    Raises:
        DataLossError, NotFoundError, OSError: The base is gone, or cannot be linked.
    """
    before = Manifest.of(base.path)
    tensors, files = dict(manifest.tensors), dict(manifest.files)
    names: dict[str, str] = {}
    for logical in logicals:
        components = logical.variable.value.components
        follows = all(part.spec.key in base.cuts for part in components)
        old = before.tensors.get(logical.name)
        if not (follows and logical.by_rows and logical.leaf not in _WHOLE and old):
            continue
        pieces = base.pieces_of(old)
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
    """Returns a tensor with the pieces of the base, which has so many rows, and those
    of the difference."""
    pieces = list(old)
    pieces += [
        piece._replace(start=piece.start + rows, stop=piece.stop + rows)
        for piece in new.pieces
    ]
    shape = (rows + new.shape[0], *new.shape[1:])
    return replace(new, shape=shape, pieces=tuple(pieces))
