"""Pytrees and jax arrays at the edge of a collective. Brings jax: imported late."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import jax

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np


def flatten(
    tree: Any, is_leaf: Callable[[Any], bool]
) -> tuple[list[Any], Callable[[Sequence[Any]], Any]]:
    """Leaves of a pytree, and what makes the same pytree of others."""
    leaves, structure = jax.tree_util.tree_flatten(tree, is_leaf=is_leaf)
    return leaves, partial(jax.tree_util.tree_unflatten, structure)


def is_array(leaf: object) -> bool:
    """Whether it is a jax array.

    Raises:
        TypeError: It is one that is being traced, and has no values.
    """
    if isinstance(leaf, jax.core.Tracer):
        raise TypeError(
            "a collective of a group was called with a traced array (in jax.jit, grad "
            "or the like): its values are not known yet; call it on results instead"
        )
    return isinstance(leaf, jax.Array)


def put(values: np.ndarray, like: jax.Array) -> jax.Array:
    """A jax array of these values, where ``like`` is."""
    devices = like.devices()
    where = like.sharding if len(devices) == 1 else next(iter(devices))
    moved: jax.Array = jax.device_put(values, where)
    return moved
