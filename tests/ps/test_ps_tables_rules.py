"""Which ids of a table are born, and which rows are evicted."""

import numpy as np
import pytest
from ps_stores import push_to
from ps_tables import (
    WIDTH,
    eviction,
    first_rows,
    in_order,
    items,
    look_up,
    push,
    step,
    store_with,
)

from zstrat.errors import InvalidArgumentError
from zstrat.ids import buckets_of, hashes_of
from zstrat.wire import EvictionRule, UpdateOp

ROWS, SET = UpdateOp.OPTIMIZE_ROWS, UpdateOp.SCATTER_UPDATE
REMOVE = UpdateOp.REMOVE_ROWS


def train(store, ids, number=-1, value=1.0):
    ids = in_order(ids)
    rows = np.full((len(ids), WIDTH), value, "f4")
    named = push((1, ROWS, ids, rows))
    return push_to(store, type(named)(7, number, 0, 0, named.updates, named.arrays))


def known(store):
    return sorted(items(store)[0].tolist())


def test_a_row_is_born_by_the_push_that_makes_the_count_full():
    store = store_with("sgd", gradients=3)
    train(store, [1, 2], number=1)
    assert not train(store, [1, 2], number=1).applied  # it comes again
    look_up(store, [1, 2, 3])
    train(store, [2, 3], number=2)
    sizes = store.table_sizes([1])
    assert (sizes.rows, sizes.waiting, sizes.refused) == ([0], [3], [4])
    np.testing.assert_array_equal(look_up(store, [2]), first_rows([2]))
    train(store, [2, 4], number=3)
    assert known(store) == [2]
    np.testing.assert_allclose(look_up(store, [2]), first_rows([2]) - 0.1, 1e-6)
    np.testing.assert_array_equal(look_up(store, [1]), first_rows([1]))
    train(store, [1, 2, 3], number=4)
    train(store, [1, 2, 3], number=5)
    assert known(store) == [1, 2, 3]
    np.testing.assert_allclose(
        look_up(store, [1, 2, 3]),
        first_rows([1, 2, 3]) - np.array([[0.1], [0.3], [0.1]]),
        rtol=1e-4,
        atol=1e-6,
    )
    sizes = store.table_sizes([1])
    assert (sizes.births, sizes.waiting) == ([3], [1])


def test_an_id_that_is_assigned_or_removed_waits_no_longer():
    store = store_with("sgd", gradients=2)
    train(store, [1, 2, 3])
    step(store, (1, SET, np.array([1]), np.ones((1, WIDTH), "f4")))
    step(store, (1, REMOVE, np.array([2])))
    assert store.table_sizes([1]).waiting == [1]
    train(store, [1, 2, 3])
    assert known(store) == [1, 3]


