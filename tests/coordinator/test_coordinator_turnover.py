"""Workers that come and go while closures run, by the program or a resolver."""

import asyncio
from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest
from cancels import cancelled_everywhere
from coordinator_fakes import alone, cancelled, good

import zstrat.program as zs
from zstrat.cluster import ClusterSpec
from zstrat.coordinator import Workers
from zstrat.errors import (
    AlreadyExistsError,
    BusyError,
    ClosureAbortedError,
    DeadlineExceededError,
    InvalidArgumentError,
    NotFoundError,
    StaleSessionError,
    UnavailableError,
)
from zstrat.wire import CloseSession


@zs.function
def large():
    return jnp.zeros(4096, jnp.float32)


@zs.function
def draw(iterator):
    return next(iterator)


def elements():
    return [np.float32(n) for n in range(100)]


def test_an_added_worker_gets_closures_behind_its_dataset(make_world):
    world = make_world(workers=1)
    coordinator = world.coordinator(closures_in_flight=2)
    workers = Workers(world.session)
    iterator = iter(coordinator.create_per_worker_dataset(elements))
    assert coordinator.schedule(draw, args=(iterator,)).fetch() == 0
    assert len(iterator.values) == 1
    world.on_loop(world.hold)
    values = [coordinator.schedule(draw, args=(iterator,)) for _ in range(4)]
    late = world.newcomer("late:1")

    assert workers.add("late:1") == 1
    assert workers.addresses == {0: "worker0:1", 1: "late:1"}
    world.until(lambda: late.ran and len(late.built) == 1)
    iterator.wait_ready()
    assert len(iterator.values) == 2
    world.on_loop(world.release)
    coordinator.join()
    assert sorted(float(value.fetch()) for value in values) == [0, 1, 1, 2]
    assert late.sessions[0].index == 1
    assert late.sessions[0].worker_count == 2
    told = coordinator.metrics()
    assert told["workers"]["/job:worker/task:1"]["address"] == "late:1"
    assert told["workers"]["/job:worker/task:1"]["completed"] == 2
    assert (told["workers_added"], told["workers_removed"]) == (1, 0)
    assert world.session.worker_count == 2


def test_a_worker_may_be_added_before_there_is_a_coordinator(make_world):
    world = make_world(workers=1)
    world.connect()
    late = world.newcomer("late:1")
    Workers(world.session).add("late:1")
    Workers(world.session).remove("worker0:1")
    coordinator = world.coordinator()
    assert coordinator.schedule(good).fetch() == 1
    assert [step for step, _ in late.ran] == [1]
    assert list(coordinator.metrics()["workers"]) == ["/job:worker/task:1"]


def test_a_removed_worker_ends_what_it_runs_and_gets_nothing_more(world, in_thread):
    coordinator = world.coordinator(closures_in_flight=2)
    workers = Workers(world.session)
    first, second = world.workers
    iterator = iter(coordinator.create_per_worker_dataset(elements))
    iterator.wait_ready()
    gone = iterator.values[0]

    values = world.held(coordinator, 4)
    world.on_loop(first.begin)  # `CancelSteps` gives back the other
    removing = in_thread(workers.remove, "worker0:1", 60.0)
    world.until(lambda: not first.queue)  # what had not begun was taken back
    assert not removing.done()
    state = coordinator.metrics()["workers"]["/job:worker/task:0"]
    assert (state["state"], state["in_flight"]) == ("leaving", 1)

    def end():
        first.finish()
        second.held = False
        second.work()

    world.on_loop(end)
    removing.result(100)
    coordinator.join()
    assert [value.fetch() for value in values] == [1] * 4
    assert first.closed
    assert not first.exited
    assert len(first.ran) == 1
    assert len(second.ran) == 3
    assert {attempt for _, attempt in second.ran} <= {1, 2}
    assert workers.addresses == {1: "worker1:1"}
    assert gone.is_aborted
    assert len(iterator.values) == 1
    [coordinator.schedule(good) for _ in range(4)]
    coordinator.join()
    assert len(first.ran) == 1
    told = coordinator.metrics()
    assert told["workers_removed"] == 1
    assert told["recoverable_worker_failures"] == 0
    with pytest.raises(NotFoundError):
        workers.remove("worker0:1")


@pytest.mark.parametrize("name", ["worker:1", "/job:worker/task:1"])
@pytest.mark.parametrize("awaited", [False, True])
def test_a_worker_is_removed_by_its_name(world, name, awaited):
    world.coordinator()
    workers = Workers(world.session)
    with pytest.raises(NotFoundError, match=r"worker0:1 \(worker:0\), worker1:1 \("):
        workers.remove("worker:7")
    if awaited:
        asyncio.run(workers.remove_async(name))
    else:
        workers.remove(name)
    assert workers.addresses == {0: "worker0:1"}


