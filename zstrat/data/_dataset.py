"""`Dataset`: the input pipelines of tf.data, as a thin face over numpy.

Every tf.distribute program begins with one. The face checks arguments and speaks TF's
words; `_passes` does the work. A program that needs more (worker processes, weighted
mixtures) gives a strategy a grain dataset or any generator instead.
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
"""Stands for a buffer of two elements, one that is read while the next one is made."""
INFINITE_CARDINALITY: Final = passes.INFINITE
UNKNOWN_CARDINALITY: Final = passes.UNKNOWN


@final
class Dataset(Sources):
    """A sequence of elements; each ``iter()`` is a fresh pass over it.

    Elements are numpy arrays, scalars and `bytes`, or dicts and tuples of them, nested
    at will; as in TF a list is not structure but one array. A batch of `bytes` is an
    array of objects, as in TF: numpy's strings drop the zeros at their ends.

    Datasets are immutable: every method returns a new one. Make one with `range`,
    `from_tensors`, `from_tensor_slices`, `from_generator`, `zip`, or of files:
    `from_text_lines`, `from_tfrecords`, `from_npy`, `from_npz`, `from_parquet`,
    `from_files`, `list_files`. A generator or a mapped function may fill the same
    buffer again and again.
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
        """Yields batches of examples that are found by number, in a permutation that is
        computed from the seed and the epoch, and not stored.

        A coordinator leases it to workers (``create_leased_dataset``), and any strategy
        distributes it. For the arguments see `ClusterCoordinator.create_leased_dataset`
        and `docs/data.md`.

        Raises:
            TypeError, ValueError: The examples of the source have no numbers; says what
                to give. Or an argument is wrong.
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
            ValueError: ``count`` is below -1.
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
        sequence of passes repeatable; each pass of it, and each repeat within a pass,
        has another order, unless ``reshuffle_each_iteration`` is false: then all have
        the same one. Passes are numbered as ``iter()`` is called, however far each of
        them is drawn; a pickled copy begins at the first.

        Processes that deal one dataset out among themselves (`AutoShardPolicy.DATA`)
        need the same seed each, and begin passes over the distributed dataset, which
        are counted apart, equally often. A process that was restarted has begun
        none: then all of them make the dataset again, from here on, and distribute it
        again. The first step of a pass is refused where its number is not the same in
        all of them.

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
        """Keeps every ``num_shards``-th element, from element ``index`` on; right after
        `from_parquet` it keeps every such row group, if there are enough of them.

        With `SHARD_HINT` for both, a strategy that distributes the dataset under
        `AutoShardPolicy.HINT` puts its workers in; nothing else can iterate it.

        Raises:
            ValueError: ``num_shards`` below 1, or ``index`` not in [0, num_shards).
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
        """Applies ``map_func`` to each element, in numpy; a plain tuple is spread over
        its parameters, and a list that it returns is a tuple, as in TF. Errors of the
        function pass through, with a note of the line and the element.

        Args:
            num_parallel_calls: Number of elements made at a time, on threads that end
                with the iterator; -1 (`AUTOTUNE`): one for each core, 16 at most. The
                function must be safe to be called so, and threads help where it waits
                for a disk, or computes in numpy.
            deterministic: False: elements come as they are made, in any order; else in
                the order of the source. Says nothing without threads.

        Raises:
            TypeError: ``map_func`` is not callable. While iterating: what it returns
                has an object in it; see `from_generator`.
            ValueError: ``num_parallel_calls`` is 0, or below -1.
        """
        _require_callable("map_func", map_func)
        threads, in_order = threads_of(num_parallel_calls), deterministic is not False
        return Dataset(passes.MappedPass(self._recipe, map_func, threads, in_order))

    def filter(self, predicate: Callable[..., Any]) -> Dataset:
        """Keeps the elements for which ``predicate`` returns True; a plain tuple is
        spread over its parameters.

        Raises:
            TypeError: ``predicate`` is not callable. While iterating: it returns
                something else than one bool.
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
        datasets: yields ``block_length`` (1) elements of one, then of the next, of
        ``cycle_length`` datasets that are open at a time (2, or
        ``num_parallel_calls``).

        The order is the same in any case; ``deterministic=False`` would allow another
        one, of which no use is made. A `shuffle` in such a dataset has another order
        for each element, and the same ones in each pass.

        Args:
            num_parallel_calls: Number of open datasets to read ahead, a block
                each, on separate threads; -1 (`AUTOTUNE`): all.

        Raises:
            ValueError: A number is not positive; more parallel calls than datasets.
            TypeError: ``map_func`` is not callable. While iterating: it returns no
                dataset.
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
        """Maps each element to a dataset by ``map_func``, and yields their elements,
        one dataset after the other.

        Raises:
            TypeError: As `interleave`.
        """
        return self.interleave(map_func, cycle_length=1)

    def concatenate(self, dataset: Dataset) -> Dataset:
        """Yields the elements of this dataset, then those of the other.

        Raises:
            TypeError: It is not a dataset; its elements differ from these in structure,
                rank or dtype, as far as that is known without a pass.
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
        """Caches the elements of the first whole pass for all later ones; in memory, or
        in a file of that name, which later programs find.

        Only a pass that came to its end is kept. A `shuffle` before it mixes once, and
        one after it again in each pass. Elements kept in memory cannot be written to.
        Of a dataset that a strategy shards by file or hint each worker keeps its
        own part, in a file ``filename-00000-of-00002``. Nobody looks whether a file
        still fits the dataset: remove it when that changes.

        Raises:
            ValueError: It has no end. While iterating: the file is damaged, or none of
                these.
            TypeError: While iterating, with a file: named tuples, or dtypes of other
                libraries.
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
            ValueError: A component is a scalar; first axes differ.
        """
        return Dataset(Unbatched(self._recipe))

    def rebatch(
        self, batch_size: int | Sequence[int], drop_remainder: bool = False
    ) -> Dataset:
        """Regroups the rows of all batches into batches of ``batch_size``, or of a
        cycle of these sizes; the last may be shorter unless ``drop_remainder``.

        Raises:
            ValueError: A size is not positive, or there is none; while iterating: as
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
        """Stacks elements of different lengths, filled up at their ends.

        Args:
            padded_shapes: For each component a shape, whose None and -1 stand for the
                longest of the batch; None: that in all axes of all components. The
                structure is that of an element: one component takes ``[4]``.
            padding_values: For each component a value, or one for all; None: zeros,
                False, empty text.

        Raises:
            ValueError: ``batch_size`` is not positive. While iterating: an element is
                larger than its padded shape, or has another rank.
            TypeError: While iterating: the structures differ; a dtype cannot hold its
                padding value.
        """
        _at_least("batch_size", batch_size, 1)
        how = (batch_size, drop_remainder, padded_shapes, padding_values)
        return Dataset(PaddedBatches(self._recipe, *how))

    def reduce(
        self, initial_state: Any, reduce_func: Callable[[Any, Any], Any]
    ) -> Element:
        """Reduces the elements to one state by ``reduce_func(state, element)``, from
        ``initial_state`` on; returns the last state, in numpy. Neither argument is
        spread.

        Raises:
            ValueError: The dataset has no end.
            TypeError: A state differs from the first in structure, or in a dtype that
                this cannot hold.
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
        """Makes up to ``buffer_size`` elements ahead, on its own thread, which ends
        with its iterator; -1 (`AUTOTUNE`) stands for 2, 0 for none.

        Raises:
            ValueError: ``buffer_size`` is below -1.
        """
        size = 2 if buffer_size == AUTOTUNE else buffer_size
        _at_least("buffer_size", size, 0)
        return Dataset(passes.Prefetched(self._recipe, size)) if size else self

    def take(self, count: int) -> Dataset:
        """Yields at most the first ``count`` elements; -1: all.

        Raises:
            ValueError: ``count`` is below -1.
        """
        if count == -1:
            return self
        _at_least("count", count, 0)
        return Dataset(passes.SlicedPass(self._recipe, stop=count))

    def skip(self, count: int) -> Dataset:
        """Skips the first ``count`` elements; -1: all.

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
        """Returns the dataset with these options, which also hold for datasets made
        from it; options that are set already are kept where ``options`` does not set
        them.

        Raises:
            TypeError: ``options`` is no `Options`.
        """
        if not isinstance(options, Options):
            raise TypeError(f"`options` must be a zs.data.Options, got {options!r:.99}")
        return Dataset(Opted(self._recipe, options.experimental_distribute.chosen))

    def options(self) -> Options:
        """Returns the options, as a copy: changing it changes no dataset."""
        return options_of(self._recipe)

    @property
    def element_spec(self) -> Spec:
        """Describes an element: a `TensorSpec` at each leaf, with None for
        lengths that differ.

        Known of arrays, files, numbers, a generator with a signature, and all that
        keeps or stacks their elements. Where it is not (after `map` and `interleave`,
        of other generators) the first element is drawn, by a separate pass that no
        other pass counts, and its lengths are reported unchanged.

        Raises:
            OutOfRangeError: It is not known, and there is no element to inspect.
        """
        return self._recipe.spec(first_element_spec)

    def __iter__(self) -> DatasetIterator:
        """Returns a fresh pass, whose place a `zs.Checkpoint` can save.

        After an error of a function or a source, which ends a pass here and not in TF,
        each later draw raises that error again: a program that catches it does not take
        it for the end of the data. After Ctrl-C in a draw, which ends the pass,
        too, each later one raises `ClosedError`.
        """
        return DatasetIterator(self._recipe)

    def as_numpy_iterator(self) -> DatasetIterator:
        """Iterates as ``iter`` does: elements are numpy anyway."""
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
