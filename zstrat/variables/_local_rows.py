"""An optimizer on some rows of a variable of this process: only they move, and what is
kept beside them; as on a parameter server.

What an optimizer keeps is a tree of arrays. Those whose first axis follows the rows of
the variable (moments, sums of squares) are *row leaves* and are touched at these rows
alone; the rest (counts) are shared and change with each update. Law of the file: arrays
that are given are never written to.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, Final

import jax
import numpy as np

from zstrat.rows import runs, sums

if TYPE_CHECKING:
    from collections.abc import Callable

    from ._optimizer import Optimizer

    Step = Callable[[Any, Any, Any], tuple[Any, Any]]
    """``(gradient, slots, value) -> (new value, new slots)``."""

_PROBE: Final = (256, 128)
"""Halves of it have 128 rows: adafactor factors its moments from there on."""
_TOLERANCE: Final = 1e-3
"""Of the largest element: algorithms differ by tenths, XLA rounds by 1e-6."""


# jax's stubs leave it untyped.
_Abstract: Final[Any] = jax.ShapeDtypeStruct


def optimized(
    transformation: Any, gradient: Any, slots: Any, value: Any
) -> tuple[Any, Any]:
    """New value and new slots of one variable: what an optimizer is."""
    delta, slots = transformation.update(gradient, slots, value)
    return (value + delta).astype(value.dtype), slots


def optimized_rows(
    optimizer: Optimizer,
    step: Step,
    state: tuple[np.ndarray, Any],
    indices: np.ndarray,
    rows: np.ndarray,
) -> tuple[np.ndarray, Any]:
    """Value and slots after one step on these rows.

    Args:
        state: Value and slots before it.
        indices: ``[n]``; of none, what is shared changes all the same. Gradients of the
            same row are summed first.
        rows: Their gradients, ``[n, ...]``.

    Raises:
        ValueError: The transformation does not treat each row by itself.
    """
    require_by_rows(optimizer)
    value, slots = state
    found = runs(indices)
    indices, rows = found.unique, sums(found, rows)
    count = len(indices)
    padded = 1 << max(0, count - 1).bit_length()  # compiled once per power of two
    if not len(value):
        padded = 0
    filler = indices[0] if count else 0
    at = np.concatenate([indices, np.full(padded - count, filler)])
    gradient = np.zeros((padded, *rows.shape[1:]), rows.dtype)
    gradient[:count] = rows
    follows = row_leaves(optimizer.transformation, value.shape, value.dtype)
    here = jax.tree.map(
        lambda leaf, f: np.asarray(leaf)[at] if f else leaf, slots, follows
    )
    moved, kept = step(gradient, here, value[at])
    slots = jax.tree.map(
        lambda leaf, new, f: _written(leaf, indices, new) if f else new,
        slots,
        kept,
        follows,
    )
    return _written(value, indices, moved), slots


def _written(array: Any, indices: np.ndarray, rows: Any) -> np.ndarray:
    written = np.array(array)
    written[indices] = np.asarray(rows)[: len(indices)]
    return written


def row_leaves(transformation: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    """For each leaf of the slots, whether its first axis is the variable's."""
    rows, *rest = shape
    sizes = [
        jax.eval_shape(transformation.init, _Abstract((n, *rest), dtype))
        for n in (rows, rows + 1)
    ]
    return jax.tree.map(lambda one, more: one.shape != more.shape, *sizes)


def require_by_rows(optimizer: Optimizer) -> None:
    """Refuses an optimizer that cannot move some rows alone. Tries it once.

    Raises:
        ValueError: The transformation does not treat each row by itself.
    """
    if optimizer.is_by_rows is None:
        # Perhaps in the middle of a trace, which is to see nothing of it.
        with jax.ensure_compile_time_eval():
            optimizer.is_by_rows = _is_by_rows(optimizer.transformation)
    if not optimizer.is_by_rows:
        raise ValueError(
            f"optimizer {optimizer.name!r} looks at more than one row at a time (a "
            "norm, a trust ratio, factored moments), so it cannot take IndexedSlices: "
            "give it the dense gradient, slices.to_dense()"
        )


def _is_by_rows(transformation: Any) -> bool:
    """Whether halves of an array move as the array does. Cost: about half a second."""
    step = jax.jit(functools.partial(optimized, transformation))
    rng = np.random.default_rng(0)
    value = rng.normal(size=_PROBE).astype(np.float32)
    parts = [value, *np.split(value, 2)]
    slots = [transformation.init(part) for part in parts]
    for scale in (30.0, 0.01):
        gradient = (scale * rng.normal(size=_PROBE)).astype(np.float32)
        gradient[0] *= 1000  # so that any common norm shows
        gradients = [gradient, *np.split(gradient, 2)]
        moved = [step(*given) for given in zip(gradients, slots, parts, strict=True)]
        parts, slots = [p for p, _ in moved], [s for _, s in moved]
    whole, *halves = (np.asarray(part) for part in parts)
    apart = np.abs(whole - np.concatenate(halves)).max()
    return bool(apart <= _TOLERANCE * np.abs(whole - value).max())