@pytest.mark.parametrize("lost", [False, True])
def test_what_a_leaving_worker_does_not_end_runs_elsewhere(world, lost, in_thread):
    coordinator = world.coordinator(closures_in_flight=1)
    first, second = world.workers
    values = world.held(coordinator, 2)
    world.on_loop(setattr, first, "queue", [])  # it runs, and does not end
    timeout = 60.0 if lost else 0.0
    removing = in_thread(Workers(world.session).remove, "worker0:1", timeout)
    if lost:
        member = coordinator._core.dispatcher.members.members[0]
        world.until(lambda: member.retired)
        world.on_loop(first.kill)
    removing.result(100)
    world.on_loop(world.release)
    coordinator.join()
    assert [value.fetch() for value in values] == [1, 1]
    assert sorted(attempt for _, attempt in second.ran) == [1, 2]


@alone
def test_closures_wait_when_all_workers_were_removed(world, coordinator):
    workers = Workers(world.session)
    assert coordinator.schedule(good).fetch() == 1
    workers.remove("worker0:1")
    assert len(workers) == 0
    value = coordinator.schedule(good)
    late = world.newcomer("late:1")
    assert workers.add("late:1") == 1, "an index is never given to another address"
    assert value.fetch() == 1
    assert len(late.ran) == 1

    workers.remove("late:1")
    assert workers.add("worker0:1") == 0, "its own it has back"
    assert coordinator.schedule(good).fetch() == 1
    with pytest.raises(InvalidArgumentError, match="--index"):
        workers.add("later:1", index=1)


def test_nobody_comes_and_the_words_say_that_all_were_removed(make_world):
    world = make_world(workers=1)
    coordinator = world.coordinator(worker_wait_timeout=0.01)
    Workers(world.session).remove("worker0:1")
    coordinator.schedule(good)
    with pytest.raises(UnavailableError, match=r"workers\.add"):
        coordinator.join()


def test_who_cannot_join_is_refused_and_leaves_nothing(world, coordinator, caplog):
    workers = Workers(world.session)
    unlike = world.newcomer("late:1")
    unlike.devices = 4
    with pytest.raises(InvalidArgumentError):
        workers.add("late:1")
    world.tasks["alias:1"] = world.workers[0]
    with pytest.raises(AlreadyExistsError, match=r"/job:worker/task:0.*\b1\b"):
        workers.add("alias:1")
    with pytest.raises(AlreadyExistsError, match=r"\b1\b.*worker 0"):
        workers.add("worker0:1")
    with pytest.raises(AlreadyExistsError, match="worker 1"):
        workers.add("late:1", index=1)
    for wrong in ("late", "late:0", "late:x", 5, None):
        with pytest.raises(ValueError, match=f"{wrong!r}: .*a port above 0"):
            workers.add(wrong)
    for wrong in (-1, True, "1", 1.5):
        with pytest.raises(InvalidArgumentError, match=f"index={wrong!r}: expected"):
            workers.add("late:1", index=wrong)
    with pytest.raises(InvalidArgumentError, match="timeout='5'"):
        workers.add("late:1", timeout="5")
    unlike.busy = True
    with pytest.raises(BusyError):
        workers.add("late:1", timeout=0.05)
    unlike.alive = False
    unlike.link = None
    with pytest.raises(DeadlineExceededError):
        workers.add("late:1", timeout=0.01)
    with pytest.raises(InvalidArgumentError, match="timeout=-1"):
        workers.add("late:1", timeout=-1)
    assert workers.addresses == {0: "worker0:1", 1: "worker1:1"}
    assert list(coordinator.metrics()["workers"]) == [
        "/job:worker/task:0",
        "/job:worker/task:1",
    ]
    assert coordinator.schedule(good).fetch() == 1
    unlike.alive, unlike.busy, unlike.devices = True, False, 2
    assert workers.add("late:1") == 2, "its number was not used up"


async def test_an_addition_that_is_given_up_leaves_nothing(world, coordinator):
    workers = Workers(world.session)
    late = world.newcomer("late:1")
    late.alive = False
    adding = asyncio.ensure_future(workers.add_async("late:1"))
    await asyncio.to_thread(world.until, lambda: late.link is not None)
    assert len(workers) == 3
    await cancelled(adding)
    for _ in range(2):  # the loop has heard of it, and has carried it out
        world.on_loop(world.changed)
    assert len(workers) == 2
    late.alive = True
    assert await workers.add_async("late:1") == 2
    await workers.remove_async("late:1")
    assert len(workers) == 2
    coordinator.schedule(good).fetch()


