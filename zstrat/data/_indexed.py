"""Examples that are read by their numbers, for the ranges of leased datasets.

A source is an `IndexedRows`: *blocks* of examples, each of a known length, of which any
rows can be read. Arrays, and anything with ``len`` and an index, are one block. Files
have a block for each row group, table, or file of records, because that is the unit in
which they are read. `indexed` finds out what kind of source an object is, or refuses it
with advice.
"""

from __future__ import annotations

import abc
from collections import OrderedDict
from collections.abc import Iterator, Sized
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any, Final, Protocol, final, runtime_checkable

import numpy as np

from ._batches import IndexedPass, Rebatched, Unbatched
from ._cached import Cached
from ._elements import ClosingIterator
from ._foreign import is_huggingface
from ._leaves import Array
from ._lineage import Opted
from ._parallel import in_order, numbered
from ._passes import (
    Batching,
    Counted,
    Filtered,
    MappedPass,
    Prefetched,
    Recipe,
    Repeated,
    Rows,
    SlicedPass,
)
from ._shuffled import Shuffled
from ._sources import Sources
from ._tree import as_element, gathered, leaves, mapped, stacked
from .files import ParquetRows, Records, TableRows

if TYPE_CHECKING:
    from ._leaves import Element
    from .files import OpenTable

OPEN_TABLES: Final = 2
"""Number of tables to keep open. A range of examples may span two tables, and its
neighbours read the same ones."""


