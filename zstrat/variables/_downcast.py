"""Numbers of 64 bits where jax computes with 32: it takes them for others, in silence.

What is refused for it elsewhere (variables in steps, ids of rows) is not said here.
Law of the file: a warning is said at the user's own line.
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
    """jax takes numbers of 64 bits for ones of 32, or would."""


def is_machinery(filename: str) -> bool:
    """Whether the file belongs to zstrat or jax."""
    return filename.startswith((*_MACHINERY, "<frozen"))


def user_stacklevel() -> int:
    """How far the user's line is from the caller of this, as warnings count."""
    frame, level = inspect.currentframe(), 0
    while frame is not None and is_machinery(frame.f_code.co_filename):
        frame, level = frame.f_back, level + 1
    return level


def user_line() -> tuple[str, int]:
    """The user's line: its file and number."""
    frame = inspect.currentframe()
    while frame is not None and is_machinery(frame.f_code.co_filename):
        frame = frame.f_back
    return ("sys", 1) if frame is None else (frame.f_code.co_filename, frame.f_lineno)


def is_downcast(leaf: Any) -> bool:
    """Whether it has numbers of numpy that jax takes for ones of fewer bits."""
    if not isinstance(leaf, np.ndarray | np.generic) or leaf.dtype.kind not in "iufc":
        return False
    return downcast_dtype(leaf.dtype).itemsize < leaf.dtype.itemsize


def downcast_loss(leaf: Any) -> str | None:
    """What jax makes of a number, in words; None if it loses nothing. Of a single float
    only that it is too large: Python's own floats are rounded everywhere. Cost: a
    pass over what `is_downcast`."""
    if not is_downcast(leaf) or not leaf.size:
        return None
    kind = downcast_dtype(leaf.dtype)
    array = np.asarray(leaf)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        cut = array.astype(kind)
        other = cut != array
        other &= ~np.isnan(array) if array.dtype.kind in "fc" else True
        if not array.ndim and array.dtype.kind in "fc":
            other &= ~np.isfinite(cut)
    if not other.any():
        return None
    # In the wide dtype, which shows all digits of the narrow one.
    return (
        f"{array[other].flat[0]!s} becomes {cut[other].astype(array.dtype).flat[0]!s}"
    )


def downcast_dtype(dtype: np.dtype) -> np.dtype:
    """What jax takes it for."""
    found: np.dtype = jax.dtypes.canonicalize_dtype(dtype)
    return found
