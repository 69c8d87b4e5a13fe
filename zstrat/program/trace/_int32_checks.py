"""Checks of 64-bit inputs of steps while jax computes with 32 bits.

jax without ``jax_enable_x64`` silently downcasts arguments and elements: it keeps the
lower half of integers, and rounds floats. The remaining number may be the id of another
row. So inputs from which ids of lookups or indices of updates are computed are checked
before a step runs, and refused if they do not fit. Ids that are inputs themselves
(`zstrat.program.lookup._rows_program`) keep their 64 bits, and are compared with the
table; ids of hash tables keep theirs also after computations of the step (`_wide`). Any
other downcast that changes a number is warned about once.

Law of the file: nothing else is refused; a batch may have hashes of 64 bits that are
not ids. Integers are checked in every step until one was downcast, because numbers
grow; floats only in the first step of a program, because floats of one input are alike.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
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
from ._wide import wide_leaves_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ._iterator import Element
    from ._plan import Plan
    from ._signature import CutCall


def wide_leaves(
    call: CutCall, gaps: Sequence[int], elements: Sequence[Element]
) -> dict[int, str]:
    """Finds the leaves of inputs and elements that are integers which jax would
    downcast.

    Returns a description of where each such leaf is, for messages, by number of the
    leaf. ``gaps`` are the indices of the arguments' leaves that are inputs.
    """
    leaves = [*call.inputs, *(leaf for each in elements for leaf in each.leaves)]
    wide = [number for number, leaf in enumerate(leaves) if is_integer_downcast(leaf)]
    if not wide:
        return {}
    named = places_of(*call.treedef.unflatten(call.leaves))
    places = [named[gap][0] for gap in gaps]
    for number, element in enumerate(elements):
        whole = element.treedef.unflatten(element.leaves)
        places += [
            f"element {number}{keystr(path)} of the step"
            for path, _ in joined.flatten_with_path(whole)[0]
        ]
    return {number: places[number] for number in wide}


def downcast_leaves(plan: Plan, closed: Any, wide: Mapping[int, str]) -> dict[int, str]:
    """Selects from ``wide`` the leaves from which a program computes ids or indices of
    rows.

    The last outputs of the program are operands of the plan's updates, and ids of its
    lookups.
    """
    if not wide:
        return {}
    flow = Flow(closed)
    first = flow.outputs - len(plan.lookups)
    # Ids of hashed tables keep 64 bits; see `_wide`.
    ids = [n for n, x in enumerate(plan.lookups, first) if not x.table.is_hashed]
    # Ids that are inputs themselves keep 64 bits, and the host compares them with the
    # table.
    taken = _taken(plan, flow)
    computed = flow.inputs_of(
        [
            n
            for n in (*ids, *_indices(plan, first, hashed=False))
            if (source := flow.input_at_origin(n)) is None or source not in taken
        ]
    )
    # Rows that the program itself reads or updates are not among its outputs.
    computed |= flow.inputs_of_marked(_MARK)
    return {number: place for number, place in wide.items() if computed >> number & 1}


def checked_plan(plan: Plan, closed: Any, wide: Mapping[int, str]) -> Plan:
    """Returns the plan with its 64-bit leaves entered: those that must fit 32 bits,
    those that are ids of lookups themselves, and those from which ids of hash tables
    are computed, which keep their bits."""
    first = len(closed.jaxpr.outvars) - len(plan.lookups)
    hashed = [n for n, x in enumerate(plan.lookups, first) if x.table.is_hashed]
    indices = _indices(plan, first, hashed=True)  # looked up: the host has them
    # All that leaves the process otherwise has the dtypes of the trace.
    others = [n for n in range(first) if n not in indices]
    leaves = wide_leaves_of(closed, hashed, others, wide)
    fitting = downcast_leaves(plan, closed, wide)
    for number, where in leaves.narrowed.items():
        fitting[number] = f"{wide[number]} ({where})"
    taken = _taken(plan, Flow(closed)) | leaves.used
    return replace(
        plan,
        downcast_leaves=fitting,
        taken=taken - leaves.returned,
        wide=leaves.used,
    )


def _indices(plan: Plan, stop: int, *, hashed: bool) -> set[int]:
    """Returns the outputs that are the indices of updated rows of tables. The operands
    of updates are the last outputs before number ``stop``."""
    at, found = stop - sum(len(update.operands) for update in plan.updates), set()
    for update in plan.updates:
        if update.table is not None and update.table.is_hashed == hashed:
            found.add(at)
        at += len(update.operands)
    return found


def _taken(plan: Plan, flow: Flow) -> frozenset[int]:
    # The host checks these.
    ids = range(flow.outputs - len(plan.lookups), flow.outputs)
    sources = [flow.input_at_origin(number) for number in ids]
    return frozenset(source for source in sources if source is not None)


def require_fitting(
    step: str, leaves: Sequence[Any], downcast_leaves: Mapping[int, str]
) -> None:
    """Refuses leaves that do not fit 32 bits. Cost: one pass over each leaf.

    Raises:
        ValueError: A leaf does not fit; names the leaf and the value.
    """
    for number, place in downcast_leaves.items():
        leaf = np.asarray(leaves[number])
        if fits(leaf):
            continue
        raise ValueError(
            f"{place} of the step function {step!r} contains {misfit(leaf)}, and the "
            f"step computes ids of rows from it. jax would downcast {leaf.dtype} to "
            "32 bits and use another row: make it fit before (hash it, or take its "
            "remainder, in the dataset), pass ids of lookups on parameter servers "
            "without computing with them, or those of a zs.HashTable without loops and "
            "branches of jax.lax (write jnp.where in place of cond, and jax.vmap or a "
            "loop of Python in place of scan and while_loop) and callbacks, or switch "
            "on jax_enable_x64 in this program and on the workers (JAX_ENABLE_X64=1)"
        )


def fits(leaf: Any) -> bool:
    """Returns whether a downcast by jax keeps all integers of an array; True for any
    other leaf. Cost: a pass over integers of 64 bits."""
    if not is_integer_downcast(leaf) or not leaf.size:
        return True
    fit = np.iinfo(jax.dtypes.canonicalize_dtype(leaf.dtype))
    return bool(fit.min <= int(leaf.min()) and int(leaf.max()) <= fit.max)


def uncut(leaf: Any) -> jax.Array:
    """Converts an array whose values are known during a trace to a jax array.

    Raises:
        ValueError: A value does not fit 32 bits.
    """
    if fits(leaf):
        return jnp.asarray(leaf)
    raise ValueError(
        f"an argument of strategy.run contains {misfit(np.asarray(leaf))}. jax would "
        f"downcast {leaf.dtype} to 32 bits and compute with another number: make it "
        "fit before (hash it in the dataset), or switch on jax_enable_x64"
    )


def misfit(leaf: np.ndarray) -> int:
    """Returns the first integer of an array that a downcast by jax changes."""
    fit = np.iinfo(jax.dtypes.canonicalize_dtype(leaf.dtype))
    return int(leaf[(leaf < fit.min) | (leaf > fit.max)].flat[0])


def is_integer_downcast(leaf: Any) -> bool:
    """Returns whether this is an array of integers that jax would downcast."""
    return is_downcast(leaf) and leaf.dtype.kind in "iu"


class DowncastCheck:
    """Checks the leaves of one program that jax downcasts, until it has warned of each
    of them.

    ``warned`` has the warnings of all programs of the function, by leaf and dtype.
    """

    __slots__ = ("_limits", "_once", "_places", "_step", "_warned")

    def __init__(
        self,
        step: str,
        places: dict[int, str],
        dtypes: dict[int, Any],
        warned: set[str],
    ) -> None:
        self._step = step
        self._places = places
        self._warned = warned
        self._limits: dict[int, tuple[int, int]] = {}
        for number, dtype in dtypes.items():
            if dtype.kind in "iu":
                fit = np.iinfo(jax.dtypes.canonicalize_dtype(dtype))
                self._limits[number] = int(fit.min), int(fit.max)
        self._once = [number for number in dtypes if number not in self._limits]

    def check(self, leaves: Sequence[Any]) -> None:
        """Checks the leaves of one step, or only those of its arguments, which come
        first. Cost: a pass over each leaf of integers.

        Warns:
            DowncastWarning: A downcast changes a leaf; names the leaf.
        """
        count = len(leaves)
        once = [number for number in self._once if number < count]
        self._once = [number for number in self._once if number >= count]
        for number in once:
            self._warn(number, leaves[number])
        for number, (low, high) in tuple(self._limits.items()):
            if number >= count:
                continue
            leaf = leaves[number]
            if not leaf.size or (low <= leaf.min() and leaf.max() <= high):
                continue
            # Warned of once; later steps save this pass.
            self._limits.pop(number, None)
            self._warn(number, leaf)

    def _warn(self, number: int, leaf: Any) -> None:
        place = self._places[number]
        key = _key(place, leaf)
        if key in self._warned or (lost := downcast_loss(leaf)) is None:
            return
        self._warned.add(key)
        warn_of_downcast(f"{place} of the step function {self._step!r}", leaf, lost)


def downcast_check(
    plan: Plan, call: CutCall, elements: Sequence[Element], warned: set[str]
) -> DowncastCheck | None:
    """Makes the check of a program; None if jax downcasts none of its leaves.

    ``elements`` are the elements that the plan draws.
    """
    leaves = [*call.inputs, *(leaf for element in elements for leaf in element.leaves)]
    cut = {number for number, leaf in enumerate(leaves) if is_downcast(leaf)}
    # Those are refused, or keep their bits, so there is nothing to warn of.
    cut -= plan.downcast_leaves.keys() | plan.taken
    if not cut:
        return None
    names = _places_of(plan, call, elements)
    places = {number: names[number] for number in sorted(cut)}
    dtypes = {number: leaves[number].dtype for number in places}
    return DowncastCheck(plan.function, places, dtypes, warned)


def warn_of_arguments(
    step: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], warned: set[str]
) -> None:
    """Warns of arguments of an eager step that a downcast changes.

    Warns:
        DowncastWarning: A downcast changes an argument; names it.
    """
    for place, leaf in places_of(args, kwargs):
        key = _key(place, leaf)
        if key in warned or (lost := downcast_loss(leaf)) is None:
            continue
        warned.add(key)
        warn_of_downcast(f"{place} of the step function {step!r}", leaf, lost)


def _key(place: str, leaf: Any) -> str:
    return f"{place}: {getattr(leaf, 'dtype', None)}"


def warn_of_downcast(place: str, leaf: Any, lost: str) -> None:
    """Warns that a downcast changes a leaf.

    Warns:
        DowncastWarning: Always.
    """
    warnings.warn(
        downcast_message(place, leaf, lost),
        DowncastWarning,
        stacklevel=user_stacklevel(),
    )


def downcast_message(place: str, leaf: Any, lost: str) -> str:
    """Describes a leaf that a downcast changes, and the remedy."""
    kept = jax.dtypes.canonicalize_dtype(leaf.dtype)
    cure = "make it fit where it is made (hash it in the dataset, say)"
    if leaf.dtype.kind not in "iu":
        cure = f'give it as .astype("{kept}")'
    return (
        f"{place} has dtype {leaf.dtype}, and jax computes with {kept}: {lost}. "
        f"{cure[0].upper()}{cure[1:]}, or switch on jax_enable_x64 "
        "(JAX_ENABLE_X64=1, on the workers, too)"
    )


def _places_of(plan: Plan, call: CutCall, elements: Sequence[Element]) -> list[str]:
    """Returns a description of where each input and each leaf of an element is, for
    messages."""
    args, kwargs = call.treedef.unflatten(call.leaves)
    named = iter(places_of(args, kwargs))
    # Inputs are some of the leaves, in the same order.
    places = [next(p for p, leaf in named if leaf is taken) for taken in call.inputs]
    for number, (element, ordinal) in enumerate(zip(elements, plan.draws, strict=True)):
        whole = element.treedef.unflatten(element.leaves)
        places += [
            f"element {number}{keystr(path)} of {call.iterators[ordinal].name}, drawn "
            "by a step"
            for path, _ in tree_flatten_with_path(whole)[0]
        ]
    return places
