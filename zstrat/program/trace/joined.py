"""Pytrees as programs take them: a value per replica counts as the array it is in.

jax sees as many leaves in a value per replica as there are replicas, whichever way it
is kept: that is what it means (`jax.tree.map`). A program is faster: one array over all
devices goes in and comes out as it is. So whatever flattens for a program does it here.

A treedef that is made here gives back the value per replica that it was made of, from
that one array, wherever it unflattens.
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
"""Whether a node that is kept as one array is to give that array as its child
(``is_joined``): what the class of such a node asks where it is flattened."""

_flatten: Final[Any] = jax.tree_util.tree_flatten


def flatten(tree: Any) -> tuple[list[Any], TreeDef]:
    """Flattens as `jax.tree.flatten`, but for values per replica."""
    before = asked.is_joined
    asked.is_joined = True
    try:
        # As at each call of a step: the function itself, without `jax.tree`'s wrapper.
        found: tuple[list[Any], TreeDef] = _flatten(tree)
        return found
    finally:
        asked.is_joined = before


def flatten_with_path(tree: Any) -> tuple[list[tuple[Any, Any]], TreeDef]:
    """Flattens as `jax.tree_util.tree_flatten_with_path`, but for values per
    replica."""
    before = asked.is_joined
    asked.is_joined = True
    try:
        found: tuple[list[tuple[Any, Any]], TreeDef]
        found = jax.tree_util.tree_flatten_with_path(tree)
        return found
    finally:
        asked.is_joined = before


def leaves(tree: Any) -> list[Any]:
    """The leaves that `flatten` finds."""
    return flatten(tree)[0]


def mapped(fn: Callable[[Any], Any], tree: Any) -> Any:
    """Maps one tree as `jax.tree.map`, but for values per replica."""
    found, treedef = flatten(tree)
    return treedef.unflatten([fn(leaf) for leaf in found])
