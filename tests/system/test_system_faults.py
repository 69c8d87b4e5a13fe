"""What the promises under failure are worth: real daemons, killed for real."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import re
import signal
import subprocess
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from programs import Program

import zstrat as zs
from zstrat.config import Settings, Timeouts

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("programs")]

SLOTS = 200
PATIENCE = "4"
"""Seconds after which a stopped worker is a lost one; too many for one that is slow."""


def _counting(strategy):
    with strategy.scope():
        counts = zs.Variable(np.zeros(SLOTS, np.float32), name="counts")

    @zs.function
    def bump(i):
        counts.assign_add(jax.nn.one_hot(i, SLOTS, dtype=jnp.float32))
        return i

    return counts, bump


@pytest.fixture(scope="module")
def cluster():
    env = {"ZSTRAT_LIVENESS": PATIENCE}
    with zs.LocalCluster(num_ps=2, num_workers=2, env=env) as cluster:
        yield cluster


@pytest.fixture
def patient(monkeypatch):
    monkeypatch.setenv("ZSTRAT_LIVENESS", PATIENCE)


@pytest.fixture
def coordinator(patient, local):
    """Its tables have a part on each server."""
    parts = zs.partitioners.MinSizePartitioner(SLOTS * 4, 2)
    with zs.ParameterServerStrategy(
        local.resolver, variable_partitioner=parts
    ) as strategy:
        yield zs.ClusterCoordinator(strategy)


def _rounds_until(coordinator, bump, reached):
    """Bumps all slots again and again, until the metrics are as wanted; how often."""
    rounds = 0
    while not reached(coordinator.metrics()):
        values = [coordinator.schedule(bump, args=(i,)) for i in range(SLOTS)]
        values[-1].fetch()
        rounds += 1
    return rounds


def _all_have_worked(metrics):
    return all(worker["completed"] for worker in metrics["workers"].values())


def _one_was_lost(metrics):
    return metrics["recoverable_worker_failures"] > 0


def test_a_killed_worker_costs_no_step_and_doubles_none(local, coordinator):
    """Of values that are whole, of rows on both servers, and of an optimizer's."""
    counts, bump = _counting(coordinator.strategy)
    with coordinator.strategy.scope():
        rows = zs.Variable(np.zeros((SLOTS, 2), np.float32), name="rows")
        moved = zs.Variable(np.zeros((SLOTS, 2), np.float32), name="moved")
        optimizer = zs.Optimizer(optax.sgd(1.0))
    assert len(rows.components) == len(moved.components) == 2

    @zs.function
    def step(i):
        bump(i)
        both = jnp.stack([i, SLOTS - 1 - i])  # a row of each ps
        rows.scatter_add(zs.IndexedSlices(jnp.ones((2, 2)), both))
        twice = jnp.concatenate([both, both])
        gradient = 0 * zs.embedding_lookup(moved, twice) - 1
        slices = zs.IndexedSlices(gradient, twice, moved.shape)
        optimizer.apply_gradients([(slices, moved)])
        return i

    rounds = _rounds_until(coordinator, step, _all_have_worked)
    values = [coordinator.schedule(step, args=(i,)) for i in range(SLOTS)]
    values[SLOTS // 8].fetch()
    local.kill("worker:0")
    # There is work all the time, until the loss is seen: it hits closures in flight.
    rounds += 1 + _rounds_until(coordinator, step, _one_was_lost)
    coordinator.join()
    assert coordinator.metrics()["recoverable_worker_failures"] == 1
    np.testing.assert_array_equal(counts.numpy(), np.full(SLOTS, rounds))
    np.testing.assert_array_equal(rows.numpy(), np.full((SLOTS, 2), 2 * rounds))
    np.testing.assert_array_equal(moved.numpy(), np.full((SLOTS, 2), 4 * rounds))
    assert [int(value.fetch()) for value in values] == list(range(SLOTS))


def test_a_worker_killed_in_a_time_line_is_named_in_it(local, coordinator, tmp_path):
    _, bump = _counting(coordinator.strategy)
    _rounds_until(coordinator, bump, _all_have_worked)
    place = tmp_path / "line.json"
    with coordinator.profile(place) as profile:
        local.kill("worker:1")
        _rounds_until(coordinator, bump, _one_was_lost)
    assert "lost" in profile.about["worker:1: missing"]
    events = json.loads(place.read_text("utf-8"))["traceEvents"]
    tasks = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    seen = {tasks[e["pid"]] for e in events if e["ph"] == "X"}
    assert {"program", "worker:0"} < seen
    assert "worker:1" not in seen


class Reader(NamedTuple):
    pipeline: object


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Batch:
    reader: Reader
    kind: str = dataclasses.field(default="known", metadata={"static": True})


def test_a_killed_worker_that_is_started_again_takes_part_again(local, coordinator):
    def dataset(context):
        while True:
            yield Batch(Reader(np.int32(context.input_pipeline_id)))

    @zs.function
    def who(iterator):
        batch = next(iterator)
        assert isinstance(batch, Batch)
        assert batch.kind == "known"
        return batch.reader.pipeline

    iterator = iter(coordinator.create_per_worker_dataset(dataset))
    coordinator.schedule(who, args=(iterator,)).fetch()
    local.kill("worker:0")
    local.restart("worker:0")
    local.kill("worker:1")
    # Only the returned worker is left: its iterator must have been rebuilt.
    values = [coordinator.schedule(who, args=(iterator,)) for _ in range(20)]
    coordinator.join()
    assert {int(value.fetch()) for value in values} <= {0, 1}
    assert int(values[-1].fetch()) == 0
    local.kill("worker:0")  # it was started by this test, which may leave no process


def _freeze_with_closures_in_flight(local, coordinator, bump):
    """Freezes worker 0, then schedules until closures are in flight there, of which it
    can complete none; how many were scheduled, with indices from 0 on."""
    coordinator.join()
    local.stop_task("worker:0")
    scheduled = 0
    while not (metrics := coordinator.metrics())["workers"]["/job:worker/task:0"][
        "in_flight"
    ]:
        assert not _one_was_lost(metrics), "lost before it was given anything"
        coordinator.schedule(bump, args=(scheduled % SLOTS,))
        scheduled += 1
    return np.bincount(np.arange(scheduled) % SLOTS, minlength=SLOTS)


def test_a_stopped_worker_is_lost_and_fenced_when_it_wakes(local, coordinator):
    counts, bump = _counting(coordinator.strategy)
    expected = _rounds_until(coordinator, bump, _all_have_worked)
    expected += _freeze_with_closures_in_flight(local, coordinator, bump)
    coordinator.join()
    assert coordinator.metrics()["recoverable_worker_failures"] == 1
    np.testing.assert_array_equal(counts.numpy(), expected)
    local.continue_task("worker:0")
    # The zombie may finish what it had: none of it may count again.
    for i in range(SLOTS):
        coordinator.schedule(bump, args=(i,))
    coordinator.join()
    np.testing.assert_array_equal(counts.numpy(), expected + 1)


def test_a_killed_ps_is_named(local, coordinator):
    _, bump = _counting(coordinator.strategy)
    coordinator.schedule(bump, args=(0,)).fetch()
    local.kill("ps:0")
    with pytest.raises(zs.PSUnavailableError, match="/job:ps/task:0"):
        for i in range(SLOTS):
            coordinator.schedule(bump, args=(i,))
        coordinator.join()


def test_all_workers_gone_is_reported_within_the_bound(patient, local):
    with zs.ParameterServerStrategy(local.resolver) as strategy:
        coordinator = zs.ClusterCoordinator(strategy, worker_wait_timeout=1.0)
        _, bump = _counting(strategy)
        coordinator.schedule(bump, args=(0,)).fetch()
        local.kill("worker:0")
        local.kill("worker:1")
        with pytest.raises(zs.UnavailableError, match="worker_wait_timeout"):
            coordinator.schedule(bump, args=(1,))
            coordinator.join()


_PROGRAM = """
    import os, sys
    import numpy as np
    import zstrat as zs
    strategy = zs.ParameterServerStrategy(
        zs.cluster_resolver.TFConfigClusterResolver()
    )
    with strategy.scope():
        v = zs.Variable(np.float32(0))
    assert v.numpy() == 0

    @zs.function
    def bump():
        v.assign_add(1.0)

    coordinator = zs.ClusterCoordinator(strategy)
    for _ in range(10):
        coordinator.schedule(bump)
    coordinator.join()
    assert v.numpy() == 10, v.numpy()
    print("ready", flush=True)
    sys.stdin.read()
    strategy.close()
"""


def awaited(words, monkeypatch):
    """Set when the log of programs that connect has said so."""
    said, log = threading.Event(), logging.getLogger("zstrat.coordinator")

    def look(record):
        if re.search(words, record.getMessage()):
            said.set()
        return True

    monkeypatch.setattr(log, "filters", [look])
    return said


def program_on(local):
    """A program that holds the cluster until it reads the end of its input."""
    told = json.dumps({"cluster": local.spec.as_dict()})
    program = Program(
        ["-c", textwrap.dedent(_PROGRAM)],
        env={**os.environ, "TF_CONFIG": told, "ZSTRAT_LIVENESS": PATIENCE},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert program.stdout.readline() == "ready\n"
    return program


def test_a_coordinator_that_was_frozen_just_now_is_waited_for(local):
    """Its last beat is half a second old: nobody knows yet that it is frozen."""
    first = program_on(local)
    first.send_signal(signal.SIGSTOP)
    zs.ParameterServerStrategy(local.resolver).close()
    first.send_signal(signal.SIGKILL)
    first.communicate()


def test_a_killed_coordinator_leaves_the_daemons_ready_for_the_next(local, monkeypatch):
    first = program_on(local)
    held = rf"the coordinator chief:0 \(python -c, pid {first.pid} on .* since \d"
    with pytest.raises(zs.HeldError, match=held):
        zs.ParameterServerStrategy(local.resolver)
    first.send_signal(signal.SIGKILL)
    first.communicate()
    # The tasks have not missed it yet: whoever comes now is not refused.
    zs.ParameterServerStrategy(local.resolver).close()
    second = program_on(local)
    waiting = awaited("still waiting for .*HeldError.*python -c", monkeypatch)
    queued = Settings(timeouts=Timeouts(turn=120.0))
    with ThreadPoolExecutor(1) as thread:
        made = thread.submit(
            zs.ParameterServerStrategy, local.resolver, settings=queued
        )
        assert waiting.wait(60)
        second.communicate("")
        made.result().close()
    assert second.returncode == 0


_INTERRUPTED = """
    import sys
    import zstrat as zs
    with zs.LocalCluster(num_ps=1, num_workers=1) as local:
        pids = [local.pid("ps:0"), local.pid("worker:0")]
        print(*pids, flush=True)
        strategy = zs.ParameterServerStrategy(local.resolver)
        coordinator = zs.ClusterCoordinator(strategy)

        @zs.function(eager=True)
        def for_ever(iterator):
            next(iterator)

        def endless():
            yield 0
            import threading
            threading.Event().wait()

        iterator = iter(coordinator.create_per_worker_dataset(endless))
        coordinator.schedule(for_ever, args=(iterator,))
        coordinator.schedule(for_ever, args=(iterator,))
        print("joining", flush=True)
        coordinator.join()
"""


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_no_daemon_outlives_its_program(how):
    program = Program(
        ["-c", textwrap.dedent(_INTERRUPTED)],
        env={**os.environ, "ZSTRAT_DRAIN": "1"},  # the closures never end
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    pids = [int(word) for word in program.stdout.readline().split()]
    handles = [os.pidfd_open(pid) for pid in pids]
    assert program.stdout.readline() == "joining\n"
    program.send_signal(how)
    program.communicate(timeout=60)
    import select

    for handle in handles:
        ended, _, _ = select.select([handle], [], [], 30)
        assert ended, "a daemon outlived its program"
        os.close(handle)


def test_an_unreachable_task_is_named_within_the_bound(monkeypatch):
    monkeypatch.setenv("ZSTRAT_CONNECT_TIMEOUT", "1")
    resolver = zs.cluster_resolver.SimpleClusterResolver(
        zs.ClusterSpec({"ps": ["127.0.0.1:9"], "worker": ["127.0.0.1:9"]})
    )
    with pytest.raises(zs.ZstratError, match="/job:ps/task:0"):
        zs.ParameterServerStrategy(resolver)
