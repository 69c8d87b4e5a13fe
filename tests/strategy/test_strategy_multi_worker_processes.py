"""MultiWorkerMirroredStrategy over real processes."""

import json
import os
import re
import signal
import subprocess
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from mirrored_task import W, X, Y
from programs import Program

from zstrat.cluster import free_ports

HERE = Path(__file__).parent
TIMEOUT = 240.0

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("programs")]


class Tasks:
    """The tasks of a cluster of workers; all are gone at the end."""

    def __init__(self, size, **environment):
        addresses = [f"127.0.0.1:{port}" for port in free_ports(size)]
        self.cluster = {"worker": addresses}
        self.environment = {**os.environ, "JAX_PLATFORMS": "cpu", **environment}
        self.processes = []

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        for process in self.processes:
            process.kill()
            process.communicate()

    def start(self, rank, *arguments):
        task = {"type": "worker", "index": rank}
        config = json.dumps({"cluster": self.cluster, "task": task})
        process = Program(
            [str(HERE / "mirrored_task.py"), *map(str, arguments)],
            env={**self.environment, "TF_CONFIG": config},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.processes.append(process)
        return process


def result(process):
    out, err = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 0, err[-4000:]
    return json.loads(out.splitlines()[-1])


def by_one_process(steps):
    transformation = optax.adam(0.1)
    w, losses = jnp.asarray(W), []
    state = transformation.init(w)
    for _ in range(steps):
        value, gradient = jax.value_and_grad(lambda w: jnp.mean((X @ w - Y) ** 2))(w)
        delta, state = transformation.update(gradient, state, w)
        w = w + delta
        losses.append(float(value))
    return losses, w


@pytest.mark.parametrize("devices", [1, 2])
def test_processes_train_as_one_by_xla(devices):
    losses, w = by_one_process(5)
    with Tasks(2, JAX_NUM_CPU_DEVICES=str(devices)) as tasks:
        started = [tasks.start(rank, "xla", 5) for rank in range(2)]
        for rank, process in enumerate(started):
            found = result(process)
            np.testing.assert_allclose(
                list(found["losses"].values()), losses, rtol=1e-5
            )
            np.testing.assert_allclose(found["w"], w, rtol=1e-5, atol=1e-6)
            assert found["saves"] == (rank == 0)
            assert found["traces"] == 1
            (refusal,) = found["errors"]
            assert re.search("implementation=XLA .* restore a checkpoint", refusal)


@pytest.mark.parametrize(
    ("lost", "size", "implementation", "devices", "transport"),
    [(0, 3, "ring", 2, "tcp"), (1, 2, "tree", 1, "auto")],
)
def test_a_killed_task_is_named_and_takes_over_when_it_is_back(
    lost, size, implementation, devices, transport
):
    losses, w = by_one_process(10)
    with Tasks(
        size, JAX_NUM_CPU_DEVICES=str(devices), ZSTRAT_TRANSPORT=transport
    ) as tasks:
        started = [
            tasks.start(rank, implementation, 10, 4 if rank == lost else -1)
            for rank in range(size)
        ]
        assert started[lost].wait(TIMEOUT) == -signal.SIGKILL
        started[lost] = tasks.start(lost, implementation, 10)
        found = [result(process) for process in started]
    for rank, each in enumerate(found):
        np.testing.assert_allclose(each["w"], w, rtol=1e-5, atol=1e-6)
        assert each["saves"] == (rank == 0)
        if rank != lost:
            assert len(each["errors"]) == 1
            assert f"task:{lost}" in each["errors"][0]
    # It went on with the others and not from the beginning: with the step in which it
    # was lost, or the one before, if what it had sent went down with it.
    first = min(map(int, found[lost]["losses"]))
    assert first in (3, 4)
    assert sorted(map(int, found[lost]["losses"])) == list(range(first, 10))
    for each in found:
        for step, value in each["losses"].items():
            np.testing.assert_allclose(value, losses[int(step)], rtol=1e-5)
