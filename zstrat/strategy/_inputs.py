"""Datasets of one process among several: which elements it draws, and which replica
gets what.

TF's rules. A dataset of global batches is cut into as many pieces as there are
replicas; of these process i keeps number i, i + W, i + 2 W, ..., and deals them out to
its replicas in turn. A dataset function is called once in each process, and makes what
that process draws, one element for each of its replicas.

Law of the file: every process reads the same global batches in the same order, so all
of them come to the end in the same step.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from zstrat.errors import OutOfRangeError
from zstrat.program import StepIterator
from zstrat.variables import recorder

from ._values import PerReplica

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from zstrat.program._collective import Team


class DistributedDataset:
    """What a process draws, step by step. Each ``iter()`` is a fresh pass; an iterator
    may be an argument of a step."""

    def __init__(self, elements: Callable[[], Iterator[Any]]) -> None:
        self._elements = elements

    def __iter__(self) -> DistributedIterator:
        return DistributedIterator(self._elements(), name="a distributed dataset")


class DistributedIterator(StepIterator):
    """What ``iter()`` of a distributed dataset is: a step draws from it, and a loop in
    Python, which ends with the elements."""

    def __next__(self) -> Any:
        try:
            return super().__next__()
        except OutOfRangeError:
            if recorder.get() is None:
                raise StopIteration from None
            raise


def of_batches(dataset: Iterable[Any], team: Team) -> DistributedDataset:
    """The share of this process of a dataset of global batches."""
    processes = team.size // team.local
    rank = team.first // team.local

    def elements() -> Iterator[Any]:
        if team.size == 1:
            return iter(dataset)
        rows = [0]
        pieces = itertools.chain.from_iterable(
            _pieces(batch, team, rows) for batch in dataset
        )
        mine = itertools.islice(pieces, rank, None, processes)
        return _dealt(mine, team.local)

    return DistributedDataset(elements)


def of_elements(dataset: Iterable[Any], team: Team) -> DistributedDataset:
    """A dataset of this process, one element for each of its replicas."""
    return DistributedDataset(lambda: _dealt(iter(dataset), team.local))


def batch_sizes_for_worker(
    global_batch: int, workers: int, replicas_per_worker: int, worker: int
) -> list[int]:
    """The batches that a worker takes over N steps of one replica each, N being the
    number of all replicas: as even as can be, the first ones larger, and begun with its
    own first replica (TF's rule)."""
    count = workers * replicas_per_worker
    base, more = divmod(global_batch, count)
    sizes = [base + (number < more) for number in range(count)]
    start = worker * replicas_per_worker
    return sizes[start:] + sizes[:start]


def _dealt(elements: Iterator[Any], replicas: int) -> Iterator[Any]:
    """One element for each replica, as long as there is one for each."""
    if replicas == 1:
        yield from elements
        return
    while len(several := list(itertools.islice(elements, replicas))) == replicas:
        yield PerReplica(tuple(several))


def _pieces(batch: Any, team: Team, first: list[int]) -> Iterator[Any]:
    """A global batch, one piece for each replica; the last ones may be shorter, down to
    no rows at all. ``first`` keeps the size of the first batch."""
    rows = _rows(batch)
    first[0] = first[0] or rows
    if team.size > team.local:
        size = -(-rows // team.size)
        cuts = [min(rows, size * n) for n in range(team.size + 1)]
    else:
        sizes = batch_sizes_for_worker(first[0], 1, team.local, 0)
        cuts = [min(rows, n) for n in itertools.accumulate(sizes, initial=0)]
    for start, stop in itertools.pairwise(cuts):
        yield jax.tree.map(lambda leaf, a=start, b=stop: leaf[a:b], batch)


def _rows(batch: Any) -> int:
    sizes = {len(leaf) if np.ndim(leaf) else None for leaf in jax.tree.leaves(batch)}
    if None in sizes or len(sizes) != 1:
        raise ValueError(
            "experimental_distribute_dataset takes a dataset of batches, which it cuts "
            "for the replicas. Call the `batch` method of the dataset, or give "
            "distribute_datasets_from_function what each process draws"
        )
    return int(sizes.pop() or 0)
