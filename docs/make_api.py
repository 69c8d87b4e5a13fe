"""Makes docs/api.md: tf.distribute's names, where each lives here, and who shows it.

The names and their places come from docs/names.toml, the files from the code, and
the tests from their marks: a test with ``@pytest.mark.shows("name")`` shows that name.
Law of the script: a name whose place does not exist, or which no test shows, is a
failure, and so is a mark for a name that is not in the list.

    python docs/make_api.py            writes the table
    python docs/make_api.py --check    fails if it is not what it would write
"""

from __future__ import annotations

import ast
import enum
import importlib
import inspect
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final

from tf_names import wrong

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

ROOT: Final = Path(__file__).resolve().parents[1]
TABLE: Final = ROOT / "docs" / "api.md"
_ELSEWHERE: Final = "jax: "
_HEAD: Final = """# Where tf.distribute's names live

For those who come from TensorFlow: the names of its four pages on parameter servers,
TPUs, towers and the first version of tf.distribute. The tables say where each name
lives here (`import zstrat as zs`), and name a test that shows what TensorFlow's page
promises. A name with `(x=)` is an argument with a behaviour of its own. Under each
table stands what has no name here because JAX has one.

Made by `make api` of docs/names.toml, the code and the marks of the tests; do not edit.
"""
_OTHERS: Final = """## All other names of TF 2.21

The public names of `tf.distribute`, its modules, `tf.compat.v1.distribute` and what it
gives to a program are listed in [tf_names.toml](tf_names.toml), with members and
arguments. Each lives at its place here (`tf.distribute.X` is `zs.X`) and has the same
members and arguments, unless it is in this table. A name in brackets is an argument of
the call. Classes without `tf.` are those of variables that a program is given.
"""
_INSTEAD: Final = "Instead of these, in a program of JAX:\n"


@dataclass(frozen=True, slots=True)
class Row:
    """One name: its place here, the file that defines it, a test that shows it."""

    name: str
    here: str
    file: str
    test: str


class Missing(Exception):
    """What the table cannot be made without; its lines say what to do."""


def main() -> int:
    """Exit code 1: something is missing, or the table is not up to date."""
    try:
        text = table(ROOT)
    except Missing as missing:
        print(f"docs/api.md cannot be made:\n{missing}", file=sys.stderr)
        return 1
    if "--check" not in sys.argv[1:]:
        TABLE.write_text(text)
    elif not TABLE.exists() or TABLE.read_text() != text:
        print("docs/api.md is not up to date: run `make api`", file=sys.stderr)
        return 1
    return 0


def table(root: Path) -> str:
    """The whole page.

    Raises:
        Missing: Names all that is.
    """
    names = tomllib.loads((root / "docs" / "names.toml").read_text())
    pages = names["page"]
    shown = shows(root)
    problems = [
        f"  {name!r} is shown by {test} and is not in docs/names.toml"
        for name, test in sorted(shown.items())
        if not any(name in page["names"] for page in pages)
    ]
    sections = []
    for page in pages:
        rows, missing = _rows(page["names"], shown, root)
        problems += missing
        sections.append(_section(page["title"], page["about"], rows))
    inventory = root / "docs" / "tf_names.toml"
    if inventory.exists():
        problems += wrong(tomllib.loads(inventory.read_text()), names)
        sections.append(_others(names))
    if problems:
        raise Missing("\n".join(problems))
    return "\n".join([_HEAD, *sections])


def _others(names: Mapping[str, Any]) -> str:
    """What zstrat lacks of the names that no page has, and what to write instead."""
    rows = [
        (_owned(group["of"], group.get("names", ())), group["write"])
        for group in names.get("instead", ())
    ]
    return "\n".join([_OTHERS, *_grid(("name", "instead"), rows)]) + "\n"


def _owned(owners: Sequence[str], names: Sequence[str]) -> str:
    """As ``tf.Variable: eval, load``."""
    shown = ", ".join(f"`{owner}`" for owner in owners)
    return f"{shown}: {', '.join(f'`{name}`' for name in names)}" if names else shown


def shows(root: Path) -> dict[str, str]:
    """Name -> the first test, in order of files, that is marked with it; also in files
    that run in processes of their own, which are not called test_*."""
    found: dict[str, str] = {}
    for path in sorted((root / "tests").rglob("*.py")):
        where = path.relative_to(root).as_posix()
        for test, names in _marked(ast.parse(path.read_text())):
            for name in names:
                found.setdefault(name, f"{where}::{test}")
    return found


def _rows(
    names: Mapping[str, str], shown: Mapping[str, str], root: Path
) -> tuple[list[Row], list[str]]:
    rows, wrong = [], []
    for name, here in names.items():
        if here.startswith(_ELSEWHERE):
            rows.append(Row(name, here.removeprefix(_ELSEWHERE), "", ""))
            continue
        try:
            file = _file(here, root)
        except (AttributeError, ImportError) as error:
            wrong.append(f"  {name!r} lives at {here}, which is not there: {error}")
            continue
        if name not in shown:
            wrong.append(
                f"  {name!r} ({here}) is shown by no test: mark one with "
                f"@pytest.mark.shows({name!r})"
            )
        rows.append(Row(name, here, file, shown.get(name, "")))
    return rows, wrong


def _file(here: str, root: Path) -> str:
    """The file that defines what a path like ``zs.Strategy.run`` leads to."""
    _, *parts = here.split(".")
    found: Any = importlib.import_module("zstrat")
    home: Any = found
    for part in parts:
        if isinstance(found, ModuleType | type):
            home = found
        found = _inner(found, part)
    source = _source(found) or _source(home)
    path = Path(source or "")
    return path.relative_to(root).as_posix() if path.is_relative_to(root) else ""


def _inner(outer: Any, name: str) -> Any:
    try:
        return getattr(outer, name)
    except AttributeError:
        if not isinstance(outer, ModuleType):
            raise
        return importlib.import_module(f"{outer.__name__}.{name}")


def _source(thing: Any) -> str | None:
    if isinstance(thing, property):
        thing = thing.fget
    if isinstance(thing, enum.Enum):
        thing = type(thing)
    try:
        return inspect.getsourcefile(inspect.unwrap(thing))
    except TypeError:  # a slot or a value: its home has a file
        return None


def _marked(tree: ast.Module) -> Iterator[tuple[str, list[str]]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names = [name for mark in node.decorator_list for name in _names(mark)]
            if names:
                yield node.name, names


def _names(mark: ast.expr) -> list[str]:
    if not isinstance(mark, ast.Call) or ast.unparse(mark.func) != "pytest.mark.shows":
        return []
    return [ast.literal_eval(argument) for argument in mark.args]


def _section(title: str, about: str, rows: list[Row]) -> str:
    here = [
        (r.name, _link(r.here, r.file), _link(*_shown(r.test))) for r in rows if r.test
    ]
    instead = [(r.name, r.here) for r in rows if not r.test]
    lines = [f"## {title}\n", f"{about.strip()}\n"]
    lines += _grid(("name", "here", "shown by"), here)
    if instead:
        lines += ["", _INSTEAD, *_grid(("name", "instead"), instead)]
    return "\n".join(lines) + "\n"


def _grid(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return ["| " + " | ".join(line) + " |" for line in lines]


def _shown(test: str) -> tuple[str, str]:
    file, _, name = test.partition("::")
    return name, file


def _link(text: str, file: str) -> str:
    return f"[`{text}`](../{file})" if file else f"`{text}`"


if __name__ == "__main__":
    sys.exit(main())
