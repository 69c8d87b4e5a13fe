"""An eager step that runs again: what the runs did is told apart, and counted."""

from __future__ import annotations

import asyncio
import itertools

import jax
import numpy as np
import pytest

from zstrat.errors import RetryDiffersError, StaleSessionError
from zstrat.program import function, get_worker_context
from zstrat.telemetry import Histogram
from zstrat.variables import IndexedSlices, ShardedVariable
from zstrat.wire import AskParts, Push, PushPart, Update, UpdateOp


class Stopped(Exception):
    """Stands for the loss of the worker in the middle of a step."""


def attempt():
    return get_worker_context().attempt


async def run_twice(world, step):
    """The outcome of the second run of a step, as when its worker was lost."""
    digest = await world.ship(step)
    await world.run(digest, [1])
    world.forget(1)
    return await world.run(digest, [1], attempt=2)


async def test_a_second_run_that_branches_otherwise_is_told_and_not_lost(world):
    first, second = world.variable(np.float32(0)), world.variable(np.float32(0))

    @function(eager=True)
    def step():
        if attempt() == 1:
            first.assign_add(1.0)
            first.value()  # what is pending is pushed
            raise Stopped
        second.assign_add(1.0)

    (error,) = await run_twice(world, step)
    assert isinstance(error, RetryDiffersError)
    assert error.step == 1
    assert "test_worker_eager.py" in error.before
    assert "ADD of 'v1'" in error.before
    assert "ADD of 'v2'" in error.now
    assert (world.value(first), world.value(second)) == (1.0, 0.0)


async def test_it_is_told_too_where_the_runs_went_to_different_servers(make_world):
    world = await make_world(ps_count=2)
    here, there = world.variable(np.float32(0)), world.variable(np.float32(0), ps=1)

    @function(eager=True)
    def step():
        (here if attempt() == 1 else there).assign_add(1.0)
        here.value()
        if attempt() == 1:
            raise Stopped

    (error,) = await run_twice(world, step)
    assert isinstance(error, RetryDiffersError)
    assert (world.value(here), world.value(there)) == (1.0, 0.0)


async def test_a_run_that_ends_before_it_has_done_what_the_last_one_did(world):
    v = world.variable(np.float32(0))

    @function(eager=True)
    def step():
        v.assign_add(1.0)
        if attempt() == 1:
            v.value()
            v.assign_add(10.0)
            v.value()
            raise Stopped

    (error,) = await run_twice(world, step)
    assert isinstance(error, RetryDiffersError)
    assert "nothing" in error.now
    assert world.value(v) == 11.0


async def test_the_same_way_again_goes_on_where_the_last_run_stopped(world):
    v = world.variable(np.float32(0))

    @function(eager=True)
    def step():
        for delta in (1.0, 10.0, 100.0):
            v.assign_add(delta * attempt())  # other data: the first run's counts
            v.value()
            if attempt() == 1 and delta == 10.0:
                raise Stopped
        return v.value()

    assert await run_twice(world, step) == [211.0]
    assert world.value(v) == 211.0


async def test_what_was_not_pushed_when_a_run_ended_had_no_effect(world):
    v, w = world.variable(np.float32(0)), world.variable(np.float32(0))

    @function(eager=True)
    def step():
        if attempt() == 1:
            v.assign_add(1.0)
            raise Stopped
        w.assign_add(1.0)
        w.assign_add(2.0)

    digest = await world.ship(step)
    (error,) = await world.run(digest, [1])
    assert isinstance(error, Stopped)
    world.forget(1)
    await world.run(digest, [1], attempt=2)
    assert (world.value(v), world.value(w)) == (0.0, 3.0)
    pushes = [m for m in world.log if isinstance(m, PushPart)]
    assert len(pushes) == 1, "updates that nobody reads between travel together"


async def test_a_long_run_is_compared_to_its_end(make_world):
    world = await make_world(ps_count=2)
    some = [world.variable(np.float32(0), ps=n % 2) for n in range(10)]

    @function(eager=True)
    def step():
        for n in range(150):
            for v in some[: 10 if n % 2 else 1]:
                v.assign_add(1.0)
            some[0].value()
        if attempt() == 1:
            raise Stopped

    await run_twice(world, step)
    assert [world.value(v) for v in some] == [150.0, *9 * [75.0]]
    assert len([m for m in world.log if isinstance(m, AskParts)]) > 2


async def test_a_loop_tells_its_rounds_apart(world):
    v = world.variable(np.float32(0))

    @function(eager=True)
    def step():
        for _ in range(2 if attempt() == 1 else 3):
            v.assign_add(1.0)
        v.value()
        if attempt() == 1:
            raise Stopped

    (error,) = await run_twice(world, step)
    assert isinstance(error, RetryDiffersError)
    assert "the 3rd time" in error.now
    assert world.value(v) == 2.0


async def test_a_zombie_of_an_earlier_run_has_no_effect(world):
    v = world.variable(np.float32(0))
    gate = world.gate()

    @function(eager=True)
    def step():
        gate.hold()
        v.assign_add(1.0)

    world.dispatch(await world.ship(step), [1])
    await gate.wait_reached()
    ask = AskParts(world.session, 1, 2, 0)
    told = world.services[0].handle(world.links[0].caller, ask)
    assert (await told).parts == []
    gate.open()
    (error,) = await world.outcomes([1])
    assert isinstance(error, StaleSessionError)
    assert world.value(v) == 0.0


