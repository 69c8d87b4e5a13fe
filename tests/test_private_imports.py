"""Tests ask at doors, as other packages do; how many lines do not can only fall."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING

import pytest
from test_architecture import ROOT, ours

if TYPE_CHECKING:
    from pathlib import Path

LINES = 129
"""How many lines of all tests import a private module or name, or patch a name in one.
What is left are machines that are tested by themselves, with messages and numbers, and
limits that a test lowers."""

INNER = re.compile(r"zstrat(\.\w+)*\._[a-z]\w*(\.\w+)+")
"""A name in a private module, in full, as `monkeypatch.setattr` takes it."""


def test_ever_fewer_lines_of_tests_reach_into_private_modules() -> None:
    """Whoever needs one more looks for a door, or for something in `zstrat.testing`;
    whoever has made them fewer writes the smaller number above."""
    paths = [path for path in sorted(TESTS.rglob("*.py")) if path not in BREAKS_ZSTRAT]
    found = [line for path in paths for line in inside(path)]
    assert len(found) <= LINES, "\n".join(found)
    assert len(found) == LINES, f"LINES may be {len(found)} now"


TESTS = ROOT / "tests"

SIMULATION = TESTS / "testing" / "simulation"
BREAKS_ZSTRAT = tuple(SIMULATION.glob("*_mutations.py"))
"""What they break on purpose is nobody's to import."""


def inside(path: Path) -> list[str]:
    """Each such line of a file."""
    return [f"{path.relative_to(ROOT)}:{line}" for line in lines_in(path.read_text())]


MAYBE = re.compile(r"\bzstrat[\w.]*\._|from zstrat[\w.]* import(\s*\([^)]*|.*)\b_[a-z]")
"""Is in every program with such a line: to parse all tests takes seconds."""


def lines_in(program: str) -> list[int]:
    if not MAYBE.search(program):
        return []
    return sorted(
        {
            node.lineno
            for node in ast.walk(ast.parse(program))
            if any(is_private(name) for name in names_in(node))
        }
    )


def names_in(node: ast.AST) -> list[str]:
    """What an import names in full, and what a text may stand for."""
    match node:
        case ast.Import():
            return [alias.name for alias in node.names]
        case ast.ImportFrom(module=str(module), level=0):
            return [f"{module}.{alias.name}" for alias in node.names]
        case ast.Constant(value=str(text)) if INNER.fullmatch(text):
            return [text]
    return []


def is_private(name: str) -> bool:
    parts = name.split(".")
    return ours(name) and any(p.startswith("_") and p[:2] != "__" for p in parts)


def test_what_counts_as_private() -> None:
    program = """
import zstrat._a, os._b
from zstrat.a import b, __version__
from zstrat.a import _b
from zstrat.a._b import (
    c,
    d,
)
patch("zstrat.a._b.C", 1)
read("zstrat.a._b")
"""
    assert lines_in(program) == [2, 4, 5, 9]


@pytest.mark.parametrize(
    "line",
    [
        "import os, zstrat._a",
        "from zstrat import a, _b",
        "from zstrat.a import (\n    c,\n    _b,\n)",
        "from zstrat._a import b",
        "patch('zstrat._a.B', 1)",
    ],
)
def test_no_such_line_is_passed_over(line: str) -> None:
    assert lines_in(line) == [1]
