"""Arguments and elements of 64 bits that a step computes with 32: said once.

Ids and indices of rows that do not fit are refused (`_narrow`). Whatever else a step is
given jax cuts in silence: integers keep their lower half, floats are rounded.

Law of the file: integers are looked at in every step until one was cut, because numbers
grow; floats in the first step of a program alone, because those of a kind are alike.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.tree_util import keystr, tree_flatten_with_path

from zstrat.variables import NarrowingWarning, is_cut, outside, what_is_lost

from ._signature import places as places_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ._iterator import Element
    from ._plan import Plan
    from ._signature import CutCall


class Watch:
    """The leaves of one program that jax cuts, by number, as long as nothing was said
    of them.

    ``said`` are places of which it was said, by any program of the function.
    """

    __slots__ = ("_limits", "_once", "_places", "_said", "_step")

    def __init__(
        self, step: str, places: dict[int, str], dtypes: dict[int, Any], said: set[str]
    ) -> None:
        self._step = step
        self._places = places
        self._said = said
        self._limits: dict[int, tuple[int, int]] = {}
        for number, dtype in dtypes.items():
            if dtype.kind in "iu":
                fit = np.iinfo(jax.dtypes.canonicalize_dtype(dtype))
                self._limits[number] = int(fit.min), int(fit.max)
        self._once = [number for number in dtypes if number not in self._limits]

    def look(self, leaves: Sequence[Any]) -> None:
        """Looks at the leaves of one step. Cost: a pass over each integer one.

        Warns:
            NarrowingWarning: One of them loses bits; names its place.
        """
        once, self._once = self._once, []
        for number in once:
            self._tell(number, leaves[number])
        for number, (low, high) in tuple(self._limits.items()):
            leaf = leaves[number]
            if not leaf.size or (low <= leaf.min() and leaf.max() <= high):
                continue
            self._limits.pop(number, None)
            self._tell(number, leaf)

    def _tell(self, number: int, leaf: Any) -> None:
        place = self._places[number]
        if place in self._said or (lost := what_is_lost(leaf)) is None:
            return
        self._said.add(place)
        tell(f"{place} of the step function {self._step!r}", leaf, lost)


def watch(
    plan: Plan, call: CutCall, elements: Sequence[Element], said: set[str]
) -> Watch | None:
    """Who looks at the leaves of a program; None if there is nothing to look at.

    ``elements`` are those that the plan draws.
    """
    leaves = [*call.inputs, *(leaf for each in elements for leaf in each.leaves)]
    cut = {number for number, leaf in enumerate(leaves) if is_cut(leaf)}
    cut -= plan.narrowed.keys() | plan.taken
    if not cut:
        return None
    names = _in_words(plan, call, elements)
    places = {number: names[number] for number in sorted(cut)}
    dtypes = {number: leaves[number].dtype for number in places}
    return Watch(plan.function, places, dtypes, said)


def tell_of_arguments(
    step: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], said: set[str]
) -> None:
    """The same of the arguments of an eager step.

    Warns:
        NarrowingWarning: One of them loses bits; names its place.
    """
    for place, leaf in places_of(args, kwargs):
        if place in said or (lost := what_is_lost(leaf)) is None:
            continue
        said.add(place)
        tell(f"{place} of the step function {step!r}", leaf, lost)


def tell(place: str, leaf: Any, lost: str) -> None:
    """Says that a leaf loses bits.

    Warns:
        NarrowingWarning: Always.
    """
    warnings.warn(words(place, leaf, lost), NarrowingWarning, stacklevel=outside())


def words(place: str, leaf: Any, lost: str) -> str:
    """What is said of a leaf that loses bits."""
    narrow = jax.dtypes.canonicalize_dtype(leaf.dtype)
    cure = "make it fit where it is made (hash it in the dataset, say)"
    if leaf.dtype.kind not in "iu":
        cure = f'give it as .astype("{narrow}")'
    return (
        f"{place} has dtype {leaf.dtype}, and jax computes with {narrow}: {lost}. "
        f"{cure[0].upper()}{cure[1:]}, or switch on jax_enable_x64 "
        "(JAX_ENABLE_X64=1, on the workers, too)"
    )


def _in_words(plan: Plan, call: CutCall, elements: Sequence[Element]) -> list[str]:
    """The places of inputs and leaves of elements, in words."""
    args, kwargs = call.treedef.unflatten(call.leaves)
    named = iter(places_of(args, kwargs))
    # Inputs are some of the leaves, in the same order.
    found = [next(p for p, leaf in named if leaf is each) for each in call.inputs]
    for number, (element, ordinal) in enumerate(zip(elements, plan.draws, strict=True)):
        whole = element.treedef.unflatten(element.leaves)
        found += [
            f"element {number}{keystr(path)} of {call.iterators[ordinal].name}, drawn "
            "by a step"
            for path, _ in tree_flatten_with_path(whole)[0]
        ]
    return found
