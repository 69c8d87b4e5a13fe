"""Datasets whose recipes know which files they are read from.

A *reader* opens one file; the files are read one after the other, in the order given.
Records (lines, serialized examples) are `bytes`, because an array of numpy would drop
zeros at their ends. Files of arrays yield their rows: an item is a row of an open file,
so that shuffling moves references, and a batch is one gather per file.

TFRecord files are read by grain, which is optional.
"""

from __future__ import annotations

import abc
import glob
import os
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Literal, Self, final

import numpy as np

from zstrat.data._batches import appended
from zstrat.data._elements import ending
from zstrat.data._passes import UNKNOWN, Recipe
from zstrat.data._spec import TensorSpec
from zstrat.data._tree import gathered, kind_of, leaves, mapped, owned

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from zstrat.data._leaves import Element
    from zstrat.data._spec import Look, Spec


Path = str | os.PathLike[str]
ReadFile = Callable[[str], Iterable[Any]]


class Files(Recipe):
    """A source that is read from files, or from parts of files. Subclasses are
    final."""

    __slots__ = ()

    paths: tuple[str, ...]
    """For each part, in order, the path of its file; a file in several parts is listed
    several times."""

    def every(self, step: int, start: int) -> Self:
        """Returns the source restricted to the files ``start``, ``start + step``, …."""
        fewer: Self = replace(self, paths=self.paths[start::step])  # type: ignore[type-var]
        return fewer

    def size(self) -> int:
        return UNKNOWN


@final
@dataclass(frozen=True, slots=True)
class Listed(Files):
    """A source whose elements are the names of files, as `bytes`."""

    paths: tuple[str, ...]

    def items(self) -> Iterator[bytes]:
        for path in self.paths:
            yield os.fsencode(path)

    def size(self) -> int:
        return len(self.paths)

    def spec(self, look: Look) -> Spec:
        del look
        return TensorSpec((), bytes)


@final
@dataclass(frozen=True, slots=True)
class Records(Files):
    """The records that a reader yields for each file. Their arrays are never written to
    after they were yielded.

    Args:
        is_bytes: The records are `bytes`.
    """

    paths: tuple[str, ...]
    read: ReadFile
    is_bytes: bool = False

    def spec(self, look: Look) -> Spec:
        return TensorSpec((), bytes) if self.is_bytes else look(self)

    def items(self) -> Iterator[Element]:
        for path in self.paths:
            with ending(iter(self.read(path))) as records:
                yield from records if self.is_bytes else map(owned, records)


class TableRows(Files):
    """The rows of arrays in files; an item is an open file and a row number. Subclasses
    are final."""

    __slots__ = ()

    @abc.abstractmethod
    def tables(self) -> Iterator[OpenTable]:
        """Yields the parts (`OpenTable`), one after the other; each is read when it is
        requested."""

    def items(self) -> Iterator[tuple[OpenTable, int]]:
        for table in self.tables():
            for row in range(_rows(table.arrays, table.path)):
                yield table, row

    def element_of(self, item: tuple[OpenTable, int]) -> Element:
        table, row = item
        return mapped(lambda array: array[row], table.arrays)

    def batch_of(self, items: list[tuple[OpenTable, int]]) -> Element:
        rows = np.array([row for _, row in items])
        # One gather a file, and one more that puts the rows into the order of the
        # items.
        opened = {id(table): table for table, _ in items}
        if len(opened) == 1:
            (table,) = opened.values()
            return gathered(table.arrays, rows)
        _require_alike(list(opened.values()))
        # By id, which numpy sorts: the tables are held by ``items`` meanwhile.
        files = np.array([id(table) for table, _ in items])
        order = np.argsort(files, kind="stable")
        parts = [
            gathered(opened[int(name)].arrays, rows[files == name])
            for name in np.unique(files)
        ]
        back = np.argsort(order)
        return mapped(lambda column: column[back], appended(parts))


@final
@dataclass(frozen=True, slots=True)
class Tables(TableRows):
    """Files of arrays, each of which is one table."""

    paths: tuple[str, ...]
    load: Callable[[str], Element]

    def tables(self) -> Iterator[OpenTable]:
        for path in self.paths:
            yield OpenTable(path, self.load(path))


@final
@dataclass(frozen=True, slots=True, eq=False)
class OpenTable:
    """A file of arrays that is open, or a part of one."""

    path: str
    arrays: Element

    def columns(self) -> dict[str, str]:
        """For each array, by its name: the shape of a row, and whether the array is
        text (other dtypes can be converted to a common one)."""
        if not isinstance(self.arrays, dict):
            return {"rows": _column(self.arrays)}
        return {name: _column(self.arrays[name]) for name in sorted(self.arrays)}


def paths_of(filenames: Path | Sequence[Path]) -> tuple[str, ...]:
    """Returns the file names as strings; a single name counts as a list of one.

    Raises:
        ValueError: There are no names.
        TypeError: A name is not a path.
    """
    # `bytes`, too: `list_files` yields the names so.
    if isinstance(filenames, str | bytes | os.PathLike):
        filenames = [filenames]
    paths = tuple(map(os.fsdecode, filenames))
    if not paths:
        raise ValueError("`filenames` is empty: a dataset is read from at least one")
    return paths


