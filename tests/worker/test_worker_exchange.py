"""A step's push and the next one's pull in one message: what fails with which step."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from zstrat.errors import NotFoundError, PSUnavailableError
from zstrat.program import function
from zstrat.wire import DeleteVariables, Exchange, Pull, Push


async def under_way(world, *kinds, prepared=0):
    """Waits until the links, which are held, have been sent these messages, and until
    so many steps are prepared."""
    pipeline = world.worker._session.runner.pipeline
    async with asyncio.timeout(100):
        while True:
            line = await world.worker._executor.submit(lambda: len(pipeline._line))
            sent = [[type(message) for message, _ in link.held] for link in world.links]
            if sent == list(kinds) and line >= prepared:
                return


def write_then_read(written, read):
    @function
    def write():
        written.assign(written.value() + 1)

    @function
    def look():
        return read.value() + 10

    return write, look


async def started(world, first, second, steps):
    """The writer ran; its push is under way, and so are the values of the readers."""
    (link,) = world.links
    link.hold()
    world.dispatch(first, [steps[0]])
    world.dispatch(second, steps[1:])
    await under_way(world, [Pull], prepared=2)
    link.release()
    link.hold()
    await under_way(world, [Exchange])


@pytest.fixture
async def both(world):
    """A writer's push and the next step's pull under way, on a link that is held."""
    written, read = world.variable(np.float32(0)), world.variable(np.float32(5))
    world.written, world.read = written, read
    world.functions = [
        await world.ship(each) for each in write_then_read(written, read)
    ]
    await started(world, *world.functions, [1, 2])
    return world


async def test_both_parts_succeed(both):
    both.links[0].release()
    assert await both.outcomes([1, 2]) == [None, 15]
    assert both.value(both.written) == 1
    counted = both.worker.statistics()
    assert (counted["pushes"], counted["pulls"]) == (1, 2)


@pytest.mark.parametrize("gone", ["written", "read"])
async def test_a_part_that_is_refused_fails_its_own_step_alone(both, gone):
    key = getattr(both, gone).spec.key
    both.services[0].handle(both.remote, DeleteVariables(both.session, [key]))
    both.links[0].release()
    pushed, pulled = await both.outcomes([1, 2])
    if gone == "written":
        assert isinstance(pushed, NotFoundError)
        assert pulled == 15
    else:
        assert pushed is None
        assert isinstance(pulled, NotFoundError)
        assert both.value(both.written) == 1


async def test_a_lost_server_fails_both_steps(both):
    both.links[0].cut()
    for outcome in await both.outcomes([1, 2]):
        assert isinstance(outcome, PSUnavailableError)


async def test_a_retry_is_not_applied_again_and_its_neighbour_reads(both):
    both.links[0].release()
    await both.outcomes([1, 2])
    both.forget(1, 2)
    await started(both, *both.functions, [1, 2])
    both.links[0].release()
    assert await both.outcomes([1, 2]) == [None, 15]
    assert both.value(both.written) == 1


async def test_every_server_gets_its_parts_in_as_few_messages_as_can_be(make_world):
    world = await make_world(ps_count=3)
    here = world.variable(np.float32(0), ps=0)
    there, nowhere = [world.variable(np.float32(5), ps=ps) for ps in (1, 2)]

    @function
    def write():
        here.assign(nowhere.value() + 1)
        there.assign_add(np.float32(1))

    @function
    def look():
        return there.value() + nowhere.value()

    first, second = await world.ship(write), await world.ship(look)
    for link in world.links:
        link.hold()
    world.dispatch(first, [1])
    world.dispatch(second, [2])
    await under_way(world, [], [], [Pull], prepared=2)
    world.links[2].release()
    world.links[2].hold()
    await under_way(world, [Push], [Exchange], [Pull])
    for link in reversed(world.links):
        link.release()
    assert await world.outcomes([1, 2]) == [None, 11]
    assert world.value(here) == 6
