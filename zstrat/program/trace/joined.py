"""Flattens pytrees for programs: a value per replica counts as one array.

To jax a value per replica has one leaf per replica (`jax.tree.map`). Programs are
faster if the value is one array over all devices. So code that flattens pytrees for a
program uses this module. A treedef that is made here unflattens that one array to the
value per replica again.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Final, final

import jax

if TYPE_CHECKING:
    from collections.abc import Callable


TreeDef = Any  # jax's PyTreeDef, whose stubs lack what we call


@final
class _Asked(threading.local):
    is_joined = False


asked: Final = _Asked()
"""A flag per thread: while ``is_joined`` is set, a value per replica flattens to one
array. Its class reads the flag when jax flattens the value."""

_flatten: Final[Any] = jax.tree_util.tree_flatten


def flatten(tree: Any) -> tuple[list[Any], TreeDef]:
    """Flattens as `jax.tree.flatten`, with one leaf for a value per replica."""
    before = asked.is_joined
    asked.is_joined = True
    try:
        # At each call of a step, hence without the wrapper of `jax.tree`.
        flat: tuple[list[Any], TreeDef] = _flatten(tree)
        return flat
    finally:
        asked.is_joined = before


def flatten_with_path(tree: Any) -> tuple[list[tuple[Any, Any]], TreeDef]:
    """Flattens as `jax.tree_util.tree_flatten_with_path`, with one leaf for a value per
    replica."""
    before = asked.is_joined
    asked.is_joined = True
    try:
        flat: tuple[list[tuple[Any, Any]], TreeDef]
        flat = jax.tree_util.tree_flatten_with_path(tree)
        return flat
    finally:
        asked.is_joined = before


def leaves(tree: Any) -> list[Any]:
    """Returns the leaves of a tree, as `flatten` finds them."""
    return flatten(tree)[0]


def mapped(fn: Callable[[Any], Any], tree: Any) -> Any:
    """Applies ``fn`` to each leaf of one tree, as `jax.tree.map`, with one leaf for a
    value per replica."""
    flat, treedef = flatten(tree)
    return treedef.unflatten([fn(leaf) for leaf in flat])
