"""The sources of the elements of a dataset: arrays, generators, files.

These are the constructors of `Dataset`. Their errors use TF's words; the recipes do the
work. Wrong arguments are refused when a dataset is made, not when it is iterated.
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
        """The recipe of the dataset, for code that shards it."""
        return self._recipe

    @classmethod
    def range(cls, *args: int) -> Self:
        """Yields the int64 numbers of Python's ``range(*args)``, each as one element.

        Raises:
            TypeError: An argument is not an integer, or is a variable.
        """
        # A variable has ``__index__``: `range` would silently take its value of now.
        _require_fixed(args)
        return cls(passes.Counted(range(*args)))

    @classmethod
    def from_tensors(cls, tensors: Element) -> Self:
        """Yields one element: the whole structure ``tensors``.

        Raises:
            ValueError: There is no array in the structure.
            TypeError: There is a variable, or an object (see `from_generator`), in the
                structure.
        """
        _require_fixed(tensors)
        element = as_element(tensors)
        if not list(leaves(element)):
            raise _empty(tensors)
        return cls(passes.Single(element))

    @classmethod
    def zip(cls, *args: Any, datasets: Any = None) -> Self:
        """Zips several datasets until the first of them ends: yields tuples of their
        elements or, for one argument, elements of its structure (dicts and tuples of
        datasets).

        All sources are read at one pace; shuffle and shard the zipped dataset rather
        than its sources. A strategy does not share a zipped dataset out by file.

        Raises:
            TypeError: No dataset is given, or something that is not a dataset, or a
                list.
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
        """Yields the names of the files that match a pattern (or one of several
        patterns) when this is called, as `bytes`; in another order in each pass, or
        sorted if ``shuffle`` is false.

        A strategy finds the files also through `interleave` or `map`, and gives each
        worker some of them.

        Raises:
            ValueError: No file matches.
        """
        found = files.Listed(files.matching(file_pattern))
        # None shuffles, as in TF.
        if shuffle is not None and not shuffle:
            return cls(found)
        return cls(Shuffled(found, found.size(), seed, reshuffle=True))

    @classmethod
    def from_tensor_slices(cls, tensors: Element) -> Self:
        """Yields an element for each index of the first axis of the arrays.

        The arrays are not copied: elements are views or gathers of them.

        Raises:
            ValueError: There is no array, an array is a scalar, or first axes have
                different lengths.
            TypeError: There is a variable, or an object (see `from_generator`), among
                the arrays.
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
        """Yields what ``generator(*args)`` yields; the function is called once for each
        pass.

        Args:
            output_signature: The required structure of an element: a `TensorSpec` at
                each leaf, or anything with a shape and a dtype. Numbers are converted
                to that dtype if their values stay the same (floats may be rounded).

        Raises:
            TypeError: ``generator`` is not callable (for example a running generator,
                which could be iterated only once); or the signature contains something
                else. While iterating: a component is an object, such as
                `zs.IndexedSlices`, and not a number, text or array; or an element does
                not fit the signature; gives its number, its path, what was expected and
                what came.
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
        """Yields what ``read(filename)`` yields for each file, one file after the
        other.

        A strategy finds the files, and gives each worker some of them. ``read`` is
        called again in each pass; if it yields `bytes`, elements are `bytes`.

        Raises:
            ValueError: There are no files.
            TypeError: ``read`` is not callable. While iterating: as `from_generator`.
        """
        if not callable(read):
            raise TypeError(f"`read` must be callable; got {read!r:.100}")
        return cls(files.Records(files.paths_of(filenames), read))

    @classmethod
    def from_text_lines(cls, filenames: Path | Sequence[Path]) -> Self:
        """Yields the lines of text files, as `bytes` without line ends, as TF's
        ``TextLineDataset``. A batch is an array of objects.

        Raises:
            ValueError: There are no files.
            FileNotFoundError: While iterating: a file is missing.
        """
        return cls(_records(filenames, files.read_lines))

    @classmethod
    def from_tfrecords(cls, filenames: Path | Sequence[Path]) -> Self:
        """Yields the records of TFRecord files, as `bytes`, as TF's
        ``TFRecordDataset``.

        Raises:
            ImportError: grain, which reads the files, is not installed.
            ValueError: There are no files. While iterating: a file ends inside a
                record.
        """
        files.require_tfrecords()
        return cls(_records(filenames, files.read_tfrecords))

    @classmethod
    def from_npy(cls, filenames: Path | Sequence[Path]) -> Self:
        """Yields the rows of the arrays in ``.npy`` files. The files are mapped into
        memory: rows that are not used are not read.

        Raises:
            ValueError: There are no files. While iterating: a file holds a scalar, or
                objects.
        """
        return cls(files.Tables(files.paths_of(filenames), files.load_npy))

    @classmethod
    def from_npz(cls, filenames: Path | Sequence[Path]) -> Self:
        """Yields the rows of the arrays in ``.npz`` archives, as dicts by the arrays'
        names. One archive is in memory at a time; more while a shuffle mixes rows of
        several.

        Raises:
            ValueError: There are no files. While iterating: the arrays of an archive
                differ in their first axes, or a batch has rows of archives that do not
                fit each other.
        """
        return cls(files.Tables(files.paths_of(filenames), files.load_npz))

    @classmethod
    def from_parquet(
        cls,
        filenames: Path | Sequence[Path],
        columns: Sequence[str] | None = None,
        batch_size: int | None = None,
    ) -> Self:
        """Yields the rows of Parquet files, as dicts by column. One row group is in
        memory at a time; more while a shuffle mixes rows of several.

        Text and binary columns are `bytes`, as TF's strings are, and arrays of objects
        in a batch; lists of a fixed size are an axis, others are *ragged*: an array of
        its own length in each row, for `padded_batch`. Structs are dicts.

        Row groups are the unit of sharding: a strategy gives each worker some of them,
        as it does with files (`AutoShardPolicy.FILE`), and so does `shard` if it is the
        first operation and there is a row group for each shard. The files are opened at
        this call, to read their footers.

        Args:
            columns: The columns to read, in this order; None: all.
            batch_size: The same as ``.batch(batch_size)``, for any number of rows.

        Raises:
            ImportError: pyarrow is not installed.
            FileNotFoundError: A file is missing.
            ValueError: There are no files; a file is not a Parquet file, lacks a
                column, or has other types than the first; or ``batch_size`` is not
                positive. While iterating: values are null.
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
    """Refuses variables, of zstrat or of another library: an array made from a variable
    keeps its values, whatever is assigned to the variable later.

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
