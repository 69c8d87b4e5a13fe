"""Creation of hash tables (`HashTable`): checks the user's arguments, finds the
creator.

Arguments that a server would refuse raise an error here, at the user's own line, before
anything is sent. A hash table can only be created on parameter servers, so not every
`Creator` is a `TableCreator`.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

from zstrat.ids import IdGenerator, hashes_of
from zstrat.initializers import Initializer, uniform
from zstrat.wire import TABLE_ROW_BYTES

from . import _convert
from ._creator import CreatedInStep, creator, of_strategy
from ._recorder import recorder
from .admission import Admission
from .eviction import Eviction


@dataclass(frozen=True, slots=True)
class TableRequest:
    """The user's arguments for one new hash table. ``row`` is the shape of a row,
    ``seed`` is from 0 to 2**63 - 1."""

    row: tuple[int, ...]
    dtype: np.dtype
    initializer: Initializer
    seed: int
    name: str
    trainable: bool
    admission: Admission | None
    eviction: Eviction | None
    follows: bool


@runtime_checkable
class TableCreator(Protocol):
    """A creator that can create hash tables."""

    def create_table(self, request: TableRequest) -> Any:
        """Creates the `HashTable` of a request."""
        ...


def create_table(request: TableRequest) -> Any:
    """Creates a hash table by the current creator.

    Raises:
        ValueError: The current scope does not belong to a strategy with parameter
            servers; a step is being traced.
    """
    recording = recorder.get()
    if recording is not None and not recording.may_create:
        raise CreatedInStep(
            f"table {request.name!r} is created inside a step function: create it "
            "before, in strategy.scope(), and use it in the step"
        )
    current = of_strategy(creator.get())
    if not isinstance(current, TableCreator):
        raise ValueError(
            f"table {request.name!r}: a zs.HashTable is stored on parameter servers: "
            "create it in the scope of a zs.ParameterServerStrategy. Elsewhere use a "
            "zs.Variable with a row for each id that may come"
        )
    return current.create_table(request)


def checked_request(
    dim: Any,
    dtype: Any,
    initializer: Any,
    seed: Any,
    name: Any,
    *,
    admission: Any,
    eviction: Any,
    follow_changes: Any,
    trainable: Any,
) -> TableRequest:
    """Checks the arguments of `HashTable`; returns them as a request.

    Raises:
        ValueError, TypeError: As `HashTable`.
    """
    if not isinstance(name, str):
        raise TypeError(f"table name={name!r:.80}: expected a str")
    row = _row_shape(dim, name)
    rows = uniform(-0.05, 0.05) if initializer is None else initializer
    if not isinstance(rows, Initializer):
        raise TypeError(
            f"table {name!r}: initializer={initializer!r:.80} cannot make the row "
            "of one id: expected zs.initializers.uniform, normal or constant"
        )
    kind = _convert.as_dtype("float32" if dtype is None else dtype, name)
    _require_rows(rows, row, kind, name)
    _require_rules(admission, eviction, name)
    for flag, value in ("follow_changes", follow_changes), ("trainable", trainable):
        if not isinstance(value, bool | np.bool_):
            raise TypeError(
                f"table {name!r}: {flag}={value!r:.80}: expected True or False"
            )
    rules = admission, eviction, bool(follow_changes)
    return TableRequest(
        row, kind, rows, _mixed(seed, name), name, bool(trainable), *rules
    )


def _row_shape(dim: Any, name: str) -> tuple[int, ...]:
    """Returns the shape of a row for the argument ``dim`` of `HashTable`.

    Raises:
        TypeError: ``dim`` is neither an integer nor integers.
        ValueError: ``dim`` is not positive.
    """
    try:
        row = tuple(map(operator.index, dim if np.iterable(dim) else [dim]))
    except TypeError:
        raise TypeError(
            f"table {name!r}: dim={dim!r:.80} is not the length of a row, nor its "
            "shape: expected an integer, or some"
        ) from None
    if any(size <= 0 for size in row) or not row:
        raise ValueError(f"table {name!r}: dim={dim!r} has to be positive")
    return row


def _require_rules(
    admission: Admission | None, eviction: Eviction | None, name: str
) -> None:
    """Raises TypeError if a rule of admission or eviction has another type."""
    if not isinstance(admission, Admission | None):
        raise TypeError(
            f"table {name!r}: admission={admission!r:.80}: expected "
            "zs.admission.count(n), sketch(n, bytes=) or probability(p)"
        )
    if not isinstance(eviction, Eviction | None):
        raise TypeError(
            f"table {name!r}: eviction={eviction!r:.80}: expected "
            "zs.eviction.steps(n), age(seconds), norm(x) or capacity(rows)"
        )


def _mixed(seed: int, name: str) -> int:
    """Mixes the name of a table into its seed, so that tables of different names have
    different initial values."""
    text = name.encode()
    try:
        mixed = np.array([operator.index(seed) % 2**63], np.int64)
    except TypeError:
        raise TypeError(
            f"table {name!r}: seed={seed!r:.80}: expected an integer"
        ) from None
    # Each word goes through the hash, so that names which differ anywhere give other
    # seeds.
    for word in np.frombuffer(text.ljust(-(-len(text) // 8) * 8), "<i8"):
        mixed = hashes_of(mixed ^ word).view(np.int64)
    return int(mixed[0]) & (2**63 - 1)


def _require_rows(
    initializer: Initializer, row: tuple[int, ...], dtype: np.dtype, name: str
) -> None:
    """Makes some rows by the initializer in this process, where an error is clearer
    than a server's.

    Raises:
        ValueError: The initializer does not make rows of single ids, or not in this
            dtype; or rows are too large.
    """
    nbytes = math.prod(row) * dtype.itemsize
    if nbytes > TABLE_ROW_BYTES:
        raise ValueError(
            f"table {name!r}: a row has at most {TABLE_ROW_BYTES} bytes, got "
            f"{dtype}{list(row)}, {nbytes} bytes"
        )
    # Any id will do: the rows of all ids are made alike.
    out = np.empty((1, *row), dtype)
    try:
        initializer.rows(IdGenerator(0, np.zeros(1, np.int64)), out)
    except ValueError as error:
        raise ValueError(f"table {name!r}: {error}") from None
