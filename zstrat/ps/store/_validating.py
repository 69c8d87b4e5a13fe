"""Whether a push fits the variables that it names: the plan of it, or words.

Touches nothing: what is refused here has changed nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from zstrat.errors import InvalidArgumentError, NotFoundError
from zstrat.ps.engine._arithmetic import OPTIMIZERS, check
from zstrat.wire import Push, UpdateOp

from ._plans import PushPlan, ServerUpdate, runs_of, work_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np

    from zstrat.ps.engine._engine import OptimizerEngine
    from zstrat.ps.engine._slots import HeldVariable

_OPS: Final[dict[int, UpdateOp]] = {int(op): op for op in UpdateOp}


def push_plan(
    push: Push,
    variables: Mapping[int, HeldVariable],
    engine: OptimizerEngine,
    task: str,
    generation: int,
) -> PushPlan:
    """
    Raises:
        NotFoundError: A variable or optimizer does not exist.
        InvalidArgumentError: An update does not fit its variable.
    """
    arrays, at, work = push.arrays, 0, 0
    planned: list[ServerUpdate] = []
    shared: dict[int, Sequence[np.ndarray]] = {}
    for key, code, optimizer, count in push.updates:
        held = variables.get(key)
        if held is None:
            raise unknown(task, key, len(variables))
        op = _OPS.get(code)
        if op is None or not 0 < count <= len(arrays) - at:
            raise InvalidArgumentError(
                f"{task}: an update of variable {held.entry.name!r} has the "
                f"operation {code} with {count} of {len(arrays) - at} arrays left"
            )
        operands = arrays[at : at + count]
        at += count
        if op is UpdateOp.OPERANDS:
            shared[engine.get(optimizer).optimizer] = operands
            continue
        work += work_of(op, held, operands)
        if op in OPTIMIZERS:
            known = engine.check(optimizer, op, held, operands, shared.get(optimizer))
            planned.append(ServerUpdate(held, op, operands, known))
        else:
            _check_plain(optimizer, op, held, operands)
            planned.append(ServerUpdate(held, op, operands))
    if at != len(arrays):
        raise InvalidArgumentError(
            f"{task}: a push has {len(arrays)} arrays, its updates take {at}"
        )
    return PushPlan(generation, push, planned, work, runs_of(planned))


def unknown(task: str, key: int, others: int) -> NotFoundError:
    """The words for a key that no variable has."""
    return NotFoundError(
        f"{task} holds no variable with key {key} (but {others} "
        "others): it was deleted, or created in another session"
    )


def _check_plain(
    optimizer: int, op: UpdateOp, held: HeldVariable, operands: Sequence[np.ndarray]
) -> None:
    name = held.entry.name
    if optimizer:
        raise InvalidArgumentError(
            f"variable {name!r}: {op.name} takes no optimizer, got {optimizer}"
        )
    check(op, operands, held.cell.shape, held.cell.dtype, name)
