"""What one worker reads of a dataset that several have, and how it cuts that up.

The law: every decision is made here, before the first element is read, of numbers and
of the recipe alone (`_lineage`); whoever iterates only obeys.

Which rows of which batch each replica gets is decided by TF's rules. Batches arrive one
after the other, each so many rows long; a cutter says for one worker, step by step,
which rows its replicas take. A *span* is rows of one batch; a *piece* is the spans of
one replica, in order; a *cut* is a step: one piece for each replica of the worker.

- A batch size that is known, and workers that read different data: rows are taken as if
  they came one by one, in batches of the sizes of `batch_sizes_for_worker`, again and
  again (`BySizes`).
- An unknown batch size, or several workers that read the same data: each batch is cut
  by itself into as many pieces as there are replicas of all workers (`ByPieces`).

Law of cuts: no data, no I/O; every row is in exactly one piece, in the order of
arrival, and every piece has a span, though it may be an empty one, so that whoever
obeys knows what nothing looks like.
"""

from __future__ import annotations

import abc
import itertools
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple, final

import numpy as np

from . import _lineage as lineage
from ._dataset import Dataset
from ._foreign import foreign
from ._options import AutoShardPolicy
from ._passes import INFINITE

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from ._passes import Recipe


_UNSEEDED: Final = (
    "several workers deal this dataset out among themselves, and it has a `shuffle` "
    "without a seed: each worker reads it in another order, so some elements are read "
    "twice, and others by nobody. Give `shuffle` the same seed in every process: "
    "shuffle(buffer_size, seed=...)"
)
_UNORDERED: Final = (
    "several workers deal this dataset out among themselves, and it has a "
    "`map(deterministic=False)`, whose elements come in another order in each worker, "
    "so some are read twice, and others by nobody. Leave `deterministic` out, or map "
    "behind the place where it is dealt out"
)


@final
@dataclass(frozen=True, slots=True)
class Allotment:
    """The part of a dataset that a worker reads.

    Args:
        recipe: Of that part.
        policy: How it was found: OFF, FILE, DATA or HINT.
        batch_size: Rows of a global batch, None if nobody knows.
        dealt: See `_lineage.dealt_before`; None for one worker alone.
    """

    recipe: Recipe
    worker: Worker
    policy: AutoShardPolicy
    batch_size: int | None
    dealt: int | None

    @property
    def is_steady(self) -> bool:
        """Whether nobody writes to an element that was yielded."""
        return lineage.is_steady(self.recipe)

    @property
    def is_fresh(self) -> bool:
        """Whether nobody but who draws it has the memory of an element."""
        return lineage.is_fresh(self.recipe)

    @property
    def is_infinite(self) -> bool:
        return self.recipe.size() == INFINITE

    @property
    def ends_with_others(self) -> bool:
        """Whether all workers come to the end in the same step, whatever the data."""
        one = self.worker.count == 1
        return one or self.policy is AutoShardPolicy.DATA

    def elements(self) -> Iterator[Any]:
        """A fresh pass, which begins now, whoever makes its elements, and when."""
        elements, _ = self.begin()
        return elements

    def begin(self) -> tuple[Iterator[Any], str]:
        """A fresh pass as `elements`, and what tells its order from those of others:
        the workers need the same; "" if they do not."""
        begun = self.recipe.begun()
        order = "" if self.dealt is None else lineage.order_of(begun, self.dealt)
        return begun.elements(), order

    def cutter(self) -> Cutter:
        """A fresh cutter, for one pass."""
        return cutter(self.batch_size, self.policy, self.worker)


def as_dataset(source: Any) -> Dataset:
    """Anything that a strategy distributes, as a `Dataset`.

    A dict, a tuple or an array is data itself, one element for each index of the first
    axis; a list, like any other iterable, is the elements one after the other.

    Raises:
        TypeError: It is none of these, or arrays of objects. While iterating: an
            element has an object in it that is no data, and that jax cannot open.
        ValueError: Arrays with first axes of different lengths.
    """
    if isinstance(source, Dataset):
        return source
    if isinstance(source, dict | tuple | np.ndarray):
        return Dataset.from_tensor_slices(source)
    return Dataset(foreign(source))


def is_steady(source: object) -> bool:
    """Whether it is known that nobody writes to an element that ``source`` yielded, so
    that none need be copied: of a `Dataset` whose elements are its own, a list, a
    tuple."""
    if isinstance(source, Dataset):
        return lineage.is_steady(source.recipe)
    return isinstance(source, list | tuple)


