"""Numbers of 64 bits in a program of 32: what has to fit is refused, all else is said.

jax without ``jax_enable_x64`` cuts in silence whatever a step is given, arguments and
elements: of integers it takes the lower half, floats are rounded. A row of the number
that is left may be there. So whatever ids of lookups and indices of updates depend on
is looked at before a step runs, and what does not fit is refused. Ids that are taken as
they are (`zstrat.program.lookup._rows_program`) keep their 64 bits and are compared
with the table. Of anything else that is cut, it is said once.

Law of the file: nothing else is refused; a batch may have hashes of 64 bits that no row
is found by. Integers are looked at in every step until one was cut, because numbers
grow; floats in the first step of a program alone, because those of a kind are alike.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr, tree_flatten_with_path

from zstrat.variables import (
    DowncastWarning,
    downcast_loss,
    is_downcast,
    user_stacklevel,
)

from . import joined
from ._flow import _MARK, Flow
from ._signature import places as places_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ._iterator import Element
    from ._plan import Plan
    from ._signature import CutCall


def wide_leaves(
    call: CutCall, gaps: Sequence[int], elements: Sequence[Element]
) -> dict[int, str]:
    """The leaves of inputs and elements, by number, that jax would take for integers of
    fewer bits, with their places in words. ``gaps`` are the leaves that are inputs."""
    leaves = [*call.inputs, *(leaf for each in elements for leaf in each.leaves)]
    found = [number for number, leaf in enumerate(leaves) if is_integer_downcast(leaf)]
    if not found:
        return {}
    args, kwargs = call.treedef.unflatten(call.leaves)
    paths = [
        f"{root}{keystr(path)}"
        for root, tree in (("args", args), ("kwargs", kwargs))
        for path, _ in joined.flatten_with_path(tree)[0]
    ]
    places = [paths[gap] for gap in gaps]
    for number, element in enumerate(elements):
        whole = element.treedef.unflatten(element.leaves)
        places += [
            f"element {number}{keystr(path)} of the step"
            for path, _ in joined.flatten_with_path(whole)[0]
        ]
    return {number: places[number] for number in found}


def downcast_leaves(plan: Plan, closed: Any, wide: Mapping[int, str]) -> dict[int, str]:
    """Those of these leaves of which ids or indices of rows are computed in a program,
    whose last outputs are operands of the plan's updates and ids of its lookups."""
    if not wide:
        return {}
    flow = Flow(closed)
    ids = list(range(flow.outputs - len(plan.lookups), flow.outputs))
    at = flow.outputs - len(plan.lookups) - sum(len(x.operands) for x in plan.updates)
    indices = []
    for update in plan.updates:
        indices += [at] if update.table is not None else []
        at += len(update.operands)
    taken = _taken(plan, flow)
    computed = flow.inputs_of(
        [
            n
            for n in (*ids, *indices)
            if (source := flow.input_at_origin(n)) is None or source not in taken
        ]
    )
    computed |= flow.inputs_of_marked(_MARK)
    return {number: place for number, place in wide.items() if computed >> number & 1}


def taken_as_ids(plan: Plan, closed: Any) -> frozenset[int]:
    """The leaves of inputs and elements that are ids of lookups as they are, and so
    keep their 64 bits, of the same program."""
    return _taken(plan, Flow(closed))


def _taken(plan: Plan, flow: Flow) -> frozenset[int]:
    # They are looked at on the host.
    ids = range(flow.outputs - len(plan.lookups), flow.outputs)
    sources = [flow.input_at_origin(number) for number in ids]
    return frozenset(source for source in sources if source is not None)


def require_fitting(
    step: str, leaves: Sequence[Any], downcast_leaves: Mapping[int, str]
) -> None:
    """Refuses leaves, by number, that do not fit 32 bits. Cost: a pass over each.

    Raises:
        ValueError: Names the place and the value.
    """
    for number, place in downcast_leaves.items():
        leaf = np.asarray(leaves[number])
        if fits(leaf):
            continue
        raise ValueError(
            f"{place} of the step function {step!r} contains {_wrong(leaf)}, and ids "
            f"of rows are computed from it, where jax would take {leaf.dtype} for 32 "
            "bits and "
            "use another row: make it fit before (hash it in the dataset), give ids of "
            "lookups on parameter servers as they are, or switch on jax_enable_x64 in "
            "this program and on the workers (JAX_ENABLE_X64=1)"
        )


