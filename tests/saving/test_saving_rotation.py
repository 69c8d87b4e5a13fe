"""`zs.CheckpointManager`: TF's rules, damage, full disks, second programs, kill -9."""

from __future__ import annotations

import os
import signal
import subprocess
import textwrap
import warnings
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from programs import Program

from zstrat.checkpoint import MANIFEST
from zstrat.errors import (
    BusyError,
    DataLossError,
    NotFoundError,
    ResourceExhaustedError,
)
from zstrat.saving import (
    Checkpoint,
    CheckpointManager,
    CheckpointWarning,
    latest_checkpoint,
)
from zstrat.testing import FakeClock
from zstrat.variables import Variable

pytestmark = pytest.mark.usefixtures("programs")

HOUR = 3600.0
INF = float("inf")


@pytest.fixture
def value():
    return Variable(np.zeros(2000, "f4"))


@pytest.fixture
def checkpoint(value):
    return Checkpoint(value=value)


@pytest.fixture
def managed(checkpoint, tmp_path):
    return partial(CheckpointManager, checkpoint, tmp_path)


def names(manager) -> list[str]:
    return [path.rsplit("/", 1)[1] for path in manager.checkpoints]


def folders(path) -> list[str]:
    return sorted(each.name for each in path.iterdir() if each.is_dir())


@pytest.mark.shows("tf.train.CheckpointManager", "CheckpointManager(max_to_keep=)")
def test_the_newest_are_kept(checkpoint, tmp_path):
    manager = CheckpointManager(checkpoint, tmp_path / "a" / "b", 2)
    assert (manager.latest_checkpoint, manager.checkpoints) == (None, [])
    paths = [manager.save() for _ in range(4)]
    assert paths[0] == str(tmp_path / "a" / "b" / "ckpt-1")
    assert manager.checkpoints == paths[2:]
    assert manager.latest_checkpoint == paths[3] == latest_checkpoint(manager.directory)
    assert folders(tmp_path / "a" / "b") == ["ckpt-3", "ckpt-4"]
    assert CheckpointManager(checkpoint, manager.directory, 5).checkpoints == paths[2:]
    assert manager.checkpoint is checkpoint


def test_the_newest_is_what_was_saved_last_whatever_its_number(
    managed, value, tmp_path
):
    """Also beside one of a higher number that is kept for good, and is in no list."""
    clock = FakeClock(1e9)
    options = {"keep_checkpoint_every_n_hours": 2, "clock": clock}
    manager = managed(1, **options)
    for number in (10, 3):
        clock.advance(3 * HOUR)
        value.assign(np.full(2000, number, "f4"))
        manager.save(checkpoint_number=number)
    assert folders(tmp_path) == ["ckpt-10", "ckpt-3"]
    again = managed(1, **options)
    assert names(again) == ["ckpt-3"]
    assert latest_checkpoint(tmp_path).endswith("ckpt-3")
    value.assign(np.zeros(2000, "f4"))
    assert again.restore_or_initialize().endswith("ckpt-3")
    assert (value.numpy() == 3).all()
    again.save(checkpoint_number=10)  # in the place of that one
    assert names(again) == ["ckpt-10"]


def test_intervals(managed):
    step = Variable(np.int64(0))
    manager = managed(3, step_counter=step, checkpoint_interval=10)
    assert manager.checkpoint_interval == 10
    assert manager.save().endswith("ckpt-1")
    step.assign(9)
    assert manager.save() is None
    assert manager.save(check_interval=False).endswith("ckpt-2")
    step.assign(18)
    assert manager.save() is None
    step.assign(19)
    assert manager.save().endswith("ckpt-3")
    again = managed(3, step_counter=lambda: 19, checkpoint_interval=10)
    assert again.restore_or_initialize().endswith("ckpt-3")
    assert again.save() is None


