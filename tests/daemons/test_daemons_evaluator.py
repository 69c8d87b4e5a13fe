"""``zstrat-evaluator``: a process that evaluates what appears in a folder."""

import json
import signal
import subprocess
import sys
import textwrap

import numpy as np
import pytest
from zstrat.daemons import evaluator

from zstrat.saving import Checkpoint, CheckpointManager
from zstrat.variables import Variable

pytestmark = pytest.mark.processes

PROGRAM = """
    import numpy as np
    import zstrat as zs
    from zstrat.saving import Checkpoint

    w = zs.Variable(np.zeros(3, "f4"))

    def make():
        return Checkpoint(w=w), lambda: {"sum": w.numpy().sum()}

    def fails():
        return Checkpoint(w=w), lambda: {"sum": 1 / 0}

    def wrong():
        return 5
"""


@pytest.fixture
def run(tmp_path, programs):
    """Starts an evaluator: forked, as most of what one takes is to import jax, or by
    ``python``."""
    (tmp_path / "program.py").write_text(textwrap.dedent(PROGRAM))

    def started(*words, python=()):
        return (subprocess.Popen if python else programs.Program)(
            [*python, "-m", "zstrat.daemons.evaluator", *map(str, words)],
            cwd=tmp_path,
            stderr=subprocess.PIPE,
            text=True,
        )

    return started


@pytest.fixture
def folder(tmp_path):
    step = Variable(np.int64(7))
    checkpoint = Checkpoint(w=Variable(np.ones(3, "f4")))
    manager = CheckpointManager(checkpoint, tmp_path / "c", 2, step_counter=step)
    manager.save()
    manager.close()
    return tmp_path / "c"


def test_it_evaluates_and_ends(run, folder, tmp_path):
    lines = tmp_path / "m.jsonl"
    options = ["--metrics", lines, "--max-evaluations", 1]
    child = run("program:make", folder, *options, python=[sys.executable])
    _, errors = child.communicate(timeout=60)
    assert child.returncode == 0, errors
    line = json.loads(lines.read_text())
    assert (line["step"], line["sum"]) == (7, 3.0)
    assert "evaluator:0" in errors
    assert "ckpt-1, step 7: sum 3" in errors


def test_sigterm_ends_it(run, tmp_path):
    with run("program:make", tmp_path / "none", "--index", 3) as child:
        line = child.stderr.readline()
        assert "evaluator:3" in line
        assert "ready" in line
        child.send_signal(signal.SIGTERM)
        assert child.wait(100) == 0
        assert "SIGTERM (once more ends at once)" in child.stderr.read()


@pytest.mark.parametrize(
    ("program", "code", "says"),
    [
        ("program:fails", 1, "ZeroDivisionError"),
        ("program:wrong", 2, "returned int: expected a pair of a zs.Checkpoint"),
        ("program:w", 2, "program:w: expected a function"),
    ],
)
def test_exit_codes(run, folder, program, code, says):
    child = run(program, folder)
    _, errors = child.communicate(timeout=60)
    assert (child.returncode, says in errors) == (code, True), errors


@pytest.mark.parametrize("program", ["json:none", "nothing"])
def test_a_program_that_is_not_there(program, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])  # it adds the working folder
    with pytest.raises(ValueError, match=r"MODULE.*FUNCTION"):
        evaluator.load_program(program)


def test_a_program_that_takes_arguments():
    with pytest.raises(ValueError, match="'s'"):
        evaluator.load_program("json:loads")


def test_a_program_that_does_not_say_what_it_takes_is_called():
    with pytest.raises(ValueError, match=r"dict\(\)"):
        evaluator.load_program("builtins:dict")  # as functions of C++ may be


def test_a_file_in_the_place_of_the_folder_or_the_other_way_round(run, folder):
    for words, says in (
        (["program.py"], "program.py is a file"),
        ([folder, "--metrics", folder], "is a folder: choose the path of a file"),
    ):
        child = run("program:make", *words)
        _, errors = child.communicate(timeout=60)
        assert (child.returncode, says in errors) == (2, True), errors
        assert "Traceback" not in errors


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([""], "argument DIR: expected a folder, got an empty string"),
        ([".", "--tensorboard", ""], "argument --tensorboard: expected a folder"),
        (["gs://bucket/run"], "expected a path, got an address"),
    ],
)
def test_a_folder_that_is_none(run, words, says):
    child = run("program:make", *words)
    _, errors = child.communicate(timeout=60)
    assert (child.returncode, says in errors) == (2, True), errors


def test_who_it_is(monkeypatch):
    def told(task):
        monkeypatch.setenv("TF_CONFIG", json.dumps(task))
        return evaluator.task_index()

    monkeypatch.delenv("TF_CONFIG", raising=False)
    assert evaluator.task_index() == 0
    assert told({"cluster": {}}) == 0
    assert told({"task": {"type": "evaluator"}}) == 0
    assert told({"task": {"type": "evaluator", "index": 2}}) == 2
    assert told({"task": {"type": "evaluator", "index": "2"}}) == 2
    for wrong in (-1, "-1", "two", None, 1.5, True):
        with pytest.raises(ValueError, match=r"task\.index"):
            told({"task": {"type": "evaluator", "index": wrong}})
    with pytest.raises(ValueError, match=r"'worker'.*'evaluator'"):
        told({"task": {"type": "worker", "index": 0}})
    monkeypatch.setenv("TF_CONFIG", "{")
    with pytest.raises(ValueError, match=r"TF_CONFIG.*JSON"):
        evaluator.task_index()
