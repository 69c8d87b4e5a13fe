"""One message in place of a push and the pull behind it, driven without sockets."""

import asyncio

import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ps_callers import SESSION, Gated, caller
from ps_trees import binding, message
from tiers import examples

from zstrat.errors import (
    InvalidArgumentError,
    NotFoundError,
    PermissionDeniedError,
    StaleSessionError,
    UnavailableError,
    from_wire,
)
from zstrat.ps import _requests as requests_module
from zstrat.wire import (
    CloseSession,
    CreateOptimizer,
    DeleteVariables,
    Done,
    Exchange,
    Exchanged,
    Job,
    Pull,
    Pulled,
    PullRows,
    Push,
    Pushed,
    Read,
    Update,
    UpdateOp,
)

ADD, ROWS = int(UpdateOp.ADD), int(UpdateOp.OPTIMIZE_ROWS)


class Rig(Gated):
    """Three tables of four rows, and an optimizer that waits for the gate."""

    def __init__(self):
        super().__init__()
        self.create()

    def create(self):
        value = np.arange(8, dtype="f4").reshape(4, 2)
        super().create(dict.fromkeys(range(3), value))

    def statistics(self):
        left_out = "uptime", "owner"
        values = self.service.statistics()
        return {name: values[name] for name in values if name not in left_out}


@pytest.fixture
async def rig():
    rig = Rig()
    yield rig
    rig.gate.set()
    assert await rig.service.drain()