async def test_an_addition_that_is_cancelled_anywhere_is_none(make_world):
    world = make_world(workers=1)
    coordinator, workers = world.coordinator(), Workers(world.session)
    world.newcomer("late:1")
    add = partial(workers.add_async, "late:1")
    async for was_cancelled in cancelled_everywhere(add):
        if was_cancelled:
            assert await add() == 1
        await workers.remove_async("late:1")
    assert len(workers) == 1
    assert await asyncio.to_thread(coordinator.schedule(good).fetch) == 1


async def test_a_removal_that_is_cancelled_anywhere_is_one(make_world):
    world = make_world(workers=1)
    coordinator, workers = world.coordinator(), Workers(world.session)
    world.newcomer("late:1")
    await workers.add_async("late:1")
    async for _ in cancelled_everywhere(lambda: workers.remove_async("late:1")):
        assert await workers.add_async("late:1") == 1
    await workers.remove_async("late:1")
    assert await asyncio.to_thread(coordinator.schedule(good).fetch) == 1


def test_one_may_be_added_in_the_place_of_one_that_has_not_gone_yet(world, in_thread):
    coordinator = world.coordinator(closures_in_flight=1)
    workers = Workers(world.session)
    first, _ = world.workers
    values = world.held(coordinator, 2)
    world.on_loop(first.begin)
    removing = in_thread(workers.remove, "worker0:1", 60.0)
    world.until(lambda: len(workers) == 1)
    with pytest.raises(BusyError, match="worker 0"):
        workers.add("worker0:1", timeout=0.01)
    adding = in_thread(workers.add, "worker0:1", None, 60.0)
    world.on_loop(first.finish)
    world.on_loop(world.release)
    removing.result(100)
    adding.result(100)
    assert workers.addresses == {0: "worker0:1", 1: "worker1:1"}
    assert [value.fetch() for value in values] == [1, 1]


def test_a_worker_that_is_added_again_does_not_end_at_a_goodbye_that_comes_late(world):
    world.coordinator()
    workers, (first, _) = Workers(world.session), world.workers
    goodbyes = first.heard(CloseSession)
    workers.remove("worker0:1")
    assert workers.add("worker0:1", 0) == 0
    (goodbye,) = goodbyes
    with pytest.raises(StaleSessionError):
        first.handle(goodbye)


def test_a_large_result_goes_away_with_its_worker(world, coordinator):
    value = coordinator.schedule(large)
    coordinator.join()
    workers = Workers(world.session)
    workers.remove(workers.addresses[value.run.worker == "/job:worker/task:1"])
    with pytest.raises(ClosureAbortedError):
        value.fetch()


def test_shares_of_datasets_are_fixed_and_newcomers_get_free_ones(world, coordinator):
    workers = Workers(world.session)
    made = [iter(coordinator.create_per_worker_dataset(elements))]
    made[0].wait_ready()
    workers.remove("worker0:1")
    late = world.newcomer("late:1")
    more = world.newcomer("more:1")
    workers.add("late:1")
    workers.add("more:1")
    made.append(iter(coordinator.create_per_worker_dataset(elements)))
    for iterator in made:
        iterator.wait_ready()

    def shares(worker):
        return [(order.pipeline, order.pipelines) for order in worker.built]

    assert shares(world.workers[0]) == [(0, 2)]
    assert shares(world.workers[1]) == [(1, 2), (0, 3)]
    assert shares(late) == [(0, 2), (1, 3)]
    assert shares(more) == [(0, 2), (2, 3)]


def test_a_worker_may_be_removed_while_it_builds(world, coordinator, caplog):
    first = world.workers[0]
    first._build = first.built.append  # and it does not answer
    iterator = iter(coordinator.create_per_worker_dataset(elements))
    world.until(lambda: first.built)
    value = iterator.values[0]
    Workers(world.session).remove("worker0:1")
    assert value.is_aborted
    iterator.wait_ready()
    assert coordinator.schedule(draw, args=(iterator,)).fetch() == 0
    world.close()
    assert "Traceback" not in caplog.text


class Resolver:
    """Tells the test which questions there were."""

    def __init__(self, world, **workers):
        self.world, self.error, self.asked = world, None, 0
        self.answer(workers or {"0": "worker0:1", "1": "worker1:1"})

    def answer(self, workers):
        self.spec = ClusterSpec(
            {"worker": {int(number): at for number, at in workers.items()}}
        )

    def __call__(self):
        self.asked += 1
        self.world.session.portal.call_soon(self.world.changed)
        if self.error is not None:
            raise self.error
        return self.spec