def test_intervals_of_seconds(managed):
    clock, step = FakeClock(1e9), Variable(np.int64(0))
    manager = managed(
        3,
        step_counter=step,
        checkpoint_interval=10,
        checkpoint_interval_s=60,
        clock=clock,
    )
    assert manager.save().endswith("ckpt-1")
    clock.advance(59)
    step.assign(9)
    assert manager.save() is None
    clock.advance(1)
    assert manager.save().endswith("ckpt-2"), "the seconds have passed"
    step.assign(19)
    assert manager.save().endswith("ckpt-3"), "the steps have"
    again = managed(3, checkpoint_interval_s=60, clock=clock)
    again.restore_or_initialize()
    assert again.save() is None
    clock.advance(60)
    assert again.save().endswith("ckpt-4")


def test_numbers_of_ones_own(managed, checkpoint):
    manager = managed(5)
    assert manager.save(100).endswith("ckpt-100")
    assert manager.save(Variable(np.int64(200))).endswith("ckpt-200")
    assert manager.save(100).endswith("ckpt-100")  # replaced, and the newest now
    assert names(manager) == ["ckpt-200", "ckpt-100"]
    assert checkpoint.save_counter.numpy() == 3


def test_checkpoints_of_other_names_are_left_alone(managed, checkpoint, tmp_path):
    best = managed(2, checkpoint_name="best")
    last = managed(1, checkpoint_name="last")
    checkpoint.save(tmp_path / "first")
    best.save()
    for _ in range(3):
        last.save()
    assert folders(tmp_path) == ["best-2", "first-1", "last-5"]
    assert (names(best), names(last)) == (["best-2"], ["last-5"])
    assert last.restore_or_initialize() == latest_checkpoint(tmp_path)
    assert latest_checkpoint(tmp_path, "best") == best.latest_checkpoint
    (tmp_path / "checkpoint").unlink()
    assert (names(best), names(last)) == (["best-2"], ["last-5"])
    best.save(0)
    best.save(9)
    assert folders(tmp_path) == ["best-0", "best-9", "first-1", "last-5"]


def test_the_newest_of_another_name_is_restored_and_stays(
    managed, value, tmp_path, caplog
):
    """As TensorFlow restores what the state file of the folder calls the newest."""
    for name in ("first", "second"):
        value.assign(value + 1)
        managed(1, checkpoint_name=name).save()
    value.assign(np.zeros(2000, "f4"))
    ran = []
    manager = managed(1, init_fn=lambda: ran.append("init_fn"))
    newest = str(tmp_path / "second-2")
    assert (manager.latest_checkpoint, manager.checkpoints) == (newest, [])
    assert manager.restore_or_initialize() == newest
    assert f"restored {newest}" in caplog.text
    assert (value.numpy() == 2).all()
    assert ran == []
    for _ in range(2):
        path = manager.save()
    assert folders(tmp_path) == ["ckpt-4", "first-1", "second-2"]
    caplog.clear()
    flip(tmp_path / "second-2")
    assert manager.restore_or_initialize() == manager.latest_checkpoint == path
    assert not caplog.records


@pytest.mark.parametrize(
    ("hours", "kept"),
    [
        (2, ["a-2", "a-4", "a-6", "b-2", "b-4", "b-6"]),
        (0, ["a-6", "b-6"]),  # as TensorFlow, which asks whether there are hours
    ],
)
def test_one_every_few_hours_is_kept_for_good(managed, tmp_path, hours, kept):
    """Each manager keeps what it would without the other, and without its end."""
    clock = FakeClock(1e9)
    options = {"keep_checkpoint_every_n_hours": hours, "clock": clock}
    for start in (1, 4):
        both = [managed(1, checkpoint_name=name, **options) for name in ("a", "b")]
        for hour in range(start, start + 3):
            clock.advance(HOUR)
            for manager in both:
                manager.save(hour)
        for manager in both:
            manager.close()
    assert names(both[0]) == ["a-6"]
    assert folders(tmp_path) == kept