def allotted(source: Iterable[Any], worker: Worker) -> Allotment:
    """What the worker reads of a dataset of global batches.

    Raises:
        TypeError: It is no dataset.
        ValueError: It is not batched, though there are several replicas; its policy
            does not fit it.

    Warns:
        UserWarning: Several workers deal it out, and shuffle it differently, or map it
            in any order.
    """
    dataset = as_dataset(source)
    recipe = dataset.recipe
    ranks = lineage.ranks_of(recipe)
    if worker.count * worker.replicas > 1 and ranks is not None and 0 in ranks:
        raise not_batched()
    files = lineage.file_count(recipe)
    wanted = dataset.options().auto_shard_policy
    policy = sharing_policy(wanted, worker.count, files)
    size = lineage.batch_size_of(recipe)
    dealt = lineage.dealt_before(recipe, policy) if worker.count > 1 else None
    if dealt is not None and lineage.order_differs(recipe, dealt):
        warnings.warn(_UNSEEDED, stacklevel=4)  # the line that asked a strategy for it
    if dealt is not None and lineage.has_no_order(recipe, dealt):
        warnings.warn(_UNORDERED, stacklevel=4)
    if policy is AutoShardPolicy.FILE:
        recipe = lineage.for_files(recipe, worker.count, worker.index)
    elif policy is AutoShardPolicy.HINT:
        recipe = lineage.for_hint(recipe, worker.count, worker.index)
    # Apart: one worker may look into the dataset before, and the others not.
    return Allotment(recipe.apart(), worker, policy, size, dealt)


def not_batched() -> ValueError:
    """The error of elements that cannot be cut."""
    return ValueError(
        "experimental_distribute_dataset takes a dataset of batches, which it cuts for "
        "the replicas. Call the `batch` method of the dataset with the global batch "
        "size, or give distribute_datasets_from_function what each worker draws"
    )


class Span(NamedTuple):
    """Rows ``start`` to ``stop`` of the ``batch``-th batch, counted from 0."""

    batch: int
    start: int
    stop: int


Piece = tuple[Span, ...]
Cut = tuple[Piece, ...]


@final
@dataclass(frozen=True, slots=True)
class Worker:
    """Who draws: worker ``index`` of ``count``, each with ``replicas`` of its own."""

    count: int = 1
    index: int = 0
    replicas: int = 1


def batch_sizes_for_worker(
    global_batch: int, workers: int, replicas_per_worker: int, worker: int
) -> list[int]:
    """The sizes of the batches that a worker takes, one for a replica after the other.

    There are as many as replicas of all workers, as even as can be, the first ones
    larger, beginning with those of the worker's own replicas: so the replicas of all
    workers take a global batch together in every step, and the worker takes one in as
    many steps as there are workers.
    """
    count = workers * replicas_per_worker
    base, more = divmod(global_batch, count)
    sizes = [base + (number < more) for number in range(count)]
    # Turned, so that the larger ones go to other replicas in each step: over as many
    # steps as there are workers all read as many rows.
    start = worker * replicas_per_worker
    return sizes[start:] + sizes[:start]


def sharing_policy(
    policy: AutoShardPolicy, workers: int, files: int | None
) -> AutoShardPolicy:
    """What the policy means for this many workers: OFF, FILE, DATA or HINT.

    Args:
        files: How many files the dataset is read from; None: it is not.

    Raises:
        ValueError: FILE without files, or with fewer files than workers.
    """
    if workers == 1:
        hint = policy is AutoShardPolicy.HINT
        return AutoShardPolicy.HINT if hint else AutoShardPolicy.OFF
    if policy is AutoShardPolicy.AUTO:
        enough = files is not None and files >= workers
        return AutoShardPolicy.FILE if enough else AutoShardPolicy.DATA
    if policy is AutoShardPolicy.FILE and files is None:
        raise ValueError(
            "AutoShardPolicy.FILE: did not find a shardable source, because the "
            "dataset is not read from files that zstrat knows (zs.data.Dataset."
            "from_files, list_files and their kin), or several are zipped: consider "
            "turning off auto-sharding or switching the auto_shard_policy to DATA"
        )
    if policy is AutoShardPolicy.FILE and files is not None and files < workers:
        raise ValueError(
            f"AutoShardPolicy.FILE: not enough files, {files} for {workers} workers "
            "(of Parquet row groups count); each worker needs at least one: write more "
            "files, or set the auto_shard_policy to DATA (every worker reads all and "
            "keeps its share) or OFF"
        )
    return policy


