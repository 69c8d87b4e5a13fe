"""Checkpoints of real parameter servers, while training goes on and elsewhere."""

import asyncio
import itertools
import json
import os
import signal
import subprocess
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from programs import Program
from system_worlds import DIM, ROWS, connected, numbered

import zstrat as zs
from zstrat.ps import PsClient
from zstrat.testing import ThreadCluster

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("programs")]


class Training:
    """A table by rows and a bias, moved by Adam."""

    def __init__(self, world, parts):
        with world.scope(parts):
            table = zs.Variable(numbered(ROWS) / 10, name="table")
            bias = zs.Variable(np.zeros(DIM, "f4"), name="bias")
            optimizer = zs.Optimizer(optax.adam(0.05), count_iterations=True)
        self.table, self.bias, self.optimizer = table, bias, optimizer
        self._coordinator = world.coordinator
        self.checkpoint = zs.Checkpoint(table=table, bias=bias, optimizer=optimizer)

        @zs.function
        def step(ids, y):
            def loss(table, bias):
                rows = zs.embedding_lookup(table, ids)
                return jnp.sum((rows * bias + rows - y) ** 2)

            grads = zs.grad(loss, (0, 1))(table, bias)
            optimizer.apply_gradients(grads, (table, bias))

        self._step = step

    def run(self, steps):
        for number in steps:
            random = np.random.default_rng(number)
            ids = np.r_[0, ROWS - 1, 5, 5, random.integers(ROWS, size=4)]
            y = random.normal(size=(8, DIM)).astype("f4")
            self._coordinator.schedule(self._step, args=(ids, y))
            self._coordinator.join()

    def values(self):
        iterations = self.optimizer.iterations.numpy()
        return self.table.numpy(), self.bias.numpy(), iterations


def test_what_a_run_has_scheduled_is_in_the_checkpoint_of_its_end(world, tmp_path):
    with world.scope(1):
        v = zs.Variable(np.float32(0))

    @zs.function
    def step():
        v.assign_add(1.0)

    def run():
        os.kill(os.getpid(), signal.SIGUSR1)
        for _ in range(30):
            world.coordinator.schedule(step)

    manager = zs.CheckpointManager(zs.Checkpoint(v=v), tmp_path, 1)
    handler = zs.PreemptionHandler(manager, world.coordinator.strategy)
    with pytest.raises(SystemExit, match="75"):
        handler.run(run)
    v.assign(0.0)
    with zs.PreemptionHandler(manager, world.coordinator.strategy) as handler:
        assert (handler.total_run_calls, v.numpy()) == (1, 30.0)


def test_training_goes_on_with_other_servers_as_if_nothing_had_been(world, tmp_path):
    first = Training(world, 2)
    first.run(range(3))
    path = first.checkpoint.save(tmp_path / "c")
    first.run(range(3, 6))
    expected = first.values()
    with ThreadCluster(num_ps=3, num_workers=1) as local, connected(local) as other:
        second = Training(other, 5)
        second.run([17])  # its slots have to go
        second.checkpoint.restore(path).assert_consumed()
        second.run(range(3, 6))
        for got, wanted in zip(second.values(), expected, strict=True):
            # Programs for shards of other heights round in another order.
            np.testing.assert_allclose(got, wanted, rtol=1e-6)
        back = second.checkpoint.save(tmp_path / "d")
    whole = Training(world, 1)
    whole.checkpoint.restore(back).assert_consumed()
    whole.run([6])
    first.run([6])
    for got, wanted in zip(whole.values(), first.values(), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-6)


