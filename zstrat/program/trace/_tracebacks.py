"""Tracebacks as users want them: their own lines, not the machinery around them.

Law of the file: frames are hidden where an error leaves zstrat, at a public call or on
its way to another process, and never if ``ZSTRAT_TRACEBACK=full``. What is not caught
as an Exception (KeyboardInterrupt, a cancellation) is left alone.
"""

from __future__ import annotations

import os
from types import TracebackType
from typing import TYPE_CHECKING, Final

from zstrat.config import environment
from zstrat.variables import is_machinery

if TYPE_CHECKING:
    from collections.abc import Iterator

_LIBRARY: Final = f"{os.path.dirname(os.__file__)}/"
_CHAIN: Final = 20
"""Causes of causes that are looked at; a longer chain is a loop of the program."""
_NOTE: Final = "Frames of zstrat and jax are hidden; ZSTRAT_TRACEBACK=full shows them."


def hide_frames(error: Exception) -> None:
    """Takes the frames of zstrat and jax, and what they call in Python's library, out
    of the tracebacks of the error and its causes. Public calls do so before they raise:
    the frame of the caller is put above what is left.
    """
    if environment().get("ZSTRAT_TRACEBACK") == "full":
        return
    for each in _chain(error):
        each.__traceback__ = _trimmed(each.__traceback__)
    _say(error)


def trim(error: BaseException) -> BaseException:
    """The same for an error that goes to another process; returns it.

    One without any line of the user's keeps all of its frames: then the machinery is
    what somebody has to look at.
    """
    if environment().get("ZSTRAT_TRACEBACK") != "full":
        for each in _chain(error):
            each.__traceback__ = _trimmed(each.__traceback__) or each.__traceback__
    return error


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error, and those that are printed above it."""
    seen: BaseException | None = error
    for _ in range(_CHAIN):
        if seen is None:
            return
        yield seen
        hidden = seen.__suppress_context__
        seen = seen.__cause__ or (None if hidden else seen.__context__)


def _trimmed(trace: TracebackType | None) -> TracebackType | None:
    kept: list[TracebackType] = []
    is_hidden = True  # a thread of ours begins in Python's library
    while trace is not None:
        filename = trace.tb_frame.f_code.co_filename
        is_hidden = is_machinery(filename) or (is_hidden and _is_library(filename))
        if not is_hidden:
            kept.append(trace)
        trace = trace.tb_next
    chain: TracebackType | None = None
    for part in reversed(kept):
        chain = TracebackType(chain, part.tb_frame, part.tb_lasti, part.tb_lineno)
    return chain


def _is_library(filename: str) -> bool:
    return filename.startswith(_LIBRARY) and "/site-packages/" not in filename


def _say(error: Exception) -> None:
    """Once, where anybody may have set notes to anything."""
    notes = getattr(error, "__notes__", [])
    if isinstance(notes, list) and not any(_NOTE in str(note) for note in notes):
        error.add_note(_NOTE)
