"""The user's line that an error names, and tracebacks without frames of zstrat.

The user's line is the innermost frame outside of Python's library, installed packages
and zstrat; if the step is in an installed package, the innermost frame outside of jax
and zstrat.

Law of tracebacks: frames are hidden where an error leaves zstrat, at a public call or
on its way to another process, and never if ``ZSTRAT_TRACEBACK=full``. Exceptions that
are not an `Exception` (KeyboardInterrupt, a cancellation) keep all frames.
"""

from __future__ import annotations

import inspect
import os
import sysconfig
import traceback
from contextlib import contextmanager
from contextvars import ContextVar
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

from zstrat.config import environment
from zstrat.errors import is_refusal
from zstrat.variables import is_machinery

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


_LIBRARY: Final = tuple(
    {f"{sysconfig.get_path(name)}/" for name in ("stdlib", "purelib", "platlib")}
)
# Of other interpreters and of `pip install --user`.
_PACKAGES: Final = ("/site-packages/", "/dist-packages/")


_claimed: Final[ContextVar[str | None]] = ContextVar("zstrat_claimed", default=None)


@contextmanager
def claimed(where: str) -> Iterator[None]:
    """Makes `here` return the line ``where`` for the code inside of the block."""
    before = _claimed.set(where)
    try:
        yield
    finally:
        _claimed.reset(before)


def here() -> str:
    """Returns ``file:line (in function)`` of the user's code that is running now."""
    if (where := _claimed.get()) is not None:
        return where
    walked = traceback.walk_stack(inspect.currentframe())
    # The innermost frame last, as in a traceback.
    frames = [(f.f_code.co_filename, line, f.f_code.co_name) for f, line in walked]
    return _chosen(frames[::-1])


def raised_at(error: BaseException) -> str:
    """Returns ``file:line (in function)`` of the user's code that raised ``error``."""
    return _chosen(_frames(error.__traceback__))


def written_at(*eqns: Any) -> str:
    """Returns ``file:line (in function)`` of the user's code that made an equation: the
    first one for which the line is known."""
    traces = [eqn.source_info.traceback for eqn in eqns[::-1]]
    frames = [f for trace in traces if trace for f in trace.frames[::-1]]
    return _chosen([(f.file_name, f.line_num, f.function_name) for f in frames])


def is_installed(filename: str) -> bool:
    """Returns whether the file belongs to Python's library or to an installed
    package."""
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


_PYTHON: Final = f"{os.path.dirname(os.__file__)}/"
_CHAIN: Final = 20
"""Most causes of causes to follow; a longer chain is a cycle."""
_NOTE: Final = "Frames of zstrat and jax are hidden; ZSTRAT_TRACEBACK=full shows them."
_NOTE_OF_JAX: Final = "For simplicity, JAX has removed its internal frames"


def hide_frames(error: Exception) -> None:
    """Removes the frames of zstrat and jax, and of library code that they call, from
    the tracebacks of an error and its causes.

    Public calls use this before they raise; Python then adds the frame of the caller.
    """
    if environment().get("ZSTRAT_TRACEBACK") == "full":
        return
    for cause in _chain(error):
        cause.__traceback__ = _trimmed(cause.__traceback__)
        _remove_note_of_jax(cause)
    notes = getattr(error, "__notes__", [])  # users may set them to anything
    # Once, as an error may leave through several public calls.
    if isinstance(notes, list) and not any(_NOTE in str(note) for note in notes):
        error.add_note(_NOTE)


def trim(error: BaseException) -> BaseException:
    """Hides the frames of zstrat in an error that is sent to another process; returns
    the error.

    An error without a line of the user keeps all frames, because it is about zstrat,
    unless a ``raise`` there made it: its message is for the user then, and says what a
    cause without a line of the user means.
    """
    if environment().get("ZSTRAT_TRACEBACK") != "full":
        is_refused = False
        for cause in _chain(error):
            trace = _trimmed(cause.__traceback__)
            is_refused = is_refused or is_refusal(cause)
            if trace is not None or is_refused:
                cause.__traceback__ = trace
                _remove_note_of_jax(cause)
    return error


def _remove_note_of_jax(error: BaseException) -> None:
    """Removes jax's note that its frames are hidden: `_NOTE` says so, or the lines that
    are left are those of the user."""
    notes = getattr(error, "__notes__", None)
    if isinstance(notes, list):
        notes[:] = [note for note in notes if _NOTE_OF_JAX not in str(note)]


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yields the error, and the causes and contexts that Python prints above it."""
    seen: BaseException | None = error
    for _ in range(_CHAIN):
        if seen is None:
            return
        yield seen
        hidden = seen.__suppress_context__
        seen = seen.__cause__ or (None if hidden else seen.__context__)


def _trimmed(trace: TracebackType | None) -> TracebackType | None:
    kept: list[TracebackType] = []
    is_hidden = True  # threads of ours start in Python's library
    while trace is not None:
        filename = trace.tb_frame.f_code.co_filename
        # Packages are installed in a folder of the library.
        is_library = filename.startswith(_PYTHON) and "/site-packages/" not in filename
        # Library code that ours has called goes with it: thread pools, functools,
        # contextlib.
        is_hidden = is_machinery(filename) or (is_hidden and is_library)
        if not is_hidden:
            kept.append(trace)
        trace = trace.tb_next
    chain: TracebackType | None = None
    for part in reversed(kept):
        chain = TracebackType(chain, part.tb_frame, part.tb_lasti, part.tb_lineno)
    return chain