def test_numbers_of_checkpoints_are_whole(managed, tmp_path):
    manager = managed(1)
    with pytest.raises(TypeError, match="checkpoint_name=3"):
        latest_checkpoint(tmp_path, 3)
    for number in (-1, 1.5, float("nan"), INF, "1.0", [1]):
        with pytest.raises(ValueError, match="checkpoint_number="):
            manager.save(number)
    assert folders(tmp_path) == []
    for number in ("10", np.array(10.0), 2**60 + 1):
        assert manager.save(number).endswith(f"ckpt-{int(number)}")


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        *[({"max_to_keep": x}, ValueError, "max_to_keep") for x in (0, -1)],
        *[({"max_to_keep": x}, TypeError, "max_to_keep") for x in (1.5, "3", INF)],
        *[
            ({"step_counter": int, name: x}, TypeError, f"{name}=.*: expected a number")
            for name in (
                "keep_checkpoint_every_n_hours",
                "checkpoint_interval",
                "checkpoint_interval_s",
            )
            for x in ("2", float("nan"), [2])
        ],
        ({"checkpoint_name": 3}, TypeError, "checkpoint_name=3"),
        ({"checkpoint_interval": 5}, ValueError, "step_counter"),
        ({"checkpoint_interval_s": 0}, ValueError, "checkpoint_interval_s=0"),
        ({"checkpoint_name": "a/b"}, ValueError, "'/'"),
    ],
)
def test_arguments(managed, given, error, words):
    with pytest.raises(error, match=words):
        managed(**{"max_to_keep": 1, **given})


@pytest.mark.parametrize("keep", [None, 2.0, np.int32(2), np.float32(2), Variable(2)])
def test_how_many_are_kept_is_any_whole_number_or_all(managed, tmp_path, keep):
    manager = managed(keep)
    for _ in range(3):
        manager.save()
    wanted = ["ckpt-1", "ckpt-2", "ckpt-3"][0 if keep is None else 1 :]
    assert folders(tmp_path) == names(manager) == wanted


@pytest.mark.parametrize(
    "name", ["a b", "a\nb", "größe", "a-1", ".", b"bytes", Path("path")]
)
def test_names_of_ones_own(managed, value, tmp_path, name):
    manager = managed(1, checkpoint_name=name)
    for number in range(2):
        value.assign(np.full(2000, number, "f4"))
        path = manager.save()
    assert path == latest_checkpoint(tmp_path) == latest_checkpoint(tmp_path, name)
    assert path == str(tmp_path / f"{os.fsdecode(name)}-2")
    assert len(folders(tmp_path)) == 1
    value.assign(np.zeros(2000, "f4"))
    assert manager.restore_or_initialize() == path
    assert (value.numpy() == 1).all()


def test_restore_or_initialize(managed, value, tmp_path):
    ran = []
    manager = managed(2, init_fn=lambda: ran.append(value.assign(value + 1)))
    assert manager.restore_or_initialize() is None
    assert len(ran) == 1
    path = manager.save()
    value.assign(np.zeros(2000, "f4"))
    assert manager.restore_or_initialize() == path
    assert (value.numpy() == 1).all()
    assert len(ran) == 1
    more = Checkpoint(value=value, new=Variable(1.0, name="new"))
    with pytest.raises(NotFoundError, match="'new'"):
        CheckpointManager(more, tmp_path, 2).restore_or_initialize()


async def test_the_async_forms(managed):
    manager = managed(1)
    path = await manager.save_async()
    assert await manager.restore_or_initialize_async() == path


def cut(path):
    (part,) = path.glob("part-*")
    part.write_bytes(part.read_bytes()[:-1])


def flip(path):
    (part,) = path.glob("part-*")
    data = bytearray(part.read_bytes())
    data[-5] ^= 16
    part.write_bytes(data)


def lose(path):
    (part,) = path.glob("part-*")
    part.unlink()


