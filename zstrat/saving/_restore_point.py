"""What a checkpoint holds for parameter servers, as data, for when one is lost.

It is made while the program's objects are at hand, and outlives them: it names no
handle, and what it was made of may be dropped.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, final

from zstrat.checkpoint import CheckpointFiles, Manifest
from zstrat.variables import Optimizer

from ._blocking import FileThread
from ._load import check, load_server, sorted_loads
from ._match import Matching
from ._servers import cluster_of
from ._tensors import stored_graph

if TYPE_CHECKING:
    from collections.abc import Coroutine, Sequence

    from zstrat.checkpoint import StoredTensor
    from zstrat.variables import AbstractVariable

    from ._load import LoadingServer
    from ._match import Found, Load
    from ._servers import ClusterMoment, ServerConnection, SnapshotServers, T
    from ._tensors import StoredNode


log = logging.getLogger("zstrat.saving")


@final
@dataclass(frozen=True)
class SavedServers:
    """Of one cluster."""

    path: str
    variables: frozenset[int]
    optimizers: frozenset[int]
    lacks: Sequence[str]
    servers: Sequence[LoadingServer] = field(repr=False)

    async def check(self) -> None:
        async with FileThread() as disk:
            await check(self.path, await disk(Manifest.of, self.path), disk)

    async def fill(self, client: SnapshotServers) -> None:
        files, here = CheckpointFiles(self.path), _OnLoop(client)
        async with FileThread() as disk:
            try:
                works = [load_server(here, each, files, disk) for each in self.servers]
                for outcome in await asyncio.gather(*works, return_exceptions=True):
                    if isinstance(outcome, BaseException):
                        raise outcome
            finally:
                await disk(files.close)


@dataclass(frozen=True)
class _OnLoop:
    """Asks the servers from the very loop of their cluster."""

    client: SnapshotServers

    async def run_async(self, work: Coroutine[Any, Any, T], what: str) -> T:
        del what
        return await work


async def remember_saved(
    root: Any,
    path: str,
    manifest: Manifest,
    moments: Sequence[ClusterMoment],
) -> None:
    """Tells clusters that may lose a server what they can be filled from.

    Cancellation: some may not have been told.
    """
    watched = [moment for moment in moments if moment.cluster.recovers]
    if watched:
        nodes: list[StoredNode] = list(stored_graph(manifest, path))
        tensors: dict[str, StoredTensor] = dict(manifest.tensors)
        found = Matching(nodes, tensors).find(root, 0)
        if lacks := await remember(path, found, watched):
            log.warning(
                "on_ps_loss='restore': a lost parameter server could not be filled "
                "from checkpoint %s, as it lacks %s",
                path,
                ", ".join(lacks),
            )


async def remember(
    path: str, found: Found, moments: Sequence[ClusterMoment]
) -> list[str]:
    """As `remember_saved`, what a restore has found; returns what it lacks."""
    lacks: list[str] = []
    for cluster, cut, restores in moments:
        if cluster.recovers and cut is not None:
            point = _point(path, found, cluster)
            lacks += await cluster.remember(point, cut, restores)
    return lacks


def _point(path: str, found: Found, cluster: ServerConnection) -> SavedServers:
    mine = [each for each in found.loads if _lives_on(cluster, each.variable)]
    _, servers = sorted_loads(path, mine)
    optimizers = {
        value.id
        for value, _ in found.pairs
        if isinstance(value, Optimizer) and not value.is_local
    }
    lacks = [words.strip() for words in (*found.missing, *found.wrong)]
    return SavedServers(
        path,
        frozenset(_keys(mine)),
        frozenset(optimizers),
        lacks,
        [server for _, server in servers],
    )


def _lives_on(cluster: ServerConnection, variable: AbstractVariable) -> bool:
    return any(cluster_of(part) is cluster for part in variable.components)


def _keys(loads: Sequence[Load]) -> set[int]:
    """Of the variables whose values are loaded."""
    return {
        part.spec.key
        for each in loads
        if each.optimizer is None
        for part in each.variable.components
    }
