"""Findings of a pass: one value of all elements, or what the first looks like.

Both passes are closed here, whatever comes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from zstrat.errors import OutOfRangeError

from ._elements import ending
from ._passes import Derived
from ._shuffle import Shuffled
from ._spec import kept, lost, spec_of
from ._tree import as_element, leaves, owned, with_leaves

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ._leaves import Element
    from ._passes import Recipe
    from ._spec import Spec


def folded(
    elements: Iterator[Element],
    initial: Any,
    function: Callable[[Any, Any], Any],
) -> Element:
    """Reduces the elements to one state by ``function``, and returns the last state.

    Raises:
        TypeError: The state became something else; says after which element.
    """
    state = first = owned(initial)
    wanted = {path: _dtype(leaf) for path, leaf in leaves(first)}
    with ending(elements):
        for number, element in enumerate(elements):
            state = _alike(owned(function(state, element)), first, wanted, number)
    return state


def _alike(
    state: Element, first: Element, wanted: dict[str, Any], number: int
) -> Element:
    """Returns the state in the dtypes of the first one, which are ``wanted``."""
    found = dict(leaves(state))
    if found.keys() != wanted.keys():
        raise TypeError(
            f"`reduce_func` returned another structure than `initial_state` has, at "
            f"element {number}: {spec_of(state)!r}, after {spec_of(first)!r}"
        )
    cast = {p: _cast(leaf, wanted[p], p, number) for p, leaf in found.items()}
    if all(cast[path] is leaf for path, leaf in found.items()):
        return state
    return with_leaves(state, cast.values())


def _cast(leaf: Any, dtype: Any, path: str, number: int) -> Any:
    kind = _dtype(leaf)
    if kind == dtype:
        return leaf
    cast = None
    if kind.kind == dtype.kind or np.can_cast(kind, dtype, "same_kind"):
        cast = kept(np.asarray(leaf), dtype)
    if cast is None:
        raise TypeError(
            f"`reduce_func` returned {kind} at element {number}, where `initial_state` "
            f"has {dtype}{f' (component {path})' if path else ''}, "
            f"{lost(kind, dtype)}: begin with a value of {kind}, or convert the result"
        )
    return cast[()]


def _dtype(leaf: Any) -> Any:
    dtype = np.asarray(leaf).dtype
    return np.dtype(dtype.kind) if dtype.kind in "US" else dtype


def looked_at(recipe: Recipe) -> Spec:
    """Returns the spec of the dataset's first element, drawn from a separate pass
    that does not change the order of later passes.

    Raises:
        OutOfRangeError: There is no element.
    """
    with ending(_unshuffled(recipe.apart()).begun().elements()) as elements:
        for element in elements:
            return spec_of(as_element(element))
    raise OutOfRangeError(
        "End of sequence: the dataset has no element whose spec could be looked at"
    )


def _unshuffled(recipe: Recipe) -> Recipe:
    """Returns the recipe without its shuffles, which would fill their buffers for one
    element."""
    while isinstance(recipe, Shuffled):
        recipe = recipe.source
    if isinstance(recipe, Derived):
        return recipe.of(_unshuffled(recipe.source))
    return recipe
