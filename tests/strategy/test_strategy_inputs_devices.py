"""Distributed datasets of the local strategies, in a process with four devices."""

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent

CHECK = """
import sys, jax, pytest
assert jax.local_device_count() == 4
sys.exit(pytest.main(sys.argv[1:]))
"""


def test_elements_come_to_the_devices_of_their_replicas():
    tests = HERE / "inputs_on_devices.py"
    done = subprocess.run(
        [sys.executable, "-c", CHECK, "-q", "-p", "no:cacheprovider", str(tests)],
        env={**os.environ, "JAX_NUM_CPU_DEVICES": "4", "JAX_PLATFORMS": "cpu"},
        cwd=HERE.parents[1],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert "10 passed" in done.stdout