def scribble(path):
    (path / MANIFEST).write_bytes((path / MANIFEST).read_bytes()[:-10])


@pytest.mark.parametrize("damage", [cut, flip, lose, scribble])
def test_the_one_before_a_damaged_one_is_taken(managed, value, tmp_path, damage):
    manager = managed(3)
    for number in (1, 2):
        value.assign(np.full(2000, number, "f4"))
        manager.save()
    damage(tmp_path / "ckpt-2")
    value.assign(np.full(2000, 9, "f4"))
    manager.close()
    again = managed(3)
    with pytest.warns(CheckpointWarning, match=r"ckpt-2.*ckpt-2") as told:
        assert again.restore_or_initialize().endswith("ckpt-1")
    assert told[0].filename == __file__
    assert (value.numpy() == 1).all()
    assert names(again) == ["ckpt-1"]
    assert again.save().endswith("ckpt-2")  # in the place of the damaged one
    assert names(again) == ["ckpt-1", "ckpt-2"]
    with warnings.catch_warnings(action="error"):
        assert again.restore_or_initialize().endswith("ckpt-2")
    assert len(list((tmp_path / "ckpt-2").iterdir())) == 2


def test_a_damaged_one_of_a_higher_number_does_not_come_back(managed, tmp_path):
    manager = managed(3)
    for number in (2, 10):
        manager.save(checkpoint_number=number)
    flip(tmp_path / "ckpt-10")
    with pytest.warns(CheckpointWarning, match="ckpt-10"):
        manager.restore_or_initialize()
    manager.save(checkpoint_number=4)
    assert names(managed(3)) == ["ckpt-2", "ckpt-4"]
    assert "ckpt-10" in folders(tmp_path)  # nobody deletes it


def test_if_all_are_damaged_nothing_is_initialized(managed, tmp_path):
    ran = []
    manager = managed(3, init_fn=lambda: ran.append(1))
    for _ in range(2):
        manager.save()
    flip(tmp_path / "ckpt-1")
    flip(tmp_path / "ckpt-2")
    with (
        pytest.warns(CheckpointWarning),
        pytest.raises(DataLossError, match="ckpt-2") as raised,
    ):
        manager.restore_or_initialize()
    assert raised.value.__context__ is None  # no story of how its loop was found
    with pytest.warns(CheckpointWarning), pytest.raises(DataLossError, match="ckpt-2"):
        manager.restore_or_initialize()  # who asks again begins no more anew
    assert ran == []


def test_a_list_that_is_lost_or_behind_is_made_anew(
    managed, checkpoint, tmp_path, caplog
):
    manager = managed(9)
    for _ in range(3):
        manager.save()
    (tmp_path / "other-7").mkdir()
    state = tmp_path / "checkpoint"
    for text in (None, b"", b'{"format": 1}', b"\xff"):
        state.unlink() if text is None else state.write_bytes(text)
        assert names(manager) == ["ckpt-1", "ckpt-2", "ckpt-3"]
    assert "is damaged" in caplog.text
    hostile = b'{"format":"zstrat.checkpoints","saved":[],"doomed":["../x-1"],'
    state.write_bytes(hostile + b'"preserved_at":null}')
    outside = tmp_path.parent / "x-1"
    outside.mkdir(exist_ok=True)
    manager.save()
    assert outside.exists()


def test_the_newest_of_all_is_what_was_saved_last_though_the_list_is_behind(
    managed, checkpoint, tmp_path
):
    """The first program was killed between a checkpoint and the list; another manager
    has saved since then. Without a list it is told by the times, too."""
    one, two = (managed(5, checkpoint_name=name) for name in ("one", "two"))
    state = tmp_path / "checkpoint"
    one.save()
    behind = state.read_bytes()
    one.save(9)
    state.write_bytes(behind)
    assert latest_checkpoint(tmp_path) == one.latest_checkpoint
    newest = two.save()
    assert latest_checkpoint(tmp_path) == newest == two.latest_checkpoint
    assert names(one) == ["one-1", "one-9"]
    state.unlink()
    assert latest_checkpoint(tmp_path) == newest
    assert (names(one), names(two)) == (["one-1", "one-9"], ["two-3"])


