"""Between two steps: what runs ends, nothing begins, and all goes on as it was."""

import asyncio
import threading

import numpy as np
import pytest
from coordinator_fakes import cancelled, good

import zstrat.program as zs
from zstrat.errors import PSUnavailableError, UnavailableError
from zstrat.variables import VariableSpec
from zstrat.wire import UpdateOp


@zs.function(eager=True)
def bad(text):
    raise ValueError(text)


class Resting:
    """Holds the session from another thread; ``cut`` is what that gave."""

    def __init__(self, world):
        self._world = world
        self.held, self._leave = threading.Event(), threading.Event()
        self.cut, self.error = None, None
        self._thread = threading.Thread(target=self._live)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._leave.set()
        self._thread.join(100)

    def wait(self):
        assert self.held.wait(100)
        if self.error is not None:
            raise self.error
        return self.cut

    def _live(self):
        async def rest():
            async with self._world.session.at_rest() as self.cut:
                self.held.set()
                await asyncio.to_thread(self._leave.wait, 20)

        try:
            asyncio.run(rest())
        except Exception as error:
            self.error = error
            self.held.set()


def test_what_runs_ends_and_what_has_not_begun_comes_back(world):
    coordinator = world.coordinator(closures_in_flight=2)
    values = world.held(coordinator, 6, running=4)
    begun = [world.on_loop(worker.begin) for worker in world.workers]
    ran = {item[3] for item in begun}
    with Resting(world) as resting:
        world.until(lambda: not world.running)
        assert not resting.held.is_set()
        for worker in world.workers:
            world.on_loop(worker.finish)
        cut = resting.wait()
        over = {s for run in cut.besides for s in range(run.first, run.end)}
        assert set(range(1, cut.end)) | over == ran
        assert world.running == 0
        (fence,) = world.ps[0].fences
        assert fence.low_water == cut.end
        assert fence.over == [(0, cut.end), *cut.besides]
        later = coordinator.schedule(good)
        assert coordinator.metrics()["inflight_closures"] == 0
    world.on_loop(world.release)
    coordinator.join()
    assert [value.fetch() for value in (*values, later)] == [1] * 7
    ran = [run for worker in world.workers for run in worker.ran]
    assert sorted(ran) == [(step, 1) for step in range(1, 8)], "each step ran once"


def test_one_worker_keeps_the_order_of_its_steps(make_world):
    world = make_world(workers=1)
    coordinator = world.coordinator(closures_in_flight=3)
    world.on_loop(world.hold)
    for _ in range(6):
        coordinator.schedule(good)
    world.until(lambda: world.running == 3)
    with Resting(world) as resting:
        assert resting.wait().end == 1
    world.on_loop(world.release)
    coordinator.join()
    assert [step for step, _ in world.workers[0].ran] == list(range(1, 7))


def test_a_step_whose_worker_is_lost_runs_elsewhere_first(world):
    coordinator = world.coordinator(closures_in_flight=1)
    values = world.held(coordinator, 4, running=2)
    lost, other = sorted(world.workers, key=lambda w: w.queue[0][3])
    world.on_loop(lost.begin)
    with Resting(world) as resting:
        world.until(lambda: not other.queue)
        world.on_loop(lost.kill)
        world.until(lambda: other.queue)
        assert not resting.held.is_set()
        world.on_loop(other.work)
        assert resting.wait().end == 2
    world.on_loop(world.release)
    coordinator.join()
    assert [value.fetch() for value in values] == [1] * 4


def test_without_a_worker_for_it_the_wait_ends(make_world):
    world = make_world(workers=1)
    coordinator = world.coordinator(worker_wait_timeout=0.1)
    (value,) = world.held(coordinator)
    world.on_loop(world.workers[0].begin)
    world.on_loop(world.workers[0].kill)
    with Resting(world) as resting:
        with pytest.raises(UnavailableError, match="worker_wait_timeout"):
            resting.wait()
    world.on_loop(world.workers[0].come_back)
    world.on_loop(world.release)
    with pytest.raises(UnavailableError, match="worker_wait_timeout"):
        coordinator.join()
    assert value.is_ready


def test_a_lost_parameter_server_ends_the_wait(world, coordinator):
    world.held(coordinator)
    world.on_loop(next(worker for worker in world.workers if worker.queue).begin)
    with Resting(world) as resting:
        world.on_loop(world.ps[0].kill)
        with pytest.raises(PSUnavailableError, match="/job:ps/task:0"):
            resting.wait()


