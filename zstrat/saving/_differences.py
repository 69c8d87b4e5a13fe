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

from zstrat.checkpoint import Manifest, StoredTensor
from zstrat.variables import HashTable

from ._servers import cluster_of
from ._tensors import CLOCK, COUNTS, GONE, TIMES, WAITING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from zstrat.checkpoint import CheckpointFolder

    from ._graph import Graph
    from ._tensors import Logical

log = logging.getLogger("zstrat.saving")

_WHOLE: Final = (CLOCK, COUNTS, GONE, TIMES, WAITING)
"""What a difference has all of."""


class Base(NamedTuple):
    """A whole checkpoint, and the cut of each part of a table that follows changes, by
    key, from before it was written."""

    path: str
    cuts: Mapping[int, int]


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
        for piece in old.pieces:
            if piece.file not in names:
                names[piece.file] = folder.part(f"base-{len(names)}")
        tensors[logical.name] = _joined(old, tensors[logical.name], names)
    for file, name in names.items():
        os.link(os.path.join(base.path, file), folder.path_of(name))
        files[name] = before.files[file]
    return replace(manifest, tensors=tensors, files=files)


def _joined(
    old: StoredTensor, new: StoredTensor, names: Mapping[str, str]
) -> StoredTensor:
    """Returns a tensor with the pieces of both, in this order."""
    pieces = [piece._replace(file=names[piece.file]) for piece in old.pieces]
    rows = old.shape[0]
    pieces += [
        piece._replace(start=piece.start + rows, stop=piece.stop + rows)
        for piece in new.pieces
    ]
    shape = (rows + new.shape[0], *new.shape[1:])
    return replace(new, shape=shape, pieces=tuple(pieces))
