"""Checks what docs/architecture.md and docs/internals say about the source: where a
newcomer finds what, which files there are, and which packages."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "architecture.md").read_text()
PAGES = [PAGE, *(x.read_text() for x in (ROOT / "docs" / "internals").glob("*.md"))]

FOLDERS = ("zstrat", "")
"""Paths of the page are those below one of these: `ps/_service.py`, `daemons/ps.py`."""

LEAST = 60
"""Fewer questions than that would leave a package out."""

TENSORFLOWS_PATHS = {"experimental", "compat", "contrib"}
"""Packages of names alone, which live in others."""


class Row(NamedTuple):
    question: str
    file: str
    name: str


def rows(page: str) -> list[Row]:
    """The table of the section "Where is ...", without its head."""
    section = page.partition("\n## Where is ...\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [
        Row(question, file.strip("`"), name.strip("`"))
        for question, file, name in cells[2:]
    ]


def found(path: str) -> list[Path]:
    """The files that a path of the page names; it may have stars."""
    return [file for folder in FOLDERS for file in (ROOT / folder).glob(path)]


def defined(file: Path) -> set[str]:
    """What a module defines itself at its top level, and methods as `Class.method`.
    What it imports is defined elsewhere."""
    tree = ast.parse(file.read_text())
    methods = {
        f"{node.name}.{name}"
        for node in tree.body
        if isinstance(node, ast.ClassDef)
        for name in _names(node.body)
    }
    return methods | set(_names(tree.body))


def _names(body: list[ast.stmt]) -> Iterator[str]:
    for node in body:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.name
            case ast.Assign(targets=targets):
                yield from (x.id for x in targets if isinstance(x, ast.Name))
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield name


ROWS = rows(PAGE)


def test_the_table_covers_every_package() -> None:
    assert len(ROWS) >= LEAST
    questions = [row.question.casefold() for row in ROWS]
    assert len(set(questions)) == len(questions)
    packages = {file.parent.name for file in (ROOT / "zstrat").glob("*/__init__.py")}
    covered = {row.file.split("/")[0] for row in ROWS}
    assert (packages - TENSORFLOWS_PATHS) | {"daemons"} <= covered


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.file}:{row.name}")
def test_a_name_is_where_the_table_says(row: Row) -> None:
    files = found(row.file)
    assert len(files) == 1, f"{row.question}: {row.file} is {len(files)} files"
    assert row.name in defined(files[0]), f"{row.question}: {row}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.splitlines()[0])
def test_every_file_that_a_page_names_is_there(page: str) -> None:
    paths = set(re.findall(r"[\w*./-]+\.py\b", page))
    assert not {path for path in paths if not found(path)}


def test_every_package_is_on_the_page() -> None:
    named = set(re.findall(r"`([\w/]+)/`", PAGE))
    there = {
        file.parent.relative_to(ROOT / "zstrat").as_posix()
        for file in (ROOT / "zstrat").rglob("__init__.py")
    }
    assert there - {".", "compat/v1"} <= named
    assert not {path for path in named if not any(x.is_dir() for x in found(path))}


PAGE_OF_OTHERS = """
## Where is ...

| question | file | name |
|---|---|---|
| who asks | `a/_b.py` | `C.d` |

## Another section

| not | a | row |
"""


def test_the_table_ends_with_its_section() -> None:
    assert rows(PAGE_OF_OTHERS) == [Row("who asks", "a/_b.py", "C.d")]


def test_what_a_module_imports_is_not_defined_there(tmp_path: Path) -> None:
    file = tmp_path / "_b.py"
    file.write_text(
        "from os import path\nE: int = 1\nF = 2\n\n\n"
        "class C:\n    x: int\n\n    async def d(self): ...\n"
    )
    assert defined(file) == {"C", "C.d", "C.x", "E", "F"}