class Cutter(abc.ABC):
    """Cuts batches for one worker. Subclasses are final."""

    @abc.abstractmethod
    def take(self, rows: int) -> list[Cut]:
        """The steps that are complete when a batch of ``rows`` has arrived."""

    @abc.abstractmethod
    def finish(self) -> list[Cut]:
        """What is left when no more batches come: at most one step."""

    @property
    @abc.abstractmethod
    def oldest(self) -> int:
        """The first batch that a later cut may name."""


def cutter(batch_size: int | None, policy: AutoShardPolicy, worker: Worker) -> Cutter:
    """The cutter for a worker, under a policy as `sharing_policy` gives it.

    Args:
        batch_size: Rows of a global batch, None if nobody knows. Of 0, as a source may
            say whose rows are empty, no steps can be made; it counts as unknown.
    """
    # All workers read all batches, so each can be cut alone, and whatever its size.
    if policy is AutoShardPolicy.DATA:
        return ByPieces(worker, is_shared=True)
    if not batch_size:
        return ByPieces(worker, is_shared=False)
    sizes = batch_sizes_for_worker(
        batch_size, worker.count, worker.replicas, worker.index
    )
    return BySizes(sizes, worker.replicas)


@final
class BySizes(Cutter):
    """Pieces of given sizes, again and again, wherever batches begin and end."""

    def __init__(self, sizes: Sequence[int], replicas: int) -> None:
        self._sizes: Final = itertools.cycle(sizes)
        self._replicas: Final = replicas
        self._number = -1
        self._whole: list[Piece] = []
        """The pieces of the next step that are complete."""
        self._begun: list[Span] = []
        self._missing = next(self._sizes)
        """Rows that the piece that was begun still needs."""

    @property
    def oldest(self) -> int:
        waiting = [*(piece[0] for piece in self._whole[:1]), *self._begun[:1]]
        return waiting[0].batch if waiting else self._number + 1

    def take(self, rows: int) -> list[Cut]:
        self._number += 1
        cuts: list[Cut] = []
        at = 0
        while at < rows:
            stop = min(rows, at + self._missing)
            self._begun.append(Span(self._number, at, stop))
            self._missing -= stop - at
            at = stop
            if not self._missing:
                self._close_piece(cuts)
        return cuts

    def finish(self) -> list[Cut]:
        pieces = [*self._whole, tuple(self._begun)] if self._begun else [*self._whole]
        self._whole, self._begun = [], []
        if not any(span.stop > span.start for piece in pieces for span in piece):
            return []
        last = pieces[-1][-1]
        # No rows, but of a batch that is there: a replica without any still knows what
        # they look like.
        nothing = (Span(last.batch, last.stop, last.stop),)
        return [(*pieces, *[nothing] * (self._replicas - len(pieces)))]

    def _close_piece(self, cuts: list[Cut]) -> None:
        self._whole.append(tuple(self._begun))
        self._begun, self._missing = [], next(self._sizes)
        if len(self._whole) == self._replicas:
            cuts.append(tuple(self._whole))
            self._whole = []


@final
class ByPieces(Cutter):
    """Each batch cut by itself, as evenly as equal pieces allow: the last ones may be
    shorter, down to no rows at all.

    Args:
        is_shared: The workers read the same batches, and worker ``i`` takes pieces
            ``i``, ``i + workers``, …; else the batches are its own.
    """

    def __init__(self, worker: Worker, *, is_shared: bool) -> None:
        self._pieces: Final = worker.count * worker.replicas
        self._mine: Final = (
            slice(worker.index, None, worker.count) if is_shared else slice(None)
        )
        self._replicas: Final = worker.replicas
        self._number = -1

    @property
    def oldest(self) -> int:
        return self._number + 1

    def take(self, rows: int) -> list[Cut]:
        self._number += 1
        if not rows:
            return []
        size = -(-rows // self._pieces)
        ends = [min(rows, size * n) for n in range(self._pieces + 1)]
        pieces = [
            (Span(self._number, start, stop),)
            for start, stop in itertools.pairwise(ends)
        ][self._mine]
        return [
            tuple(pieces[n : n + self._replicas])
            for n in range(0, len(pieces), self._replicas)
        ]

    def finish(self) -> list[Cut]:
        return []
