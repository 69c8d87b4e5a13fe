"""Tests for eight devices and for one run in one session, none of them forgotten."""

import ast
import re
import subprocess
import sys
import types
from pathlib import Path

import parts
import pytest

ROOT = Path(__file__).parents[1]
EIGHT = "tests/strategy/test_strategy_local_logical_devices.py"
ONE = "tests/strategy/test_strategy_v1_ends.py"


def passed(*arguments):
    """The tests that passed in a session of its own, by their names."""
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found = re.findall(r"tests/\S+\.py::.*(?= PASSED)|(?<=PASSED )tests/.*", ran.stdout)
    assert len(found) == int(re.search(r"(\d+) passed", ran.stdout).group(1))
    return sorted(line.strip() for line in found)


def collected(*arguments):
    """What a session of its own would run, without running it."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", *arguments]
    ran = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=True
    )
    return sorted(line for line in ran.stdout.splitlines() if "::" in line)


@pytest.mark.thorough
@pytest.mark.timeout(300)
def test_a_session_with_workers_runs_the_tests_of_both():
    alone = collected("-n", "0", EIGHT)
    assert alone
    both = passed("-n", "1", "--dist", "loadfile", EIGHT, ONE)
    assert [name for name in both if name.startswith(EIGHT)] == alone
    others = {name.partition("[")[0] for name in both if name not in alone}
    assert others == {
        f"{ONE}::{node.name}"
        for node in ast.parse((ROOT / ONE).read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def test_a_session_without_workers_says_what_to_do(monkeypatch):
    monkeypatch.delenv(parts.VARIABLE, raising=False)
    alone = types.SimpleNamespace(args=[EIGHT, ONE], getoption=lambda *_: [])
    with pytest.raises(pytest.UsageError):
        parts.pytest_configure(alone)
