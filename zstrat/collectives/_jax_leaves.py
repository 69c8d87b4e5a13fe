"""Flattens pytrees with jax arrays, and makes jax arrays of results. Imports jax, so
import it only when needed."""

from __future__ import annotations

import zlib
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, Final

import jax

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy as np

_SPELT: Final = 3
"""Most leaves whose paths are spelt out; of more there is a digest."""


def flatten(
    tree: Any, is_leaf: Callable[[Any], bool]
) -> tuple[list[Any], Callable[[Sequence[Any]], Any], str]:
    """Flattens a pytree. Returns its leaves, a function that makes such a pytree of
    other leaves, and the paths of the leaves, as text that is equal in every
    process."""
    leaves, structure = jax.tree_util.tree_flatten(tree, is_leaf=is_leaf)
    rebuild = partial(jax.tree_util.tree_unflatten, structure)
    try:
        where = _paths(structure)
    except TypeError:  # it holds what has no hash
        where = _paths.__wrapped__(structure)
    return leaves, rebuild, where


@lru_cache(maxsize=64)
def _paths(structure: Any) -> str:
    # jax gives paths of trees, not of structures.
    numbered = jax.tree_util.tree_unflatten(structure, range(structure.num_leaves))
    pairs, _ = jax.tree_util.tree_flatten_with_path(numbered)
    paths = [jax.tree_util.keystr(path) for path, _ in pairs]
    if len(paths) <= _SPELT:
        return " ".join(paths)
    return f"{paths[0]} and others, digest {zlib.crc32(' '.join(paths).encode()):08x}"


def is_array(leaf: object) -> bool:
    """Returns whether the leaf is a jax array.

    Raises:
        TypeError: The leaf is a traced array, which has no values.
    """
    if isinstance(leaf, jax.core.Tracer):
        raise TypeError(
            "a collective of a group was called with a traced array (in jax.jit, grad "
            "or the like): its values are not known yet; call it on results instead"
        )
    return isinstance(leaf, jax.Array)


def put(values: np.ndarray, like: jax.Array) -> jax.Array:
    """Returns a jax array of ``values`` on the device of ``like``."""
    devices = like.devices()
    # A sharding over several devices may not fit another shape: one of its devices
    # does.
    where = like.sharding if len(devices) == 1 else next(iter(devices))
    moved: jax.Array = jax.device_put(values, where)
    return moved
