"""A round trip before anything is sent: does it arrive whole?

What is shipped is loaded once in this process as a worker would, in classes of its own.
Arrays stay where they are. Each class is tried once: its code runs once more here.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, Final

import jax

from ._classes import arriving_at, known
from ._pickler import NotLoaded, NotShippable, Pickler, TrialUnpickler, Ways
from ._pytrees import register

if TYPE_CHECKING:
    from collections.abc import Sequence

MOST: Final = 1000
"""Of more objects the first are compared."""

tried: Final[weakref.WeakSet[type]] = weakref.WeakSet()
"""Classes that arrived whole; changed under the pickler's lock."""


def try_out(obj: object, ways: Ways) -> None:
    """Loads the object here as a worker would, in classes made for that.

    Raises:
        NotShippable: It does not arrive, or not whole.
    """
    kept: list[Any] = []
    with Pickler.session(None, ways, kept) as (pickler, stream):
        pickler.dump((obj, pickler.registrations, pickler.instances))
    stream.seek(0)
    try:
        with arriving_at(known.trusting(list(tried))):
            _, registrations, arrived = TrialUnpickler(stream, kept, ways).load()
            for registration in registrations:
                register(registration)
    except Exception as error:  # user code runs in it: `find_way` says where
        raise NotLoaded from error
    if found := difference(pickler.instances, arrived):
        raise NotShippable(*found)
    tried.update(pickler.made)


def difference(sent: Sequence[Any], arrived: Sequence[Any]) -> tuple[Any, str] | None:
    """The first object that is another pytree where it arrives, and in what.

    Args:
        sent: Objects of the user's classes.
        arrived: What became of them, in the same order.
    """
    seen: set[int] = set()
    for before, after in zip(sent[:MOST], arrived[:MOST], strict=True):
        if id(before) not in seen and (words := _differs(before, after, seen)):
            return before, words
    return None


def _differs(before: Any, after: Any, seen: set[int]) -> str:
    def note(node: Any) -> bool:
        seen.add(id(node))
        return False

    try:
        here = _leaves(before, note)
    except Exception:  # its own flatten does not take this object: no pytree here
        return ""
    try:
        there = _leaves(after)
    except Exception as error:  # it goes to the user, as a difference
        return f"it cannot be flattened there ({error})"
    if [path for path, _ in here] != [path for path, _ in there]:
        return f"it has the leaves {_paths(here)} here and {_paths(there)} there"
    for (path, one), (_, other) in zip(here, there, strict=True):
        if (one is before) != (other is after):
            return "jax knows its class as a pytree only on one side"
        if one is not before and type(one).__qualname__ != type(other).__qualname__:
            return (
                f"{path} is a {type(one).__name__} here, a {type(other).__name__} there"
            )
    return ""


def _leaves(tree: Any, note: Any = None) -> list[tuple[str, Any]]:
    found = jax.tree_util.tree_flatten_with_path(tree, is_leaf=note)[0]
    return [(jax.tree_util.keystr(path), leaf) for path, leaf in found]


def _paths(leaves: list[tuple[str, Any]]) -> str:
    names = [path or "itself" for path, _ in leaves[:8]]
    return f"{', '.join(names)}{', ...' if len(leaves) > 8 else ''}" or "(none)"
