"""The programs that people run first, run as they do: a script, the README's block."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import programs
import pytest

pytestmark = [
    pytest.mark.processes,
    pytest.mark.timeout(300),
    pytest.mark.usefixtures("programs"),
]

ROOT = Path(__file__).resolve().parents[2]


def program(path, *arguments, cwd, python=(), **more):
    """Exit code, output and errors of a program of its own, far from the checkout:
    forked, or of a Python that is started."""
    env = {k: v for k, v in os.environ.items() if k not in ("TF_CONFIG", "ZSTRAT_KEYS")}
    run = subprocess.run if python else programs.run
    return run(
        [*python, str(path), *arguments],
        cwd=cwd,
        env=env | more,
        capture_output=True,
        text=True,
        timeout=240,
    )


def require(*modules):
    """Skips without them; what importing them takes is for the program's process."""
    for module in modules:
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"needs {module}: install zstrat[examples]")


def test_a_keras_model_on_parameter_servers(images_alone, tmp_path):
    require("keras")
    few = ["--epochs", "6", "--workers", "1"]
    ran = program(ROOT / "examples/keras_ps.py", *few, cwd=tmp_path, **images_alone)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert re.search(r"^loss 0\.\d+, test accuracy 9\d", ran.stdout)
    assert not ran.stderr.strip(), ran.stderr


def test_digits_below_the_goal_ends_with_1_and_draws_all_the_same(tmp_path):
    require("sklearn", "matplotlib")
    few = [
        "--steps",
        "6",
        "--every",
        "3",
        "--batch",
        "16",
        "--ps",
        "1",
        "--workers",
        "1",
    ]
    ran = program(
        ROOT / "examples/digits.py", *few, "--out", "pictures/run.png", cwd=tmp_path
    )
    assert ran.returncode == 1, ran.stderr
    assert "starting 1 ps and 1 workers" in ran.stdout
    assert re.findall(r"^step (\d)/6 ", ran.stdout, re.MULTILINE) == ["3", "6"]
    assert re.search(
        r"^6 steps in .* picture: pictures/run\.png$", ran.stdout, re.MULTILINE
    )
    (accuracy,) = re.findall(r"test accuracy (\S+)% \(goal 97%\)", ran.stdout)
    assert 0 <= float(accuracy) < 97
    assert (tmp_path / "pictures/run.png").read_bytes().startswith(b"\x89PNG\r\n")
    assert not ran.stderr.strip(), ran.stderr


def test_a_model_of_equinox_learns_in_few_steps(tmp_path):
    few = ["--ps", "1", "--workers", "1", "--steps", "60", "--every", "20"]
    ran = program(ROOT / "examples/equinox_ps.py", *few, "--rate", "0.01", cwd=tmp_path)
    assert not ran.stderr.strip(), ran.stderr
    losses = re.findall(r"^step \d+/60  loss (\S+)$", ran.stdout, re.MULTILINE)
    (error,) = re.findall(r"^test error (\S+) \(goal 0.1\)$", ran.stdout, re.MULTILINE)
    # The sum of four squares of numbers in -1..1 has a variance of 4 (1/5 - 1/9).
    assert len(losses) == 3
    assert float(error) < 4 * (1 / 5 - 1 / 9)
    assert ran.returncode == (0 if float(error) <= 0.1 else 1)


def test_the_program_of_the_readme_learns_what_made_its_data(tmp_path):
    blocks = re.findall(
        r"^```python\n(.*?)^```",
        (ROOT / "README.md").read_text(),
        re.MULTILINE | re.DOTALL,
    )
    (block,) = [block for block in blocks if "LocalCluster(" in block]
    script = tmp_path / "program.py"
    script.write_text(block)
    ran = program(script, cwd=tmp_path, python=[sys.executable])
    assert ran.returncode == 0, ran.stderr
    loss, *weights = [
        float(x) for x in re.findall(r"[-+\d.]+(?:e[-+]?\d+)?", ran.stdout)
    ]
    # y = x @ (0..7) + 3 without noise. Adam moves a weight by about its rate a step:
    # 500 steps of 0.05 reach them, and what is left is far below one.
    np.testing.assert_allclose(weights, [*range(8), 3], atol=0.2)
    assert 0 <= loss < 0.2