@runtime_checkable
class IndexedData(Protocol):
    """Anything with a length and an index: a dataset of grain or torch, a list."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: Any, /) -> Any: ...


class IndexedRows(abc.ABC):
    """Blocks of examples; rows of a block are read by their numbers. Subclasses are
    final. One thread uses a source at a time."""

    is_quick = False
    """Whether reading is so quick that a thread that reads ahead would cost more than
    it saves."""
    is_sequential = False
    """Whether the rows of a block can only be read in their order."""

    @property
    @abc.abstractmethod
    def blocks(self) -> tuple[int, ...]:
        """Number of examples of each block; may read all files to count the
        examples."""

    @abc.abstractmethod
    def read(self, block: int, rows: np.ndarray) -> Element:
        """Returns these rows of a block, stacked."""

    def close(self) -> None:  # noqa: B027 - most have nothing open
        """Closes open files."""


def indexed(source: object) -> IndexedRows:
    """Returns a source from which the examples of an object are read by number.

    Raises:
        TypeError, ValueError: The examples of the object cannot be read by number; says
            what to give.
    """
    if is_huggingface(source) and not isinstance(source, Sized):
        raise TypeError(
            "an IterableDataset of HuggingFace has no index: load it without "
            "streaming=True, or give zs.data.Dataset.from_parquet of its files"
        )
    # A dict or tuple has a length and an index, too: it is a structure of arrays first.
    if isinstance(source, Sources):
        return _of_recipe(source.recipe)
    if isinstance(source, dict | tuple | Array):
        return _of_recipe(Sources.from_tensor_slices(source).recipe)
    if isinstance(source, IndexedData):
        return _Items(source)
    raise TypeError(
        f"the examples of a {type(source).__name__} cannot be leased, as they have no "
        "numbers: give arrays, something with len() and an index, or a zs.data.Dataset "
        "of arrays or files (from_parquet, from_npy, from_files). A stream goes with "
        "create_per_worker_dataset"
    )


def _of_recipe(recipe: Recipe) -> IndexedRows:
    match recipe:
        case Rows() | Counted():
            return _InMemory(recipe)
        case MappedPass():
            return _Mapped(_of_recipe(recipe.source), recipe)
        case Prefetched() | Opted():  # what is leased is read ahead anyway
            return _of_recipe(recipe.source)
        case SlicedPass(step=1):  # take and skip
            return _Sliced(_of_recipe(recipe.source), recipe.start, recipe.stop)
        case TableRows():
            return _Tables(recipe)
        case Records():
            return _RecordFiles(recipe)
    # What remains changes the order or the number of examples, which leases decide: an
    # argument of the leased dataset does the same.
    for kinds, what, remedy in _REMEDIES:
        if isinstance(recipe, kinds):
            raise ValueError(f"{what} in a dataset that is leased: {remedy}")
    raise ValueError(
        f"a zs.data.Dataset with {type(recipe).__name__} in it cannot be leased, as "
        "its examples have no numbers: lease the arrays or files that it is made of, "
        "with map() for all else, or use create_per_worker_dataset"
    )


_REMEDIES: Final[tuple[tuple[Any, str, str], ...]] = (
    (
        (Batching, Rebatched, Unbatched),
        "batches",
        "leave batch() out, and give create_leased_dataset(batch=)",
    ),
    (
        IndexedPass,
        "from_indexed()",
        "it has its own batch, seed and epochs: create_leased_dataset(dataset) alone",
    ),
    (Shuffled, "shuffle()", "leave it out, and give shuffle_seed="),
    (Repeated, "repeat()", "leave it out, and give epochs="),
    (
        Filtered,
        "filter()",
        "how many examples it keeps is not known before they are read: lease what it "
        "keeps, Dataset.from_tensor_slices(list(dataset)) or files of it, or give the "
        "examples that it leaves out a weight of 0 in map()",
    ),
    (
        SlicedPass,
        "shard()",
        "leave it out: all workers share one dataset, and each example goes to one",
    ),
    (Cached, "cache()", "leave it out: examples are read by number, in any order"),
)


@final
class _InMemory(IndexedRows):
    """Arrays in memory, or a range of numbers, as one block."""

    is_quick = True

    def __init__(self, recipe: Rows | Counted) -> None:
        self._recipe: Final = recipe

    @property
    def blocks(self) -> tuple[int, ...]:
        return (self._recipe.size(),)

    def read(self, block: int, rows: np.ndarray) -> Element:
        if isinstance(self._recipe, Rows):
            return gathered(self._recipe.arrays, rows)
        numbers = self._recipe.numbers
        return np.asarray(numbers.start + rows * numbers.step, np.int64)


@final
class _Items(IndexedRows):
    """Any object with a length and an index, as one block; a HuggingFace dataset reads
    several indices in one call."""

    def __init__(self, data: IndexedData) -> None:
        self._data: Final = data
        self._takes_several: Final = is_huggingface(data)

    @property
    def blocks(self) -> tuple[int, ...]:
        return (len(self._data),)

    def read(self, block: int, rows: np.ndarray) -> Element:
        if self._takes_several:
            return as_element(self._data[rows.tolist()])
        # Python's integers, which every class with an index takes.
        items = [self._data[row] for row in rows.tolist()]
        for item, row in zip(items, rows.tolist(), strict=True):
            if item is None:  # what a filter of grain leaves
                raise ValueError(
                    f"example {row} is None: a filter left it out, or its source is "
                    "damaged. Filter the source once, before it is leased"
                )
        return stacked([as_element(item) for item in items])


@final
class _Mapped(IndexedRows):
    """Applies a function to each example of a source."""

    def __init__(self, source: IndexedRows, recipe: MappedPass) -> None:
        self.is_sequential = source.is_sequential
        self._source: Final = source
        self._made: Final = numbered(recipe._made, "map", recipe.function)
        self._threads: Final = recipe.threads

    @property
    def blocks(self) -> tuple[int, ...]:
        return self._source.blocks

    def read(self, block: int, rows: np.ndarray) -> Element:
        # Read as one batch, and mapped row by row: a file or table is opened once.
        batch = self._source.read(block, rows)
        each = (_row(batch, at) for at in range(len(rows)))
        if self._threads:
            return stacked(list(in_order(each, self._made, self._threads, True)))
        return stacked([self._made(*pair) for pair in enumerate(each)])

    def close(self) -> None:
        self._source.close()


@final
class _Sliced(IndexedRows):
    """The examples ``start`` to ``stop`` of all blocks together; ``stop`` None: to the
    end."""

    def __init__(self, source: IndexedRows, start: int, stop: int | None) -> None:
        self.is_quick = source.is_quick
        self.is_sequential = source.is_sequential
        self._source, self._start, self._stop = source, start, stop

    @cached_property
    def _ranges(self) -> list[range]:
        """For each block, the range of its rows that belong to the slice."""
        # What is skipped or taken is counted through all blocks.
        ranges, start, stop = [], self._start, self._stop
        for size in self._source.blocks:
            ranges.append(range(size)[start:stop])
            start = max(0, start - size)
            stop = None if stop is None else max(0, stop - size)
        return ranges

    @property
    def blocks(self) -> tuple[int, ...]:
        return tuple(map(len, self._ranges))

    def read(self, block: int, rows: np.ndarray) -> Element:
        return self._source.read(block, rows + self._ranges[block].start)

    def close(self) -> None:
        self._source.close()


@final
class _Tables(IndexedRows):
    """Files of arrays, or row groups of Parquet files; each file or row group is a
    block."""

    def __init__(self, recipe: TableRows) -> None:
        self._recipe: Final = recipe
        self._open: Final[OrderedDict[int, OpenTable]] = OrderedDict()

    @cached_property
    def blocks(self) -> tuple[int, ...]:
        if isinstance(self._recipe, ParquetRows):
            return tuple(rows for _, rows in self._recipe.groups)
        tables = self._recipe.tables()
        return tuple(len(next(leaves(table.arrays))[1]) for table in tables)

    def read(self, block: int, rows: np.ndarray) -> Element:
        # Taken out and put back, so that the first of the dict was unused the longest.
        table = self._open.pop(block, None)
        if table is None:
            # Every n-th file of n, from this one on, is this one alone.
            (table,) = self._recipe.every(len(self.blocks), block).tables()
        self._open[block] = table
        if len(self._open) > OPEN_TABLES:
            self._open.popitem(last=False)
        return gathered(table.arrays, rows)


@final
class _RecordFiles(IndexedRows):
    """The records that a reader yields for each file; a file is a block, and is read
    from its start. The records of all files are counted once."""

    is_sequential = True

    def __init__(self, recipe: Records) -> None:
        self._recipe: Final = recipe
        self._block, self._at = -1, 0
        self._records: Iterator[Any] = iter(())

    @cached_property
    def blocks(self) -> tuple[int, ...]:
        return tuple(
            sum(1 for _ in self._of(block)) for block in range(len(self._recipe.paths))
        )

    def read(self, block: int, rows: np.ndarray) -> Element:
        # The rows are consecutive: this is read in order alone (`is_sequential`).
        start, count = int(rows[0]), len(rows)
        if block != self._block or start < self._at:
            self.close()
            self._block, self._at, self._records = block, 0, self._of(block)
        skipped = start - self._at
        records = list(islice(self._records, skipped, skipped + count))
        # A file that is shorter than when it was counted would give small batches.
        self._at = start + count
        if len(records) < count:
            raise ValueError(
                f"{self._recipe.paths[block]} had {self.blocks[block]} records when "
                f"its dataset was built, and ends before number {self._at} now: give "
                "files that nobody writes to"
            )
        return self._recipe.batch_of(records)

    def close(self) -> None:
        if isinstance(self._records, ClosingIterator):
            self._records.close()
        self._block = -1

    def _of(self, block: int) -> Iterator[Any]:
        return self._recipe.every(len(self._recipe.paths), block).items()


def _row(batch: Element, at: int) -> Element:
    return mapped(lambda leaf: leaf[at], batch)
