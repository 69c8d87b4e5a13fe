"""What workers print is shown before the wait for it ends."""

from __future__ import annotations

import pytest

import zstrat.program as zs
from zstrat.config import Settings
from zstrat.coordinator import AsyncClusterCoordinator, connect_session
from zstrat.wire import Printed, PrintedText


@zs.function
def constant():
    return 7


def say(worker, text, session=None):
    """On the loop: the worker prints, then runs what it has."""
    number = worker.sessions[-1].session if session is None else session
    worker.link.say(Printed(number, [PrintedText(1, text, 0)]))
    worker.work()


def test_before_a_value_is_fetched(world, coordinator, capsys):
    world.on_loop(world.hold)
    value = coordinator.schedule(constant)
    world.on_loop(say, world.workers[0], "loss 0.5\n")
    world.on_loop(world.release)
    assert value.fetch() == 7
    assert capsys.readouterr().out == "worker:0| loss 0.5\n"


def test_before_a_join_ends_whoever_printed(world, coordinator, capsys):
    coordinator.schedule(constant)
    for number, worker in enumerate(world.workers):
        world.on_loop(say, worker, f"line {number}\n")
    coordinator.join()
    lines = capsys.readouterr().out.splitlines()
    assert lines == [f"worker:{n}| line {n}" for n in range(len(world.workers))]


async def test_before_a_value_was_awaited(world, capsys):
    world.coordinator()
    coordinator = AsyncClusterCoordinator(world.strategy)
    value = await coordinator.schedule(constant)
    world.on_loop(say, world.workers[0], "a\n")
    assert await value == 7
    assert capsys.readouterr().out == "worker:0| a\n"


def test_what_is_of_another_session_is_not_shown(world, coordinator, capsys):
    world.on_loop(say, world.workers[0], "a secret\n", session=5)
    coordinator.schedule(constant).fetch()
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("output", ["program", "files"])
def test_workers_are_told_whether_anybody_listens(world, output):
    settings = Settings(output=output)
    session = connect_session(world.spec, settings, make_link=world.make_link)
    session.close()
    listens = {worker.sessions[-1].listens for worker in world.workers}
    assert listens == {output == "program"}
