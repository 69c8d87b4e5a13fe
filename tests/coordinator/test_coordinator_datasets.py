"""Per-worker datasets and iterators."""

import gc

import jax
import numpy as np
import pytest
from coordinator_fakes import alone, good

import zstrat.program as zs
from zstrat.coordinator import RemoteValueStatus
from zstrat.coordinator._resources import Record
from zstrat.errors import (
    CancelledError,
    ClosureInputError,
    OutOfRangeError,
)
from zstrat.wire import BuildResource


def numbers():
    for i in range(100):
        yield {"x": np.full(3, i, np.float32), "y": (np.int32(i),)}


def broken():
    raise ValueError("no such file")


@zs.function
def step(iterator):
    return iterator.get_next()["x"].sum()


def test_a_step_draws_from_the_iterator_of_its_worker(world, coordinator):
    iterator = iter(coordinator.create_per_worker_dataset(numbers))

    @zs.function
    def step(iterator):
        return next(iterator)["x"].sum()

    values = [coordinator.schedule(step, args=(iterator,)) for _ in range(20)]
    coordinator.join()
    drawn = sorted(float(value.fetch()) for value in values)
    used = [len(worker.ran) for worker in world.workers]
    assert drawn == sorted(3.0 * i for n in used for i in range(n))
    assert step.trace_count == 1


@alone
def test_a_dataset_that_cannot_be_sent_fails(world, coordinator, monkeypatch):
    link = world.workers[0].link
    submit = link.submit

    def refuse(message, **options):
        if isinstance(message, BuildResource):
            raise ValueError("the header is too large")
        return submit(message, **options)

    monkeypatch.setattr(link, "submit", refuse)
    iterator = iter(coordinator.create_per_worker_dataset(numbers))
    with pytest.raises(ClosureInputError, match="header is too large"):
        iterator.wait_ready(timeout=5.0)
    value = coordinator.schedule(step, args=(iterator,))
    with pytest.raises(ClosureInputError, match="header is too large"):
        value.fetch(timeout=5.0)
    monkeypatch.setattr(link, "submit", submit)
    with pytest.raises(ClosureInputError):
        coordinator.join()
    assert coordinator.schedule(good).fetch() == 1


@pytest.mark.parametrize("eager", [False, True])
def test_bytes_may_come_in_the_order_of_another_machine(world, eager):
    """As files have them; jax takes those of this machine alone."""
    rows = np.arange(4, dtype=">f4"), np.arange(4, dtype=">i2")
    iterator = iter(world.coordinator().create_per_worker_dataset(lambda: [rows]))

    @zs.function(eager=eager)
    def step(iterator):
        floats, whole = next(iterator)
        return floats * 0.5, whole + 300

    value = world.coordinator().schedule(step, args=(iterator,))
    floats, whole = value.fetch()
    assert (floats.dtype, floats.tolist()) == (np.float32, [0, 0.5, 1, 1.5])
    assert (whole.dtype, whole.tolist()) == (np.int16, [300, 301, 302, 303])


def test_the_element_spec_is_what_a_worker_says(world):
    dataset = world.coordinator().create_per_worker_dataset(numbers)
    spec = dataset.element_spec
    assert spec == {
        "x": jax.ShapeDtypeStruct((3,), np.float32),
        "y": (jax.ShapeDtypeStruct((), np.int32),),
    }
    assert iter(dataset).element_spec == spec


def test_a_ready_made_iterable_travels_as_it_is(world, coordinator):
    for worker in world.workers:
        build = worker._build

        def build_any(message, worker=worker, build=build):
            maker = worker.code[message.maker]
            if not callable(maker):
                worker.code[message.maker] = lambda: maker
            return build(message)

        worker._build = build_any
    data = [{"x": np.ones(3, np.float32)}] * 5
    iterator = iter(coordinator.create_per_worker_dataset(data))
    assert coordinator.schedule(step, args=(iterator,)).fetch() == 3


