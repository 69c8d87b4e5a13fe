"""Which small variables of a plan travel side by side (`zstrat.wire`).

The gradients of a set leave the program of a step as one array, and so does its push;
its values come as one array, of which the program gets views. (Cut in the program they
would cost a kernel each, which XLA compiles for 20 ms.)
"""

from __future__ import annotations

from itertools import accumulate, groupby
from typing import TYPE_CHECKING, Final

import jax.numpy as jnp
import numpy as np

from zstrat.variables import RESIDENT
from zstrat.wire import UpdateOp, in_sets

from .trace._plan import Sent, UpdateSet

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    import jax

    from .trace._plan import Plan

FEWEST: Final = 16
"""Variables that are worth an array of their own."""


def sent_by(plan: Plan) -> list[Sent]:
    """Returns what a step of this plan sends, in order; a set is in the place of its
    first update."""
    sets = {each.numbers[0]: each for each in _update_sets(plan)}
    taken = {number for each in sets.values() for number in each.numbers}
    return [
        sets.get(number) or Sent(update, (number,))
        for number, update in enumerate(plan.updates)
        if number in sets or number not in taken
    ]


def _update_sets(plan: Plan) -> list[Sent]:
    """Returns the sets of neighbouring gradients for one optimizer, which the server
    applies as they come."""
    changes = [
        spec.key
        for update in plan.updates
        if update.op is not UpdateOp.OPERANDS
        for spec in update.specs
    ]
    if len(changes) < FEWEST or len({*changes}) < len(changes):
        return []  # several updates of a variable keep their order
    if any(spec.ps == RESIDENT for spec in plan.reads):
        return []  # a window is compiled in two parts
    found: list[Sent] = []
    numbers = range(len(plan.updates))
    # A step may train several trees with one optimizer: each has its own operands.
    trees = list(accumulate([x.op is UpdateOp.OPERANDS for x in plan.updates]))
    runs = groupby(numbers, lambda n: (plan.updates[n].optimizer, trees[n]))
    for (optimizer, _), run in runs:
        if not optimizer:
            continue
        kinds: dict[Hashable, list[int]] = {}
        for number in run:
            update, rule = plan.updates[number], plan.targets[number][1]
            spec = update.spec
            if (
                update.op is UpdateOp.OPTIMIZE
                and update.table is None
                and update.call is None
                and spec.ps >= 0
                and rule is not None
                and rule.rounds is None
                and rule.wire is None
            ):
                gradient = update.operands[0]
                kind = spec.ps, spec.dtype, gradient.dtype.name
                kinds.setdefault(kind, []).append(number)
        for alike in kinds.values():
            sizes = [plan.updates[number].spec.nbytes for number in alike]
            for places in in_sets(sizes, FEWEST):
                some = tuple([alike[place] for place in places])
                specs = [plan.updates[number].spec for number in some]
                keys = np.array([spec.key for spec in specs], np.int64)
                found.append(Sent(UpdateSet(specs[0], optimizer, keys), some))
    return found


def read_sets(plan: Plan) -> list[list[int]]:
    """Returns the sets that a step of this plan reads, as places in ``plan.reads``:
    those that it updates, whose values servers keep side by side, and others."""
    at = {spec.key: place for place, spec in enumerate(plan.reads)}
    sets = [
        [at.get(key, -1) for key in update.keys.tolist()]
        for update, _ in plan.sent
        if isinstance(update, UpdateSet)
    ]
    found = [places for places in sets if -1 not in places]
    taken = {place for places in found for place in places}
    kinds: dict[Hashable, list[int]] = {}
    for place, spec in enumerate(plan.reads):
        if place not in taken and spec.ps >= 0 and spec.buckets is None:
            kinds.setdefault((spec.ps, spec.dtype), []).append(place)
    for alike in kinds.values():
        sizes = [plan.reads[place].nbytes for place in alike]
        found += [[alike[at] for at in some] for some in in_sets(sizes, FEWEST)]
    return found


def side_by_side(arrays: Sequence[jax.Array]) -> jax.Array:
    """Returns the elements of arrays as one array ``[elements]``, inside of a
    program."""
    return jnp.concatenate([array.reshape(-1) for array in arrays])
