"""Checkpoints of real parameter servers, and what interrupts them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import resource
import signal
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import zstrat as zs
from zstrat.saving import _shelves

pytestmark = pytest.mark.processes

ROWS, DIM = 11, 3


class Partition:
    """A partitioner that each test tells the number of parts."""

    def __init__(self):
        self.parts = 1

    def __call__(self, shape, dtype):
        return [self.parts, *[1] * (len(shape) - 1)]


class World:
    """A connection to a cluster whose tables are cut as each test wants them."""

    def __init__(self, local, strategy, partition):
        self.local, self.strategy, self._partition = local, strategy, partition
        self.coordinator = zs.ClusterCoordinator(strategy)

    def scope(self, parts):
        self._partition.parts = parts
        return self.strategy.scope()

    def table(self, value, parts=2, name="table"):
        with self.scope(parts):
            return zs.Variable(np.asarray(value), name=name)


@contextlib.contextmanager
def connected(local):
    partition = Partition()
    with zs.ParameterServerStrategy(
        local.resolver, variable_partitioner=partition
    ) as strategy:
        yield World(local, strategy, partition)


@pytest.fixture(scope="module")
def world():
    with zs.LocalCluster(num_ps=2, num_workers=2) as local, connected(local) as made:
        yield made


@pytest.fixture
def fragile(monkeypatch):
    """A cluster of its own for a test that kills something."""
    monkeypatch.setenv("ZSTRAT_PATIENCE", "2")

    @contextlib.contextmanager
    def started(**options):
        with zs.LocalCluster(num_ps=2, num_workers=1, **options) as local:
            yield local

    return started


def numbered(rows, columns=DIM, first=0):
    count = rows * columns
    return np.arange(first, first + count, dtype="f4").reshape(rows, columns)


def names(folder):
    return sorted(path.name for path in Path(folder).iterdir())


# ---- from one cluster to another -----------------------------------------------------


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


def test_training_goes_on_with_other_servers_as_if_nothing_had_been(world, tmp_path):
    first = Training(world, 2)
    first.run(range(3))
    path = first.checkpoint.save(tmp_path / "c")
    first.run(range(3, 6))
    expected = first.values()
    with zs.LocalCluster(num_ps=3, num_workers=1) as local, connected(local) as other:
        second = Training(other, 5)
        second.run([17])  # its slots have to go
        second.checkpoint.restore(path).assert_consumed()
        second.run(range(3, 6))
        for got, wanted in zip(second.values(), expected, strict=True):
            np.testing.assert_array_equal(got, wanted)
        back = second.checkpoint.save(tmp_path / "d")
    whole = Training(world, 1)
    whole.checkpoint.restore(back).assert_consumed()
    whole.run([6])
    first.run([6])
    for got, wanted in zip(whole.values(), first.values(), strict=True):
        np.testing.assert_array_equal(got, wanted)


# ---- while training goes on ----------------------------------------------------------


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


@pytest.mark.parametrize("way", ["write", "fetch"])
def test_what_is_saved_is_as_it_was_when_the_save_began(
    world, tmp_path, monkeypatch, way
):
    """Pushes come after the pin and before each request to write or to read."""
    counting = Counting(world)
    counting.push(5)
    before = {n: v.numpy() for n, v in counting.variables.items()}
    request = getattr(_shelves.ServerShelf, way)
    one_by_one = asyncio.Lock()

    async def after_pushes(self, *arguments):
        async with one_by_one:
            await asyncio.to_thread(counting.push, 3)
        return await request(self, *arguments)

    monkeypatch.setattr(_shelves.ServerShelf, way, after_pushes)
    monkeypatch.chdir(tmp_path)  # the daemons are elsewhere
    folder = tmp_path if way == "write" else Path("/proc/self/cwd")
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


# ---- killed in the middle ------------------------------------------------------------

# Runs at the start of each daemon: a write to a file of that name says so, and never
# comes back.
_GATE = """
    import os, threading
    _write, _told = os.write, os.environ["GATE"]

    def write(descriptor, data):
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if os.environ["GATED"] in path and os.path.exists(_told):
            _write(descriptor, bytes(data)[: len(data) // 2])
            with open(_told, "w") as gate:
                gate.write("halfway")
            threading.Event().wait()
        return _write(descriptor, data)

    os.write = write
"""


def test_a_server_killed_in_the_middle_leaves_the_checkpoint_before(fragile, tmp_path):
    gate = tmp_path / "gate"
    (tmp_path / "sitecustomize.py").write_text(textwrap.dedent(_GATE))
    env = {
        "GATE": str(gate),
        "GATED": "ckpt-2/part-ps1",
        "PYTHONPATH": os.pathsep.join(
            [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
        ),
    }
    folder = tmp_path / "c"
    with fragile(env=env) as local:
        with connected(local) as world:
            table = world.table(numbered(1000))
            manager = zs.CheckpointManager(zs.Checkpoint(table=table), folder, 3)
            manager.save()
            table.assign(np.zeros((1000, DIM), "f4"))
            os.mkfifo(gate)
            with ThreadPoolExecutor(1) as pool:
                saving = pool.submit(manager.save)
                assert gate.read_text() == "halfway"
                assert any("ps1" in name for name in names(folder / "ckpt-2"))
                local.kill("ps:1")
                with pytest.raises(zs.PSUnavailableError, match="/job:ps/task:1"):
                    saving.result()
            assert "ckpt-2" not in names(folder)  # the half of a file is swept away
            assert manager.latest_checkpoint == str(folder / "ckpt-1")
            manager.close()
        gate.unlink()
        local.restart("ps:1")
        with connected(local) as world:
            table = world.table(np.ones((1000, DIM), "f4"), 3)
            manager = zs.CheckpointManager(zs.Checkpoint(table=table), folder, 3)
            assert manager.restore_or_initialize() == str(folder / "ckpt-1")
            np.testing.assert_array_equal(table.numpy(), numbered(1000))
            assert manager.save() == str(folder / "ckpt-2")


_KILLED = """
    import sys
    import numpy as np
    import zstrat as zs
    from zstrat.checkpoint import CheckpointFolder

    strategy = zs.ParameterServerStrategy(
        zs.cluster_resolver.TFConfigClusterResolver(),
        variable_partitioner=zs.partitioners.FixedShardsPartitioner(2),
    )
    with strategy.scope():
        table = zs.Variable(np.arange(3000, dtype="f4").reshape(1000, 3))
    manager = zs.CheckpointManager(zs.Checkpoint(table=table), sys.argv[1], 3)
    manager.save()
    table.assign(np.zeros((1000, 3), "f4"))

    def halfway(self, manifest):
        print("halfway", flush=True)
        sys.stdin.read()

    CheckpointFolder.commit = halfway
    manager.save()
"""


def test_a_coordinator_killed_in_the_middle_leaves_the_checkpoint_before(
    fragile, tmp_path
):
    with fragile() as local:
        env = {**os.environ, "TF_CONFIG": json.dumps({"cluster": local.spec.as_dict()})}
        program = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(_KILLED), str(tmp_path)],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert program.stdout.readline() == "halfway\n"
        program.send_signal(signal.SIGKILL)
        program.communicate()
        left = names(tmp_path / "ckpt-2")
        assert sum(name.startswith("part-ps") for name in left) == 2
        with connected(local) as world:
            table = world.table(np.zeros((1000, DIM), "f4"), 3)
            manager = zs.CheckpointManager(zs.Checkpoint(table=table), tmp_path, 3)
            assert manager.checkpoints == [str(tmp_path / "ckpt-1")]
            assert manager.restore_or_initialize() == str(tmp_path / "ckpt-1")
            np.testing.assert_array_equal(table.numpy(), numbered(1000))
            assert manager.save() == str(tmp_path / "ckpt-2")
            assert not set(left) & set(names(tmp_path / "ckpt-2")) - {"manifest.json"}
            table.assign(np.zeros((1000, DIM), "f4"))
            assert manager.restore_or_initialize() == str(tmp_path / "ckpt-2")
            np.testing.assert_array_equal(table.numpy(), numbered(1000))


def test_ctrl_c_in_a_blocking_save(world, tmp_path, monkeypatch):
    table = world.table(numbered(ROWS))
    manager = zs.CheckpointManager(zs.Checkpoint(table=table), tmp_path, 3)
    manager.save()
    write = _shelves.ServerShelf.write

    async def interrupted(self, *arguments):
        written = await write(self, *arguments)
        signal.raise_signal(signal.SIGINT)
        return written

    with monkeypatch.context() as patched:
        patched.setattr(_shelves.ServerShelf, "write", interrupted)
        with pytest.raises(KeyboardInterrupt):
            manager.save()
    assert names(tmp_path) == [".checkpoint.lock", "checkpoint", "ckpt-1"]
    assert manager.save() == str(tmp_path / "ckpt-2")
    table.assign(np.zeros((ROWS, DIM), "f4"))
    assert manager.restore_or_initialize() == str(tmp_path / "ckpt-2")
    np.testing.assert_array_equal(table.numpy(), numbered(ROWS))


# ---- disks ---------------------------------------------------------------------------


@contextlib.contextmanager
def small_disk(folder, local):
    """A disk of 3 MiB, and how to make it larger; without root: files of 700 KiB."""
    folder.mkdir()
    if os.geteuid() == 0 and _mounted(folder, "size=3m"):
        try:
            yield lambda: _mounted(folder, "remount,size=9m")
        finally:
            subprocess.run(["umount", str(folder)], check=True)
        return
    pids = [local.pid(task) for task in local.tasks if task.startswith("ps")]
    before = resource.prlimit(pids[0], resource.RLIMIT_FSIZE)

    def limit(size):
        for pid in pids:
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, before[1]))

    limit(700 * 2**10)
    try:
        yield lambda: limit(before[0])
    finally:
        limit(before[0])


def _mounted(folder, options):
    mount = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)]
    return subprocess.run(mount, check=False, capture_output=True).returncode == 0


def test_a_full_disk_leaves_what_was_there(world, tmp_path):
    small = world.table(numbered(ROWS), name="small")
    large = world.table(numbered(2**14, 64), name="large")  # 4 MiB
    folder = tmp_path / "disk"
    with small_disk(folder, world.local) as enlarge:
        checkpoint = zs.Checkpoint(small=small)
        manager = zs.CheckpointManager(checkpoint, folder, 3)
        manager.save()
        checkpoint.large = large
        small.assign(np.zeros((ROWS, DIM), "f4"))
        with pytest.raises(zs.ResourceExhaustedError, match=r"part-ps[01].*"):
            manager.save()
        assert [n for n in names(folder) if n.startswith("ckpt")] == ["ckpt-1"]
        assert manager.checkpoints == [str(folder / "ckpt-1")]
        zs.Checkpoint(small=small).restore(folder / "ckpt-1").assert_consumed()
        np.testing.assert_array_equal(small.numpy(), numbered(ROWS))
        enlarge()
        assert manager.save() == str(folder / "ckpt-2")
        large.assign(np.zeros(large.shape, "f4"))
        assert manager.restore_or_initialize() == str(folder / "ckpt-2")
        np.testing.assert_array_equal(large.numpy(), numbered(2**14, 64))
        manager.close()


def test_servers_that_do_not_see_the_folder(world, tmp_path, monkeypatch):
    """A path that is another folder for each process: all goes through this one."""
    monkeypatch.chdir(tmp_path)
    hidden = "/proc/self/cwd/c"
    value = numbered(3 * 2**14, 64)  # 12 MiB: several pieces for each server
    table = world.table(value, 3)
    count = world.table(np.int64(7), 1, "count")
    checkpoint = zs.Checkpoint(table=table, count=count)
    path = checkpoint.save(hidden)
    assert path == f"{hidden}-1"
    parts = [name for name in names(tmp_path / "c-1") if name.startswith("part")]
    assert sorted(name.split("-")[1] for name in parts) == ["local", "ps0", "ps1"]
    table.assign(np.zeros_like(value))
    count.assign(np.int64(0))
    checkpoint.restore(path).assert_consumed()
    np.testing.assert_array_equal(table.numpy(), value)
    assert count.numpy() == 7
    # The same folder under a name that all of them know.
    table.assign(np.zeros_like(value))
    checkpoint.restore(tmp_path / "c-1").assert_consumed()
    np.testing.assert_array_equal(table.numpy(), value)


def _cut_short(file):
    os.truncate(file, file.stat().st_size - 4)


def _flip_a_bit(file):
    with file.open("r+b") as data:
        data.seek(-8, os.SEEK_END)
        byte = data.read(1)[0]
        data.seek(-1, os.SEEK_CUR)
        data.write(bytes([byte ^ 16]))


@pytest.mark.parametrize("damage", [_cut_short, _flip_a_bit, Path.unlink])
def test_damage_is_named_and_the_checkpoint_before_is_taken(world, tmp_path, damage):
    table = world.table(numbered(ROWS))
    manager = zs.CheckpointManager(zs.Checkpoint(table=table), tmp_path, 3)
    manager.save()
    table.assign(numbered(ROWS, first=100))
    path = Path(manager.save())
    table.assign(np.full((ROWS, DIM), -1, "f4"))
    (file,) = path.glob("part-ps1*")
    damage(file)
    with pytest.raises(zs.DataLossError, match=file.name) as caught:
        manager.checkpoint.restore(path)
    if damage is _flip_a_bit:
        assert "table" in str(caught.value)
    np.testing.assert_array_equal(table.numpy(), np.full((ROWS, DIM), -1))
    with pytest.warns(zs.CheckpointWarning, match=r"ckpt-2.*left out"):
        assert manager.restore_or_initialize() == str(tmp_path / "ckpt-1")
    np.testing.assert_array_equal(table.numpy(), numbered(ROWS))


_OTHER = """
    import sys
    import numpy as np
    import zstrat as zs
    manager = zs.CheckpointManager(
        zs.Checkpoint(table=zs.Variable(np.zeros(3))), sys.argv[1], 3
    )
    manager.save()
    print("saved", flush=True)
    sys.stdin.read()
"""


def test_two_programs_do_not_save_to_one_folder(world, tmp_path):
    table = world.table(numbered(ROWS))
    checkpoint = zs.Checkpoint(table=table)
    manager = zs.CheckpointManager(checkpoint, tmp_path, 3)
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(_OTHER), str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        assert other.stdout.readline() == "saved\n"
        with pytest.raises(zs.BusyError, match=f"process {other.pid} on"):
            manager.save()
        with pytest.raises(zs.BusyError, match=f"process {other.pid} on"):
            checkpoint.save(tmp_path / "ckpt")
        other.communicate("")
    assert int(checkpoint.save_counter.numpy()) == 0
    assert manager.save(checkpoint_number=2) == str(tmp_path / "ckpt-2")
    assert manager.checkpoints == [str(tmp_path / f"ckpt-{n}") for n in (1, 2)]


# ---- what does not fit ---------------------------------------------------------------


def test_other_shapes_and_dtypes_are_named_and_nothing_is_restored(world, tmp_path):
    saved = {
        "a": world.table(numbered(ROWS)),
        "b": world.table(np.zeros((4, 2), "f4")),
        "c": world.table(np.float32(1), 1),
    }
    path = zs.Checkpoint(**saved).save(tmp_path / "c")
    here = {
        "a": world.table(np.zeros((ROWS, DIM), "f4"), 3),
        "b": world.table(np.zeros((4, 3), "f4")),
        "c": world.table(np.int32(1), 1),
    }
    with pytest.raises(zs.InvalidArgumentError) as caught:
        zs.Checkpoint(**here).restore(path)
    said = str(caught.value)
    for word in (path, "float32[4, 3]", "float32[4, 2]", "int32[]"):
        assert word in said
    assert "[11, 3]" not in said
    np.testing.assert_array_equal(here["a"].numpy(), np.zeros((ROWS, DIM)))


def test_missing_variables_are_an_error_unless_they_are_expected(world, tmp_path):
    table = world.table(numbered(ROWS))
    path = zs.Checkpoint(table=table).save(tmp_path / "c")
    table.assign(np.zeros((ROWS, DIM), "f4"))
    extra = world.table(np.ones((4, 2), "f4"), name="extra")
    wider = zs.Checkpoint(table=table, extra=extra)
    with pytest.raises(zs.NotFoundError, match=r"(?s)lacks.*extra"):
        wider.restore(path)
    np.testing.assert_array_equal(table.numpy(), np.zeros((ROWS, DIM)))
    status = wider.restore(path, expect_partial=True)
    np.testing.assert_array_equal(table.numpy(), numbered(ROWS))
    np.testing.assert_array_equal(extra.numpy(), np.ones((4, 2)))
    with pytest.raises(AssertionError, match="extra"):
        status.assert_existing_objects_matched()
    narrower = zs.Checkpoint(extra=extra)
    with pytest.raises(zs.NotFoundError, match="extra"):
        narrower.restore(path)


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


# ---- the evaluator -------------------------------------------------------------------

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
    with subprocess.Popen(
        [
            *(sys.executable, "-m", "zstrat.daemons.evaluator"),
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
