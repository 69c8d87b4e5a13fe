"""Which ids of a table are born, and which rows are evicted."""

import itertools

import numpy as np
import pytest
from ps_stores import push_to
from ps_tables import (
    BEGIN,
    WIDTH,
    eviction,
    first_rows,
    in_order,
    items,
    look_up,
    push,
    run,
    step,
    store_with,
    timing,
)

from zstrat.errors import InvalidArgumentError, ResourceExhaustedError
from zstrat.ids import buckets_of, hashes_of
from zstrat.wire import EvictionRule, PullTable, UpdateOp

INLINE = 4 * 2**20
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


def test_two_gradients_of_one_push_count_once():
    store = store_with("sgd", gradients=2)
    ids, rows = in_order([1, 2]), np.ones((2, WIDTH), "f4")
    step(store, (1, ROWS, ids, rows), (1, ROWS, ids, rows))
    assert known(store) == []
    step(store, (1, ROWS, ids, rows), (1, ROWS, ids, rows))
    np.testing.assert_allclose(look_up(store, ids), first_rows(ids) - 0.2, rtol=1e-4)


def test_a_removal_is_noted_where_there_is_no_memory_for_it(monkeypatch):
    """Values were written by then, so the push must not fail: the next reader has
    to read all of the table."""
    store = store_with("sgd", follows=True)
    train(store, range(20))
    table = store.variables[1].table

    def full(count):
        raise ResourceExhaustedError("no memory")

    with monkeypatch.context() as patched:
        real = type(table.gone.ids).extend
        gone = table.gone.ids
        patched.setattr(
            type(gone),
            "extend",
            lambda self, count: full(count) if self is gone else real(self, count),
        )
        step(store, (1, REMOVE, np.arange(5)))
    assert known(store) == list(range(5, 20))
    with pytest.raises(InvalidArgumentError, match="cut"):
        store.plan_items(PullTable(7, 1, 0, 4096, BEGIN + 1))
    step(store, (1, REMOVE, np.arange(5, 7)))
    found = run(store, store.plan_items(PullTable(7, 1, 0, 4096, BEGIN + 2))).arrays
    assert sorted(found[2].tolist()) == [5, 6]


def test_an_id_that_is_born_again_is_not_among_the_removed():
    store = store_with("sgd", follows=True)
    train(store, [1, 2])
    step(store, (1, REMOVE, np.array([1, 2])))
    train(store, [1])
    ids, _, removed, _ = run(
        store, store.plan_items(PullTable(7, 1, 0, 4096, BEGIN + 1))
    ).arrays
    assert (ids.tolist(), removed.tolist()) == ([1], [2])


def test_an_id_that_is_assigned_or_removed_waits_no_longer():
    store = store_with("sgd", gradients=2)
    train(store, [1, 2, 3])
    step(store, (1, SET, np.array([1]), np.ones((1, WIDTH), "f4")))
    step(store, (1, REMOVE, np.array([2])))
    assert store.table_sizes([1]).waiting == [1]
    train(store, [1, 2, 3])
    assert known(store) == [1, 3]


@pytest.mark.parametrize("sketch", [0, 64])
def test_a_push_that_fails_is_not_counted(monkeypatch, sketch):
    store = store_with("momentum", gradients=2, tracks=True, sketch=sketch)
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


def test_a_sketch_counts_none_too_low_and_few_too_high():
    """As many ids as fit: beside a dict. Each push comes twice."""
    store, rng = store_with("sgd", gradients=3, sketch=256), np.random.default_rng(0)
    counts: dict[int, int] = {}
    for number in range(60):
        ids = np.unique(rng.integers(0, 60_000, 1000))
        train(store, ids, number=number)
        assert not train(store, ids, number=number).applied
        for i in ids.tolist():
            counts[i] = counts.get(i, 0) + 1
    born = set(known(store))
    assert {i for i, count in counts.items() if count >= 3} <= born
    early = [i for i in born if counts[i] < 3]
    assert len(early) <= len(counts) / 16
    assert store.table_sizes([1]).waiting == [0]


def test_a_sketch_stays_as_large_and_as_right_whatever_comes():
    """Twenty times as many ids as fit come once each: of ids that come for the first
    time few are taken for others."""
    store = store_with("sgd", gradients=2, sketch=64)
    table = store.variables[1].table
    for number in range(25):
        train(store, range(number * 50_000, number * 50_000 + 50_000))
    births = store.table_sizes([1]).births[0]
    train(store, range(10**9, 10**9 + 50_000))
    assert store.table_sizes([1]).births[0] - births < 50_000 / 16
    assert table.waiting.nbytes < 4096 * (64 + 8 + 200)
    assert births < 25 * 50_000 / 16


