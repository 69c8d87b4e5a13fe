"""Computes plain updates of arrays, and of the rows of a table, in numpy and in bulk.

Every function of an update has the form ``compute(source, operands, out)``: it leaves
the new value in ``out``, which is either ``source`` itself or other memory. Operands
have been validated (`check`), and an operation allocates all its memory before it
writes, so that nothing here can fail half-way: a floating-point exception is a value
(inf, NaN), not an error.

Duplicate indices of a scatter accumulate for add, sub, mul and div; for min and max
their order does not matter; for update the last one wins. `np.add.at` on rows goes
element by element; sorting the indices and adding duplicates in rounds is five times
faster (0.5 ms in place of 2.7 for 4,096 rows of 64 floats), so add and sub do that; the
rarer operations take ``ufunc.at`` if there are duplicates at all.

Functions here also read and write rows, sum duplicates, and pack rows for a program. A
row is copied as one element: numpy copies elements of 256 bytes by `memmove`, and rows
of 64 floats by a loop over the floats, which takes twice as long. So tables are viewed
as vectors of opaque rows (`as_rows`), whatever their dtype.

XLA compiles a program for one number of rows, so updates are divided and padded to few
such numbers (`bucket`), and rows of several tables that have the same shape share one
call (`pack`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Final, NamedTuple

import numpy as np

from zstrat.errors import InvalidArgumentError
from zstrat.ids import hashes_of
from zstrat.native import put_rows, take_rows
from zstrat.rows import divided, runs, sums
from zstrat.wire import UpdateOp

CALL_BYTES: Final = 512 * 1024
"""Bytes of rows for one call of a program. What the call reads and writes (of Adam,
seven times as much) then stays in the processor's cache between gathering, computing
and scattering. A call costs 30 us, a tenth of the time for so many rows."""

FEWEST: Final = 16
"""Number of rows below which a smaller program is not faster."""


def as_rows(array: np.ndarray) -> np.ndarray:
    """Returns a view of a C-order array ``[n, ...]`` as a vector ``[n]`` of opaque
    elements, one for each row. Empty rows are not a view."""
    count = len(array)
    # An empty array cannot be viewed with elements of another size.
    if not array.nbytes:
        return np.zeros(count, "V1")
    if array.ndim != 2:
        array = array.reshape(count, -1)
    return array.view(_opaque(array.nbytes // count))[:, 0]


# Kept, as making a dtype takes longer than the view.
@lru_cache(maxsize=1024)
def _opaque(width: int) -> np.dtype:
    return np.dtype((np.void, width))


def gather(table: np.ndarray, indices: np.ndarray) -> np.ndarray:
    """Returns a copy of the rows ``indices`` ([n] of intp, in range), in that order."""
    out = np.empty((len(indices), *table.shape[1:]), table.dtype)
    if out.size:
        take_rows(as_rows(table), indices, as_rows(out))
    return out


def are_increasing(indices: np.ndarray) -> bool:
    """Returns whether each index is larger than the one before: sorted and distinct."""
    # Counted, as `all` takes four times as long for the indices of one table.
    return not np.count_nonzero(indices[1:] <= indices[:-1])


def distinct(indices: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the distinct indices, sorted, each with the sum of its rows."""
    found = runs(indices)
    return found.unique, sums(found, rows)


def bucket(rows: int, most: int) -> int:
    """Returns the number of rows to which a program's input of ``rows`` rows is padded:
    the least of 16, 24, 32, 48, 64, ... that holds them, but at most ``most``. So above
    16 rows at most a third of the input is padding, with two programs per doubling of
    the number of rows."""
    size = max(rows, min(FEWEST, most))
    power = 1 << (size - 1).bit_length()
    if size <= power * 3 // 4:
        power = power * 3 // 4
    return min(power, most)


