"""Evaluation beside a training, exports, and what people see meanwhile."""

from __future__ import annotations

import io
import json
import threading

import numpy as np
import optax
import pytest
from safetensors.numpy import load_file
from strikes import is_struck

from zstrat.errors import DataLossError, NotFoundError
from zstrat.saving import (
    Checkpoint,
    CheckpointManager,
    JsonLines,
    SidecarEvaluator,
    TensorBoardEvents,
    export_orbax,
    export_safetensors,
)
from zstrat.saving._operation import ProgressBar
from zstrat.variables import Optimizer, ShardedVariable, Variable


class Memory:
    def __init__(self) -> None:
        self.lines = []

    def write(self, step, values, about):
        self.lines.append((step, dict(values), about["checkpoint"].rsplit("/", 1)[1]))

    def close(self):
        pass


@pytest.fixture
def training(tmp_path):
    step, w = Variable(np.int64(0)), Variable(np.zeros(3, "f4"))
    checkpoint = Checkpoint(w=w, step=step)
    return w, step, CheckpointManager(checkpoint, tmp_path / "c", 3, step_counter=step)


def save(training, number):
    w, step, manager = training
    w.assign(np.full(3, number, "f4"))
    step.assign(10 * number)
    return manager.save()


@pytest.mark.shows("the evaluator task")
def test_each_new_checkpoint_is_evaluated_once(training, tmp_path):
    w, seen = Variable(np.zeros(3, "f4")), Memory()

    def evaluate():
        number = int(w.numpy()[0])
        if number < 5:  # the training goes on: two more, of which one is skipped
            save(training, number + 1)
            save(training, number + 2)
        return {"sum": w.numpy().sum()}

    save(training, 1)
    evaluator = SidecarEvaluator(
        Checkpoint(w=w), evaluate, tmp_path / "c", max_evaluations=5, writers=[seen]
    )
    evaluator.start()
    assert seen.lines == [
        (10, {"sum": 3.0}, "ckpt-1"),
        (30, {"sum": 9.0}, "ckpt-3"),
        (50, {"sum": 15.0}, "ckpt-5"),
    ]
    assert evaluator.summary() == "3 evaluations, last ckpt-5"


def test_it_waits_for_the_first_one_and_can_be_stopped(training, tmp_path):
    w, seen, evaluated = Variable(np.zeros(3, "f4")), Memory(), threading.Event()

    def evaluate():
        evaluated.set()
        return {"sum": w.numpy().sum()}

    evaluator = SidecarEvaluator(
        Checkpoint(w=w), evaluate, tmp_path / "c", writers=[seen], pause=0.01
    )
    thread = threading.Thread(target=evaluator.start)
    thread.start()
    save(training, 2)
    assert evaluated.wait(100)
    evaluator.stop()
    thread.join(100)
    assert seen.lines == [(20, {"sum": 6.0}, "ckpt-1")]


def test_what_is_damaged_is_left_out_until_there_is_a_better_one(
    training, tmp_path, caplog
):
    w = Variable(np.zeros(3, "f4"))
    save(training, 1)
    (part,) = (tmp_path / "c" / "ckpt-1").glob("part-*")
    part.write_bytes(part.read_bytes()[:-1])
    evaluator = SidecarEvaluator(
        Checkpoint(w=w), dict, tmp_path / "c", max_evaluations=2, pause=0.01
    )
    looks = []

    def wait(seconds):
        looks.append(seconds)
        if len(looks) == 3:
            save(training, 2)
        return False

    evaluator._stop.wait = wait
    evaluator.start()
    assert evaluator.summary() == "1 evaluations, last ckpt-2"
    assert caplog.text.count("is left out") == 1


def test_where_the_step_comes_from(tmp_path):
    w, optimizer = (
        Variable(np.zeros(1, "f4")),
        Optimizer(optax.sgd(0.1), count_iterations=True),
    )
    for _ in range(4):
        optimizer.apply_gradients([(np.ones(1, "f4"), w)])
    CheckpointManager(Checkpoint(w=w, o=optimizer), tmp_path / "c", 1).save()
    plain = tmp_path / "plain"
    CheckpointManager(Checkpoint(w=w), plain, 1).save()

    def steps(folder, program, **options):
        seen = Memory()
        SidecarEvaluator(
            program, dict, folder, max_evaluations=1, writers=[seen], **options
        ).start()
        return seen.lines[0][0]

    again = Optimizer(optax.sgd(0.1), count_iterations=True)
    assert steps(tmp_path / "c", Checkpoint(w=w, o=again)) == 4
    assert steps(tmp_path / "c", Checkpoint(w=w)) == 4  # as the training counted
    assert steps(plain, Checkpoint(w=w), step=lambda: 7) == 7
    with pytest.raises(RuntimeError, match="count_iterations=True"):
        steps(plain, Checkpoint(w=w))
    with pytest.raises(NotFoundError, match="'Variable'"):  # and is not tried for ever
        steps(plain, Checkpoint(more=w), step=0)
    with pytest.raises(ValueError, match="max_evaluations"):
        SidecarEvaluator(Checkpoint(w=w), dict, plain, max_evaluations=0)