def test_a_sketch_forgets_what_a_push_had_halved(monkeypatch):
    """A push that fails leaves counts as they were, also those of other ids."""
    store = store_with("momentum", gradients=200, sketch=64)
    train(store, range(20_000))
    before = store.variables[1].table.waiting.numbers.look().copy()
    rows = store.engine.get(1).programs.rows
    with monkeypatch.context() as patched:
        patched.setattr(rows, "ready", lambda steps: None)
        patched.setattr(rows, "apply", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            train(store, range(20_000, 220_000))
    numbers = store.variables[1].table.waiting.numbers.look()
    np.testing.assert_array_equal(numbers, before)
    train(store, range(20_000, 220_000))
    assert (numbers < before).any()


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
    assert evict(store, rule, float("inf")) == left


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
    push_to(store, eviction(1, EvictionRule.WAITING, float("inf")))
    push_to(store, eviction(0, EvictionRule.WAITING, 25))
    waiting = store.variables[1].table.waiting
    assert len(waiting) == 25
    assert (waiting.numbers.look() >= 4).all()
    assert waiting.ids.look().min() >= 30


@pytest.mark.parametrize("back", [0, 1000], ids=["", "set back"])
def test_rows_without_gradients_for_some_time_are_evicted(back):
    """Of calls at seconds 0, 10, ... those rows go whose last gradient a call of 30
    seconds before had seen. A clock that is set back makes none older."""
    store = store_with("sgd", tracks=True)
    numbers = itertools.count(500)

    def evict_at(now):
        push_to(store, timing(next(numbers), now, 30.0))
        return evict(store, EvictionRule.AGE, now - 30.0)

    assert evict_at(0.0) == set()
    for turn in range(1, 8):
        train(store, [turn, 100])
        now = 10.0 * turn + (back if turn <= 3 else 0)
        # Turns 1 to 3 count as of turn 4, whose own mark is that of turn 5.
        left = {100, *range(max(1, turn - 2), turn + 1)} if not back else {100}
        left |= set() if not back else set(range(1 if turn < 7 else 4, turn + 1))
        assert evict_at(now) == left


def test_times_that_are_noted_are_few_and_none_too_early():
    store = store_with("sgd", tracks=True)
    table, rng = store.variables[1].table, np.random.default_rng(0)
    before = []
    for number, age in enumerate([100.0] * 600 + [3000.0] * 600):
        train(store, [number])
        before.append((number + rng.random(), table.now))
        push_to(store, timing(number, before[-1][0], age))
    for time in range(1200):
        wanted = max([count for at, count in before if at <= time], default=-1)
        assert table.clock_at(float(time)) <= wanted
    assert wanted - table.clock_at(1199.0) <= 2 * (3000 / 128 + 1)


def test_a_row_that_was_assigned_is_as_old_as_that():
    store = store_with("sgd", tracks=True)

    def evict_at(now):
        push_to(store, timing(now, float(now), 30.0))
        return evict(store, EvictionRule.AGE, now - 30.0)

    train(store, [1])
    assert evict_at(100) == {1}
    assert evict_at(200) == set()
    step(store, (1, SET, np.array([7]), np.ones((1, WIDTH), "f4")))
    assert evict_at(220) == {7}, "no push has a gradient, and it is there for 20 s"
    assert evict_at(249) == {7}
    assert evict_at(250) == set()


def test_what_drops_many_rows_is_no_short_work():
    """The event loop does what takes half a millisecond: other threads do the rest."""
    store = store_with("sgd", gradients=3, tracks=True, follows=True)
    ids = np.arange(60_000)
    step(store, (1, SET, ids, np.ones((len(ids), WIDTH), "f4")))
    train(store, range(10**6, 10**6 + 60_000))
    rules = EvictionRule.RECENT, EvictionRule.NORM, EvictionRule.WAITING
    for rule in rules:
        assert not store.plan_push(eviction(0, rule, 2.0)).is_short(INLINE)
        assert store.plan_push(eviction(0, rule, 2.0, 0, 16)).is_short(INLINE)
    cut = 1, UpdateOp.FORGET_REMOVED, np.array([BEGIN + 10])
    assert store.plan_push(push(cut)).is_short(INLINE)
    evict(store, EvictionRule.NORM, 9.0)
    assert known(store) == []
    assert not store.plan_push(push(cut)).is_short(INLINE)


def test_removed_ids_are_forgotten_when_they_are_too_many(monkeypatch):
    """Who asks for what has changed since before reads all of the table."""
    store = store_with("sgd", follows=True)
    monkeypatch.setattr(type(store.variables[1].table), "gone_kept", 100)
    train(store, range(150))
    for first in range(0, 140, 20):
        step(store, (1, REMOVE, np.arange(first, first + 20)))
    table = store.variables[1].table
    assert len(table.gone) == 20
    with pytest.raises(InvalidArgumentError, match="cut"):
        store.plan_items(PullTable(7, 1, 0, 4096, BEGIN + 2))
    found = run(store, store.plan_items(PullTable(7, 1, 0, 4096, BEGIN + 7))).arrays
    assert sorted(found[2].tolist()) == list(range(120, 140))


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
    np.array([EvictionRule.AGE, 1.0, 0, 1]),
]


@pytest.mark.parametrize("operand", WRONG, ids=range(len(WRONG)))
def test_an_eviction_that_is_none_is_refused(operand):
    store = store_with("sgd")
    with pytest.raises(InvalidArgumentError, match="'t1'"):
        store.plan_push(push((1, EVICT, operand)))


@pytest.mark.parametrize(
    ("tracks", "operand"),
    [(False, [1.0, 1]), (True, [np.nan, 1]), (True, [1.0, 0]), (True, [1.0])],
)
def test_a_time_that_is_none_is_refused(tracks, operand):
    store = store_with("sgd", tracks=tracks)
    with pytest.raises(InvalidArgumentError, match="'t1'"):
        store.plan_push(push((1, UpdateOp.NOTE_TIME, np.array(operand))))


@pytest.mark.parametrize(
    "rules",
    [
        {"gradients": 0},
        {"chance": 0.0},
        {"chance": np.nan},
        {"gradients": 3, "sketch": 63},
        {"gradients": 300, "sketch": 64},
    ],
)
def test_rules_that_admit_nothing_are_refused(rules):
    with pytest.raises(InvalidArgumentError, match="'t1'"):
        store_with("sgd", **rules)
