"""Prints how large zstrat is, and how its docstrings open: what a reader has to hold in
mind. ``python tests/size.py`` from anywhere."""

from __future__ import annotations

import ast
import re
import subprocess
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

ROOT = Path(__file__).resolve().parents[1]

SMALL = 15
"""Lines of a class that may be less than a concept."""

LARGE = 450
"""Lines of a file that may be more than one concept."""

VAGUE = re.compile(
    r"(?i)(how|what|who|whose|whoever|where|when|which|that|as|so|if|nothing|nobody)\b"
)
"""A docstring that opens so says neither what a thing does nor what it is."""

Code = dict[Path, ast.Module]


def main() -> None:
    code, tests = _parsed("zstrat", "daemons"), _parsed("tests")
    classes = [node for node in _nodes(code) if isinstance(node, ast.ClassDef)]
    functions = [node for node in _nodes(code) if isinstance(node, _FUNCTION)]
    comments, lines = _comment_and_code_lines(code)
    opened = [text for text in map(_docstring, _nodes(code)) if text]
    vague = [text for text in opened if VAGUE.match(text)]
    _print("files", len(code))
    _print(f"files above {LARGE} lines", sum(_length(path) > LARGE for path in code))
    _print("code lines, without blanks, comments and docstrings", lines)
    _print("comment lines per code line", f"{comments / lines:.3f}")
    _print("classes", len(classes))
    small = list(filter(_is_small, classes))
    short = list(filter(_has_one_statement, functions))
    uses = Counter(re.findall(r"\w+", "\n".join(map(_text, code | tests))))
    _print(f"classes of at most {SMALL} lines", len(small))
    _print("  that are more than fields, an error or a protocol", _count(_acts, small))
    _print("    and are named once more at most", _once(filter(_acts, small), uses))
    _print("functions", len(functions))
    _print("functions of one line", len(short))
    _print(
        "  that are not a property, a special method or a stub", _count(_does, short)
    )
    _print("    and are named once more at most", _once(filter(_does, short), uses))
    _print(
        "protocols with one implementer by name", len(_lonely_protocols(code, tests))
    )
    _print("docstrings", len(opened))
    _print("docstrings that open with how, what, who …", len(vague))
    _print("lines of tests", sum(map(_length, tests)))
    _print("lines of CHANGELOG.md", _length(ROOT / "CHANGELOG.md"))
    _print("lines of docs/architecture.md", _length(ROOT / "docs" / "architecture.md"))


_FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)
_DOCUMENTED = (*_FUNCTION, ast.ClassDef, ast.Module)


def _print(what: str, number: object) -> None:
    print(f"{number!s:>8}  {what}")


def _parsed(*folders: str) -> Code:
    command = ["git", "-C", str(ROOT), "ls-files", "--", *folders]
    listed = subprocess.run(command, check=True, capture_output=True, text=True)
    paths = [ROOT / name for name in listed.stdout.splitlines() if name.endswith(".py")]
    return {path: ast.parse(path.read_text()) for path in paths if path.exists()}


def _nodes(code: Code) -> list[ast.AST]:
    return [node for tree in code.values() for node in ast.walk(tree)]


def _text(path: Path) -> str:
    return path.read_text()


def _length(path: Path) -> int:
    return len(_text(path).splitlines())


def _docstring(node: ast.AST) -> str:
    return (ast.get_docstring(node) or "") if isinstance(node, _DOCUMENTED) else ""


def _is_small(node: ast.ClassDef) -> bool:
    return (node.end_lineno or 0) - node.lineno < SMALL


def _has_one_statement(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    body = node.body[1:] if ast.get_docstring(node) else node.body
    return len(body) == 1 and body[0].lineno == body[0].end_lineno


def _acts(node: ast.ClassDef) -> bool:
    """Returns whether a class is none of those that only hold fields or have a name: a
    message, a dataclass, a NamedTuple, an Enum, an error, a protocol."""
    marks = " ".join(map(ast.unparse, (*node.bases, *node.decorator_list)))
    if re.search(r"dataclass|message|Tuple|Enum|Flag|Error|Warning|Protocol", marks):
        return False
    return any(isinstance(child, _FUNCTION) for child in node.body)


def _does(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    marks = " ".join(map(ast.unparse, node.decorator_list))
    is_stub = ast.unparse(node.body[-1]) in ("...", "pass")
    is_special = node.name.startswith("__") or re.search("property|overload", marks)
    return not (is_stub or is_special)


def _count(is_so: Callable[[Any], bool], nodes: Iterable[Any]) -> int:
    return sum(map(is_so, nodes))


def _once(nodes: Iterable[Any], uses: Counter[str]) -> int:
    return sum(uses[node.name] <= 2 for node in nodes)


def _comment_and_code_lines(code: Code) -> tuple[int, int]:
    """Counts lines that are a comment, and lines that are neither that, blank, nor part
    of a docstring."""
    comments = lines = 0
    for path, tree in code.items():
        strings = {
            line
            for node in ast.walk(tree)
            if isinstance(node, ast.Expr)
            if isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
            for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
        }
        for number, text in enumerate(path.read_text().splitlines(), start=1):
            if number in strings or not text.strip():
                continue
            if text.lstrip().startswith("#"):
                comments += 1
            else:
                lines += 1
    return comments, lines


def _lonely_protocols(code: Code, tests: Code) -> list[str]:
    """Returns the protocols of which one class at most, tests included, has all names.
    A class with these names and another meaning counts as an implementer."""
    members = {
        (path, node.name): _members(node)
        for path, tree in (code | tests).items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }
    protocols = {
        (path, node.name): _members(node)
        for path, tree in code.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        if any(ast.unparse(base).startswith("Protocol") for base in node.bases)
    }
    implementers = Counter(
        protocol
        for protocol, wanted in protocols.items()
        for other, there in members.items()
        if other not in protocols and wanted <= there
    )
    return [name for path, name in protocols if implementers[path, name] < 2]


def _members(node: ast.ClassDef) -> set[str]:
    """Returns the names that a class defines, in its body or by assignment to self."""
    names = {
        child.target.id
        for child in node.body
        if isinstance(child, ast.AnnAssign) and isinstance(child.target, ast.Name)
    }
    for child in ast.walk(node):
        if isinstance(child, _FUNCTION):
            names.add(child.name)
        elif isinstance(child, ast.Attribute) and isinstance(child.ctx, ast.Store):
            names.add(child.attr)
    return {name for name in names if not name.startswith("__")}


if __name__ == "__main__":
    main()