def exchange(
    *pushed, step=-1, reads=(), rows=(), indices=(), value=1, op=ADD, optimizer=0
):
    """Adds to all of some tables, or gives gradients of their row 0; and reads."""
    if op == ADD:
        operands = [np.full((4, 2), value, "f4") for _ in pushed]
    else:
        operands = [np.array([0]), np.full((1, 2), value, "f4")] * len(pushed)
    updates = [
        Update(key, op, optimizer, len(operands) // len(pushed)) for key in pushed
    ]
    some = [Read(key, -1) for key in reads]
    indices = [np.array(each) for each in indices]
    arrays = (*operands, *indices)
    return Exchange(SESSION, step, 0, 0, updates, some, list(rows), arrays)


def error_of(plain):
    assert plain is not None
    return from_wire(plain)


async def test_the_pull_reads_what_the_push_wrote(rig):
    answer = rig.ask(exchange(0, 1, reads=[0], rows=[1, 2], indices=[[3, 0], [1]]))
    assert isinstance(answer, Exchanged)
    assert (answer.applied, answer.push_error, answer.pull_error) == (True, None, None)
    assert answer.versions == [1]
    value, rows, others = answer.arrays
    assert value.tolist() == [[1, 2], [3, 4], [5, 6], [7, 8]]
    assert rows.tolist() == [[7, 8], [1, 2]]
    assert others.tolist() == [[2, 3]]


async def test_a_push_that_was_applied_before_does_not_keep_the_values_back(rig):
    first = rig.ask(exchange(0, step=1, reads=[0]))
    again = rig.ask(exchange(0, step=1, reads=[0]))
    plain = rig.ask(Push(SESSION, 1, 0, 0, [Update(0, ADD, 0, 1)], (np.ones((4, 2)),)))
    assert (first.applied, again.applied, plain.applied) == (True, False, False)
    assert (first.versions, again.versions) == ([1], [1])
    assert rig.statistics()["duplicates"] == 2


async def test_values_that_somebody_looks_at_are_not_written(rig):
    before = rig.ask(exchange(0, reads=[0]))
    kept = before.arrays[0].copy()
    after = rig.ask(exchange(0, reads=[0], rows=[0], indices=[[0]]))
    np.testing.assert_array_equal(before.arrays[0], kept)
    np.testing.assert_array_equal(after.arrays[0], kept + 1)


async def test_a_refused_push_changes_nothing_and_the_pull_is_answered(rig):
    answer = rig.ask(exchange(0, 9, reads=[0], rows=[1], indices=[[1]]))
    assert isinstance(error_of(answer.push_error), NotFoundError)
    assert (answer.applied, answer.pull_error, answer.versions) == (False, None, [0])
    assert answer.arrays[1].tolist() == [[2, 3]]
    assert rig.statistics()["failed"] == 1


async def test_a_refused_part_comes_without_a_traceback_as_a_push_does(
    rig, monkeypatch
):
    """The message is for the user, and none of the lines are."""
    wrong = exchange(0, 9, rows=[1], indices=[[4]])
    answer = rig.ask(wrong)
    for error in answer.push_error, answer.pull_error:
        assert not hasattr(error_of(error), "__notes__")
    monkeypatch.setenv("ZSTRAT_TRACEBACK", "full")
    (note,) = error_of(rig.ask(wrong).push_error).__notes__
    assert "zstrat/ps/" in note


async def test_operands_and_indices_are_told_apart_from_the_end(rig):
    short = exchange(0, reads=[0], rows=[1], indices=[[1]])
    missing = Exchange(
        SESSION, 1, 0, 0, short.updates, short.reads, short.rows, short.arrays[1:]
    )
    answer = rig.ask(missing)
    assert isinstance(error_of(answer.push_error), InvalidArgumentError)
    assert answer.arrays[1].tolist() == [[2, 3]]
    nothing = Exchange(SESSION, 1, 0, 0, short.updates, short.reads, short.rows, ())
    with pytest.raises(InvalidArgumentError):
        rig.ask(nothing)
    assert rig.statistics()["remembered_steps"] == 0


@pytest.mark.parametrize(
    ("wrong", "kind"),
    [
        ({"reads": [9]}, NotFoundError),
        ({"rows": [9], "indices": [[0]]}, NotFoundError),
        ({"rows": [1], "indices": [[4]]}, InvalidArgumentError),
    ],
)
async def test_a_refused_pull_does_not_undo_the_push(rig, wrong, kind):
    answer = rig.ask(exchange(0, step=4, **wrong))
    assert isinstance(error_of(answer.pull_error), kind)
    assert (answer.applied, answer.push_error) == (True, None)
    assert (answer.versions, answer.arrays) == ([], ())
    assert rig.ask(Pull(SESSION, [Read(0, -1)])).versions == [1]
    assert rig.ask(exchange(0, step=4, reads=[0])).applied is False


async def test_both_parts_have_one_turn(rig):
    rig.gate.clear()
    loading = rig.ask(CreateOptimizer(SESSION, 1, "sgd", b"sgd"))
    rig.ask(tell(0))
    first = rig.ask(
        exchange(0, op=ROWS, optimizer=1, reads=[0], rows=[1], indices=[[0]])
    )
    between = rig.ask(exchange(1, reads=[0], value=10))
    last = rig.ask(PullRows(SESSION, [Read(0, -1)], [1], (np.array([0]),)))
    assert rig.ask(exchange(2, reads=[2])).applied  # uses nothing of theirs
    assert not any(each.done() for each in (loading, first, between, last))
    rig.gate.set()
    async with asyncio.timeout(60):
        assert await loading == Done()
        value, rows = (await first).arrays
        assert (value[0].tolist(), rows.tolist()) == ([-0.5, 0.5], [[0, 1]])
        assert (await between).arrays[0][0].tolist() == [-0.5, 0.5]
        assert (await last).arrays[1].tolist() == [[10, 11]]
    assert rig.statistics()["waiting"] == 0


async def test_parts_that_take_long_go_to_the_thread_one_after_the_other(
    rig, monkeypatch
):
    monkeypatch.setattr(requests_module, "INLINE", 0)
    both = rig.ask(exchange(0, step=1, reads=[1], rows=[0], indices=[[3]]))
    again = rig.ask(exchange(0, step=1, rows=[0], indices=[[3]]))
    wrong = rig.ask(exchange(9, rows=[0], indices=[[0]]))
    async with asyncio.timeout(100):
        answer = await both
        assert answer.applied
        assert [array.tolist() for array in answer.arrays[1:]] == [[[7, 8]]]
        second = await again
        assert (second.applied, second.arrays[0].tolist()) == (False, [[7, 8]])
        third = await wrong
    assert isinstance(error_of(third.push_error), NotFoundError)
    assert third.arrays[0].tolist() == [[1, 2]]


@pytest.mark.parametrize("inline", [0, 2**20])
async def test_what_fails_while_it_computes_is_the_outcome_of_its_part(
    rig, monkeypatch, inline
):
    monkeypatch.setattr(requests_module, "INLINE", inline)
    (lost,) = rig.service._store.variables.find([0])
    lost.cell.lose("XLA said so")
    pushed = await rig.answer(exchange(0, reads=[1], rows=[1], indices=[[0]]))
    assert isinstance(error_of(pushed.push_error), UnavailableError)
    assert (pushed.applied, pushed.versions, len(pushed.arrays)) == (False, [0], 2)
    pulled = await rig.answer(exchange(1, reads=[1], rows=[0], indices=[[0]]))
    assert isinstance(error_of(pulled.pull_error), UnavailableError)
    assert (pulled.applied, pulled.push_error, pulled.arrays) == (True, None, ())
    assert rig.statistics()["failed"] == 2


async def test_a_session_that_ends_meanwhile_fails_both_parts(rig):
    rig.gate.clear()
    loading = rig.ask(CreateOptimizer(SESSION, 1, "sgd", b"sgd"))
    waiting = rig.ask(exchange(0, op=ROWS, optimizer=1, reads=[0]))
    rig.ask(CloseSession(SESSION, False))
    rig.gate.set()
    async with asyncio.timeout(60):
        with pytest.raises(StaleSessionError):
            await loading
        with pytest.raises(StaleSessionError):  # it had not begun
            await waiting


async def test_a_session_that_ends_while_the_push_computes(rig, monkeypatch):
    monkeypatch.setattr(requests_module, "INLINE", 0)
    computing = rig.ask(exchange(0, reads=[0]))
    rig.ask(CloseSession(SESSION, False))
    async with asyncio.timeout(60):
        answer = await computing
    assert isinstance(error_of(answer.push_error), StaleSessionError)
    assert isinstance(error_of(answer.pull_error), StaleSessionError)
    assert answer.applied is False


async def test_who_drains_answers_what_does_not_have_to_wait(rig, monkeypatch):
    loading = rig.ask(CreateOptimizer(SESSION, 1, "sgd", b"sgd"))
    assert await loading == Done()
    await rig.answer(tell(0))
    assert await rig.service.drain()
    compiles = exchange(0, op=ROWS, optimizer=1, rows=[0], indices=[[0]])
    answer = rig.ask(compiles)
    assert isinstance(error_of(answer.push_error), UnavailableError)
    assert answer.arrays[0].tolist() == [[0, 1]]
    monkeypatch.setattr(requests_module, "INLINE", 100)
    rows = np.zeros(100, int)
    answer = rig.ask(exchange(0, rows=[0], indices=[rows]))
    assert (answer.applied, answer.arrays) == (True, ())
    assert isinstance(error_of(answer.pull_error), UnavailableError)


def tell(key: int):
    """That optimizer 1 moves a variable."""
    tree = {"w": ((key,), (4, 2), "f4")}
    return message(SESSION, 1, binding(optax.sgd(0.5), tree))


@pytest.mark.parametrize("role", [Job.EVALUATOR, Job.OBSERVER, Job.PS])
async def test_who_may_not_push_may_not_exchange(rig, role):
    with pytest.raises(PermissionDeniedError, match="Exchange from chief or worker"):
        rig.ask(exchange(0), caller(role))
    assert rig.ask(exchange(0), caller(Job.WORKER)).applied


KEYS = st.integers(0, 3)  # the last one is of no variable


@st.composite
def updates(draw):
    key = draw(KEYS)
    op = draw(
        st.sampled_from([UpdateOp.ADD, UpdateOp.ASSIGN, UpdateOp.SCATTER_ADD] * 4)
        | st.just(UpdateOp.OPTIMIZE)  # of an optimizer that nobody made
    )
    fill = float(draw(st.integers(-3, 3)))
    if op is UpdateOp.SCATTER_ADD:
        ids = np.array(draw(st.lists(st.integers(0, 4), max_size=3)), int)
        return key, op, (ids, np.full((len(ids), 2), fill, "f4"))
    rows = draw(st.sampled_from([4, 4, 4, 4, 3]))
    return key, op, (np.full((rows, 2), fill, "f4"),)


@st.composite
def steps(draw):
    pushed = draw(st.lists(updates(), max_size=3))
    reads = draw(st.lists(st.builds(Read, KEYS, st.integers(-1, 3)), max_size=3))
    rows = draw(st.lists(KEYS, max_size=2))
    ids = st.lists(st.sampled_from([0, 1, 2, 3, 3, 2, 1, 4]), max_size=3)
    indices = [np.array(draw(ids), int) for _ in rows]
    step, part = draw(st.integers(-1, 4)), draw(st.integers(0, 1))
    return step, part, draw(st.integers(0, 2)), pushed, reads, rows, indices


def as_messages(step, low_water):
    number, part, mark, pushed, reads, rows, indices = step
    heads = [Update(key, int(op), 0, len(arrays)) for key, op, arrays in pushed]
    operands = tuple(array for *_, arrays in pushed for array in arrays)
    mark = mark if low_water else 0
    push = Push(SESSION, number, part, mark, heads, operands)
    pull = PullRows(SESSION, reads, rows, tuple(indices))
    arrays = (*operands, *indices)
    both = Exchange(SESSION, number, part, mark, heads, reads, rows, arrays)
    return push, pull, both


def asked(rig, message):
    try:
        return rig.ask(message)
    except Exception as error:
        return error


async def settled(answer):
    if not asyncio.isfuture(answer):
        return answer
    async with asyncio.timeout(100):
        (done,) = await asyncio.gather(answer, return_exceptions=True)
        return done


def kind_and_words(error):
    return type(error), error.args


def assert_same(pushed, pulled, both):
    assert isinstance(both, Exchanged)
    if isinstance(pushed, Pushed):
        assert both.push_error is None
        assert both.applied == pushed.applied
    else:
        assert kind_and_words(from_wire(both.push_error)) == kind_and_words(pushed)
        assert both.applied is False
    if isinstance(pulled, Pulled):
        assert both.pull_error is None
        assert both.versions == pulled.versions
        assert len(both.arrays) == len(pulled.arrays)
        for one, other in zip(both.arrays, pulled.arrays, strict=True):
            np.testing.assert_array_equal(one, other)
    else:
        assert kind_and_words(from_wire(both.pull_error)) == kind_and_words(pulled)
        assert (both.versions, both.arrays) == ([], ())


async def compare(sequence, one_at_a_time, deleted_before, inline, patch):
    apart, joined, found = Rig(), Rig(), []
    patch.setattr(requests_module, "INLINE", inline)
    for place, step in enumerate(sequence):
        if place == deleted_before:
            for rig in (apart, joined):
                assert await rig.answer(DeleteVariables(SESSION, [2])) == Done()
        push, pull, both = as_messages(step, low_water=one_at_a_time)
        answers = asked(apart, push), asked(apart, pull), asked(joined, both)
        if one_at_a_time:
            answers = [await settled(answer) for answer in answers]
        found.append(answers)
    for pushed, pulled, both in found:
        # Only now, when all has been written that ever will be.
        assert_same(*[await settled(each) for each in (pushed, pulled, both)])
    assert joined.statistics() == apart.statistics()
    for rig in (apart, joined):
        assert await rig.service.drain()


@examples(60)
@given(
    sequence=st.lists(steps(), min_size=1, max_size=6),
    one_at_a_time=st.booleans(),
    deleted_before=st.integers(0, 12),
    inline=st.sampled_from([0, 40, 2**20]),
)
def test_an_exchange_is_a_push_and_then_a_pull(
    sequence, one_at_a_time, deleted_before, inline
):
    with pytest.MonkeyPatch.context() as patch:
        asyncio.run(compare(sequence, one_at_a_time, deleted_before, inline, patch))