def matching(file_pattern: Path | Sequence[Path]) -> tuple[str, ...]:
    """Returns the files that match a pattern, or any of several, sorted; a file that
    matches several patterns is listed as many times.

    Raises:
        ValueError: No file matches.
    """
    patterns = paths_of(file_pattern)
    found = sorted(path for pattern in patterns for path in glob.glob(pattern))
    if not found:
        raise ValueError(
            f"No files matched pattern: {', '.join(patterns)} (in {os.getcwd()})"
        )
    return tuple(found)


def read_lines(path: str) -> Iterator[bytes]:
    """Yields the lines of a text file, without their ends."""
    with open(path, "rb") as file:
        for line in file:
            # A last line without an end may end with "\r", which is its own then.
            yield line.rstrip(b"\r\n") if line.endswith(b"\n") else line


def read_tfrecords(path: str) -> Iterator[bytes]:
    """Yields the records of a TFRecord file, as they were written.

    Raises:
        ImportError: grain is not installed.
        FileNotFoundError: The file does not exist.
        ValueError: The file ends inside a record, or is not a TFRecord file; names the
            file.
    """
    records: Any = _tfrecord_reader()(path)
    with ending(iter(records)) as source:
        try:
            yield from source
        except ValueError as error:
            # The text of grain has all that was read of the record.
            words = f"{path} is not a TFRecord file: {error!s:.100}"
            raise ValueError(words) from None
        except (MemoryError, OverflowError):  # of a length that is anything
            raise ValueError(
                f"{path} is not a TFRecord file: it says that a record has more bytes "
                "than this machine has memory"
            ) from None


def require_tfrecords() -> None:
    """Checks that TFRecord files can be read here.

    Raises:
        ImportError: grain is not installed.
    """
    _tfrecord_reader()


def load_npy(path: str) -> np.ndarray:
    """Returns the array of a ``.npy`` file, mapped into memory: rows are read when they
    are used.

    Raises:
        ValueError: The file does not hold one array of numbers; names the file.
    """
    found = _loaded(path, "r")
    if not isinstance(found, np.ndarray):
        found.close()
        raise ValueError(f"{path} is an archive of arrays: read it with from_npz")
    return np.asarray(found)


def load_npz(path: str) -> dict[str, np.ndarray]:
    """Returns the arrays of an ``.npz`` archive by their names.

    Raises:
        ValueError: The file is not an archive of arrays of numbers; names the file.
    """
    found = _loaded(path, None)
    if isinstance(found, np.ndarray):
        raise ValueError(f"{path} is one array, no archive: read it with from_npy")
    # All arrays are read now: an archive keeps its file open, and reads an array again
    # at each access.
    with found as archive:
        try:
            return {name: archive[name] for name in archive.files}
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error


def _loaded(path: str, mode: Literal["r"] | None) -> Any:
    try:
        # No pickles: reading a file runs no code.
        return np.load(path, mmap_mode=mode, allow_pickle=False)
    except (ValueError, EOFError, zipfile.BadZipFile) as error:
        raise ValueError(f"{path} has no arrays that can be read: {error}") from error


_MISSING: Final = (
    "TFRecord files are read by grain, which is not installed: pip install "
    "'zstrat[grain]' (or grain); or read them with a library of yours and "
    "zs.data.Dataset.from_files(filenames, read)"
)


def _tfrecord_reader() -> Callable[[str], Iterable[bytes]]:
    try:
        from grain.experimental import TFRecordIterDataset
    except ImportError as error:
        raise ImportError(_MISSING) from error
    reader: Callable[[str], Iterable[bytes]] = TFRecordIterDataset
    return reader


def _rows(arrays: Element, path: str) -> int:
    """Returns the number of rows of the arrays of a file.

    Raises:
        ValueError: An array has no axis, or the numbers of rows differ.
    """
    found = {name or "array": leaf.shape[:1] for name, leaf in leaves(arrays)}
    if not found:
        raise ValueError(f"{path} has no arrays in it")
    if len(set(found.values())) > 1 or () in found.values():
        rows = ", ".join(f"{k} has {v[0] if v else 'none'}" for k, v in found.items())
        raise ValueError(
            f"{path}: the arrays of a file must have as many rows each: {rows}"
        )
    return int(next(iter(found.values()))[0])


def _require_alike(tables: Sequence[OpenTable]) -> None:
    """Checks that rows of these files can be in one batch.

    Raises:
        ValueError: The files differ in their arrays, in the shapes of their rows, or in
            the kind of values: numbers, text, bytes, dates.
    """
    first, *others = tables
    wanted = first.columns()
    for other in others:
        if (found := other.columns()) != wanted:
            raise ValueError(
                f"Cannot batch rows of {other.path}, which has {_worded(found)}, with "
                f"those of {first.path}, which has {_worded(wanted)}: write the files "
                "alike, or map the rows of each file to one structure before `batch`"
            )


def _column(array: Any) -> str:
    if not isinstance(array, np.ndarray):
        return f"{list(array.shape[1:])}"
    shape, kind = list(np.shape(array)[1:]), kind_of(array)
    return f"{shape}" if kind == "an array" else f"{shape} of {kind}"


def _worded(columns: dict[str, str]) -> str:
    return ", ".join(f"{name} {column}" for name, column in columns.items())
