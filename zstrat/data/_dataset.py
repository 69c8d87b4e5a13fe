"""`Dataset`: the input pipelines of tf.data, as a thin interface over numpy.

Every tf.distribute program begins with a dataset. This class checks arguments and uses
TF's names and messages; `_passes` does the work. A program that needs more (worker
processes, weighted mixtures) gives a strategy a grain dataset or any generator instead.
"""

from __future__ import annotations

import os
import secrets
from operator import index
from typing import TYPE_CHECKING, Any, Final, final

import numpy as np

from . import _passes as passes
from ._batches import IndexedPass, PaddedBatches, Rebatched, Unbatched
from ._cached import Cached
from ._elements import ending
from ._leased import LeasedSource
from ._lineage import Hinted, Opted, options_of
from ._parallel import threads_of
from ._position import DatasetIterator
from ._replica_rows import SHARD_HINT, Options
from ._several import Concatenated, Interleaved
from ._shuffled import Shuffled, first_element_spec
from ._sources import Sources
from ._spec import cast_state, common_spec, state_dtypes, unknown
from ._tree import owned

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ._leaves import Element
    from ._spec import Spec

AUTOTUNE: Final = -1
"""As a buffer size: two elements, one that is read while the next one is made."""
INFINITE_CARDINALITY: Final = passes.INFINITE
UNKNOWN_CARDINALITY: Final = passes.UNKNOWN