def test_an_error_that_waits_to_be_raised_is_no_hindrance(world, coordinator):
    value = coordinator.schedule(bad, args=("boom",))
    with pytest.raises(ValueError, match="boom"):
        value.fetch()
    with Resting(world) as resting:
        assert resting.wait().end == 2
    with pytest.raises(ValueError, match="boom"):
        coordinator.join()
    with Resting(world) as resting:
        assert resting.wait().end == 2
    assert coordinator.schedule(good).fetch() == 1


def test_two_may_hold_it(world, coordinator):
    with Resting(world) as first, Resting(world) as second:
        first.wait()
        second.wait()
        value = coordinator.schedule(good)
        first.__exit__()
        assert coordinator._core.engine.queue.held
        assert not value.is_ready
    assert value.fetch() == 1


def test_a_new_coordinator_is_held_too(world, coordinator):
    assert coordinator.schedule(good).fetch() == 1
    with Resting(world) as resting:
        resting.wait()
        coordinator.shutdown()
        again = world.coordinator()
        value = again.schedule(good)
        assert again._core.engine.queue.held
    assert value.fetch() == 1
    with Resting(world) as resting:
        assert resting.wait().end == 3


def test_updates_of_the_program_wait_or_are_waited_for(world, in_thread):
    world.coordinator()
    spec = VariableSpec(1, "v", (), "float32", 0)
    ps, gate = world.ps[0], world.session.cluster.pause.gate
    ps.reads = False

    def update():
        world.update([(spec, UpdateOp.ADD, 0, [np.float32(1)])])

    first = in_thread(update)
    world.until(lambda: len(ps.pushes) == 1)
    with Resting(world) as resting:
        while not gate.is_closed:
            world.until(lambda: True)
        assert not resting.held.is_set()
        second = in_thread(update)
        world.on_loop(ps.answer_pushes)
        resting.wait()
        first.result(100)
        assert len(ps.pushes) == 1
    world.until(lambda: len(ps.pushes) == 2)
    world.on_loop(ps.answer_pushes)
    second.result(100)


def test_an_update_that_nobody_waits_for_any_more_is_waited_for(world):
    world.coordinator()
    spec = VariableSpec(1, "v", (), "float32", 0)
    ps = world.ps[0]
    ps.reads = False
    adds = [(spec, UpdateOp.ADD, 0, [np.float32(1)])]

    async def give_up():
        update = asyncio.ensure_future(world.update_async(adds))
        await asyncio.to_thread(world.until, lambda: len(ps.pushes) == 1)
        await cancelled(update)

    asyncio.run(give_up())
    with Resting(world) as resting:
        while not world.session.cluster.pause.gate.is_closed:
            world.until(lambda: True)
        assert not resting.held.is_set()
        world.on_loop(ps.answer_pushes)
        resting.wait()


def test_an_update_whose_line_is_cut_is_waited_for_and_sent_again(world, in_thread):
    world.coordinator()
    spec = VariableSpec(1, "v", (), "float32", 0)
    ps = world.ps[0]
    ps.reads = False
    adds = [(spec, UpdateOp.ADD, 0, [np.float32(1)])]
    adding = in_thread(world.update, adds)
    world.until(lambda: len(ps.pushes) == 1)
    world.on_loop(ps.kill, "the line was cut")
    with Resting(world) as resting:
        while not world.session.cluster.pause.gate.is_closed:
            world.until(lambda: True)
        world.on_loop(lambda: ps.come_back(same=True))
        world.until(lambda: len(ps.pushes) == 2)
        assert not resting.held.is_set()
        assert not ps.fences
        first, second = ps.pushes
        assert (first.writer, first.step) == (second.writer, second.step)
        world.on_loop(ps.answer_pushes)
        resting.wait()
        adding.result(100)
        assert len(ps.fences) == 1


def test_giving_up_lets_all_go_on(world):
    coordinator = world.coordinator(closures_in_flight=1)
    values = world.held(coordinator, 4, running=2)
    for worker in world.workers:
        world.on_loop(worker.begin)

    async def give_up():
        async with world.session.at_rest():
            pytest.fail("two steps run")

    async def main():
        task = asyncio.ensure_future(give_up())
        await asyncio.to_thread(
            world.until, lambda: coordinator._core.engine.queue.held
        )
        await cancelled(task)

    asyncio.run(main())
    for worker in world.workers:
        world.on_loop(worker.finish)
    world.on_loop(world.release)
    coordinator.join()
    assert [value.fetch() for value in values] == [1] * 4