def fits(leaf: Any) -> bool:
    """Whether jax takes integers of numpy for what they are; all else fits. Cost: a
    pass over those that jax takes for ones of fewer bits."""
    if not is_integer_downcast(leaf) or not leaf.size:
        return True
    fit = np.iinfo(jax.dtypes.canonicalize_dtype(leaf.dtype))
    return bool(fit.min <= int(leaf.min()) and int(leaf.max()) <= fit.max)


def uncut(leaf: Any) -> jax.Array:
    """The array of jax, of one that is known while a program is traced.

    Raises:
        ValueError: It does not fit 32 bits.
    """
    if fits(leaf):
        return jnp.asarray(leaf)
    raise ValueError(
        f"an argument of strategy.run contains {_wrong(np.asarray(leaf))}, and jax "
        f"would take {leaf.dtype} for 32 bits and compute with another number: make it "
        "fit before (hash it in the dataset), or switch on jax_enable_x64"
    )


def _wrong(leaf: np.ndarray) -> int:
    fit = np.iinfo(jax.dtypes.canonicalize_dtype(leaf.dtype))
    return int(leaf[(leaf < fit.min) | (leaf > fit.max)].flat[0])


def is_integer_downcast(leaf: Any) -> bool:
    """Whether it has integers of numpy that jax takes for ones of fewer bits."""
    if not isinstance(leaf, np.ndarray | np.generic) or leaf.dtype.kind not in "iu":
        return False
    return jax.dtypes.canonicalize_dtype(leaf.dtype).itemsize < leaf.dtype.itemsize


class Watch:
    """The leaves of one program that jax cuts, by number, as long as nothing was said
    of them.

    ``said`` has what was said by any program of the function: the place and the dtype,
    as a float that was rounded there says nothing of an integer that does not fit.
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
        """Looks at the leaves of one step, or at the first of them: those of its
        arguments, which come before those of elements. Cost: a pass over each integer
        one.

        Warns:
            DowncastWarning: One of them loses bits; names its place.
        """
        count = len(leaves)
        once = [number for number in self._once if number < count]
        self._once = [number for number in self._once if number >= count]
        for number in once:
            self._tell(number, leaves[number])
        for number, (low, high) in tuple(self._limits.items()):
            if number >= count:
                continue
            leaf = leaves[number]
            if not leaf.size or (low <= leaf.min() and leaf.max() <= high):
                continue
            self._limits.pop(number, None)
            self._tell(number, leaf)

    def _tell(self, number: int, leaf: Any) -> None:
        place = self._places[number]
        key = _key(place, leaf)
        if key in self._said or (lost := downcast_loss(leaf)) is None:
            return
        self._said.add(key)
        tell(f"{place} of the step function {self._step!r}", leaf, lost)


def watch(
    plan: Plan, call: CutCall, elements: Sequence[Element], said: set[str]
) -> Watch | None:
    """Who looks at the leaves of a program; None if there is nothing to look at.

    ``elements`` are those that the plan draws.
    """
    leaves = [*call.inputs, *(leaf for each in elements for leaf in each.leaves)]
    cut = {number for number, leaf in enumerate(leaves) if is_downcast(leaf)}
    cut -= plan.downcast_leaves.keys() | plan.taken
    if not cut:
        return None
    names = _in_words(plan, call, elements)
    places = {number: names[number] for number in sorted(cut)}
    dtypes = {number: leaves[number].dtype for number in places}
    return Watch(plan.function, places, dtypes, said)


def tell_of_arguments(
    step: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], said: set[str]
) -> None:
    """Warns of what the arguments of an eager step lose, as `tell` does of a program's.

    Warns:
        DowncastWarning: One of them loses bits; names its place.
    """
    for place, leaf in places_of(args, kwargs):
        key = _key(place, leaf)
        if key in said or (lost := downcast_loss(leaf)) is None:
            continue
        said.add(key)
        tell(f"{place} of the step function {step!r}", leaf, lost)


def _key(place: str, leaf: Any) -> str:
    return f"{place}: {getattr(leaf, 'dtype', None)}"


def tell(place: str, leaf: Any, lost: str) -> None:
    """Says that a leaf loses bits.

    Warns:
        DowncastWarning: Always.
    """
    warnings.warn(
        words(place, leaf, lost), DowncastWarning, stacklevel=user_stacklevel()
    )


def words(place: str, leaf: Any, lost: str) -> str:
    """What is said of a leaf that loses bits."""
    kept = jax.dtypes.canonicalize_dtype(leaf.dtype)
    cure = "make it fit where it is made (hash it in the dataset, say)"
    if leaf.dtype.kind not in "iu":
        cure = f'give it as .astype("{kept}")'
    return (
        f"{place} has dtype {leaf.dtype}, and jax computes with {kept}: {lost}. "
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