def test_metrics_in_files(tmp_path):
    about = {"checkpoint": "/c/ckpt-1", "time": 1.5}
    for step in (1, 2):  # the second program goes on with the file
        lines = JsonLines(tmp_path / "m.jsonl")
        lines.write(step, {"loss": 0.5 * step, "bad": float("nan")}, about)
        lines.close()
    text = (tmp_path / "m.jsonl").read_text()
    read = [json.loads(line) for line in text.splitlines()]
    assert read[1] == {"step": 2, "loss": 1.0, "bad": None, **about}


def test_metrics_for_tensorboard(tmp_path):
    pytest.importorskip("tensorboardX")
    events = TensorBoardEvents(tmp_path / "tb")
    events.write(3, {"loss": 0.5}, {})
    events.close()
    (file,) = (tmp_path / "tb").iterdir()
    assert b"loss" in file.read_bytes()


@pytest.fixture
def model():
    rows = np.arange(12, dtype="f4").reshape(6, 2)
    table = ShardedVariable([Variable(rows[:4]), Variable(rows[4:])], "table")
    return {"emb": table, "a/b": [Variable(3.0)]}, rows


@pytest.mark.shows("tf.saved_model.save", "ShardedVariable, saved as one variable")
def test_one_plain_file(model, tmp_path):
    tree, rows = model
    live = export_safetensors(tree, tmp_path / "live.safetensors")
    path = Checkpoint(emb=tree["emb"], x=tree["a/b"]).save(tmp_path / "c")
    stored = load_file(export_safetensors(path, tmp_path / "live.safetensors"))
    assert set(stored) == {"emb", "x/0"}  # the one that was there is replaced
    np.testing.assert_array_equal(stored["emb"], rows)
    again = load_file(export_safetensors(tree, live))
    np.testing.assert_array_equal(again["emb"], rows)
    one = load_file(export_safetensors(tree["emb"], tmp_path / "one.safetensors"))
    assert list(one) == ["table"]
    assert len(list(tmp_path.glob("*.tmp"))) == 0
    with pytest.raises(NotFoundError):
        export_safetensors(str(tmp_path), tmp_path / "no.safetensors")
    with pytest.raises(TypeError, match=r"zs\.Variable"):
        export_safetensors({"w": np.ones(2)}, tmp_path / "no.safetensors")


def test_orbax(model, tmp_path):
    orbax = pytest.importorskip("orbax.checkpoint")
    tree, rows = model
    path = Checkpoint(m=tree).save(tmp_path / "c")
    for source, name in ((tree, "live"), (path, "stored")):
        with orbax.PyTreeCheckpointer() as reader:
            read = reader.restore(export_orbax(source, tmp_path / name))
        read = read.get("m", read)
        np.testing.assert_array_equal(read["emb"], rows)
        assert read["a/b"]["0"] == 3.0


@pytest.mark.parametrize("export", [export_safetensors, export_orbax])
def test_a_flipped_bit_of_a_checkpoint_is_not_exported(export, model, tmp_path):
    if export is export_orbax:
        pytest.importorskip("orbax.checkpoint")
    path = Checkpoint(m=model[0]).save(tmp_path / "c")
    (part,) = (tmp_path / "c-1").glob("part-*")
    data = bytearray(part.read_bytes())
    data[-1] ^= 1
    part.write_bytes(data)
    with pytest.raises(DataLossError, match=part.name):
        export(path, tmp_path / "out")
    assert [each.name for each in tmp_path.glob("out*")] == []


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_progress_is_for_terminals_alone(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    for out in (Terminal(), io.StringIO()):
        with ProgressBar("saving c", 4_000_000_000, out) as progress:
            progress.add(1_000_000_000)
            assert out.getvalue() == ""  # nothing to say about what is short
            now[0] += 1.0
            progress.add(1_000_000_000)
            shown = out.getvalue()
        assert ("2.0 of 4.0 GB" in shown) == out.isatty()
        assert out.getvalue().endswith("\r\x1b[K") == out.isatty()


def test_ctrl_c_anywhere_while_it_watches_leaves_one_that_can_be_stopped(tmp_path):
    checkpoint = Checkpoint(w=Variable(np.zeros(3, "f4")))
    files = "/saving/_evaluator.py", "/zstrat/threads.py", "/threading.py"
    for number in range(1, 30):
        evaluator = SidecarEvaluator(checkpoint, dict, tmp_path, pause=0.001)
        assert is_struck(evaluator.start, number, *files)
        stopping = threading.Thread(target=evaluator.stop, daemon=True)
        stopping.start()
        stopping.join(100)
        assert not stopping.is_alive(), number
        evaluator.start()  # returns
