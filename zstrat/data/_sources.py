"""The sources of the elements of a dataset: arrays, generators, files.

The constructors of `Dataset`, which say what they need in the words of TF; the work is
that of the recipes. What they refuse they refuse when a dataset is made, not later.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Self

import numpy as np

from . import _passes as passes
from . import files
from ._leaves import SCALARS, Assignable, node_of
from ._several import zipped
from ._shuffled import Shuffled
from ._spec import signature_of
from ._tree import as_element, leaves

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from ._leaves import Element
    from ._passes import Recipe
    from .files import Path, ReadFile


class Sources:
    """The constructors of `Dataset`."""

    __slots__ = ("_recipe",)

    def __init__(self, recipe: Recipe) -> None:
        self._recipe: Final = recipe

    @property
    def recipe(self) -> Recipe:
        """Its recipe, for code that shards it."""
        return self._recipe

    @classmethod
    def range(cls, *args: int) -> Self:
        """Yields the int64 numbers of Python's ``range(*args)``, one an element.

        Raises:
            TypeError: An argument is not an integer, or it is a variable.
        """
        # A variable has ``__index__``: `range` would silently take its value of now.
        _require_fixed(args)
        return cls(passes.Counted(range(*args)))

    @classmethod
    def from_tensors(cls, tensors: Element) -> Self:
        """Yields one element: the whole structure.

        Raises:
            ValueError: There is no array in it.
            TypeError: A variable; or objects, see `from_generator`.
        """
        _require_fixed(tensors)
        element = as_element(tensors)
        if not list(leaves(element)):
            raise _empty(tensors)
        return cls(passes.Single(element))

    @classmethod
    def zip(cls, *args: Any, datasets: Any = None) -> Self:
        """Zips several datasets, until the first ends: yields tuples of their elements,
        or for one argument its structure (dicts and tuples of datasets).

        All sources are read at one pace; shuffle and shard what comes out rather than
        what goes in. A strategy does not deal it out by file.

        Raises:
            TypeError: No dataset is given, or something that is not one, or a list.
        """
        if args and datasets is not None:
            raise TypeError("Both `*args` and `datasets` cannot be set.")
        given: Any = datasets if datasets is not None else args
        if datasets is None and len(args) == 1:
            (given,) = args
        return cls(zipped(given, _recipe_of))

    @classmethod
    def list_files(
        cls,
        file_pattern: Path | Sequence[Path],
        shuffle: bool | None = None,
        seed: int | None = None,
    ) -> Self:
        """Yields the names of the files that match a pattern (or several) now, as
        `bytes`, in another order in each pass; sorted if ``shuffle`` is false.

        A strategy knows the files, also through `interleave` or `map`, and gives each
        worker some of them.

        Raises:
            ValueError: Nothing matches.
        """
        found = files.Listed(files.matching(file_pattern))
        # None shuffles, as in TF.
        if shuffle is not None and not shuffle:
            return cls(found)
        return cls(Shuffled(found, found.size(), seed, reshuffle=True))

    @classmethod
    def from_tensor_slices(cls, tensors: Element) -> Self:
        """Yields an element for each index of the first axis of the arrays.

        The arrays stay where they are: elements are views or gathers of them.

        Raises:
            ValueError: No array, a scalar, or first axes of different lengths.
            TypeError: A variable; or objects, see `from_generator`.
        """
        _require_fixed(tensors)
        arrays = as_element(tensors)
        found = list(leaves(arrays))
        # All is refused now: an error in a prefetching thread comes late and elsewhere.
        if not found:
            raise _empty(tensors)
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
        return cls(passes.Rows(arrays, len(found[0][1])))

    @classmethod
    def from_generator(
        cls,
        generator: Callable[..., Iterable[Any]],
        args: Sequence[Any] = (),
        *,
        output_signature: Any = None,
    ) -> Self:
        """Yields what ``generator(*args)`` yields; it is called once for each pass.

        Args:
            output_signature: What an element has to look like: a `TensorSpec` at each
                leaf, or anything with a shape and a dtype. Numbers are converted to
                that dtype where they keep their values (floats may be rounded).

        Raises:
            TypeError: ``generator`` is not callable (a running generator, for one: it
                could be passed over only once); the signature has something else in
                it. While iterating: a component is an object, as `zs.IndexedSlices`
                are, and no number, text or array; an element is not as the signature
                says, with its number, its place, what was expected and what came.
        """
        if not callable(generator):
            raise TypeError(
                "`generator` must be a Python callable, called for each pass; got a "
                f"{type(generator).__name__}"
            )
        # None, without a signature, is a structure of no leaves: nothing is checked.
        signature = signature_of(output_signature)
        return cls(passes.Generated(generator, tuple(args), signature))

    @classmethod
    def from_files(
        cls, filenames: Path | Sequence[Path], read: Callable[[str], Iterable[Any]]
    ) -> Self:
        """Yields what ``read(filename)`` yields of each file, one file after the other.

        A strategy knows the files, and gives each worker some of them. ``read`` is
        called again in each pass; it may yield `bytes`, and then gets bytes back.

        Raises:
            ValueError: There are no files.
            TypeError: ``read`` is not callable. While iterating: as `from_generator`.
        """
        if not callable(read):
            raise TypeError(f"`read` must be callable; got {read!r:.100}")
        return cls(files.Records(files.paths_of(filenames), read))

    @classmethod
    def from_text_lines(cls, filenames: Path | Sequence[Path]) -> Self:
        """Yields the lines of text files, as `bytes` without their ends; TF's
        ``TextLineDataset``. A batch is an array of objects.

        Raises:
            ValueError: There are no files.
            FileNotFoundError: While iterating: one is missing.
        """
        return cls(_records(filenames, files.read_lines))

    @classmethod
    def from_tfrecords(cls, filenames: Path | Sequence[Path]) -> Self:
        """Yields the records of TFRecord files, as `bytes`; TF's ``TFRecordDataset``.

        Raises:
            ImportError: grain, which reads them, is not installed.
            ValueError: There are no files; while iterating: one ends inside a record.
        """
        files.require_tfrecords()
        return cls(_records(filenames, files.read_tfrecords))

    @classmethod
    def from_npy(cls, filenames: Path | Sequence[Path]) -> Self:
        """Yields the rows of the arrays in ``.npy`` files, which are mapped into
        memory: what is not used is not read.

        Raises:
            ValueError: There are no files; while iterating: one holds a scalar, or
                objects.
        """
        return cls(files.Tables(files.paths_of(filenames), files.load_npy))

    @classmethod
    def from_npz(cls, filenames: Path | Sequence[Path]) -> Self:
        """Yields the rows of the arrays in ``.npz`` archives, as dicts by the arrays'
        names. One archive is in memory at a time, and more while a shuffle mixes them.

        Raises:
            ValueError: There are no files; while iterating: the arrays of one differ in
                their first axes, or a batch brings unlike files together.
        """
        return cls(files.Tables(files.paths_of(filenames), files.load_npz))

    @classmethod
    def from_parquet(
        cls,
        filenames: Path | Sequence[Path],
        columns: Sequence[str] | None = None,
        batch_size: int | None = None,
    ) -> Self:
        """Yields the rows of Parquet files, as dicts by column; one row group is in
        memory at a time, and more while a shuffle mixes them.

        Text and binary columns are `bytes`, as TF's strings are, and arrays of objects
        in a batch; lists of a fixed size are an axis, others are *ragged*: an array of
        its own length in each row, for `padded_batch`. Structs are dicts.

        Row groups are what is sharded: to workers, as files are
        (`AutoShardPolicy.FILE`), and by `shard` where it comes first and there is one
        for each shard. The files are opened now, for their footers.

        Args:
            columns: Those to be read, in this order; None: all.
            batch_size: The same as ``.batch(batch_size)``, for any number of rows.

        Raises:
            ImportError: pyarrow is not installed.
            FileNotFoundError: A file is missing.
            ValueError: There are no files; one is not of Parquet, lacks a column, or
                has other types than the first; ``batch_size`` is not positive. While
                iterating: values are null.
            TypeError: A column is not an array.
        """
        recipe: Recipe = files.parquet_rows(files.paths_of(filenames), columns)
        if batch_size is not None:
            if batch_size < 1:
                raise ValueError(f"`batch_size` must be at least 1, got {batch_size}")
            # One gather a batch, as items are only references to rows until then.
            recipe = passes.Batched(recipe, batch_size, drop_remainder=False)
        return cls(recipe)


def _records(filenames: Path | Sequence[Path], read: ReadFile) -> Recipe:
    return files.Records(files.paths_of(filenames), read, is_bytes=True)


def _require_fixed(given: object) -> None:
    """Refuses variables, of zstrat or of another library: an array made of one stays as
    it is, whatever is assigned later.

    Raises:
        TypeError: The argument contains a variable.
    """
    if isinstance(given, dict | tuple | list):
        inner = given.values() if isinstance(given, dict) else given
    else:
        node = node_of(given)
        inner = () if node is None else node.children
    for item in inner:
        if not isinstance(item, SCALARS):  # of which a list may have a million
            _require_fixed(item)
    if isinstance(given, Assignable):
        raise TypeError(
            f"a dataset keeps the arrays that it is made of, and got {given!r:.100}: "
            "write variable.numpy() for its value of now, or read the variable in a "
            "function of the dataset, Dataset.from_generator or Dataset.map"
        )


def _empty(tensors: object) -> ValueError:
    return ValueError(
        f"Invalid `tensors`. `tensors` is an empty structure: {tensors!r:.100}"
    )


def _recipe_of(leaf: Any) -> Recipe:
    if isinstance(leaf, Sources):
        return leaf.recipe
    # Its own words, which TF has for a list: users mean a tuple.
    if isinstance(leaf, list):
        raise TypeError(
            "Invalid input to `zip`. Inputs are expected to be (nested) structures of "
            "datasets. A `list` is not supported and you should use a `tuple` instead."
        )
    raise TypeError(
        "Invalid input to `zip`. Inputs are expected to be (nested) structures of "
        f"datasets but encountered object of type {type(leaf)}."
    )
