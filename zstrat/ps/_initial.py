"""First values that are made where they will live, by a shipped initializer.

A table may be as large as this machine's memory, so its value is taken over as the
initializer made it, without a copy, if nobody else can refer to it.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Final

import numpy as np

from zstrat.errors import InvalidArgumentError
from zstrat.wire import dtype_named

from ._cell import Cell

if TYPE_CHECKING:
    from zstrat.wire import InitialEntry

SMALL: Final = 2**26
"""Values up to this size are copied, so that they are aligned, and lie in huge pages;
of larger ones nearly all pages are huge anyway."""


def made(initialize: object, entry: InitialEntry) -> Cell:
    """The value of a new variable: what the initializer returns for its part.

    Raises:
        InvalidArgumentError: It is no callable, it raises, or it returns something of
            another shape or dtype.
    """
    who = f"the initializer of variable {entry.name!r}"
    dtype, shape = dtype_named(entry.dtype), tuple(entry.shape)
    if not callable(initialize):
        raise InvalidArgumentError(f"{who} is {initialize!r:.80}: not a callable")
    try:
        value = initialize(
            tuple(entry.whole),
            dtype,
            partition_shape=shape,
            partition_offset=tuple(entry.offset),
        )
    except MemoryError:  # is not its fault
        raise
    except Exception as error:  # goes to the caller, with what was being made
        raise InvalidArgumentError(
            f"{who} failed for rows of {dtype.name}{list(shape)}: "
            f"{type(error).__name__}: {error}"
        ) from error
    if not isinstance(value, np.ndarray):
        value = np.asarray(value)
    if value.dtype != dtype or value.shape != shape:
        raise InvalidArgumentError(
            f"{who} was asked for {dtype.name}{list(shape)} and returned "
            f"{value.dtype.name}{list(value.shape)}"
        )
    if value.nbytes > SMALL and _is_ours(value) and sys.getrefcount(value) <= 2:
        return Cell.around(value)
    return Cell(value)


def _is_ours(value: np.ndarray) -> bool:
    """Whether it owns memory that we may write to, laid out as a cell wants it."""
    flags = value.flags
    return (
        type(value) is np.ndarray
        and flags.owndata
        and flags.writeable
        and flags.c_contiguous
        and value.dtype.isnative
    )
