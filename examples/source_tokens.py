"""The Python standard library's own source, as text to learn from.

Its names and keywords in the order of the files: no strings, no comments, no operators.
About 1.7 million of them are on every machine that runs Python. Splitting them takes
some seconds, so the result is kept in a cache.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import sysconfig
import tempfile
import zipfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np

# A string or a comment swallows the names in it; alternatives are tried in order, so
# what is left for the last one is code. `tokenize` says the same, ten times slower.
_TOKEN = re.compile(
    r"""
    [rRbBuUfF]{0,2}(?:
        \"\"\"(?:[^\\]|\\.)*?\"\"\" | '''(?:[^\\]|\\.)*?'''
      | "(?:[^"\\\n]|\\.)*"         | '(?:[^'\\\n]|\\.)*'
    )
  | \#[^\n]*
  | \d[\w.]*
  | ([^\W\d]\w*)
    """,
    re.VERBOSE | re.DOTALL,
)


@dataclass(frozen=True)
class Corpus:
    """``tokens`` [n] are numbers of ``words``, which are sorted by falling count."""

    words: list[str]
    counts: np.ndarray
    tokens: np.ndarray
    digest: str
    """Changes with the files and with what was left out."""

    def number(self, word):
        """Its place in ``words``.

        Raises:
            KeyError: It was not seen often enough.
        """
        try:
            return self.words.index(word)
        except ValueError:
            raise KeyError(f"{word!r} is not among {len(self.words)} words") from None


def split(source):
    """Names and keywords of Python source."""
    return [token for token in _TOKEN.findall(source) if token]


def source_files(packages=None):
    """The files of the standard library, in order; ``packages`` are its first-level
    names ("threading", "json") to take, None for all of them."""
    root = Path(sysconfig.get_paths()["stdlib"])
    found = []
    for entry in sorted(root.iterdir()):
        name = entry.name.removesuffix(".py")
        if packages is None or name in packages:
            # What was installed beside the library is not its own.
            if entry.is_dir() and name != "site-packages":
                found += sorted(entry.rglob("*.py"))
            elif entry.suffix == ".py":
                found.append(entry)
    return found


def load(cache, min_count, packages=None):
    """The corpus, from the folder ``cache`` if it was made before.

    Words that are seen less than ``min_count`` times are left out of the text.
    """
    files = source_files(packages)
    digest = _digest(files, min_count)
    path = Path(cache) / f"stdlib-{platform.python_version()}-{digest}.npz"
    try:
        # A file that numpy opens itself stays open if it is not what it should be.
        with open(path, "rb") as file, np.load(file) as stored:
            words = str(stored["words"]).split()
            return Corpus(words, stored["counts"], stored["tokens"], digest)
    except (OSError, KeyError, ValueError, EOFError, zipfile.BadZipFile):
        pass  # not there, or cut short by whatever ended the program that wrote it
    corpus = count(files, min_count, digest)
    _store(path, corpus)
    return corpus


def count(files, min_count, digest=""):
    """The corpus of some files."""
    text = []
    for path in files:
        text += split(path.read_text("utf-8", errors="replace"))
    seen = Counter(text).most_common()
    words = [word for word, times in seen if times >= min_count]
    number = {word: i for i, word in enumerate(words)}
    tokens = np.array([number[word] for word in text if word in number], np.int32)
    counts = np.bincount(tokens, minlength=len(words))
    return Corpus(words, counts, tokens, digest)


def default_cache():
    """Where programs of this user keep what they can make again."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "zstrat"


def _digest(files, min_count):
    state = hashlib.sha256(f"{_TOKEN.pattern} {min_count}".encode())
    for path in files:
        state.update(f"{path} {path.stat().st_size}\n".encode())
    return state.hexdigest()[:12]


def _store(path, corpus):
    """Whole or not at all: several programs may begin at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        words = np.array(" ".join(corpus.words))
        np.savez(file, words=words, counts=corpus.counts, tokens=corpus.tokens)
    os.replace(file.name, path)
