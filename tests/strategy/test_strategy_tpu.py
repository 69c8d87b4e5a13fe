"""TPUStrategy, in a process that has eight devices: see ``tpu_on_eight.py``."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent

CHECK = """
import sys, jax, pytest
assert jax.local_device_count() == 8
sys.exit(pytest.main(sys.argv[1:]))
"""


@pytest.mark.parametrize("file", ["logical_devices_on_eight.py", "tpu_on_eight.py"])
def test_on_eight_devices(file):
    done = subprocess.run(
        [sys.executable, "-c", CHECK, "-q", "-p", "no:cacheprovider", str(HERE / file)],
        env={**os.environ, "JAX_NUM_CPU_DEVICES": "8", "JAX_PLATFORMS": "cpu"},
        cwd=HERE.parents[1],
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