def test_a_push_that_fails_is_not_counted(monkeypatch):
    store = store_with("momentum", gradients=2, tracks=True)
    train(store, [1])
    train(store, [1])
    table = store.variables[1].table
    before = {name: cell.look().copy() for name, cell in table.leaves().items()}
    rows = store.engine.get(1).programs.rows
    with monkeypatch.context() as patched:
        patched.setattr(rows, "ready", lambda steps: None)
        patched.setattr(rows, "apply", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train(store, [1, 2, 3])
    for name, cell in table.leaves().items():
        np.testing.assert_array_equal(cell.look(), before[name])
    train(store, [2])
    assert known(store) == [1]
    train(store, [2])
    assert known(store) == [1, 2]


def test_a_share_of_ids_is_admitted_whatever_comes_with_them():
    store, ids = store_with("sgd", chance=0.25), np.arange(4000)
    train(store, ids)
    some = known(store)
    assert 900 < len(some) < 1100
    other = store_with("sgd", chance=0.25)
    for part in np.array_split(ids[::-1], 3):
        train(other, part)
        train(other, part)
    assert known(other) == some
    assert store.table_sizes([1]).refused == [4000 - len(some)]


@pytest.fixture
def used():
    """A table whose row n had n % 7 + 1 gradients, the last in push n % 7 of 0 to 6;
    and when, and how many, by id."""
    store = store_with("sgd", tracks=True)
    for turn in range(7):
        train(store, [n for n in range(300) if n % 7 >= turn])
    ids = items(store)[0]
    return store, ids, ids % 7


def evict(store, rule, limit, first=0, last=4096):
    push_to(store, eviction(store.counts.pushes, rule, limit, first, last))
    return set(known(store))


def test_rows_that_were_not_used_lately_are_evicted(used):
    store, ids, last = used
    assert evict(store, EvictionRule.UNUSED, 7) == set(range(300))
    assert evict(store, EvictionRule.UNUSED, 4) == set(ids[last > 2].tolist())
    slots_and_ids = store.variables[1].table.uses.look()
    assert (slots_and_ids[:, 0] > 3).all()
    train(store, [0])  # it is born again
    np.testing.assert_allclose(look_up(store, [0]), first_rows([0]) - 0.1, 1e-5)


@pytest.mark.parametrize("rule", [EvictionRule.RECENT, EvictionRule.FREQUENT])
def test_a_table_has_no_more_rows_than_fit(used, rule):
    store, _, rank = used
    left = evict(store, rule, 100)
    assert len(left) == 100
    ranks = np.sort(rank)[::-1][:100]
    assert sorted([n % 7 for n in left], reverse=True) == ranks.tolist()
    assert evict(store, rule, 100) == left


def test_rows_are_evicted_by_norm_in_some_buckets():
    store, ids = store_with(), np.arange(400)
    rows = np.zeros((400, WIDTH), "f4")
    rows[:, 0], rows[:, 1] = ids / 10, ids / 10
    step(store, (1, SET, ids, rows))
    buckets = buckets_of(hashes_of(ids))
    for first, last in (0, 2000), (2000, 4096):
        inside = (buckets >= first) & (buckets < last)
        before = set(known(store))
        gone = ids[inside & (ids / 10 * 2**0.5 < 20)]
        assert evict(store, EvictionRule.NORM, 20, first, last) == before - {*gone}


def test_ids_that_wait_are_no_more_than_fit():
    store = store_with("sgd", gradients=9)
    for turn in range(5):
        train(store, range(turn * 10, 60))
    push_to(store, eviction(0, EvictionRule.WAITING, 25))
    waiting = store.variables[1].table.waiting
    assert len(waiting) == 25
    assert (waiting.numbers.look() >= 4).all()
    assert waiting.ids.look().min() >= 30


def test_an_eviction_is_logged_as_ids():
    store = store_with("sgd", tracks=True)
    train(store, range(20))
    plan = store.plan_push(eviction(0, EvictionRule.RECENT, 5))
    plan.compute()
    (update,), (ids,) = plan.logged.updates, plan.logged.arrays
    assert update.op == REMOVE
    assert len(ids) == 15
    assert set(ids.tolist()) == set(range(20)) - set(known(store))


EVICT = UpdateOp.EVICT_ROWS
WRONG = [
    np.array([9.0, 1, 0, 1]),
    np.array([1.5, 1, 0, 1]),
    np.array([1.0, -1, 0, 1]),
    np.array([1.0, np.nan, 0, 1]),
    np.array([1.0, 1, 0, 4097]),
    np.array([1.0, 1, 2, 1]),
    np.array([1.0, 1, 0]),
    np.array([1, 1, 0, 1]),
    np.array([EvictionRule.RECENT, 1.0, 0, 1]),  # it is not noted
]


@pytest.mark.parametrize("operand", WRONG, ids=range(len(WRONG)))
def test_an_eviction_that_is_none_is_refused(operand):
    store = store_with("sgd")
    with pytest.raises(InvalidArgumentError, match="'t1'"):
        store.plan_push(push((1, EVICT, operand)))


@pytest.mark.parametrize(
    "rules", [{"gradients": 0}, {"chance": 0.0}, {"chance": np.nan}]
)
def test_rules_that_admit_nothing_are_refused(rules):
    with pytest.raises(InvalidArgumentError, match="'t1'"):
        store_with("sgd", **rules)
