"""Tests for eight devices and for one run in one session, none of them forgotten."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
EIGHT = "tests/strategy/test_strategy_local_logical_devices.py"
ONE = "tests/strategy/test_strategy_v1_ends.py"


def count(*arguments):
    """How many tests passed, and of which files, in a session of its own."""
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    passed = int(re.search(r"(\d+) passed", ran.stdout).group(1))
    return passed, [name for name in (EIGHT, ONE) if name in ran.stdout]


def test_a_session_with_workers_runs_the_tests_of_both():
    eight, of_eight = count("-n", "0", EIGHT)
    one, of_one = count("-n", "0", ONE)
    assert (of_eight, of_one) == ([EIGHT], [ONE])
    assert count("-n", "1", "--dist", "loadfile", EIGHT, ONE) == (
        eight + one,
        [EIGHT, ONE],
    )


def test_a_session_without_workers_says_what_to_do():
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-n", "0", EIGHT, ONE],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ran.returncode == 4
    assert "name them in a call of their own" in ran.stderr
