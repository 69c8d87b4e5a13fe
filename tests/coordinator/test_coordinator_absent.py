"""Per-worker datasets that fail, or are asked about, while a worker is away."""

import numpy as np
import pytest

import zstrat.program as zs
from zstrat.coordinator import RemoteValueStatus, _datasets, _engine
from zstrat.errors import ClosureInputError, DeadlineExceededError

ABORTED, READY = RemoteValueStatus.ABORTED, RemoteValueStatus.READY


@pytest.fixture(autouse=True)
def _short_timeout(monkeypatch):
    """Who waits for a worker that never comes fails the test."""
    monkeypatch.setattr(_datasets, "FIRST_BUILD", 10.0)


def broken():
    raise ValueError("no such file")


def numbers():
    yield from [{"x": np.full(3, n, np.float32)} for n in range(9)]


@zs.function
def step(iterator):
    return next(iterator)["x"].sum()


def states(iterator):
    return [value.state for value in iterator.values]


def fails_to_build(worker):
    """What it is asked for from now on."""

    def build(message):
        raise ValueError("no such file")

    worker._build = build


@pytest.mark.parametrize("absent", [0, 1])
def test_a_failure_is_told_though_another_worker_is_away(world, coordinator, absent):
    world.on_loop(world.workers[absent].kill)
    iterator = iter(coordinator.create_per_worker_dataset(broken))
    value = coordinator.schedule(step, args=(iterator,))
    with pytest.raises(ClosureInputError, match="ValueError") as raised:
        coordinator.join()
    assert isinstance(raised.value.original_exception, ValueError)
    with pytest.raises(ClosureInputError, match="ValueError"):
        value.fetch()
    with pytest.raises(ClosureInputError, match="ValueError"):
        iterator.element_spec  # noqa: B018
    found = states(iterator)
    assert (found[absent], found[1 - absent]) == (ABORTED, READY)


def test_a_dataset_that_is_never_built_is_reported(world, monkeypatch, caplog):
    """`schedule` waits until its first element is known."""
    monkeypatch.setattr(_datasets, "FIRST_BUILD", 0.3)
    monkeypatch.setattr(_engine, "NOTICE_SECONDS", 0.05)
    coordinator = world.coordinator()
    world.on_loop(world.kill_workers)
    iterator = iter(coordinator.create_per_worker_dataset(numbers))
    with pytest.raises(DeadlineExceededError, match="building the dataset of numbers"):
        coordinator.schedule(step, args=(iterator,))
    logged = [each for each in caplog.messages if "building the dataset of" in each]
    assert len(logged) == 1


def test_the_same_of_what_a_function_makes_on_every_worker(world, coordinator):
    world.on_loop(world.workers[0].kill)
    made = coordinator.create_per_worker_dataset(broken).build()

    @zs.function
    def first(dataset):
        return next(iter(dataset))["x"]

    coordinator.schedule(first, args=(made,))
    with pytest.raises(ClosureInputError, match="ValueError"):
        coordinator.join()


def test_a_worker_that_goes_while_it_builds_is_not_waited_for(world, coordinator):
    fails, builds = world.workers
    fails_to_build(fails)

    def dies(message):
        builds.kill()

    builds._build = dies
    iterator = iter(coordinator.create_per_worker_dataset(numbers))
    with pytest.raises(ClosureInputError, match="ValueError"):
        iterator.element_spec  # noqa: B018
    assert states(iterator) == [READY, ABORTED]


def test_who_returns_and_can_build_it_tells_what_elements_look_like(world, coordinator):
    fails, away = world.workers
    fails_to_build(fails)
    world.on_loop(away.kill)
    iterator = iter(coordinator.create_per_worker_dataset(numbers))
    coordinator.schedule(step, args=(iterator,))
    with pytest.raises(ClosureInputError):
        coordinator.join()
    assert coordinator.metrics()["traces"] == 0
    world.on_loop(away.come_back)
    world.until(lambda: bool(away.resources))
    assert iterator.element_spec["x"].shape == (3,)
    world.on_loop(fails.kill)
    assert coordinator.schedule(step, args=(iterator,)).fetch() == 0
    assert coordinator.metrics()["traces"] == 1, "the call that failed was not kept"
    assert states(iterator) == [ABORTED, READY]
