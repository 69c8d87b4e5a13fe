"""Local strategies, in processes with eight devices: the files `test_strategy_local_*`,
which are collected there alone (see conftest)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
FILES = sorted(path.name for path in HERE.glob("test_strategy_local_*.py"))
PARTS = [FILES[n::10] for n in range(10)]
"""What one process runs: it takes longer to start than most of the files."""

CHECK = """
import sys, jax, pytest
assert jax.local_device_count() == 8
sys.exit(pytest.main(sys.argv[1:]))
"""


@pytest.mark.parametrize("names", PARTS, ids=range(len(PARTS)))
def test_on_eight_devices(names):
    done = subprocess.run(
        [sys.executable, "-c", CHECK, "-q", "-p", "no:cacheprovider"]
        + [HERE / name for name in names],
        env={**os.environ, "JAX_NUM_CPU_DEVICES": "8", "JAX_PLATFORMS": "cpu"},
        cwd=HERE.parents[1],
        capture_output=True,
        text=True,
        timeout=115,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
