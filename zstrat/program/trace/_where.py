"""Finds the user's own line, for errors about what a step function does.

The user's line is the innermost frame outside of Python's library, installed packages
and zstrat; a step that lives in an installed package is found as the innermost frame
outside of jax and zstrat.
"""

from __future__ import annotations

import inspect
import sysconfig
import traceback
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Final

from zstrat.variables import is_machinery

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import TracebackType

_LIBRARY: Final = tuple(
    {f"{sysconfig.get_path(name)}/" for name in ("stdlib", "purelib", "platlib")}
)
# Of other interpreters and of `pip install --user`.
_PACKAGES: Final = ("/site-packages/", "/dist-packages/")


_claimed: Final[ContextVar[str | None]] = ContextVar("zstrat_claimed", default=None)


@contextmanager
def claimed(where: str) -> Iterator[None]:
    """What is done inside is done on behalf of another line, which `here` tells."""
    before = _claimed.set(where)
    try:
        yield
    finally:
        _claimed.reset(before)


def here() -> str:
    """``file:line (function)`` of the user's code that is running now."""
    if (where := _claimed.get()) is not None:
        return where
    walked = traceback.walk_stack(inspect.currentframe())
    frames = [(f.f_code.co_filename, line, f.f_code.co_name) for f, line in walked]
    return _chosen(frames[::-1])


def raised_at(error: BaseException) -> str:
    """``file:line (function)`` of the user's code that ``error`` came through."""
    return _chosen(_frames(error.__traceback__))


def is_installed(filename: str) -> bool:
    """Whether the file belongs to Python's library or to an installed package."""
    return filename.startswith(_LIBRARY) or any(p in filename for p in _PACKAGES)


def _frames(trace: TracebackType | None) -> list[tuple[str, int, str]]:
    walked = traceback.walk_tb(trace)
    return [(f.f_code.co_filename, line, f.f_code.co_name) for f, line in walked]


def _chosen(frames: Sequence[tuple[str, int, str]]) -> str:
    foreign = [frame for frame in frames if not is_machinery(frame[0])]
    own = [frame for frame in foreign if not is_installed(frame[0])]
    for candidates in (own, foreign):
        if candidates:
            filename, line, name = candidates[-1]
            return f"{filename}:{line} (in {name})"
    return "an unknown line"
