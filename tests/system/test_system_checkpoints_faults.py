"""What interrupts a save, and disks that are full, damaged, elsewhere, or shared."""

import asyncio
import contextlib
import json
import os
import resource
import signal
import subprocess
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from programs import Program
from system_worlds import DIM, ROWS, connected, names, numbered

import zstrat as zs
from zstrat.ps import PsClient

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("programs")]


@pytest.fixture
def fragile():
    """A cluster of its own for a test that kills something."""

    @contextlib.contextmanager
    def started(**options):
        with zs.LocalCluster(num_ps=2, num_workers=1, **options) as local:
            yield local

    return started


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
        program = Program(
            ["-c", textwrap.dedent(_KILLED), str(tmp_path)],
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
    write, release = PsClient.write_snapshot, PsClient.release
    struck, released = [], []

    async def interrupted(self, *arguments):
        await write(self, *arguments)
        if not struck:  # of several servers: a second one would not wait
            struck.append(True)
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        await asyncio.Event().wait()  # it is cancelled

    async def noted(self, number):
        await release(self, number)
        released.append(number)

    with monkeypatch.context() as patched:
        patched.setattr(PsClient, "write_snapshot", interrupted)
        patched.setattr(PsClient, "release", noted)
        with pytest.raises(KeyboardInterrupt):
            manager.save()
        assert len(released) == 1
    assert names(tmp_path) == [".checkpoint.lock", "checkpoint", "ckpt-1"]
    assert manager.save() == str(tmp_path / "ckpt-2")
    table.assign(np.zeros((ROWS, DIM), "f4"))
    assert manager.restore_or_initialize() == str(tmp_path / "ckpt-2")
    np.testing.assert_array_equal(table.numpy(), numbered(ROWS))


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
        with pytest.raises(zs.ResourceExhaustedError, match="ckpt-2"):
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
    with pytest.warns(zs.CheckpointWarning, match="ckpt-2"):
        assert manager.restore_or_initialize() == str(tmp_path / "ckpt-1")
    np.testing.assert_array_equal(table.numpy(), numbered(ROWS))
