"""What words say of the source is there."""

from __future__ import annotations

import ast
import re
from functools import cache

from test_architecture import PACKAGES, modules, ours, trees


def test_modules_that_are_named_in_words_exist() -> None:
    """In docstrings, comments and messages: by the dotted name from anywhere, by the
    last part of it from the same folder, and not by the module itself."""
    wrong = [
        f"{module}:{line} names {reference}"
        for module, path in modules()
        for line, text in enumerate(path.read_text().splitlines(), start=1)
        for reference in REFERENCE.findall(text)
        if not _is_there(reference, module)
    ]
    assert not wrong, "\n".join(wrong)


def test_no_comment_is_a_banner() -> None:
    """What parts a file has, its classes and the first lines of its docstrings say."""
    wrong = [
        f"{module}:{line}"
        for module, path in modules()
        for line, text in enumerate(path.read_text().splitlines(), start=1)
        if re.match(r"\s*#\s*[-=#*]{3}", text)
    ]
    assert not wrong, "\n".join(wrong)


REFERENCE = re.compile(r"`(zstrat(?:\.\w+)+|_[a-z][a-z0-9_]*(?:\.[A-Za-z]\w*)*)`")
"""What is in backticks, and is or may be the name of a module, or of a thing in one."""


def _is_there(reference: str, module: str) -> bool:
    """A module, or what it has; a name of one's own is no reference."""
    parts = reference.split(".")
    if not ours(reference):
        if parts[0] in _own_names(module):
            return True
        folder = module if module in PACKAGES else module.rpartition(".")[0]
        parts = [*folder.split("."), *parts]
        if ".".join(parts[: folder.count(".") + 2]) not in trees():
            return False
    found = next(n for n in range(len(parts), 0, -1) if ".".join(parts[:n]) in trees())
    owner, rest = ".".join(parts[:found]), parts[found:]
    return owner != module and (not rest or rest[0] in _own_names(owner))


@cache
def _own_names(module: str) -> set[str]:
    """All that a module defines, imports, or uses as an attribute or a parameter."""
    names = set()
    for node in ast.walk(trees()[module]):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                names.add(node.name)
            case ast.Name():
                names.add(node.id)
            case ast.Attribute():
                names.add(node.attr)
            case ast.arg() | ast.keyword():
                names.add(node.arg or "")
            case ast.alias():
                names.add(node.asname or node.name)
    return names