class Counting:
    """Each push adds the same to three variables of each server: to all of a small one,
    to rows of another, and to rows of a table through an optimizer."""

    rows, columns, some = 48_000, 64, 256  # 6 MiB on each server: more than one piece

    def __init__(self, world):
        rows, columns, some = self.rows, self.columns, self.some
        total = world.table(np.zeros((2, 1), "f4"), 2, "total")
        count = world.table(np.zeros((rows, 1), "f4"), 2, "count")
        wide = world.table(np.zeros((rows, columns), "f4"), 2, "wide")
        with world.scope(1):
            optimizer = zs.Optimizer(optax.sgd(1.0))
        for part in zip(*(v.components for v in (total, count, wide)), strict=True):
            assert len({component.device for component in part}) == 1

        @zs.function
        def step(ids):
            first = jnp.sum(ids < rows // 2)
            total.assign_add(jnp.stack([first, some - first])[:, None].astype("f4"))
            ones = jnp.ones((some, 1), "f4")
            count.scatter_add(zs.IndexedSlices(ones, ids))
            down = zs.IndexedSlices(-jnp.ones((some, columns)), ids, wide.shape)
            optimizer.apply_gradients([(down, wide)])

        self._step, self._coordinator = step, world.coordinator
        self._random = np.random.default_rng(0)
        self.pushes = 0
        self.variables = {"total": total, "count": count, "wide": wide}
        self.checkpoint = zs.Checkpoint(**self.variables)

    def push(self, often=1):
        for _ in range(often):
            ids = self._random.integers(self.rows, size=self.some)
            ids[-1] = ids[0]
            self._coordinator.schedule(self._step, args=(ids,)).fetch()
            self.pushes += 1

    def saved(self, path):
        """What a checkpoint has, having seen that it is one moment of each server."""
        shapes = {name: each.shape for name, each in self.variables.items()}
        again = {n: zs.Variable(np.zeros(s, "f4")) for n, s in shapes.items()}
        zs.Checkpoint(**again).read(path, expect_partial=True)
        found = {name: variable.numpy() for name, variable in again.items()}
        everywhere = np.broadcast_to(found["count"], found["wide"].shape)
        np.testing.assert_array_equal(found["wide"], everywhere)
        halves = found["count"].reshape(2, -1).sum(1, keepdims=True)
        np.testing.assert_array_equal(found["total"], halves)
        return found


@pytest.mark.parametrize("way", ["write_snapshot", "read_snapshot"])
def test_what_is_saved_is_as_it_was_when_the_save_began(
    world, tmp_path, monkeypatch, way
):
    """Pushes come after the pin and before each request to write or to read."""
    counting = Counting(world)
    counting.push(5)
    before = {n: v.numpy() for n, v in counting.variables.items()}
    request = getattr(PsClient, way)
    one_by_one = asyncio.Lock()

    async def after_pushes(self, *arguments):
        async with one_by_one:
            await asyncio.to_thread(counting.push, 3)
        return await request(self, *arguments)

    monkeypatch.setattr(PsClient, way, after_pushes)
    monkeypatch.chdir(tmp_path)  # the daemons are elsewhere
    folder = tmp_path if way == "write_snapshot" else Path("/proc/self/cwd")
    path = counting.checkpoint.save(folder / "c")
    assert counting.pushes >= 5 + 2 * 3
    for name, value in counting.saved(path).items():
        np.testing.assert_array_equal(value, before[name])
    total = counting.variables["total"].numpy().sum()
    assert total == counting.pushes * counting.some


def test_what_is_saved_beside_pushes_is_one_moment_of_each_server(world, tmp_path):
    counting, done = Counting(world), threading.Event()

    def save():
        try:
            return [counting.checkpoint.save(tmp_path / "c") for _ in range(3)]
        finally:
            done.set()

    with ThreadPoolExecutor(1) as pool:
        saving = pool.submit(save)
        while not done.is_set():  # there is a push all the time
            counting.push()
        paths = saving.result()
    sums = [counting.saved(path)["total"].sum() for path in paths]
    total = counting.variables["total"].numpy().sum()
    assert total == counting.pushes * counting.some
    assert sums == sorted(sums)
    assert sums[-1] <= total


def test_what_is_created_after_the_restore_gets_its_value(world, tmp_path):
    table = world.table(numbered(ROWS))
    path = zs.Checkpoint(model=zs.Module()).save(tmp_path / "empty")
    model = zs.Module()
    model.table = table
    path = zs.Checkpoint(model=model).save(tmp_path / "c")
    later = zs.Module()
    status = zs.Checkpoint(model=later).restore(path)
    later.table = world.table(np.zeros((ROWS, DIM), "f4"), 3)
    np.testing.assert_array_equal(later.table.numpy(), numbered(ROWS))
    status.assert_consumed()


_EVALUATED = """
    import numpy as np
    import zstrat as zs

    table = zs.Variable(np.zeros((11, 3), "f4"))

    def make():
        checkpoint = zs.Checkpoint(table=table)
        return checkpoint, lambda: {"mean": table.numpy().mean()}
"""


def test_an_evaluator_beside_the_training(world, tmp_path):
    (tmp_path / "judge.py").write_text(textwrap.dedent(_EVALUATED))
    table = world.table(np.zeros((ROWS, DIM), "f4"), 2)
    with world.scope(1):
        step = zs.Variable(np.int32(0), trainable=False)

    @zs.function
    def train():
        table.assign_add(jnp.ones((ROWS, DIM)))
        step.assign_add(1)

    manager = zs.CheckpointManager(
        zs.Checkpoint(table=table, step=step), tmp_path / "c", 2, step_counter=step
    )
    lines = tmp_path / "m.jsonl"
    words = ["judge:make", manager.directory, "--metrics", lines]
    with Program(
        [
            *("-m", "zstrat.daemons.evaluator"),
            *map(str, words),
            *("--max-evaluations", "4", "--platform", "cpu"),
        ],
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
    ) as evaluator:
        try:
            for _ in range(4):
                for _ in range(5):
                    world.coordinator.schedule(train)
                world.coordinator.join()
                manager.save()
            _, said = evaluator.communicate(timeout=60)
        finally:
            evaluator.kill()
    assert evaluator.returncode == 0, said
    found = [json.loads(line) for line in lines.read_text().splitlines()]
    assert found[-1]["checkpoint"].endswith("ckpt-4")
    assert found[-1]["step"] == 20
    for one in found:  # it may have left some out
        assert one["mean"] == one["step"]
    assert all(a["step"] < b["step"] for a, b in itertools.pairwise(found))
