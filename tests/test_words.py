"""Words of the source: the modules that they name exist, and the phrases that are gone
stay gone. ``python tests/test_words.py zstrat/ps`` prints where a package has them;
``--check``, for ``make lint``, fails if a package of `CLEAN` has one."""

from __future__ import annotations

import ast
import re
import sys
import tokenize
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from test_architecture import PACKAGES, modules, ours, trees

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[1]

CLEAN = (
    "daemons",
    "docs",
    "zstrat/checkpoint",
    "zstrat/cli",
    "zstrat/cluster",
    "zstrat/collectives",
    "zstrat/compat",
    "zstrat/config.py",
    "zstrat/contrib",
    "zstrat/coordinator",
    "zstrat/data",
    "zstrat/doors.py",
    "zstrat/errors.py",
    "zstrat/ids.py",
    "zstrat/launch",
    "zstrat/memory.py",
    "zstrat/optimizers",
    "zstrat/paths.py",
    "zstrat/ps",
    "zstrat/rows.py",
    "zstrat/saving",
    "zstrat/signals.py",
    "zstrat/strategy",
    "zstrat/streams.py",
    "zstrat/telemetry",
    "zstrat/testing",
    "zstrat/threads.py",
    "zstrat/tpu",
    "zstrat/transport",
    "zstrat/worker",
)
"""Folders and files without the phrases of `GONE`. Add each that is rewritten."""

GONE = {
    r"whoever|whomever": "the noun that it is",
    r"anew": "again",
    r"for ever": "forever, or without a deadline",
    r"any more": "no longer",
    r"in words": "leave it out",
    r"of its own accord": "by itself",
    r"brought together": "combined",
    r"of which a part is gone": "partly lost",
    r"that is so": "leave it out",
    r"goes on with|go on with": "continues, takes over",
    r"is told|are told|was told|were told|be told|to tell": "receives, to report",
    r"it tells|tells (?:the|of|what|who|how|that|it|them)": "reports, notifies",
    r"hears (?:of|from|what|that|nothing)|heard (?:of|from|nothing)": "receives",
    r"(?<!there\s)(?:is|are|was|were) (?-i:none)": "is not a ...",
    r"(?<!there\s)(?:is|are|was|were) no (?!longer|more|less|such)\w+": "is not a ...",
    r"farewells?|last words": "close message",
    r"hailed": "probed",
    r"leash": "the launcher's heartbeat timeout",
    r"heirs?|succession": "takeover",
    r"levelling|levelled": "rebalancing",
    r"dealt out|deals? out": "assigned, sharded, distributed",
    r"patience": "timeout",
    r"narrowing": "downcast",
    r"in turns": "sequential, round robin",
    r"beneath": "below, or the dependencies",
    r"there is no key": "unknown key",
}
"""Phrase (a regular expression of whole words, any case) -> plain words for it."""

GONE_NAMES = {
    r"told": "report",
    r"anew": "again",
    r"seldom|complaints?": "rate_limited_log",
    r"leash": "launcher_timeout",
    r"patience": "timeout",
    r"hailed": "probed",
    r"heirs?": "takeover",
    r"whoever": "the noun that it is",
}
"""Part of an identifier, between underscores or capitals -> a plain name."""

RIGHT: set[tuple[str, str]] = set()
"""File and word where a word of the tables is right."""


@pytest.mark.parametrize("folder", CLEAN)
def test_phrases_that_are_gone_stay_gone(folder: str) -> None:
    found = [
        f"{file}:{line}: {phrase!r}: write {plain}"
        for file, line, phrase, plain in phrases(folder)
    ]
    assert not found, "\n".join(found)


def test_each_exception_is_used() -> None:
    used = {
        (file, phrase)
        for folder in CLEAN
        for file, _, phrase, _ in phrases(folder, exceptions=False)
    }
    assert used >= RIGHT


def test_phrases_are_found(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.write_text('"""Who is\n    told it."""\nTaskTold = leash  # anew\n')
    found = [(line, phrase) for line, phrase, _ in _in_python(file)]
    assert sorted(found) == [(1, "is told"), (3, "anew"), (3, "leash"), (3, "told")]


def phrases(
    folder: str, *, exceptions: bool = True
) -> Iterator[tuple[str, int, str, str]]:
    """Yields file, line, phrase and the plain words for each phrase that is gone."""
    path = ROOT / folder
    files = sorted(path.rglob("*")) if path.is_dir() else [path]
    for file in files:
        if file.suffix not in (".md", ".py") or "__pycache__" in file.parts:
            continue
        name = file.relative_to(ROOT).as_posix()
        for line, phrase, plain in _in_file(file):
            if not (exceptions and (name, phrase) in RIGHT):
                yield name, line, phrase, plain


@cache
def _in_file(file: Path) -> list[tuple[int, str, str]]:
    if file.suffix != ".py":
        return list(_in_markdown(file))
    # Most files have none, which is seen without the tokens, which take much longer.
    text = file.read_text("utf-8")
    names = set(re.findall(r"[^\W\d]\w*", text))
    if any(map(_in_name, names)) or any(_in_text(text, 1)):
        return list(_in_python(file))
    return []


def _in_python(file: Path) -> Iterator[tuple[int, str, str]]:
    """Comments, docstrings and other strings, and identifiers."""
    with file.open("rb") as source:
        for token in tokenize.tokenize(source.readline):
            if token.type == tokenize.NAME:
                for part, plain in _in_name(token.string):
                    yield token.start[0], part, plain
            elif token.type in TEXTS:
                yield from _in_text(token.string, token.start[0])


@cache
def _in_name(name: str) -> list[tuple[str, str]]:
    words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
    return [
        (part, plain)
        for phrase, plain in GONE_NAMES.items()
        for part in words.split("_")
        if re.fullmatch(phrase, part)
    ]


TEXTS = {tokenize.COMMENT, tokenize.STRING} | (
    {tokenize.FSTRING_MIDDLE} if sys.version_info >= (3, 12) else set()
)


def _in_markdown(file: Path) -> Iterator[tuple[int, str, str]]:
    """Prose alone: blocks of code are checked where the code is."""
    text = re.sub(
        r"^```.*?^```",
        lambda block: "\n" * block[0].count("\n"),
        file.read_text("utf-8"),
        flags=re.DOTALL | re.MULTILINE,
    )
    yield from _in_text(text, 1)


def _in_text(text: str, first: int) -> Iterator[tuple[int, str, str]]:
    for phrase, plain in GONE.items():
        # A phrase may go on in the next line, of a docstring or of joined strings.
        spaced = phrase.replace(" ", r"\s+")
        for match in re.finditer(rf"\b(?:{spaced})\b", text, re.IGNORECASE):
            line = first + text.count("\n", 0, match.start())
            yield line, " ".join(match[0].lower().split()), plain


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


if __name__ == "__main__":
    checks = sys.argv[1:] == ["--check"]
    is_clean = True
    for folder in CLEAN if checks else sys.argv[1:] or ("zstrat", "daemons", "docs"):
        for file, line, phrase, plain in phrases(folder):
            print(f"{file}:{line}: {phrase!r}: write {plain}")
            is_clean = False
    sys.exit(checks and not is_clean)
