"""tests/messages.txt has every sentence that zstrat may say, as the code has it.

Errors, warnings, logs and help, by file, with what is filled in between braces. A
change of words shows here, as a user reads it; other tests assert types, attributes,
names and remedies. `make messages` writes the file.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Final

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "tests" / "messages.txt"

SENTENCE = re.compile(r"[A-Za-z`'}),:;][,:;]? +[a-z]{2,}")
"""What sets a sentence apart from a key, a path or a format."""
STRINGS: Final = (ast.Constant, ast.JoinedStr)
TABLE: Final = 1000
"""A longer text is a table: each of its lines is a sentence."""


def messages(source: str) -> list[str]:
    """The sentences of a file, in its order, each once."""
    nodes = list(ast.walk(ast.parse(source)))
    within: set[ast.AST] = set()
    for node in nodes:
        if isinstance(node, ast.Expr):  # a docstring
            within.add(node.value)
        elif isinstance(node, ast.JoinedStr):
            within.update(set(ast.walk(node)) - {node})
    found = []
    for node in nodes:
        if isinstance(node, STRINGS) and node not in within:
            text = written(node)
            lines = text.split("\n") if len(text) > TABLE else [text]
            for row, line in enumerate(lines):
                line = " ".join(line.split())
                if SENTENCE.search(line):
                    found.append((node.lineno, node.col_offset, row, line))
    return list(dict.fromkeys(line for *_, line in sorted(found)))


def written(node: ast.Constant | ast.JoinedStr) -> str:
    """A string as it stands in the code; nothing for other constants."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    return "".join(
        f"{{{ast.unparse(part.value)}}}"
        if isinstance(part, ast.FormattedValue)
        else written(part)
        for part in node.values
    )


def page() -> str:
    """What the file is to contain."""
    paths = [*(ROOT / "zstrat").rglob("*.py"), *(ROOT / "daemons").rglob("*.py")]
    of = {path.relative_to(ROOT): messages(path.read_text()) for path in sorted(paths)}
    blocks = ["\n".join([f"# {path}", *found]) for path, found in of.items() if found]
    return "\n\n".join(blocks) + "\n"


def test_every_message_is_in_the_file() -> None:
    now, before = page(), PAGE.read_text()
    new = set(now.splitlines()) ^ set(before.splitlines())
    assert not new, "run `make messages`, and read what it changes"
    assert now == before, "run `make messages`"


def test_a_message_is_what_the_code_has() -> None:
    source = '''
def f(x):
    """A docstring that says nothing to users."""
    if x:
        raise ValueError(f"x={x!r}: expected a number, "
                         "or None")
    return "a_key", "two words"
'''
    assert messages(source) == ["x={x}: expected a number, or None", "two words"]


def test_each_line_of_a_table_is_a_message() -> None:
    lines = [f"n{number} The number of them." for number in range(50)]
    table = "\n".join(lines)
    assert messages(f"TABLE = {table!r}") == lines


if __name__ == "__main__":
    PAGE.write_text(page())