def watched(world, every=0.01):
    """A coordinator whose cluster asks a resolver."""
    coordinator = world.coordinator()
    resolver = Resolver(world)
    world.on_loop(_watch, world, resolver, every)
    return coordinator, resolver


def _watch(world, resolver, every):
    def ask():
        spec = resolver()
        return {n: spec.task_address("worker", n) for n in spec.task_indices("worker")}

    world.session.cluster.turnover.watch(ask, every)


def turnover(world):
    return world.session.cluster.turnover.metrics


def test_a_worker_that_the_resolver_names_is_used(world):
    coordinator, resolver = watched(world)
    late = world.newcomer("late:1")
    resolver.answer({0: "worker0:1", 1: "worker1:1", 5: "late:1"})
    late.index = 5
    late.born()
    world.on_loop(world.hold)
    [coordinator.schedule(good) for _ in range(12)]
    world.until(lambda: late.queue)
    world.on_loop(world.release)
    coordinator.join()
    assert "/job:worker/task:5" in coordinator.metrics()["workers"]
    assert turnover(world)["workers_added"] == 1


def test_a_worker_that_returns_at_another_address_is_the_same_one(world, caplog):
    coordinator, resolver = watched(world)
    iterator = iter(coordinator.create_per_worker_dataset(elements))
    iterator.wait_ready()
    first = world.workers[0]
    moved = world.newcomer("moved:1", index=0)
    world.on_loop(world.hold)
    values = [coordinator.schedule(draw, args=(iterator,)) for _ in range(4)]
    world.until(lambda: world.running == 4)
    world.on_loop(first.kill)
    resolver.answer({0: "moved:1", 1: "worker1:1"})
    world.until(lambda: moved.built)
    world.on_loop(world.release)
    coordinator.join()
    assert sorted(float(value.fetch()) for value in values)[:2] == [0, 0]
    assert moved.sessions[0].index == 0
    assert (moved.built[0].pipeline, moved.built[0].pipelines) == (0, 2)
    told = coordinator.metrics()["workers"]
    assert list(told) == ["/job:worker/task:0", "/job:worker/task:1"]
    assert told["/job:worker/task:0"]["address"] == "moved:1"
    assert turnover(world)["workers_moved"] == 1
    assert "/job:worker/task:0 moves from worker0:1 to moved:1" in caplog.text


def test_what_a_worker_runs_that_moves_alive_runs_once_more(world):
    coordinator, resolver = watched(world)
    moved = world.newcomer("moved:1", index=0)
    values = world.held(coordinator, 4)
    resolver.answer({0: "moved:1", 1: "worker1:1"})
    world.until(lambda: moved.sessions)
    world.workers[0].held = True
    world.on_loop(moved.work)
    world.on_loop(world.release)
    coordinator.join()
    assert [value.fetch() for value in values] == [1] * 4
    assert coordinator.metrics()["recoverable_worker_failures"] == 0


def test_a_resolver_with_hiccups_dismisses_nobody_who_lives(world, caplog):
    coordinator, resolver = watched(world)
    resolver.answer({})
    resolver.error = OSError("no such service")
    seen = resolver.asked
    world.until(lambda: resolver.asked >= seen + 3)
    assert turnover(world)["resolver_errors"] >= 2
    assert caplog.text.count("OSError: no such service") == 1, "said once"
    resolver.error = None
    seen = resolver.asked
    world.until(lambda: resolver.asked >= seen + 3)
    assert len(Workers(world.session)) == 2
    assert coordinator.schedule(good).fetch() == 1

    world.on_loop(world.workers[0].kill)
    world.until(lambda: turnover(world)["workers_removed"] == 1 or world.changed())
    assert Workers(world.session).addresses == {1: "worker1:1"}
    assert coordinator.schedule(good).fetch() == 1
    assert coordinator.metrics()["recoverable_worker_failures"] == 1


def test_after_a_loss_the_resolver_is_asked_at_once(world):
    _, resolver = watched(world, every=3600.0)
    assert resolver.asked == 0
    world.on_loop(world.workers[0].kill)
    world.until(lambda: resolver.asked >= 1)


def test_what_the_program_has_removed_no_resolver_brings_back(world):
    coordinator, resolver = watched(world)
    Workers(world.session).remove("worker0:1")
    seen = resolver.asked
    world.until(lambda: resolver.asked >= seen + 3)
    assert Workers(world.session).addresses == {1: "worker1:1"}
    assert coordinator.schedule(good).fetch() == 1
