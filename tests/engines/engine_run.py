"""What a program goes through on any engine: it trains, loses a worker and a parameter
server by SIGKILL, gets both back, and leaves nothing behind. Prints what it saw."""

import json
import logging
import os
import signal
import tempfile
import threading
import time

import jax.numpy as jnp

import zstrat as zs
from zstrat.launch import observe
from zstrat.transport import run


class Heard(logging.Handler):
    """Tells when the log of zstrat has said something."""

    def __init__(self, *words):
        super().__init__()
        self.words, self.said = words, threading.Event()
        logging.getLogger("zstrat").addHandler(self)

    def emit(self, record):
        if all(word in record.getMessage() for word in self.words):
            self.said.set()

    def wait(self):
        assert self.said.wait(120), self.words


def pids(cluster):
    seen = run(observe(cluster.spec, cluster.settings, 60))
    return {each.task: int(each.number("task", "pid")) for each in seen}


def went_through(cluster, began):
    """Trains on a fleet that is just there; returns the processes of its tasks."""
    logging.getLogger("zstrat").setLevel(logging.INFO)
    ready = time.monotonic()
    strategy = zs.ParameterServerStrategy(cluster, on_ps_loss="restore")
    with strategy.scope():
        count = zs.Variable(jnp.zeros(()), name="count")

    @zs.function
    def step():
        count.assign_add(1.0)
        return zs.get_worker_context().worker_index

    coordinator = zs.ClusterCoordinator(strategy)
    coordinator.schedule(step).fetch()
    first = time.monotonic()
    seconds = {"fleet": ready - began, "first_step": first - began}
    before, running = cluster.spec.as_dict(), pids(cluster)

    back = Heard("/job:worker/task:0", "is back")
    os.kill(running["worker:0"], signal.SIGKILL)
    for _ in range(100):
        coordinator.schedule(step)
    coordinator.join()
    assert float(count.numpy()) == 101, "each acknowledged step counts once"
    back.wait()
    seconds["worker_back"] = time.monotonic() - first
    assert cluster.spec.as_dict() == before, "it came back to its address"
    used(coordinator, step, 0)

    with tempfile.TemporaryDirectory() as folder:
        manager = zs.CheckpointManager(zs.Checkpoint(count=count), folder, 2)
        manager.save()
        saved = float(count.numpy())
        os.kill(pids(cluster)["ps:0"], signal.SIGKILL)
        for _ in range(50):
            coordinator.schedule(step)
        coordinator.join()
        assert saved < float(count.numpy()) <= saved + 50
        assert coordinator.metrics()["ps_restores"] == 1
    assert cluster.spec.as_dict() == before
    strategy.close()
    left = {**running, **{f"{task} again": pid for task, pid in pids(cluster).items()}}
    return seconds, left


def used(coordinator, step, index):
    """Runs steps until the worker of that index runs some, for a minute at most."""
    deadline, seen = time.monotonic() + 60, set()
    while index not in seen:
        assert time.monotonic() < deadline, f"worker:{index} is not used, only {seen}"
        values = [coordinator.schedule(step) for _ in range(20)]
        seen |= {value.fetch() for value in values}


def said(**what):
    print(json.dumps(what), flush=True)