async def test_reads_in_compiled_code_come_on_other_threads(world):
    v = world.variable(np.float32(1))
    scaled = jax.jit(lambda x: x * v.value())

    @function(eager=True)
    def step():
        found = []
        for _ in range(50):
            found.append(scaled(1.0))
            v.assign_add(1.0)
            found[-1].block_until_ready()
        return v.value()

    assert await world.run(await world.ship(step), [1]) == [51.0]
    assert world.value(v) == 51.0


async def test_rows_of_other_numbers_are_the_same_run(make_world):
    world = await make_world(ps_count=2)
    first = world.variable(np.zeros((4, 1), np.float32))
    ids = {1: [0, 1, 1], 2: [3]}

    @function(eager=True)
    def step():
        rows = np.array(ids[attempt()], np.int32)
        ones = np.ones((len(rows), 1), np.float32)
        first.scatter_add(IndexedSlices(ones, rows))
        first.value()
        if attempt() == 1:
            raise Stopped
        first.scatter_add(IndexedSlices(ones, rows))

    assert await run_twice(world, step) == [None]
    assert world.value(first)[:, 0].tolist() == [1, 2, 0, 1]


@pytest.mark.parametrize("empty_run", [1, 2])
@pytest.mark.parametrize("reads_between", [False, True])
async def test_no_rows_at_all_are_the_same_run(make_world, empty_run, reads_between):
    world = await make_world(ps_count=2)
    parts = [world.variable(np.zeros((2, 1), np.float32), ps) for ps in (0, 1)]
    table, other = ShardedVariable(parts, "table"), world.variable(np.float32(0))

    @function(eager=True)
    def step():
        ids = np.array([] if attempt() == empty_run else [0, 3, 3], np.int32)
        table.scatter_add(IndexedSlices(np.ones((len(ids), 1), np.float32), ids))
        if reads_between:
            other.value()
        other.assign_add(1.0)
        other.value()
        if attempt() == 1:
            raise Stopped

    assert await run_twice(world, step) == [None]
    assert world.value(other) == 1.0


async def test_another_update_in_the_place_of_no_rows_is_told(
    make_world,
):
    world = await make_world(ps_count=2)
    parts = [world.variable(np.zeros((2, 1), np.float32), ps) for ps in (0, 1)]
    table, other = ShardedVariable(parts, "table"), world.variable(np.float32(0))
    nothing = IndexedSlices(np.zeros((0, 1), np.float32), np.zeros(0, np.int32))

    @function(eager=True)
    def step():
        if attempt() == 1:
            table.scatter_add(nothing)
        else:
            other.assign_add(10.0)
        other.value()
        other.assign_add(1.0)
        other.value()
        if attempt() == 1:
            raise Stopped

    (error,) = await run_twice(world, step)
    assert isinstance(error, RetryDiffersError)
    assert "SCATTER_ADD of 'table'" in error.before
    assert world.value(other) == 1.0


async def test_it_tells_what_it_draws_reads_and_pushes(world):
    v = world.variable(np.float32(0))

    @function(eager=True)
    def step(iterator):
        for row in next(iterator):
            v.assign_add(row)  # pushed with the read
            v.value()
        v.value()

    resource, _ = await world.build(lambda: iter(np.ones((2, 3), np.float32)))
    arguments = world.arguments(world.it(resource))
    await world.run(await world.ship(step), [1, 2], arguments)
    told = world.worker.telemetry()
    counts = {
        phase: Histogram.from_plain(each["total"]).count
        for phase, each in told["phases"].items()
    }
    assert counts == {"wait": 2, "draw": 2, "pull": 8, "compute": 2, "push": 6}
    assert told["rates"]["examples_per_s"] == 6.0
    assert set(told["time"]) - {"idle"} == {"draw", "pull", "push", "compute"}


async def test_what_it_pushes_is_as_old_as_the_pushes_of_others_since_its_read(world):
    v, number = world.variable(np.float32(0)), itertools.count(100)

    def others(count):
        for _ in range(count):
            update = Update(v.spec.key, UpdateOp.ADD, 0, 1)
            push = Push(1000, next(number), 0, 0, [update], (np.float32(1),), 0)
            asyncio.run_coroutine_threadsafe(served(push), loop).result(100)

    async def served(push):
        answer = world.services[0].handle(world.remote, push)
        return await answer if asyncio.isfuture(answer) else answer

    @function(eager=True)
    def step():
        others(5)  # before it has read
        v.value()
        others(2)
        v.assign_add(1.0)
        v.value()  # pushed: two of others behind the first read
        others(1)
        v.assign_add(1.0)  # three, and its own does not count

    loop = asyncio.get_running_loop()
    await world.run(await world.ship(step), [1])
    told = world.worker.telemetry()["staleness"]["ps:0"]["total"]
    assert Histogram.from_plain(told).buckets() == [[2, 1], [3, 1]]


@pytest.mark.parametrize("reads", [False, True])
async def test_a_run_that_raises_is_in_doubt_if_it_has_pushed(world, reads):
    v = world.variable(np.float32(0))

    @function(eager=True)
    def step():
        v.assign_add(1.0)
        if reads:
            v.value()  # what is pending is pushed
        raise Stopped

    error = await world.once(step)
    assert isinstance(error, Stopped)
    assert world.value(v) == reads
    assert (1 in world.doubtful) is reads