def test_a_save_of_a_lower_number_that_was_killed_before_the_list_is_the_newest(
    managed, checkpoint, tmp_path
):
    manager = managed(3)
    manager.save(checkpoint_number=9)
    killed = checkpoint.write(tmp_path / "ckpt-4")
    other = managed(3, checkpoint_name="other")
    assert names(manager) == ["ckpt-9", "ckpt-4"]
    assert latest_checkpoint(tmp_path) == manager.latest_checkpoint == killed
    other.save(7)
    manager.save(checkpoint_number=2)
    manager.save(checkpoint_number=1)
    assert names(manager) == ["ckpt-4", "ckpt-2", "ckpt-1"]
    assert folders(tmp_path) == ["ckpt-1", "ckpt-2", "ckpt-4", "other-7"]


def test_a_full_disk_leaves_what_was_there(
    managed, checkpoint, value, tmp_path, monkeypatch
):
    manager = managed(2)
    manager.save()

    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("os.write", full)
        with pytest.raises(ResourceExhaustedError, match="ckpt-2"):
            manager.save()
    assert names(manager) == folders(tmp_path) == ["ckpt-1"]
    assert manager.restore_or_initialize().endswith("ckpt-1")
    assert manager.save().endswith("ckpt-2")


OTHER = """
    import sys
    import numpy as np
    from zstrat.checkpoint import TensorWriter
    from zstrat.saving import Checkpoint, CheckpointManager
    from zstrat.variables import Variable

    checkpoint = Checkpoint(value=Variable(np.ones(2000, "f4")))
    manager = CheckpointManager(checkpoint, sys.argv[1], 9)
    print(manager.save(), flush=True)
    if "halfway" in sys.argv:
        def stop(self):
            print("halfway", flush=True)
            sys.stdin.read()
        TensorWriter.finish = stop
        manager.save()
    sys.stdin.read()
"""


def other(folder, *words):
    return Program(
        ["-c", textwrap.dedent(OTHER), str(folder), *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_two_programs_and_a_kill_in_the_middle(managed, checkpoint, value, tmp_path):
    manager = managed(3)
    with other(tmp_path, "halfway") as child:
        assert child.stdout.readline().strip() == str(tmp_path / "ckpt-1")
        assert child.stdout.readline() == "halfway\n"
        with pytest.raises(BusyError, match=rf"process {child.pid} on .* since"):
            manager.save()
        with pytest.raises(BusyError):
            checkpoint.save(tmp_path / "ckpt")
        assert manager.latest_checkpoint == str(tmp_path / "ckpt-1")  # reading is free
        child.send_signal(signal.SIGKILL)
        child.wait(60)
    assert folders(tmp_path) == ["ckpt-1", "ckpt-2"]
    assert names(manager) == ["ckpt-1"]  # half of one is none
    assert manager.restore_or_initialize() == str(tmp_path / "ckpt-1")
    assert (value.numpy() == 1).all()
    assert manager.save() == str(tmp_path / "ckpt-2")
    assert len(list((tmp_path / "ckpt-2").iterdir())) == 2  # swept


def test_garbage_of_killed_savers_is_removed(managed, checkpoint, tmp_path):
    for name in ("ckpt-7", "other-7", "ckpt-x"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "part-local-0-aaaa.safetensors").write_text("half")
    (tmp_path / "checkpoint.0123abcd.tmp").write_text("half")
    manager = managed(3)
    assert names(manager) == []
    manager.save()
    assert folders(tmp_path) == ["ckpt-1", "ckpt-x", "other-7"]
    assert not list(tmp_path.glob("*.tmp"))
