"""Local strategies, in processes with eight devices: the files `test_strategy_local_*`,
which are collected there alone (see conftest)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
FILES = sorted(HERE.glob("test_strategy_local_*.py"))


def parts(count):
    """The files in so many parts of about the same size, the large ones dealt first."""
    found = [[] for _ in range(count)]
    for path in sorted(FILES, key=size, reverse=True):
        min(found, key=lambda part: sum(map(size, part))).append(path)
    return found


def size(path):
    return path.stat().st_size


PARTS = parts(10)
"""What one process runs: it takes longer to start than most of the files."""

CHECK = """
import sys, jax, pytest
assert jax.local_device_count() == 8
sys.exit(pytest.main(sys.argv[1:]))
"""


@pytest.mark.timeout(300)  # on busy cores they take several times as long as alone
@pytest.mark.parametrize("names", PARTS, ids=range(len(PARTS)))
def test_on_eight_devices(names):
    done = subprocess.run(
        [sys.executable, "-c", CHECK, "-q", "-p", "no:cacheprovider", *names],
        env={**os.environ, "JAX_NUM_CPU_DEVICES": "8", "JAX_PLATFORMS": "cpu"},
        cwd=HERE.parents[1],
        capture_output=True,
        text=True,
        timeout=290,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
