"""`optax_run.py`, in processes of their own: float64 and eight devices are settled
before jax is imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
HOMES = (
    "none",
    "one_device",
    "mirrored",
    "multi_worker",
    "two_ranks",
    "tpu",
    "central",
    "servers",
)
"""What `optax_run.py` knows: all strategies, inside of steps and outside."""


def outcomes(
    dtype: str, homes: list[str], to: Path, *more: str, timeout: float
) -> dict[str, Any]:
    """What came of all cases in these homes; fails with what the process printed."""
    command = [sys.executable, str(HERE / "optax_run.py")]
    given = ["--dtype", dtype, "--home", *homes, "--to", str(to), *more]
    many = set(homes) - {"none", "servers"}
    done = subprocess.run(
        [*command, *given],
        env={
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "JAX_ENABLE_X64": "1" if dtype == "float64" else "0",
            "JAX_NUM_CPU_DEVICES": "8" if many else "1",
        },
        cwd=HERE.parents[1],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-5000:]
    return dict(json.loads(to.read_text()))
