"""Which updates of an optimizer the loop makes itself, and which the thread."""

import asyncio

import numpy as np
import optax
import pytest
from ps_callers import SESSION, Gated
from ps_trees import message, of_values

from zstrat.wire import (
    CreateOptimizer,
    CreateVariables,
    Done,
    Push,
    Pushed,
    Update,
    UpdateOp,
    VariableEntry,
)

MADE = {b"adam": optax.adam(0.1), b"norms": optax.lars(0.1)}


@pytest.mark.parametrize(
    ("code", "rows", "is_short"),
    [
        (b"adam", 300, True),
        (b"adam", 4000, False),  # 4.6 MiB, and twice as much of slots
        (b"norms", 300, False),  # what looks at all rows may compute anything
    ],
)
async def test_short_updates_are_made_at_once(code, rows, is_short):
    rig = Gated(MADE)
    value = np.ones((rows, 300), "f4")
    entry = VariableEntry(0, "v", True, False)
    assert await rig.answer(CreateVariables(SESSION, [entry], (value,))) == Done()
    assert await rig.answer(CreateOptimizer(SESSION, 1, "it", code)) == Done()
    told = message(SESSION, 1, of_values(MADE[code], {0: value}))
    assert await rig.answer(told) == Done()
    update = Update(0, int(UpdateOp.OPTIMIZE), 1, 1)
    for step in range(3):
        answer = rig.ask(Push(SESSION, step, 0, 0, [update], (value,)))
        if step:  # the first one compiles
            assert asyncio.isfuture(answer) is not is_short
        if asyncio.isfuture(answer):
            async with asyncio.timeout(60):
                answer = await answer
        assert answer == Pushed(True, [step + 1])
    assert await rig.service.drain()