@alone
def test_each_iter_is_a_fresh_pass(world, coordinator):
    dataset = coordinator.create_per_worker_dataset(numbers)
    for _ in range(2):
        iterator = iter(dataset)
        assert coordinator.schedule(step, args=(iterator,)).fetch() == 0
        assert coordinator.schedule(step, args=(iterator,)).fetch() == 3


def test_next_on_the_coordinator_is_refused(world):
    iterator = iter(world.coordinator().create_per_worker_dataset(numbers))
    with pytest.raises(NotImplementedError, match=r"next\(\)"):
        next(iterator)
    with pytest.raises(NotImplementedError):
        iterator.get_next()


def test_iter_in_a_step_is_refused(coordinator):
    dataset = coordinator.create_per_worker_dataset(numbers)

    @zs.function
    def wrong():
        return next(iter(dataset))["x"]

    with pytest.raises(RuntimeError, match=r"iter\(\)"):
        coordinator.schedule(wrong)


def test_the_dataset_itself_is_no_argument(coordinator):
    dataset = coordinator.create_per_worker_dataset(numbers)

    @zs.function(eager=True)
    def use(data):
        return 1

    with pytest.raises(TypeError, match=r"iter\(dataset\)"):
        coordinator.schedule(use, args=(dataset,))


def test_wrong_dataset_functions_are_refused(coordinator):
    with pytest.raises(TypeError, match="create_per_worker_dataset"):
        coordinator.create_per_worker_dataset(3)
    with pytest.raises(TypeError, match="a, b"):
        coordinator.create_per_worker_dataset(lambda a, b: [])


@alone
def test_the_end_of_data_is_raised_by_join(world, coordinator):

    def two():
        return [{"x": np.ones(3)}] * 2

    iterator = iter(coordinator.create_per_worker_dataset(two))
    for _ in range(5):
        coordinator.schedule(step, args=(iterator,))
    with pytest.raises(OutOfRangeError):
        coordinator.join()


def test_a_dataset_of_no_element_is_at_its_end(make_world):
    coordinator = make_world(workers=1).coordinator()
    iterator = iter(coordinator.create_per_worker_dataset(list))
    value = coordinator.schedule(step, args=(iterator,))
    with pytest.raises(OutOfRangeError, match="/job:worker/task:0"):
        coordinator.join()
    with pytest.raises(OutOfRangeError):
        value.fetch()


def test_a_failure_to_build_reaches_those_who_need_it(coordinator):
    iterator = iter(coordinator.create_per_worker_dataset(broken))

    @zs.function
    def free():
        return np.float32(1)

    assert coordinator.schedule(free).fetch() == 1, "others do not notice"
    value = coordinator.schedule(step, args=(iterator,))
    with pytest.raises(ClosureInputError, match="ValueError") as raised:
        coordinator.join()
    assert isinstance(raised.value.original_exception, ValueError)
    with pytest.raises(ClosureInputError):
        value.fetch()
    for call in (iterator.wait_ready, lambda: iterator.element_spec):
        with pytest.raises(ClosureInputError, match="ValueError"):
            call()
    for remote in iterator.values:
        with pytest.raises(ClosureInputError):
            remote.fetch()
    assert coordinator.schedule(free).fetch() == 1


def test_wait_ready_returns_when_all_are_built(world):
    iterator = iter(world.coordinator().create_per_worker_dataset(numbers))
    iterator.wait_ready()
    assert [v.state for v in iterator.values] == [RemoteValueStatus.READY] * 2
    with pytest.raises(NotImplementedError, match="stays on its worker"):
        iterator.values[0].fetch()


@alone
def test_an_iterator_goes_with_its_worker_and_is_built_again(world, coordinator):
    iterator = iter(coordinator.create_per_worker_dataset(numbers))
    assert coordinator.schedule(step, args=(iterator,)).fetch() == 0
    assert coordinator.schedule(step, args=(iterator,)).fetch() == 3
    (worker,) = world.workers
    world.on_loop(worker.kill)
    (remote,) = iterator.values
    assert remote.state is RemoteValueStatus.ABORTED
    with pytest.raises(CancelledError):
        remote.fetch()
    value = coordinator.schedule(step, args=(iterator,))
    world.on_loop(worker.come_back)
    assert value.fetch() == 0
    assert remote.state is RemoteValueStatus.READY


