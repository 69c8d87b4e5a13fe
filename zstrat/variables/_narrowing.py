"""Numbers of 64 bits where jax computes with 32: it takes them for others, in silence.

What is refused for it elsewhere (variables in steps, ids of rows) is not said here.
Law of the file: a warning is said at the user's own line.
"""

from __future__ import annotations

import inspect
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import jax
import jaxlib
import numpy as np

from ._operators import ArrayOperators

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ._abstract import AbstractVariable
    from ._creator import VariableRequest

_MACHINERY: Final = tuple(
    f"{folder}/"
    for folder in (
        Path(__file__).parents[1],
        Path(jax.__file__).parent,
        Path(jaxlib.__file__).parent,
    )
)
_NAMED: Final = 3
"""Variables of one call that are named."""


class NarrowingWarning(UserWarning):
    """jax takes numbers of 64 bits for ones of 32, or would."""


def is_machinery(filename: str) -> bool:
    """Whether the file belongs to zstrat or jax."""
    return filename.startswith((*_MACHINERY, "<frozen"))


def outside() -> int:
    """How far the user's line is from the caller of this, as warnings count."""
    frame, level = inspect.currentframe(), 0
    while frame is not None and is_machinery(frame.f_code.co_filename):
        frame, level = frame.f_back, level + 1
    return level


def line_outside() -> tuple[str, int]:
    """The user's line: its file and number."""
    frame = inspect.currentframe()
    while frame is not None and is_machinery(frame.f_code.co_filename):
        frame = frame.f_back
    return ("sys", 1) if frame is None else (frame.f_code.co_filename, frame.f_lineno)


def is_cut(leaf: Any) -> bool:
    """Whether it has numbers of numpy that jax takes for ones of fewer bits."""
    if not isinstance(leaf, np.ndarray | np.generic) or leaf.dtype.kind not in "iufc":
        return False
    return _narrow(leaf.dtype).itemsize < leaf.dtype.itemsize


def what_is_lost(leaf: Any) -> str | None:
    """What jax makes of a number, in words; None if it loses nothing. Of a single float
    only that it is too large: Python's own floats are rounded everywhere. Cost: a
    pass over what `is_cut`."""
    if not is_cut(leaf) or not leaf.size:
        return None
    narrow = _narrow(leaf.dtype)
    array = np.asarray(leaf)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        cut = array.astype(narrow)
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


def warn_of_wide(
    requests: Sequence[VariableRequest], made: Sequence[AbstractVariable]
) -> None:
    """Says which new variables no step will take, because nobody said their dtype and
    their first value happens to have floats of 64 bits. (Integers of 64 bits are meant:
    they count what is outside of steps.)

    Warns:
        NarrowingWarning: Once for all of them.
    """
    wide = [
        variable
        for request, variable in zip(requests, made, strict=True)
        if request.dtype is None
        and variable.dtype.kind in "fc"
        and _narrow(variable.dtype).itemsize < variable.dtype.itemsize
        and not isinstance(request.initial_value, ArrayOperators)
    ]
    if not wide:
        return
    own, narrow = wide[0].dtype, _narrow(wide[0].dtype)
    names = ", ".join(repr(variable.name) for variable in wide[:_NAMED])
    more = f" and {len(wide) - _NAMED} more" if len(wide) > _NAMED else ""
    warnings.warn(
        f"{names}{more}: created with dtype {own}, that of the initial value, and a "
        f"step would refuse it, because jax computes with {narrow}. Give "
        f'dtype="{narrow}", or value.astype("{narrow}"); or, if {own} is meant, '
        f'dtype="{own}", and switch on jax_enable_x64 (JAX_ENABLE_X64=1) to use it in '
        "steps",
        NarrowingWarning,
        stacklevel=outside(),
    )


def _narrow(dtype: np.dtype) -> np.dtype:
    found: np.dtype = jax.dtypes.canonicalize_dtype(dtype)
    return found
