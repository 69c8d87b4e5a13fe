"""Steps that look up rows, on a worker with real parameter servers behind fake links.

The programs are scripts: what a step asks for, level by level, and what it makes of the
answers. How a traced step comes to that is told by the tests of `zstrat.program`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from zstrat.errors import OutOfRangeError, PSUnavailableError
from zstrat.optimizers import Binding, TreeRule, TreeStructure
from zstrat.program import (
    ResultLayout,
    StepResult,
    StepUpdate,
    Wanted,
    WantedRows,
    function,
    prepare,
)
from zstrat.variables import IndexedSlices
from zstrat.wire import (
    BindOptimizer,
    CancelSteps,
    CreateOptimizer,
    PullRows,
    Push,
    PushPart,
    UpdateOp,
)

SGD = 1


@dataclass(frozen=True, eq=False)
class Plan:
    """As much of a plan as a worker looks at."""

    levels: int
    updates: tuple = ()
    sent: tuple = ()
    reads: tuple = ()
    draws: tuple = (0,)
    has_lookups: bool = True
    lookups: tuple = ()
    calls: tuple = ()
    targets: tuple = ()
    layout: ResultLayout = field(default=ResultLayout(("float32",), ((),), 0))


@dataclass(eq=False)
class Script:
    """What a body returns: how one of its steps goes on.

    ``levels``: from an element and all answers so far to what is wanted next.
    ``finish``: from the same to a result and updates.
    """

    plan: Plan
    iterator: object
    levels: list
    finish: object
    examples = 0

    def __post_init__(self):
        self.element = self.iterator.draw()
        self.answers = []
        try:
            self.wanted = self.levels[0](self.element)
        except BaseException:
            self.unread()
            raise

    def advance(self, values):
        self.answers += values
        level = self.levels[len(self.answers)] if self.answers else None
        self.wanted = level(self.element, *self.answers)
        return self.wanted

    def run(self, values):
        result, updates = self.finish(self.element, *self.answers, *values)
        leaf = np.asarray(result, np.float32)
        return StepResult([leaf], self.plan.layout, updates)

    def unread(self):
        self.iterator.unread(self.element)


def prepare_scripts(fn, args, kwargs):
    if "scripted" in fn.name:
        return fn.body(*args, **kwargs)
    return prepare(fn, args, kwargs)


def some(variable, *indices):
    return WantedRows(variable.spec, np.array(indices, np.int64))


def feed(variable, indices, gradient):
    op = UpdateOp.OPTIMIZE_ROWS
    indices = np.array(indices, np.int64)
    return StepUpdate(variable.spec, op, SGD, (indices, np.asarray(gradient)))


FEEDS = (SimpleNamespace(op=UpdateOp.OPTIMIZE_ROWS),)
ADDS = (SimpleNamespace(op=UpdateOp.SCATTER_ADD),)


@pytest.fixture
async def world(make_world):
    return await make_world(ps_count=2, prepare=prepare_scripts)


@pytest.fixture
async def ahead(make_world):
    """With three steps fetched ahead, and an optimizer that subtracts gradients."""
    world = await make_world(
        prefetch=3, prepare=prepare_scripts, load_code=lambda code: optax.sgd(1.0)
    )
    for service in world.services:
        order = CreateOptimizer(world.session, SGD, "sgd", b"")
        answer = service.handle(world.remote, order)
        if hasattr(answer, "__await__"):
            await answer
    made = world.variable
    world.variable = lambda value, ps=0: bound(world, made(value, ps))
    return world


def bound(world, variable):
    """The optimizer moves it, in a tree of its own."""
    kind = jax.ShapeDtypeStruct(variable.shape, jnp.dtype(variable.dtype))
    rule = TreeRule(
        "sgd", optax.sgd(1.0), TreeStructure.of({"w": kind}), (kind,), (kind.dtype,)
    )
    data = np.frombuffer(Binding(rule, ((variable.spec.key,),)).encoded(), np.uint8)
    order = BindOptimizer(world.session, SGD, (data,))
    # Its answer may come later; what is pushed comes behind it.
    world.services[variable.spec.ps].handle(world.remote, order)
    return variable


def table(rows=6, width=2, start=0):
    count = rows * width
    return np.arange(start, start + count, dtype=np.float32).reshape(rows, width)


def counting(table, updates=FEEDS):
    """A step that draws a row number and takes 1 from that row; returns what it read
    there first."""
    plan = Plan(1, updates)

    @function
    def scripted(iterator):
        return Script(
            plan,
            iterator,
            [lambda i: Wanted((), (some(table, i),))],
            lambda i, row: (row[0, 0], [feed(table, [i], np.ones((1, 2), np.float32))]),
        )

    return scripted


def numbers(*values):
    return [np.int64(value) for value in values]


async def counted(world, count, elements, updates=FEEDS):
    """A table of zeros, such a step, and its arguments."""
    rows = world.variable(np.zeros((count, 2), np.float32))
    step = counting(rows, updates)
    return rows, *await world.reading(lambda: iter(numbers(*elements)), step)


async def under_way(world, step, steps, arguments):
    """Dispatches the steps; as many as are fetched ahead have asked for their rows."""
    (link,) = world.links
    link.hold()
    world.dispatch(step, steps, arguments)
    await world.until(lambda: len(link.held) >= 4)
    return link


async def test_values_and_rows_of_all_servers_come_in_one_message_each(world):
    weight = world.variable(np.float32(10), ps=1)
    here, there = world.variable(table(), ps=0), world.variable(table(start=100), ps=1)
    wanted = Wanted((weight.spec,), (some(here, 1, 3), some(there, 5)))
    plan, seen = Plan(1, reads=(weight.spec,)), []

    def finish(element, value, *rows):
        seen.append(rows)
        return value, []

    @function
    def scripted(iterator):
        return Script(plan, iterator, [lambda i: wanted], finish)

    step, arguments = await world.reading(lambda: iter(numbers(1, 2)), scripted)
    assert await world.run(step, [1, 2], arguments) == [10, 10]
    for first, second in seen:
        assert first.tolist() == [[2, 3], [6, 7]]
        assert second.tolist() == [[110, 111]]
    # What two steps look up is never shared, though the same here.
    kinds = [(type(m), m.rows) for m in world.log if isinstance(m, PullRows)]
    assert len(kinds) == 4
    assert {type(message) for message in world.log} == {PullRows}


async def test_rows_say_which_rows_are_needed_next(world):
    pointers = np.array([[3, 0], [2, 0], [5, 0], [1, 0]], np.float32)
    first, second = world.variable(pointers), world.variable(table(), ps=1)
    plan = Plan(3, ADDS)

    def finish(i, *answers):
        delta = (np.array([i]), np.full((1, 2), 100, np.float32))
        return answers[-1][0, 1], [StepUpdate(second.spec, ADD, 0, delta)]

    ADD = UpdateOp.SCATTER_ADD

    @function
    def scripted(iterator):
        return Script(
            plan,
            iterator,
            [
                lambda i: Wanted((), (some(first, i),)),
                lambda i, row: Wanted((), (some(first, int(row[0, 0])),)),
                lambda i, row, next_: Wanted((), (some(second, int(next_[0, 0])),)),
            ],
            finish,
        )

    step, arguments = await world.reading(lambda: iter(numbers(0, 1, 2)), scripted)
    # 0 -> 3 -> 1 and 1 -> 2 -> 5 lead to rows (2, 3) and (10, 11); of the first, 0, the
    # next step has added 100 to row 0 by then.
    results = await world.run(step, [1, 2], arguments)
    assert results == [3, 11]
    assert world.value(second)[:3].tolist() == [[100, 101], [102, 103], [4, 5]]
    per_step = [PullRows, PullRows, PullRows, Push]
    assert [type(message) for message in world.log] == per_step * 2


@pytest.mark.parametrize("broken", [(2, 0), (1, 1)], ids=["first level", "second"])
async def test_a_row_that_is_not_there_fails_its_closure_and_no_other(ahead, broken):
    rows = ahead.variable(table())

    def level(number):
        def wanted(i, *answers):
            if (i, number) == broken:
                raise IndexError("table 'rows' has no row 77")
            return Wanted((), (some(rows, i),))

        return wanted

    @function
    def scripted(iterator):
        levels = [level(0), level(1)]
        return Script(Plan(2), iterator, levels, lambda i, a, b: (b[0, 0], []))

    step, arguments = await ahead.reading(lambda: iter(numbers(0, 1, 2)), scripted)
    ended = await ahead.run(step, range(3), arguments)
    error = ended.pop(broken[0])
    assert ended == [2 * i for i in range(3) if i != broken[0]]
    assert isinstance(error, IndexError)
    assert "no row 77" in str(error)


async def test_three_steps_are_under_way_while_one_waits(ahead):
    rows, step, arguments = await counted(ahead, 8, range(8))
    link = await under_way(ahead, step, range(8), arguments)
    await ahead.worker._executor.submit(lambda: None)
    assert [type(message) for message, _ in link.held] == [PullRows] * 4
    asked = [message.arrays[0].tolist() for message, _ in link.held]
    assert asked == [[0], [1], [2], [3]]
    link.release()
    assert await ahead.outcomes(range(8)) == [0] * 8
    assert ahead.value(rows).tolist() == [[-1, -1]] * 8


async def test_values_are_older_by_three_steps_at_the_most(ahead):
    rows, step, arguments = await counted(ahead, 1, [0] * 40)
    read = await ahead.run(step, range(40), arguments)
    assert ahead.value(rows).tolist() == [[-40, -40]]
    missing = [before + value for before, value in enumerate(read)]
    assert min(missing) >= 0
    assert max(missing) <= 3


async def test_data_that_ends_while_steps_are_fetched_ahead(ahead):
    rows, step, arguments = await counted(ahead, 8, range(5))
    link = await under_way(ahead, step, range(6), arguments)
    assert not ahead.remote.notices
    link.release()
    *ran, ended = await ahead.outcomes(range(6))
    assert ran == [0] * 5
    assert isinstance(ended, OutOfRangeError)
    assert ahead.value(rows)[:5].tolist() == [[-1, -1]] * 5


async def test_cancel_gives_elements_back_in_the_order_in_which_they_came(ahead):
    rows, step, arguments = await counted(ahead, 9, range(9))
    link = await under_way(ahead, step, range(6), arguments)
    ahead.worker.handle(ahead.remote, CancelSteps(ahead.session))
    assert await ahead.outcomes(range(6)) == ["cancelled"] * 6
    link.release()  # answers to what nobody waits for any more
    await under_way(ahead, step, range(6, 15), arguments)
    asked = [message.arrays[0].tolist() for message, _ in link.held]
    assert asked == [[0], [1], [2], [3]]
    link.release()
    assert await ahead.outcomes(range(6, 15)) == [0] * 9
    assert ahead.value(rows).tolist() == [[-1, -1]] * 9


async def test_a_server_that_is_lost_while_rows_are_under_way_loses_no_element(ahead):
    rows, step, arguments = await counted(ahead, 9, range(9))
    link = await under_way(ahead, step, range(4), arguments)
    link.cut()
    for error in await ahead.outcomes(range(4)):
        assert isinstance(error, PSUnavailableError)
    link.connect()
    assert await ahead.run(step, range(4, 13), arguments) == [0] * 9
    assert ahead.value(rows).tolist() == [[-1, -1]] * 9


async def test_steps_that_add_see_every_row_that_was_written_before(ahead):
    _, step, arguments = await counted(ahead, 1, [0] * 6, (*FEEDS, *ADDS))
    assert await ahead.run(step, range(6), arguments) == [0, -1, -2, -3, -4, -5]


async def test_an_eager_step_reads_and_updates_rows_as_it_goes(make_world):
    storages = []

    def run_eager(fn, args, kwargs, storage, draw):
        storages.append(storage)
        found = storage.read_rows([(there, np.array([2])), (here, np.array([0, 5]))])
        one = np.array([1]), np.ones((1, 2), np.float32)
        storage.update_many(
            [(v, UpdateOp.SCATTER_ADD, one, None) for v in (here, there)]
        )
        layout = ResultLayout(("float32", "float32"), ((), ()), ["[", 0, 1])
        return StepResult([found[0][0, 0], found[1][1, 0]], layout, [])

    world = await make_world(ps_count=2, run_eager=run_eager)
    here, there = world.variable(table(), ps=0), world.variable(table(), ps=1)
    digest = await world.ship(function(eager=True)(lambda: None))
    assert await world.run(digest, [1]) == [[4, 10]]
    for variable in (here, there):
        assert world.value(variable)[1].tolist() == [3, 4]
    kinds = [type(message) for message in world.log]
    assert kinds == [PullRows, PullRows, PushPart, PushPart]
    for call in (
        lambda storage: storage.read_rows_async([(here, None)]),
        lambda storage: storage.update_many_async([(here, None, (), None)]),
    ):
        with pytest.raises(RuntimeError, match="use the blocking forms"):
            await call(storages[0])


async def test_a_traced_step_of_two_levels(make_world):
    world = await make_world(ps_count=2)
    first = world.variable(np.array([3, 0, 2, 1], np.int32))
    second = world.variable(table(4), ps=1)

    @function
    def step(iterator):
        rows = second.sparse_read(first.sparse_read(next(iterator)))
        second.scatter_sub(IndexedSlices(rows, first.value()[:2], rows.shape))
        return rows

    batches = [np.array(ids, np.int32) for ids in ([0, 1], [2, 2], [3, 9])]
    digest, arguments = await world.reading(lambda: iter(batches), step)
    *ran, outside = await world.run(digest, [1, 2, 3], arguments)
    # Rows 3 and 0 are taken from themselves; then row 2 from the zeros that are left.
    assert [r.tolist() for r in ran] == [[[6, 7], [0, 1]], [[4, 5], [4, 5]]]
    assert world.value(second).tolist() == [[-4, -5], [2, 3], [4, 5], [-4, -5]]
    assert isinstance(outside, IndexError)
    assert "has no row 9" in str(outside)
    kinds = [type(message) for message in world.log]
    assert kinds == [PullRows, PullRows, Push] * 2