def test_a_resource_asked_for_while_its_worker_is_away_waits_for_it(world, coordinator):
    away = world.workers[0]
    world.on_loop(away.kill)
    iterator = iter(coordinator.create_per_worker_dataset(numbers))
    iterator.wait_ready()
    states = [value.state for value in iterator.values]
    assert states == [RemoteValueStatus.ABORTED, RemoteValueStatus.READY]
    world.on_loop(away.come_back)
    world.until(lambda: bool(away.resources))
    iterator.wait_ready()
    assert iterator.values[0].state is RemoteValueStatus.READY


def test_a_worker_gets_no_closure_before_its_resources(world, coordinator):
    builds = []
    for worker in world.workers:
        worker.deferred = worker._build
        worker._build = lambda message, worker=worker: builds.append((worker, message))
    iterator = iter(coordinator.create_per_worker_dataset(numbers))

    @zs.function(eager=True)
    def draw(iterator):
        return next(iterator)["x"]

    # An eager function is not traced, so schedule does not wait for the element.
    value = coordinator.schedule(draw, args=(iterator,))
    world.until(lambda: len(builds) == 2)
    assert not any(worker.queue or worker.ran for worker in world.workers)
    first = world.workers[0]

    def answer():
        for worker, message in builds:
            if worker is first:
                built = worker.deferred(message)
                (future,) = [f for f in worker.link.requests if not f.done()]
                future.set_result(built)

    world.on_loop(answer)
    np.testing.assert_array_equal(value.fetch(), np.zeros(3))
    assert first.ran
    assert not world.workers[1].ran


def test_a_dropped_iterator_is_forgotten_by_the_workers(world, coordinator):
    iterator = iter(coordinator.create_per_worker_dataset(numbers))
    coordinator.schedule(step, args=(iterator,)).fetch()
    iterator.wait_ready()
    assert all(worker.resources for worker in world.workers)
    del iterator
    gc.collect()
    iterator = iter(coordinator.create_per_worker_dataset(numbers))
    iterator.wait_ready()
    world.until(
        lambda: all(list(w.resources) == [iterator.resource] for w in world.workers)
    )


def test_an_iterator_stays_for_as_long_as_closures_need_it(world, coordinator):
    dataset = coordinator.create_per_worker_dataset(numbers)
    for worker in world.workers:
        worker.held = True
    value = coordinator.schedule(step, args=(iter(dataset),))
    gc.collect()
    world.on_loop(coordinator._core.dispatcher.turn_soon)

    def release():
        for worker in world.workers:
            worker.held = False
            worker.work()

    world.until(lambda: any(worker.queue for worker in world.workers))
    world.on_loop(release)
    assert value.fetch() == 0


def test_per_worker_resources_are_arguments_too(coordinator):

    def table():
        return np.arange(4)

    resource = coordinator._create_per_worker_resources(table)

    @zs.function(eager=True)
    def look(x):
        return x[2]

    assert coordinator.schedule(look, args=(resource,)).fetch() == 2


def test_a_dataset_that_is_dropped_before_it_is_begun(world, coordinator):
    builder = coordinator._core.dispatcher.builder

    def in_one_turn():
        """Added and dropped after a turn has taken what is new, before it cleans."""
        record = Record(
            coordinator._core.engine, (), name="x", purpose="value", maker=None
        )
        builder.add_soon(record)
        builder.drop_soon(record.number)
        before = builder.dropped()
        (builder._records[record.number],) = builder.take_new()
        return before, builder.dropped(), [record.number]

    before, after, expected = world.on_loop(in_one_turn)
    assert (before, after) == ([], expected)
