"""Programs of several devices, run as people run them: digits on copies of the model, a
layer split over logical devices, and towers that share parameter servers."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from pathlib import Path

import numpy as np
import psutil
import pytest
from programs import Program

pytestmark = [
    pytest.mark.processes,
    pytest.mark.timeout(300),
    pytest.mark.usefixtures("programs"),
]

ROOT = Path(__file__).resolve().parents[2]


def started(name: str, *arguments: str, cwd: Path, **env: str) -> subprocess.Popen[str]:
    """An example in a session of its own, far from the checkout."""
    ours = {
        k: v for k, v in os.environ.items() if k not in ("TF_CONFIG", "ZSTRAT_KEYS")
    }
    return Program(
        [str(ROOT / "examples" / name), *arguments],
        cwd=cwd,
        env={**ours, **env},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def ran(name: str, *arguments: str, cwd: Path, **env: str) -> tuple[int, str, str]:
    """Exit code, output and complaints of an example."""
    with started(name, *arguments, cwd=cwd, **env) as process:
        try:
            out, err = process.communicate(timeout=240)
        except BaseException:
            process.kill()
            raise
    return process.returncode, out, err


def accuracy(out: str) -> float:
    (found,) = re.findall(r"test accuracy (\S+)% \(goal 97%\)$", out, re.MULTILINE)
    return float(found)


def test_digits_on_copies_learn_and_fall_short_in_few_steps(images_alone, tmp_path):
    few = ["--devices", "4", "--steps", "12"]
    code, out, err = ran("mirrored.py", *few, cwd=tmp_path, **images_alone)
    assert (code, err) == (1, ""), out
    assert re.search(r"^4 replicas on \S+ devices$", out, re.MULTILINE)
    (loss,) = re.findall(r"^12 steps in \S+ s; last loss (\S+)$", out, re.MULTILINE)
    # Ten classes, untrained: the logarithm of their number.
    assert 0 < float(loss) < np.log(10)
    assert 10 < accuracy(out) < 97


def test_a_split_layer_computes_what_one_device_does(tmp_path):
    few = ["--hidden", "64", "--steps", "5"]
    code, out, err = ran("model_parallel.py", *few, cwd=tmp_path)
    assert (code, err) == (0, ""), out
    curves = re.findall(r"^loss (\S+) -> (\S+) ", out, re.MULTILINE)
    assert len(curves) == 2
    first, last = np.array(curves, float).T
    np.testing.assert_allclose(first, first[0], rtol=1e-4)  # of the digits printed
    np.testing.assert_allclose(last, last[0], rtol=1e-4)
    (apart,) = re.findall(r"^largest difference (\S+) \(goal", out, re.MULTILINE)
    assert float(apart) <= 1e-5


def test_towers_share_variables_and_the_count_of_steps(images_alone, tmp_path):
    few = ["--steps", "12", "--every", "1", "--ps", "1"]
    code, out, err = ran("towers.py", *few, cwd=tmp_path, **images_alone)
    assert (code, err) == (1, ""), out
    assert out.startswith("starting 1 ps and 2 workers on this machine\n")
    assert "worker:0 | 2 towers here, variables on 1 ps\n" in out
    # Who makes the count full has read an older one, perhaps, and makes one step more;
    # the other one ends the step that it is in, and may make one more, too.
    full = range(12, 16)
    counts = re.findall(r"^worker:\d \| step (\d+)/12 ", out, re.MULTILINE)
    assert max(map(int, counts)) in full
    made = re.findall(r"^worker:\d \| made (\d+) steps in", out, re.MULTILINE)
    if len(made) == 2:  # else the second was slow, and ended with the first
        assert sum(map(int, made)) in full
    assert 10 < accuracy(out) < 97
    assert "worker:0 ended with exit code 1" in out


def test_towers_that_are_interrupted_leave_nothing_behind(images_alone, tmp_path):
    endless = ["--steps", "1000000", "--every", "5", "--ps", "1", "--workers", "1"]
    with started("towers.py", *endless, cwd=tmp_path, **images_alone) as process:
        try:
            seen = iter(process.stdout.readline, "")
            assert any("/1000000  loss" in line for line in seen)
            family = psutil.Process(process.pid).children(recursive=True)
            os.killpg(process.pid, signal.SIGINT)  # Ctrl-C at a terminal
            out, err = process.communicate(timeout=240)
        except BaseException:
            process.kill()
            raise
    assert (process.returncode, err) == (130, ""), out
    assert "Traceback" not in out
    assert not psutil.wait_procs(family, timeout=100)[1]


@pytest.mark.parametrize(
    ("jobs", "words"),
    [
        ({}, "TF_CONFIG names no ps: start zstrat-ps, and name it there or say"),
        ({"ps": ["localhost:1"]}, "/job:ps/task:0 at localhost:1 did not answer"),
    ],
)
def test_towers_without_parameter_servers_say_so(jobs, words, images_alone, tmp_path):
    task = {"type": "worker", "index": 0}
    told = {
        "TF_CONFIG": json.dumps({"cluster": {"worker": ["h:2"], **jobs}, "task": task}),
        "ZSTRAT_CONNECT_TIMEOUT": "0.5",
    }
    code, out, err = ran("towers.py", cwd=tmp_path, **told, **images_alone)
    assert (code, out) == (1, "")
    assert words in err
    assert "Traceback" not in err
