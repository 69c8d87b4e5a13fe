"""Real engines on this machine: programs as their users type them."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.engines

HERE = Path(__file__).parent


def result(program, *, needs):
    """What a program of this folder has printed last."""
    if importlib.util.find_spec(needs) is None:
        pytest.skip(f"{needs} is not installed here")
    # Ray asks for a token since it has them; its start is slow where cores are few.
    own = {"RAY_raylet_start_wait_time_s": "120", "RAY_AUTH_MODE": "disabled"}
    ran = subprocess.run(
        [sys.executable, str(HERE / program)],
        env={**os.environ, **own, "RAY_TRAIN_V2_ENABLED": "1"},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-6000:]
    lines = [line for line in ran.stdout.splitlines() if line.startswith("{")]
    print(lines[-1])
    return json.loads(lines[-1])


@pytest.mark.timeout(450)
def test_a_program_on_ray():
    seen = result("on_ray.py", needs="ray")
    assert (
        "Ray has too few free resources for the parameter servers with {'CPU': 1"
        in seen["full"]
    )
    assert "resources for 1 workers, only for 0, with {'GPU'" in seen["lacking"]
    assert "worker_resources=" in seen["lacking"]
    assert seen["gpus"] == ["0", "1"]


@pytest.mark.timeout(450)
def test_workers_of_a_trainer_of_ray():
    seen = result("in_ray_train.py", needs="ray")
    assert seen == {"step": 2, "weight": 9.0}


@pytest.mark.timeout(450)
def test_a_program_on_dask():
    seen = result("on_dask.py", needs="distributed")
    assert seen["seconds"]
    moved = seen["moved"]
    assert moved["moved"] == moved["expected"]
    assert moved["gpus"] == [["1", "2", moved["there"][1]]]


@pytest.mark.timeout(450)
def test_a_ray_that_loses_a_node():
    assert result("on_ray_nodes.py", needs="ray")["done"]
