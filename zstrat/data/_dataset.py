"""`Dataset`: the input pipelines of tf.data, as a thin face over numpy.

Every tf.distribute program begins with one. The face checks arguments and speaks TF's
words; `_passes` does the work. Whoever needs more (worker processes, weighted mixtures)
gives a strategy a grain dataset or any generator instead.
"""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING, Any, Final, final

import numpy as np

from . import _files as files
from . import _passes as passes
from ._lineage import Hinted, Opted, options_of
from ._options import SHARD_HINT, Options
from ._shuffle import Shuffled
from ._tree import as_element, leaves

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from ._files import Path, Read
    from ._leaves import Element
    from ._passes import Recipe

AUTOTUNE: Final = -1
"""As a buffer size: two elements, one that is read while the next one is made."""
INFINITE_CARDINALITY: Final = passes.INFINITE
UNKNOWN_CARDINALITY: Final = passes.UNKNOWN


@final
class Dataset:
    """A sequence of elements; each ``iter()`` is a fresh pass over it.

    Elements are numpy arrays, scalars and `bytes`, or dicts and tuples of them, nested
    at will; as in TF a list is not structure but one array. A batch of `bytes` is an
    array of objects, as in TF: numpy's strings drop the zeros at their ends.

    Datasets are immutable: every method returns a new one. Make one with `range`,
    `from_tensor_slices`, `from_generator`, or of files: `from_text_lines`,
    `from_tfrecords`, `from_npy`, `from_npz`, `from_files`. A generator or a mapped
    function may fill the same buffer again and again.
    """

    __slots__ = ("_recipe",)

    def __init__(self, recipe: Recipe) -> None:
        self._recipe: Final = recipe

    @staticmethod
    def range(*args: int) -> Dataset:
        """The int64 numbers of Python's ``range(*args)``, one an element."""
        return Dataset(passes.Counted(range(*args)))

    @staticmethod
    def from_tensor_slices(tensors: Element) -> Dataset:
        """One element for each index of the first axis of the arrays.

        The arrays stay where they are: elements are views or gathers of them.

        Raises:
            ValueError: No array, a scalar, or first axes of different lengths.
            TypeError: Objects; see `from_generator`.
        """
        arrays = as_element(tensors)
        found = list(leaves(arrays))
        if not found:
            raise ValueError(
                f"Invalid `tensors`. `tensors` is an empty structure: {tensors!r:.100}"
            )
        for path, array in found:
            if np.ndim(array) == 0:
                raise ValueError(
                    f"component {path or 'of `tensors`'} is a scalar and has no first "
                    "axis to slice; give arrays of at least one dimension"
                )
        lengths = {path: len(array) for path, array in found}
        if len(set(lengths.values())) > 1:
            sizes = ", ".join(f"{path} has {size}" for path, size in lengths.items())
            raise ValueError(
                f"Dimensions are not compatible: first axes differ: {sizes}"
            )
        return Dataset(passes.Rows(arrays, len(found[0][1])))

    @staticmethod
    def from_generator(
        generator: Callable[..., Iterable[Any]], args: Sequence[Any] = ()
    ) -> Dataset:
        """What ``generator(*args)`` yields; it is called once for each pass.

        Raises:
            TypeError: ``generator`` is not callable (a running generator, for one: it
                could be passed over only once). While iterating: a component is an
                object, as `zs.IndexedSlices` are, and no number, text or array.
        """
        if not callable(generator):
            raise TypeError(
                "`generator` must be a Python callable, called for each pass; got a "
                f"{type(generator).__name__}"
            )
        return Dataset(passes.Generated(generator, tuple(args)))

    @staticmethod
    def from_files(
        filenames: Path | Sequence[Path], read: Callable[[str], Iterable[Any]]
    ) -> Dataset:
        """What ``read(filename)`` yields of each file, one file after the other.

        A strategy knows the files, and gives each worker some of them. ``read`` is
        called anew in each pass; it may yield `bytes`, and then gets bytes back.

        Raises:
            ValueError: There are no files.
            TypeError: ``read`` is not callable. While iterating: as `from_generator`.
        """
        if not callable(read):
            raise TypeError(f"`read` must be callable; got {read!r:.100}")
        return _recorded(filenames, files.reading(read))

    @staticmethod
    def from_text_lines(filenames: Path | Sequence[Path]) -> Dataset:
        """The lines of text files, as `bytes` without their ends; TF's
        ``TextLineDataset``. A batch is an array of objects.

        Raises:
            ValueError: There are no files.
            FileNotFoundError: While iterating: one is missing.
        """
        return _recorded(filenames, files.read_lines)

    @staticmethod
    def from_tfrecords(filenames: Path | Sequence[Path]) -> Dataset:
        """The records of TFRecord files, as `bytes`; TF's ``TFRecordDataset``.

        Raises:
            ImportError: grain, which reads them, is not installed.
            ValueError: There are no files; while iterating: one ends inside a record.
        """
        files.require_tfrecords()
        return _recorded(filenames, files.read_tfrecords)

    @staticmethod
    def from_npy(filenames: Path | Sequence[Path]) -> Dataset:
        """The rows of the arrays in ``.npy`` files, which are mapped into memory: what
        is not used is not read.

        Raises:
            ValueError: There are no files; while iterating: one holds a scalar, or
                objects.
        """
        return Dataset(files.Tables(files.paths_of(filenames), files.load_npy))

    @staticmethod
    def from_npz(filenames: Path | Sequence[Path]) -> Dataset:
        """The rows of the arrays in ``.npz`` archives, as dicts by the arrays' names.
        One archive is in memory at a time, and more while a shuffle mixes them.

        Raises:
            ValueError: There are no files; while iterating: the arrays of one differ in
                their first axes, or a batch brings unlike files together.
        """
        return Dataset(files.Tables(files.paths_of(filenames), files.load_npz))

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
        """The passes one after the other, ``count`` times; None or -1: for ever.

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
        are counted apart, equally often. A process that was started anew has begun
        none: then all of them make the dataset anew, from here on, and distribute it
        again. The first step of a pass is refused where its number is not the same in
        all of them.

        Raises:
            ValueError: ``buffer_size`` is not positive.
        """
        _at_least("buffer_size", buffer_size, 1)
        drawn = seed is None and not reshuffle_each_iteration
        if drawn:
            seed = secrets.randbits(63)  # one order, and it is for every pass
        how = (buffer_size, seed, reshuffle_each_iteration)
        return Dataset(Shuffled(self._recipe, *how, is_drawn=drawn))

    def shard(self, num_shards: int, index: int) -> Dataset:
        """Every ``num_shards``-th element, from element ``index`` on.

        With `SHARD_HINT` for both, a strategy that distributes the dataset under
        `AutoShardPolicy.HINT` puts its workers in; nothing else can iterate it.

        Raises:
            ValueError: ``num_shards`` below 1, or ``index`` not in [0, num_shards).
        """
        if num_shards == SHARD_HINT and index == SHARD_HINT:
            return Dataset(Hinted(self._recipe))
        _at_least("num_shards", num_shards, 1)
        if not 0 <= index < num_shards:
            raise ValueError(
                f"index must be between 0 and {num_shards - 1} (currently index "
                f"= {index}, num_shards = {num_shards})."
            )
        return Dataset(passes.SlicedPass(self._recipe, start=index, step=num_shards))

    def map(self, map_func: Callable[..., Any]) -> Dataset:
        """``map_func`` of each element, in numpy; a plain tuple is spread over its
        parameters, as in TF. Errors of the function pass through.

        Raises:
            TypeError: ``map_func`` is not callable. While iterating: what it returns
                has an object in it; see `from_generator`.
        """
        if not callable(map_func):
            raise TypeError(f"`map_func` must be callable; got {map_func!r:.100}")
        return Dataset(passes.MappedPass(self._recipe, map_func))

    def prefetch(self, buffer_size: int) -> Dataset:
        """Makes up to ``buffer_size`` elements ahead, on a thread of its own that ends
        with its iterator; -1 (`AUTOTUNE`) stands for 2, 0 for none.

        Raises:
            ValueError: ``buffer_size`` is below -1.
        """
        size = 2 if buffer_size == AUTOTUNE else buffer_size
        _at_least("buffer_size", size, 0)
        return Dataset(passes.Prefetched(self._recipe, size)) if size else self

    def take(self, count: int) -> Dataset:
        """At most the first ``count`` elements; -1: all.

        Raises:
            ValueError: ``count`` is below -1.
        """
        if count == -1:
            return self
        _at_least("count", count, 0)
        return Dataset(passes.SlicedPass(self._recipe, stop=count))

    def skip(self, count: int) -> Dataset:
        """All but the first ``count`` elements; -1: none.

        Raises:
            ValueError: ``count`` is below -1.
        """
        if count == -1:
            return self.take(0)
        _at_least("count", count, 0)
        return Dataset(passes.SlicedPass(self._recipe, start=count))

    def enumerate(self, start: int = 0) -> Dataset:
        """Pairs ``(number, element)``, the number an int64."""
        return Dataset(passes.Enumerated(self._recipe, start))

    def with_options(self, options: Options) -> Dataset:
        """The same with these options, also for all that is made of it; options that
        it has already are kept where ``options`` does not set them.

        Raises:
            TypeError: ``options`` is no `Options`.
        """
        if not isinstance(options, Options):
            raise TypeError(f"`options` must be a zs.data.Options, got {options!r:.99}")
        return Dataset(Opted(self._recipe, options.experimental_distribute.chosen))

    def options(self) -> Options:
        """The options, as a copy: changing it changes no dataset."""
        return options_of(self._recipe)

    @property
    def recipe(self) -> Recipe:
        """How it is made; for those who share it out."""
        return self._recipe

    def __iter__(self) -> Iterator[Element]:
        return self._recipe.begun().elements()

    def as_numpy_iterator(self) -> Iterator[Element]:
        """The same as ``iter``: elements are numpy anyway."""
        return iter(self)

    def cardinality(self) -> int:
        """Number of elements, `INFINITE_CARDINALITY` or `UNKNOWN_CARDINALITY`."""
        return self._recipe.size()

    def __len__(self) -> int:
        size = self.cardinality()
        if size == INFINITE_CARDINALITY:
            raise TypeError("The dataset is infinite.")
        if size == UNKNOWN_CARDINALITY:
            raise TypeError("The dataset length is unknown.")
        return size

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        return f"<Dataset of {type(self._recipe).__name__.lower()} elements>"


def _recorded(filenames: Path | Sequence[Path], read: Read) -> Dataset:
    return Dataset(files.Records(files.paths_of(filenames), read))


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ValueError(f"`{name}` must be at least {least}, got {value}")
