"""Licences and documentation that lie on this machine, as characters to learn from.

Where Debian, the Python standard library and installed packages keep them. Files that
are copies of each other count once, what is not plain text is left out, and one of
every twenty pieces is kept for the test.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import sysconfig
from pathlib import Path

import numpy as np

ALPHABET = "\n" + "".join(map(chr, range(32, 127)))
"""Printable ASCII; every other character counts as a space."""

_MOST = 4_000_000
"""Characters: enough for minutes of training, read in a moment."""
_SMALLEST = 500
_PIECE = 2048


def load_texts(most=_MOST):
    """Numbers of characters of ``ALPHABET``, uint8 [n]: for training, for the test."""
    seen, parts, size = set(), [], 0
    for path in _paths():
        text = _read(path)
        digest = hashlib.sha256(text).digest()
        if len(text) < _SMALLEST or digest in seen:
            continue
        seen.add(digest)
        parts.append(text)
        size += len(text)
        if size >= most:
            break
    table = np.full(256, ALPHABET.index(" "), np.uint8)
    table[np.frombuffer(ALPHABET.encode(), np.uint8)] = np.arange(len(ALPHABET))
    characters = table[np.frombuffer(b"\n".join(parts)[:most], np.uint8)]
    pieces = characters[: len(characters) // _PIECE * _PIECE].reshape(-1, _PIECE)
    is_test = np.arange(len(pieces)) % 20 == 19
    return pieces[~is_test].ravel(), pieces[is_test].ravel()


def _paths():
    """Where texts are, the common ones first."""
    yield from sorted(Path("/usr/share/common-licenses").glob("*"))
    yield from sorted(Path("/usr/share/doc").glob("*/copyright"))
    library = Path(sysconfig.get_path("stdlib"))
    yield from sorted(library.rglob("*.txt"))
    yield from sorted(library.rglob("*.rst"))
    for package in sorted(importlib.metadata.distributions(), key=lambda d: d.name):
        for file in package.files or ():
            if file.suffix in ("", ".txt", ".md", ".rst") and "dist-info" in str(file):
                yield Path(package.locate_file(file))


def _read(path):
    try:
        data = path.read_bytes() if path.is_file() else b""
    except OSError:
        return b""
    return b"" if b"\0" in data else data