@final
class Dataset(Sources):
    """A sequence of elements; each ``iter()`` begins a new pass over them.

    Elements are numpy arrays, scalars and `bytes`, or dicts and tuples of them, nested
    in any way; as in TF a list is not structure but one array. A batch of `bytes` is an
    array of objects, as in TF: numpy's strings drop the zeros at their ends.

    Datasets are immutable: every method returns a new one. Make one with `range`,
    `from_tensors`, `from_tensor_slices`, `from_generator`, `zip`, or from files:
    `from_text_lines`, `from_tfrecords`, `from_npy`, `from_npz`, `from_parquet`,
    `from_files`, `list_files`. A generator or a mapped function may fill the same
    buffer again and again, because its elements are copied.
    """

    __slots__ = ()

    @classmethod
    def from_indexed(
        cls,
        source: Any,
        batch: int,
        *,
        shuffle_seed: int | None = None,
        epochs: int | None = 1,
        drop_remainder: bool = False,
    ) -> Dataset:
        """Yields batches of examples that are read by number, in a permutation that is
        computed from the seed and the epoch, and not stored.

        A coordinator leases such a dataset to workers (``create_leased_dataset``), and
        any strategy distributes it. For the arguments see
        `ClusterCoordinator.create_leased_dataset` and `docs/data.md`.

        Raises:
            TypeError, ValueError: The examples of the source cannot be read by number;
                says what to give. Or an argument is wrong.
        """
        leased = LeasedSource(source, batch, shuffle_seed, epochs, drop_remainder)
        # Now, on the machine of the user: workers would fail one after the other.
        leased.check()
        return cls(IndexedPass(leased))

    def batch(self, batch_size: int, drop_remainder: bool = False) -> Dataset:
        """Stacks ``batch_size`` elements along a new first axis; the last batch may be
        shorter unless ``drop_remainder``.

        Raises:
            ValueError: ``batch_size`` is not positive; while iterating: elements differ
                in shape or structure.
        """
        _at_least("batch_size", batch_size, 1)
        return Dataset(passes.Batched(self._recipe, batch_size, drop_remainder))

    def repeat(self, count: int | None = None) -> Dataset:
        """Repeats the dataset ``count`` times; None or -1: without end.

        Raises:
            ValueError: ``count`` is less than -1.
        """
        if count is not None and count != -1:
            _at_least("count", count, 0)
        return Dataset(passes.Repeated(self._recipe, None if count == -1 else count))

    def shuffle(
        self,
        buffer_size: int,
        seed: int | None = None,
        reshuffle_each_iteration: bool = True,
    ) -> Dataset:
        """Draws each element at random from the next ``buffer_size`` ones.

        The order is uniform if the buffer holds all elements. ``seed`` makes the
        sequence of passes repeatable. Each pass, and each repeat within a pass, has
        another order, unless ``reshuffle_each_iteration`` is false: then all have the
        same one. Passes are numbered as ``iter()`` is called, however many elements
        each of them yields; a pickled copy of the dataset begins at the first pass.

        Processes that share one dataset out among themselves (`AutoShardPolicy.DATA`)
        all need the same seed, and have to begin equally many passes over the
        distributed dataset; these passes are counted separately. A process that was
        restarted has begun none: then all processes have to make the dataset again,
        from here on, and distribute it again. The first step of a pass is refused if
        the number of the pass is not the same in all processes.

        Raises:
            ValueError: ``buffer_size`` is not positive.
        """
        _at_least("buffer_size", buffer_size, 1)
        drawn = seed is None and not reshuffle_each_iteration
        if drawn:
            # One order for every pass: drawn now, and noted as drawn, since other
            # processes that make the same dataset draw another one.
            seed = secrets.randbits(63)
        how = (buffer_size, seed, reshuffle_each_iteration)
        return Dataset(Shuffled(self._recipe, *how, is_drawn=drawn))

    def shard(self, num_shards: int, index: int) -> Dataset:
        """Keeps every ``num_shards``-th element, from element ``index`` on. Directly
        after `from_parquet`, and if there are enough row groups, keeps every
        ``num_shards``-th row group instead.

        With `SHARD_HINT` for both arguments, a strategy that distributes the dataset
        under `AutoShardPolicy.HINT` replaces them by its number of workers and the
        worker's index; such a dataset cannot be iterated otherwise.

        Raises:
            ValueError: ``num_shards`` is below 1, or ``index`` is not in [0,
                num_shards).
        """
        if num_shards == SHARD_HINT and index == SHARD_HINT:
            return Dataset(Hinted(self._recipe))
        _at_least("num_shards", num_shards, 1)
        _whole("index", index)
        if not 0 <= index < num_shards:
            raise ValueError(
                f"index must be between 0 and {num_shards - 1} (currently index "
                f"= {index}, num_shards = {num_shards})."
            )
        return Dataset(self._recipe.shard(num_shards, index))

    def map(
        self,
        map_func: Callable[..., Any],
        num_parallel_calls: int | None = None,
        deterministic: bool | None = None,
    ) -> Dataset:
        """Applies ``map_func`` to each element, in numpy. The components of a plain
        tuple are passed as separate arguments, and a list that the function returns is
        a tuple, as in TF. Errors of the function are raised unchanged, with a note of
        the line and the element.

        Args:
            num_parallel_calls: Number of elements made at a time, on threads that end
                with the iterator; -1 (`AUTOTUNE`): one for each core, 16 at most. The
                function must be safe to be called from several threads. Threads help
                where the function waits for a disk, or computes in numpy.
            deterministic: False: elements are yielded as they are made, in any order;
                otherwise in the order of the source. Has no effect without threads.

        Raises:
            TypeError: ``map_func`` is not callable. While iterating: its result
                contains an object; see `from_generator`.
            ValueError: ``num_parallel_calls`` is 0, or below -1.
        """
        _require_callable("map_func", map_func)
        threads, in_order = threads_of(num_parallel_calls), deterministic is not False
        return Dataset(passes.MappedPass(self._recipe, map_func, threads, in_order))

    def filter(self, predicate: Callable[..., Any]) -> Dataset:
        """Keeps the elements for which ``predicate`` returns True. The components of a
        plain tuple are passed as separate arguments.

        Raises:
            TypeError: ``predicate`` is not callable. While iterating: it returns
                something other than one bool.
        """
        _require_callable("predicate", predicate)
        return Dataset(passes.Filtered(self._recipe, predicate))

    def interleave(
        self,
        map_func: Callable[..., Dataset],
        cycle_length: int | None = None,
        block_length: int | None = None,
        num_parallel_calls: int | None = None,
        deterministic: bool | None = None,
    ) -> Dataset:
        """Maps each element to a dataset by ``map_func``, and interleaves these
        datasets: yields ``block_length`` (default 1) elements of one, then of the next,
        of ``cycle_length`` datasets that are open at a time (default 2, or
        ``num_parallel_calls``).

        The order does not depend on threads; ``deterministic=False`` would allow
        another order, and has no effect. A `shuffle` in a dataset that ``map_func``
        returns has another order for each element, and the same orders in each pass.

        Args:
            num_parallel_calls: Number of open datasets to read ahead, one block each,
                on separate threads; -1 (`AUTOTUNE`): all.

        Raises:
            ValueError: A number is not positive; more parallel calls than datasets.
            TypeError: ``map_func`` is not callable. While iterating: it returns
                something other than a dataset.
        """
        del deterministic
        _require_callable("map_func", map_func)
        # As many datasets are open as are read side by side, or two.
        calls = threads_of(num_parallel_calls)
        length = (calls or 2) if cycle_length in (None, AUTOTUNE) else cycle_length
        block = 1 if block_length is None else block_length
        assert length is not None
        _at_least("cycle_length", length, 1)
        _at_least("block_length", block, 1)
        if num_parallel_calls == AUTOTUNE:
            calls = length
        if calls > length:
            raise ValueError(
                f"`num_parallel_calls` {calls} must be at most `cycle_length` {length}"
            )
        return Dataset(Interleaved(self._recipe, map_func, length, block, calls))

    def flat_map(self, map_func: Callable[..., Dataset]) -> Dataset:
        """Maps each element to a dataset by ``map_func``, and yields the elements of
        these datasets, one dataset after the other.

        Raises:
            TypeError: As `interleave`.
        """
        return self.interleave(map_func, cycle_length=1)

    def concatenate(self, dataset: Dataset) -> Dataset:
        """Yields the elements of this dataset, then those of ``dataset``.

        Raises:
            TypeError: ``dataset`` is not a dataset; or the elements of the two differ
                in structure, rank or dtype, as far as these are known without a pass.
        """
        if not isinstance(dataset, Dataset):
            raise TypeError(
                f"`concatenate` takes a zs.data.Dataset, got {type(dataset).__name__}"
            )
        # Without a look: it would draw an element of both, and run their functions.
        ours, theirs = (each.recipe.spec(unknown) for each in (self, dataset))
        if ours is not None and theirs is not None:
            common_spec(ours, theirs)
        return Dataset(Concatenated((self._recipe, dataset.recipe)))

    def cache(self, filename: str | os.PathLike[str] = "") -> Dataset:
        """Keeps the elements of the first complete pass for all later passes; in
        memory, or in a file with the name ``filename``, which later programs read.

        Only a pass that reached its end is kept. A `shuffle` before the cache shuffles
        once, and one after the cache again in each pass. Elements kept in memory cannot
        be written to. If a strategy shards the dataset by file or hint, each worker
        keeps its own part, in a file such as ``filename-00000-of-00002``. Nothing
        checks whether a file still fits the dataset: remove the file when the dataset
        changes.

        Raises:
            ValueError: The dataset has no end. While iterating: the file is damaged, or
                was not written by `cache`.
            TypeError: While iterating, with a file: elements contain named tuples, or
                dtypes from other libraries.
        """
        if self._recipe.size() == INFINITE_CARDINALITY:
            raise ValueError(
                "cache() of an infinite dataset would take all memory, and never "
                "be whole: call cache() before repeat(), or take() before cache()"
            )
        return Dataset(Cached(self._recipe, os.fspath(filename)))

    def unbatch(self) -> Dataset:
        """Splits each element into its rows.

        Raises (while iterating):
            ValueError: A component is a scalar, or the first axes of the components
                differ.
        """
        return Dataset(Unbatched(self._recipe))

    def rebatch(
        self, batch_size: int | Sequence[int], drop_remainder: bool = False
    ) -> Dataset:
        """Regroups the rows of all batches into batches of ``batch_size``; if that is a
        sequence, its sizes are used one after the other, again and again. The last
        batch may be shorter unless ``drop_remainder``.

        Raises:
            ValueError: A size is not positive, or there is none. While iterating: as
                `unbatch`, or batches differ in structure or in the shape of their rows.
        """
        # An integer of numpy has no length; anything else is a sequence of sizes.
        is_one = isinstance(batch_size, int | np.integer)
        sizes = tuple(map(index, [batch_size] if is_one else batch_size))  # type: ignore[arg-type]
        if not sizes:
            raise ValueError("`batch_size` must be at least one number, got none")
        for size in sizes:
            _at_least("batch_size", size, 1)
        return Dataset(Rebatched(self._recipe, sizes, drop_remainder))

    def padded_batch(
        self,
        batch_size: int,
        padded_shapes: Any = None,
        padding_values: Any = None,
        drop_remainder: bool = False,
    ) -> Dataset:
        """Stacks elements of different lengths, padded at their ends.

        Args:
            padded_shapes: A shape for each component. None and -1 in a shape mean the
                longest length in the batch; None in place of all shapes means that for
                all axes of all components. The structure is that of an element: for an
                element of one component, a shape such as ``[4]``.
            padding_values: A value for each component, or one value for all; None:
                zeros, False, empty text.

        Raises:
            ValueError: ``batch_size`` is not positive. While iterating: an element is
                larger than its padded shape, or has another rank.
            TypeError: While iterating: the structures differ; or a dtype cannot hold
                its padding value.
        """
        _at_least("batch_size", batch_size, 1)
        how = (batch_size, drop_remainder, padded_shapes, padding_values)
        return Dataset(PaddedBatches(self._recipe, *how))

    def reduce(
        self, initial_state: Any, reduce_func: Callable[[Any, Any], Any]
    ) -> Element:
        """Reduces the elements to one state: calls ``reduce_func(state, element)`` for
        each element, beginning with ``initial_state``; returns the last state, in
        numpy. A state or element that is a tuple is passed as one argument.

        Raises:
            ValueError: The dataset has no end.
            TypeError: A state differs from the first one in structure, or has values
                that the dtypes of the first one cannot hold.
        """
        _require_callable("reduce_func", reduce_func)
        if self._recipe.size() == INFINITE_CARDINALITY:
            raise ValueError(
                "reduce() of an infinite dataset would not end: take() some elements"
            )
        state = first = owned(initial_state)
        dtypes = state_dtypes(first)
        with ending(iter(self)) as elements:
            for number, element in enumerate(elements):
                reduced = owned(reduce_func(state, element))
                state = cast_state(reduced, first, dtypes, number)
        return state

    def prefetch(self, buffer_size: int) -> Dataset:
        """Makes up to ``buffer_size`` elements in advance, on a separate thread, which
        ends with its iterator; -1 (`AUTOTUNE`) means 2 elements, 0 means no
        prefetching.

        Raises:
            ValueError: ``buffer_size`` is below -1.
        """
        size = 2 if buffer_size == AUTOTUNE else buffer_size
        _at_least("buffer_size", size, 0)
        return Dataset(passes.Prefetched(self._recipe, size)) if size else self

    def take(self, count: int) -> Dataset:
        """Yields at most the first ``count`` elements; all if ``count`` is -1.

        Raises:
            ValueError: ``count`` is below -1.
        """
        if count == -1:
            return self
        _at_least("count", count, 0)
        return Dataset(passes.SlicedPass(self._recipe, stop=count))

    def skip(self, count: int) -> Dataset:
        """Skips the first ``count`` elements; all if ``count`` is -1.

        Raises:
            ValueError: ``count`` is below -1.
        """
        if count == -1:
            return self.take(0)
        _at_least("count", count, 0)
        return Dataset(passes.SlicedPass(self._recipe, start=count))

    def enumerate(self, start: int = 0) -> Dataset:
        """Yields pairs ``(number, element)``, the number an int64."""
        _whole("start", start)
        return Dataset(passes.Enumerated(self._recipe, start))

    def with_options(self, options: Options) -> Dataset:
        """Returns the dataset with these options, which also apply to datasets made
        from it. An option that is set already is kept if ``options`` does not set it.

        Raises:
            TypeError: ``options`` is not an `Options` object.
        """
        if not isinstance(options, Options):
            raise TypeError(f"`options` must be a zs.data.Options, got {options!r:.99}")
        return Dataset(Opted(self._recipe, options.experimental_distribute.chosen))

    def options(self) -> Options:
        """Returns a copy of the dataset's options: changing the copy does not change a
        dataset."""
        return options_of(self._recipe)

    @property
    def element_spec(self) -> Spec:
        """Describes an element: a `TensorSpec` at each leaf, with None for lengths that
        differ.

        The spec is known without a pass for arrays, files, numbers, generators with a
        signature, and all operations that keep or stack their elements. Otherwise
        (after `map` and `interleave`, for other generators) the first element is drawn,
        by a separate pass that is not counted, and the spec has the lengths of that
        element.

        Raises:
            OutOfRangeError: The spec is not known, and there is no element to inspect.
        """
        return self._recipe.spec(first_element_spec)

    def __iter__(self) -> DatasetIterator:
        """Begins a new pass; a `zs.Checkpoint` can save the position of the returned
        iterator.

        An error of a function or a source ends the pass here (in TF the pass
        continues). Each later draw raises that error again, so that a program that
        catches the error does not take it for the end of the data. A Ctrl-C during a
        draw also ends the pass; each later draw then raises `ClosedError`.
        """
        return DatasetIterator(self._recipe)

    def as_numpy_iterator(self) -> DatasetIterator:
        """Iterates as ``iter`` does, because elements are numpy arrays anyway."""
        return iter(self)

    def cardinality(self) -> int:
        """Returns the number of elements, `INFINITE_CARDINALITY` or
        `UNKNOWN_CARDINALITY`."""
        return self._recipe.size()

    def __len__(self) -> int:
        size = self.cardinality()
        if size == INFINITE_CARDINALITY:
            raise TypeError("The dataset is infinite.")
        if size == UNKNOWN_CARDINALITY:
            raise TypeError("The dataset length is unknown.")
        return size

    def __bool__(self) -> bool:
        # Else Python would ask `__len__`, which raises where the length is not known.
        return True

    def __repr__(self) -> str:
        return f"<Dataset of {type(self._recipe).__name__.lower()} elements>"


def _require_callable(name: str, function: object) -> None:
    if not callable(function):
        raise TypeError(f"`{name}` must be callable; got {function!r:.100}")


def _whole(name: str, value: int) -> None:
    try:
        index(value)
    except TypeError:
        raise TypeError(f"`{name}` must be a whole number, got {value!r:.99}") from None


def _at_least(name: str, value: int, least: int) -> None:
    _whole(name, value)
    if value < least:
        raise ValueError(f"`{name}` must be at least {least}, got {value}")