def sizes(rows: int, most: int) -> list[int]:
    """Returns the numbers of rows of the programs for all calls that ``rows`` rows need
    (`pack`). All calls but the last are full. After a full call the last has at least
    an eighth of its rows: a smaller program would save next to nothing, and takes as
    long to compile as a hundred calls."""
    calls, rest = divmod(rows, most)
    if not calls:
        return [bucket(rows, most)]
    last = [bucket(max(rest, most // 8), most)] if rest else []
    return [most] * calls + last


class RowRun(NamedTuple):
    """The rows ``start`` to ``stop`` of one update, whose number in the push is
    ``update``."""

    update: int
    start: int
    stop: int


def pack(counts: Sequence[int], most: int) -> list[list[RowRun]]:
    """Packs updates of ``counts`` rows into calls of at most ``most`` rows, in order.

    Returns at least one call, though it may be empty: an update of no rows counts as
    well.
    """
    calls: list[list[RowRun]] = [[]]
    room = most
    for update, count in enumerate(counts):
        start = 0
        while start < count:
            if not room:
                calls.append([])
                room = most
            stop = min(count, start + room)
            calls[-1].append(RowRun(update, start, stop))
            room -= stop - start
            start = stop
    return calls


Operands = Sequence[np.ndarray]
Compute = Callable[[np.ndarray, Operands, np.ndarray], None]

SCATTERS: Final = frozenset(
    {
        UpdateOp.SCATTER_ADD,
        UpdateOp.SCATTER_SUB,
        UpdateOp.SCATTER_MUL,
        UpdateOp.SCATTER_DIV,
        UpdateOp.SCATTER_MIN,
        UpdateOp.SCATTER_MAX,
        UpdateOp.SCATTER_UPDATE,
    }
)
OPTIMIZERS: Final = frozenset({UpdateOp.OPTIMIZE, UpdateOp.OPTIMIZE_ROWS})

_UFUNCS: Final[dict[UpdateOp, np.ufunc]] = {
    UpdateOp.ADD: np.add,
    UpdateOp.SUB: np.subtract,
    UpdateOp.SCATTER_ADD: np.add,
    UpdateOp.SCATTER_SUB: np.subtract,
    UpdateOp.SCATTER_MUL: np.multiply,
    UpdateOp.SCATTER_DIV: np.true_divide,
    UpdateOp.SCATTER_MIN: np.minimum,
    UpdateOp.SCATTER_MAX: np.maximum,
}


def is_integer(dtype: np.dtype) -> bool:
    return dtype.kind in "iu"


def is_floating(dtype: np.dtype) -> bool:
    """Returns whether a dtype is real floating point; bfloat16 and the fp8 types have
    numpy's kind "V"."""
    return dtype.kind in "fV"


def check(
    op: UpdateOp,
    operands: Operands,
    shape: tuple[int, ...],
    dtype: np.dtype,
    name: str,
    *,
    of_ids: bool = False,
) -> None:
    """Checks that a plain update fits a variable. Cost: one pass over the indices.

    Args:
        of_ids: Whether the variable is a table of any id.

    Raises:
        InvalidArgumentError: The update does not fit the variable; the error says what
            was expected.
    """
    want = 2 if op in SCATTERS else 1
    if len(operands) != want:
        raise _wrong(name, op, f"{want} arrays", f"{len(operands)}")
    if operands[-1].dtype != dtype:
        raise _wrong(name, op, dtype.name, operands[-1].dtype.name)
    if not _is_defined(op, dtype):
        raise InvalidArgumentError(
            f"variable {name!r}: {op.name} is not defined for its dtype {dtype.name}"
        )
    if want == 1:
        if operands[0].shape != shape:
            raise _wrong(name, op, f"shape {shape}", f"{operands[0].shape}")
    else:
        _check_scatter(op, operands, shape, name, check_ids if of_ids else check_rows)


def _check_scatter(
    op: UpdateOp,
    operands: Operands,
    shape: tuple[int, ...],
    name: str,
    check_indices: Callable[..., object],
) -> None:
    indices, rows = operands
    check_indices(indices, rows.shape, shape, f"variable {name!r}: {op.name}")
    if op is UpdateOp.SCATTER_DIV and is_integer(rows.dtype) and not rows.all():
        raise _wrong(name, op, "integer divisors other than 0", "a 0")


def check_rows(
    indices: np.ndarray, rows: tuple[int, ...], shape: tuple[int, ...], who: str
) -> bool:
    """Checks that ``indices`` are in range for a variable of this ``shape``, and that
    an array of the shape ``rows`` holds one row for each. ``who`` begins the error if
    not.

    Returns:
        Whether the indices are sorted and distinct.

    Raises:
        InvalidArgumentError: An index is out of range, which the error names, or the
            array has another shape.
    """
    if not shape:
        raise InvalidArgumentError(
            f"{who} expects a variable that has rows, got one of shape ()"
        )
    if indices.ndim != 1 or not is_integer(indices.dtype):
        raise InvalidArgumentError(
            f"{who} expects integer indices of shape (n,), got {indices.dtype.name} of "
            f"shape {indices.shape}"
        )
    if rows != (len(indices), *shape[1:]):
        raise InvalidArgumentError(
            f"{who} expects rows of shape {(len(indices), *shape[1:])}, got shape "
            f"{rows}"
        )
    if not len(indices):
        return True
    # Of sorted indices the ends say whether all are inside.
    increasing = are_increasing(indices)
    if increasing:
        inside = indices[0] >= 0 and indices[-1] < shape[0]
    else:
        inside = indices.min() >= 0 and indices.max() < shape[0]
    if not inside:
        wrong = np.flatnonzero((indices < 0) | (indices >= shape[0]))
        raise InvalidArgumentError(
            f"{who} expects indices in [0, {shape[0]}), got {indices[wrong[0]]} at "
            f"place {wrong[0]}"
        )
    return increasing


def check_ids(
    ids: np.ndarray,
    rows: tuple[int, ...],
    shape: tuple[int, ...],
    who: str,
    *,
    in_order: bool = False,
) -> None:
    """Checks that ids have the right form for a table of this ``shape``, and that an
    array of the shape ``rows`` holds one row for each.

    Args:
        in_order: The hashes of the ids have to ascend, so that each id occurs once.
        who: Begins the error.

    Raises:
        InvalidArgumentError: The ids or the rows do not fit.
    """
    if ids.ndim != 1 or ids.dtype != np.int64:
        raise InvalidArgumentError(
            f"{who} expects ids of int64 of shape (n,), got {ids.dtype.name} of shape "
            f"{ids.shape}"
        )
    if rows != (len(ids), *shape[1:]):
        raise InvalidArgumentError(
            f"{who} expects rows of shape {(len(ids), *shape[1:])}, got shape {rows}"
        )
    # Equal ids have equal hashes, so increasing hashes are distinct ids.
    if in_order and not are_increasing(hashes_of(ids)):
        raise InvalidArgumentError(
            f"{who} expects distinct ids in the order of their hashes "
            "(zstrat.ids.hashes_of)"
        )


def compute(
    op: UpdateOp, source: np.ndarray, operands: Operands, out: np.ndarray
) -> None:
    """Computes the new value into ``out``, which may be ``source`` itself, from checked
    operands."""
    with np.errstate(all="ignore"):
        if op is UpdateOp.ASSIGN:
            np.copyto(out, operands[0])
            return
        if op not in SCATTERS:
            _UFUNCS[op](source, operands[0], out=out)
            return
        if out is not source:
            np.copyto(out, source)
        _scatter(op, out, operands[0], operands[1])


def _scatter(
    op: UpdateOp, out: np.ndarray, indices: np.ndarray, rows: np.ndarray
) -> None:
    # As intp, because uint64 indices would be refused by fancy indexing.
    indices = indices.astype(np.intp, copy=False)
    if not rows.size:
        return
    table = as_rows(out)
    ufunc = _UFUNCS.get(op)
    if ufunc is None:
        # numpy promises that the last of equal indices wins.
        table[indices] = as_rows(np.ascontiguousarray(rows))
        return
    if op is UpdateOp.SCATTER_DIV and is_integer(out.dtype):
        # In its own memory: a division that fails must not leave a part of it.
        found = runs(indices)
        quotients = divided(gather(out, found.unique), found, rows)
        table[found.unique] = as_rows(quotients)
        return
    if not are_increasing(indices):
        found = runs(indices)
        if not found.are_distinct and ufunc not in (np.add, np.subtract):
            ufunc.at(out, indices, rows)
            return
        indices, rows = found.unique, sums(found, rows)
    new = gather(out, indices)
    ufunc(new, rows, out=new)
    put_rows(table, indices, as_rows(new))


@lru_cache(maxsize=256)
def _is_defined(op: UpdateOp, dtype: np.dtype) -> bool:
    """Returns whether numpy can do an update in a dtype: its ufunc, tried on one
    element, must exist and keep the dtype."""
    ufunc = _UFUNCS.get(op)
    if ufunc is None:
        return True
    if op in (UpdateOp.SCATTER_MIN, UpdateOp.SCATTER_MAX) and dtype.kind == "c":
        return False  # only numpy orders complex numbers, by their parts
    # `divided` keeps integers, whatever the ufunc would return.
    if ufunc is np.true_divide and is_integer(dtype):
        return True
    try:
        return bool(ufunc(np.ones(1, dtype), np.ones(1, dtype)).dtype == dtype)
    except TypeError:  # no loop of the ufunc takes the dtype
        return False


def _wrong(name: str, op: UpdateOp, want: str, got: str) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"variable {name!r}: {op.name} expects {want}, got {got}"
    )
