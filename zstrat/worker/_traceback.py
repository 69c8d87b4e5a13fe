"""Tracebacks as the user wants them: their own lines, not the machinery around them."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Final

import jax

_MACHINERY: Final = tuple(
    str(Path(module).parent) + "/" for module in (Path(__file__).parent, jax.__file__)
)
"""Folders whose frames are left out: zstrat itself, and jax with its tracing."""

_CHAIN: Final = 20
"""Causes of causes that are looked at; a longer chain is a loop of the program."""


def trim(error: BaseException) -> BaseException:
    """Takes the frames of zstrat and jax out of the error's tracebacks and returns it.

    An error without any line of the user's keeps all of its frames: then the machinery
    is what somebody has to look at.
    """
    seen: BaseException | None = error
    for _ in range(_CHAIN):
        if seen is None:
            break
        seen.__traceback__ = _trimmed(seen.__traceback__) or seen.__traceback__
        seen = seen.__cause__ or (
            None if seen.__suppress_context__ else seen.__context__
        )
    return error


def _trimmed(trace: TracebackType | None) -> TracebackType | None:
    kept: list[TracebackType] = []
    while trace is not None:
        if not trace.tb_frame.f_code.co_filename.startswith(_MACHINERY):
            kept.append(trace)
        trace = trace.tb_next
    chain: TracebackType | None = None
    for part in reversed(kept):
        chain = TracebackType(chain, part.tb_frame, part.tb_lasti, part.tb_lineno)
    return chain
