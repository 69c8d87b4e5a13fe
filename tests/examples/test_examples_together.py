"""Programs that train together, run as people run them."""

from __future__ import annotations

import importlib
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import jax
import numpy as np
import programs
import pytest

if TYPE_CHECKING:
    import subprocess

pytestmark = [
    pytest.mark.processes,
    pytest.mark.timeout(300),
    pytest.mark.usefixtures("programs"),
]

ROOT = Path(__file__).resolve().parents[2]


def ran(*command: str, cwd: Path, **more: str) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if k not in ("TF_CONFIG", "ZSTRAT_KEYS")}
    return programs.run(
        [*command],
        cwd=cwd,
        env={**env, **more},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def test_the_script_of_the_readme_learns_the_same_in_every_process(tmp_path):
    readme = (ROOT / "README.md").read_text()
    (block,) = re.findall(
        r"^```python\n# train.py\n(.*?)^```", readme, re.MULTILINE | re.DOTALL
    )
    (tmp_path / "train.py").write_text(block)

    done = ran("-m", "zstrat.cli", "run", "-n", "2", "train.py", cwd=tmp_path)

    assert done.returncode == 0, done.stdout + done.stderr
    told = [
        " ".join(re.findall(rf"^worker:{n} \| (.*)$", done.stdout, re.MULTILINE))
        for n in (0, 1)
    ]
    assert told[0] == told[1]
    loss, *weights = [float(x) for x in re.findall(r"[-+\d.]+(?:e[-+]?\d+)?", told[0])]
    # y = x @ (0..7) without noise, and the loss is quadratic.
    np.testing.assert_allclose(weights, np.arange(8), atol=1e-3)
    assert 0 <= loss < 1e-6


def test_digits_together_are_what_one_process_computes(images_alone, tmp_path):
    few = ["--workers", "2", "--steps", "12", "--batch", "32"]
    script = str(ROOT / "examples/digits_allreduce.py")
    done = ran(script, *few, cwd=tmp_path, **images_alone)

    # Its goal for the accuracy is out of reach in so few steps, and it says so.
    assert done.returncode == 1, done.stdout + done.stderr
    (apart,) = re.findall(r"largest difference of the losses: (\S+)", done.stdout)
    assert float(apart) <= 1e-5
    assert re.search(r"test accuracy \S+% \(goal 97%\)", done.stdout)


def test_the_transformer_trains_and_says_how_well(tmp_path):
    few = ["--steps", "4", "--every", "2", "--batch", "2", "--windows", "20"]
    script = str(ROOT / "examples/char_transformer.py")
    done = ran(script, "--workers", "2", "--layers", "1", *few, cwd=tmp_path)

    assert done.returncode == 1, done.stdout + done.stderr
    steps = re.findall(r"step (\d)/4 +(\S+) bits per character", done.stdout)
    assert [number for number, _ in steps] == ["2", "4"]
    # 96 characters, untrained: close to the logarithm of their number.
    assert all(5 < float(bits) < 8 for _, bits in steps)
    (bits,) = re.findall(r"test: (\S+) bits per character \(goal", done.stdout)
    assert 5 < float(bits) < 8
    assert re.search(r"217,472 parameters", done.stdout)


def test_local_steps_send_fewer_bytes_over_a_slow_link(tmp_path):
    few = ["--steps", "6", "--every", "3", "--batch", "2", "--megabits", "1000"]
    script = str(ROOT / "examples/diloco.py")
    # Two of them are in test_system_windows, and on a page of docs.
    done = ran(script, "--workers", "1", *few, cwd=tmp_path)

    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall(r"characters +\S+ s  \S+ bits", done.stdout)) == 2 + 6
    (times,) = re.findall(r"(\S+) times fewer bytes", done.stdout)
    assert 2 < float(times) < 4


def test_the_transformer_has_a_million_parameters(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples")
    monkeypatch.setattr(sys, "argv", ["char_transformer.py"])
    transformer = importlib.import_module("char_transformer")
    for name in ("char_transformer", "plain_texts"):
        monkeypatch.delitem(sys.modules, name)

    params = transformer.init_params(0, transformer.arguments().layers)

    assert sum(map(np.size, jax.tree.leaves(params))) == 1_004_928
