"""Gradients applied outside of steps: by this process, or by parameter servers.

Variables of this process are moved by one compiled program, while nobody else moves
them. What lives on parameter servers is sent there, each gradient to its variable, with
what the optimizer computes of several of them.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from zstrat.variables._home import (
    MovesHere,
    update_all,
    update_all_async,
)
from zstrat.wire import UpdateOp

from ._gradient_call import Binds, BindsAsync
from ._optimizer_words import require_servers
from ._tree_step import TreeStep, operands_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from zstrat.optimizers import TreeRule
    from zstrat.variables._home import Home, HomeUpdate

    from ._gradient_call import GradientCall


def apply_now(
    call: GradientCall, home: Home | None = None, *, counts: bool = False
) -> None:
    """Carries a call out.

    Args:
        home: Of all variables; None for each variable's own.
        counts: TF's ``iterations`` grows, too.
    """
    counted = _counted(call) if counts else []
    if home is None and lives_here(call):
        _move_here(call)
        update_all(counted)
        return
    updates = server_updates(call)
    for each in _homes(call, home):
        assert isinstance(each, Binds), each
        each.bind(call)
    if home is None:
        update_all([*updates, *counted])
    else:
        home.update_many([*updates, *counted])


async def apply_now_async(call: GradientCall) -> None:
    """`apply_now`, without blocking the running loop; ``iterations`` grows.

    Cancellation: some of the gradients may have been applied.
    """
    if lives_here(call):
        _move_here(call)
        update_all(_counted(call))
        return
    updates = server_updates(call)
    for each in _homes(call, None):
        assert isinstance(each, BindsAsync), each
        await each.bind_async(call)
    await update_all_async([*updates, *_counted(call)])


def lives_here(call: GradientCall) -> bool:
    """Whether this process moves all its variables.

    Raises:
        ValueError: Some are here, and some on parameter servers.
        NotImplementedError: One is a single copy of a variable.
    """
    here = []
    for variable in call.variables:
        home = variable.home
        refuse = getattr(home, "not_optimized", None)
        if refuse is not None:
            raise refuse(variable)
        here.append(isinstance(home, MovesHere))
    if any(here) and not all(here):
        first, second = (call.variables[here.index(x)] for x in (True, False))
        raise ValueError(
            f"{first.spec} lives in this process and {second.spec} elsewhere: one "
            "apply_gradients moves variables of one place. Call it for each, with an "
            "optimizer of its own"
        )
    return all(here)


def server_updates(call: GradientCall) -> list[HomeUpdate]:
    """What the variables of a call on parameter servers are sent.

    Raises:
        ValueError: The optimizer cannot do this there.
    """
    rule = call.rule(is_here=False)
    require_servers(call, rule)
    optimizer = call.optimizer
    updates: list[HomeUpdate] = []
    for _, target, sparse, arrays in call.leaves():
        mine = tuple([np.asarray(x) for x in arrays])
        if sparse:
            op = UpdateOp.OPTIMIZE_ROWS
            updates += target._row_updates(op, (mine[0], mine[1]), optimizer)
        else:
            updates += target._updates(UpdateOp.OPTIMIZE, mine[0], optimizer)
    if not rule.cut().operands:
        return updates
    shared = tuple([np.asarray(x) for x in _operands(call, rule)])
    firsts = {update[0].spec.ps: update[0] for update in reversed(updates)}
    return [
        *[(v, UpdateOp.OPERANDS, shared, optimizer) for v in firsts.values()],
        *updates,
    ]


def _operands(call: GradientCall, rule: TreeRule) -> list[Any]:
    """What the optimizer computes of several gradients, by a program made once."""
    made = call.optimizer.made.setdefault("operands", {})
    key = (id(rule), call.given, call.sparse)
    if key not in made:
        empty = call.with_arrays([None] * len(call.arrays))
        made[key] = jax.jit(lambda *x: operands_of(empty.with_arrays(x), rule))
    with rule.precision():
        found: list[Any] = made[key](*_padded(call))
    return found


def _move_here(call: GradientCall) -> None:
    step, run = _step_of(call)
    homes = [each.variable.home for each in step.components]
    mine: list[Any] = [home for home in homes if isinstance(home, MovesHere)]
    turns = {id(home.turn): home.turn for home in mine}
    with ExitStack() as stack:
        for _, turn in sorted(turns.items()):
            stack.enter_context(turn)
        pairs = list(zip(mine, step.components, strict=True))
        values = [home.value_before(each.variable.name) for home, each in pairs]
        slots = [
            [np.asarray(x) for x in home.slots_before(each.rule, each.variable.name)]
            for home, each in pairs
        ]
        moved, kept = run(values, slots, _padded(call))
        for (home, each), value, leaves in zip(pairs, moved, kept, strict=True):
            home.put_moved(each.variable, value, each.rule, leaves)


def _step_of(call: GradientCall) -> tuple[TreeStep, Any]:
    """The step and its compiled program, which is made once."""
    optimizer, tree = call.optimizer, call.rule(is_here=True)
    keys = tuple([c.spec.key for v in call.targets for c in v.components])
    made = optimizer.made.setdefault("steps", {})
    key = (id(tree), keys, call.given, call.sparse)
    if key not in made:
        empty = call.with_arrays(_padded(call))
        step = TreeStep(empty)
        empty = empty.with_arrays([None] * len(call.arrays))

        def run(values: Any, slots: Any, arrays: Sequence[Any]) -> Any:
            return step(values, slots, empty.with_arrays(arrays))

        made[key] = step, jax.jit(run)
    found: tuple[TreeStep, Any] = made[key]
    return found


def _padded(call: GradientCall) -> list[Any]:
    """The arrays of a call; rows in powers of two, so that few programs are compiled.
    What is added is no row."""
    found: list[Any] = []
    for sparse, arrays in zip(call.sparse, call.operands, strict=True):
        if not sparse:
            found += arrays
            continue
        indices, rows = arrays
        count = len(indices)
        more = (1 << max(0, count - 1).bit_length()) - count
        found.append(np.concatenate([indices, np.full(more, -1, indices.dtype)]))
        nothing = np.zeros((more, *rows.shape[1:]), rows.dtype)
        found.append(np.concatenate([rows, nothing]))
    return [*found, *call.further]


def _homes(call: GradientCall, home: Home | None) -> list[Home]:
    if home is not None:
        return [home]
    found = {id(variable.home): variable.home for variable in call.variables}
    return list(found.values())


def _counted(call: GradientCall) -> list[HomeUpdate]:
    """The update of TF's ``iterations``."""
    iterations = call.optimizer.iterations
    return [] if iterations is None else iterations._planned(UpdateOp.ADD, 1, None)
