"""What a program sees of keys, versions and strangers on the network."""

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import optax
import programs
import pytest
from system_worlds import keygen

import zstrat as zs
from zstrat.config import Settings, Timeouts
from zstrat.launch import observe
from zstrat.transport import Endpoint, Link, hello, new_event_loop, new_incarnation, run
from zstrat.wire import PROTOCOL

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("programs")]

RATE = 0.125


def descend(strategy):
    """A variable and a step that adds ``-RATE`` of a gradient of ones to it."""
    with strategy.scope():
        v = zs.Variable(np.zeros(4, np.float32), name="v")
        optimizer = zs.Optimizer(optax.sgd(RATE))

    @zs.function
    def step():
        _, grads = zs.value_and_grad(lambda v: v.sum())(v)
        optimizer.apply_gradients([grads], [v])

    return v, step


_SIGNATURE = b"\xff" + bytes(8) + b"\x7f"
_GREETING = _SIGNATURE + b"\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
GARBAGE = {
    "another protocol": b"GET / HTTP/1.1\r\nHost: here\r\n\r\n",
    "all bytes": bytes(range(256)) * 100,
    "zeros": bytes(64),
    "a greeting of ZeroMQ, then noise": _GREETING + b"\x04\x03\x09abc",
}


def shout(address, data):
    """Sends the bytes, and returns when the other side has hung up."""
    host, port = address.split(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        with contextlib.suppress(ConnectionError):  # it may hang up in the middle
            connection.sendall(data)
            with contextlib.suppress(OSError):  # or before this: "not connected"
                connection.shutdown(socket.SHUT_WR)
            while connection.recv(4096):
                pass


@pytest.fixture(scope="module")
def local():
    """At ports, where anybody comes; no test kills or freezes a task of it."""
    with zs.LocalCluster(num_ps=1, num_workers=1, transport="tcp") as cluster:
        yield cluster


async def claim(address, index):
    """Somebody says to the ps that he is that worker; returns the words of refusal."""
    me = hello("worker", index, new_incarnation())
    link = Link(address, me, name="/job:ps/task:0", settings=Settings())
    link.start()
    now = asyncio.get_running_loop().time
    words, late = "", now() + 20
    try:
        while "is connected as the same task" not in words and now() < late:
            with pytest.raises(zs.DeadlineExceededError) as raised:
                await link.wait_open(now() + 0.5)
            words = str(raised.value)
    finally:
        await link.close()
    return words


def test_nobody_else_takes_the_place_of_a_worker_that_trains(local):
    with zs.ParameterServerStrategy(local.resolver) as strategy:
        coordinator = zs.ClusterCoordinator(strategy)
        v, step = descend(strategy)
        coordinator.schedule(step).fetch()
        words = run(claim(local.spec.task_address("ps", 0), 0))
        assert f"pid {local.pid('worker:0')}) is connected as the same task" in words
        for _ in range(50):
            coordinator.schedule(step)
        coordinator.join()
        np.testing.assert_array_equal(v.numpy(), np.full(4, -RATE * 51))
        assert coordinator.metrics()["recoverable_worker_failures"] == 0


def test_garbage_in_the_middle_of_training_is_counted_and_changes_nothing(local):
    with zs.ParameterServerStrategy(local.resolver) as strategy:
        coordinator = zs.ClusterCoordinator(strategy)
        v, step = descend(strategy)
        values = []
        for data in GARBAGE.values():
            values += [coordinator.schedule(step) for _ in range(50)]
            values[-25].fetch()  # training is under way
            for job in ("ps", "worker"):
                shout(local.spec.task_address(job, 0), data)
        coordinator.join()
        np.testing.assert_array_equal(v.numpy(), np.full(4, -RATE * len(values)))
        assert coordinator.metrics()["recoverable_worker_failures"] == 0
        for sight in run(observe(local.spec, Settings(), 30)):
            assert not sight.problem
            # Some of it ends before it is known to be none of ZeroMQ's.
            counts = ("refused", "probes")
            turned_away = sum(sight.number("endpoint", "counts", c) for c in counts)
            assert turned_away >= 2, sight.values


def test_a_program_says_who_has_the_place_of_its_worker():
    loop = new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def do(work):
        return asyncio.run_coroutine_threadsafe(work, loop).result(100)

    async def take(address):
        me = hello("worker", 0, new_incarnation())
        link = Link(address, me, name="/job:ps/task:0", settings=Settings())
        link.start()
        await link.wait_open(loop.time() + 20)
        return link

    env = {"ZSTRAT_CONNECT_TIMEOUT": "1"}  # of the worker
    with zs.LocalCluster(num_ps=1, num_workers=1, transport="tcp", env=env) as local:
        stranger = do(take(local.spec.task_address("ps", 0)))
        try:
            hasty = Settings(timeouts=Timeouts(connect=5.0))
            with pytest.raises(zs.DeadlineExceededError) as raised:
                zs.ParameterServerStrategy(local.resolver, settings=hasty)
            who = f"worker:0 (host {stranger._me.host}, pid {os.getpid()})"
            assert f"{who} is connected as" in str(raised.value)
        finally:
            do(stranger.close())
        with zs.ParameterServerStrategy(local.resolver) as strategy:
            v, step = descend(strategy)
            zs.ClusterCoordinator(strategy).schedule(step).fetch()
            np.testing.assert_array_equal(v.numpy(), np.full(4, -RATE))
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@contextlib.contextmanager
def tasks_of_another_version():
    """A ps and a worker that greet as a zstrat of long ago did."""
    loop = new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    def do(coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result(100)

    endpoints, jobs = [], {}
    try:
        for job in ("ps", "worker"):
            me = hello(job, 0, new_incarnation())
            me = replace(me, protocol=PROTOCOL - 1, versions={"zstrat": "0.0.1"})
            endpoint = Endpoint(me, lambda *_: None, settings=Settings())
            jobs[job] = [do(endpoint.bind("127.0.0.1:0"))]
            endpoints.append(endpoint)
        yield zs.ClusterSpec(jobs)
    finally:
        for endpoint in endpoints:
            do(endpoint.close())
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def test_another_version_is_refused_at_once_with_both_versions():
    # Were it to wait for the cluster to become right, it would wait for an hour.
    patient = Settings(timeouts=Timeouts(connect=3600.0))
    with tasks_of_another_version() as spec:
        resolver = zs.cluster_resolver.SimpleClusterResolver(spec)
        with pytest.raises(zs.VersionMismatchError) as raised:
            zs.ParameterServerStrategy(resolver, settings=patient)
    words = str(raised.value)
    assert f"speaks protocol {PROTOCOL - 1} (zstrat 0.0.1)" in words
    assert f"speaks {PROTOCOL} (zstrat {zs.__version__})" in words
    assert "install the same zstrat on both" in words
    assert "ps:0" in words


@pytest.fixture
def keys(tmp_path):
    return Path(keygen(tmp_path / "keys"))


@contextlib.contextmanager
def daemon(job, *arguments):
    """A daemon on a loopback port; yields its address."""
    reading, writing = os.pipe()
    command = [sys.executable, "-m", f"zstrat.daemons.{job}", "--index", "0"]
    command += ["--bind", "127.0.0.1:0", "--report", str(writing), *arguments]
    env = {k: v for k, v in os.environ.items() if k not in ("TF_CONFIG", "ZSTRAT_KEYS")}
    process = subprocess.Popen(
        command,
        env=env,
        pass_fds=[writing],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(writing)
    try:
        with os.fdopen(reading) as report:
            yield json.loads(report.readline())["address"]
    finally:
        process.kill()
        process.wait()


STRANGER = """
import sys
import zstrat as zs
from zstrat.config import Settings, Timeouts

spec = zs.ClusterSpec({"ps": [sys.argv[1]], "worker": [sys.argv[2]]})
resolver = zs.cluster_resolver.SimpleClusterResolver(spec)
hasty = Settings(timeouts=Timeouts(connect=1.0))
zs.ParameterServerStrategy(resolver, settings=hasty)
"""
"""A program without keys."""


def test_a_cluster_with_keys_trains_those_who_have_them_and_no_others(keys):
    with (
        daemon("ps", "--keys", str(keys)) as ps,
        daemon("worker", "--keys", str(keys)) as worker,
    ):
        spec = zs.ClusterSpec({"ps": [ps], "worker": [worker]})
        resolver = zs.cluster_resolver.SimpleClusterResolver(spec)
        hasty = Settings(timeouts=Timeouts(connect=1.0))
        with pytest.raises(zs.DeadlineExceededError, match=r"/job:ps/task:0.*--keys"):
            zs.ParameterServerStrategy(resolver, settings=hasty)
        trusted = Settings(keys=keys)
        with zs.ParameterServerStrategy(resolver, settings=trusted) as strategy:
            coordinator = zs.ClusterCoordinator(strategy)
            v, step = descend(strategy)
            for _ in range(20):
                coordinator.schedule(step)
            coordinator.join()
            np.testing.assert_array_equal(v.numpy(), np.full(4, -RATE * 20))
            # What a running program has is not disturbed by one that may not enter.
            stranger = programs.run(
                ["-c", STRANGER, ps, worker],
                capture_output=True,
                text=True,
                timeout=60,
            )
            assert stranger.returncode == 1
            last = stranger.stderr.strip().splitlines()
            assert any("DeadlineExceededError" in line for line in last)
            for task in ("/job:ps/task:0", ps):
                assert task in stranger.stderr
            coordinator.schedule(step).fetch()
            np.testing.assert_array_equal(v.numpy(), np.full(4, -RATE * 21))
