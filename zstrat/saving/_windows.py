"""Windows of local steps in checkpoints: the arrays that they keep on workers.

A `LocalOptimizer` in a checkpoint has the number of its open round and, beside each
variable, the arrays of each worker, such as "0/.mu" of the first one. They are pinned
on the worker and fetched while training continues. A restore gives them to the workers
at the same places; workers that the checkpoint does not have start from scratch.
"""

from __future__ import annotations

import asyncio
import secrets
from typing import TYPE_CHECKING, NamedTuple

from zstrat.coordinator import RestoredRounds
from zstrat.wire import (
    PinSnapshot,
    ReadSnapshot,
    ReleaseSnapshot,
    StoreEntry,
    StoreTensors,
)

from ._operation import cluster_of
from ._snapshot_sources import SnapshotSource, SourceTensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zstrat.checkpoint import CheckpointFiles, StoredTensor
    from zstrat.coordinator import ClusterSession
    from zstrat.program import LocalOptimizer
    from zstrat.variables import AbstractVariable, Variable
    from zstrat.wire import Buffer

    from ._operation import FileThread


class RestoredWindows(NamedTuple):
    """A `LocalOptimizer` of the program, and what a checkpoint has of its windows."""

    optimizer: LocalOptimizer
    round: int
    arrays: Sequence[tuple[AbstractVariable, str, StoredTensor]]
    """Each with the variable and its name beside it: worker and array."""

    @property
    def rounds(self) -> RestoredRounds:
        return RestoredRounds(self.round, self.optimizer.fragments)


class WorkerLostError(Exception):
    """A worker was lost while a checkpoint with its windows was written."""


class _WorkerSource(SnapshotSource):
    """The arrays that one worker has pinned."""

    def __init__(self, cluster: ClusterSession, snapshot: int, worker: int) -> None:
        self._cluster, self._snapshot, self._worker = cluster, snapshot, worker
        self.name = f"worker{worker}"

    async def fetch(self, number: int, offset: int, size: int) -> Buffer:
        """Fetches some bytes of an array.

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
    """Returns the number of the optimizer in entries of workers' arrays, which no other
    optimizer has."""
    return -optimizer.outer.id


class PinnedWindows:
    """The arrays that workers of some clusters keep beside variables, at one moment.

    Args:
        components: The variables, part by part.
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
        clusters has it."""
        numbers = [each.open_round(optimizer.outer.id) for each in self._clusters]
        return max([number for number in numbers if number is not None], default=0)

    async def pin(self) -> None:
        """Pins it on the connected workers. `release` has to follow in any case."""
        if self._optimizers:
            self._workers = [
                (c, worker) for c in self._clusters for worker in c.workers
            ]
            found = await asyncio.gather(*(self._pin(*each) for each in self._workers))
            self.pinned = [tensor for tensors in found for tensor in tensors]

    async def release(self) -> None:
        """Releases it, on the workers that are there."""
        released = [
            cluster.ask_worker(worker, ReleaseSnapshot, self._number)
            for cluster, worker in self._workers
        ]
        await asyncio.gather(*released)

    async def _pin(self, cluster: ClusterSession, worker: int) -> list[SourceTensor]:
        source = _WorkerSource(cluster, self._number, worker)
        optimizers, count, total = list(self._optimizers), 0, 1
        pinned: list[SourceTensor] = []
        while count < total:
            answer = await cluster.ask_worker(
                worker, PinSnapshot, self._number, [], optimizers, count
            )
            if answer is None or not answer.tensors:
                break
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
    """Gives the arrays to the connected workers. A worker that is lost meanwhile starts
    from scratch, and so does a component of a variable that is cut at other rows now.

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
            piece = pieces.get((start, stop))
            start = stop
            if piece is None or cluster_of(component) is not cluster:
                continue
            array = await disk(files[piece.file].read, piece.name)
            entry = StoreEntry(component.spec.key, optimizer, leaf, 0)
            await cluster.ask_worker(int(worker), StoreTensors, [entry], (array,))
