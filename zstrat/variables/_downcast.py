"""Downcasts: jax computes with 32 bits, and silently converts numbers of 64 bits.

Functions here find such numbers and warn. Other files refuse some of them (variables in
steps, ids of rows). Law of the file: a warning points to the user's own line.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any, Final

import jax
import jaxlib
import numpy as np

_MACHINERY: Final = tuple(
    f"{folder}/"
    for folder in (
        Path(__file__).parents[1],
        Path(jax.__file__).parent,
        Path(jaxlib.__file__).parent,
    )
)


class DowncastWarning(UserWarning):
    """Warning: jax converts numbers of 64 bits to 32 bits, and some of them change."""


def is_machinery(filename: str) -> bool:
    """Returns whether a source file belongs to zstrat or jax."""
    # Imports run in frames of importlib, which is frozen into Python.
    return filename.startswith((*_MACHINERY, "<frozen"))


def user_stacklevel() -> int:
    """Returns the ``stacklevel`` with which `warnings.warn` points to the user's
    line."""
    frame, level = inspect.currentframe(), 0
    # Level 0 is this function, 1 the one that calls `warnings.warn`.
    while frame is not None and is_machinery(frame.f_code.co_filename):
        frame, level = frame.f_back, level + 1
    return level


def user_line() -> tuple[str, int]:
    """Returns the file and the line number of the user's code that called into zstrat
    or jax."""
    frame = inspect.currentframe()
    while frame is not None and is_machinery(frame.f_code.co_filename):
        frame = frame.f_back
    # As `warnings` itself says where no frame is left.
    return ("sys", 1) if frame is None else (frame.f_code.co_filename, frame.f_lineno)


def is_downcast(leaf: Any) -> bool:
    """Returns whether this is a numpy array that jax converts to fewer bits."""
    if not isinstance(leaf, np.ndarray | np.generic) or leaf.dtype.kind not in "iufc":
        return False
    return downcast_dtype(leaf.dtype).itemsize < leaf.dtype.itemsize


def downcast_loss(leaf: Any) -> str | None:
    """Describes the first number of an array that a downcast changes; None if none
    changes.

    A scalar float counts only if it is too large, as Python floats are rounded
    everywhere. Cost: a pass over the array if `is_downcast`.
    """
    if not is_downcast(leaf) or not leaf.size:
        return None
    kind = downcast_dtype(leaf.dtype)
    array = np.asarray(leaf)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        cut = array.astype(kind)
        other = cut != array
        # nan stays nan, but is unequal to itself.
        other &= ~np.isnan(array) if array.dtype.kind in "fc" else True
        if not array.ndim and array.dtype.kind in "fc":
            other &= ~np.isfinite(cut)
    if not other.any():
        return None
    # In the wide dtype, which shows all digits of the other one.
    return (
        f"{array[other].flat[0]!s} becomes {cut[other].astype(array.dtype).flat[0]!s}"
    )


def downcast_dtype(dtype: np.dtype) -> np.dtype:
    """Returns the dtype that jax computes with for arrays of this dtype."""
    kept: np.dtype = jax.dtypes.canonicalize_dtype(dtype)
    return kept
