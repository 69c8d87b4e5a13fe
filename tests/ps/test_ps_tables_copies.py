"""Whatever happens to the server of a table, the one that serves it next has it bit for
bit: ids, rows, slots, and what is born next."""

import asyncio

import numpy as np
import pytest
from ps_callers import SESSION
from ps_copies import Copies
from ps_successors import CODES, successors
from ps_tables import UNIFORM, beginning, content, eviction, timing, training

from zstrat.wire import (
    AttachBackup,
    Done,
    EvictionRule,
    PullRows,
    PullTable,
    Pushed,
    UpdateOp,
)

ROWS, REMOVE = int(UpdateOp.OPTIMIZE_ROWS), int(UpdateOp.REMOVE_ROWS)


def assert_same(store, other):
    one, two = content(store), content(other)
    assert one.keys() == two.keys()
    for name, array in one.items():
        np.testing.assert_array_equal(array, two[name], err_msg=name)


RULES = {"gradients": 2, "chance": 0.9, "tracks": True, "follows": True}
SKETCH = {"gradients": 2, "tracks": True, "sketch": 64}


@pytest.mark.parametrize(
    ("optimizer", "rules"),
    [("adam", {}), ("momentum", {}), ("adam", RULES), ("adam", SKETCH)],
)
async def test_a_backup_has_the_table_of_its_primary(optimizer, rules):
    copies, rng = Copies(), np.random.default_rng(3)
    copies.shipped[b"-1 1"] = UNIFORM
    for asked in beginning(optimizer, **rules):
        assert await copies.ask(asked) == Done()
    for number in range(4):
        await copies.ask(training(rng, number, removes=number == 2))
    attach = AttachBackup(SESSION, 1, "nowhere:1", copies.incarnation)
    attaching = asyncio.ensure_future(copies.ask(attach))
    for number in range(4, 8):  # while it is filled
        await copies.ask(training(rng, number, removes=number % 2 == 0))
    assert await attaching == Done()
    for number in range(8, 12):
        pushed = await copies.ask(training(rng, number, removes=number % 2 == 0))
        assert isinstance(pushed, Pushed)
        await copies.ask(eviction(number, EvictionRule.NORM, 1.0, 0, 900))
        if rules:
            await copies.ask(eviction(number + 50, EvictionRule.RECENT, 60))
            await copies.ask(eviction(number + 90, EvictionRule.WAITING, 30))
            await copies.ask(timing(number + 130, 10.0 * number, 15.0))
            aged = eviction(number + 170, EvictionRule.AGE, 10.0 * number - 15.0)
            await copies.ask(aged)
    unknown = np.arange(10**6, 10**6 + 5)
    asked = PullTable(SESSION, 1, 0, 4096), PullRows(SESSION, [], [1], (unknown,))
    wanted = [await copies.ask(each) for each in asked]
    await copies.promote()
    assert_same(copies.primary._store, copies.backup._store)
    for each, before in zip(asked, wanted, strict=True):
        answer = await copies.ask(each, copies.backup)
        for one, two in zip(before.arrays, answer.arrays, strict=True):
            np.testing.assert_array_equal(one, two)
    await copies.close()


async def test_a_backup_has_a_table_that_is_created_later():
    copies, rng = Copies(), np.random.default_rng(3)
    copies.shipped[b"-1 1"] = UNIFORM
    await copies.attach()
    for asked in [*beginning(), *(training(rng, n, removes=True) for n in range(3))]:
        await copies.ask(asked)
    await copies.promote()
    assert_same(copies.primary._store, copies.backup._store)
    await copies.close()


@pytest.mark.parametrize("rules", [{}, RULES, SKETCH])
async def test_the_next_process_has_the_table(tmp_path, monkeypatch, rules):
    monkeypatch.setitem(CODES, b"-1 1", UNIFORM)
    rng = np.random.default_rng(3)
    async with successors(tmp_path) as here:
        for asked in beginning(**rules):
            assert await here.answer(asked) == Done()
        twins = [training(rng, n, removes=n == 1) for n in range(6)]
        for push in twins[:3]:
            await here.answer(push)
        before = content(here.service._store)
        await here.hand_over()
        after = content(here.service._store)
        for name, array in before.items():
            np.testing.assert_array_equal(array, after[name], err_msg=name)
        for push in twins[3:]:
            assert (await here.answer(push)).applied
        copies = Copies()  # one that was never interrupted
        copies.shipped[b"-1 1"] = UNIFORM
        for asked in [*beginning(**rules), *twins]:
            await copies.ask(asked)
        assert_same(copies.primary._store, here.service._store)
        await copies.close()
