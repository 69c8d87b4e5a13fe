"""Tables of any id, as peers of a parameter server ask for them."""

import numpy as np
import optax
import pytest
from ps_callers import SESSION, Gated, caller
from ps_rounds import close, contribute, members
from ps_tables import (
    TALL,
    WIDTH,
    creation,
    entry,
    first_rows,
    in_order,
    load,
)
from ps_trees import binding, message

from zstrat.errors import InvalidArgumentError, PermissionDeniedError
from zstrat.wire import (
    AskTables,
    CreateOptimizer,
    CreateVariables,
    Done,
    Exchange,
    Exchanged,
    Job,
    Pull,
    Pulled,
    PullRows,
    PullTable,
    Push,
    Pushed,
    Read,
    TableSizes,
    Update,
    UpdateOp,
    VariableEntry,
)

ROWS, REMOVE = int(UpdateOp.OPTIMIZE_ROWS), int(UpdateOp.REMOVE_ROWS)


@pytest.fixture
async def ps():
    gated = Gated()
    gated.load = load
    gated.service._store.engine.load_code = load
    assert await gated.answer(creation(SESSION, entry(1))) == Done()
    assert await gated.answer(CreateOptimizer(SESSION, 1, "sgd", b"sgd")) == Done()
    told = binding(optax.sgd(0.1), {"w": ((1,), (TALL, WIDTH), "f4")})
    assert await gated.answer(message(SESSION, 1, told)) == Done()
    yield gated
    await gated.service.drain()


async def test_a_step_of_a_worker_on_a_table(ps):
    worker, ids = caller(Job.WORKER, 11), in_order([7, -7, 2**62])
    ones = np.ones((3, WIDTH), "f4")
    asked = PullRows(SESSION, [], [1], (ids,))
    pulled = await ps.answer(asked, worker)
    np.testing.assert_array_equal(pulled.arrays[0], first_rows(ids))
    both = Exchange(
        SESSION, 0, 0, 0, [Update(1, ROWS, 1, 2)], [], [1], (ids, ones, ids)
    )
    answer = await ps.answer(both, worker)
    assert isinstance(answer, Exchanged)
    assert (answer.applied, answer.push_error, answer.pull_error) == (True, None, None)
    np.testing.assert_allclose(answer.arrays[0], first_rows(ids) - 0.1, rtol=1e-6)
    again = await ps.answer(both, worker)  # it was applied
    assert not again.applied
    np.testing.assert_array_equal(again.arrays[0], answer.arrays[0])


async def test_rows_are_counted_listed_and_removed(ps):
    ids = in_order(range(5000))  # on the thread
    push = Push(
        SESSION, -1, 0, 0, [Update(1, ROWS, 1, 2)], (ids, np.ones((5000, WIDTH), "f4"))
    )
    assert await ps.answer(push) == Pushed(True, [1], 1)
    drop = Push(SESSION, -1, 0, 0, [Update(1, REMOVE, 0, 1)], (np.arange(4000),))
    assert await ps.answer(drop) == Pushed(True, [2], 2)
    sizes = await ps.answer(AskTables(SESSION, [1]), caller(Job.EVALUATOR, 12))
    assert isinstance(sizes, TableSizes)
    assert (sizes.rows, sizes.births, sizes.removed) == ([1000], [5000], [4000])
    found = await ps.answer(PullTable(SESSION, 1, 0, 4096))
    assert isinstance(found, Pulled)
    assert sorted(found.arrays[0].tolist()) == list(range(4000, 5000))
    wanted = first_rows(found.arrays[0]) - np.float32(0.1)
    np.testing.assert_array_equal(found.arrays[1], wanted)


async def test_a_round_merges_gradients_by_id(ps):
    rng, total, weights = np.random.default_rng(0), {}, (1.0, 3.0, 2.0)
    some = in_order([5, -5, 9]), in_order([9, 2**62, 5]), in_order([])
    worker = caller(Job.WORKER, 11)
    for step, (ids, weight) in enumerate(zip(some, weights, strict=True)):
        rows = rng.normal(size=(len(ids), WIDTH)).astype("f4")
        asked = contribute(step, {1: (ids, rows)})
        assert await ps.answer(asked, worker) == Done()
        for number, row in zip(ids.tolist(), rows, strict=True):
            total[number] = total.get(number, 0.0) + weight * row
    ids = in_order(list(total))
    named = members(*enumerate(weights))
    assert await ps.answer(close(0, named)) == Done()
    found = await ps.answer(PullRows(SESSION, [], [1], (ids,)))
    mean = np.array([total[number] / 6 for number in ids.tolist()])
    wanted = first_rows(ids) - 0.1 * mean
    np.testing.assert_allclose(found.arrays[0], wanted, rtol=1e-5, atol=1e-6)
    (sizes,) = (await ps.answer(AskTables(SESSION, [1]))).rows
    assert sizes == 4
    whole = contribute(7, {1: np.ones((4, WIDTH), "f4")})
    wrong = contribute(8, {1: (ids[::-1], np.ones((4, WIDTH), "f4"))})
    for asked in whole, wrong:
        with pytest.raises(InvalidArgumentError, match="'t1'"):
            await ps.answer(asked, worker)


async def test_what_is_refused(ps):
    with pytest.raises(PermissionDeniedError):
        await ps.answer(creation(SESSION, entry(2)), caller(Job.WORKER, 11))
    with pytest.raises(InvalidArgumentError, match="'t1'"):
        await ps.answer(Pull(SESSION, [Read(1, -1)]))
    value = (np.zeros((4, 2), "f4"),)
    created = CreateVariables(SESSION, [VariableEntry(9, "w", True, False)], value)
    assert await ps.answer(created) == Done()
    with pytest.raises(InvalidArgumentError, match="'w'"):
        await ps.answer(AskTables(SESSION, [1, 9]))
