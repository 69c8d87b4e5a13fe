"""The rows of Parquet files, read by pyarrow, one row group at a time.

A row group is the unit in which files are read, and which workers are given, as others
are given files. The footers of the files are read when the dataset is made, so the
number of rows and the spec of an element are known before the first row is read.

Columns of numbers, booleans and dates become arrays of their dtype. Text and binary
columns become `bytes` (text in UTF-8, as in TF), and arrays of objects in a batch.
Lists of a fixed size become an axis; other lists are *ragged*, an array of another
length in each row. Structs become dicts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Self, final

import numpy as np

from zstrat.data._spec import TEXT, TensorSpec

from ._files import OpenTable, TableRows

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from zstrat.data._leaves import Element
    from zstrat.data._passes import Recipe
    from zstrat.data._spec import Look, Spec

_MISSING: Final = (
    "Parquet files are read by pyarrow, which is not installed: pip install "
    "'zstrat[parquet]' (or pyarrow); or read them with a library of yours and "
    "zs.data.Dataset.from_files(filenames, read)"
)


@final
@dataclass(frozen=True, slots=True)
class ParquetRows(TableRows):
    """The rows of row groups.

    Args:
        groups: For each path: the number of the row group in its file, and its number
            of rows.
    """

    paths: tuple[str, ...]
    groups: tuple[tuple[int, int], ...]
    columns: tuple[str, ...]
    element_spec: Spec

    def tables(self) -> Iterator[OpenTable]:
        for path, (group, _) in zip(self.paths, self.groups, strict=True):
            yield OpenTable(path, _load(path, group, self.columns))

    def every(self, step: int, start: int) -> Self:
        paths, groups = self.paths[start::step], self.groups[start::step]
        return replace(self, paths=paths, groups=groups)

    def shard(self, parts: int, index: int) -> Recipe:
        """Returns some of the row groups, if there is one for each part; otherwise
        every ``parts``-th row."""
        if parts <= len(self.groups):
            return self.every(parts, index)
        # Named: a dataclass with slots is another class than ``__class__`` here.
        return super(ParquetRows, self).shard(parts, index)

    def size(self) -> int:
        return sum(rows for _, rows in self.groups)

    def spec(self, look: Look) -> Spec:
        del look
        return self.element_spec


@final
class RaggedColumn:
    """Lists of different lengths: ``values[splits[i]:splits[i + 1]]`` is row ``i``."""

    __slots__ = ("splits", "values")

    def __init__(self, values: np.ndarray, splits: np.ndarray) -> None:
        self.values: Final = values
        self.splits: Final = splits

    @property
    def shape(self) -> tuple[int | None, ...]:
        return len(self.splits) - 1, None

    def __len__(self) -> int:
        return len(self.splits) - 1

    def __getitem__(self, row: Any) -> np.ndarray:
        """Returns a row; for an array of row numbers, these rows stacked, which must
        have equal lengths.

        Raises:
            ValueError: The lengths of the rows differ.
        """
        if np.ndim(row) == 0:
            start, stop = self.splits[row : row + 2]
            return np.asarray(self.values[start:stop])
        lengths = self.splits[row + 1] - self.splits[row]
        if len(np.unique(lengths)) > 1:
            raise ValueError(
                "Cannot batch lists of different lengths "
                f"({lengths.min()} to {lengths.max()}): use `padded_batch` instead of "
                "`batch`, or map the rows to one length"
            )
        columns = np.arange(lengths[0])
        return np.asarray(self.values[self.splits[row][:, None] + columns])


def parquet_rows(paths: tuple[str, ...], columns: Sequence[str] | None) -> ParquetRows:
    """Returns the rows of files that have the same columns.

    Raises:
        ImportError: pyarrow is not installed.
        FileNotFoundError: A file is missing.
        ValueError: A file is not a Parquet file, has no such column, or has one of
            another type than the first file; names the file.
        TypeError: A column has a type that cannot be an array.
    """
    found: list[tuple[str, int, int]] = []
    wanted: list[Any] = []
    for path in paths:
        with _opened(path) as file:
            fields = _fields(file.schema_arrow, columns, path)
            # All are compared now: a file that differs would fail deep in a pass.
            _require_same(fields, wanted or fields, path, paths[0])
            wanted = wanted or fields
            meta = file.metadata
            groups = range(meta.num_row_groups)
            found += [(path, n, meta.row_group(n).num_rows) for n in groups]
    spec = {field.name: _spec(field.type, field.name) for field in wanted}
    return ParquetRows(
        tuple(path for path, _, _ in found),
        tuple((number, rows) for _, number, rows in found),
        tuple(field.name for field in wanted),
        spec,
    )


def _fields(schema: Any, columns: Sequence[str] | None, path: str) -> list[Any]:
    names = schema.names if columns is None else list(columns)
    for name in names:
        if name not in schema.names:
            raise ValueError(
                f"{path} has no column {name!r}; it has {', '.join(schema.names)}"
            )
    if not names:
        raise ValueError(f"{path}: `columns` is empty: name one, or leave it out")
    return [schema.field(name) for name in names]


def _require_same(fields: list[Any], wanted: list[Any], path: str, first: str) -> None:
    ours = {field.name: str(field.type) for field in fields}
    theirs = {field.name: str(field.type) for field in wanted}
    if ours != theirs:
        raise ValueError(
            f"{path} has the columns {ours}, and {first} has {theirs}: the files of a "
            "dataset must be alike; choose columns that are (columns=[...])"
        )


def _opened(path: str) -> Any:
    arrow, parquet = _pyarrow()
    try:
        return parquet.ParquetFile(path)
    except arrow.ArrowInvalid as error:
        raise ValueError(f"{path} is not a Parquet file: {error}") from error


def _load(path: str, group: int, columns: tuple[str, ...]) -> dict[str, Any]:
    with _opened(path) as file:
        table = file.read_row_group(group, columns=list(columns), use_threads=False)
    where = f"of row group {group} of {path}"
    return {
        name: _values(table.column(name).combine_chunks(), f"column {name!r} {where}")
        for name in columns
    }


def _spec(kind: Any, name: str) -> Spec:
    """Returns the spec of a column of this type.

    Raises:
        TypeError: Values of the type cannot be arrays; names the column and its type.
    """
    arrow, _ = _pyarrow()
    types = arrow.types
    if types.is_dictionary(kind):
        return _spec(kind.value_type, name)
    if types.is_struct(kind):
        return {field.name: _spec(field.type, f"{name}.{field.name}") for field in kind}
    if types.is_fixed_size_list(kind) or _is_list(kind):
        inner = _spec(kind.value_type, name)
        size = kind.list_size if types.is_fixed_size_list(kind) else None
        is_array = isinstance(inner, TensorSpec) and None not in inner.shape
        if is_array and (size is not None or not inner.shape):
            return TensorSpec((size, *inner.shape), inner.dtype)
        raise _unreadable(name, kind)
    if _is_text(kind):
        return TensorSpec((), TEXT)
    is_plain = types.is_integer(kind) or types.is_floating(kind)
    is_date = types.is_temporal(kind) and not types.is_time(kind)
    if is_plain or types.is_boolean(kind) or is_date:
        try:
            # pyarrow is asked for numpy's dtype, with an empty array: no table here
            # could go out of date.
            return TensorSpec((), arrow.array([], kind).to_numpy(False).dtype)
        except (NotImplementedError, arrow.ArrowException):
            pass  # an interval, for one
    raise _unreadable(name, kind)


def _unreadable(name: str, kind: Any) -> TypeError:
    return TypeError(
        f"column {name!r} is of type {kind}, which is not an array of numbers, text or "
        "dates, nor a list of them: leave it out (columns=[...]), or write it otherwise"
    )


def _values(column: Any, where: str) -> Element:
    """Returns the values of a column as arrays.

    Raises:
        ValueError: Values are missing (null), which arrays cannot represent.
    """
    arrow, _ = _pyarrow()
    types = arrow.types
    if types.is_dictionary(column.type):  # text as numbers, each with its meaning
        column = column.dictionary_decode()
    # First of all: pyarrow would make floats of integers, with NaN in place of a null.
    if column.null_count:
        raise ValueError(
            f"{where} has {column.null_count} values that are null, for which arrays "
            "have no place: fill them where the file is written, or leave the column "
            "out (columns=[...])"
        )
    if types.is_struct(column.type):
        parts = column.flatten()
        names = [field.name for field in column.type]
        return {
            name: _values(part, f"{name!r} in {where}")
            for name, part in zip(names, parts, strict=True)
        }
    if types.is_fixed_size_list(column.type):
        inner: Any = _values(column.flatten(), where)
        return inner.reshape(len(column), column.type.list_size, *inner.shape[1:])
    if _is_list(column.type):
        # Of the lengths, not the offsets: those of a slice do not begin at 0.
        lengths = column.value_lengths().to_numpy(False)
        splits = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        return RaggedColumn(np.asarray(_values(column.flatten(), where)), splits)
    if _is_text(column.type):
        found = np.empty(len(column), object)
        # Large: offsets of 32 bits end at 2 GB of text in one row group.
        found[:] = column.cast(arrow.large_binary()).to_pylist()
        return found
    return column.to_numpy(False)


def _is_list(kind: Any) -> bool:
    types = _pyarrow()[0].types
    return bool(types.is_list(kind) or types.is_large_list(kind))


def _is_text(kind: Any) -> bool:
    types = _pyarrow()[0].types
    return bool(
        types.is_string(kind)
        or types.is_large_string(kind)
        or types.is_binary(kind)
        or types.is_large_binary(kind)
        or types.is_fixed_size_binary(kind)
    )


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise ImportError(_MISSING) from error
    return pyarrow, pyarrow.parquet
