"""Initial values: callables that take ``(shape, dtype)`` and return a numpy array.

The same seed gives the same array on every machine; without a seed each call differs.
Fans are counted as in TF and Keras: the last axis is the output, the one before it the
input, and what comes before those is the receptive field.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

Initializer = Callable[[Sequence[int], Any], np.ndarray]


def zeros(shape: Sequence[int], dtype: Any) -> np.ndarray:
    """All zero."""
    return np.zeros(tuple(shape), dtype)


def ones(shape: Sequence[int], dtype: Any) -> np.ndarray:
    """All one."""
    return np.ones(tuple(shape), dtype)


def constant(value: Any) -> Initializer:
    """``value``, broadcast to the shape."""

    def initialize(shape: Sequence[int], dtype: Any) -> np.ndarray:
        return np.array(np.broadcast_to(np.asarray(value, dtype), tuple(shape)))

    return initialize


def normal(
    stddev: float = 0.05, seed: int | None = None, *, mean: float = 0.0
) -> Initializer:
    """Normally distributed."""

    def initialize(shape: Sequence[int], dtype: Any) -> np.ndarray:
        drawn = _generator(seed).standard_normal(tuple(shape), np.float32)
        return (drawn * np.float32(stddev) + np.float32(mean)).astype(dtype)

    return initialize


def uniform(
    minval: float = -0.05, maxval: float = 0.05, seed: int | None = None
) -> Initializer:
    """Uniform in ``[minval, maxval)``."""

    def initialize(shape: Sequence[int], dtype: Any) -> np.ndarray:
        return _uniform(shape, dtype, minval, maxval, seed)

    return initialize


def glorot_uniform(seed: int | None = None) -> Initializer:
    """Uniform within ``sqrt(6 / (fan_in + fan_out))``: variance preserved both ways."""

    def initialize(shape: Sequence[int], dtype: Any) -> np.ndarray:
        bound = math.sqrt(6.0 / max(1.0, sum(_fans(shape))))
        return _uniform(shape, dtype, -bound, bound, seed)

    return initialize


def he_normal(seed: int | None = None) -> Initializer:
    """Normal with ``sqrt(2 / fan_in)``: variance preserved through a relu."""

    def initialize(shape: Sequence[int], dtype: Any) -> np.ndarray:
        return normal(math.sqrt(2.0 / max(1.0, _fans(shape)[0])), seed)(shape, dtype)

    return initialize


def _uniform(
    shape: Sequence[int], dtype: Any, low: float, high: float, seed: int | None
) -> np.ndarray:
    drawn = _generator(seed).random(tuple(shape), np.float32)
    return (drawn * np.float32(high - low) + np.float32(low)).astype(dtype)


def _generator(seed: int | None) -> np.random.Generator:
    return np.random.Generator(np.random.PCG64(seed))


def _fans(shape: Sequence[int]) -> tuple[float, float]:
    match tuple(shape):
        case ():
            return 1.0, 1.0
        case (n,):
            return float(n), float(n)
        case (*field, inputs, outputs):
            size = math.prod(field)
            return float(size * inputs), float(size * outputs)
    raise AssertionError(shape)
