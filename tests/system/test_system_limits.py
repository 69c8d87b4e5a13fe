"""What a look at a live run finds, in runs that are held up on purpose."""

import asyncio
import contextlib
import socket
import threading
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zstrat as zs
from zstrat.config import Settings
from zstrat.launch import examine_run
from zstrat.transport import run

pytestmark = pytest.mark.processes


@pytest.fixture
def coordinator(daemons):
    """Of a session in which nothing has happened yet."""
    with zs.ParameterServerStrategy(daemons.resolver) as strategy:
        yield zs.ClusterCoordinator(strategy)


def looked_at(daemons):
    """One look, at the last ten seconds."""

    async def look():
        enough = asyncio.Event()
        enough.set()
        return await examine_run(daemons.spec, Settings(), 60.0, 30.0, enough)

    found = run(look())
    assert found.problems == {}
    return found


def test_a_dataset_that_waits_is_named(daemons, coordinator):
    def slow():
        while True:
            threading.Event().wait(0.3)  # for a disk that is not there
            yield np.ones(4, np.float32)

    @zs.function
    def step(iterator):
        return jnp.sum(next(iterator))

    iterator = iter(coordinator.create_per_worker_dataset(slow))
    for _ in range(10):
        coordinator.schedule(step, args=(iterator,))
    coordinator.join()
    found = looked_at(daemons)
    draws = [limit for limit in found.limits if limit.what == "draw"]
    assert draws
    assert draws[0] == found.limits[0]
    assert draws[0].task.startswith("worker:")
    assert "waits for its dataset" in draws[0].words
    # A quantile is off by a quarter at most.
    assert draws[0].numbers["draw_p50"] >= 0.3 / 1.25


def waits(seconds):
    """A step that computes for so long."""

    @zs.function(eager=True)
    def step():
        threading.Event().wait(seconds)  # for a chip that is not there

    return step


def named(found, what):
    return {limit.task for limit in found.limits if limit.what == what}


def test_a_program_that_does_not_schedule_fast_enough_is_named(daemons, coordinator):
    step = waits(0.001)
    for _ in range(10):
        coordinator.schedule(step).fetch()
        threading.Event().wait(0.3)  # the program does something else
    found = looked_at(daemons)
    assert found.limits[0].what == "queue"
    assert "is idle" in found.limits[0].words
    assert "schedule more steps" in found.limits[0].advice


def test_a_program_that_waits_in_schedule_is_named(daemons):
    gate = socket.create_server(("127.0.0.1", 0))
    address = gate.getsockname()

    @zs.function(eager=True)
    def step():
        with socket.create_connection(address) as line:
            line.recv(1)  # until the test closes it

    with gate, zs.ParameterServerStrategy(daemons.resolver) as strategy:
        coordinator = zs.ClusterCoordinator(
            strategy, max_queued=2, closures_in_flight=1
        )
        for _ in range(2):
            coordinator.schedule(step)
        begun = [gate.accept()[0] for _ in range(2)]
        for _ in range(2):
            coordinator.schedule(step)  # now it is full
        begun.pop().close()
        begun.append(gate.accept()[0])  # was handed out of a full queue
        found = looked_at(daemons)
        for line in begun:
            line.close()
        gate.accept()[0].close()
        coordinator.join()
    assert named(found, "full queue") == {"program"}


def test_values_that_are_old_are_named(daemons, monkeypatch):
    monkeypatch.setenv("ZSTRAT_PREFETCH", "16")
    with zs.ParameterServerStrategy(daemons.resolver) as strategy:
        coordinator = zs.ClusterCoordinator(strategy)
        with strategy.scope():
            v = zs.Variable(np.zeros(4, np.float32), name="old")
            optimizer = zs.Optimizer(optax.sgd(0.1))

        @zs.function
        def step():
            _, gradient = zs.value_and_grad(lambda v: jnp.sum(v**2))(v)
            optimizer.apply_gradients([(gradient, v)])

        for _ in range(400):
            coordinator.schedule(step)
        coordinator.join()
        found = looked_at(daemons)
    (stale,) = [limit for limit in found.limits if limit.what == "stale"]
    assert stale.numbers["p50"] > 6
    assert "2 workers alone cause about 1" in stale.words


class Slow:
    """A way to a task, on which all that it says takes 50 ms longer."""

    def __init__(self, address):
        self._there = address.removeprefix("ipc://")
        self.address = f"{address}-slow"
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(f"{self._there}-slow")
        self._server.listen()
        self._lines = []
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self):
        for line in (self._server, *self._lines):
            with contextlib.suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)
            line.close()
        Path(f"{self._there}-slow").unlink()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                here, _ = self._server.accept()
                there = socket.socket(socket.AF_UNIX)
                there.connect(self._there)
                self._lines += [here, there]
                for way in ((here, there, 0.0), (there, here, 0.05)):
                    threading.Thread(target=self._copy, args=way, daemon=True).start()

    def _copy(self, source, target, seconds):
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                threading.Event().wait(seconds)
                target.sendall(data)


@contextlib.contextmanager
def slow_second_server(daemons):
    """A coordinator, and a variable at each of two servers; the way to the second one
    is slow."""
    spec = daemons.spec.as_dict()
    with contextlib.closing(Slow(spec["ps"][1])) as slow:
        ways = zs.ClusterSpec({**spec, "ps": [spec["ps"][0], slow.address]})
        resolver = zs.cluster_resolver.SimpleClusterResolver(ways)
        with zs.ParameterServerStrategy(resolver) as strategy:
            coordinator = zs.ClusterCoordinator(strategy)
            with strategy.scope():
                both = [zs.Variable(np.zeros(4, np.float32)) for _ in range(2)]
            assert {v.device.split("/task:")[1][0] for v in both} == {"0", "1"}
            yield coordinator, both


def test_the_way_to_one_of_two_parameter_servers_is_named(daemons):
    with slow_second_server(daemons) as (coordinator, both):
        near, far = sorted(both, key=lambda v: v.device)

        @zs.function
        def step():  # nothing is pushed the slow way, so that is no limit, too
            near.assign_add(far.value() + 1)

        for _ in range(30):
            coordinator.schedule(step)
        coordinator.join()
        found = looked_at(daemons)
    assert found.limits[0].what == "pull of ps:1"
    assert found.limits[0].task.startswith("worker:")
    assert "so latency dominates" in found.limits[0].words


def test_eager_steps_that_wait_for_their_pushes_are_named(daemons):
    with slow_second_server(daemons) as (coordinator, both):

        @zs.function(eager=True)
        def step():
            for v in both:
                v.assign_add(np.ones(4, np.float32))

        for _ in range(30):
            coordinator.schedule(step)
        coordinator.join()
        found = looked_at(daemons)
    assert found.limits[0].what == "push"
    assert found.limits[0].task.startswith("worker:")
    assert "eager steps" in found.limits[0].words
