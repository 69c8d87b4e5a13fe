"""Each sentence of docs/consistency.md names the tests that hold it; they are there."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "consistency.md").read_text()

CHECK = re.compile(r"`(tests/[\w/]+\.py)::(\w+)`")


def sentences(page: str) -> list[tuple[str, str]]:
    """The points of each section, with its heading."""
    found = []
    for section in page.split("\n## ")[1:]:
        heading, _, text = section.partition("\n")
        points = re.split(r"^- ", text, flags=re.MULTILINE)[1:]
        found += [(heading, " ".join(point.split())) for point in points]
    return found


@cache
def names(path: str) -> set[str]:
    """What pytest finds in a file: functions, and machines of hypothesis."""
    file = ROOT / path
    if not file.is_file():
        return set()
    found = set()
    for node in ast.parse(file.read_text()).body:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                found.add(name)
            case ast.Assign(targets=[ast.Name(id=name)]):
                found.add(name)
    return {name for name in found if re.match("test_|Test", name)}


SENTENCES = sentences(PAGE)
CHECKS = sorted({check for _, words in SENTENCES for check in CHECK.findall(words)})


def test_each_sentence_names_its_check() -> None:
    assert len(SENTENCES) >= 40
    assert not [words for _, words in SENTENCES if not CHECK.search(words)]


@pytest.mark.parametrize("check", CHECKS, ids="::".join)
def test_a_check_is_there(check: tuple[str, str]) -> None:
    path, name = check
    assert name in names(path)


def test_nothing_is_named_that_is_no_check() -> None:
    assert len(re.findall(r"::", PAGE)) == len(CHECK.findall(PAGE))


def test_what_is_not_there_is_seen() -> None:
    assert "test_what_is_not_there_is_seen" in names("tests/test_consistency.py")
    assert "SENTENCES" not in names("tests/test_consistency.py")
    assert names("tests/test_of_nothing.py") == set()
    assert sentences("# a\n\n- no\n\n## b\n\n- yes\n  and\n- no") == [
        ("b", "yes and"),
        ("b", "no"),
    ]
