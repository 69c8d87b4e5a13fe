"""A training, step by step, as numpy arrays."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True)
class Moment:
    """What one step got, and where it left the values."""

    gradients: Any
    extra: dict[str, Any]
    values: Any


@dataclass(frozen=True)
class Trajectory:
    """Plain optax, from ``start`` to its last state; ``failed`` where it cannot."""

    start: Any
    moments: list[Moment] = field(default_factory=list)
    state: Any = None
    failed: str = ""


def plain(leaf: Any) -> Any:
    """An array of numpy, of a key its words."""
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return np.asarray(jax.random.key_data(leaf))
    return np.asarray(leaf)
